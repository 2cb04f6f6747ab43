"""Leaves that lie somewhere else until they are used: only shapes and dtypes are in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ptq.numerics.leaves import Leaf, Sparse, Transposed, compressed, dense


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


@dataclass(frozen=True)
class Around(Lazy):
    """Another leaf, given as something else when it is used."""

    leaf: Leaf

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # read only
        return self.leaf.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # read only
        return self.leaf.dtype


@dataclass(frozen=True)
class Decoded(Around):
    """A compressed leaf as the float weight that it stands for; what is pruned stays so."""

    def load(self) -> Leaf:
        return _floats(load(self.leaf))


def _floats(leaf: Leaf) -> Leaf:
    if isinstance(leaf, Transposed):
        return Transposed(_floats(leaf.leaf))
    return replace(leaf, values=dense(leaf.values)) if isinstance(leaf, Sparse) else dense(leaf)


@dense.register
def _(leaf: Lazy) -> torch.Tensor:
    return dense(leaf.load())


@compressed.register
def _(leaf: Lazy) -> bool:
    return False
