"""What all micro-batches hold while they are parked in a block, and where; and statistics that go there too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from ptq.models.probe import Segment
from ptq.pipeline.budget import budget, parked_bytes
from ptq.pipeline.scan import Job
from ptq.pipeline.tasks import Task
from ptq.pipeline.trial_forward import Passage, local
from ptq.pipeline.trial_solve import statistics_bytes

Parked = Literal["nothing", "memory", "offload", "two forwards"]


class Activations(NamedTuple):
    """Bytes, of all micro-batches together."""

    parked: Parked
    """nothing: no forward runs; two forwards: too much to park, so the block is measured in a forward of its own"""
    held: int = 0
    """in memory"""
    spilled: int = 0
    """at the offload place"""
    running: int = 0
    """what a forward needs beside; one runs at a time"""
    statistics: int = 0
    """at the offload place too: of a block that must be seen at once, what would not fit"""


def activations(
    job: Job, segment: Segment, found: Sequence[Task], passage: Passage, shares: Sequence[float]
) -> Activations:
    """What happens to a block's activations.

    Args:
        job: the model, where it is computed, and what room there is.
        segment: the block, or what lies between two.
        found: what is solved of it.
        passage: a trial micro-batch's way through it.
        shares: sizes of all micro-batches, in trial ones.
    """
    sites = [weights[0] for task in found if not task.whole for weights in task.sites.values()]
    over = job.room is not None and _needed(job, segment, passage, sum(shares)) > job.room
    parked: Parked = "offload" if job.offload else "two forwards" if sites and over else "memory"
    at_sites = [passage.held.get(local(segment, w), passage.entered) for w in sites]
    held = passage.entered if parked == "two forwards" else max(at_sites, default=passage.entered)
    total = round(held * sum(shares))
    if parked == "offload":
        return Activations(parked, 0, total, round(passage.peak * max(shares)), _overflow(job, found))
    return Activations(parked, total, 0, round((passage.peak - held) * max(shares)))


def _overflow(job: Job, found: Sequence[Task]) -> int:
    """Statistics fill the room that there is for them one after the other; those that come then are put away."""
    sizes = [size for task in found if task.whole for size in statistics_bytes(job.plan, task)]
    room = budget(job.place.device)
    return sum(size for size, held in zip(sizes, accumulate(sizes), strict=True) if held > room)


def _needed(job: Job, segment: Segment, passage: Passage, total: float) -> int:
    params = job.plan.model.params
    itemsize = (job.place.dtype or params[segment.params[0]].dtype).itemsize
    return parked_bytes(segment, round(passage.tokens * total), passage.hidden, params, itemsize)
