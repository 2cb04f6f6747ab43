"""Fits: which scale (and zero point) each tile of a weight gets.

Scales are rounded to the dtype they will be stored in before anything is chosen by them, so that what is searched,
rounded and compensated for is what a loader computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Num
from torch import Tensor

from ptq.errors import BadInput
from ptq.numerics.chunks import CHUNK, by_rows
from ptq.numerics.grids import Grid
from ptq.numerics.leaves import Quantized, per_tile
from ptq.numerics.schemes import Scheme
from ptq.numerics.stats import accumulated
from ptq.types import Diagonal, Scale, Weight

Fit = Literal["minmax", "mse", "gram"]
FITS: tuple[Fit, ...] = ("minmax", "mse", "gram")

COARSE = (1.0, 0.925, 0.85, 0.775, 0.7, 0.625, 0.55, 0.475)
"""Shares of a tile's range that are tried first: all of it, so that no search is worse than minmax, down to a half."""
FINE = (-0.05, -0.025, 0.025, 0.05)
"""What is then tried around each tile's best share: together the two cover 1.05 to 0.425 in steps of 0.025."""


def fit(
    w: Weight,
    scheme: Scheme,
    method: Fit = "minmax",
    importance: Diagonal | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Scale, Num[Tensor, "*e rows groups"] | None]:
    """Scales, and zero points where the scheme has them, for a weight.

    Least `sum_j c_j (Q(w_j) - w_j)^2` over shares of each tile's range, with `c = 1` for "mse" and `c` the diagonal of
    the input's Gram matrix for "gram"; "minmax" takes the whole range without a search.

    Args:
        w: `[*e, out, in]` in any float dtype; searched in float32 (float64 stays).
        scheme: grid and granularity.
        method: "minmax", "mse" or "gram".
        importance: `[*e, in]`, for "gram".
        dtype: what the scales will be stored in; the weight's own dtype by default.

    Returns:
        Scales `[*e, rows, groups]` in `dtype`, and zero points in the grid's dtype or None.

    Raises:
        BadInput: the group size does not divide `in`, or "gram" is asked for without an importance.

    Example:
        >>> from ptq.numerics.schemes import scheme
        >>> fit(torch.tensor([[-1.0, 0.5], [0.0, 3.0]]), scheme("W4A16", group_size=-1))[0]
        tensor([[0.1333],
                [0.4000]])
    """
    tiles, dtype = scheme.grouped(w), dtype or w.dtype
    if method == "minmax":
        return _stacked(tiles, None, lambda t, _: qparams(*_range(t), scheme, dtype))
    if known(method) == "gram" and importance is None:
        raise BadInput("fit 'gram' weights columns by the diagonal of a Gram matrix, got none")
    cost = _tile_costs(importance, w, scheme) if method == "gram" and importance is not None else None
    return _stacked(tiles, cost, lambda t, c: _search(t, c, scheme, dtype))


def known(method: Fit) -> Fit:
    """The method, or `BadInput` that names those there are."""
    if method not in FITS:
        raise BadInput(f"fit: got {method!r}, expected one of {', '.join(FITS)}")
    return method


def qparams(
    low: Float[Tensor, "*tiles"], high: Float[Tensor, "*tiles"], scheme: Scheme, dtype: torch.dtype
) -> tuple[Float[Tensor, "*tiles"], Num[Tensor, "*tiles"] | None]:
    """Scale and zero point of a range, in the arithmetic of the range's dtype: what compressed-tensors computes.

    The range is widened to hold 0. A scale that would be 0 (a dead tile) becomes the machine epsilon of `dtype`.

    >>> from ptq.numerics.schemes import scheme
    >>> qparams(torch.tensor([-1.0]), torch.tensor([2.0]), scheme("W4A16_ASYM"), torch.float32)
    (tensor([0.2000]), tensor([-3], dtype=torch.int8))
    """
    grid, low, high = scheme.grid, low.clamp(max=0), high.clamp(min=0)
    levels = grid.high - grid.low
    scale = torch.maximum(-low, high) / (levels / 2) if scheme.symmetric else (high - low) / levels
    scale = scale.to(dtype)
    scale = torch.where(scale == 0, torch.finfo(dtype).eps, scale)
    if scheme.symmetric:
        return scale, None
    zero = (grid.low - low / scale.to(low.dtype)).round().clamp(grid.low, grid.high)
    return scale, grid.encode(zero)


def quantize(w: Weight, scale: Scale, zero: Num[Tensor, "*e rows groups"] | None, grid: Grid) -> Quantized:
    """The nearest values that scales and zero points allow: codes `clamp(round(w / scale + zero))`.

    A true division, ties to even. What `dense` makes of the result quantizes to the same codes.

    >>> from ptq.numerics.grids import Int
    >>> quantize(torch.tensor([[1.0, -0.26]]), torch.tensor([[0.5]]), None, Int(4)).codes
    tensor([[ 2, -1]], dtype=torch.int8)
    """

    def codes(w: Tensor, scale: Tensor, *zero: Tensor) -> Tensor:
        levels = per_tile(torch.div, accumulated(w), accumulated(scale))
        for offset in zero:
            levels = per_tile(torch.add, levels, grid.decode(offset))
        return grid.encode(grid.round(levels))

    facts = (scale,) if zero is None else (scale, zero)
    return Quantized(by_rows(codes, w, *facts), scale, zero, grid, w.dtype)


def _tile_costs(importance: Tensor, w: Tensor, scheme: Scheme) -> Tensor:
    """`[*e, in]` as what broadcasts against the tiles `[*e, rows, groups, size]`."""
    cost = accumulated(importance)[..., None, :]
    if scheme.granularity == "tensor":
        return scheme.grouped(cost.expand(*cost.shape[:-2], *w.shape[-2:]))
    return cost.unflatten(-1, (scheme.tiles(w.shape)[1], -1))


Solved = tuple[Tensor, Tensor | None]


def _stacked(tiles: Tensor, cost: Tensor | None, solve: Callable[[Tensor, Tensor | None], Solved]) -> Solved:
    """Solves stacks one by one and rows by the chunk."""
    if tiles.ndim > 3:
        parts = [_stacked(t, None if cost is None else cost[i], solve) for i, t in enumerate(tiles)]
        return _joined(parts, torch.stack)
    rows = max(1, CHUNK // tiles[0].numel())
    return _joined([solve(t, cost) for t in tiles.split(rows)], torch.cat)


def _joined(parts: Sequence[Solved], join: Callable[[Any], Tensor]) -> Solved:
    scales, zeros = zip(*parts, strict=True)
    return join(scales), None if zeros[0] is None else join(zeros)


def _range(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Each tile's least and largest value, which torch finds faster in float32 than in 16 bits."""
    values = accumulated(tiles)
    return values.amin(-1).to(tiles.dtype), values.amax(-1).to(tiles.dtype)


class _Best(NamedTuple):
    """The best trial of each tile so far."""

    loss: Tensor
    share: Tensor
    scale: Tensor
    zero: Tensor | None

    def or_better(self, other: _Best) -> _Best:
        better = other.loss < self.loss
        return _Best(*(None if a is None else torch.where(better, b, a) for a, b in zip(self, other, strict=True)))  # type: ignore[arg-type]


def _search(tiles: Tensor, cost: Tensor | None, scheme: Scheme, dtype: torch.dtype) -> Solved:
    """Coarse to fine over shares of the range, tile by tile."""
    tiles = accumulated(tiles)
    low, high = tiles.amin(-1), tiles.amax(-1)

    def trial(share: Tensor) -> _Best:
        scale, zero = qparams(low * share, high * share, scheme, dtype)
        step = scale.to(tiles.dtype)
        levels = tiles / step[..., None]
        if zero is not None:
            levels = levels + zero[..., None]
        squares = (scheme.grid.round(levels) - levels).square()
        loss = (squares if cost is None else squares * cost).sum(-1) * step.square()
        return _Best(loss, share, scale, zero)

    best = trial(torch.ones_like(low) * COARSE[0])
    for share in COARSE[1:]:
        best = best.or_better(trial(torch.full_like(low, share)))
    middle = best.share
    for step in FINE:
        best = best.or_better(trial(middle + step))
    return best.scale, best.zero
