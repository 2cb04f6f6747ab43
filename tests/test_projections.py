"""Projections: what each part of the protocol decides, and how two compose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from laws.shared import identical
from ptq.numerics import obs
from ptq.numerics.fits import fit, nearest
from ptq.numerics.grids import Int
from ptq.numerics.leaves import Quantized, Sparse, dense
from ptq.numerics.patterns import NM, Unstructured
from ptq.numerics.projections import Projection, affine, keep, keeping, prune, then
from ptq.numerics.schemes import Scheme
from strategies import gram, randn, schemes, seeds, weights

W4 = Scheme(Int(4), "group", 8)
HALF = NM(keep=2, of=4)


@given(weights(columns=(16, 40)), schemes, st.sampled_from(["minmax", "mse"]))
def test_affine_without_compensation_is_plain_rounding(w: torch.Tensor, scheme: Scheme, method: str) -> None:
    got = obs.project(w, affine(scheme, method))  # type: ignore[arg-type]  # drawn from its values
    expected = nearest(w, scheme, fit(w, scheme, method))  # type: ignore[arg-type]
    assert torch.equal(got.codes.float(), expected.codes.float())
    assert identical(got.scale, expected.scale)


@given(seeds)
def test_prune_without_data_is_by_magnitude(seed: int) -> None:
    w = randn(seed, 5, 16)
    got = obs.project(w, prune(HALF))
    assert torch.equal(got.mask, HALF.mask(w.abs()))
    assert torch.equal(dense(got), w * got.mask)
    blocks = obs.project(w, prune(Unstructured(0.5), block=8)).mask.split(8, -1)
    assert [torch.equal(m, Unstructured(0.5).mask(b.abs())) for m, b in zip(blocks, w.split(8, -1), strict=True)] == [
        True,
        True,
    ]


@given(seeds)
def test_prune_with_data_weights_columns_by_their_size(seed: int) -> None:
    w, sizes = randn(seed, 5, 16), randn(seed + 1, 16).exp()
    assert torch.equal(obs.project(w, prune(HALF), sizes).mask, HALF.mask(w.square() * sizes))


@given(seeds, st.sampled_from([0.1, 0.5, 0.8]))
def test_preserved_zeros_stay_and_count_first(seed: int, share: float) -> None:
    w, g = randn(seed, 6, 32), gram(seed + 1, 32)
    zeros = randn(seed + 2, 6, 32) < torch.quantile(randn(seed + 2, 6, 32), share)
    w = w.masked_fill(zeros, 0.0)
    got = obs.sweep(w, obs.inverse_factor(g), prune(Unstructured(0.5), preserve=True))
    assert not got.mask[zeros].any()
    assert int((~got.mask).sum()) == max(int(zeros.sum()), int(w.numel() * 0.5))
    free = obs.sweep(w, obs.inverse_factor(g), prune(Unstructured(0.5)))
    assert int((~free.mask).sum()) == int(w.numel() * 0.5)


def test_without_preserving_a_zero_may_come_back() -> None:
    w, g = randn(0, 6, 32), gram(1, 32)
    w[:, 20:24] = 0.0
    factor = obs.inverse_factor(g)
    most = NM(keep=3, of=4)
    assert dense(obs.sweep(w, factor, prune(most)))[:, 20:24].any()
    assert not dense(obs.sweep(w, factor, prune(most, preserve=True)))[:, 20:24].any()


@given(seeds)
def test_then_masks_first_and_rounds_what_stays(seed: int) -> None:
    w = randn(seed, 5, 16)
    both = obs.project(w, then(prune(HALF), affine(W4, "mse")))
    assert isinstance(both, Sparse)
    assert isinstance(both.values, Quantized)
    assert both.pattern == HALF
    assert torch.equal(both.mask, HALF.mask(w.abs()))
    rounded = dense(obs.project(w, affine(W4, "mse")))
    assert torch.equal(dense(both), torch.where(both.mask, rounded, 0.0))


def test_then_chooses_scales_on_what_is_kept() -> None:
    w = torch.tensor([[8.0, 1.0, 7.5, 2.0, 0.3, 0.2, 0.1, 0.75]])
    only = keep(torch.tensor([[False, True, False, True, True, True, True, True]]))
    scheme = Scheme(Int(4), "group", 8)
    refreshed = obs.project(w, then(only, affine(scheme, refresh=True)))
    assert refreshed.values.scale.item() == pytest.approx(2.0 / 7.5)
    assert obs.project(w, affine(scheme, refresh=True)).scale.item() == pytest.approx(8.0 / 7.5)


def test_then_has_zeros_on_grids_without_one() -> None:
    def sign() -> Projection:
        def fitted(w: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
            return w.abs().mean(-1, keepdim=True)

        return Projection(fitted, lambda w, s: torch.where(w < 0, -s, s), encode=lambda values, s: values)

    w, g = randn(0, 5, 16), gram(1, 16)
    q = dense(obs.sweep(w, obs.inverse_factor(g), then(prune(HALF), sign())))
    assert ((q == 0).unflatten(-1, (4, 4)).sum(-1) == 2).all()
    assert torch.allclose(q.abs()[q != 0].view(5, 8), w.abs().mean(-1, keepdim=True).expand(5, 8))


@pytest.mark.parametrize(
    ("projection", "span"),
    [
        (affine(W4), 1),
        (affine(W4, refresh=True), 8),
        (affine(Scheme(Int(4), "channel"), refresh=True), 1),
        (prune(HALF), 4),
        (prune(Unstructured(0.5)), 128),
        (then(prune(HALF), affine(W4)), 4),
        (then(prune(HALF), affine(W4, refresh=True)), 8),
        (then(prune(NM(keep=1, of=6)), affine(W4, refresh=True)), 24),
    ],
)
def test_spans_suit_all_that_is_decided(projection: Projection, span: int) -> None:
    assert projection.span == span
    assert (projection.choose is None) == (span == 1)


@given(seeds, schemes)
def test_scales_keep_their_granularity_beside_a_mask(seed: int, scheme: Scheme) -> None:
    """A mask is decided span by span; scales that were decided before must not be split by that."""
    w, g = randn(seed, 5, 16), gram(seed + 1, 16)
    alone = obs.sweep(w, obs.inverse_factor(g), affine(scheme))
    both = obs.sweep(w, obs.inverse_factor(g), then(prune(HALF), affine(scheme)))
    assert identical(both.values.scale, alone.scale)
    assert both.values.scale.shape[-2:] == scheme.tiles(w.shape)
    assert (both.values.zero is None) == scheme.symmetric


def test_keeping_keeps_the_mask_of_a_sparse_leaf_only() -> None:
    w = randn(0, 5, 16)
    projection = affine(W4)
    assert keeping(w, projection) is projection
    sparse = Sparse(w, HALF.mask(w.abs()), HALF)
    got = obs.project(w, keeping(sparse, projection))
    assert torch.equal(got.mask, sparse.mask)
    assert got.pattern == HALF


def test_a_pruning_rule_of_ones_own() -> None:
    """Another rule is another `choose`: here one that always prunes the second half of a span."""

    def choose(facts: object, w: torch.Tensor, pivot: torch.Tensor) -> torch.Tensor:
        return (torch.arange(w.shape[-1]) < w.shape[-1] // 2).expand(w.shape)

    w, g = randn(0, 5, 16), gram(1, 16)
    got = obs.sweep(w, obs.inverse_factor(g), prune(HALF)._replace(choose=choose))
    assert got.mask.tolist() == [[True, True, False, False] * 4] * 5
    lost = ((dense(got) - w) @ g * (dense(got) - w)).sum()
    assert lost < ((w * got.mask - w) @ g * (w * got.mask - w)).sum()
