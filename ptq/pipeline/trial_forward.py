"""What a micro-batch's way through each kind of block takes on this machine: one forward on zeros for weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ptq.models.call import functional, named, stand_ins
from ptq.models.interpret import Interpreter, Use
from ptq.models.probe import Segment
from ptq.models.zeros import Zeros
from ptq.numerics.leaves import compressed
from ptq.pipeline.meter import Meter, clock
from ptq.pipeline.place import Place, computed
from ptq.pipeline.plan import Plan
from ptq.pipeline.preserve import floats
from ptq.pipeline.spine import Batch

Kind = tuple[str, tuple[Any, ...]]
"""what equal blocks have in common"""
_TIMES = 2  # the first block of a kind also pays for what torch prepares once


class Passage(NamedTuple):
    """One micro-batch's way through a block."""

    seconds: float
    tokens: int
    """rows that entered"""
    hidden: int
    """their features"""
    entered: int
    """bytes that the micro-batch holds when it enters"""
    held: Mapping[str, int]
    """weight, by its name inside the block -> bytes that it holds when it reads that weight"""
    peak: int
    """the most it holds"""


def trial_forward(plan: Plan, batch: Batch, place: Place) -> dict[Kind, Passage]:
    """Sends one micro-batch through the model until every kind of block was met.

    Args:
        plan: the model; no value of it is read.
        batch: as it is computed with.
        place: where and in what.

    Raises:
        Refused: an operation that is not understood reads a compressed weight, or one writes into a weight.
    """
    module = computed(plan.model, place).module
    trial = _Trial(plan, place)
    for segment in (s for s in plan.segments if s.module is not None):
        block = module.get_submodule(segment.module or "")
        block.register_forward_pre_hook(trial.entering(segment), with_kwargs=True)
        block.register_forward_hook(trial.leaving(segment))
    params = plan.model.params
    handles = stand_ins(params, place.dtype, place.device)
    lossy = frozenset(name for name, leaf in params.items() if compressed(leaf))
    with torch.no_grad(), suppress(_Enough), trial.meter, Interpreter(handles, trial, lossy):
        functional(module, named(handles, plan.model.aliases), batch.args, batch.kwargs)
    return trial.passages


def kind(plan: Plan, segment: Segment) -> Kind:
    """Class, names and shapes of a block."""
    params = ((local(segment, n), *plan.model.params[n].shape) for n in segment.params)
    return type(plan.model.module.get_submodule(segment.module or "")).__name__, tuple(params)


def local(segment: Segment, name: str) -> str:
    """A parameter's name inside its block."""
    return name.removeprefix(f"{segment.module}.") if segment.module else name


class _Enough(BaseException):
    """Ends a forward that has shown all it can; a `BaseException`, so that model code cannot swallow it."""


class _Trial:
    """Serves zeros, and looks at clock and gauge where blocks begin and end."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self.kinds = {s.name: kind(plan, s) for s in plan.segments if s.module is not None}
        self.left = {k: min(count, _TIMES) for k, count in Counter(self.kinds.values()).items()}
        self.device = place.device
        self.dtypes = {n: h.dtype for n, h in stand_ins(plan.model.params, place.dtype).items()}
        self.shapes = {n: leaf.shape for n, leaf in plan.model.params.items()}
        self.zeros = Zeros((s.numel() * self.dtypes[n].itemsize for n, s in self.shapes.items()), place.device)
        self.meter = Meter()
        self.passages: dict[Kind, Passage] = {}
        self.began = 0.0
        self.entered = (0, 0, 0)
        self.held: dict[str, int] = {}

    def __call__(self, use: Use) -> torch.Tensor:
        if use.x is not None:
            self.held.setdefault(use.name, self.meter.live)
        return self.zeros(self.shapes[use.name], self.dtypes[use.name])

    def entering(self, segment: Segment) -> Callable[..., None]:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            if not any(self.left.values()):
                raise _Enough
            x = next(floats((args, kwargs)), None)
            rows, hidden = (0, 0) if x is None else (x.numel() // x.shape[-1], x.shape[-1])
            self.entered, self.held = (rows, hidden, self.meter.live), {}
            self.meter.peak = self.meter.live
            self.began = clock(self.device)

        return hook

    def leaving(self, segment: Segment) -> Callable[..., None]:
        key = self.kinds[segment.name]

        def hook(*_: Any) -> None:
            seconds = clock(self.device) - self.began
            held = {local(segment, name): size for name, size in self.held.items()}
            self.passages[key] = Passage(seconds, *self.entered, held, self.meter.peak)
            self.left[key] = max(0, self.left[key] - 1)

        return hook
