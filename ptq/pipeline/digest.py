"""A hash of what a value is: numbers, containers, tensors, objects, and functions with all that they read.

What is installed is known by its name, since its version says what it does; of a user's own functions and classes the
code counts, and what it names of its module and of the user's other modules.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_CONSTANTS = (bool, int, float, str, bytes, tuple, list, dict, set, frozenset, Tensor, np.ndarray)
"""what code may name of its module besides functions, classes and their objects"""


def digest(value: Any) -> str:
    """A hash of a value's content: numbers, containers, tensors, dataclasses, functions with what they close over.

    >>> digest({"a": torch.ones(2)}) == digest({"a": torch.ones(2)}) != digest({"a": torch.zeros(2)})
    True
    """
    made = hashlib.sha256()
    for piece in _pieces(value, set()):
        made.update(piece)
    return made.hexdigest()[:16]


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
    elif _new(value, seen):
        yield from _pieces(object.__getstate__(value), seen)  # attributes and slots
    if not _installed(type(value).__module__):
        yield from _pieces(type(value), seen)


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
def _(value: types.ModuleType | types.BuiltinFunctionType, seen: set[int]) -> Iterator[bytes]:
    yield value.__name__.encode()


@_inside.register
def _(value: type, seen: set[int]) -> Iterator[bytes]:
    yield f"{value.__module__}.{value.__qualname__}".encode()
    if not _installed(value.__module__) and _new(value, seen):
        own = {name: _plain(member) for name, member in vars(value).items()}
        methods = {name: member for name, member in own.items() if isinstance(member, types.FunctionType)}
        told = {name: member for name, member in own.items() if isinstance(member, _CONSTANTS) and name[:2] != "__"}
        yield from _pieces([value.__bases__, methods, told], seen)


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
    if not _new(value, seen):
        return
    yield f"{value.__module__}.{value.__qualname__}".encode()
    yield from _pieces([_content(cell) for cell in value.__closure__ or ()], seen)
    if not _installed(value.__module__):
        yield from _pieces((value.__code__, value.__defaults__, value.__kwdefaults__, list(_named(value))), seen)


def _named(function: types.FunctionType) -> Iterator[Any]:
    """What a function's code names of its module, and of the user's modules that it names."""
    names = dict.fromkeys(_names(function.__code__))
    for value in (function.__globals__.get(name) for name in names):
        if not isinstance(value, types.ModuleType):
            yield from filter(_counts, [value])
        elif not _installed(value.__name__):
            yield from filter(_counts, (getattr(value, name, None) for name in names))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _counts(value: Any) -> bool:
    return isinstance(value, _CONSTANTS) or not _installed(getattr(value, "__module__", None))


@functools.cache
def _installed(module: str | None) -> bool:
    """Whether a version says what a module holds."""
    top = (module or "builtins").partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    own = __name__.partition(".")[0]
    return top in (own, *sys.stdlib_module_names) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _new(value: Any, seen: set[int]) -> bool:
    """Whether it is met for the first time: what leads back to itself is entered once."""
    met = id(value) in seen
    seen.add(id(value))
    return not met


def _plain(member: Any) -> Any:
    """A method without what makes it static or a property."""
    return getattr(member, "__func__", getattr(member, "fget", member))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was not bound yet
        return None
