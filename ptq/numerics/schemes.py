"""Schemes: a grid, and how many weights share a scale on it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.numerics.grids import Float8, Grid, Int


@dataclass(frozen=True)
class Scheme:
    """What a weight becomes: values of `grid`, one scale (and zero point, if not symmetric) per tile.

    A tile is the whole tensor, an output channel, or `group_size` consecutive inputs of one channel.

    >>> Scheme(Int(4), "group", 64).tiles(torch.Size((576, 1536)))
    (576, 24)
    """

    grid: Grid
    granularity: Literal["tensor", "channel", "group"]
    group_size: int | None = None
    symmetric: bool = True

    def __str__(self) -> str:
        kind = "float" if isinstance(self.grid, Float8) else "int"
        return f"{kind}{self.grid.bits}{'' if self.symmetric else '-asym'}/{self.group_size or self.granularity}"

    def __post_init__(self) -> None:
        if (self.granularity == "group") != (self.group_size is not None) or (self.group_size or 1) < 1:
            raise BadInput(f"Scheme: got group_size {self.group_size} for one scale per {self.granularity}")
        if not self.symmetric and isinstance(self.grid, Float8):
            raise BadInput("Scheme: float8 has no zero point, expected symmetric=True")

    def check(self, columns: int) -> None:
        """Refuses a width that the groups do not divide, and names sizes that would."""
        if self.group_size and columns % self.group_size:
            fits = [g for g in range(1, columns + 1) if columns % g == 0]
            fits = [g for g in fits if g % 32 == 0] or fits  # what kernels take, where there are such sizes
            near = sorted(sorted(fits, key=lambda g: abs(g - (self.group_size or 0)))[:4])
            raise BadInput(
                f"group size {self.group_size} does not divide {columns} inputs; "
                f"{', '.join(map(str, near))} would, and -1 is one scale per channel"
            )

    def tiles(self, shape: torch.Size) -> tuple[int, int]:
        """Rows and columns of the scales of a weight of this shape."""
        rows, columns = shape[-2:]
        return {"tensor": (1, 1), "channel": (rows, 1), "group": (rows, columns // (self.group_size or columns))}[
            self.granularity
        ]

    def grouped(self, w: Tensor) -> Tensor:
        """The weight with each tile in the last dimension: `[*e, out, in]` to `[*e, rows, groups, size]`."""
        self.check(w.shape[-1])
        return w.reshape(*w.shape[:-2], *self.tiles(w.shape), -1)


def scheme(name: str, group_size: int | None = None) -> Scheme:
    """A weight-only scheme by the field's name for it.

    Args:
        name: `W2A16` to `W8A16` (integers, symmetric), the same with `_ASYM` (with zero points), or `FP8A16` (float8
            e4m3); in any case.
        group_size: consecutive inputs that share a scale; None is the scheme's own default (128, and for FP8A16 one
            scale per output channel), -1 one scale per output channel.

    Raises:
        BadInput: the name is unknown or quantizes activations.

    >>> scheme("w4a16", group_size=64)
    Scheme(grid=Int(bits=4), granularity='group', group_size=64, symmetric=True)
    """
    grid, symmetric, default = _parsed(name.upper())
    size = default if group_size is None else group_size
    if size < 1 and size != -1:
        raise BadInput(f"scheme {name}: got group_size {size}, expected a positive number, or -1 for one per channel")
    return Scheme(grid, "channel", None, symmetric) if size == -1 else Scheme(grid, "group", size, symmetric)


def _parsed(name: str) -> tuple[Grid, bool, int]:
    if name == "FP8A16":
        return Float8(), True, -1
    if match := re.fullmatch(r"W([2-8])A16(_ASYM)?", name):
        return Int(int(match[1])), match[2] is None, 128
    if re.fullmatch(r"W\d+A(FP)?[48]|INT8|(FP8|NVFP4|MXFP[468])(?!A16)\w*", name):
        raise BadInput(f"scheme {name} quantizes activations, which this version does not do; try {_weight_only(name)}")
    known = [f"W{b}A16{asym}" for asym in ("", "_ASYM") for b in range(2, 9)] + ["FP8A16"]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    raise BadInput(f"unknown scheme {name!r}; {'near: ' if near else 'known: '}{', '.join(near or known)}")


def _weight_only(name: str) -> str:
    match = re.match(r"W([2-8])A", name)
    return f"W{match[1]}A16" if match else "W4A16" if "4" in name else "FP8A16" if "FP8" in name else "W8A16"
