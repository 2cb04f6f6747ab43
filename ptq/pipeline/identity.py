"""What a job is, in a few lines that can be compared: a job goes on only where all of it is the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ptq._tree import tensors
from ptq.base import Stage
from ptq.io.job import FILES
from ptq.models.model import Model
from ptq.numerics.lazy import Decoded, Lazy
from ptq.numerics.leaves import Leaf
from ptq.pipeline.batches import Batch
from ptq.pipeline.digest import digest
from ptq.pipeline.place import Place
from ptq.pipeline.report import versions

_PIECE = 1 << 12


def identity(
    model: Model, batches: Sequence[Batch], stages: Sequence[Stage], shown: Any, seed: int, place: Place
) -> dict[str, Any]:
    """Recipe, data, model, seed and versions, as JSON: words where a person can compare them, hashes where not.

    Args:
        model: the source, wherever it lies. Of files, names, sizes and a sample of the bytes count, the time of change
            where they lie in the same place, and what the config says; of tensors in memory, every byte.
        batches: every byte counts, and how they are cut.
        stages: their code and all that it closes over.
        shown: the recipe in words.
        seed: as given.
        place: device and dtype of the forward.
    """
    return {
        "recipe": shown,
        "code of the recipe": {
            f"{i}.{j} {t.name}": digest(t) for i, s in enumerate(stages, 1) for j, t in enumerate(s, 1)
        },
        "data": _data(batches),
        "model": _model(model),
        FILES: {str(file): str(datetime.fromtimestamp(file.stat().st_mtime, UTC)) for file in _files(model)},
        "seed": seed,
        "device": place.device.type,
        "compute dtype": str(place.dtype),
        "number of threads": torch.get_num_threads(),  # sums are cut among them
        "processor": torch.backends.cpu.get_cpu_capability(),
        "versions": {**versions(), "code": _code()},
    }


def _data(batches: Sequence[Batch]) -> dict[str, Any]:
    inputs = [(batch.args, batch.kwargs) for batch in batches]
    shapes = Counter(str(list(t.shape)) for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))
    shown = ", ".join(f"{count} of {shape}" for shape, count in shapes.items())
    return {"micro-batches": len(batches), "tensors": shown, "content": digest(inputs)}


def _model(model: Model) -> dict[str, Any]:
    config = {} if model.config is None else json.loads(model.config.to_json_string(use_diff=False))
    return {
        "class": type(model.module).__name__,
        "config": {key: value for key, value in config.items() if key != "_name_or_path"},
        "files": {file.name: f"{file.stat().st_size} bytes, {_sample(file)}" for file in _files(model)},
        "parameters": digest([(name, type(leaf).__name__, _held(leaf)) for name, leaf in model.params.items()]),
        "buffers": digest(list(model.module.named_buffers())),
        "code": digest([model.state.maps, repr(model.module)]),
    }


def _held(leaf: Leaf) -> Iterable[Tensor]:
    """What of a leaf is in memory; of what is not, its file says whether it is the same."""
    held = leaf.leaf if isinstance(leaf, Decoded) else leaf
    return () if isinstance(held, Lazy) else list(tensors(held))


def _files(model: Model) -> list[Path]:
    if model.source is None:
        return []
    source = model.source.resolve()
    return sorted(source.glob("*.safetensors")) if source.is_dir() else [source]


def _sample(file: Path) -> str:
    """A hash of a thousand places all over a file: another model differs there, a copy does not."""
    made, size = hashlib.sha256(), file.stat().st_size
    with file.open("rb", buffering=0) as handle:
        for at in (*range(0, size, max(_PIECE, size // 1000)), max(0, size - _PIECE)):
            made.update(os.pread(handle.fileno(), _PIECE, at))
    return made.hexdigest()[:16]


@cache
def _code() -> str:
    """A hash of this package's files: while it is developed its version stays the same."""
    package = Path(__file__).parents[1]
    return digest([(str(p.relative_to(package)), p.read_bytes()) for p in sorted(package.rglob("*.py"))])
