"""Grids against what compressed-tensors rounds to; their laws are in contracts.py."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import GOLDEN
from ptq.numerics.grids import Float8, Int

ROUNDING = load_file(GOLDEN / "rounding.safetensors")


def test_float8_rounds_as_compressed_tensors_does() -> None:
    x, y = ROUNDING["fp8_e4m3_float32/in/x"], ROUNDING["fp8_e4m3_float32/out/y"]
    assert torch.equal(Float8().round(x), y.float())
    assert torch.equal(Float8().encode(Float8().round(x)).view(torch.uint8), y.view(torch.uint8))


def test_integers_round_as_compressed_tensors_does() -> None:
    x, y = ROUNDING["int_round_half_even/in/x"], ROUNDING["int_round_half_even/out/y"]
    grid = Int(8)
    assert torch.equal(grid.round(x), y.float().clamp(grid.low, grid.high))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_keeps_the_dtype(dtype: torch.dtype) -> None:
    t = torch.linspace(-3, 3, 7, dtype=dtype)
    assert Int(4).round(t).dtype == Float8().round(t).dtype == dtype


@pytest.mark.parametrize("width", [0, 9])
def test_integers_have_one_to_eight_bits(width: int) -> None:
    with pytest.raises(ValueError, match=f"got {width} bits, expected 1 to 8"):
        Int(width)
