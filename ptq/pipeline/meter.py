"""Clocks and gauges for trials."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_TIMES, _SHORT = 5, 0.5


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


def timed_well(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """The same; short work is done several times, for the median, since what else the machine does is no part of it."""
    times: list[float] = []
    result = None
    while not times or (len(times) < _TIMES and sum(times) < _SHORT):
        seconds, result = timed(device, work)
        times.append(seconds)
    return median(times), result


def clock(device: torch.device) -> float:
    """A time in seconds, when the device has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    """What holds the values of all tensors that have any."""
    tensors = (t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))
    return [t.untyped_storage() for t in tensors if not t.is_meta]


def _identity(storage: torch.UntypedStorage) -> int:
    """Which memory it is, whatever it is looked at as."""
    return storage._cdata  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # torch has no public word for it
