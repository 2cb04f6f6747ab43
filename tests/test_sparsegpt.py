"""SparseGPT as a transform: exact counts, joint quantization, kept zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laws.solves import solved
from ptq.base import State, chain
from ptq.errors import BadInput
from ptq.numerics.leaves import Quantized, Sparse, dense
from ptq.numerics.patterns import NM, Unstructured
from ptq.numerics.schemes import scheme
from ptq.numerics.stats import Gram
from ptq.transforms.gptq import gptq
from ptq.transforms.magnitude import magnitude
from ptq.transforms.rtn import rtn
from ptq.transforms.sparsegpt import sparsegpt
from ptq.transforms.wanda import wanda
from strategies import correlated, randn

HALF = NM(keep=2, of=4)


def error(leaf: Any, w: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (dense(leaf) - w).mT).square().sum())


@pytest.mark.parametrize("pattern", [HALF, NM(keep=4, of=8), Unstructured(0.5), Unstructured(0.7)], ids=str)
def test_compensation_pays(pattern: Any) -> None:
    w, x = randn(0, 24, 64), correlated(1, 600, 64)
    ours, theirs = solved(sparsegpt(pattern), w, x), solved(wanda(pattern), w, x)
    assert error(ours, w, x) < 0.8 * error(theirs, w, x) < error(solved(magnitude(pattern), w, x), w, x)
    assert (dense(ours) - w).square().sum() > (dense(theirs) - w).square().sum()


@pytest.mark.parametrize("columns", [64, 128, 200])
@pytest.mark.parametrize("ratio", [0.5, 0.33, 0.9])
def test_each_block_of_128_columns_loses_exactly_its_share(columns: int, ratio: float) -> None:
    mask = solved(sparsegpt(Unstructured(ratio)), randn(0, 7, columns), correlated(1, 400, columns)).mask
    assert [int((~m).sum()) for m in mask.split(128, -1)] == [int(m.numel() * ratio) for m in mask.split(128, -1)]


def test_pruning_and_rounding_in_one_sweep_beats_one_after_the_other() -> None:
    w, x, four = randn(0, 96, 192), correlated(1, 2000, 192), scheme("W4A16", -1)
    joint = solved(sparsegpt(HALF, four, fit="minmax"), w, x)
    assert isinstance(joint, Sparse)
    assert isinstance(joint.values, Quantized)
    state, stats = State({"a.weight": w}), {"a.weight": {"gram": Gram.measure(x)}}
    for transform in chain(sparsegpt(HALF), rtn(four, "mse")):
        state, stats = transform.apply(state, stats, {"a.weight": ("a.weight",)})
    apart = state.params["a.weight"]
    only = solved(sparsegpt(HALF), w, x)
    assert torch.equal(apart.mask, only.mask)
    assert error(only, w, x) < error(joint, w, x) < 0.97 * error(apart, w, x)


def test_gptq_after_sparsegpt_keeps_the_mask() -> None:
    w, x = randn(0, 24, 64), correlated(1, 600, 64)
    sparse = solved(sparsegpt(HALF), w, x)
    for fit in ("mse", "gram"):
        both = solved(gptq(scheme("W4A16", 16), fit=fit), sparse, x)  # type: ignore[arg-type]
        assert torch.equal(both.mask, sparse.mask)
        assert error(both, dense(sparse), x) < error(
            solved(rtn(scheme("W4A16", 16), "minmax"), sparse, x), dense(sparse), x
        )


def test_zeros_that_are_there_can_be_kept() -> None:
    w, x = randn(0, 24, 64), correlated(1, 600, 64)
    first = solved(magnitude(NM(keep=3, of=4)), w, x)
    kept = solved(sparsegpt(HALF, preserve_sparsity_mask=True), dense(first), x)
    assert (kept.mask <= first.mask).all()
    assert (kept.mask.unflatten(-1, (-1, 4)).sum(-1) == 2).all()
    assert not (solved(sparsegpt(HALF), dense(first), x).mask <= first.mask).all()
    most = solved(magnitude(Unstructured(0.8)), w, x)
    assert torch.equal(
        solved(sparsegpt(Unstructured(0.5), preserve_sparsity_mask=True), dense(most), x).mask, most.mask
    )


def test_what_does_not_fit_is_named() -> None:
    state, sites = State({"a.weight": torch.ones(2, 20)}), {"a.weight": ("a.weight",)}
    with pytest.raises(BadInput, match=r"^a\.weight: 4 of 8: does not divide 20 inputs"):
        sparsegpt(NM(keep=4, of=8)).init(state, sites)
    with pytest.raises(BadInput, match=r"^a\.weight: group size 16 does not divide 20 inputs"):
        sparsegpt(HALF, scheme("W4A16", 16)).init(state, sites)


def test_a_failed_factorization_falls_back_to_scores_of_the_diagonal() -> None:
    g = torch.diag(torch.arange(1.0, 9.0))
    g[0, 1] = g[1, 0] = 1e4
    w = randn(0, 4, 8).float()
    stats = {"a.weight": {"gram": Gram(g, torch.tensor(3.0))}}
    state, seen = sparsegpt(HALF).apply(State({"a.weight": w}), stats, {"a.weight": ("a.weight",)})
    leaf = state.params["a.weight"]
    assert torch.equal(leaf.mask, HALF.mask(w.square() * g.diagonal()))
    assert torch.equal(dense(leaf), w * leaf.mask)
    assert "not compensated" in seen["a.weight"]["outcome"].note
