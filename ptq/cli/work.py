"""What several commands do: take windows of a text, follow a run with a bar, write it, and complete its report."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from ptq.base import Stage, State
from ptq.errors import BadInput
from ptq.io.files import expanded
from ptq.io.save import save
from ptq.models.model import Model
from ptq.pipeline.data import tokens
from ptq.pipeline.run import Run
from ptq.pipeline.scan import Step


class Bar:
    """A bar on stderr that follows a run through its stages and blocks, where stderr is a terminal."""

    def __init__(self, run: Run) -> None:
        self.run = run
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False))
        console = Console(stderr=True)
        self._bar = Progress(*columns, *times, console=console, transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("blocks", total=run.stages * len(run), rate="")
        self._began: tuple[float, int] | None = None

    def __enter__(self) -> Self:
        self.run.progress.watch = self.follow
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._bar.update(self._task, completed=self.run.stages * len(self.run))
        self._bar.stop()

    def follow(self, step: Step) -> None:
        """A block is begun. What an earlier process did counts as done, but not for the rate."""
        done, now = step.stage * len(self.run) + step.block, time.perf_counter()
        if self._began is None:
            self._began = now, done
            self._bar.reset(self._task, completed=done)
        since, from_ = self._began
        rate = f"{(now - since) / (done - from_):.1f} s a block" if done > from_ else ""
        stage = f"stage {step.stage + 1} of {self.run.stages}, " if self.run.stages > 1 else ""
        self._bar.update(self._task, completed=done, description=f"{stage}{step.name}", rate=rate)


def write(run: Run, out: str | Path, overwrite: bool, resume: bool = False, form: str = "auto") -> dict[str, Any]:
    """Writes a run's blocks as they are finished; returns its report, completed by what the files say."""
    with Bar(run):
        saved = save(run, out, overwrite=overwrite, format=form, resume=resume)
    report = run.report
    worked_on = {w["name"] for block in report["blocks"] for w in block["weights"]}
    notes = [f"{name}: {note}" for name, note in saved.notes.items() if name not in worked_on]
    totals = {**report["totals"], "bytes": saved.nbytes}
    return {**report, "path": str(saved.path), "notes": notes, "totals": totals}


def measures(stage: Stage) -> bool:
    """Whether a stage needs data: what it would measure for a weight without elements, which fits every grouping."""
    nothing = State({"": torch.empty(0, 0, device="meta")})
    return any(t.kind == "reparam" or bool(t.init(nothing, {"": ("",)})) for t in stage)


def windows(model: Model, args: argparse.Namespace) -> Tensor:
    """The token ids that `--data`, `--samples` and `--seq-len` ask for, `[samples, tokens]`."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and args.seq_len > limit:
        raise BadInput(f"windows of {args.seq_len} tokens: the model has {limit} positions; pass a smaller --seq-len")
    ids = tokens(args.data, model.tokenizer, args.samples, args.seq_len)
    size, largest = _vocabulary(model), int(ids.max())
    if size is not None and largest >= size:
        raise BadInput(f"{args.data}: token id {largest}: the model has {size} embeddings; use its own tokenizer")
    return ids


def _vocabulary(model: Model) -> int | None:
    """Rows of the embedding, which may be more than the tokenizer has ids."""
    module: Any = model.module
    try:
        return module.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        return getattr(model.config, "vocab_size", None)


def refuse_unwritable(report: Path, out: str, source: str) -> None:
    """Raises `BadInput` where a report could not be written or would replace a model's file, before work is lost."""
    file, result, model = (expanded(path).resolve() for path in (report, out, source))
    name = expanded(report).absolute().parent.resolve() / report.name  # where it is a link, the link itself
    if file.is_dir() or file == result:
        raise BadInput(f"report {report}: is a directory; name a file")
    if not (file.parent.is_dir() or file.parent == result):
        raise BadInput(f"report {report}: its directory does not exist")
    if file.exists() and any(path.is_relative_to(model) for path in (file, name)):
        raise BadInput(f"report {report}: is a file of the model; choose another name")
    if file.parent == result and ((model / file.name).exists() or _is_checkpoint_file(file)):
        raise BadInput(f"report {report}: the result has a file of that name; choose another")


def _is_checkpoint_file(file: Path) -> bool:
    return file.suffix == ".safetensors" or file.name.endswith((".index.json", "config.json", "tokenizer.json"))
