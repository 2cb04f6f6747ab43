"""What a run will take, before it begins: memory and disk by arithmetic on headers, seconds by trials."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ptq.io.output import resolved
from ptq.io.writer import Writer
from ptq.models.probe import Segment
from ptq.numerics.lazy import Lazy
from ptq.numerics.leaves import compressed, nbytes
from ptq.pipeline.activations import Activations, activations
from ptq.pipeline.batches import few_tokens
from ptq.pipeline.budget import available_bytes, limits_private, memory_limit, resident_bytes
from ptq.pipeline.estimates import BlockEstimate, Estimate, Seconds
from ptq.pipeline.plan import Member, needs_data
from ptq.pipeline.scan import Job, workers
from ptq.pipeline.spine import STACK, Batch
from ptq.pipeline.tasks import Task, signature, tasks
from ptq.pipeline.trial_files import Rates, file_rates
from ptq.pipeline.trial_forward import Kind, Passage, kind, trial_forward
from ptq.pipeline.trial_solve import Cost, cost

_FLOPS = 1 << 36  # of a trial's way through the largest block: about a second
_TOKENS = 256  # what it has at least, so that products are as fast as in a run


def estimate(job: Job, out: str | Path | None = None, form: str = "auto") -> Estimate:
    """Estimates a run; reads no weight and leaves nothing behind.

    Args:
        job: what will be done.
        out: where the result will be: that disk is tried. Default: the system's place for temporary files.
        form: what weights will be stored as, as `ptq.save` takes it.
    """
    disk, device = _existing(out), job.place.device
    free = shutil.disk_usage(disk or tempfile.gettempdir()).free
    try:
        blocks = _blocks(job, form, disk)
    except OSError as error:
        if disk is None or error.errno != errno.ENOSPC:
            raise
        blocks = _blocks(job, form, None)  # a disk with no room for trials is told, with the speed of another one
    # After the trials, since what torch sets up at its first forward and solve stays.
    resident = resident_bytes(device) + _stacks(job)
    limit = min(memory_limit(device), resident + available_bytes(device))
    return Estimate(blocks, resident, limit, free, job.offload.free if job.offload else 0)


def _blocks(job: Job, form: str, disk: Path | None) -> tuple[BlockEstimate, ...]:
    """Tried in a thread, as a run does it: OpenMP waits in another way where several threads compute."""
    with tempfile.TemporaryDirectory(dir=disk, prefix="ptq-trial-") as scratch, ThreadPoolExecutor(1) as thread:
        return thread.submit(_tried, job, form, Path(scratch)).result()


def _stacks(job: Job) -> int:
    """What the micro-batches' threads set aside, where that counts."""
    measured = any(needs_data(member) for stage in job.plan.stages for member in stage)
    return len(job.batches) * STACK if measured and limits_private(job.place.device) else 0


def _tried(job: Job, form: str, scratch: Path) -> tuple[BlockEstimate, ...]:
    writer = Writer(job.plan.model, scratch, _trial_format(job, form), 1 << 40)
    try:
        return tuple(_Estimator(job, writer, file_rates(job.plan.model, writer, scratch)).blocks())
    finally:
        writer.abort()


def _trial_format(job: Job, form: str) -> str:
    """Trials take weights as they are before any stage, which not every format holds that is right for the last one."""
    return "auto" if len(job.stages) > 1 else form


def _existing(out: str | Path | None) -> Path | None:
    """Where something can be put on the disk of a directory that is not there yet."""
    parents = [] if out is None else resolved(out).parents
    return next((p for p in parents if p.is_dir()), None)


class _Visit(NamedTuple):
    """A stage comes to a segment."""

    segment: Segment
    following: Segment | None
    members: Sequence[Member]
    tasks: list[Task]
    runs: bool
    """whether micro-batches go through it"""
    last: bool
    """whether no stage comes after"""
    flight: int | None
    """bytes of all that is worked on at a time, where nothing is measured"""


class _Estimator:
    """Tries one block of each kind and one task of each signature, and counts."""

    def __init__(self, job: Job, writer: Writer, rates: Rates) -> None:
        self.job, self.plan, self.place = job, job.plan, job.place
        self.writer, self.rates = writer, rates
        self.params = job.plan.model.params
        self.shares: list[float] = []
        """sizes of the micro-batches, in trial ones"""
        self.passages: dict[Kind, Passage] = {}
        if any(needs_data(m) for stage in self.plan.stages for m in stage):
            trial = few_tokens(max(job.batches, key=_numbers), self._trial_tokens())
            self.shares = [_numbers(batch) / _numbers(trial) for batch in job.batches]
            self.passages = trial_forward(self.plan, trial, self.place)
        self.first = next(iter(self.passages.values()), Passage(0.0, 0, 0, 0, {}, 0))
        self.costs: dict[Any, Cost] = {}

    def blocks(self) -> list[BlockEstimate]:
        """All stages together."""
        todo = self.plan.stages or ((),)
        stages = [list(map(self._block, self._visits(members, members is todo[-1]))) for members in todo]
        return [reduce(BlockEstimate.then, block) for block in zip(*stages, strict=True)]

    def _visits(self, members: Sequence[Member], last: bool) -> list[_Visit]:
        segments = self.plan.segments
        work = [list(tasks(members, segment)) for segment in segments]
        checks = any(m.transform.kind == "reparam" for m in members)
        met = [i for i, s in enumerate(segments) if work[i] or (checks and s.module is not None)]
        if not any(map(needs_data, members)):
            flight = self._flight(task for found in work for task in found)
            return [_Visit(s, None, members, t, False, last, flight) for s, t in zip(segments, work, strict=True)]
        end = max(met, default=-1)  # there forwards end
        pairs = zip(segments, (*segments[1:], None), work, strict=True)
        return [_Visit(s, after, members, t, i <= end, last, None) for i, (s, after, t) in enumerate(pairs)]

    def _flight(self, found: Iterable[Task]) -> int:
        """So many of the largest tasks are worked on at a time."""
        return workers() * max((self._cost(task).working + self._read(task.params) for task in found), default=0)

    def _block(self, visit: _Visit) -> BlockEstimate:
        names, costs = visit.segment.params, [self._cost(task) for task in visit.tasks]
        weights = [name for task in visit.tasks for name in task.weights]
        solved = dict(zip(weights, (size for c in costs for size in c.stored), strict=True))
        plain = {n: nbytes(self.params[n]) for n in names if n not in solved}
        parked = self._activations(visit)
        rooms = (*(c.working for c in costs), *(round(size * self.rates.room) for size in plain.values()))
        return BlockEstimate(
            visit.segment.name,
            sum(nbytes(self.params[n]) for n in names),
            sum(map(self._computed, names if visit.runs else ())),
            round(sum(solved.values())) + sum(size * self._copies(n) for n, size in plain.items()),
            0 if visit.last else round(sum(c.solved for c in costs)) + self._changed(visit, plain),
            self._weights(visit, plain),
            parked,
            round(sum(c.solved for c in costs)) + max(rooms, default=0) - parked.statistics,
            self._seconds(visit, costs, parked, sum(plain.values()), sum(solved.values(), 0.0)),
        )

    def _changed(self, visit: _Visit, plain: Mapping[str, int]) -> int:
        """Bytes of the parameters that a change of variables changes, of those that are not solved."""
        changes = [m for m in visit.members if m.transform.kind == "reparam"]
        linked = {n for m in changes for link in m.links for n in (link.source, *link.sinks)}
        alone = {n for m in changes if not m.links for names in m.sites.values() for n in names}
        return sum(plain.get(n, 0) for n in linked | alone)

    def _weights(self, visit: _Visit, plain: Iterable[str]) -> int:
        """Bytes of weights that are in memory."""
        if visit.flight is not None:
            return visit.flight + self._read(plain)
        after = visit.following.params if visit.following else ()
        return self._read((*visit.segment.params, *after)) + sum(
            map(self._cast, visit.segment.params if visit.runs else ())
        )

    def _activations(self, visit: _Visit) -> Activations:
        if not visit.runs:
            return Activations("nothing")
        passage = self._passage(visit.segment)
        return activations(self.job, visit.segment, visit.tasks, passage, self.shares)

    def _seconds(self, visit: _Visit, costs: Sequence[Cost], parked: Activations, plain: int, solved: float) -> Seconds:
        passage, rates = self._passage(visit.segment), self.rates
        solves, reading = sum(c.solve for c in costs), self._read(visit.segment.params) * rates.reading
        writing = sum(c.writing for c in costs) + plain * rates.writing + (plain + solved) * rates.syncing + rates.safe
        if visit.flight is not None:  # written beside the others' solves
            writing = max(0.0, writing - solves - reading)
        return Seconds(
            passage.seconds * self._forwards(visit, parked) if visit.runs else 0.0,
            sum(c.statistics for c in costs) * passage.tokens * sum(self.shares),
            solves,
            reading,
            writing,
        )

    def _forwards(self, visit: _Visit, parked: Activations) -> float:
        """How many trial micro-batches' worth of the block's forward is run."""
        changes = [m for m in visit.members if m.transform.kind == "reparam"]
        changes = [m for m in changes if any(site in visit.segment.params for site in m.sites)]
        apart = any(task.whole for task in visit.tasks) or parked.parked == "two forwards"
        times = 1 + apart + sum(bool(m.kinds) for m in changes)
        return times * sum(self.shares) + 2 * max(self.shares) * len(changes)  # before and after, on one micro-batch

    def _cost(self, task: Task) -> Cost:
        key = signature(self.plan, task)
        if key not in self.costs:
            rows = round(self.first.tokens * max(self.shares, default=0.0))
            self.costs[key] = cost(self.plan, task, self.place, max(1, rows), self.writer)
        return self.costs[key]

    def _passage(self, segment: Segment) -> Passage:
        """Between blocks, and where the trial did not come, micro-batches hold what they enter the first block with."""
        known = None if segment.module is None else self.passages.get(kind(self.plan, segment))
        return known or self.first._replace(seconds=0.0, held={}, peak=self.first.entered)

    def _computed(self, name: str) -> int:
        return self.params[name].shape.numel() * self._dtype(name).itemsize

    def _cast(self, name: str) -> int:
        """What computing with a weight takes beside the weight."""
        leaf = self.params[name]
        there = not compressed(leaf) and leaf.dtype == self._dtype(name) and self.place.device.type == "cpu"
        return 0 if there else self._computed(name)

    def _dtype(self, name: str) -> torch.dtype:
        own = self.params[name].dtype
        return self.place.dtype if self.place.dtype and own.is_floating_point else own

    def _read(self, names: Iterable[str]) -> int:
        """Bytes that are read from files."""
        return sum(nbytes(self.params[n]) for n in names if isinstance(self.params[n], Lazy))

    def _copies(self, name: str) -> int:
        """Under how many names a parameter is stored: loaders tie all or nothing."""
        return 1 if self.writer.tied else 1 + sum(name == canonical for canonical in self.plan.model.aliases.values())

    def _trial_tokens(self) -> int:
        blocks = [s for s in self.plan.segments if s.module is not None]
        largest = max((sum(self.params[n].shape.numel() for n in s.params) for s in blocks), default=1)
        return max(_TOKENS, _FLOPS // (2 * largest))


def _numbers(batch: Batch) -> int:
    """The size of a batch, by which its costs grow."""
    return sum(t.numel() for t in pytree.tree_leaves((batch.args, batch.kwargs)) if isinstance(t, Tensor))
