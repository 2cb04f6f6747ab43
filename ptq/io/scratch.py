"""Leaves kept exactly as they are, between the stages of a job: codes unpacked, masks and patterns included.

A file holds the leaves of one block: their tensors, and in the header's metadata how they are put together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ptq.errors import BadInput
from ptq.io.files import naming, sync
from ptq.io.safetensors import DTYPES, NAMES, OnDisk, headers, metadata
from ptq.numerics.lazy import Lazy
from ptq.numerics.leaves import Leaf, compressed, nbytes

_LEAVES = "leaves"


@dataclass(frozen=True)
class Kept(Lazy):
    """A leaf in a scratch file."""

    structure: Any
    tensors: Mapping[str, OnDisk]
    dtype: torch.dtype
    shape: torch.Size
    lossy: bool
    size: int

    def load(self) -> Leaf:
        return _built(self.structure, self.tensors)


@compressed.register
def _(leaf: Kept) -> bool:
    return leaf.lossy


@nbytes.register
def _(leaf: Kept) -> int:
    return leaf.size


def keep(params: Mapping[str, Leaf], file: Path) -> None:
    """Writes leaves to a file, which appears whole or not at all."""
    found: dict[str, Tensor] = {}
    table = {
        name: {
            "structure": _taken(leaf, name, found),
            "dtype": NAMES[leaf.dtype],
            "shape": list(leaf.shape),
            "lossy": compressed(leaf),
            "size": nbytes(leaf),
        }
        for name, leaf in params.items()
    }
    partial = file.with_name(f"{file.name}.partial")
    with naming(partial):
        save_file(found, partial, metadata={_LEAVES: json.dumps(table)})
    sync(partial)
    partial.replace(file)
    sync(file.parent)


def kept(file: Path) -> dict[str, Leaf]:
    """The leaves of a file, read when they are used."""
    tensors, table = headers(file), json.loads(metadata(file).get(_LEAVES, "null"))
    if not isinstance(table, dict):
        raise BadInput(f"{file}: holds no leaves; remove the directory and start again")
    return {
        name: Kept(
            entry["structure"],
            tensors,
            DTYPES[entry["dtype"]],
            torch.Size(entry["shape"]),
            entry["lossy"],
            entry["size"],
        )
        for name, entry in table.items()
    }


def _taken(value: Any, path: str, found: dict[str, Tensor]) -> Any:
    """A leaf as JSON, its tensors put aside under their paths."""
    if isinstance(value, Tensor):
        found[path] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": path}
    if isinstance(value, torch.dtype):
        return {"dtype": NAMES[value]}
    if type(value) is tuple:  # no named one
        return {"tuple": [_taken(each, f"{path}/{i}", found) for i, each in enumerate(value)]}
    if is_dataclass(value) and not isinstance(value, type):
        kind = f"{type(value).__module__}:{type(value).__qualname__}"
        return {"type": kind, "fields": {f.name: _taken(getattr(value, f.name), f"{path}/{f.name}", found)
                                         for f in fields(value)}}  # fmt: skip
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise BadInput(
        f"{path}: a {type(value).__name__} cannot be kept between stages; use one stage, or keep it a tensor"
    )


def _built(structure: Any, tensors: Mapping[str, OnDisk]) -> Any:
    match structure:
        case {"tensor": path}:
            return tensors[path].load()
        case {"dtype": name}:
            return DTYPES[name]
        case {"tuple": parts}:
            return tuple(_built(part, tensors) for part in parts)
        case {"type": kind, "fields": parts}:
            made = object.__new__(_known(kind))
            made.__dict__.update({name: _built(part, tensors) for name, part in parts.items()})
            return made
        case _:
            return structure["value"]


def _known(kind: str) -> type:
    """A dataclass of a module that this process has imported already: a file never makes code run."""
    module, _, name = kind.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    if not (isinstance(found, type) and is_dataclass(found)):
        raise BadInput(f"{kind}: is not known here; import the module that defines it, then resume")
    return found
