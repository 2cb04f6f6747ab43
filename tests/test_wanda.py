"""Wanda against its formula, row by row."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from laws.solves import solved
from ptq.numerics.leaves import dense
from ptq.numerics.patterns import NM, Unstructured
from ptq.transforms.magnitude import magnitude
from ptq.transforms.wanda import wanda
from strategies import correlated, randn, seeds


@given(seeds, st.sampled_from([0.2, 0.5, 0.75]))
def test_each_row_loses_its_smallest_products(seed: int, ratio: float) -> None:
    w, x = randn(seed, 5, 12), correlated(seed + 1, 30, 12)
    leaf = solved(wanda(Unstructured(ratio)), w, x)
    norms = [sum(v * v for v in column) ** 0.5 for column in x.mT.tolist()]
    for row, kept, values in zip(w.tolist(), leaf.mask.tolist(), dense(leaf).tolist(), strict=True):
        order = sorted(range(12), key=lambda j, row=row: abs(row[j]) * norms[j])
        pruned = set(order[: int(12 * ratio)])
        assert kept == [j not in pruned for j in range(12)]
        assert values == [0.0 if j in pruned else row[j] for j in range(12)]


def test_activations_matter() -> None:
    w, x = randn(0, 16, 32), correlated(1, 200, 32)
    ours, plain = (dense(solved(m, w, x)) - w for m in (wanda(NM(keep=2, of=4)), magnitude(NM(keep=2, of=4))))
    assert (x @ ours.mT).square().sum() < (x @ plain.mT).square().sum()
    assert ours.square().sum() > plain.square().sum()


def test_kept_weights_are_not_touched() -> None:
    w = randn(0, 6, 16, dtype=torch.bfloat16)
    leaf = solved(wanda(NM(keep=2, of=4)), w, correlated(1, 50, 16))
    assert torch.equal(dense(leaf)[leaf.mask], w[leaf.mask])
    assert leaf.pattern == NM(keep=2, of=4)
