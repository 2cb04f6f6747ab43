"""Names of schemes, and what they refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

from ptq.errors import BadInput
from ptq.numerics.grids import Float8, Int
from ptq.numerics.schemes import Scheme, scheme
from strategies import schemes, weights


@pytest.mark.parametrize("bits", range(2, 9))
def test_names_of_integer_schemes(bits: int) -> None:
    assert scheme(f"W{bits}A16") == Scheme(Int(bits), "group", 128)
    assert scheme(f"w{bits}a16_asym", 32) == Scheme(Int(bits), "group", 32, symmetric=False)
    assert scheme(f"W{bits}a16", -1) == Scheme(Int(bits), "channel")


def test_names_of_float_schemes() -> None:
    assert scheme("FP8A16") == scheme("fp8a16", group_size=-1) == Scheme(Float8(), "channel")
    assert scheme("FP8A16", group_size=64) == Scheme(Float8(), "group", 64)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("W8A8", "W8A16"),
        ("w4a8", "W4A16"),
        ("W4AFP8", "W4A16"),
        ("FP8", "FP8A16"),
        ("fp8_dynamic", "FP8A16"),
        ("FP8_BLOCK", "FP8A16"),
        ("INT8", "W8A16"),
        ("NVFP4", "NVFP4A16"),
        ("MXFP8", "MXFP8A16"),
    ],
)
def test_schemes_that_quantize_activations_are_refused(name: str, instead: str) -> None:
    with pytest.raises(BadInput, match=f"quantizes activations, which this version does not do; try {instead}$"):
        scheme(name)


def test_an_unknown_name_gets_near_misses() -> None:
    with pytest.raises(BadInput, match=r"unknown scheme 'W4A61'; near: .*W4A16"):
        scheme("W4A61")
    with pytest.raises(BadInput, match=r"unknown scheme 'XYZ'; known: W2A16, .*FP8A16"):
        scheme("xyz")


@pytest.mark.parametrize("size", [0, -2])
def test_group_sizes_are_positive(size: int) -> None:
    with pytest.raises(BadInput, match=f"got group_size {size}, expected a positive number, or -1"):
        scheme("W4A16", size)


def test_fields_must_agree() -> None:
    with pytest.raises(BadInput, match="got group_size None for one scale per group"):
        Scheme(Int(4), "group")
    with pytest.raises(BadInput, match="got group_size 64 for one scale per channel"):
        Scheme(Int(4), "channel", 64)
    with pytest.raises(BadInput, match="have no zero points"):
        Scheme(Float8(), "channel", symmetric=False)


def test_a_group_that_does_not_divide_is_refused_with_sizes_that_would() -> None:
    scheme("W4A16", 64).check(576)
    with pytest.raises(BadInput, match=r"group size 128 does not divide 576 inputs; 32, 64, 96, 192 would, and -1"):
        scheme("W4A16").check(576)
    with pytest.raises(BadInput, match="does not divide 7 inputs; 1, 7 would"):
        scheme("W4A16", 8).check(7)


@given(weights(columns=(16, 24, 40)), schemes)
def test_tiles_hold_each_weight_once(w: torch.Tensor, s: Scheme) -> None:
    tiles = s.grouped(w)
    assert tiles.shape[:-1] == (*w.shape[:-2], *s.tiles(w.shape))
    if s.block:  # filled with 0 where they are cut off
        high, wide = s.block
        assert torch.equal(tiles[..., 0, 0, :], F.pad(w, (0, wide, 0, high))[..., :high, :wide].flatten(-2))
        assert tiles.count_nonzero() == w.count_nonzero()
        return
    assert torch.equal(tiles.reshape(w.shape), w)
    for r, g in ((0, 0), (tiles.shape[-3] - 1, tiles.shape[-2] - 1)):
        size = tiles.shape[-1]
        expected = w.flatten(-2) if s.granularity == "tensor" else w[..., r, g * size : (g + 1) * size]
        assert torch.equal(tiles[..., r, g, :], expected)


def test_reports_call_schemes_by_short_names() -> None:
    assert [str(scheme("W4A16", 64)), str(scheme("W3A16_ASYM", -1)), str(scheme("FP8A16"))] == [
        "int4/64",
        "int3-asym/channel",
        "float8/channel",
    ]
