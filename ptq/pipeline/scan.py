"""The driver's loops: stages over a model, block by block, from a plan to finished leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from ptq.base import Stage, State
from ptq.io.job import Report, Store
from ptq.models.call import stand_ins
from ptq.models.probe import Segment
from ptq.pipeline.ahead import ahead, undivided
from ptq.pipeline.blocks import BlockRunner, Solved
from ptq.pipeline.offload import Offload
from ptq.pipeline.place import Place, computed
from ptq.pipeline.plan import Member, Plan, needs_data
from ptq.pipeline.report import peak_bytes
from ptq.pipeline.spine import Batch, Spine, Stop
from ptq.pipeline.weights import Weights

_WORKERS = 4


def workers() -> int:
    """Weights that are worked on at a time where nothing is measured; more would wait for the disk, and take memory."""
    return min(torch.get_num_threads(), _WORKERS)


class Job(NamedTuple):
    """All that is decided before the first token."""

    plan: Plan
    batches: Sequence[Batch]
    stages: Sequence[Stage]
    seed: int
    place: Place
    offload: Offload | None
    room: int | None
    """bytes that parked activations may take before a block is measured in two forwards; None: as much as they need"""

    @property
    def settled(self) -> dict[str, Any]:
        """What this machine decided and results depend on; a job that goes on elsewhere keeps to it."""
        return {"room": self.room}


class Block(NamedTuple):
    """A finished block: what no later step will change."""

    name: str
    state: State
    report: Report


class Step(NamedTuple):
    """A block of a stage is begun; stages and blocks are counted from 0."""

    stage: int
    block: int
    name: str


class Host(Protocol):
    """Whose work it is: where finished blocks go, and who is told."""

    store: Store
    keeps: bool
    """whether finished leaves stay in memory"""
    watch: Callable[[Step], None]

    def recall(self, reports: Sequence[Report]) -> None: ...
    def note(self, report: Report) -> None: ...


def passes(job: Job, host: Host) -> Generator[Block]:
    """All stages, less what the store has already; only the last one's blocks are finished and come out."""
    stages = job.plan.stages or ((),)
    last = len(stages) - 1
    pasts = [host.store.past(number) for number in range(len(stages))]
    job = job._replace(**host.store.settle(job.settled))
    host.recall(pasts[last].reports)
    if len(pasts[last].reports) == len(job.plan.segments):
        return
    weights = Weights(job.plan.model.params, job.plan.trace.transposed, job.place)
    earlier: list[Report] = [{"seconds": 0.0, "weights": []} for _ in job.plan.segments]
    try:
        for number, (members, past) in enumerate(zip(stages, pasts, strict=True)):
            weights.replace(past.params)
            earlier[: len(past.reports)] = past.reports
            for i, segment, own in _scan(job, number, members, weights, len(past.reports), host):
                leaves = {n: weights.params[n] for n in segment.params}
                with undivided():
                    leaves, earlier[i] = host.store.put(number, leaves, _joined(earlier[i], own))
                if number < last:
                    weights.replace(leaves)
                else:
                    host.note(earlier[i])
                    yield Block(segment.name, State(leaves), earlier[i])
    finally:
        weights.close()


def _joined(earlier: Report, report: Report) -> Report:
    """What was done to a block in a stage, after what was done to it in the stages before."""
    seconds = earlier["seconds"] + report["seconds"]
    return {**report, "seconds": seconds, "weights": [*earlier["weights"], *report["weights"]]}


def _scan(
    job: Job, number: int, members: Sequence[Member], weights: Weights, done: int, host: Host
) -> Iterator[tuple[int, Segment, Report]]:
    """One stage over the model, from block `done` on: a clock around each, whichever way it is worked on."""
    segments = job.plan.segments
    if done == len(segments):
        return
    finished = frozenset(n for s in segments[:done] for n in s.params)
    runner = BlockRunner(job.plan, members, job.batches, weights, job.seed, job.room, finished, job.offload)
    work = _Pass(job, number, runner, weights, segments[done:], host)
    began = time.perf_counter()
    for i, segment in enumerate(work.spined() if any(map(needs_data, members)) else work.dataless(), done):
        report = {"name": segment.name, "seconds": time.perf_counter() - began, "peak_bytes": peak_bytes()}
        yield i, segment, {**report, "weights": [{**row, "stage": number + 1} for row in runner.rows(segment)]}
        began = time.perf_counter()


@dataclass(frozen=True)
class _Pass:
    """One stage's order of work."""

    job: Job
    number: int
    runner: BlockRunner
    weights: Weights
    left: Sequence[Segment]
    """what is to be finished; the blocks before are"""
    host: Host

    def dataless(self) -> Iterator[Segment]:
        """Nothing is measured, so no forward runs, and weights are worked on ahead of those that are being written."""
        parts = {segment: self.runner.parts(segment) for segment in self.left}
        flat = ((segment, sites) for segment in self.left for sites in parts[segment])
        with closing(ahead(self._solved, flat, workers())) as solved:
            for segment in self.left:
                self._begin(segment)
                for _ in parts[segment]:
                    self.runner.take(next(solved))
                yield self.runner.finished(segment)
                self._finish(segment)

    def _solved(self, part: tuple[Segment, Sequence[str]]) -> Solved:
        with self.job.place.alone():
            return self.runner.solved(*part, {})

    def spined(self) -> Iterator[Segment]:
        """Segments in the plan's order, each when no micro-batch will meet it unfinished.

        Blocks that are finished already are gone through as before, only that nothing is solved there: so every stop
        has the inputs that it would have had.
        """
        plan, runner = self.job.plan, self.runner
        at = {s.module: s for s in plan.segments if s.module is not None}
        place = {s: i for i, s in enumerate(plan.segments)}
        left, begun = list(self.left), -1
        with self._spine(at) as spine:
            for stop in spine:
                here, *others = (at[s.name] if s.rank == 0 else runner.home[s.name] for s in (stop, *spine.waiting))
                nearest = min(place[s] for s in (here, *others))
                while left and place[left[0]] < place[here]:
                    done = left.pop(0)
                    yield runner.finished(done)
                    if place[done] < nearest:
                        self._finish(done)
                if place[here] > begun and left:
                    begun = place[here]
                    self._begin(here)
                self._work(spine, stop, here)
                if not runner.todo:
                    break
        for segment in left:
            yield runner.finished(segment)
            self._finish(segment)

    def _work(self, spine: Spine, stop: Stop, here: Segment) -> None:
        arrived = spine.waiting[stop]
        with self.job.place.alone():
            if stop.rank == 1:
                self.runner.solve_site(stop.name, arrived)
            else:
                solved = set(self.runner.enter(here, arrived))
                spine.skip(s for s in self._stops.values() if s.name in solved)

    def _spine(self, at: Mapping[str, Segment]) -> Spine:
        plan, weights, place = self.job.plan, self.weights, self.job.place
        order = self._order
        entries = {path: Stop(min(order[n] for n in s.params), 0, path) for path, s in at.items()}
        module = computed(plan.model, place).module
        self.runner.module = module
        with place.alone():
            self.runner.solve_tables()
        handles, aliases = stand_ins(plan.model.params, place.dtype, place.device), plan.model.aliases
        batches, offload = self.job.batches, self.job.offload
        return Spine(module, handles, aliases, batches, weights, self._stops, entries, weights, offload)

    @cached_property
    def _order(self) -> dict[str, int]:
        """The parameters' order, aliases too."""
        named = self.job.plan.model.module.named_parameters(remove_duplicate=False)
        return {name: i for i, (name, _) in enumerate(named)}

    @cached_property
    def _stops(self) -> dict[str, Stop]:
        """Weight -> where micro-batches wait for it."""
        sites = self.job.plan.trace.sites
        return {w: Stop(self._order[s], 1, s) for s in self.runner.sites for w in sites.get(s, ())}

    def _begin(self, segment: Segment) -> None:
        self.host.watch(Step(self.number, self.job.plan.segments.index(segment), segment.name))

    def _finish(self, segment: Segment) -> None:
        """After a block was taken: a run that keeps nothing lets go of what no forward will read again."""
        plan = self.job.plan
        if not self.host.keeps and self.number == len(plan.stages or ((),)) - 1:  # no later stage reads these leaves
            shared = set(plan.model.aliases.values())
            self.weights.release(n for n in segment.params if n not in shared and plan.trace.reads.get(n, 0) <= 1)
