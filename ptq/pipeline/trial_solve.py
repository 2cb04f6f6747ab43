"""What measuring, solving and writing some weights takes on this machine: the real transforms on random numbers.

Where the real size would take long, all dimensions are made smaller by one factor, at two sizes. A law of two terms
through both gives the real size: what is done for each column, and what products of matrices do. A power law would
lose the second, which hardly shows in small matrices and is nearly all there is in large ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptq._tree import tensors
from ptq.base import Params, State, Stats
from ptq.errors import BadInput
from ptq.io.writer import Writer
from ptq.models.call import merge_stats
from ptq.numerics.leaves import nbytes
from ptq.numerics.stats import KINDS
from ptq.pipeline.lines import weight_line
from ptq.pipeline.meter import Meter, timed_well
from ptq.pipeline.place import Place
from ptq.pipeline.plan import Plan, extras, oriented_params
from ptq.pipeline.tasks import Task
from ptq.pipeline.weights import Weights

_QUICK = 1 << 23  # numbers in weights and Gram matrices that are tried: a second or two, some hundred MB
_REDUCTIONS = range(1, 65)


class Cost(NamedTuple):
    """What a task takes."""

    statistics: float
    """seconds for each row of its inputs"""
    solve: float
    """seconds"""
    writing: float
    """seconds"""
    solved: float
    """bytes of the results in memory"""
    stored: tuple[float, ...]
    """bytes of each result in files"""
    working: int = 0
    """bytes while it is done, beside the weights: statistics, what the solve or the writer needs"""


def cost(plan: Plan, task: Task, place: Place, rows: int, writer: Writer) -> Cost:
    """Tries a task at its own size, or at two smaller ones; what memory it needs, at a smaller one in any case.

    Args:
        plan: shapes of weights; no value is read.
        task: what is solved.
        place: where, and the dtype of inputs.
        rows: of inputs at a time.
        writer: where results go.
    """
    quick, smaller = _reductions(plan, task)
    working = _Trial(plan, task, place, smaller).working(rows, writer)  # first: it also pays for torch's preparations
    tried = {k: _Trial(plan, task, place, k).cost(rows, writer) for k in {quick, *([] if quick == 1 else [smaller])}}
    return Cost(
        full_size({k: c.statistics for k, c in tried.items()}, 1, 2),
        full_size({k: c.solve for k, c in tried.items()}, 1, 3),
        full_size({k: c.writing for k, c in tried.items()}, 1, 2),
        full_size({k: c.solved for k, c in tried.items()}, 1, 2),
        tuple(full_size({k: c.stored[i] for k, c in tried.items()}, 1, 2) for i in range(len(task.weights))),
        working,
    )


def statistics_bytes(plan: Plan, task: Task) -> list[int]:
    """Bytes of what is measured for each of its sites, in the order in which they are met."""
    trial = _Trial(plan, task, Place(torch.device("meta"), None), 1)
    return [sum(map(nbytes, tensors(trial.measured(site, x)))) for site, x in trial.inputs(1).items()]


def full_size(at: Mapping[int, float], low: int, high: int) -> float:
    """The value at full size of `a / k^low + b / k^high`, a and b from 0, where it is known at one or two factors k.

    >>> full_size({2: 8.0, 4: 3.0}, 1, 2)  # 8 / k + 16 / k^2
    24.0
    >>> full_size({2: 8.0}, 1, 2)
    32.0
    """
    (k, y), (m, z) = min(at.items()), max(at.items())
    b = y * k**high if k == m else (y * k**low - z * m**low) / (k ** (low - high) - m ** (low - high))
    b = min(max(b, 0.0), y * k**high)
    return (y - b / k**high) * k**low + b


def _reductions(plan: Plan, task: Task) -> tuple[int, int]:
    """Factors that the transforms can take: the least that is quick, and one of twice as much."""
    squares = sum(_shape(plan, weights[0])[-1] ** 2 for weights in task.sites.values())
    numbers = squares + sum(_shape(plan, n).numel() for n in task.params)
    fits = [k for k in _REDUCTIONS if _takes(plan, task, k)]
    quick = next((k for k in fits if numbers <= _QUICK * k**2), fits[-1])
    return quick, next((k for k in fits if k >= 2 * quick), quick)


def _takes(plan: Plan, task: Task, k: int) -> bool:
    """Whether all transforms can take weights that are smaller by `k`."""
    if any(_shape(plan, weights[0])[-1] % k for weights in task.sites.values()):
        return False
    trial = _Trial(plan, task, Place(torch.device("meta"), None), k)
    state = State(oriented_params({n: trial.leaf(n) for n in task.params}, plan.trace.transposed))
    try:
        for member in task.members:
            linked = {"links": member.links} if "links" in member.transform.needs else {}
            member.transform.init(state, task.share(member), **linked)
    except BadInput:
        return False
    return True


def _shape(plan: Plan, name: str) -> torch.Size:
    """`[*e, out, in]`, however the module stores it."""
    shape = plan.model.params[name].shape
    return torch.Size((*shape[:-2], shape[-1], shape[-2])) if name in plan.trace.transposed else shape


class _Trial:
    """A task on random numbers, all matrices smaller by `k` in both dimensions."""

    def __init__(self, plan: Plan, task: Task, place: Place, k: int) -> None:
        self.plan, self.task, self.place, self.k = plan, task, place, k
        self._generator = torch.Generator().manual_seed(0)

    def cost(self, rows: int, writer: Writer) -> Cost:
        """By the clock."""
        device, stats, statistics = self.place.device, Stats(), 0.0
        for site, x in self.inputs(rows).items():
            seconds, stats[site] = timed_well(device, lambda site=site, x=x: self.measured(site, x))
            statistics += seconds * x.shape[-1] / x.numel()
        params = {n: self.leaf(n) for n in self.task.params}
        solving, solved = timed_well(device, lambda: self.solved(params, stats))
        writing, stored = timed_well(device, lambda: self.written(solved, writer))
        held = sum(t.numel() * t.element_size() for n in self.task.weights for t in tensors(solved[n]))
        return Cost(statistics, solving, writing, float(held), stored)

    def working(self, rows: int, writer: Writer) -> int:
        """By the gauge, at full size: with rows reduced likewise, all grows with the square."""
        inputs, params = self.inputs(-(-rows // self.k)), {n: self.leaf(n) for n in self.task.params}
        with Meter() as solve:
            first, second = ({site: self.measured(site, x) for site, x in inputs.items()} for _ in range(2))
            solved = self.solved(params, merge_stats(first, second))
        with Meter() as writing:
            self.written(solved, writer)
        return max(solve.peak, writing.peak) * self.k**2

    def leaf(self, name: str) -> Tensor:
        """In place of a parameter, as the module stores it."""
        shape = self.plan.model.params[name].shape
        reduced = (*shape[:-2], *(-(-n // self.k) for n in shape[-2:]))
        return self._random(reduced, self.plan.model.params[name].dtype)

    def inputs(self, rows: int) -> dict[str, Tensor]:
        """In place of what flows into each site that is measured; stacks of weights share the rows."""
        found: dict[str, Tensor] = {}
        for site, weights in ((s, ws) for s, ws in self.task.sites.items() if self.task.kinds(s)):
            *e, _, full = _shape(self.plan, weights[0])
            columns = full // self.k
            each = max(-(-rows // torch.Size(e).numel()), 2 * columns)  # so many that a Gram matrix is well conditioned
            dtype = self.place.dtype or self.plan.model.params[weights[0]].dtype
            found[site] = self._random((*e, each, columns), dtype)
        return found

    def measured(self, site: str, x: Tensor) -> dict[str, Any]:
        return {kind: KINDS[kind].measure(x) for kind in self.task.kinds(site)}

    def solved(self, params: Params, stats: Stats) -> Params:
        """What the driver does with weights and statistics: checks and lines of the report cost something too."""
        weights = Weights(params, self.plan.trace.transposed, self.place)
        before = weights.load(self.task.params)
        state, seen = State(before), stats
        for member in self.task.members:
            share = self.task.share(member)
            for part in [share] if member.transform.scope == "block" else [{s: ws} for s, ws in share.items()]:
                given = extras(member, 0, next(iter(part)), member.links)
                state, seen = member.transform.apply(state, seen, part, **given)
        for site, name in ((s, w) for s, names in self.task.sites.items() for w in names):
            weight_line(name, site, before[name], state.params[name], stats, seen)
        weights.store({name: state.params[name] for name in self.task.weights})
        weights.close()
        return {name: weights.params[name] for name in self.task.weights}

    def written(self, solved: Params, writer: Writer) -> tuple[float, ...]:
        """Bytes that each result takes in files."""
        sizes: list[float] = []
        for name in self.task.weights:
            before = writer.nbytes
            writer.add({name: solved[name]})
            sizes.append(float(writer.nbytes - before or nbytes(solved[name])))  # or it waits for its group
        return tuple(sizes)

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.place.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.randn(shape, generator=self._generator).to(self.place.device, dtype)
