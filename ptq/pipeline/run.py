"""A run: a job that is worked on as its blocks are asked for."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from ptq.base import Params, Stage, Transform, chain
from ptq.errors import BadInput
from ptq.io.job import Store
from ptq.io.output import check_output
from ptq.io.save import write
from ptq.models.model import Model
from ptq.models.skeleton import from_module
from ptq.pipeline.batches import at, few_tokens, micro_batches
from ptq.pipeline.budget import budget
from ptq.pipeline.identity import identity
from ptq.pipeline.offload import Offload
from ptq.pipeline.place import resolve
from ptq.pipeline.plan import describe, make_plan, needs_data, results
from ptq.pipeline.progress import Progress
from ptq.pipeline.report import totals, versions
from ptq.pipeline.scan import Block, Job, passes
from ptq.pipeline.spine import Batch


class Run:
    """A single-pass iterator over finished blocks, in the order in which the model reads them.

    Also a context manager: closing it ends its threads. `run.model` runs to the end and is the finished model; a
    `run` that is handed to `ptq.save`, or was given a directory, is written block by block instead: nothing is kept.
    """

    def __init__(self, job: Job, out: str | Path | None = None, resume: bool = False) -> None:
        self.job, self.plan = job, job.plan
        self.start: Model = job.plan.model
        """the model that the run began from, ties settled"""
        self.stages = max(len(job.stages), 1)
        self.progress = Progress()
        self._out = out
        self._work = passes(job, self.progress)
        self._blocks: Generator[Block, None, Any] = self._work
        if out is not None:
            self._blocks = write(copy(self), out, resume=resume)  # it must not refer to the run: see `Progress`

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        return len(self.plan.segments)

    def __next__(self) -> Block:
        block = next(self._blocks, None)
        if block is None:
            self._complete()
            raise StopIteration
        if self.progress.keeps:
            self.progress.held.append(block)
        return block

    def stream(self, store: Store) -> Iterator[Block]:
        """All blocks, those that were taken already first; nothing is kept.

        Args:
            store: takes each block before it comes out, and knows which ones an earlier process has finished.

        Raises:
            BadInput: the run has another place for its blocks; it stays as it is.
        """
        taken, self.progress.keeps = self._kept(), False
        return self._streamed(taken, store)

    def _streamed(self, taken: Sequence[Block], store: Store) -> Iterator[Block]:
        yield from self._handed(taken, store)
        yield from self._work
        self._complete()

    def _handed(self, taken: Sequence[Block], store: Store) -> list[Block]:
        """The blocks that were taken before, given to a store that joins late."""
        last, reports, self.progress.store = self.stages - 1, self.progress.reports, store
        if taken and store.past(last).reports:
            raise BadInput("blocks of this run were taken already; start a new run to resume")
        if taken:
            store.settle(self.job.settled)
        for i, block in enumerate(taken):
            _, reports[i] = store.put(last, block.state.params, block.report)
        return [block._replace(report=report) for block, report in zip(taken, reports, strict=False)]

    def _kept(self) -> list[Block]:
        if self._blocks is not self._work:
            raise BadInput(f"this run is written to {self._out} as its blocks are taken; load that instead")
        if not self.progress.keeps:
            raise BadInput("this run was streamed to a file and kept nothing; load the file instead")
        return self.progress.held

    def _complete(self) -> None:
        done = len(self.progress.reports)
        if done < len(self):
            raise BadInput(f"this run ended after {done} of {len(self)} blocks; start a new one")

    @property
    def model(self) -> Model:
        """The finished model."""
        held = self._kept()
        for _ in self:
            pass
        self._complete()
        made = {name: leaf for block in held for name, leaf in block.state.params.items()}
        return replace(self.start, state=self.start.state.with_params({n: made[n] for n in self.start.params}))

    @property
    def report(self) -> dict[str, Any]:
        """What was done so far: per block, per weight, and in total."""
        done = self.progress.reports
        head = {"recipe": describe(self.job.stages), "seed": self.job.seed, "versions": versions()}
        return {**head, "blocks": list(done), "totals": totals(done, self.progress.seconds)}

    @property
    def foreseen(self) -> Params:
        """What will become of the targets, as far as their shapes tell, on the meta device."""
        return results(self.plan)

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for an interrupted run to go on."""
        job = self.job
        return identity(self.start, job.batches, job.stages, describe(job.stages), job.seed, job.place)

    def end(self) -> None:
        """Ends the work and its threads."""
        self._work.close()

    def close(self) -> None:
        """Ends the work, and the writing; what is written so far can be gone on with."""
        self._blocks.close()
        self.end()

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
    offload: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
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
        offload: where activations are put while they wait for a weight, and statistics that do not fit: a device such
            as "cpu", or a directory. None: they stay in memory, and a block whose activations would not fit is
            measured in a forward of its own.
        out: a directory that each block is written to before it comes out, as `ptq.save` does; the last one completes
            it.
        resume: whether to go on with what an interrupted run of the same job left beside `out`.

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
    if out is not None:
        check_output(out, source=source.source, resume=resume)
    elif resume:
        raise BadInput("compress: resume goes on with what is beside `out`; name it")
    made = micro_batches(source, batches, batch_size) if batches is not None else []
    staged = tuple(_stage(stage) for stage in stages)
    plan = make_plan(source, staged, _example(source, made))
    if not made and any(needs_data(m) for stage in plan.stages for m in stage):
        raise BadInput("this recipe measures activations: give batches (on the command line: --data)")
    place = resolve(device, compute_dtype, source)
    away = None if offload is None else Offload(offload, place.device)
    room = None if away else budget(place.device)
    return Run(Job(plan, [at(batch, place) for batch in made], staged, seed, place, away, room), out, resume)


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
