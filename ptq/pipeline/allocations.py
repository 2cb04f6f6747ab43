"""The memory that operations allocate, told apart from what they only look at."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Notes each storage that an operation returns and was not given, for as long as it lives.

    What a kernel takes and gives back by itself is not seen. The mode lives in the thread that enters it.

    >>> table = torch.ones(4)
    >>> with Allocations() as noted:
    ...     view, made = table[1:], table + 1
    >>> [s.nbytes() for s in noted.alive()]
    [16]
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}

    def alive(self) -> list[UntypedStorage]:
        """Those that anybody still holds."""
        return [storage for ref in self._alive.values() if (storage := ref()) is not None]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {identity(storage) for storage in storages((args, kwargs))}
        for storage in storages(out):
            if identity(storage) not in given and identity(storage) not in self._alive:
                self.born(storage)
        return out

    def born(self, storage: UntypedStorage) -> None:
        """An operation has allocated it."""
        key, size = identity(storage), storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _: self.died(key, size))

    def died(self, key: int, size: int) -> None:
        """Nobody holds it any more."""
        del self._alive[key]


def storages(tree: Any) -> list[UntypedStorage]:
    """What holds the values of all tensors that have any."""
    tensors = (t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))
    return [t.untyped_storage() for t in tensors if not t.is_meta and t.layout == torch.strided]


def identity(storage: UntypedStorage) -> int:
    """Which memory it is, whatever it is looked at as."""
    return storage._cdata  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # torch has no public word for it
