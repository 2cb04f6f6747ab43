"""A plan and its estimate as one value that JSON holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ptq.models.probe import Segment
from ptq.pipeline.estimates import BlockEstimate, Estimate
from ptq.pipeline.plan import Member, Plan, label_table
from ptq.pipeline.tasks import tasks
from ptq.targeting import Labels, reaches


def plan_report(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """Stages with their targets, blocks with their sites and costs, ties, totals. Bytes and seconds."""
    table = label_table(plan.model, plan.trace)
    return {
        "stages": [[_member(m, table) for m in stage] for stage in plan.stages],
        "blocks": [
            {**_block(e), "sites": list(_sites(plan, s))} for s, e in zip(plan.segments, estimate.blocks, strict=True)
        ],
        "ties": dict(plan.model.aliases),
        "untied": list(plan.untied),
        "totals": {
            "memory": {"peak": estimate.peak, "now": estimate.resident, "limit": estimate.limit},
            "bytes": estimate.disk,
            "kept": estimate.kept,
            "free": estimate.free,
            "offload": {"peak": estimate.spilled, "free": estimate.elsewhere},
            "fits": estimate.fits,
            "seconds": {**estimate.seconds._asdict(), "total": estimate.seconds.total},
        },
    }


def _member(member: Member, table: Mapping[str, Labels]) -> dict[str, Any]:
    t = member.transform
    targets = [
        {**clause._asdict(), "reaches": [n for n, labels in table.items() if reaches(clause.pattern, labels)]}
        for clause in t.select
    ]
    weights = [w for ws in member.sites.values() for w in ws]
    return {"transform": t.name, "kind": t.kind, "scope": t.scope, "targets": targets, "weights": weights}


def _sites(plan: Plan, segment: Segment) -> Iterator[dict[str, Any]]:
    """What reads the same tensor, and what is measured of it, stage by stage in the order of parameters."""
    order = {name: i for i, name in enumerate(segment.params)}
    for number, members in enumerate(plan.stages, 1):
        found = ((site, task) for task in tasks(members, segment) for site in task.sites)
        for site, task in sorted(found, key=lambda pair: order[pair[1].sites[pair[0]][0]]):
            shapes = {w: list(plan.model.params[w].shape) for w in task.sites[site]}
            yield {"stage": number, "site": site, "weights": shapes, "statistics": list(task.kinds(site))}


def _block(block: BlockEstimate) -> dict[str, Any]:
    return {
        "name": block.name,
        "read": block.read,
        "computed": block.computed,
        "stored": block.stored,
        "kept": block.kept,
        "weights": block.weights,
        "activations": block.activations._asdict(),
        "working": block.working,
        "memory": block.memory,
        "seconds": {**block.seconds._asdict(), "total": block.seconds.total},
    }
