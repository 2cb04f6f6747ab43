"""What was stored how: an account of a checkpoint's tensors that can be gone on with, and read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ptq.io import bitmask
from ptq.io.compressed_tensors import WEIGHT, Stored
from ptq.io.quantization_config import Args, Quantizers
from ptq.io.safetensors import DTYPES
from ptq.io.shards import Entry
from ptq.numerics.leaves import Leaf

AS_IT_IS = ""
"""the local name of a tensor that is stored as it is, under the name of what it is"""


class Record(NamedTuple):
    """How one tensor of a checkpoint, which may be several in its files, was stored."""

    file: str
    """its name in the checkpoint"""
    name: str
    """the parameter in memory that it is, or is a part of"""
    parts: dict[str, Entry]
    """tensors in the files, by their local names in the module"""
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
    piece: bool = False
    """whether the parameter in memory is a stack of experts, and this a part of one"""
    activations: dict[str, Args] = {}
    """role (input, output; q, k, v of an attention module) -> how it is rounded"""

    @property
    def quantizers(self) -> Quantizers:
        return Quantizers(self.args, self.activations.get("input"), self.activations.get("output"))

    @property
    def module(self) -> str:
        """The module's name in the checkpoint, where the tensor is a module's weight; else its own."""
        return self.file.removesuffix(".weight")

    @property
    def tensors(self) -> dict[str, Entry]:
        """Tensors in the files, by their names there."""
        return {f"{self.module}.{part}" if part else self.file: entry for part, entry in self.parts.items()}

    @property
    def nbytes(self) -> int:
        """Bytes in the files, without the few that say a packed weight's shape."""
        return sum(e.end - e.begin for part, e in self.parts.items() if part not in ("weight_shape", "shape"))

    def leaf(self, directory: Path) -> Leaf:
        """What was stored, read when it is used."""
        tensors = zip(self.parts, self.tensors.items(), strict=True)
        local: dict[str, Any] = {part: entry.on_disk(name, directory) for part, (name, entry) in tensors}
        if AS_IT_IS in local:
            return local[AS_IT_IS]
        if "bitmask" in local:
            bits = {part: local[part] for part in bitmask.PARTS if part in local}
            local["weight"] = bitmask.masked(bits, torch.Size(self.shape))
        if self.args is None or self.args.format == "dense":
            return local["weight"]
        own = {part: local[part] for part in WEIGHT if part in local}
        return Stored(own, self.args, True, DTYPES[self.dtype], torch.Size(self.shape))


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
    return ((name, entry) for r in records for name, entry in r.tensors.items())
