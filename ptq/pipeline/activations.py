"""What all micro-batches hold while they are parked in a block, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ptq.models.probe import Segment
from ptq.pipeline.budget import budget, parked_bytes
from ptq.pipeline.place import Place
from ptq.pipeline.plan import Plan
from ptq.pipeline.tasks import Task
from ptq.pipeline.trial_forward import Passage, local

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


def activations(
    plan: Plan,
    segment: Segment,
    found: Sequence[Task],
    passage: Passage,
    shares: Sequence[float],
    place: Place,
    offload: bool,
) -> Activations:
    """What happens to a block's activations.

    Args:
        plan: the model.
        segment: the block, or what lies between two.
        found: what is solved of it.
        passage: a trial micro-batch's way through it.
        shares: sizes of all micro-batches, in trial ones.
        place: where.
        offload: whether they are put elsewhere while they wait.
    """
    sites = [weights[0] for task in found if not task.whole for weights in task.sites.values()]
    parked = "offload" if offload else _parked(plan, segment, passage, sum(shares), place) if sites else "memory"
    at_sites = [passage.held.get(local(segment, w), passage.entered) for w in sites]
    held = passage.entered if parked == "two forwards" else max(at_sites, default=passage.entered)
    total = round(held * sum(shares))
    if parked == "offload":
        return Activations(parked, 0, total, round(passage.peak * max(shares)))
    return Activations(parked, total, 0, round((passage.peak - held) * max(shares)))


def _parked(plan: Plan, segment: Segment, passage: Passage, total: float, place: Place) -> Parked:
    params = plan.model.params
    itemsize = (place.dtype or params[segment.params[0]].dtype).itemsize
    tokens = round(passage.tokens * total)
    needed = parked_bytes(segment, tokens, passage.hidden, params, itemsize)
    return "memory" if needed <= budget(place.device) else "two forwards"
