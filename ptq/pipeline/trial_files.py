"""What reading and writing take on this machine."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from ptq.io.writer import Writer
from ptq.models.model import Model
from ptq.pipeline.meter import Meter

_BYTES = 1 << 24


class Rates(NamedTuple):
    """Seconds for each byte, and memory."""

    reading: float
    """from where the model is"""
    writing: float
    """a tensor as it is, into the result"""
    syncing: float
    """until what was written is on disk"""
    room: float
    """bytes that the writer needs for each byte of a tensor, beside the tensor"""


def file_rates(model: Model, writer: Writer, directory: Path) -> Rates:
    """Measures all four on some 16 MiB each.

    Args:
        model: a few bytes of its largest file are read, whatever they mean.
        writer: where its parameters will go.
        directory: on the disk that is written to.
    """
    writing, room = _writing(model, writer)
    return Rates(_reading(model.source), writing, _syncing(directory), room)


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


def _syncing(directory: Path) -> float:
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(_BYTES))
        began = time.perf_counter()
        file.flush()
        os.fsync(file.fileno())
        return (time.perf_counter() - began) / _BYTES


def _writing(model: Model, writer: Writer) -> tuple[float, float]:
    """By a part of the largest matrix."""
    name, leaf = max(
        ((n, leaf) for n, leaf in model.params.items() if len(leaf.shape) == 2), key=lambda p: p[1].shape.numel()
    )
    rows = max(1, min(leaf.shape[0], _BYTES // (leaf.shape[1] * leaf.dtype.itemsize)))
    part = torch.zeros(rows, leaf.shape[1], dtype=leaf.dtype)
    with Meter() as meter:
        writer.add({name: part})
    began = time.perf_counter()
    writer.add({name: part})
    return (time.perf_counter() - began) / part.nbytes, meter.peak / part.nbytes
