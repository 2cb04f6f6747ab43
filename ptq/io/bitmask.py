"""Pruned weights as a bit for each element and the values where it is set, as old compressed-tensors writers left them.

    format             compressed                        row_offsets
    sparse-bitmask     [count], row after row            int64 [out], where each row's values begin
    sparse-24-bitmask  [out, in / 2], two of every four  none

Beside them `bitmask` is uint8 [out, ceil(in / 8)], column c in bit c % 8 of byte c // 8, and `shape` int64. The names
follow the module's; in files of the first writers, the weight's. Where a weight is quantized the values are its codes,
with scales as ever. Tensors alone say which weights are stored so: configs that promise it were written for dense
files too, and zeros of a dense matrix may fall into a pattern by chance. No loader of today reads these formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.io.layouts import FLOATS, LAYOUTS, Part, arguments, described, encoded, fits
from ptq.io.quantization_config import Args
from ptq.io.safetensors import OnDisk, sizes
from ptq.numerics.lazy import Lazy
from ptq.numerics.leaves import Leaf, Quantized, Sparse, Transposed, compressed, dense, nbytes, rounded, validate
from ptq.numerics.packing import pack_bytes, unpack_bytes
from ptq.numerics.patterns import NM, Unstructured

TWO_OF_FOUR = NM(keep=2, of=4)
FORMATS = {"sparse-bitmask": "unstructured", "sparse-24-bitmask": "2:4"}
"""with the structure that their configs name"""

PARTS = ("shape", "compressed", "bitmask", "row_offsets")
"""local names; only sparse-bitmask has the last"""
_VALUES = (*FLOATS, torch.float8_e4m3fn, torch.int8)


@dataclass(frozen=True)
class Masked(Lazy):
    """A pruned weight in a file: `load` gives it as `Sparse`."""

    parts: Mapping[str, OnDisk]
    """local name, such as bitmask -> tensor"""
    dtype: torch.dtype
    shape: torch.Size

    @property
    def file(self) -> Path:
        return self.parts["compressed"].file

    @property
    def name(self) -> str:
        return self.parts["compressed"].name

    @property
    def pattern(self) -> NM | None:
        """What the mask obeys, by the values' shape."""
        return TWO_OF_FOUR if len(self.parts["compressed"].shape) == 2 else None

    def load(self) -> Sparse:
        mask = self._mask()
        held = self.parts["compressed"].load().flatten()
        if held.numel() != int(mask.sum()):
            self._refuse("compressed", f"{held.numel()} values, expected {int(mask.sum())}, one for each bit")
        values = torch.zeros(self.shape, dtype=self.dtype)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
        values.view(bits)[mask] = held.view(bits)  # torch puts no float8
        return Sparse(values, mask, self.pattern)

    def _mask(self) -> Tensor:
        stored = self.parts["bitmask"].load()
        bits = unpack_bytes(stored, 1, self.shape[-1])
        if not torch.equal(pack_bytes(bits, 1), stored):
            self._refuse("bitmask", f"bits beyond the {self.shape[-1]} columns, expected none")
        mask = bits.bool()
        if self.pattern and not bool((mask.unflatten(-1, (-1, 4)).sum(-1) == 2).all()):
            self._refuse("bitmask", "groups of four with other than two bits, expected two in each")
        if not self.pattern and not torch.equal(self.parts["row_offsets"].load().long(), _offsets(mask)):
            self._refuse("row_offsets", "offsets that disagree with the bits, expected where each row's values begin")
        return mask

    def _refuse(self, part: str, what: str) -> None:
        entry = self.parts[part]
        raise BadInput(f"{entry.file}: {entry.name}: got {what}; download or copy it again")


@compressed.register
def _(leaf: Masked) -> bool:
    return True


@rounded.register
def _(leaf: Masked) -> bool:
    return False  # values that are codes are in a `Stored`


@nbytes.register
def _(leaf: Masked) -> int:
    return sum(nbytes(part) for part in leaf.parts.values())


def joined(entries: Mapping[str, OnDisk], where: Path) -> dict[str, OnDisk | Masked]:
    """The tensors of a checkpoint with the parts of each pruned weight made one, `<module>.weight`.

    Raises:
        BadInput: a part is missing or of a wrong shape or type; a weight is there twice.
    """
    groups: dict[str, dict[str, OnDisk]] = {}
    for name, entry in entries.items():
        owner, _, part = name.rpartition(".")
        if part in PARTS and f"{owner}.bitmask" in entries:
            groups.setdefault(owner, {})[part] = entry
    groups = {owner: parts for owner, parts in groups.items() if len(parts) > 1}
    taken = {f"{owner}.{part}" for owner, parts in groups.items() for part in parts}
    found: dict[str, OnDisk | Masked] = {name: entry for name, entry in entries.items() if name not in taken}
    for owner, parts in groups.items():
        name = owner if owner.endswith(".weight") else f"{owner}.weight"
        if name in found:
            raise BadInput(f"{where}: {name} is there dense and as bits; remove one of them")
        found[name] = _masked(owner, parts, where)
    return found


def masked(parts: Mapping[str, OnDisk], shape: torch.Size) -> Masked:
    """A pruned weight, if its tensors have the shapes and types that its format says, by their headers."""
    for part, need in _expected(parts["compressed"].shape, shape).items():
        got = parts[part]
        if got.dtype not in need.dtypes or not fits(need, got.shape):
            types = "floats, float8_e4m3fn or int8" if need.dtypes == _VALUES else " or ".join(map(str, need.dtypes))
            found = f"{got.dtype} {tuple(got.shape)}"
            raise BadInput(f"{got.file}: {got.name}: got {found}, expected {types} {need.shape} for {tuple(shape)}")
    leaf = Masked(parts, parts["compressed"].dtype, shape)
    if leaf.pattern and shape[-1] % leaf.pattern.of:
        raise BadInput(
            f"{leaf.file}: {leaf.name}: got two of every four for {shape[-1]} columns, expected a multiple of 4"
        )
    return leaf


def unfit(leaf: Leaf, form: str) -> str:
    """Why a leaf cannot be kept as bits and values, as far as it is known without its values; empty: it can.

    >>> unfit(Sparse(torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool), Unstructured(0.5)), "sparse-24-bitmask")
    'it is not 2 of 4 sparse; sparse-bitmask takes it'
    """
    if not isinstance(leaf, Sparse):
        return "it is not sparse"
    if form == "sparse-24-bitmask" and isinstance(leaf.pattern, Unstructured):
        return "it is not 2 of 4 sparse; sparse-bitmask takes it"
    if isinstance(leaf.values, Quantized) and leaf.values.zero is not None:
        return "with zero points the code of a pruned weight is not 0"
    if isinstance(leaf.values, Quantized) and not _unpacked(leaf.values):
        return f"no format keeps one code in an element for {described(leaf.values)}"
    return ""


def sparse(leaf: Sparse, form: str, name: str) -> tuple[Args | None, dict[str, Tensor]]:
    """The tensors that stand for a leaf in a format, by local name, and the scheme of its codes if it is quantized.

    Raises:
        BadInput: the leaf is not 2 of 4 sparse, which the format asks for.
    """
    args, beside, values = None, {}, leaf.values
    if isinstance(values, Quantized):
        args, beside = encoded(validate(values, name), _unpacked(values), name)
        values = beside.pop("weight")
    values = torch.where(leaf.mask, dense(values), torch.zeros((), dtype=values.dtype, device=leaf.device))
    # What is 0 needs no bit, but for those that make two of each four.
    mask = _two_of_four(leaf.mask, name) if form == "sparse-24-bitmask" else values != 0
    return args, _bits(values, mask, form) | beside


def config(form: str, counts: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """The `sparsity_config` of a checkpoint.

    Args:
        form: the format of its pruned weights.
        counts: name of each one's module -> how many values it keeps, and of how many.

    >>> config("sparse-bitmask", {"a": (1, 4), "b": (2, 4)})["global_sparsity"]
    0.625
    """
    kept, numel = (sum(values) for values in zip(*counts.values(), strict=True))
    return {
        "format": form,
        "targets": list(counts),
        "ignore": [],
        "global_sparsity": 1 - kept / numel,
        "sparsity_structure": FORMATS[form],
    }


def structure(leaf: Leaf) -> str:
    """What a pruned leaf's zeros obey, as configs spell it; empty: it is not pruned.

    >>> structure(Sparse(torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.bool), NM(keep=2, of=4)))
    '2:4'
    """
    if isinstance(leaf, Transposed):
        return structure(leaf.leaf)
    if not isinstance(leaf, Sparse):
        return ""
    return f"{leaf.pattern.keep}:{leaf.pattern.of}" if isinstance(leaf.pattern, NM) else "unstructured"


def _masked(owner: str, parts: Mapping[str, OnDisk], where: Path) -> Masked:
    flat = "compressed" in parts and len(parts["compressed"].shape) == 1
    for part in PARTS if flat else PARTS[:-1]:
        if part not in parts:
            raise BadInput(f"{where}: no tensor {owner}.{part}; download or copy it again")
    return masked(parts, sizes(parts["shape"], 2))


def _expected(values: torch.Size, shape: torch.Size) -> dict[str, Part]:
    rows, columns = shape
    found = {"bitmask": Part((rows, -(-columns // 8)), [torch.uint8])}
    if len(values) == 1:
        found["row_offsets"] = Part((rows,), [torch.int64, torch.int32])
    # How many values one row after the other has is told by bits, which are not read yet.
    return found | {"compressed": Part(tuple(values) if len(values) == 1 else (rows, columns // 2), _VALUES)}


def _bits(values: Tensor, mask: Tensor, form: str) -> dict[str, Tensor]:
    shape, held = torch.tensor(values.shape), values[mask]
    bits = {"bitmask": pack_bytes(mask.to(torch.uint8), 1)}
    if form == "sparse-24-bitmask":
        return {"shape": shape[:, None], "compressed": held.view(len(values), -1)} | bits
    return {"shape": shape, "compressed": held} | bits | {"row_offsets": _offsets(mask)}


def _offsets(mask: Tensor) -> Tensor:
    counts = mask.sum(-1)
    return counts.cumsum(0) - counts


def _two_of_four(mask: Tensor, name: str) -> Tensor:
    """Two positions of every four, those that the mask keeps among them."""
    if mask.shape[-1] % 4 or bool((mask.unflatten(-1, (-1, 4)).sum(-1) > 2).any()):
        raise BadInput(f"{name}: is not 2 of 4 sparse and cannot be stored as sparse-24-bitmask; take sparse-bitmask")
    return TWO_OF_FOUR.mask(mask.to(torch.int8))


def _unpacked(leaf: Quantized) -> str:
    """The first format that keeps the leaf with one code in an element; empty: none does."""
    return next((form for form, layout in LAYOUTS.items() if not layout.packing and arguments(leaf, form)), "")
