"""Clocks and gauges for trials."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Meter(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, for as long as these live.

    What a kernel takes and gives back by itself is not seen. The mode lives in the thread that enters it.

    >>> with Meter() as meter:
    ...     kept = torch.ones(4) + torch.ones(4)
    >>> meter.live, meter.peak
    (16, 48)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_identity(storage) for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if _identity(storage) not in given and _identity(storage) not in self._alive:
                self._born(storage)
        return out

    def _born(self, storage: torch.UntypedStorage) -> None:
        key, size = _identity(storage), storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _: self._died(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _died(self, key: int, size: int) -> None:
        del self._alive[key]
        self.live -= size


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that some work takes, and what it returns."""
    began = clock(device)
    result = work()
    return clock(device) - began, result


def clock(device: torch.device) -> float:
    """A time in seconds, when the device has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def _identity(storage: torch.UntypedStorage) -> int:
    """Which memory it is; that of meta tensors, which lie nowhere, has an identity too."""
    return storage._cdata  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # torch has no public word for it
