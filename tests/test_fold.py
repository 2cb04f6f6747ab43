"""Folding of norms: refusals and dtypes; its laws are in contracts.py."""

from __future__ import annotations

import pytest
import torch

from ptq.base import Link, State
from ptq.errors import BadInput
from ptq.numerics.fits import fit, nearest
from ptq.numerics.leaves import Transposed, dense
from ptq.numerics.schemes import scheme
from ptq.numerics.stats import SecondMoment
from ptq.transforms.fold import fold_norms
from strategies import randn

SITES = {"a.weight": ("a.weight", "b.weight")}
BOTH = Link("n.weight", ("a.weight", "b.weight"))


def state(norm: torch.Tensor | None = None) -> State:
    n = randn(0, 8) if norm is None else norm
    return State({"n.weight": n, "a.weight": randn(1, 4, 8), "b.weight": randn(2, 3, 8)})


def test_it_needs_links_and_no_data() -> None:
    transform = fold_norms()
    assert (transform.kind, transform.scope, transform.needs) == ("reparam", "block", {"links"})
    assert transform.init(state(), SITES, links=(BOTH,)) == {}


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_norm_becomes_plain_and_readers_take_its_weight(offset: float) -> None:
    before = state()
    after, _ = fold_norms().apply(before, {}, SITES, links=(BOTH._replace(offset=offset),))
    factor = before.params["n.weight"] + offset
    assert torch.equal(after.params["n.weight"], torch.full((8,), 1 - offset, dtype=torch.float64))
    assert torch.equal(after.params["a.weight"], before.params["a.weight"] * factor)


def test_16_bit_weights_are_multiplied_in_float32() -> None:
    before = State({name: t.bfloat16() for name, t in state().params.items()})
    after, _ = fold_norms().apply(before, {}, SITES, links=(BOTH._replace(offset=1.0),))
    exact = before.params["a.weight"].float() * (before.params["n.weight"].float() + 1)
    assert torch.equal(after.params["a.weight"], exact.bfloat16())


def test_a_reader_stored_transposed_stays_so() -> None:
    before = state()
    params = before.params | {"a.weight": Transposed(before.params["a.weight"])}
    after, _ = fold_norms().apply(State(params), {}, SITES, links=(BOTH,))
    assert isinstance(after.params["a.weight"], Transposed)
    assert torch.equal(dense(after.params["a.weight"]).mT, before.params["a.weight"] * before.params["n.weight"])


def test_stacked_experts_are_readers_too() -> None:
    before = State({"n.weight": randn(0, 8), "a.weight": randn(1, 3, 4, 8)})
    after, _ = fold_norms().apply(before, {}, {"a.weight": ("a.weight",)}, links=(Link("n.weight", ("a.weight",)),))
    assert torch.equal(after.params["a.weight"], before.params["a.weight"] * before.params["n.weight"])


def test_other_sites_and_weights_are_left_alone() -> None:
    before = State({**state().params, "c.weight": randn(3, 2, 8)})
    stats = {s: {"second_moment": SecondMoment.measure(randn(4, 9, 8))} for s in ("a.weight", "c.weight")}
    after, moved = fold_norms().apply(before, stats, {**SITES, "c.weight": ("c.weight",)}, links=(BOTH,))
    assert after.params["c.weight"] is before.params["c.weight"]
    assert moved["c.weight"] is stats["c.weight"]
    assert not torch.equal(moved["a.weight"]["second_moment"].sum, stats["a.weight"]["second_moment"].sum)


def test_zeros_are_refused_by_name() -> None:
    norm = randn(0, 8).index_fill(0, torch.tensor([2, 5]), 0.0)
    with pytest.raises(BadInput, match=r"^n\.weight: 2 of 8 factors are 0 and cannot be folded; leave this norm out"):
        fold_norms().apply(state(norm), {}, SITES, links=(BOTH,))
    with pytest.raises(BadInput, match=r"^n\.weight: 8 of 8 factors are 0"):
        fold_norms().apply(state(-torch.ones(8)), {}, SITES, links=(BOTH._replace(offset=1.0),))


def test_a_reader_that_is_not_linked_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"^n\.weight: b\.weight reads its output too and would change"):
        fold_norms().apply(state(), {}, SITES, links=(Link("n.weight", ("a.weight",)),))


def test_a_compressed_reader_is_refused_by_name() -> None:
    four = scheme("W4A16", 8)
    w = state().params["a.weight"]
    params = state().params | {"a.weight": nearest(w, four, fit(w, four))}
    with pytest.raises(BadInput, match=r"^a\.weight: is compressed already; fold norms before"):
        fold_norms().apply(State(params), {}, SITES, links=(BOTH,))
    with pytest.raises(BadInput, match=r"^a\.weight: is compressed already; fold norms before"):
        fold_norms().init(State(params), SITES, links=(BOTH,))
