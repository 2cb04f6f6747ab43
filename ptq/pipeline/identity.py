"""What a job is, in a few lines that can be compared: a job goes on only where all of it is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ptq._tree import tensors
from ptq.base import Stage
from ptq.models.model import Model
from ptq.numerics.lazy import Decoded, Lazy
from ptq.numerics.leaves import Leaf
from ptq.pipeline.batches import Batch
from ptq.pipeline.digest import digest
from ptq.pipeline.place import Place
from ptq.pipeline.report import versions


def identity(
    model: Model, batches: Sequence[Batch], stages: Sequence[Stage], shown: Any, seed: int, place: Place
) -> dict[str, Any]:
    """Recipe, data, model, seed and versions, as JSON: words where a person can compare them, hashes where not.

    Args:
        model: the source. Of files, names, sizes and times of change count, and what the config says; of tensors in
            memory, every byte.
        batches: every byte counts, and how they are cut.
        stages: their code and all that it closes over.
        shown: the recipe in words.
        seed: as given.
        place: device and dtype of the forward.
    """
    return {
        "recipe": shown,
        "code of the recipe": digest(stages),
        "data": _data(batches),
        "model": _model(model),
        "seed": seed,
        "device": place.device.type,
        "compute dtype": str(place.dtype),
        "versions": versions(),
    }


def _data(batches: Sequence[Batch]) -> dict[str, Any]:
    inputs = [(batch.args, batch.kwargs) for batch in batches]
    shapes = Counter(str(list(t.shape)) for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor))
    return {"micro-batches": len(batches), "tensors": dict(shapes), "content": digest(inputs)}


def _model(model: Model) -> dict[str, Any]:
    return {
        "class": type(model.module).__name__,
        "config": digest(None if model.config is None else model.config.to_json_string(use_diff=False)),
        "files": {} if model.source is None else {file.name: _stamp(file) for file in _weight_files(model.source)},
        "parameters": digest([(name, type(leaf).__name__, _held(leaf)) for name, leaf in model.params.items()]),
        "buffers": digest(list(model.module.named_buffers())),
        "code": digest([model.state.maps, repr(model.module)]),
    }


def _held(leaf: Leaf) -> Iterable[Tensor]:
    """What of a leaf is in memory; of what is not, its file says whether it is the same."""
    held = leaf.leaf if isinstance(leaf, Decoded) else leaf
    return () if isinstance(held, Lazy) else list(tensors(held))


def _weight_files(source: Path) -> Iterable[Path]:
    return sorted(source.glob("*.safetensors")) if source.is_dir() else [source]


def _stamp(file: Path) -> str:
    told = file.stat()
    return f"{told.st_size} bytes of {datetime.fromtimestamp(told.st_mtime_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S.%f}"
