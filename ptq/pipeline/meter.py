"""Clocks and gauges for trials."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from ptq.pipeline.allocations import Allocations

_TIMES, _SHORT = 5, 0.5


class Meter(Allocations):
    """Counts the bytes of the tensors that operations make, for as long as these live.

    >>> with Meter() as meter:
    ...     kept = torch.ones(4) + torch.ones(4)
    >>> meter.live, meter.peak
    (16, 48)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def born(self, storage: torch.UntypedStorage) -> None:
        super().born(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)

    def died(self, key: int, size: int) -> None:
        super().died(key, size)
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
