"""Weights whose groups are no runs of columns: each column says which scale is its own.

Old quantizers sorted columns by how much they matter, grouped them in that order and stored them in the original one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ptq._tree import node
from ptq.numerics.leaves import Leaf, Quantized, dense, nbytes


@node
class Indexed:
    """`(codes[r, c] - zero[r, columns[c]]) * scale[r, columns[c]]`, rounded once to the leaf's dtype.

    Invariants:
        leaf: codes in the order of the weight's columns; scales and zero points `[*e, a, groups]`, one column of them
            for each group.
        columns: `[*e, in]`, integers in `0 .. groups - 1`.
    """

    leaf: Quantized
    columns: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.leaf.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.leaf.dtype

    @property
    def device(self) -> torch.device:
        return self.leaf.device


@dense.register
def _(leaf: Indexed) -> Tensor:
    inner, columns = leaf.leaf, leaf.columns.long().unsqueeze(-2)
    scale = dense(inner.scale).take_along_dim(columns, -1)
    zero = None if inner.zero is None else inner.zero.take_along_dim(columns, -1)
    return dense(replace(inner, scale=scale, zero=zero, tile=None))  # a scale for each column


@nbytes.register
def _(leaf: Indexed) -> int:
    return nbytes(leaf.leaf) + 4 * leaf.columns.numel()


def simplest(leaf: Indexed) -> Leaf:
    """The same values without the indices, where these only say that groups are runs of columns.

    >>> from ptq.numerics.grids import Int
    >>> q = Quantized(torch.zeros(1, 4, dtype=torch.int8), torch.ones(1, 2), None, Int(4), torch.float32)
    >>> simplest(Indexed(q, torch.tensor([0, 0, 1, 1]))) is q, simplest(Indexed(q, torch.tensor([0, 1, 1, 0]))) is q
    (True, False)
    """
    width = leaf.leaf.tile[1] if leaf.leaf.tile else -(-leaf.shape[-1] // leaf.leaf.scale.shape[-1])
    runs = torch.arange(leaf.shape[-1], device=leaf.device) // width
    return leaf.leaf if bool((leaf.columns == runs).all()) else leaf
