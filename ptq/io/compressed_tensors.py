"""Compressed weights in checkpoints: the tensors of each made one leaf."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptq.errors import BadInput, Guard, at_once
from ptq.io.activations import PARTS
from ptq.io.bitmask import Masked
from ptq.io.frozen import held, needed, thawed
from ptq.io.inference import inferred
from ptq.io.layouts import LAYOUTS, Part, decoded, expected, fits, grid_of
from ptq.io.quantization_config import Args, Config, parse
from ptq.io.safetensors import OnDisk, positive, sizes
from ptq.numerics.indexed import Indexed, simplest
from ptq.numerics.lazy import Lazy
from ptq.numerics.leaves import Leaf, Quantized, Sparse, compressed, dense, nbytes, validate
from ptq.numerics.tiles import spread

WEIGHT = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)
SCALES = ("weight_global_scale", "weight_scale")
_CODES = (torch.int8, torch.int32, torch.uint8, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Stored(Lazy):
    """A compressed weight in a file: `load` gives it as `Quantized`, in an `Indexed` or a `Sparse` if it is that."""

    parts: Mapping[str, OnDisk | Masked]
    """local name, such as weight_scale -> tensor"""
    args: Args
    straddle: bool
    """whether packed codes may cross words"""
    dtype: torch.dtype
    shape: torch.Size
    frozen: bool = False
    """whether `weight` has the floats that codes stand for; `args` is then in the format that would hold the codes"""

    @property
    def form(self) -> str | None:
        """The format that it came in."""
        return "frozen" if self.frozen else self.args.format

    def load(self) -> Leaf:
        tensors: dict[str, Any] = {part: entry.load() for part, entry in self.parts.items() if part != "weight_shape"}
        pruned = tensors.get("weight")
        if not isinstance(pruned, Sparse):
            return self._leaf(tensors)
        leaf = self._leaf({**tensors, "weight": pruned.values})
        # A code of 0 is no weight of 0 where there are zero points: then the codes are all there is to say.
        return Sparse(leaf, pruned.mask, pruned.pattern) if self.args.symmetric else leaf

    def _leaf(self, tensors: Mapping[str, Tensor]) -> Leaf:
        for part in (part for part in SCALES if part in tensors):
            self._refuse_wrong(part, tensors[part])
        scale = self.parts["weight_scale"]
        if self.frozen:
            raw = self.parts["weight"]
            return thawed(tensors, self.args, f"{raw.file}: {raw.name}")
        leaf = self._decoded(tensors)
        leaf = validate(leaf, f"{scale.file}: {scale.name}")  # the quotient of two good numbers may be none
        return self._ordered(leaf, tensors["weight_g_idx"]) if "weight_g_idx" in tensors else leaf

    def check_scales(self, guard: Guard = at_once) -> None:
        """Reads scales and divisors alone, of which each is a number above 0.

        Raises:
            BadInput: one is not, as the guard lets it.
        """
        for part in (part for part in SCALES if part in self.parts):
            with guard(self.parts[part].name):
                self._refuse_wrong(part, dense(self.parts[part]))

    def _decoded(self, tensors: Mapping[str, Tensor]) -> Quantized:
        zero = self.parts.get("weight_zero_point")
        if zero is None or not self.args.symmetric:
            return decoded(tensors, self.args, self.shape, self.dtype, self.straddle)
        leaf = decoded(tensors, self.args._replace(symmetric=False), self.shape, self.dtype, self.straddle)
        if leaf.zero is not None and bool((leaf.zero != 0).any()):  # old writers left zeros beside symmetric weights
            what = "got zero points, and its config says that there are none (symmetric: true)"
            raise BadInput(f"{zero.file}: {zero.name}: {what}; correct one of them")
        return replace(leaf, zero=None)

    def _refuse_wrong(self, part: str, values: Tensor) -> None:
        grid = LAYOUTS[str(self.args.format)].scales if part == "weight_scale" else None
        entry = self.parts[part]
        if isinstance(entry, OnDisk):
            positive(entry, grid.decode(values) if grid else values.float())

    def _ordered(self, leaf: Quantized, columns: Tensor) -> Leaf:
        groups, index = leaf.scale.shape[-1], self.parts["weight_g_idx"]
        if bool((columns == -1).any()):  # how old writers said that there is no order
            return leaf
        if not bool(((columns >= 0) & (columns < groups)).all()):
            got = f"{int(columns.min())} to {int(columns.max())}"
            raise BadInput(f"{index.file}: {index.name}: got groups {got}, expected 0 to {groups - 1} or all -1")
        return simplest(Indexed(leaf, columns))


@compressed.register
def _(leaf: Stored) -> bool:
    return True


@nbytes.register
def _(leaf: Stored) -> int:
    return sum(nbytes(part) for part in leaf.parts.values())


def collected(
    entries: Mapping[str, OnDisk | Masked],
    quantization: Any,
    classes: Callable[[str], Sequence[str]],
    dtype: torch.dtype,
    where: Path,
    guard: Guard = at_once,
) -> dict[str, Leaf]:
    """The tensors of a compressed checkpoint with the parts of each weight made one leaf, `<module>.weight`.

    What belongs to activations is left out; see `ptq.io.activations`.

    Args:
        entries: what the files hold.
        quantization: the config's `quantization_config`; empty, or without groups: tensors alone say what they are.
        classes: name of a weight -> class names of its module.
        dtype: what weights decode to.
        where: the directory, for errors.
        guard: what becomes of a weight that is refused.

    Raises:
        BadInput: a part is missing or of a wrong shape; a scheme is not read.
    """
    config = parse(quantization, where)
    modules = by_module(entries, WEIGHT)
    extra = PARTS if config.beyond else ()
    leaves: dict[str, Leaf] = {n: e for n, e in entries.items() if n.rpartition(".")[2] not in (*WEIGHT, *extra)}
    for module, parts in modules.items():
        name = f"{module}.weight" if module else "weight"
        with guard(name):
            leaf = _stored(name, parts, config, classes, dtype, where)
            owner = name.removesuffix("weight")
            leaves |= {f"{owner}{part}": entry for part, entry in parts.items()} if leaf is None else {name: leaf}
    return leaves


def by_module(entries: Mapping[str, OnDisk | Masked], parts: Collection[str]) -> dict[str, dict[str, OnDisk | Masked]]:
    """Module -> its tensors of these local names."""
    modules: dict[str, dict[str, OnDisk | Masked]] = {}
    for name, entry in entries.items():
        module, _, part = name.rpartition(".")
        if part in parts:
            modules.setdefault(module, {})[part] = entry
    return modules


def zeroed(leaf: Quantized, mask: Tensor) -> Quantized:
    """The same leaf with the code that stands for 0 wherever the mask is False.

    >>> from ptq.numerics.grids import Int
    >>> q = Quantized(torch.tensor([[3, -8]], dtype=torch.int8), torch.ones(1, 1), None, Int(4), torch.float32)
    >>> zeroed(q, torch.tensor([[False, True]])).codes
    tensor([[ 0, -8]], dtype=torch.int8)
    """
    nothing = torch.zeros_like(leaf.codes) if leaf.zero is None else spread(leaf.zero, leaf.shape)
    return replace(leaf, codes=torch.where(mask, leaf.codes, nothing))


def _stored(
    name: str,
    parts: dict[str, OnDisk | Masked],
    config: Config,
    classes: Callable[[str], Sequence[str]],
    dtype: torch.dtype,
    where: Path,
) -> Leaf | None:
    """The leaf that tensors make, or None where they are what they are: no compressed weight."""
    raw, given = parts.get("weight_packed") or parts.get("weight"), config.args(name.rpartition(".")[0], classes(name))
    if raw is None and config.groups:
        raise BadInput(f"{where}: {name}: there is {', '.join(sorted(parts))} but no weight; download or copy it again")
    coded = given is not None or (raw is not None and raw.dtype in _CODES)  # else scales are beside no codes
    if raw is None or ("weight_packed" not in parts and not (coded and "weight_scale" in parts)):
        return None
    if "weight_scale" not in parts:
        raise BadInput(f"{where}: no tensor {name}_scale; download or copy it again")
    frozen = None if given is None else held(parts, given, config.packed)
    if frozen is not None:
        return _checked(Stored(parts, frozen, True, raw.dtype, raw.shape, frozen=True), name, where)
    told = parts.get("weight_shape")
    shape = sizes(told, len(raw.shape)) if isinstance(told, OnDisk) else None
    args = _args(name, parts, shape, given, where)
    packing = LAYOUTS[str(args.format)].packing
    if packing == "words" and shape is None:
        raise BadInput(f"{where}: no tensor {name}_shape; download or copy it again")
    if packing != "words" or shape is None:
        shape = torch.Size((*raw.shape[:-1], raw.shape[-1] * 8 // args.bits)) if packing else raw.shape
    straddle = packing != "words" or _straddles(raw, shape, args, config)
    return _checked(Stored(parts, args, straddle, dtype, shape), name, where)


def _args(
    name: str, parts: Mapping[str, OnDisk | Masked], shape: torch.Size | None, given: Args | None, where: Path
) -> Args:
    """The scheme that the config gives, in the format that the tensors are in; or what the tensors say alone."""
    told = inferred({**parts, "weight_shape": shape} if shape else parts)
    if given is None and told is None:
        how = "no config group says how, and its tensors leave that open"
        raise BadInput(f"{where}: {name} is compressed, but {how}")
    if given is None:
        return told  # type: ignore[return-value]  # one of them is there
    layout = LAYOUTS.get(str(given.format))
    if layout is None or layout.weight not in parts:
        raw = parts.get("weight_packed") or parts["weight"]
        if told is None and raw.dtype != torch.int32:
            raise BadInput(f"{where}: {name}: {raw.dtype} {tuple(raw.shape)} is in none of {', '.join(LAYOUTS)}")
        given = given._replace(format=told.format if told else "pack-quantized")
    if grid_of(given) not in LAYOUTS[str(given.format)].grids:
        what = f"{given.kind} of {given.bits} bits"
        raise BadInput(f"{where}: {name}: {what} in format {given.format}, which does not hold them")
    return given


def _straddles(raw: OnDisk | Masked, shape: torch.Size, args: Args, config: Config) -> bool:
    """The layout of packed codes is told by the number of words."""
    dense_words, whole_words = -(-shape[-1] * args.bits // 32), -(-shape[-1] // (32 // args.bits))
    if dense_words == whole_words and 8 % args.bits:
        return config.version >= (0, 18)
    return raw.shape[-1] != whole_words or dense_words == whole_words


def _checked(leaf: Stored, name: str, where: Path) -> Stored:
    """The leaf, if its tensors have the shapes and types that its scheme says, by their headers."""
    if len(leaf.shape) < 2:
        raw = leaf.parts.get("weight_packed") or leaf.parts["weight"]
        raise BadInput(f"{raw.file}: {raw.name}: got {raw.dtype} {tuple(raw.shape)}, expected a matrix")
    try:
        args = leaf.args._replace(symmetric=leaf.args.symmetric and "weight_zero_point" not in leaf.parts)
        wanted = needed(args, leaf.shape) if leaf.frozen else expected(args, leaf.shape, leaf.straddle)
    except BadInput as error:
        raise BadInput(f"{where}: {name}: {error}") from None
    how = f"strategy {leaf.args.strategy} {leaf.args.group_size or leaf.args.block or ''}".rstrip()
    if "weight_g_idx" in leaf.parts:
        wanted["weight_g_idx"] = Part((leaf.shape[-1],), [torch.int32, torch.int64])
    for part, need in wanted.items():
        if part not in leaf.parts:
            raise BadInput(f"{where}: no tensor {name.removesuffix('weight')}{part}; its config asks for it ({how})")
        got = leaf.parts[part]
        if got.dtype not in need.dtypes or not fits(need, got.shape):
            types = "floating" if len(need.dtypes) > 2 else " or ".join(map(str, need.dtypes))
            raise BadInput(
                f"{got.file}: {got.name}: got {got.dtype} {tuple(got.shape)}, expected {types} {need.shape} for {how}"
            )
    return leaf
