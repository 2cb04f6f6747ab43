"""Small floats and powers of two against the nearest number of a table in float64, and their codes as a bit stream."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import GOLDEN, same_bits
from ptq.numerics.grids import Minifloat, PowersOfTwo
from ptq.numerics.packing import pack_bytes, unpack_bytes

FORMATS = {"fp4_e2m1": Minifloat(1), "fp6_e2m3": Minifloat(3)}
GRIDS = st.sampled_from(list(FORMATS.values()))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROUNDING = load_file(GOLDEN / "rounding.safetensors")


def table(grid: Minifloat) -> list[float]:
    """The numbers from 0 on by their codes, as the exponent and mantissa say."""
    ones = 1 << grid.mantissa
    parts = (divmod(code, ones) for code in range(4 * ones))
    return [m / ones if e == 0 else (1 + m / ones) * 2.0 ** (e - 1) for e, m in parts]


def nearest(grid: Minifloat, x: float) -> float:
    """The number that is nearest, of two the one with the even code; it has the sign of `x + 0`."""
    sizes = table(grid)
    code = min(range(len(sizes)), key=lambda c: (abs(sizes[c] - abs(x)), c % 2))
    return float(torch.tensor(sizes[code]).copysign(torch.tensor(x, dtype=torch.float64)))


def hard(grid: Minifloat) -> list[float]:
    """Every number, every tie and what is next to it, far values and both zeros."""
    sizes = table(grid)
    ties = [(a + b) / 2 for a, b in zip(sizes, [*sizes[1:], 8.0], strict=True)]
    near = [t * factor for t in ties for factor in (1 - 2**-7, 1, 1 + 2**-7)]
    return [sign * x for x in (*sizes, *near, 1e4, 1e-7) for sign in (1, -1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", FORMATS.values(), ids=str)
def test_rounding_finds_the_nearest_even(grid: Minifloat, dtype: torch.dtype) -> None:
    t = torch.tensor(hard(grid), dtype=torch.float64).to(dtype)
    expected = torch.tensor([nearest(grid, x) for x in t.tolist()], dtype=torch.float64).to(dtype)
    assert same_bits(grid.round(t), expected)
    assert torch.equal(grid.decode(grid.encode(grid.round(t))).to(dtype), expected)


@given(GRIDS, st.sampled_from(DTYPES), st.lists(st.floats(-10, 10), min_size=1, max_size=50))
def test_any_value_is_rounded_to_the_nearest(grid: Minifloat, dtype: torch.dtype, values: list[float]) -> None:
    t = torch.tensor(values, dtype=torch.float64).to(dtype)
    expected = torch.tensor([nearest(grid, x) for x in t.tolist()], dtype=torch.float64).to(dtype)
    assert same_bits(grid.round(t), expected)
    assert same_bits(torch.func.vmap(grid.round)(t), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", FORMATS.values(), ids=str)
def test_every_code_stands_for_one_number(grid: Minifloat, dtype: torch.dtype) -> None:
    codes = torch.arange(1 << grid.bits, dtype=torch.uint8)
    sizes = torch.tensor(table(grid))
    assert same_bits(grid.decode(codes), torch.cat([sizes, -sizes]))
    assert torch.equal(grid.encode(grid.decode(codes).to(dtype)), codes)
    assert torch.equal(torch.func.vmap(grid.encode)(grid.decode(codes).to(dtype)), codes)
    assert same_bits(torch.func.vmap(grid.decode)(codes), grid.decode(codes))
    assert (grid.low, grid.high) == (-max(table(grid)), max(table(grid)))


@pytest.mark.parametrize("name", FORMATS)
def test_small_floats_round_as_compressed_tensors_does(name: str) -> None:
    x, y = ROUNDING[f"{name}_float32/in/x"], ROUNDING[f"{name}_float32/out/y"]
    assert torch.equal(FORMATS[name].round(x), y)  # the library keeps a negative 0 in 6 bits


def test_every_power_of_two_has_a_code() -> None:
    grid, codes = PowersOfTwo(), torch.arange(255, dtype=torch.uint8)
    powers = grid.decode(codes)
    assert torch.equal(powers.double(), 2.0 ** (codes.double() - 127))
    assert torch.equal(grid.encode(powers), codes)
    assert torch.equal(torch.func.vmap(grid.encode)(powers), codes)
    assert torch.equal(torch.func.vmap(grid.decode)(codes), powers)
    assert not grid.decode(torch.tensor([255], dtype=torch.uint8)).isfinite()


def stream(row: list[int], bits: int) -> list[int]:
    """A row as one big integer, cut into bytes."""
    whole = sum(code << (i * bits) for i, code in enumerate(row))
    return list(whole.to_bytes(-(-len(row) * bits // 8), "little"))


@given(st.sampled_from([4, 6]), st.integers(1, 3), st.integers(1, 40), st.data())
def test_bytes_are_one_little_endian_integer(bits: int, rows: int, count: int, data: st.DataObject) -> None:
    flat = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=rows * count, max_size=rows * count))
    codes: Tensor = torch.tensor(flat, dtype=torch.uint8).view(rows, count)
    packed = pack_bytes(codes, bits)
    assert packed.tolist() == [stream(row, bits) for row in codes.tolist()]
    assert torch.equal(unpack_bytes(packed, bits, count), codes)
    stacked = torch.stack([codes, codes.flip(-1)])
    assert torch.equal(pack_bytes(stacked, bits)[0], packed)
    assert torch.equal(unpack_bytes(pack_bytes(stacked, bits), bits, count), stacked)
