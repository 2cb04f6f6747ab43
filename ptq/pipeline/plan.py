"""What will be done to which weight, settled before the first token."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from ptq.base import Clause, Link, Params, Sites, Stage, State, Transform
from ptq.errors import BadInput
from ptq.models.call import named
from ptq.models.model import Model
from ptq.models.naming import names_in_files
from ptq.models.probe import Segment, Trace, links, probe
from ptq.models.towers import towers
from ptq.numerics.leaves import Leaf, Transposed
from ptq.pipeline.foresee import abstract, foreseen
from ptq.pipeline.spine import Batch
from ptq.targeting import Labels, label, select


class Member(NamedTuple):
    """A transform with the weights it takes, grouped by the tensor they read."""

    transform: Transform
    sites: Sites
    kinds: Mapping[str, tuple[str, ...]]
    """site -> kinds of statistic the transform must see"""
    links: tuple[Link, ...]


class Plan(NamedTuple):
    """All that is decided before the first token."""

    model: Model
    """the model with ties settled: a tied weight that is targeted has parameters of its own"""
    stages: tuple[tuple[Member, ...], ...]
    trace: Trace
    segments: tuple[Segment, ...]
    untied: tuple[str, ...]
    """names on both sides of ties that hold no more"""


def make_plan(model: Model, stages: Sequence[Stage], example: Batch) -> Plan:
    """Probes the model, resolves targets, settles ties, and asks every transform whether it can take its weights.

    Raises:
        BadInput: a target matches nothing, a weight has the wrong shape or is compressed already, ...
    """
    loose = _untied(model)
    trace = probe(loose, *example.args, **example.kwargs)
    table = label_table(loose, trace)
    chosen = [[(t, select(t.select, table)) for t in stage] for stage in stages]
    taken = {name for stage in chosen for _, names in stage for name in names}
    settled = _settled(model, taken)
    found = links(loose, trace) if any("links" in t.needs for stage in stages for t in stage) else ()
    members = tuple(_members(chosen, settled, trace, found))
    segments = tuple(s for s in (_present(s, settled.params) for s in trace.segments) if s.params)
    return Plan(settled, members, trace, segments, _loosened(model, settled))


def label_table(model: Model, trace: Trace) -> dict[str, Labels]:
    """What patterns are compared with, for every matrix the model reads, in parameter order."""
    classes = {path: type(m).__name__ for path, m in model.module.named_modules()}
    beside = towers(model.module)
    inside = {n for s in trace.segments if s.module is not None and s.module not in beside for n in s.params}
    linear = {w for ws in trace.sites.values() for w in ws if w not in trace.choosing}
    stored = names_in_files(model.module, {n: leaf.shape for n, leaf in model.params.items()})
    return {
        name: label(name, classes, default=name in inside and name in linear, others=stored.get(name, ()))
        for name, leaf in model.params.items()
        if len(leaf.shape) >= 2 and name in trace.kinds
    }


def oriented_params(params: Params, transposed: frozenset[str]) -> Params:
    """Leaves as transforms take them, `[*e, out, in]`, and `Transposed` where the module stores (in, out)."""
    return {name: _oriented(leaf) if name in transposed else leaf for name, leaf in params.items()}


def _oriented(leaf: Leaf) -> Leaf:
    return Transposed(leaf.mT) if isinstance(leaf, Tensor) else leaf


def _untied(model: Model) -> Model:
    return replace(model, state=model.state._replace(params=named(model.params, model.aliases)), aliases={})


def _settled(model: Model, taken: set[str]) -> Model:
    own = {a: n for a, n in model.aliases.items() if a in taken or n in taken}
    params = {**model.params, **{alias: model.params[name] for alias, name in own.items()}}
    aliases = {a: n for a, n in model.aliases.items() if a not in own}
    return replace(model, state=model.state._replace(params=params), aliases=aliases)


def _loosened(before: Model, after: Model) -> tuple[str, ...]:
    sides = {name for pair in before.aliases.items() if pair[0] not in after.aliases for name in pair}
    return tuple(name for name in after.params if name in sides)


def _present(segment: Segment, params: Params) -> Segment:
    return segment._replace(params=tuple(n for n in segment.params if n in params))


Chosen = Sequence[tuple[Transform, list[str]]]
"""a stage's transforms, with the weights that each takes"""


def _members(
    chosen: Sequence[Chosen], model: Model, trace: Trace, found: tuple[Link, ...]
) -> Iterator[tuple[Member, ...]]:
    """Each stage's members in the order in which they act, each asked about what those before it will have made."""
    left = Counter(name for stage in chosen for _, names in stage for name in names)
    params = _abstract(model.params, left, trace)
    for stage in chosen:
        members: list[Member] = []
        for t, names in sorted(stage, key=lambda pair: pair[0].kind == "solve"):
            members.append(_member(t, names, params, trace, found))
            left.subtract(names)
            again = [name for name in names if left[name]]
            params |= foreseen(t, params, again, **extras(members[-1], 0, "", members[-1].links))
        yield tuple(members)


def _member(t: Transform, names: Sequence[str], params: Params, trace: Trace, found: tuple[Link, ...]) -> Member:
    if t.scope == "model" or t.needs - {"links", "key"}:
        raise BadInput(f"{t.name}: scope {t.scope!r} with extras {sorted(t.needs)} is not supported by this version")
    wanted = set(names)
    sites = {s: kept for s, ws in trace.sites.items() if (kept := tuple(w for w in ws if w in wanted))}
    read = {w for ws in sites.values() for w in ws}
    sites.update({n: (n,) for n in names if n not in read})
    _refuse_outside(t, sites, trace)
    linked = tuple(_whole(k, wanted, t) for k in found if wanted & set(k.sinks)) if "links" in t.needs else ()
    given = {"links": linked} if "links" in t.needs else {}
    stats = t.init(State({n: params[n] for n in names}), sites, **given)
    for site in (s for s in stats if s not in trace.sites):
        raise BadInput(f"{site}: {t.name} needs to see its input, but no linear reads it; use a method without data")
    return Member(t, sites, {site: tuple(kinds) for site, kinds in stats.items()}, linked)


def _refuse_outside(t: Transform, sites: Sites, trace: Trace) -> None:
    """A reparam is checked by running a block, so all that it changes must lie in one."""
    inside = {name for s in trace.segments if s.module is not None for name in s.params}
    strangers = [site for site in sites if site not in inside]
    if t.kind == "reparam" and strangers:
        raise BadInput(f"{t.name}: {', '.join(strangers)} lies outside the blocks, where its function is not checked")


def _whole(link: Link, wanted: set[str], t: Transform) -> Link:
    missing = [w for w in link.sinks if w not in wanted]
    if missing:
        raise BadInput(f"{t.name}: {link.source} also feeds {', '.join(missing)}; target all of its readers or none")
    return link


def _abstract(params: Params, names: Iterable[str], trace: Trace) -> Params:
    """Shapes without values, as transforms take them; what is compressed stays so, so that they can refuse it."""
    return oriented_params({n: _shape_only(n, params[n]) for n in names}, trace.transposed)


def _shape_only(name: str, leaf: Leaf) -> Leaf:
    if len(leaf.shape) not in (2, 3):
        raise BadInput(f"{name}: shape {tuple(leaf.shape)}; only matrices and stacks of them can be compressed yet")
    return abstract(leaf)


def results(plan: Plan) -> Params:
    """What is foreseen of the targets when all stages are done, on the meta device."""
    names = {name: None for stage in plan.stages for m in stage for ws in m.sites.values() for name in ws}
    params = _abstract(plan.model.params, names, plan.trace)
    for member in (member for stage in plan.stages for member in stage):
        taken = [name for names in member.sites.values() for name in names]
        params |= foreseen(member.transform, params, taken, **extras(member, 0, "", member.links))
    return params


def stage_sites(members: Sequence[Member]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each site that a solve of the stage works on, with the kinds of statistic that must be measured there."""
    kinds: dict[str, dict[str, None]] = {}
    for member in (m for m in members if m.transform.kind == "solve"):
        for site in member.sites:
            kinds.setdefault(site, {}).update(dict.fromkeys(member.kinds.get(site, ())))
    yield from ((site, tuple(wanted)) for site, wanted in kinds.items())


def needs_data(member: Member) -> bool:
    """Whether a member needs a forward: to measure something, or to check that it kept the function."""
    return member.transform.kind == "reparam" or any(member.kinds.values())


def describe(stages: Sequence[Stage]) -> list[list[str]]:
    """The recipe as names, for reports."""
    return [[" on ".join((t.name, *(_shown(c) for c in t.select))) for t in stage] for stage in stages]


def _shown(clause: Clause) -> str:
    less = (*clause.ignore, *clause.earlier)
    return f"{clause.pattern!r}{f' without {less}' if less else ''}"


def extras(member: Member, seed: int, site: str, linked: tuple[Link, ...] = ()) -> dict[str, Any]:
    """What a transform asked for by name."""
    given = {"links": linked, "key": zlib.crc32(f"{seed}/{site}".encode())}
    return {name: value for name, value in given.items() if name in member.transform.needs}
