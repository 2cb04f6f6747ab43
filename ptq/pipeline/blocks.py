"""What happens to one block of a stage: its reparams, checked; its solves, site by site or all at once."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ptq.base import Params, State, Stats
from ptq.errors import BadInput
from ptq.models.call import Observer, functional, merge_stats, stand_ins
from ptq.models.interpret import Interpreter, Reader
from ptq.models.probe import Segment
from ptq.numerics.leaves import dense
from ptq.numerics.stats import KINDS
from ptq.pipeline.batches import row_mask, rows
from ptq.pipeline.lines import weight_line
from ptq.pipeline.plan import Member, Plan, extras, stage_sites
from ptq.pipeline.preserve import float32, floats, refuse_change
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
        self._rows.setdefault(segment.name, []).extend(
            weight_line(n, reads[n], before[n], state.params[n], stats, after, self._notes_on(n, segment))
            for n in names
        )

    def _notes_on(self, name: str, segment: Segment) -> list[str]:
        notes = list(self._notes.get(segment.name, []))
        if self.plan.trace.reads.get(name, 1) > 1:
            notes.append(f"read {self.plan.trace.reads[name]} times in a forward, measured at the first")
        if name in self.plan.untied:
            notes.append("was tied, has weights of its own now")
        return notes

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
        args, kwargs = float32(next(iter(arrived.values())))
        old, new = (
            self._block(segment, args, kwargs, lambda use, p=p: dense(p[use.name]).float(), torch.float32)
            for p in (before, {**before, **changed})
        )
        feeding = [link.source for link in links] or list(changed)
        refuse_change(old, new, args, before, f"{segment.name}: {member.transform.name}", feeding)
        self.weights.store(changed)


def _parked_bytes(segment: Segment, arrived: Arrived, params: Params) -> int:
    """What all micro-batches hold at the widest site: their residual, and the input that is parked there."""
    hidden = [next(floats(args_kwargs), None) for args_kwargs in arrived.values()]
    values = sum(x.numel() * x.element_size() for x in hidden if x is not None)
    width = next((x.shape[-1] for x in hidden if x is not None), 1)
    widest = max((max(params[n].shape[-2:]) for n in segment.params if len(params[n].shape) >= 2), default=0)
    return values * (width + widest) // width


def _budget() -> int:
    """Half of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
