"""Matrices a few rows at a time, so that what is worked out on the way stays in a core's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ptq._tree import tensors, tree_map

CHUNK = 1 << 19
"""Elements worked on at a time: two megabytes in float32, and enough that Python's own time does not count."""


def by_rows(function: Callable[..., Tensor], matrix: Any, *facts: Any) -> Tensor:
    """`function(matrix, *facts)`, where each row of it depends on the same row of each argument only.

    Args:
        function: gives `[rows, any]` for `[rows, in]` and the facts of these rows.
        matrix: a leaf `[*e, out, in]`, as for `few_rows`.
        facts: more of them, `[*e, out or 1, any]`.

    >>> by_rows(lambda m, s: (m * s).sum(-1, keepdim=True), torch.ones(2, 3), torch.tensor([[5.0], [7.0]]))
    tensor([[15.],
            [21.]])
    """
    parts = few_rows(matrix, *facts)
    first = function(*next(parts))
    rows, done = matrix.shape[:-1].numel(), first.shape[:-1].numel()
    if done == rows:
        return first.reshape((*matrix.shape[:-1], *first.shape[-1:]))  # a number stays one
    # Each part goes to its place at once: kept until all are there, none could use the memory of the one before.
    whole = first.new_empty(rows, first.shape[-1])
    whole[:done] = first.flatten(0, -2)
    for part in parts:
        found = function(*part).flatten(0, -2)  # of several experts where these are small
        whole[done : done + len(found)] = found
        done += len(found)
    return whole.reshape(*matrix.shape[:-1], first.shape[-1])


def few_rows(matrix: Any, *others: Any) -> Iterator[tuple[Any, ...]]:
    """Leaves, some rows of each at a time, of one expert after the other.

    All rows come at once where they are few, where they cannot be told apart (several share a scale, or a leaf is no
    tree of matrices), and on devices where launches cost more than memory.

    Args:
        matrix: a leaf `[*e, out, in]`, a tensor or a tree of tensors `[*e, out or 1, any]`.
        others: more of them, with as many rows or one.
    """
    leaves = (matrix, *others)
    if matrix.shape.numel() <= CHUNK or not _cuttable(leaves, matrix.shape):
        yield leaves
    elif len(matrix.shape) > 2:
        for i in range(matrix.shape[0]):
            yield from few_rows(*(tree_map(lambda t, i=i: t[i], leaf) for leaf in leaves))
    else:
        out, columns = matrix.shape
        few = max(1, CHUNK // columns)
        for start in range(0, out, few):
            yield tuple(tree_map(lambda t, a=start: t if t.shape[0] == 1 else t[a : a + few], x) for x in leaves)


def _cuttable(leaves: tuple[Any, ...], shape: torch.Size) -> bool:
    held = [t for leaf in leaves for t in tensors(leaf)]
    return all(isinstance(t, Tensor) and t.device.type == "cpu" and t.ndim == len(shape) for t in held) and all(
        t.ndim > 1 and t.shape[:-1] in (shape[:-1], (*shape[:-2], 1)) for t in held
    )
