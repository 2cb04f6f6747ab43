"""What makes two jobs the same."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.base import leafwise, targets
from ptq.numerics.patterns import NM, Unstructured
from ptq.numerics.schemes import scheme
from ptq.numerics.stats import Gram
from ptq.pipeline.digest import digest
from ptq.transforms.gptq import gptq
from ptq.transforms.sparsegpt import sparsegpt

W4 = scheme("W4A16", group_size=16)


def clipped(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda w: w.clamp(-limit, limit)


MAKERS: dict[str, Callable[[], Any]] = {
    "gptq": lambda: gptq(W4),
    "gptq, other damping": lambda: gptq(W4, damp=0.02),
    "gptq, other groups": lambda: gptq(scheme("W4A16", group_size=32)),
    "gptq somewhere": lambda: targets("re:.*q_proj", gptq(W4)),
    "sparsegpt": lambda: sparsegpt(NM(keep=2, of=4)),
    "sparsegpt, other pattern": lambda: sparsegpt(Unstructured(0.5)),
    "one's own": lambda: leafwise((), clipped(1.0)),
    "one's own, another number": lambda: leafwise((), clipped(2.0)),
    "one's own, other code": lambda: leafwise((), lambda w: w.clamp(-1.0, 1.5)),
    "a node": lambda: Gram.measure(torch.arange(6.0).view(2, 3)),
    "a node with other numbers": lambda: Gram.measure(torch.arange(6.0).view(2, 3) + 1),
    "a long tensor": lambda: torch.zeros(5000),
    "a long tensor, changed in the middle": lambda: torch.zeros(5000).index_fill(0, torch.tensor(2500), 1),
    "the same bytes as another type": lambda: torch.zeros(5000, dtype=torch.int32),
    "a public function": lambda: ptq.dense,
}


@pytest.mark.parametrize("what", MAKERS)
def test_equal_when_made_again_and_only_then(what: str) -> None:
    made = digest(MAKERS[what]())
    assert made == digest(MAKERS[what]())
    assert all(made != digest(other()) for name, other in MAKERS.items() if name != what)


def test_what_leads_back_to_itself() -> None:
    loop: list[Any] = []

    def itself() -> Any:
        return loop, itself

    assert digest(itself) == digest(itself)


LEVELS = 4


def reads_a_constant() -> int:
    return LEVELS


def test_what_a_function_reads_of_its_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(reads_a_constant)
    assert digest(reads_a_constant) == before
    monkeypatch.setitem(globals(), "LEVELS", 64)
    assert digest(reads_a_constant) != before


HELPERS = """
from ptq.base import leafwise
import helpers_below as below

LIMIT = {limit}

class Clip:
    __slots__ = ("high",)

    def __init__(self, high):
        self.high = high

    def __call__(self, w):
        return w.clamp({low}, self.high)

def bounded(w):
    return (lambda v: below.scaled(v))(w.clamp(-LIMIT, LIMIT))

by_function = lambda: leafwise((), lambda w: bounded(w))
by_object = lambda: leafwise((), Clip({high}))
"""
BELOW = "FACTOR = {factor}\n\ndef scaled(w):\n    return w * FACTOR {sign} 1\n"
PLAIN = {"limit": 1, "low": 0, "high": 1, "factor": 2, "sign": "+"}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("by_function", {"limit": 2}),
        ("by_function", {"factor": 3}),
        ("by_function", {"sign": "-"}),
        ("by_object", {"high": 2}),
        ("by_object", {"low": -1}),
    ],
)
def test_a_user_s_other_modules_count(
    kind: str, change: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(where: str, **change: object) -> str:
        """The digest of what the same two modules make, but for the change, wherever they lie."""
        (tmp_path / where).mkdir()
        (tmp_path / where / "helpers_below.py").write_text(BELOW.format(**PLAIN | change))
        (tmp_path / where / "helpers.py").write_text(HELPERS.format(**PLAIN | change))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / where))
            for name in ("helpers", "helpers_below"):
                patch.delitem(sys.modules, name, raising=False)
            return digest(getattr(importlib.import_module("helpers"), kind)())

    assert made("here") == made("there") != made("changed", **change)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (functools.partial(int, base=2), functools.partial(int, base=8)),
        (np.arange(5000), np.arange(5000) + (np.arange(5000) == 2500)),
        (nn.Linear(2, 2), nn.Linear(2, 2)),
    ],
    ids=["partial", "array", "module"],
)
def test_contents_count_that_do_not_print(one: Any, other: Any) -> None:
    assert digest(one) == digest(copy.deepcopy(one))
    assert digest(one) != digest(other)
