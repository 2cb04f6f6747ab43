"""Masks: optimal by brute force, exact in number, refused where they do not fit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from ptq.errors import BadInput
from ptq.numerics.patterns import NM, Unstructured
from strategies import patterns, randn, seeds


@given(seeds, st.sampled_from([(2, 4), (1, 4), (3, 4), (1, 2), (2, 5)]))
def test_n_of_m_keeps_the_most_score_of_all_masks(seed: int, shape: tuple[int, int]) -> None:
    keep, of = shape
    score = randn(seed, 3, 2 * of)
    mask = NM(keep, of).mask(score).unflatten(-1, (2, of))
    groups = score.unflatten(-1, (2, of))
    for row, group in itertools.product(range(3), range(2)):
        best = max(float(groups[row, group, list(kept)].sum()) for kept in itertools.combinations(range(of), keep))
        assert float(groups[row, group][mask[row, group]].sum()) == pytest.approx(best)


@given(seeds, patterns)
def test_pruned_scores_are_never_above_kept_ones(seed: int, pattern: NM | Unstructured) -> None:
    score = randn(seed, 5, 16).round(decimals=1)
    kept = pattern.mask(score, per="row")
    groups = (
        (score.unflatten(-1, (-1, pattern.of)), kept.unflatten(-1, (-1, pattern.of)))
        if isinstance(pattern, NM)
        else (score, kept)
    )
    worst_kept = groups[0].masked_fill(~groups[1], torch.inf).amin(-1)
    best_pruned = groups[0].masked_fill(groups[1], -torch.inf).amax(-1)
    assert (worst_kept >= best_pruned).all()


@given(seeds, st.integers(1, 60), st.floats(0, 0.999))
def test_unstructured_counts_are_exact_for_any_size(seed: int, columns: int, ratio: float) -> None:
    score = randn(seed, 3, columns)
    assert int((~Unstructured(ratio).mask(score)).sum()) == int(3 * columns * ratio)
    assert ((~Unstructured(ratio).mask(score, per="row")).sum(-1) == int(columns * ratio)).all()


def test_among_equals_the_first_stay() -> None:
    assert Unstructured(0.5).mask(torch.zeros(2, 3)).tolist() == [[True, True, True], [False, False, False]]
    assert NM(keep=1, of=3).mask(torch.ones(1, 6)).tolist() == [[True, False, False] * 2]


def test_comparison_groups_differ() -> None:
    score = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert Unstructured(0.5).mask(score).tolist() == [[False, False], [True, True]]
    assert Unstructured(0.5).mask(score, per="row").tolist() == [[False, True], [False, True]]


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 50.0])
def test_a_ratio_is_a_share(ratio: float) -> None:
    with pytest.raises(BadInput, match=f"got ratio {ratio}, expected 0 <= ratio < 1"):
        Unstructured(ratio)


@pytest.mark.parametrize(("keep", "of"), [(0, 4), (5, 4), (-1, 2)])
def test_n_is_within_m(keep: int, of: int) -> None:
    with pytest.raises(BadInput, match=f"got keep={keep} of={of}"):
        NM(keep, of)


def test_groups_must_divide_the_inputs() -> None:
    NM(keep=2, of=4).check(8)
    Unstructured(0.5).check(7)
    with pytest.raises(BadInput, match="2 of 4: does not divide 10 inputs"):
        NM(keep=2, of=4).check(10)
    with pytest.raises(BadInput, match="2 of 4: does not divide 10 inputs"):
        NM(keep=2, of=4).mask(torch.ones(3, 10))
