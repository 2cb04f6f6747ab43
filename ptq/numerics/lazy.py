"""Leaves that lie somewhere else until they are used: only shapes and dtypes are in memory."""

from __future__ import annotations

import torch

from ptq.numerics.leaves import Leaf, compressed, dense


class Lazy:
    """A leaf that is read when it is used, every time it is used.

    Opaque to pytrees: it has no tensors yet. `load` gives the leaf that has them, which is not kept.
    """

    shape: torch.Size
    dtype: torch.dtype
    device = torch.device("cpu")

    def load(self) -> Leaf:
        """The leaf itself, its tensors in memory."""
        raise NotImplementedError


def load(leaf: Leaf) -> Leaf:
    """The leaf with its tensors in memory, compressed if it is compressed.

    >>> load(torch.ones(2))
    tensor([1., 1.])
    """
    return leaf.load() if isinstance(leaf, Lazy) else leaf


@dense.register
def _(leaf: Lazy) -> torch.Tensor:
    return dense(leaf.load())


@compressed.register
def _(leaf: Lazy) -> bool:
    return False
