"""Compressed parameters. `dense` is what a leaf means; its dense form has the parameter's shape.

Dimensions are `[*e, out, in]`: `*e` stands for stacked experts or nothing, groups run along `in`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ptq._tree import node, static, tree_map
from ptq.errors import BadInput
from ptq.numerics.chunks import by_rows
from ptq.numerics.grids import Grid, ScaleGrid
from ptq.numerics.patterns import Pattern
from ptq.numerics.tiles import Tile, fits, per_tile, spread, tile_of


@node
class Scales:
    """Scales that are numbers of a grid themselves, `codes / divisor`: those of NVFP4 and of the MX formats.

    Invariants:
        codes: `[*e, a, b]` in `grid.dtype`.
        divisor: `[*e, 1, 1]` float32, finite and above 0, or None for 1. NVFP4's "global scale", which files keep as
            what to divide by; a product with its reciprocal would round differently.
    """

    codes: Tensor
    divisor: Tensor | None
    grid: ScaleGrid = static()

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return self.codes.device


@node
class Quantized:
    """`(codes - zero) * scale`, rounded once to `dtype`.

    Invariants (`validate` checks them):
        codes: `[*e, out, in]` in `grid.dtype`, one code an element (packing belongs to files).
        scale: `[*e, a, b]`, finite and above 0, a tensor or `Scales`; each value serves a tile of codes: `[1, 1]`
            the whole, `[out, 1]` a channel, `[out, in / g]` groups.
        zero: the scale's shape in `grid.dtype`, or None for a symmetric grid.
        tile: rows and columns of a tile. Schemes of groups and blocks state it, since shapes do not tell it: a block
            may be cut off, and a narrow weight may have one group. None is `ceil(out / a) x ceil(in / b)`.
    """

    codes: Tensor
    scale: Tensor | Scales
    zero: Tensor | None
    grid: Grid = static()
    dtype: torch.dtype = static()
    tile: Tile | None = static(default=None)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device


@node
class Sparse:
    """`values` where `mask` is True and 0 elsewhere; `values` may itself be quantized.

    Invariants: `mask` is bool, of the values' shape; `pattern` says what the mask obeys (None: no promise).
    """

    values: Any
    mask: Tensor
    pattern: Pattern | None = static()

    @property
    def shape(self) -> torch.Size:
        return self.mask.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.mask.device


@node
class Transposed:
    """A leaf held as `[*e, out, in]` for a parameter that the module stores as `[*e, in, out]` (GPT-2's Conv1D)."""

    leaf: Any

    @property
    def shape(self) -> torch.Size:
        *e, rows, columns = self.leaf.shape
        return torch.Size((*e, columns, rows))

    @property
    def dtype(self) -> torch.dtype:
        return self.leaf.dtype

    @property
    def device(self) -> torch.device:
        return self.leaf.device


Leaf = Any  # Tensor | Quantized | Sparse | Transposed | whatever else registers with `dense`


@singledispatch
def dense(leaf: Leaf) -> Tensor:
    """The tensor that a leaf stands for, in the parameter's shape and dtype.

    >>> from ptq.numerics.grids import Int
    >>> dense(Quantized(torch.tensor([[3, -8]], dtype=torch.int8), torch.tensor([[0.5]]), None, Int(4), torch.float32))
    tensor([[ 1.5000, -4.0000]])
    """
    raise TypeError(f"dense: {type(leaf).__name__} is no leaf; register it with ptq.dense.register")


@dense.register
def _(leaf: Tensor) -> Tensor:
    return leaf


@dense.register
def _(leaf: Scales) -> Tensor:
    scale = leaf.grid.decode(leaf.codes)
    return scale if leaf.divisor is None else scale / leaf.divisor


@dense.register
def _(leaf: Quantized) -> Tensor:
    return by_rows(_decoded, _rows_apart(leaf))


def _rows_apart(leaf: Quantized) -> Quantized:
    """The same values with scales for each row where some rows share theirs: then a few rows can be cut out."""
    high, wide = leaf.tile or tile_of(leaf.scale.shape, leaf.shape)
    if 1 in (high, leaf.scale.shape[-2]):
        return leaf

    def apart(t: Tensor) -> Tensor:
        return t if t.shape[-2] == 1 else spread(t, torch.Size((*leaf.shape[:-1], t.shape[-1])), (high, 1))

    return replace(leaf, scale=tree_map(apart, leaf.scale), zero=tree_map(apart, leaf.zero), tile=(1, wide))


def _decoded(leaf: Quantized) -> Tensor:
    # Integer times scale is exact in float32 for every stored scale of 16 bits or less, so the only rounding is the
    # cast to the leaf's dtype: the value a loader computes.
    scale = dense(leaf.scale)
    levels = leaf.grid.decode(leaf.codes)
    if leaf.zero is not None:
        levels = per_tile(torch.sub, levels, leaf.grid.decode(leaf.zero), leaf.tile)
    return per_tile(torch.mul, levels, scale.to(torch.promote_types(scale.dtype, torch.float32)), leaf.tile).to(
        leaf.dtype
    )


@dense.register
def _(leaf: Sparse) -> Tensor:
    values = dense(leaf.values)
    if values.itemsize == 1:  # torch fills no float8, whose 0 is a byte of 0
        return values.view(torch.uint8).masked_fill(~leaf.mask, 0).view(values.dtype)
    return values.masked_fill(~leaf.mask, 0)


@dense.register
def _(leaf: Transposed) -> Tensor:
    return dense(leaf.leaf).mT.contiguous()  # as a file would give it, so that products round alike


def unquantized(leaf: Leaf) -> Leaf:
    """The leaf, if a solve may still choose its values: refuses what is quantized already, pruned or not."""
    if rounded(leaf):
        raise BadInput("is quantized already, with loss; start from the original model, or decode this one (--decode)")
    return leaf


def linear(x: Tensor, leaf: Leaf, bias: Tensor | None = None) -> Tensor:
    """`x @ dense(leaf).T + bias`: what a leaf means where it is a linear's weight, for code of one's own.

    A model's own forward does not come here: `ptq.call` decodes a leaf where an operation of the model reads it.

    >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([[11.]])
    """
    return F.linear(x, dense(leaf), bias)


def take(leaf: Leaf, i: int) -> Leaf:
    """Expert `i` of a stacked leaf.

    >>> take(torch.arange(8).view(2, 2, 2), 1)
    tensor([[4, 5],
            [6, 7]])
    """
    return tree_map(lambda t: t[i], leaf)


@singledispatch
def nbytes(leaf: Leaf) -> int:
    """Bytes a leaf costs in a file: packed codes, scales and zero points; pruned zeros are stored."""
    shape, dtype = leaf.shape, leaf.dtype
    return shape.numel() * dtype.itemsize


@nbytes.register
def _(leaf: Scales) -> int:
    return leaf.codes.numel() * leaf.codes.element_size() + (0 if leaf.divisor is None else 4 * leaf.divisor.numel())


@nbytes.register
def _(leaf: Quantized) -> int:
    zero = 0 if leaf.zero is None else leaf.zero.numel() * leaf.grid.bits
    return (leaf.codes.numel() * leaf.grid.bits + zero + 7) // 8 + nbytes(leaf.scale)


@nbytes.register
def _(leaf: Sparse) -> int:
    return nbytes(leaf.values)


@nbytes.register
def _(leaf: Transposed) -> int:
    return nbytes(leaf.leaf)


def finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite.

    >>> finite(torch.tensor([1.0, -torch.inf])), finite(torch.tensor([3e38, 3e38]))
    (False, True)
    """
    if not values.is_floating_point():
        return True
    if values.itemsize == 1:
        values = values.float()  # torch neither adds float8 nor knows its NaN
    # A sum is quick and shows whatever is not finite; that it is not finite itself may only mean that it is large.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def validate(leaf: Quantized, name: str) -> Quantized:
    """Returns the leaf, or raises `BadInput` that names the weight and the invariant it breaks."""
    if leaf.scale.ndim != leaf.codes.ndim or not fits(leaf.scale.shape, leaf.shape, leaf.tile):
        raise BadInput(f"{name}: scale of shape {tuple(leaf.scale.shape)} does not tile codes {tuple(leaf.shape)}")
    if leaf.zero is not None and leaf.zero.shape != leaf.scale.shape:
        raise BadInput(f"{name}: zero points {tuple(leaf.zero.shape)}, expected the scale's {tuple(leaf.scale.shape)}")
    if leaf.codes.dtype != leaf.grid.dtype:
        raise BadInput(f"{name}: codes are {leaf.codes.dtype}, expected {leaf.grid.dtype}")
    scale = dense(leaf.scale).float()
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise BadInput(f"{name}: a scale is 0, negative, infinite or NaN; quantize it again from finite values")
    return leaf


@singledispatch
def compressed(leaf: Leaf) -> bool:
    """Whether a leaf is more than a stored tensor, so that reading it in a way not understood would lose something."""
    return True


@compressed.register
def _(leaf: Tensor) -> bool:
    return False


@compressed.register
def _(leaf: Transposed) -> bool:
    return compressed(leaf.leaf)


@singledispatch
def rounded(leaf: Leaf) -> bool:
    """Whether a leaf's values were rounded to a grid; pruning alone does not do that."""
    return compressed(leaf)


@rounded.register
def _(leaf: Sparse) -> bool:
    return rounded(leaf.values)


@rounded.register
def _(leaf: Transposed) -> bool:
    return rounded(leaf.leaf)
