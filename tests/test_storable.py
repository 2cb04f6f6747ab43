"""A format that cannot hold what a recipe makes is refused before anything is read or written, or never."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ptq.base import Transform, chain
from ptq.errors import BadInput
from ptq.io import save as saving
from ptq.io.hub import load, open_model
from ptq.io.save import finished, save
from ptq.io.storable import FORMATS
from ptq.numerics.leaves import dense
from ptq.numerics.patterns import NM, Unstructured
from ptq.numerics.schemes import scheme
from ptq.pipeline.run import Run, compress
from ptq.transforms.gptq import gptq
from ptq.transforms.magnitude import magnitude
from ptq.transforms.rtn import rtn
from ptq.transforms.sparsegpt import sparsegpt

W4 = scheme("W4A16", group_size=16)
HALF, PAIRS = Unstructured(0.5), NM(keep=2, of=4)
STAGES: dict[str, tuple[tuple[Transform, ...], str]] = {
    "int4": ((rtn(W4),), "pack-quantized int-quantized naive-quantized"),
    "int4, asymmetric": ((rtn(scheme("W4A16_ASYM", group_size=16)),), "pack-quantized int-quantized naive-quantized"),
    "int4 of gptq": ((gptq(W4),), "pack-quantized int-quantized naive-quantized"),
    "float8": ((rtn(scheme("FP8A16")),), "float-quantized naive-quantized"),
    "blocks": ((rtn(scheme("FP8A16", block=(16, 16))),), "float-quantized naive-quantized"),
    "nvfp4": ((rtn(scheme("NVFP4A16")),), "nvfp4-pack-quantized"),
    "mxfp4": ((rtn(scheme("MXFP4A16")),), "mxfp4-pack-quantized"),
    "mxfp6": ((rtn(scheme("MXFP6A16")),), "mxfp6-pack-quantized"),
    "mxfp8": ((rtn(scheme("MXFP8A16")),), "mxfp8-quantized"),
    "half": ((magnitude(HALF),), "sparse-bitmask"),
    "2 of 4": ((magnitude(PAIRS),), "sparse-bitmask sparse-24-bitmask"),
    "2 of 4 and int4": (
        (sparsegpt(PAIRS, W4),),
        "pack-quantized int-quantized naive-quantized sparse-bitmask sparse-24-bitmask",
    ),
    "2 of 4, then float8": (
        (magnitude(PAIRS), rtn(scheme("FP8A16"))),
        "float-quantized naive-quantized sparse-bitmask sparse-24-bitmask",
    ),
    "half and mxfp4": ((sparsegpt(HALF, scheme("MXFP4A16")),), "mxfp4-pack-quantized"),
}
ONLY_PRUNED = ("half", "2 of 4")


def run_of(source: Path, name: str) -> Run:
    stages, _ = STAGES[name]
    ids = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))
    return compress(open_model(source), [ids], *stages)


def holds(form: str, name: str) -> bool:
    """Whether nothing is lost: what is only pruned is stored dense, and noted, in formats of codes."""
    bits = form in ("sparse-bitmask", "sparse-24-bitmask")
    return form in ("dense", "frozen", *STAGES[name][1].split()) or (name in ONLY_PRUNED and not bits)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", STAGES)
def test_refused_at_once_or_never(
    name: str, form: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    opened = saving.opened
    monkeypatch.setattr(saving, "opened", lambda *args: begun.append(args) or opened(*args))
    out = tmp_path / "out"
    if holds(form, name):
        assert finished(run_of(tiny_llama, name), out, format=form) == 0
        saved = save(run_of(tiny_llama, name), out, format=form)
        assert len(begun) == 1
        back, made = load(saved.path).params, run_of(tiny_llama, name).model.params
        assert all(torch.equal(dense(back[n]), dense(leaf)) for n, leaf in made.items())
        return
    message = rf"^model\.layers\.0\.self_attn\.q_proj\.weight: cannot be stored as {form}: .*; choose another format"
    for attempt in (save, finished):
        with pytest.raises(BadInput, match=message):
            attempt(run_of(tiny_llama, name), out, format=form)
    assert not begun
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_plain_linear_is_stored_dense_and_noted(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    run = compress(open_model(model_dir("gpt2")), None, magnitude(PAIRS))
    saved = save(run, tmp_path / "out", format="sparse-bitmask")
    assert saved.notes["transformer.h.0.attn.c_attn.weight"] == (
        "stored dense: bits and values are kept for plain linears only"
    )


def test_a_stage_that_nobody_foresees_is_judged_when_it_comes(tiny_llama: Path, tmp_path: Path) -> None:
    plain = rtn(W4)
    looks = plain._replace(apply=lambda state, stats, sites: plain.apply(_looked(state), stats, sites))
    run = compress(open_model(tiny_llama), None, chain(looks))
    with pytest.raises(BadInput, match="cannot be stored as float-quantized"):
        save(run, tmp_path / "out", format="float-quantized")
    assert not (tmp_path / "out").exists()


def _looked(state: Any) -> Any:
    assert all(float(leaf.sum()) for leaf in state.params.values())  # meta tensors have no values to look at
    return state
