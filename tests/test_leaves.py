"""Leaves: what they stand for, element by element, and what breaks their invariants."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from ptq.errors import BadInput
from ptq.numerics.grids import Float8, Int
from ptq.numerics.leaves import (
    Quantized,
    Sparse,
    Transposed,
    compressed,
    dense,
    nbytes,
    take,
    unquantized,
    validate,
)
from ptq.numerics.patterns import NM
from ptq.numerics.tiles import per_tile, spread
from strategies import randn, seeds

FOUR = Int(4)


def small(dtype: torch.dtype = torch.float32, zero: bool = True) -> Quantized:
    codes = torch.tensor([[1, -8, 7, 0], [2, 3, -4, 5]], dtype=torch.int8)
    offsets = torch.tensor([[1, -2], [0, 3]], dtype=torch.int8) if zero else None
    return Quantized(codes, torch.tensor([[0.5, 2.0], [0.25, 0.1]], dtype=dtype), offsets, FOUR, dtype)


def test_a_quantized_leaf_means_code_less_zero_times_scale() -> None:
    expected = [[0.0, -4.5, 18.0, 4.0], [0.5, 0.75, -0.7, 0.2]]
    assert torch.allclose(dense(small()), torch.tensor(expected), atol=1e-7)


def test_the_product_is_rounded_once() -> None:
    leaf = small(torch.bfloat16)
    exact = dense(replace(leaf, scale=leaf.scale.double(), dtype=torch.float64))
    assert torch.equal(dense(leaf), exact.bfloat16())


def test_float64_keeps_its_digits() -> None:
    scale = torch.tensor([[1 / 3]], dtype=torch.float64)
    leaf = Quantized(torch.tensor([[3]], dtype=torch.int8), scale, None, FOUR, torch.float64)
    assert dense(leaf).item() == 1.0


@given(seeds, st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.sampled_from([(), (2,)]))
def test_each_tile_serves_its_elements(seed: int, tile: int, out: int, columns: int, e: tuple[int, ...]) -> None:
    """By the invariant: tiles of ceil(out / a) x ceil(in / b), the last one ragged."""
    a, b = -(-out // tile), -(-columns // tile)
    scale = randn(seed, *e, a, b)
    high, wide = -(-out // a), -(-columns // b)
    got = spread(scale, torch.Size((*e, out, columns)))
    for i in range(out):
        for j in range(columns):
            assert torch.equal(got[..., i, j], scale[..., i // high, j // wide])
    levels = randn(seed + 1, *e, out, columns)
    assert torch.equal(per_tile(torch.div, levels, scale), levels / got)


def test_a_sparse_leaf_is_zero_where_it_says_so() -> None:
    mask = torch.tensor([[True, False, True, False]] * 2)
    leaf = Sparse(torch.full((2, 4), 5.0), mask, None)
    assert torch.equal(dense(leaf), 5.0 * mask)
    assert (dense(Sparse(small(), mask, None))[~mask] == 0).all()


def test_bytes_count_codes_scales_and_zero_points() -> None:
    leaf = small(torch.bfloat16)  # 8 codes and 4 zero points of 4 bits, 4 scales of 16
    assert nbytes(leaf) == (8 * 4 + 4 * 4) // 8 + 4 * 2
    assert nbytes(replace(leaf, zero=None)) == 8 * 4 // 8 + 4 * 2
    assert nbytes(Sparse(leaf, torch.ones(2, 4, dtype=torch.bool), None)) == nbytes(Transposed(leaf)) == nbytes(leaf)
    assert nbytes(torch.ones(2, 3, dtype=torch.bfloat16)) == 12


def test_a_transposed_leaf_has_the_modules_shape() -> None:
    leaf = Transposed(small())
    assert leaf.shape == dense(leaf).shape == (4, 2)
    assert torch.equal(dense(leaf), dense(small()).mT)


def test_take_goes_through_all_parts() -> None:
    stacked = Sparse(
        Quantized(torch.ones(3, 2, 4, dtype=torch.int8), torch.rand(3, 2, 2), None, FOUR, torch.float32),
        torch.rand(3, 2, 4) > 0.5,
        NM(keep=2, of=4),
    )
    second = take(stacked, 1)
    assert second.pattern == stacked.pattern
    assert second.values.scale.shape == (2, 2)
    assert torch.equal(dense(second), dense(stacked)[1])


def test_what_is_no_leaf_is_refused() -> None:
    with pytest.raises(TypeError, match="str is no leaf; register it"):
        dense("weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": torch.ones(2)}, r"scale of shape \(2,\) does not tile codes \(2, 4\)"),
        ({"scale": torch.ones(3, 1)}, r"scale of shape \(3, 1\) does not tile codes \(2, 4\)"),
        ({"zero": torch.zeros(2, 1, dtype=torch.int8)}, r"zero points \(2, 1\), expected the scale's \(2, 2\)"),
        ({"codes": torch.ones(2, 4)}, r"codes are torch.float32, expected torch.int8"),
        ({"grid": Float8()}, r"codes are torch.int8, expected torch.float8_e4m3fn"),
        ({"scale": torch.tensor([[1.0, 0.0], [1.0, 1.0]])}, "a scale is 0, negative, infinite or NaN"),
        ({"scale": torch.tensor([[1.0, -1.0], [1.0, 1.0]])}, "a scale is 0, negative, infinite or NaN"),
        ({"scale": torch.tensor([[1.0, torch.nan], [1.0, 1.0]])}, "a scale is 0, negative, infinite or NaN"),
        ({"scale": torch.tensor([[torch.inf, 1.0], [1.0, 1.0]])}, "a scale is 0, negative, infinite or NaN"),
    ],
)
def test_broken_invariants_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    assert validate(small(), "w") is not None
    with pytest.raises(BadInput, match=f"^a.weight: {message}"):
        validate(replace(small(), **change), "a.weight")


def test_only_what_is_not_quantized_can_be_solved() -> None:
    w = torch.ones(2, 4)
    mask = w > 0
    assert unquantized(w) is w
    assert dense(unquantized(Sparse(w, mask, None))).equal(w)
    assert [compressed(leaf) for leaf in (w, Transposed(w), small(), Transposed(small()))] == [False, False, True, True]
    for leaf in (small(), Sparse(small(), mask, None)):
        with pytest.raises(BadInput, match="is quantized already"):
            unquantized(leaf)
