"""What reading and writing take on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ptq.io.journal import Journal
from ptq.io.writer import Writer
from ptq.models.model import Model
from ptq.pipeline.meter import Meter, timed, timed_well

_BYTES = 1 << 26  # more than malloc keeps at hand, as large weights are
_CPU = torch.device("cpu")


class Rates(NamedTuple):
    """Seconds for each byte, and memory."""

    reading: float
    """from where the model is"""
    writing: float
    """a tensor as it is, into the result"""
    syncing: float
    """until what was written is on disk"""
    safe: float
    """seconds for each block, however small, until it is on disk and the journal says so"""
    room: float
    """bytes that the writer needs for each byte of a tensor, beside the tensor"""


def file_rates(model: Model, writer: Writer, directory: Path) -> Rates:
    """Measures all of it on some 64 MiB.

    Args:
        model: a few bytes of its largest file are read, whatever they mean.
        writer: where its parameters will go.
        directory: where the writer writes.
    """
    name, part = _part(model)
    with Meter() as meter:
        writer.add({name: part})
    writing, _ = timed_well(_CPU, lambda: writer.add({name: part}))
    written = writer.nbytes
    syncing, _ = timed(_CPU, writer.sync)
    journal = Journal(directory / "trial.jsonl")
    safe, _ = timed(_CPU, lambda: (writer.sync(), journal.append({})))
    per_byte = max(0.0, syncing - safe) / max(1, written)
    return Rates(_reading(model.source), writing / part.nbytes, per_byte, safe, meter.peak / part.nbytes)


def _reading(source: Path | None) -> float:
    if source is None:
        return 0.0
    files = [f for f in (source.iterdir() if source.is_dir() else [source]) if f.is_file()]
    largest = max(files, key=lambda f: f.stat().st_size)
    with largest.open("rb", buffering=0) as file:
        file.seek(max(0, largest.stat().st_size - _BYTES) // 2)
        began = time.perf_counter()
        got = len(file.read(_BYTES))
        return (time.perf_counter() - began) / max(1, got)


def _part(model: Model) -> tuple[str, Tensor]:
    """Zeros in place of the first rows of the largest parameter."""
    name = max(model.params, key=lambda n: model.params[n].shape.numel())
    leaf = model.params[name]
    rows, *inner = leaf.shape or (1,)
    count = 1 + _BYTES // max(1, torch.Size(inner).numel() * leaf.dtype.itemsize)
    return name, torch.zeros(min(rows, count), *inner, dtype=leaf.dtype)
