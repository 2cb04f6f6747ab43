"""Fits: which scale (and zero point) each tile of a weight gets.

Scales are rounded to what they will be stored as before anything is chosen by them, so that what is searched, rounded
and compensated for is what a loader computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Num
from torch import Tensor

from ptq.errors import BadInput
from ptq.numerics.chunks import CHUNK, by_rows
from ptq.numerics.grids import Grid, PowersOfTwo
from ptq.numerics.leaves import Leaf, Quantized, Scales, dense
from ptq.numerics.schemes import Scheme
from ptq.numerics.stats import accumulated
from ptq.numerics.tiles import Tile, per_tile
from ptq.types import Diagonal, Weight

Fit = Literal["minmax", "mse", "gram"]
FITS: tuple[Fit, ...] = ("minmax", "mse", "gram")

COARSE = (1.0, 0.925, 0.85, 0.775, 0.7, 0.625, 0.55, 0.475)
"""Shares of a tile's range that are tried first: all of it, so that no search is worse than minmax, down to a half."""
FINE = (-0.05, -0.025, 0.025, 0.05)
"""What is then tried around each tile's best share: together the two cover 1.05 to 0.425 in steps of 0.025."""

Levels = Float[Tensor, "*e rows groups"]
"""Scales as numbers, before the tensor's divisor where there is one."""


class Fitted(NamedTuple):
    """What a tile's weights are divided by and moved by."""

    level: Levels
    """scales; where they share a divisor, what of them each tile has of its own"""
    zero: Num[Tensor, "*e rows groups"] | None
    divisor: Float[Tensor, "*e 1 1"] | None = None

    @property
    def step(self) -> Tensor:
        """Scales as they multiply codes."""
        return self.level if self.divisor is None else self.level / self.divisor


def fit(
    w: Weight,
    scheme: Scheme,
    method: Fit = "minmax",
    importance: Diagonal | None = None,
    dtype: torch.dtype | None = None,
    divisor: Float[Tensor, "*e 1 1"] | None = None,
) -> Fitted:
    """Scales, and zero points where the scheme has them, for a weight.

    Least `sum_j c_j (Q(w_j) - w_j)^2` over shares of each tile's range, with `c = 1` for "mse" and `c` the diagonal of
    the input's Gram matrix for "gram"; "minmax" takes the whole range without a search.

    Args:
        w: `[*e, out, in]` in any float dtype; searched in float32 (float64 stays).
        scheme: grid and granularity.
        method: "minmax", "mse" or "gram".
        importance: `[*e, in]`, for "gram".
        dtype: what the scales will be stored in; the weight's own dtype by default. Scales on a grid are stored as its
            codes.
        divisor: `[*e, 1, 1]`, of schemes whose scales share one; by default that of this weight alone.

    Raises:
        BadInput: the group size does not divide `in`, or "gram" is asked for without an importance.

    Example:
        >>> from ptq.numerics.schemes import scheme
        >>> fit(torch.tensor([[-1.0, 0.5], [0.0, 3.0]]), scheme("W4A16", group_size=-1)).level
        tensor([[0.1333],
                [0.4000]])
    """
    tiles, dtype = scheme.grouped(w), dtype or w.dtype
    if scheme.divided and divisor is None:
        divisor = shared_divisor(_peak(w), scheme)
    if known(method) == "gram" and importance is None:
        raise BadInput("fit 'gram' weights columns by the diagonal of a Gram matrix, got none")
    cost = _tile_costs(importance, w, scheme) if method == "gram" and importance is not None else None

    def solve(tiles: Tensor, cost: Tensor | None, divisor: Tensor | None) -> Solved:
        if method == "minmax":
            return qparams(*_range(tiles), scheme, dtype, divisor)
        return _search(tiles, cost, divisor, scheme, dtype)

    return Fitted(*_stacked(tiles, (cost, divisor), solve), divisor)


def known(method: Fit) -> Fit:
    """The method, or `BadInput` that names those there are."""
    if method not in FITS:
        raise BadInput(f"fit: got {method!r}, expected one of {', '.join(FITS)}")
    return method


def shared_divisor(peak: Float[Tensor, "*any"], scheme: Scheme) -> Float[Tensor, "*any"]:
    """What scales on a float grid are divided by: `high(scales) high(grid) / peak`, so that all of the grid is used.

    Args:
        peak: the largest magnitude of the tensor, or of all tensors that serving engines fuse, which must share it.
        scheme: whose scales are on a grid.

    Returns:
        float32; 1 where the peak is 0, infinite or NaN.

    >>> from ptq.numerics.schemes import scheme
    >>> shared_divisor(torch.tensor([6.0, 0.0]), scheme("NVFP4A16"))
    tensor([448.,   1.])
    """
    room = scheme.grid.high * getattr(scheme.scales, "high", 1.0)
    divisor = (room / peak.clamp(min=torch.finfo(peak.dtype).tiny)).to(torch.float32)
    return torch.where(divisor.isfinite() & (peak > 0), divisor, 1.0)


def agreed(leaves: Sequence[Leaf], scheme: Scheme) -> Sequence[dict[str, Any]]:
    """The divisor of each of the weights that read one tensor, as a keyword argument where the scheme has one.

    Serving engines fuse such weights (q, k and v; gate and up) into one, which has one divisor. Stacked experts have
    one each.
    """
    if not scheme.divided:
        return [{}] * len(leaves)
    peaks = [_peak(dense(leaf)) for leaf in leaves]
    most = {p.shape: torch.stack([q for q in peaks if q.shape == p.shape]).amax(0) for p in peaks}
    return [{"divisor": shared_divisor(most[p.shape], scheme)} for p in peaks]


def _peak(w: Tensor) -> Tensor:
    return accumulated(w.abs().amax((-2, -1), keepdim=True))


def qparams(
    low: Float[Tensor, "*tiles"],
    high: Float[Tensor, "*tiles"],
    scheme: Scheme,
    dtype: torch.dtype,
    divisor: Tensor | None = None,
) -> tuple[Float[Tensor, "*tiles"], Num[Tensor, "*tiles"] | None]:
    """Level and zero point of a range, in the arithmetic of the range's dtype: what compressed-tensors computes.

    The range is widened to hold 0. A scale that would be 0 (a dead tile) becomes the machine epsilon of `dtype`, or
    what its grid has for that.

    >>> from ptq.numerics.schemes import scheme
    >>> qparams(torch.tensor([-1.0]), torch.tensor([2.0]), scheme("W4A16_ASYM"), torch.float32)
    (tensor([0.2000]), tensor([-3], dtype=torch.int8))
    """
    grid, low, high = scheme.grid, low.clamp(max=0), high.clamp(min=0)
    levels = grid.high - grid.low
    if scheme.symmetric:
        return _level(torch.maximum(-low, high), scheme, dtype, divisor), None
    scale = _alive(((high - low) / levels).to(dtype))
    zero = (grid.low - low / scale.to(low.dtype)).round().clamp(grid.low, grid.high)
    return scale, grid.encode(zero)


def _level(peak: Tensor, scheme: Scheme, dtype: torch.dtype, divisor: Tensor | None) -> Tensor:
    grid = scheme.grid
    if isinstance(scheme.scales, PowersOfTwo):
        return _power(peak, grid)
    scale = peak / ((grid.high - grid.low) / 2)
    if scheme.scales is None:
        return _alive(scale.to(dtype))
    level = scheme.scales.round(scale * (1.0 if divisor is None else divisor)).to(torch.float32)
    return torch.where(level == 0, 0.125, level)


def _alive(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def _power(peak: Tensor, grid: Grid) -> Tensor:
    """The power of two that leaves the peak below 7/8 of the next one (31/32 where three mantissa bits follow)."""
    part, exponent = torch.frexp(accumulated(peak))
    near = part >= (0.96875 if grid.bits == 6 else 0.875)
    code = 126 + exponent + near - (8 if grid.bits == 8 else 2)
    return PowersOfTwo().decode(torch.where(peak == 0, 0, code).clamp(0, 254).to(torch.uint8))


def quantize(
    w: Weight,
    scale: Tensor | Scales,
    zero: Num[Tensor, "*e rows groups"] | None,
    grid: Grid,
    tile: Tile | None = None,
) -> Quantized:
    """The nearest values that scales and zero points allow: codes `clamp(round(w / scale + zero))`.

    A true division, ties to even. What `dense` makes of the result quantizes to the same codes.

    >>> from ptq.numerics.grids import Int
    >>> quantize(torch.tensor([[1.0, -0.26]]), torch.tensor([[0.5]]), None, Int(4)).codes
    tensor([[ 2, -1]], dtype=torch.int8)
    """

    def codes(w: Tensor, scale: Tensor, *zero: Tensor) -> Tensor:
        levels = per_tile(torch.div, accumulated(w), accumulated(scale), tile)
        for offset in zero:
            levels = per_tile(torch.add, levels, grid.decode(offset), tile)
        return grid.encode(grid.round(levels))

    facts = (dense(scale),) if zero is None else (dense(scale), zero)
    return Quantized(by_rows(codes, w, *facts), scale, zero, grid, w.dtype, tile)


def nearest(w: Weight, scheme: Scheme, fitted: Fitted) -> Quantized:
    """The leaf of a weight in a scheme, by what was fitted."""
    scale = (
        fitted.level
        if scheme.scales is None
        else Scales(scheme.scales.encode(fitted.level), fitted.divisor, scheme.scales)
    )
    return quantize(w, scale, fitted.zero, scheme.grid, scheme.stated)


def _tile_costs(importance: Tensor, w: Tensor, scheme: Scheme) -> Tensor:
    """`[*e, in]` as what broadcasts against the tiles `[*e, rows, groups, size]`."""
    cost = accumulated(importance)[..., None, :]
    if scheme.granularity in ("tensor", "block"):
        return scheme.grouped(cost.expand(*cost.shape[:-2], *w.shape[-2:]))
    return cost.unflatten(-1, (scheme.tiles(w.shape)[1], -1))


Solved = tuple[Tensor, Tensor | None]


def _stacked(tiles: Tensor, facts: Sequence[Tensor | None], solve: Callable[..., Solved]) -> Solved:
    """Solves stacks one by one and rows by the chunk; facts are for all rows."""
    if tiles.ndim > 3:
        parts = [_stacked(t, [f if f is None else f[i] for f in facts], solve) for i, t in enumerate(tiles)]
        return _joined(parts, torch.stack)
    rows = max(1, CHUNK // max(tiles[0].numel(), 1))
    return _joined([solve(t, *facts) for t in tiles.split(rows)], torch.cat)


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


def _search(tiles: Tensor, cost: Tensor | None, divisor: Tensor | None, scheme: Scheme, dtype: torch.dtype) -> Solved:
    """Coarse to fine over shares of the range, tile by tile."""
    tiles = accumulated(tiles)
    low, high = tiles.amin(-1), tiles.amax(-1)

    def trial(share: Tensor) -> _Best:
        scale, zero = qparams(low * share, high * share, scheme, dtype, divisor)
        step = (scale if divisor is None else scale / divisor).to(tiles.dtype)
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
