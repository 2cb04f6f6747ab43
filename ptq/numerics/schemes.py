"""Schemes: a grid, how many weights share a scale on it, and what that scale may be."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ptq.errors import BadInput
from ptq.numerics.grids import Float8, Grid, Int, Minifloat, PowersOfTwo
from ptq.numerics.tiles import Tile

Granularity = Literal["tensor", "channel", "group", "block"]


@dataclass(frozen=True)
class Scheme:
    """What a weight becomes: values of `grid`, one scale (and zero point, if not symmetric) per tile.

    A tile is the whole tensor, an output channel, `group_size` consecutive inputs of one channel, or a `block` of rows
    and columns. Scales are floats, or numbers of the grid `scales`: powers of two, or float8 with a divisor that the
    whole tensor shares.

    >>> Scheme(Int(4), "group", 64).tiles(torch.Size((576, 1536)))
    (576, 24)
    """

    grid: Grid
    granularity: Granularity
    group_size: int | None = None
    symmetric: bool = True
    block: Tile | None = None
    scales: Float8 | PowersOfTwo | None = None

    def __str__(self) -> str:
        per = "x".join(map(str, self.block)) if self.block else self.group_size or self.granularity
        stored = {Float8(): "/e4m3", PowersOfTwo(): "/e8m0"}.get(self.scales, "") if self.scales else ""
        return f"{self.grid.kind}{self.grid.bits}{'' if self.symmetric else '-asym'}/{per}{stored}"

    def __post_init__(self) -> None:
        if (self.granularity == "group") != (self.group_size is not None) or (self.group_size or 1) < 1:
            raise BadInput(f"Scheme: got group_size {self.group_size} for one scale per {self.granularity}")
        if (self.granularity == "block") != (self.block is not None) or min(self.block or (1,)) < 1:
            raise BadInput(f"Scheme: got block {self.block} for one scale per {self.granularity}")
        if not self.symmetric and (self.grid.kind == "float" or self.scales):
            raise BadInput("Scheme: floats and scales on a grid have no zero points, expected symmetric=True")
        if self.symmetric and self.grid.bits == 1:
            raise BadInput("Scheme: one bit without a zero point is -1 and 0; expected symmetric=False")

    @property
    def divided(self) -> bool:
        """Whether all scales of a tensor share a divisor."""
        return isinstance(self.scales, Float8)

    def check(self, columns: int) -> None:
        """Refuses a width that the groups do not divide, and names sizes that would."""
        if self.group_size and columns % self.group_size:
            if self.scales:
                raise BadInput(f"groups of {self.group_size}, which {self} has, do not divide {columns} inputs")
            fits = [g for g in range(1, columns + 1) if columns % g == 0]
            fits = [g for g in fits if g % 32 == 0] or fits  # what kernels take, where there are such sizes
            near = sorted(sorted(fits, key=lambda g: abs(g - (self.group_size or 0)))[:4])
            raise BadInput(
                f"group size {self.group_size} does not divide {columns} inputs; "
                f"{', '.join(map(str, near))} would, and -1 is one scale per channel"
            )

    @property
    def stated(self) -> Tile | None:
        """Rows and columns of a tile that are the same for all weights, whatever their shapes.

        >>> Scheme(Int(4), "group", 64).stated, Scheme(Int(4), "channel").stated
        ((1, 64), None)
        """
        return self.block or (None if self.group_size is None else (1, self.group_size))

    def tile(self, shape: torch.Size) -> Tile:
        """Rows and columns that share a scale in a weight of this shape."""
        rows, columns = shape[-2:]
        return self.stated or (rows if self.granularity == "tensor" else 1, columns)

    def tiles(self, shape: torch.Size) -> tuple[int, int]:
        """Rows and columns of the scales of a weight of this shape."""
        high, wide = self.tile(shape)
        return -(-shape[-2] // max(high, 1)), -(-shape[-1] // max(wide, 1))

    def grouped(self, w: Tensor) -> Tensor:
        """The weight with each tile in the last dimension: `[*e, out, in]` to `[*e, rows, groups, size]`.

        Blocks that are cut off at the weight's end are filled with 0.
        """
        self.check(w.shape[-1])
        a, b = self.tiles(w.shape)
        if not self.block:
            return w.reshape(*w.shape[:-2], a, b, -1)
        high, wide = self.block
        whole = F.pad(w, (0, b * wide - w.shape[-1], 0, a * high - w.shape[-2]))
        return whole.unflatten(-1, (b, wide)).unflatten(-3, (a, high)).transpose(-3, -2).flatten(-2)


def scheme(name: str, group_size: int | None = None, block: Tile | None = None) -> Scheme:
    """A weight-only scheme by the field's name for it.

    Args:
        name: in any case:

            - `W2A16` to `W8A16` (integers, symmetric), and `W1A16_ASYM` to `W8A16_ASYM` (with zero points);
            - `FP8A16` (float8 e4m3);
            - `NVFP4A16`: e2m1 in groups of 16, scales in e4m3 over one float32 of the tensor;
            - `MXFP4A16`, `MXFP6A16`, `MXFP8A16`: e2m1, e2m3, e4m3 in groups of 32, scales that are powers of two.
        group_size: consecutive inputs that share a scale; None is the scheme's own default (128, and for FP8A16 one
            scale per output channel), -1 one scale per output channel.
        block: rows and columns that share a scale, instead of groups; `(128, 128)` for FP8A16 is what some models
            were trained in.

    Raises:
        BadInput: the name is unknown or quantizes activations; the format fixes another group size.

    >>> scheme("w4a16", group_size=64)
    Scheme(grid=Int(bits=4), granularity='group', group_size=64, symmetric=True, block=None, scales=None)
    """
    base = _parsed(name.upper())
    if base.scales and (block or group_size not in (None, base.group_size)):
        raise BadInput(f"scheme {name}: its groups are of {base.group_size}; leave group_size out")
    if block:
        if group_size is not None:
            raise BadInput(f"scheme {name}: got group_size {group_size} and block {block}; give one")
        return Scheme(base.grid, "block", symmetric=base.symmetric, block=(int(block[0]), int(block[1])))
    if group_size is None:
        return base
    if group_size < 1 and group_size != -1:
        raise BadInput(
            f"scheme {name}: got group_size {group_size}, expected a positive number, or -1 for one per channel"
        )
    if group_size == -1:
        return Scheme(base.grid, "channel", None, base.symmetric)
    return Scheme(base.grid, "group", group_size, base.symmetric)


NAMED = {
    "FP8A16": Scheme(Float8(), "channel"),
    "NVFP4A16": Scheme(Minifloat(1), "group", 16, scales=Float8()),
    "MXFP4A16": Scheme(Minifloat(1), "group", 32, scales=PowersOfTwo()),
    "MXFP6A16": Scheme(Minifloat(3), "group", 32, scales=PowersOfTwo()),
    "MXFP8A16": Scheme(Float8(), "group", 32, scales=PowersOfTwo()),
}
"""Schemes of floats; those of integers are named after their bits."""


def _parsed(name: str) -> Scheme:
    if name in NAMED:
        return NAMED[name]
    if match := re.fullmatch(r"W([1-8])A16(_ASYM|(?<!W1A16))", name):
        return Scheme(Int(int(match[1])), "group", 128, not match[2])
    if re.fullmatch(r"W\d+A(FP)?[48]|INT8|(FP8|NVFP4|MXFP[468])(?!A16)\w*", name):
        raise BadInput(f"scheme {name} quantizes activations, which this version does not do; try {_weight_only(name)}")
    known = [f"W{b}A16" for b in range(2, 9)] + [f"W{b}A16_ASYM" for b in range(1, 9)] + list(NAMED)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    raise BadInput(f"unknown scheme {name!r}; {'near: ' if near else 'known: '}{', '.join(near or known)}")


def _weight_only(name: str) -> str:
    match = re.match(r"W([1-8])A", name)
    same = re.match(r"(NVFP4|MXFP[468]|FP8)", name)
    return f"W{match[1]}A16" if match else f"{same[1]}A16" if same else "W8A16"
