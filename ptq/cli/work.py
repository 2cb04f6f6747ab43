"""What several commands do: take windows of a text, watch a run, write it block by block, and complete its report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from ptq.base import Stage, State
from ptq.errors import BadInput
from ptq.io.save import save
from ptq.models.model import Model
from ptq.numerics.leaves import nbytes
from ptq.pipeline.data import tokens
from ptq.pipeline.scan import Block, Run


class Size(NamedTuple):
    """Of a weight that was worked on: bytes as it is packed, bytes where it is stored dense, number of values."""

    packed: int
    dense: int
    numel: int


class Watched:
    """A run that moves a bar on stderr as its blocks are finished, where stderr is a terminal."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.start: Model = run.start
        self.sizes: dict[str, Size] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run.close()

    def stream(self) -> Iterator[Block]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not sys.stderr.isatty()
        ) as bar:
            task = bar.add_task("blocks", total=len(self.run))
            for block in self.run.stream():
                for name in (w["name"] for w in block.report["weights"]):
                    leaf, count = block.state.params[name], block.state.params[name].shape.numel()
                    self.sizes[name] = Size(nbytes(leaf), count * leaf.dtype.itemsize, count)
                yield block
                bar.update(task, advance=1, description=block.name)


def write(run: Run, out: str | Path, overwrite: bool) -> dict[str, Any]:
    """Writes a run's blocks as they are finished; returns its report, completed by what the files say."""
    watched = Watched(run)
    saved = save(watched, out, overwrite=overwrite)
    report = run.report
    for weight in (w for block in report["blocks"] for w in block["weights"] if w["name"] in saved.notes):
        weight["note"] = "; ".join(filter(None, (weight["note"], saved.notes[weight["name"]])))
    sizes = [size.dense if name in saved.notes else size.packed for name, size in watched.sizes.items()]
    count = sum(size.numel for size in watched.sizes.values())
    totals = {"bits_per_weight": 8 * sum(sizes) / count if count else None, "bytes": saved.nbytes}
    notes = [f"{name}: {note}" for name, note in saved.notes.items() if name not in watched.sizes]
    return {**report, "path": str(saved.path), "notes": notes, "totals": {**report["totals"], **totals}}


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
    file, result, model = (Path(path).expanduser().resolve() for path in (report, out, source))
    name = report.expanduser().absolute().parent.resolve() / report.name  # where it is a link, the link itself
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
