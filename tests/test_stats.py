"""Statistics against plain formulas; their algebra is in contracts.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from ptq.errors import BadInput
from ptq.numerics.stats import KINDS, AbsMax, AbsMean, Gram, Range, SecondMoment
from strategies import correlated, randn, seeds


@given(seeds, st.integers(1, 9), st.integers(1, 6))
def test_each_statistic_is_its_formula(seed: int, tokens: int, features: int) -> None:
    x = randn(seed, tokens, features)
    rows = x.tolist()
    columns = list(zip(*rows, strict=True))

    def like(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    gram = like([[sum(r[i] * r[j] for r in rows) for j in range(features)] for i in range(features)])
    assert torch.allclose(Gram.measure(x).sum, gram, atol=1e-12)
    assert torch.allclose(SecondMoment.measure(x).sum, gram.diagonal(), atol=1e-12)
    assert torch.equal(AbsMax.measure(x).max, like([max(map(abs, c)) for c in columns]))
    assert torch.allclose(AbsMean.measure(x).sum, like([sum(map(abs, c)) for c in columns]), atol=1e-12)
    assert torch.equal(Range.measure(x).min, like([min(c) for c in columns]))
    assert torch.equal(Range.measure(x).max, like([max(c) for c in columns]))
    assert all(int(kind.measure(x).count) == tokens for kind in KINDS.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("features", [511, 512, 513, 700])
def test_a_wide_gram_is_made_of_panels(features: int) -> None:
    x = randn(0, 40, features)
    gram = Gram.measure(x).sum
    assert torch.allclose(gram, x.mT @ x, rtol=0, atol=1e-12)
    assert torch.allclose(gram, gram.mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_accumulated_in_float32(kind: Any, dtype: torch.dtype) -> None:
    """4096 equal values: sums in 16 bits would have stalled far below."""
    x = torch.full((4096, 2), 1.0, dtype=dtype)
    whole = kind.measure(x)
    for name, t in vars(whole).items():
        assert t.dtype == (torch.int64 if name == "count" else torch.float32)
    if kind in (Gram, SecondMoment, AbsMean):
        assert (whole.sum == 4096).all()


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_zeros_cost_no_memory(kind: Any) -> None:
    for t in vars(kind.zero(1 << 15, experts=(64,))).values():
        assert t.untyped_storage().nbytes() <= 8


def test_no_rows_have_an_empty_range() -> None:
    assert Range.measure(torch.ones(0, 2)).min.tolist() == [torch.inf] * 2
    assert AbsMax.measure(torch.ones(0, 2)).max.tolist() == [0.0] * 2


@given(seeds)
def test_the_diagonal_of_a_gram_is_the_second_moment(seed: int) -> None:
    x = correlated(seed, 30, 7)
    assert torch.allclose(Gram.measure(x).sum.diagonal(), SecondMoment.measure(x).sum, rtol=1e-12)


@pytest.mark.parametrize("kind", [SecondMoment, AbsMax, AbsMean, Range])
def test_what_a_rotation_mixes_cannot_be_followed(kind: Any) -> None:
    with pytest.raises(BadInput, match=f"{kind.__name__} cannot follow a rotation; calibrate again"):
        kind.measure(torch.ones(3, 2)).rotate(torch.eye(2))
