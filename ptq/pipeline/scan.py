"""The driver: stages over a model, block by block, from a plan to finished leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from ptq.base import Stage, State, Transform, chain
from ptq.errors import BadInput
from ptq.models.call import stand_ins
from ptq.models.model import Model
from ptq.models.probe import Segment
from ptq.models.skeleton import from_module
from ptq.numerics.leaves import compressed
from ptq.pipeline.batches import at, few_tokens, micro_batches
from ptq.pipeline.blocks import BlockRunner
from ptq.pipeline.place import Place, computed, resolve
from ptq.pipeline.plan import Member, Plan, describe, make_plan
from ptq.pipeline.report import Size, peak_bytes, size, totals, versions
from ptq.pipeline.spine import Batch, Spine, Stop
from ptq.pipeline.weights import Weights


class Block(NamedTuple):
    """A finished block: what no later step will change."""

    name: str
    state: State
    report: dict[str, Any]


class Run:
    """A single-pass iterator over finished blocks, in the order in which the model reads them.

    Also a context manager: closing it ends its threads. `run.model` runs to the end and is the finished model; a
    `run` that is handed to `ptq.save` is written block by block instead, and nothing is kept.
    """

    def __init__(self, plan: Plan, batches: Sequence[Batch], recipe: Any, seed: int, how: Place) -> None:
        self.plan = plan
        self.start: Model = plan.model
        """the model that the run began from, ties settled"""
        self._began = time.perf_counter()
        self._reports: list[dict[str, Any]] = []
        self._kept: list[Block] | None = []
        self._size = Size()
        self._head = {"recipe": recipe, "seed": seed, "versions": versions()}
        self._blocks = _stages(plan, batches, seed, how, self._finish)
        self._seconds = 0.0

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        return len(self.plan.segments)

    def __next__(self) -> Block:
        block = next(self._blocks)
        self._seconds = time.perf_counter() - self._began
        self._reports.append(block.report)
        self._size = self._size.plus(size(block.state.params, {w["name"] for w in block.report["weights"]}))
        if self._kept is not None:
            self._kept.append(block)
        return block

    def stream(self) -> Iterator[Block]:
        """All blocks, those that were taken already first; nothing is kept."""
        taken, self._kept = self._held(), None
        yield from taken
        yield from self
        self._complete()

    def _held(self) -> list[Block]:
        if self._kept is None:
            raise BadInput("this run was streamed to a file and kept nothing; load the file instead")
        return self._kept

    def _complete(self) -> None:
        if len(self._reports) < len(self):
            raise BadInput(f"this run ended after {len(self._reports)} of {len(self)} blocks; start a new one")

    @property
    def model(self) -> Model:
        """The finished model."""
        held = self._held()
        for _ in self:
            pass
        self._complete()
        made = {name: leaf for block in held for name, leaf in block.state.params.items()}
        return replace(self.start, state=self.start.state._replace(params={n: made[n] for n in self.start.params}))

    @property
    def report(self) -> dict[str, Any]:
        """What was done so far: per block, per weight, and in total."""
        return {**self._head, "blocks": list(self._reports), "totals": totals(self._size, self._seconds)}

    def _finish(self, weights: Weights, segment: Segment) -> None:
        """After a block was taken: a streaming run lets go of what no forward will read again."""
        if self._kept is None:
            shared = set(self.start.aliases.values())
            weights.release(n for n in segment.params if n not in shared and self.plan.trace.reads.get(n, 0) <= 1)

    def close(self) -> None:
        self._blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def compress(
    model: Model | nn.Module,
    batches: Iterable[Any] | None,
    *stages: Transform | Stage,
    seed: int = 0,
    device: str | torch.device = "auto",
    compute_dtype: str | torch.dtype = "auto",
    batch_size: int | None = None,
) -> Run:
    """Compresses a model block by block.

    Transforms in one stage share a calibration: its reparams come first, then its solves, each in written order.
    Separate stages calibrate anew on the result of the one before. All refusals that can be known come at once.

    Args:
        model: a `Model`, or a live module, which stays as it is.
        batches: token ids `[tokens]` or `[samples, tokens]`, or mappings of model inputs; None where no stage
            measures anything.
        stages: what to do; `ptq.chain` and single transforms alike.
        seed: for transforms that draw random numbers.
        device: where forwards and solves run; "auto": the first CUDA device, else the CPU.
        compute_dtype: of the forward; "auto": bfloat16 where the processor is fast at it, else float32. Statistics
            and solves are float32 in any case.
        batch_size: samples in a micro-batch; default: about 4,096 tokens.

    Returns:
        A `Run`, an iterator of finished blocks.

    Raises:
        BadInput: a target matches nothing, a weight has the wrong shape, data is missing, ...

    >>> from ptq.transforms.rtn import rtn
    >>> from ptq.numerics.schemes import scheme
    >>> net = nn.Sequential(nn.Linear(8, 8, bias=False))
    >>> run = compress(net, [torch.ones(2, 8)], rtn(scheme("W8A16", group_size=-1)), compute_dtype="float32")
    >>> run.model.params["0.weight"].codes.dtype
    torch.int8
    """
    source = model if isinstance(model, Model) else from_module(model)
    made = micro_batches(source, batches, batch_size) if batches is not None else []
    staged = tuple(_stage(stage) for stage in stages)
    plan = make_plan(source, staged, _example(source, made))
    if not made and any(_needs_data(m) for stage in plan.stages for m in stage):
        raise BadInput("this recipe measures activations: give batches (on the command line: --data)")
    return Run(plan, made, describe(staged), seed, resolve(device, compute_dtype, source))


def _stage(given: Any) -> Stage:
    """A stage out of what a caller passed, which no type checker may have seen."""
    members = (given,) if isinstance(given, Transform) else given
    if not isinstance(members, tuple) or not all(isinstance(t, Transform) for t in members):  # type: ignore[misc]
        raise BadInput(f"compress: got {type(given).__name__}, expected transforms and stages; unpack recipes with *")
    return chain(*members)  # type: ignore[misc]


def _example(model: Model, made: Sequence[Batch]) -> Batch:
    """A few tokens for the probe: of the first micro-batch, or the inputs that the class names for itself."""
    if made:
        return few_tokens(made[0])
    inputs = getattr(model.module, "dummy_inputs", None)
    if inputs is None:
        raise BadInput("the model does not say what it takes; give one batch, so that its weights can be found")
    return few_tokens(micro_batches(model, [inputs])[0])


def _needs_data(member: Member) -> bool:
    return member.transform.kind == "reparam" or any(member.kinds.values())


Finish = Callable[[Weights, Segment], None]
"""called when a finished block was taken and no micro-batch will meet it again"""


def _stages(plan: Plan, batches: Sequence[Batch], seed: int, how: Place, finish: Finish) -> Generator[Block]:
    """All stages; only the last one's blocks are finished and come out."""
    weights = Weights(plan.model.params, plan.trace.transposed, how)
    batches = [at(batch, how) for batch in batches]
    stages = plan.stages or ((),)
    for members in stages[:-1]:
        for _ in _scan(plan, members, batches, weights, seed, lambda *_: None):
            pass
    yield from _scan(plan, stages[-1], batches, weights, seed, finish)


def _scan(
    plan: Plan, members: Sequence[Member], batches: Sequence[Batch], weights: Weights, seed: int, finish: Finish
) -> Iterator[Block]:
    """One stage over the model: a clock around each segment, whichever way it is worked on."""
    runner = BlockRunner(plan, members, batches, weights, seed)
    forward = any(map(_needs_data, members))
    steps = _spined(plan, batches, weights, runner, finish) if forward else _dataless(plan, weights, runner, finish)
    began = time.perf_counter()
    for segment in steps:
        report = {"name": segment.name, "seconds": time.perf_counter() - began, "peak_bytes": peak_bytes()}
        leaves = {n: weights.params[n] for n in segment.params}
        yield Block(segment.name, State(leaves), {**report, "weights": runner.rows(segment)})
        began = time.perf_counter()


def _dataless(plan: Plan, weights: Weights, runner: BlockRunner, finish: Finish) -> Iterator[Segment]:
    """Nothing is measured, so no forward runs."""
    for segment in plan.segments:
        runner.solve_segment(segment, {})
        yield segment
        finish(weights, segment)


def _spined(
    plan: Plan, batches: Sequence[Batch], weights: Weights, runner: BlockRunner, finish: Finish
) -> Iterator[Segment]:
    """Segments in the plan's order, each when no micro-batch will meet it unfinished."""
    order = {n: i for i, (n, _) in enumerate(plan.model.module.named_parameters(remove_duplicate=False))}
    at = {s.module: s for s in plan.segments if s.module is not None}
    entries = {path: Stop(min(order[n] for n in s.params), 0, path) for path, s in at.items()}
    sites = {w: Stop(order[s], 1, s) for s in runner.sites for w in plan.trace.sites.get(s, ())}
    module = computed(plan.model, weights.place).module
    handles = stand_ins(plan.model.params, weights.place.dtype, weights.place.device)
    lossy = frozenset(n for n, leaf in weights.params.items() if compressed(leaf))
    place = {s: i for i, s in enumerate(plan.segments)}
    left = list(plan.segments)
    runner.module = module
    runner.solve_tables()
    with Spine(module, handles, plan.model.aliases, batches, weights, sites, entries, lossy) as spine:
        for stop in spine:
            here, *others = (at[s.name] if s.rank == 0 else runner.home[s.name] for s in (stop, *spine.waiting))
            nearest = min(place[s] for s in (here, *others))
            while left and place[left[0]] < place[here]:
                done = left.pop(0)
                yield runner.finished(done)
                if place[done] < nearest:
                    finish(weights, done)
            arrived = spine.waiting[stop]
            if stop.rank == 1:
                runner.solve_site(stop.name, arrived)
            elif runner.enter(here, arrived):
                spine.skip(sites[w] for w in here.params if w in sites)
            if not runner.todo:
                break
    for segment in left:
        yield runner.finished(segment)
        finish(weights, segment)
