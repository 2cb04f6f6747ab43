"""What happens to one block of a stage: its reparams, checked; its solves, site by site or all at once."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ptq.base import Params, State, Stats, oriented
from ptq.errors import BadInput
from ptq.models.call import Observer, functional, merge_stats, stand_ins
from ptq.models.interpret import Interpreter, Reader
from ptq.models.probe import Segment
from ptq.numerics.leaves import Leaf, dense
from ptq.numerics.stats import KINDS
from ptq.pipeline.batches import row_mask, rows
from ptq.pipeline.plan import Member, Plan, extras, stage_sites
from ptq.pipeline.spine import Batch
from ptq.pipeline.weights import Weights, refuse_not_finite, refuse_unmeasured

Arrived = Mapping[int, Any]
"""micro-batch -> what it brought to a stop"""


class BlockRunner:
    """One stage's work, block by block.

    Args:
        plan: what takes which weight.
        members: the stage.
        batches: for their masks.
        weights: the parameters; results are stored there.
        seed: for transforms that draw random numbers.
    """

    def __init__(
        self, plan: Plan, members: Sequence[Member], batches: Sequence[Batch], weights: Weights, seed: int
    ) -> None:
        self.plan, self.weights, self.seed = plan, weights, seed
        self.module: nn.Module = plan.model.module
        self.solves = [m for m in members if m.transform.kind == "solve"]
        self.reparams = [m for m in members if m.transform.kind == "reparam"]
        self.sites = dict(stage_sites(members))
        """site -> kinds of statistic to measure"""
        self.todo = set(self.sites)
        owner = {name: s for s in plan.segments for name in s.params}
        self.home = {site: owner[plan.model.aliases.get(site, site)] for site in (*plan.trace.sites, *self.sites)}
        """site -> the segment it is solved in"""
        if self.reparams:
            self.todo |= {s.name for s in plan.segments if s.module is not None}  # entries that must be met
        self._masks = [row_mask(batch) for batch in batches]
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._notes: dict[str, list[str]] = {}

    def rows(self, segment: Segment) -> list[dict[str, Any]]:
        """The report's lines for a segment's weights."""
        return self._rows.pop(segment.name, [])

    def enter(self, segment: Segment, arrived: Arrived) -> bool:
        """At a block's entry: reparams; and solves, where they must see the whole block or memory is short.

        Those two are measured in a forward of the parked block before all micro-batches go through it: two forwards.
        Returns whether the block is solved.
        """
        self.weights.begin_block()
        for member in self.reparams:
            self._reparam(segment, member, arrived)
        self.todo.discard(segment.name)
        own = set(self._own(segment))
        whole = any(m.transform.scope == "block" and own & set(m.sites) for m in self.solves)
        parked = _parked_bytes(segment, arrived, self.weights.params)
        if not own or not (whole or parked > _budget()):
            return False
        if not whole:
            room = f"parked inputs of {parked / 2**30:.1f} GiB would not fit"
            self._notes[segment.name] = [f"measured with the rest of the block still dense, since {room}"]
        kinds = {site: self.sites[site] for site in self._own(segment)}
        self.solve_segment(segment, self._observed(segment, arrived, kinds))
        return True

    def solve_site(self, site: str, arrived: Arrived) -> None:
        """All of a site's inputs are there: measures them and solves the weights that read them."""
        seen: Stats = {}
        for i, x in arrived.items():
            tokens = rows(x, self._masks[i])
            seen = merge_stats(seen, {site: {kind: KINDS[kind].measure(tokens) for kind in self.sites[site]}})
        self._solve(self.home[site], [site], seen)

    def solve_tables(self) -> None:
        """Solves the weights that no linear reads, before anything is run on them."""
        for site in [s for s in self.sites if s not in self.plan.trace.sites]:
            self._solve(self.home[site], [site], {})

    def solve_segment(self, segment: Segment, stats: Stats) -> None:
        """Solves all of a segment's weights at once."""
        self._solve(segment, self._own(segment), stats)

    def finished(self, segment: Segment) -> Segment:
        """The segment, once all its work is done; refused where no token ever reached a weight."""
        missed = [part for part in (*self._own(segment), segment.name) if part in self.todo]
        if missed:
            raise BadInput(f"{missed[0]}: no calibration token reached it; give data that does, or `ignore` it")
        return segment

    def _own(self, segment: Segment) -> list[str]:
        return [site for site in self.sites if self.home[site] == segment]

    @torch.no_grad()
    def _solve(self, segment: Segment, sites: Sequence[str], stats: Stats) -> None:
        names = list(dict.fromkeys(w for m in self.solves for s in sites for w in m.sites.get(s, ())))
        if not names:
            return
        refuse_unmeasured(stats)
        refuse_not_finite(stats)
        whole = any(m.transform.scope == "block" for m in self.solves)
        before = self.weights.load(segment.params if whole else names)
        state, after = State(before), stats
        for member in self.solves:
            mine = {site: member.sites[site] for site in sites if site in member.sites}
            # One site at a time unless the transform wants more, so that its key is the site's.
            for part in [mine] if member.transform.scope == "block" else [{site: mine[site]} for site in mine]:
                given = extras(member, self.seed, next(iter(part), segment.name))
                state, after = member.transform.apply(state, after, part, **given)
        self.weights.refuse_written(before, ", ".join(m.transform.name for m in self.solves))
        self.weights.store({n: leaf for n, leaf in state.params.items() if leaf is not before[n]})
        self.todo -= set(sites)
        reads = {w: s for m in self.solves for s in sites for w in m.sites.get(s, ())}
        lines = (self._line(n, reads[n], before[n], state.params[n], stats, after) for n in names)
        self._rows.setdefault(segment.name, []).extend(lines)

    def _line(self, name: str, site: str, before: Leaf, after: Leaf, stats: Stats, seen: Stats) -> dict[str, Any]:
        """A weight's line of the report."""
        kinds = stats.get(site, {})
        outcome = seen.get(name, {}).get("outcome")
        count = max((int(s.count.sum()) for s in kinds.values()), default=0)
        notes = [outcome.note] if outcome and outcome.note else []
        notes += self._notes.get(self.home[site].name, [])
        if self.plan.trace.reads.get(name, 1) > 1:
            notes.append(f"read {self.plan.trace.reads[name]} times in a forward, measured at the first")
        if name in self.plan.untied:
            notes.append("was tied, has weights of its own now")
        return {
            "name": name,
            "site": site,
            "tokens": count,
            "error": _relative_error(before, after, kinds),
            "damping": _largest(outcome.damping) if outcome else None,
            "failures": int(outcome.failures.sum()) if outcome else 0,
            "note": "; ".join(notes),
        }

    def _observed(self, segment: Segment, arrived: Arrived, kinds: Mapping[str, Sequence[str]]) -> Stats:
        """Statistics of a parked block on its present weights."""
        stats: Stats = {}
        for i, (args, kwargs) in arrived.items():
            watch = Observer(self.weights, kinds, lambda x, i=i: rows(x, self._masks[i]))
            self._block(segment, args, kwargs, watch, self.weights.place.dtype)
            stats = merge_stats(stats, watch.stats)
        return stats

    def _block(
        self, segment: Segment, args: Sequence[Any], kwargs: Mapping[str, Any], read: Reader, dtype: torch.dtype | None
    ) -> Any:
        """One block's forward, outside the model's."""
        module = copy.deepcopy(self.module.get_submodule(segment.module or ""))
        prefix = f"{segment.module}." if segment.module else ""
        local = {n: self.weights.params[n] for n in segment.params}
        handles = stand_ins(local, dtype, self.weights.place.device)
        with torch.no_grad(), Interpreter(handles, read):
            return functional(module, {n.removeprefix(prefix): h for n, h in handles.items()}, args, kwargs)

    @torch.no_grad()
    def _reparam(self, segment: Segment, member: Member, arrived: Arrived) -> None:
        sites = {s: ws for s, ws in member.sites.items() if self.home[s] == segment}
        links = tuple(link for link in member.links if link.source in segment.params)
        if not sites:
            return
        kinds = {site: member.kinds[site] for site in sites if site in member.kinds}
        stats = self._observed(segment, arrived, kinds) if kinds else {}
        before = self.weights.load(segment.params)
        given = extras(member, self.seed, segment.name, links)
        state, _ = member.transform.apply(State(before), stats, sites, **given)
        changed = {n: leaf for n, leaf in state.params.items() if leaf is not before[n]}
        self._refuse_changed_function(segment, member, next(iter(arrived.values())), before, {**before, **changed})
        self.weights.store(changed)

    def _refuse_changed_function(
        self, segment: Segment, member: Member, first: Any, before: Params, after: Params
    ) -> None:
        """A reparam keeps the function; checked in float32 on the first micro-batch, before anything is stored."""
        args, kwargs = _float32(first)
        old, new = (self._block(segment, args, kwargs, _serve(p), torch.float32) for p in (before, after))
        change = _change(old, new, args)
        limit = max(1e-4, 4 * max(torch.finfo(leaf.dtype).eps for leaf in before.values()))
        if not change <= limit:
            feeding = ", ".join(link.source for link in member.links if link.source in segment.params)
            raise BadInput(
                f"{segment.name}: {member.transform.name} changes the function by {change:.1e} (limit {limit:.1e}) "
                f"through {feeding or 'its weights'}; leave this block out with `ignore`"
            )


def _serve(params: Params) -> Reader:
    return lambda use: dense(params[use.name]).float()


def _float32(tree: Any) -> Any:
    """A parked block's arguments in float32; masks and ids stay."""
    return pytree.tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t, tree)


def _change(old: Any, new: Any, args: Sequence[Any]) -> float:
    """Largest relative difference of what a block adds to its input: a residual would hide it."""
    x = args[0] if args and isinstance(args[0], Tensor) else None
    worst = 0.0
    for a, b in zip(_floats(old), _floats(new), strict=True):
        own = a - x if x is not None and x.shape == a.shape else a
        worst = max(worst, float((a - b).norm() / own.norm().clamp_min(torch.finfo(a.dtype).tiny)))
    return worst


def _floats(tree: Any) -> Iterator[Tensor]:
    leaves = pytree.tree_leaves(tree)
    return (t for t in leaves if isinstance(t, Tensor) and t.is_floating_point())


def _largest(damping: Tensor) -> float | None:
    """None where no damping was enough: infinity is no JSON, and the note says what was done instead."""
    value = float(damping.max())
    return value if math.isfinite(value) else None


def _relative_error(before: Leaf, after: Leaf, kinds: Mapping[str, Any]) -> float:
    """tr(D G D') / tr(W G W'), with the best of Gram, its diagonal and the identity that was measured."""
    w = dense(oriented(before)).float()
    d = dense(oriented(after)).float() - w

    def energy(m: Tensor) -> Tensor:
        if "gram" in kinds:
            return ((m @ kinds["gram"].sum.to(m.dtype)) * m).sum()
        if "second_moment" in kinds:
            return (m.square() * kinds["second_moment"].sum[..., None, :]).sum()
        return m.square().sum()

    total = energy(w)
    return float(energy(d) / total) if bool(total > 0) else 0.0


def _parked_bytes(segment: Segment, arrived: Arrived, params: Params) -> int:
    """What all micro-batches hold at the widest site: their residual, and the input that is parked there."""
    hidden = [next(_floats(args_kwargs), None) for args_kwargs in arrived.values()]
    values = sum(x.numel() * x.element_size() for x in hidden if x is not None)
    width = next((x.shape[-1] for x in hidden if x is not None), 1)
    widest = max((max(params[n].shape[-2:]) for n in segment.params if len(params[n].shape) >= 2), default=0)
    return values * (width + widest) // width


def _budget() -> int:
    """Half of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
