"""Tiles: rectangles of a weight whose elements share a scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Tile = tuple[int, int]
"""Rows and columns."""


def tile_of(tiles: Sequence[int], shape: Sequence[int]) -> Tile:
    """Rows and columns of a tile, where so many cover a weight and only the last ones may be cut off.

    >>> tile_of((2, 1), (4, 6))
    (2, 6)
    """
    (a, b), (rows, columns) = tiles[-2:], shape[-2:]
    return -(-rows // a), -(-columns // b)


def fits(tiles: Sequence[int], shape: Sequence[int], tile: Tile | None = None) -> bool:
    """Whether so many tiles cover a weight, none of them beyond its end.

    >>> fits((3, 1), (300, 64), (128, 64)), fits((3, 1), (300, 64)), fits((301, 1), (300, 64))
    (True, True, False)
    """
    if tile is None:
        return all(0 < t <= n for t, n in zip(tiles[-2:], shape[-2:], strict=True))
    return min(tile) > 0 and all(t == -(-n // size) for t, n, size in zip(tiles[-2:], shape[-2:], tile, strict=True))


def spread(tiles: Tensor, shape: torch.Size, tile: Tile | None = None) -> Tensor:
    """Gives each element its tile's value: `[*e, a, b]` to `[*e, out, in]` (a last tile may be cut off).

    >>> spread(torch.tensor([[1.0, 2.0]]), torch.Size((2, 4)))
    tensor([[1., 1., 2., 2.],
            [1., 1., 2., 2.]])
    """
    (*e, a, b), (*_, rows, columns) = tiles.shape, shape
    high, wide = tile or tile_of(tiles.shape, shape)
    whole = tiles[..., :, None, :, None].expand(*e, a, high, b, wide)
    return whole.reshape(*e, a * high, b * wide)[..., :rows, :columns]


def per_tile(op: Callable[[Tensor, Tensor], Tensor], t: Tensor, tiles: Tensor, tile: Tile | None = None) -> Tensor:
    """`op(t, spread(tiles, t.shape, tile))`, for an operation on elements; whole tiles are not written out for it.

    >>> per_tile(torch.mul, torch.ones(2, 4), torch.tensor([[1.0, 2.0]]))
    tensor([[1., 1., 2., 2.],
            [1., 1., 2., 2.]])
    """
    (a, b), (rows, columns) = tiles.shape[-2:], t.shape[-2:]
    if rows % a or columns % b or (tile is not None and tile != (rows // a, columns // b)):
        return op(t, spread(tiles, t.shape, tile))
    parted = t.unflatten(-1, (b, columns // b)).unflatten(-3, (a, rows // a))
    return op(parted, tiles[..., :, None, :, None]).reshape(t.shape)
