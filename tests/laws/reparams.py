"""Laws of changes of variables: the function stays, and statistics move with the parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from laws.shared import IN, OUT, close, untouched
from ptq.base import Link, State, Transform
from ptq.numerics.leaves import Transposed, dense, linear
from ptq.numerics.stats import KINDS
from strategies import randn


def case(bias: bool = True, offset: float = 0.0) -> tuple[State, dict[str, tuple[str, ...]], tuple[Link, ...]]:
    params = {"n.weight": randn(7, IN), "a.weight": randn(8, OUT, IN), "b.weight": Transposed(randn(9, 4, IN))}
    params |= {"n.bias": randn(10, IN)} if bias else {}
    sites = {"a.weight": ("a.weight", "b.weight")}
    return State(params), sites, (Link("n.weight", ("a.weight", "b.weight"), offset),)


def block(state: State, x: Tensor, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    """The norm's output and what its two readers make of it."""
    p = state.params
    y = (p["n.weight"] + offset) * x + p.get("n.bias", 0.0)
    return y, linear(y, p["a.weight"]), y @ dense(p["b.weight"])


def keeps_the_function(make: Callable[[], Transform]) -> None:
    for bias, offset in itertools.product((True, False), (0.0, 1.0)):
        state, sites, links = case(bias, offset)
        new, _ = make().apply(state, {}, sites, links=links)
        x = randn(11, 5, IN)
        assert not torch.equal(new.params["a.weight"], state.params["a.weight"])
        for before, after in zip(block(state, x, offset)[1:], block(new, x, offset)[1:], strict=True):
            assert torch.allclose(before, after, rtol=1e-10, atol=1e-10)


def moves_statistics(make: Callable[[], Transform]) -> None:
    for offset in (0.0, 1.0):
        state, sites, links = case(offset=offset)
        x = randn(11, 50, IN)
        old = block(state, x, offset)[0]
        stats = {"a.weight": {kind: cls.measure(old) for kind, cls in KINDS.items()}}
        new, moved = make().apply(state, stats, sites, links=links)
        inputs = block(new, x, offset)[0]
        for kind, cls in KINDS.items():
            close(moved["a.weight"][kind], cls.measure(inputs))


def changes_no_input(make: Callable[[], Transform]) -> None:
    state, sites, links = case()
    stats = {"a.weight": {kind: cls.measure(randn(1, 9, IN)) for kind, cls in KINDS.items()}}
    with untouched((state, stats)):
        make().apply(state, stats, sites, links=links)
