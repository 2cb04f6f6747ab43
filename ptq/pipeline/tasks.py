"""How a stage's solves take a segment's weights: site by site, or all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ptq.base import Sites
from ptq.models.probe import Segment
from ptq.pipeline.plan import Member, Plan


class Task(NamedTuple):
    """Weights that are solved together: those of a site, or of a whole block where a transform must see it at once."""

    members: tuple[Member, ...]
    """the solves that take part, in order"""
    sites: Sites
    """site -> weights that any of them takes"""
    params: tuple[str, ...]
    """what the transforms are given"""
    whole: bool = False
    """whether a transform must see the whole block"""

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(w for weights in self.sites.values() for w in weights)

    def kinds(self, site: str) -> tuple[str, ...]:
        """The statistics of a site's input that are measured."""
        return tuple(dict.fromkeys(kind for m in self.members for kind in m.kinds.get(site, ())))

    def share(self, member: Member) -> Sites:
        """A member's part of the sites."""
        return {site: member.sites[site] for site in self.sites if site in member.sites}


def tasks(members: Sequence[Member], segment: Segment) -> Iterator[Task]:
    """What is to be solved of a segment in one stage."""
    solves = tuple(m for m in members if m.transform.kind == "solve")
    own: dict[str, dict[str, None]] = {}
    for site, weights in ((site, ws) for m in solves for site, ws in m.sites.items()):
        if weights[0] in segment.params:
            own.setdefault(site, {}).update(dict.fromkeys(weights))
    sites = {site: tuple(weights) for site, weights in own.items()}
    whole = {site for m in solves if m.transform.scope == "block" for site in m.sites}
    together = {site: weights for site, weights in sites.items() if site in whole}
    if together:
        yield Task(_takers(solves, together), together, segment.params, whole=True)
    for site, weights in sites.items():
        if site not in whole:
            yield Task(_takers(solves, {site: weights}), {site: weights}, weights)


def _takers(solves: Sequence[Member], sites: Sites) -> tuple[Member, ...]:
    return tuple(m for m in solves if any(site in m.sites for site in sites))


def signature(plan: Plan, task: Task) -> Any:
    """What tasks of equal cost have in common: transforms, shapes, dtypes, and which of them share an input."""

    def looks(weight: str) -> tuple[Any, ...]:
        leaf = plan.model.params[weight]
        takers = (m.transform.name for m in task.members if any(weight in ws for ws in m.sites.values()))
        return tuple(leaf.shape), leaf.dtype, weight in plan.trace.transposed, tuple(takers)

    return tuple(tuple(map(looks, ws)) for ws in task.sites.values()), tuple(map(looks, task.params))
