"""Facts: what a projection knows of each column, as tensors that say it once for all columns that share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from ptq._tree import NAMESPACE, tree_map
from ptq.numerics.tiles import spread as spread_tiles

Facts = Any
"""A pytree of tensors `[*e, out or 1, k]`, where `k` divides `in`: each value serves `in / k` consecutive columns."""


def rows(facts: Facts, order: Tensor | None, block: slice, columns: int) -> Facts:
    """Facts of a block of columns, a column a row: `[*e, block, out or 1]`; `order` says which columns these are."""

    def select(t: Tensor) -> Tensor:
        if t.shape[-1] == 1:
            return t.mT
        at = torch.arange(block.start, block.stop, device=t.device) if order is None else order[..., block]
        return selected(t.mT, at * t.shape[-1] // columns, -2)

    return tree_map(select, facts)


def spread(facts: Facts, shape: Sequence[int]) -> Facts:
    """Facts that broadcast against a weight of this shape."""

    def wide(t: Tensor) -> Tensor:
        return t if t.shape[-1] in (1, shape[-1]) else spread_tiles(t, torch.Size((*t.shape[:-1], shape[-1])))

    return tree_map(wide, facts)


def numbers(facts: Facts, dtype: torch.dtype) -> Facts:
    """Facts to calculate with: numbers in the sweep's dtype, masks as they are."""
    return tree_map(lambda t: t if t.dtype == torch.bool else t.to(dtype), facts)


def turned(facts: Facts) -> Facts:
    """Rows for columns and columns for rows."""
    return tree_map(lambda t: t.mT, facts)


def joined(chosen: Sequence[Facts]) -> Facts:
    """The facts of spans that follow each other, as facts of all their columns."""
    return tree_map(lambda *parts: torch.cat(parts, -1), *chosen)


def unbound(facts: Facts, count: int) -> Iterator[Facts]:
    """Rows of facts, one column after the other."""
    leaves, structure = optree.tree_flatten(facts, namespace=NAMESPACE)
    columns = [t.expand(*t.shape[:-2], count, t.shape[-1]).unbind(-2) for t in leaves]
    return (optree.tree_unflatten(structure, [t[j] for t in columns]) for j in range(count))


def selected(t: Tensor, index: Tensor, dim: int) -> Tensor:
    """Rows (dim -2) or columns (-1) of a matrix, or of each matrix of a stack by an index of its own."""
    if index.ndim == 1:
        return t.index_select(dim, index)
    if dim == -1:
        return selected(t.mT, index, -2).mT
    *e, count = index.shape
    return t.expand(*e, *t.shape[-2:]).gather(-2, index[..., None].expand(*e, count, t.shape[-1]))
