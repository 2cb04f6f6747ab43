"""Laws of grids: rounding is to the nearest, idempotent, monotone, and ties go to even."""

from __future__ import annotations

import torch
from torch import Tensor

from laws.shared import untouched
from ptq.numerics.grids import Float8, Grid
from strategies import randn


def every_value(grid: Grid) -> Tensor:
    """All values of a grid, ascending, by decoding every code there is."""
    codes = torch.arange(-128, 128, dtype=torch.int8)
    if isinstance(grid, Float8):
        decoded = grid.decode(codes.view(torch.float8_e4m3fn))
        return decoded[decoded.isfinite()].unique()
    return grid.decode(codes[(codes >= grid.low) & (codes <= grid.high)])


def rounds_to_the_nearest(grid: Grid) -> None:
    values, t = every_value(grid).double(), randn(1, 500).float() * grid.high
    distance = (t.double()[:, None] - values).abs()
    assert torch.equal((grid.round(t).double() - t.double()).abs(), distance.amin(-1))


def values_are_fixed(grid: Grid) -> None:
    values = every_value(grid)
    assert torch.equal(grid.round(values), values)
    assert torch.equal(grid.decode(grid.encode(values)), values)
    assert grid.encode(values).dtype == grid.dtype
    assert (values.min(), values.max()) == (grid.low, grid.high)
    assert len(values) <= 2**grid.bits


def breaks_ties_to_even(grid: Grid) -> None:
    values = every_value(grid)
    middles = (values[1:] + values[:-1]) / 2
    lower, rounded = values[:-1], grid.round(middles)
    code = grid.encode(rounded).view(torch.uint8 if isinstance(grid, Float8) else torch.int8)
    assert (code % 2 == 0).all()
    assert ((rounded == lower) | (rounded == values[1:])).all()


def is_monotone_and_bounded(grid: Grid) -> None:
    t = torch.linspace(2 * grid.low, 2 * grid.high, 1001)
    assert (grid.round(t).diff() >= 0).all()
    assert (grid.round(t)[0], grid.round(t)[-1]) == (grid.low, grid.high)


def changes_no_input(grid: Grid) -> None:
    t = randn(1, 50).float()
    with untouched(t):
        grid.decode(grid.encode(grid.round(t)))
