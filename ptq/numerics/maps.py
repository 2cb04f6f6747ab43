"""Activation maps: what is done to a tensor of a forward where a weight reads it, makes it, or attention uses it.

They are applied from left to right; a state keeps them by place. One that stores nothing finds its scales in the
tensor itself, one with stored scales was calibrated. Where files keep a parameter as several tensors, experts for
example, and these have different numbers, a map holds those of all, one more dimension in front: `[tensors, 1]`, in the
natural order of their names.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ptq._tree import node, static
from ptq.numerics.grids import Grid, ScaleGrid


@node
class FakeQuant:
    """Rounds to a grid and back, by scales that are found in the tensor as it comes.

    Invariants:
        divisor: `[1]` float32, or None. Scales of groups are rounded to `scales` after a product with it, as those
            of NVFP4 weights are.
        granularity: what shares a scale: all values, the features of a token, or `group_size` of them.
        scales: the grid that scales are rounded to; None: they stay floats.
    """

    divisor: Tensor | None
    grid: Grid = static()
    granularity: Literal["tensor", "token", "group"] = static()
    group_size: int | None = static(default=None)
    symmetric: bool = static(default=True)
    scales: ScaleGrid | None = static(default=None)


@node
class StaticQuant:
    """Rounds to a grid and back, by a scale that is known beforehand.

    Invariants:
        scale: `[1]` for the tensor, `[heads, 1, 1]` for attention heads.
        zero: the scale's shape, or None. A symmetric map may keep zeros that a file has.
    """

    scale: Tensor
    zero: Tensor | None
    grid: Grid = static()
    granularity: Literal["tensor", "attn_head"] = static(default="tensor")
    symmetric: bool = static(default=True)


Map = FakeQuant | StaticQuant
