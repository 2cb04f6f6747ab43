"""Magnitude pruning against sorting."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, strategies as st

from laws.solves import solved
from ptq.base import State
from ptq.errors import BadInput
from ptq.numerics.leaves import dense
from ptq.numerics.patterns import NM, Unstructured
from ptq.transforms.magnitude import magnitude
from strategies import randn, seeds


@given(seeds, st.sampled_from([0.0, 0.3, 0.5, 0.9]), st.sampled_from(["tensor", "row"]))
def test_the_smallest_go(seed: int, ratio: float, per: Literal["tensor", "row"]) -> None:
    w = randn(seed, 5, 12)
    leaf = solved(magnitude(Unstructured(ratio), per), w, torch.ones(1, 12))
    groups = w.abs().tolist() if per == "row" else [w.abs().flatten().tolist()]
    limits = [sorted(g)[int(len(g) * ratio)] for g in groups]
    expected = torch.stack([w.abs()[i] >= limits[i if per == "row" else 0] for i in range(5)])
    assert torch.equal(leaf.mask, expected)
    assert torch.equal(dense(leaf), w * expected)
    assert leaf.pattern == Unstructured(ratio)


def test_one_tensor_may_lose_more_of_one_row() -> None:
    w = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    assert solved(magnitude(Unstructured(0.5)), w, torch.ones(1, 4)).mask.sum(-1).tolist() == [0, 4]
    assert solved(magnitude(Unstructured(0.5), "row"), w, torch.ones(1, 4)).mask.sum(-1).tolist() == [2, 2]


def test_a_pattern_that_does_not_fit_names_the_weight() -> None:
    with pytest.raises(BadInput, match=r"^a\.weight: 2 of 4: does not divide 6 inputs"):
        magnitude(NM(keep=2, of=4)).init(State({"a.weight": torch.ones(2, 6)}), {"a.weight": ("a.weight",)})
