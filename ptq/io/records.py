"""What was stored how: an account of a checkpoint's tensors that can be gone on with, and read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ptq.io import bitmask
from ptq.io.compressed_tensors import Stored
from ptq.io.quantization_config import Args, Quantizers
from ptq.io.safetensors import DTYPES
from ptq.io.shards import Entry
from ptq.numerics.leaves import Leaf


class Record(NamedTuple):
    """How one tensor of a checkpoint, which may be several in its files, was stored."""

    file: str
    """its name in the checkpoint"""
    name: str
    """the parameter in memory that it is, or is a part of"""
    parts: dict[str, Entry]
    """tensors in the files"""
    dtype: str
    shape: list[int]
    args: Args | None = None
    """how it is compressed, if it is"""
    note: str = ""
    """why it is not stored as asked"""
    by_class: bool = True
    """whether the class of its module says how it is stored"""
    sparsity: str = ""
    """what its zeros obey, if it is pruned"""
    activations: dict[str, Args] = {}
    """role (input, output; q, k, v of an attention module) -> how it is rounded"""

    @property
    def quantizers(self) -> Quantizers:
        return Quantizers(self.args, self.activations.get("input"), self.activations.get("output"))

    @property
    def nbytes(self) -> int:
        """Bytes in the files, without the few that say a packed weight's shape."""
        shapes = ("weight_shape", ".shape")
        return sum(e.end - e.begin for part, e in self.parts.items() if not part.endswith(shapes))

    def leaf(self, directory: Path) -> Leaf:
        """What was stored, read when it is used."""
        parts = {part: entry.on_disk(part, directory) for part, entry in self.parts.items()}
        shape, raw = torch.Size(self.shape), parts.get(self.file)
        local: dict[str, Any] = {part.rpartition(".")[2]: leaf for part, leaf in parts.items()}
        own = {part: local[part] for part in bitmask.PARTS if part in local}
        local = {part: leaf for part, leaf in local.items() if part.startswith("weight")}
        if "bitmask" in own:
            raw = local["weight"] = bitmask.masked(own, shape)
        if self.args is None or self.args.format == "dense":
            return raw
        return Stored(local, self.args, True, DTYPES[self.dtype], shape)


def record(raw: Sequence[Any]) -> Record:
    """A record that was a line of JSON."""
    made = Record(*raw)
    parts = {name: Entry(*entry) for name, entry in made.parts.items()}
    activations = {role: _args(given) for role, given in made.activations.items()}
    return made._replace(parts=parts, args=_args(made.args), activations=activations)


def _args(raw: Sequence[Any] | None) -> Any:
    args = None if raw is None else Args(*raw)
    return args if args is None or args.block is None else args._replace(block=(args.block[0], args.block[1]))


def parts(records: Iterable[Record]) -> Iterator[tuple[str, Entry]]:
    """The tensors of records, in the order in which they were written."""
    return ((name, entry) for r in records for name, entry in r.parts.items())
