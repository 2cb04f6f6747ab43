"""What a run will take, as a value."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

from ptq.pipeline.activations import Activations


class Seconds(NamedTuple):
    """Where the time goes."""

    forward: float = 0.0
    statistics: float = 0.0
    solves: float = 0.0
    reading: float = 0.0
    writing: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))


class BlockEstimate(NamedTuple):
    """A block of the plan, all stages together; bytes, but for the last."""

    name: str
    read: int
    """of its weights as they are read"""
    computed: int
    """of its weights as they are computed with"""
    stored: int
    """of its weights as they will be stored"""
    kept: int
    """of its weights as earlier stages leave them, which lie beside the result until it is whole"""
    weights: int
    """of weights in memory: as they are read, cast where that is not the same, and those that are worked on ahead"""
    activations: Activations
    working: int
    """what statistics, solves and the writer need, solved weights included"""
    seconds: Seconds

    @property
    def memory(self) -> int:
        """What is in memory at once."""
        return self.weights + self.activations.held + self.activations.running + self.working

    def then(self, later: BlockEstimate) -> BlockEstimate:
        """This stage and a later one: memory is that of the one that needs most."""
        most, kept = max(self, later, key=lambda b: b.memory), self.kept + later.kept
        return most._replace(stored=later.stored, kept=kept, seconds=self.seconds.plus(later.seconds))


class Estimate(NamedTuple):
    """What a run will take."""

    blocks: tuple[BlockEstimate, ...]
    resident: int
    """bytes of memory that this process has already, or sets aside before the first block"""
    limit: int
    """bytes that it may have"""
    free: int
    """bytes free on the disk that the result goes to"""
    elsewhere: int = 0
    """bytes free where activations are offloaded to"""

    @property
    def peak(self) -> int:
        """The most bytes of memory at any time, if freed memory is used again whichever thread freed it."""
        return self.resident + max((b.memory for b in self.blocks), default=0)

    @property
    def disk(self) -> int:
        """Bytes of tensors in the result."""
        return sum(b.stored for b in self.blocks)

    @property
    def kept(self) -> int:
        """Bytes that lie beside the result until it is whole."""
        return sum(b.kept for b in self.blocks)

    @property
    def spilled(self) -> int:
        """The most bytes at the offload place at any time."""
        return max((b.activations.spilled + b.activations.statistics for b in self.blocks), default=0)

    @property
    def fits(self) -> bool:
        """Whether there is room for all of it."""
        needs = ((self.peak, self.limit), (self.disk + self.kept, self.free), (self.spilled, self.elsewhere))
        return all(needed <= there for needed, there in needs)

    @property
    def seconds(self) -> Seconds:
        return reduce(Seconds.plus, (b.seconds for b in self.blocks), Seconds())
