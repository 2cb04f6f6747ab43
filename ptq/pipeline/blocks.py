"""What happens to one block of a stage: its reparams, checked; its solves, site by site or all at once."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ptq._tree import tensors, tree_map
from ptq.base import Params, Sites, State, Stats
from ptq.errors import BadInput
from ptq.models.call import Observer, functional, merge_stats, stand_ins
from ptq.models.interpret import Interpreter, Reader
from ptq.models.probe import Segment
from ptq.numerics.leaves import dense, nbytes
from ptq.numerics.stats import KINDS
from ptq.pipeline.batches import row_mask, rows
from ptq.pipeline.budget import budget, parked_bytes
from ptq.pipeline.lines import weight_line
from ptq.pipeline.offload import Offload
from ptq.pipeline.plan import Member, Plan, extras, stage_sites
from ptq.pipeline.preserve import float32, floats, refuse_change
from ptq.pipeline.spine import Arrived, Batch
from ptq.pipeline.weights import Weights, refuse_not_finite, refuse_result, refuse_unmeasured


class Solved(NamedTuple):
    """What became of the weights of some sites."""

    sites: Sequence[str]
    params: Params
    """those that changed"""
    lines: list[dict[str, Any]]
    """of the report"""


class BlockRunner:
    """One stage's work, block by block.

    Args:
        plan: what takes which weight.
        members: the stage.
        batches: for their masks.
        weights: the parameters; results are stored there.
        seed: for transforms that draw random numbers.
        room: bytes that parked activations may take before a block is measured in two forwards; None: any number.
        done: weights that an earlier process finished in this stage.
        offload: where statistics go that would not fit.
    """

    def __init__(
        self,
        plan: Plan,
        members: Sequence[Member],
        batches: Sequence[Batch],
        weights: Weights,
        seed: int,
        room: int | None = None,
        done: frozenset[str] = frozenset(),
        offload: Offload | None = None,
    ) -> None:
        self.plan, self.weights, self.seed, self.room, self.offload = plan, weights, seed, room, offload
        self.module: nn.Module = plan.model.module
        self.solves = [m for m in members if m.transform.kind == "solve"]
        self.reparams = [m for m in members if m.transform.kind == "reparam"]
        self.sites = dict(stage_sites(members))
        """site -> kinds of statistic to measure"""
        self._owner = {name: s for s in plan.segments for name in s.params}
        self.home = {site: self._owner[plan.model.aliases.get(site, site)] for site in (*plan.trace.sites, *self.sites)}
        """site -> the segment it is solved in"""
        self.done = done
        self.todo = {site for site in self.sites if self._undone(site)}
        if self.reparams:  # entries that must be met
            self.todo |= {s.name for s in plan.segments if s.module is not None and not done.issuperset(s.params)}
        self._whole = {site for m in self.solves if m.transform.scope == "block" for site in m.sites}
        self._masks = [row_mask(batch) for batch in batches]
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._notes: dict[str, str] = {}

    def rows(self, segment: Segment) -> list[dict[str, Any]]:
        """The report's lines for a segment's weights."""
        return self._rows.pop(segment.name, [])

    def enter(self, segment: Segment, arrived: Arrived) -> Collection[str]:
        """At a block's entry: reparams; and solves, where they must see the whole block or memory is short.

        Those two are measured in a forward of the parked block before all micro-batches go through it: two forwards.
        Returns the sites that are solved.
        """
        following = self.plan.segments[self.plan.segments.index(segment) + 1 :][:1]
        self.weights.begin_block(name for s in following for name in s.params)
        for member in self.reparams if segment.name in self.todo else ():
            self._reparam(segment, member, arrived)
        self.todo.discard(segment.name)
        sites = self._at_once(segment, arrived)
        if any(map(self._undone, sites)):
            kinds = {site: self.sites[site] for site in sites if self.sites[site]}
            self._solve(segment, sites, self._observed(segment, arrived, kinds) if kinds else {})
        return sites

    def solve_site(self, site: str, arrived: Arrived) -> None:
        """All of a site's inputs are there: measures them and solves the weights that read them."""
        if not self._undone(site):
            return
        seen: Stats = {}
        for i, x in arrived.items():
            tokens = rows(x, self._masks[i])
            seen = merge_stats(seen, {site: {kind: KINDS[kind].measure(tokens) for kind in self.sites[site]}})
        self._solve(self.home[site], [site], seen)

    def solve_tables(self) -> None:
        """Solves the weights that no linear reads, before anything is run on them."""
        for site in [s for s in self.sites if s not in self.plan.trace.sites]:
            self._solve(self.home[site], [site], {})

    def parts(self, segment: Segment) -> list[list[str]]:
        """Sites of a segment that must be solved together, where nothing is measured."""
        own = self._own(segment)
        return [own] if self._whole & set(own) else [[site] for site in own]

    def take(self, solved: Solved) -> None:
        """Stores what became of some weights, and notes their lines."""
        self.weights.store(solved.params)
        for line in solved.lines:
            self._rows.setdefault(self._owner[line["name"]].name, []).append(line)
        self.todo -= set(solved.sites)

    def finished(self, segment: Segment) -> Segment:
        """The segment, once all its work is done; refused where no token ever reached a weight."""
        missed = [part for part in (*self._own(segment), segment.name) if part in self.todo]
        if missed:
            raise BadInput(f"{missed[0]}: no calibration token reached it; give data that does, or `ignore` it")
        self.weights.end_block(segment.params)
        return segment

    def _own(self, segment: Segment) -> list[str]:
        return [site for site in self.sites if self.home[site] == segment]

    def _undone(self, site: str) -> bool:
        return any(w not in self.done for m in self.solves for w in m.sites.get(site, ()))

    def _at_once(self, segment: Segment, arrived: Arrived) -> list[str]:
        """The block's sites that are solved at its entry; nothing but shapes decides."""
        own = self._own(segment)
        needed = _needed(segment, arrived, self.weights.params)
        if self.room is not None and needed > self.room:
            why = f"parked inputs of {needed / 2**30:.1f} GiB would not fit"
            self._notes[segment.name] = f"measured with the rest of the block still dense, since {why}"
            return own
        return [site for site in own if site in self._whole]

    def _solve(self, segment: Segment, sites: Sequence[str], stats: Stats) -> None:
        self.take(self.solved(segment, sites, stats))

    @torch.no_grad()
    def solved(self, segment: Segment, sites: Sequence[str], stats: Stats) -> Solved:
        """All solves of some sites, in written order, each on the result of the one before; nothing is stored yet."""
        todo = [{s: ws for s in sites if (ws := self._left(m, s))} for m in self.solves]
        reads = {w: s for mine in todo for s, ws in mine.items() for w in ws}
        if not reads:
            return Solved(sites, {}, [])
        refuse_unmeasured(stats, [site for site in dict.fromkeys(reads.values()) if self.sites[site]])
        refuse_not_finite(stats)
        whole = [m for m, mine in zip(self.solves, todo, strict=True) if mine and m.transform.scope == "block"]
        before = self.weights.load(dict.fromkeys((*(segment.params if whole else ()), *reads)))
        state, after = State(before), stats
        for member, mine in zip(self.solves, todo, strict=True):
            # One site at a time unless the transform wants more, so that its key is the site's.
            for part in [mine] if member in whole else [{site: mine[site]} for site in mine]:
                state, after = self._applied(member, state, after, part)
        who = ", ".join(m.transform.name for m, mine in zip(self.solves, todo, strict=True) if mine)
        self.weights.refuse_written(before, who)
        lines: list[dict[str, Any]] = []
        for name, site in reads.items():
            notes = self._notes_on(name, site)
            lines.append(weight_line(name, site, before[name], state.params[name], stats, after, notes))
            refuse_result(name, state.params[name], lines[-1]["error"], who)
        return Solved(sites, {n: leaf for n, leaf in state.params.items() if leaf is not before[n]}, lines)

    def _applied(self, member: Member, state: State, stats: Stats, part: Sites) -> tuple[State, Stats]:
        """One transform on some sites. Statistics that were put away are on the device for as long as it runs."""
        near = tree_map(lambda t: t.to(self.weights.place.device), {s: stats[s] for s in part if s in stats})
        given = extras(member, self.seed, next(iter(part)))
        state, seen = member.transform.apply(state, {**stats, **near}, part, **given)
        back = {
            s: {k: stats[s][k] if v is near[s].get(k) else v for k, v in seen[s].items()} for s in near if s in seen
        }
        return state, {**seen, **back}

    def _left(self, member: Member, site: str) -> tuple[str, ...]:
        """The weights of a site that a member works on and that no earlier process has finished."""
        return tuple(w for w in member.sites.get(site, ()) if w not in self.done)

    def _notes_on(self, name: str, site: str) -> list[str]:
        notes = [self._notes[block]] if (block := self.home[site].name) in self._notes else []
        if site in self._whole and any(m.transform.scope == "site" and site in m.sites for m in self.solves):
            notes.append("measured with its block still dense, since a method that shares its input asks for that")
        if self.plan.trace.reads.get(name, 1) > 1:
            notes.append(f"read {self.plan.trace.reads[name]} times in a forward, measured at the first")
        if name in self.plan.untied:
            notes.append("was tied, has weights of its own now")
        return notes

    def _observed(self, segment: Segment, arrived: Arrived, kinds: Mapping[str, Sequence[str]]) -> Stats:
        """Statistics of a parked block on its present weights; those that do not fit beside the others are put away."""
        away: set[str] = set()

        def keep(one: Stats) -> Stats:
            if self.offload is None:
                return one
            here = {site: of for site, of in {**watch.stats, **one}.items() if site not in away}
            if sum(map(nbytes, tensors(here))) > budget(self.weights.place.device):
                away.update(one)
            return self.offload.keep(one) if away.issuperset(one) else one

        watch = Observer(self.weights, kinds, keep=keep)
        for i, (args, kwargs) in arrived.items():
            watch.rows = lambda x, i=i: rows(x, self._masks[i])
            self._block(segment, args, kwargs, watch, self.weights.place.dtype)
        return watch.stats

    def _block(
        self, segment: Segment, args: Sequence[Any], kwargs: Mapping[str, Any], read: Reader, dtype: torch.dtype | None
    ) -> Any:
        """One block's forward, outside the model's."""
        module = copy.deepcopy(self.module.get_submodule(segment.module or ""))
        prefix = f"{segment.module}." if segment.module else ""
        local = {n: self.weights.params[n] for n in segment.params}
        handles = stand_ins(local, dtype, self.weights.place.device)
        # Clones, since a block may write into its input, which all micro-batches have yet to go through.
        args, kwargs = pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, (args, kwargs))
        with torch.no_grad(), Interpreter(handles, read, self.weights):
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
        self.weights.refuse_written(before, member.transform.name)
        changed = {n: leaf for n, leaf in state.params.items() if leaf is not before[n]}
        args, kwargs = float32(next(iter(arrived.values())))
        old, new = (
            self._block(segment, args, kwargs, lambda use, p=p: dense(p[use.name]).float(), torch.float32)
            for p in (before, {**before, **changed})
        )
        feeding = [link.source for link in links] or list(changed)
        refuse_change(old, new, args, before, f"{segment.name}: {member.transform.name}", feeding)
        self.weights.store(changed)


def _needed(segment: Segment, arrived: Arrived, params: Params) -> int:
    """Bytes that all micro-batches would hold while they are parked in a block, told by what entered it."""
    hidden = [x for brought in arrived.shapes() if (x := next(floats(brought), None)) is not None]
    if not hidden:
        return 0
    width = hidden[0].shape[-1]
    tokens = sum(x.numel() for x in hidden) // width
    return parked_bytes(segment, tokens, width, params, hidden[0].element_size())
