"""What a job is, in a few lines that can be compared: a job goes on only where all of it is the same."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ptq._tree import tensors
from ptq.base import Stage
from ptq.models.model import Model
from ptq.numerics.lazy import Decoded, Lazy
from ptq.pipeline.batches import Batch
from ptq.pipeline.place import Place
from ptq.pipeline.report import versions

_CONSTANTS = (bool, int, float, str, bytes, tuple, list, dict, set, frozenset, Tensor, np.ndarray)
"""what a function may read of its module besides other functions and classes"""


def identity(
    model: Model, batches: Sequence[Batch], stages: Sequence[Stage], shown: Any, seed: int, place: Place
) -> dict[str, Any]:
    """Recipe, data, model, seed and versions, as JSON.

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
        "data": f"{len(batches)} micro-batches, {digest([(b.args, b.kwargs) for b in batches])}",
        "model": f"{type(model.module).__name__}, {digest(list(_source(model)))}",
        "seed": seed,
        "device": place.device.type,
        "compute dtype": str(place.dtype),
        "versions": versions(),
    }


def digest(value: Any) -> str:
    """A hash of a value's content: numbers, containers, tensors, dataclasses, functions with what they close over.

    >>> digest({"a": torch.ones(2)}) == digest({"a": torch.ones(2)}) != digest({"a": torch.zeros(2)})
    True
    """
    made = hashlib.sha256()
    for piece in _pieces(value, set()):
        made.update(piece)
    return made.hexdigest()[:16]


def _source(model: Model) -> Iterator[Any]:
    for name, leaf in model.params.items():
        held = leaf.leaf if isinstance(leaf, Decoded) else leaf
        yield name, type(leaf).__name__, () if isinstance(held, Lazy) else tensors(held)
    yield model.state.maps
    yield repr(model.module)
    yield None if model.config is None else model.config.to_json_string(use_diff=False)
    yield list(model.module.named_buffers())
    if model.source is not None:
        yield [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in _weight_files(model.source)]


def _weight_files(source: Path) -> Iterable[Path]:
    return sorted(source.glob("*.safetensors")) if source.is_dir() else [source]


def _pieces(value: Any, seen: set[int]) -> Iterator[bytes]:
    """The content of a value, its kind first."""
    yield type(value).__name__.encode()
    yield from _inside(value, seen)


@singledispatch
def _inside(value: Any, seen: set[int]) -> Iterator[bytes]:
    """Numbers, words and the like as they print; other objects by what they hold, since their address says nothing."""
    if is_dataclass(value):
        yield from _pieces([(f.name, getattr(value, f.name)) for f in fields(value)], seen)
    elif " at 0x" not in repr(value):
        yield repr(value).encode()
    elif id(value) not in seen:  # one that leads back to itself is entered once
        seen.add(id(value))
        yield from _pieces(getattr(value, "__dict__", None), seen)


@_inside.register
def _(value: Tensor, seen: set[int]) -> Iterator[bytes]:
    yield f"{value.dtype} {tuple(value.shape)}".encode()
    yield value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


@_inside.register
def _(value: Mapping, seen: set[int]) -> Iterator[bytes]:  # type: ignore[type-arg]  # dispatch is on the bare class
    for item in value.items():
        yield from _pieces(item, seen)


@_inside.register
def _(value: list | tuple, seen: set[int]) -> Iterator[bytes]:  # type: ignore[type-arg]  # as above
    for item in value:
        yield from _pieces(item, seen)


@_inside.register
def _(value: set | frozenset, seen: set[int]) -> Iterator[bytes]:  # type: ignore[type-arg]  # as above
    yield repr(sorted(map(repr, value))).encode()


@_inside.register
def _(value: types.CodeType, seen: set[int]) -> Iterator[bytes]:
    yield from _pieces((value.co_code, value.co_names, value.co_consts), seen)


@_inside.register
def _(value: type | types.ModuleType | types.BuiltinFunctionType, seen: set[int]) -> Iterator[bytes]:
    yield value.__name__.encode()


@_inside.register
def _(value: functools.partial, seen: set[int]) -> Iterator[bytes]:  # type: ignore[type-arg]  # as above
    yield from _pieces((value.func, value.args, value.keywords), seen)


@_inside.register
def _(value: np.ndarray, seen: set[int]) -> Iterator[bytes]:  # type: ignore[type-arg]  # as above
    yield f"{value.dtype} {value.shape}".encode()
    yield value.tobytes()


@_inside.register
def _(value: nn.Module, seen: set[int]) -> Iterator[bytes]:
    yield repr(value).encode()
    yield from _pieces(value.state_dict(), seen)


@_inside.register
def _(value: types.MethodType, seen: set[int]) -> Iterator[bytes]:
    yield from _pieces((value.__func__, value.__self__), seen)


@_inside.register
def _(value: types.FunctionType, seen: set[int]) -> Iterator[bytes]:
    value = inspect.unwrap(value)
    if id(value) in seen:
        return
    seen.add(id(value))
    yield f"{value.__module__}.{value.__qualname__}".encode()
    yield from _pieces([_content(cell) for cell in value.__closure__ or ()], seen)
    if (value.__module__ or "").partition(".")[0] != __name__.partition(".")[0]:  # our own is what its version says
        called = [value.__globals__.get(name) for name in value.__code__.co_names]
        beside = [f for f in called if getattr(f, "__module__", None) == value.__module__ or isinstance(f, _CONSTANTS)]
        yield from _pieces((value.__code__, value.__defaults__, value.__kwdefaults__, beside), seen)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was not bound yet
        return None
