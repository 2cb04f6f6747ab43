"""Weights in the compressed-tensors formats: a leaf against the named tensors that stand for it in a file.

    format           weight                            scale         zero point
    int-quantized    weight int8 [out, in]             weight_scale  weight_zero_point, like the scale
    float-quantized  weight float8 [out, in]           weight_scale  none
    pack-quantized   weight_packed int32 [out, words]  weight_scale  weight_zero_point int32 [words, groups]
                     weight_shape int64 [out, in]

Scales are `[1]` for one of a tensor, `[out, 1]` for channels, `[out, groups]`, or a matrix of blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptq.errors import BadInput, Notice
from ptq.io.quantization_config import Args, Config, parse
from ptq.io.safetensors import OnDisk
from ptq.numerics.grids import Float8, Int
from ptq.numerics.lazy import Lazy
from ptq.numerics.leaves import Leaf, Quantized, compressed, nbytes, spread, validate
from ptq.numerics.packing import pack, pack_down, unpack, unpack_down

FORMATS = ("dense", "pack-quantized", "int-quantized", "float-quantized")
_WEIGHT = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
_CACHE = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point")


@dataclass(frozen=True)
class Stored(Lazy):
    """A compressed weight in a file: `load` gives it as `Quantized`."""

    parts: Mapping[str, OnDisk]
    """local name, such as weight_scale -> tensor"""
    args: Args
    straddle: bool
    """whether packed codes may cross words"""
    dtype: torch.dtype
    shape: torch.Size

    def load(self) -> Quantized:
        grid = Int(self.args.bits) if self.args.kind == "int" else Float8()
        packed = "weight_packed" in self.parts
        raw = self.parts["weight_packed" if packed else "weight"].load()
        codes = unpack(raw, self.args.bits, self.shape[-1], self.straddle) if packed else raw
        leaf = Quantized(codes, self._tiled("weight_scale"), self._zeros(packed), grid, self.dtype)
        scale = self.parts["weight_scale"]
        return validate(leaf, f"{scale.file}: {scale.name}")

    def _zeros(self, packed: bool) -> Tensor | None:
        if self.args.symmetric or "weight_zero_point" not in self.parts:
            return None
        if not packed or self.args.strategy == "tensor":
            return self._tiled("weight_zero_point")
        zeros = self.parts["weight_zero_point"].load()
        return unpack_down(zeros, self.args.bits, self.shape[-2], self.straddle)

    def _tiled(self, part: str) -> Tensor:
        """A scale as `[*e, a, b]`, so that tiles of equal size cover the weight."""
        t = self.parts[part].load()
        t = t.view(*t.shape, *[1] * (len(self.shape) - t.ndim))
        if self.args.block is None:
            return t
        # A leaf's tiles are ceil(out / a) high; blocks may be higher, the last one being cut. Then rows stand alone.
        for dim, size in zip((-2, -1), self.args.block, strict=True):
            if -(-self.shape[dim] // t.shape[dim]) != size:
                t = t.repeat_interleave(size, dim).narrow(dim, 0, self.shape[dim])
        return t


@compressed.register
def _(leaf: Stored) -> bool:
    return True


@nbytes.register
def _(leaf: Stored) -> int:
    return sum(nbytes(part) for part in leaf.parts.values())


def collected(
    entries: Mapping[str, OnDisk],
    quantization: Any,
    classes: Callable[[str], Sequence[str]],
    dtype: torch.dtype,
    where: Path,
) -> dict[str, Leaf]:
    """The tensors of a compressed checkpoint with the parts of each weight made one leaf, `<module>.weight`.

    Args:
        entries: what the files hold.
        quantization: the config's `quantization_config`.
        classes: name of a weight -> class names of its module.
        dtype: what weights decode to.
        where: the directory, for errors.

    Raises:
        BadInput: a part is missing or of a wrong shape; a scheme is not read.
    """
    config = parse(quantization, where)
    if config.beyond:
        what = f"its config also quantizes {config.beyond}; only weights are read"
        warnings.warn(f"{where}: {what}", Notice, stacklevel=2)
    modules: dict[str, dict[str, OnDisk]] = {}
    for name, entry in entries.items():
        module, _, part = name.rpartition(".")
        if part in _WEIGHT:
            modules.setdefault(module, {})[part] = entry
    extra = _ACTIVATIONS + _CACHE if config.beyond else ()
    leaves: dict[str, Leaf] = {n: e for n, e in entries.items() if n.rpartition(".")[2] not in (*_WEIGHT, *extra)}
    for module, parts in modules.items():
        name = f"{module}.weight" if module else "weight"
        leaves[name] = _stored(name, parts, config, classes, dtype, where)
    return leaves


def encoded(leaf: Quantized, form: str, name: str) -> tuple[Args, dict[str, Tensor]]:
    """The tensors that stand for a weight in a format, by local name, and the scheme that says how to read them.

    Raises:
        BadInput: the format cannot hold the leaf.
    """
    args = arguments(leaf, form)
    if args is None:
        grid = f"{leaf.grid} with scales {tuple(leaf.scale.shape)} for {tuple(leaf.shape)}"
        raise BadInput(f"{name}: {grid} cannot be stored as {form}; choose another format, or dense")
    tiles = {"weight_scale": leaf.scale} | ({} if leaf.zero is None else {"weight_zero_point": leaf.zero})
    if args.strategy == "tensor":
        return args, {"weight": leaf.codes, **{part: t.reshape(-1) for part, t in tiles.items()}}
    if form != "pack-quantized":
        return args, {"weight": leaf.codes, **tiles}
    if args.strategy == "channel":
        # One scale for the tensor is repeated: no serving engine reads packed weights with a single scale.
        tiles = {part: t.expand(*t.shape[:-2], leaf.shape[-2], 1) for part, t in tiles.items()}
    if leaf.zero is not None:
        tiles["weight_zero_point"] = pack_down(tiles["weight_zero_point"], args.bits)
    return args, {"weight_packed": pack(leaf.codes, args.bits), "weight_shape": torch.tensor(leaf.shape), **tiles}


def arguments(leaf: Quantized, form: str) -> Args | None:
    """The scheme of a leaf in a format, or None where the format cannot hold it."""
    kind = "float" if isinstance(leaf.grid, Float8) else "int"
    if (kind == "float") != (form == "float-quantized"):
        return None
    (out, inputs), (a, b) = leaf.shape[-2:], leaf.scale.shape[-2:]
    args = Args(form, leaf.grid.bits, kind, leaf.zero is None, "tensor")
    if (a, b) == (out, 1) or ((a, b) == (1, 1) and form == "pack-quantized"):
        return args._replace(strategy="channel")
    if (a, b) == (1, 1):
        return args
    if a == out and inputs % b == 0:
        return args._replace(strategy="group", group_size=inputs // b)
    block = -(-out // a), -(-inputs // b)
    whole = (-(-out // block[0]), -(-inputs // block[1])) == (a, b)
    return args._replace(strategy="block", block=block) if form == "float-quantized" and whole else None


def default_format(leaf: Quantized) -> str:
    """The format that serving engines have kernels for."""
    return "float-quantized" if isinstance(leaf.grid, Float8) else "pack-quantized"


def zeroed(leaf: Quantized, mask: Tensor) -> Quantized:
    """The same leaf with the code that stands for 0 wherever the mask is False.

    >>> q = Quantized(torch.tensor([[3, -8]], dtype=torch.int8), torch.ones(1, 1), None, Int(4), torch.float32)
    >>> zeroed(q, torch.tensor([[False, True]])).codes
    tensor([[ 0, -8]], dtype=torch.int8)
    """
    nothing = torch.zeros_like(leaf.codes) if leaf.zero is None else spread(leaf.zero, leaf.shape)
    return replace(leaf, codes=torch.where(mask, leaf.codes, nothing))


def _stored(
    name: str,
    parts: dict[str, OnDisk],
    config: Config,
    classes: Callable[[str], Sequence[str]],
    dtype: torch.dtype,
    where: Path,
) -> Leaf:
    raw = parts.get("weight_packed") or parts.get("weight")
    if raw is None:
        raise BadInput(f"{where}: {name}: there is {', '.join(sorted(parts))} but no weight; download or copy it again")
    if "weight_packed" not in parts and (not config.packed or "weight_scale" not in parts):
        return raw
    args = config.args(name.rpartition(".")[0], classes(name))
    if args is None:
        raise BadInput(f"{where}: {name} is compressed, but no config group says how")
    if "weight_scale" not in parts:
        raise BadInput(f"{where}: no tensor {name}_scale; download or copy it again")
    if "weight_g_idx" in parts:
        raise BadInput(f"{where}: {name}: column order (weight_g_idx) is not read; quantize again without it")
    if not args.symmetric and "weight_zero_point" not in parts:
        raise BadInput(f"{where}: no tensor {name}_zero_point, but its config says it is asymmetric")
    if "weight_packed" not in parts:
        return _checked(Stored(parts, args, True, dtype, raw.shape), raw)
    return _checked(_unpacked(name, parts, raw, args, config, dtype, where), raw)


def _unpacked(
    name: str, parts: dict[str, OnDisk], raw: OnDisk, args: Args, config: Config, dtype: torch.dtype, where: Path
) -> Stored:
    """A packed weight: its shape is a tensor of its own, and its layout is told by the number of words."""
    if raw.dtype != torch.int32 or "weight_shape" not in parts:
        raise BadInput(f"{where}: {name}: format {args.format} with packed {raw.dtype} is not read")
    shape = _shape(parts["weight_shape"], raw)
    dense_words, whole_words = -(-shape[-1] * args.bits // 32), -(-shape[-1] // (32 // args.bits))
    if raw.shape[:-1] != shape[:-1] or raw.shape[-1] not in (dense_words, whole_words):
        raise BadInput(
            f"{where}: {name}: {tuple(raw.shape)} words do not hold {tuple(shape)} codes of {args.bits} bits"
        )
    ambiguous = dense_words == whole_words
    straddle = config.version >= (0, 18) if ambiguous and 8 % args.bits else raw.shape[-1] == dense_words
    return Stored(parts, args, straddle, dtype, shape)


def _shape(tensor: OnDisk, packed: OnDisk) -> torch.Size:
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.shape.numel() != len(packed.shape):
        got = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise BadInput(f"{tensor.file}: {tensor.name}: got {got}, expected int64 ({len(packed.shape)},)")
    sizes = tensor.load().flatten().tolist()
    if min(sizes, default=0) < 1:
        raise BadInput(f"{tensor.file}: {tensor.name}: got {sizes}, expected sizes above 0")
    return torch.Size(sizes)


def _checked(leaf: Stored, raw: OnDisk) -> Stored:
    """The leaf, if its tensors have the shapes and types that its scheme says, by their headers."""
    args, packed = leaf.args, "weight_packed" in leaf.parts
    codes = torch.int8 if args.kind == "int" else torch.float8_e4m3fn
    if len(leaf.shape) < 2 or (not packed and raw.dtype != codes):
        got = f"{raw.dtype} {tuple(raw.shape)}"
        raise BadInput(f"{raw.file}: {raw.name}: got {got}, expected a matrix of {codes}; its config says {args.kind}")
    scale, zero = leaf.parts["weight_scale"], leaf.parts.get("weight_zero_point")
    tiles = _tiles(args, leaf.shape, raw)
    _expect(scale, tiles, args, scale.dtype.is_floating_point and scale.dtype.itemsize > 1, "floating")
    if zero is None or args.symmetric:
        return leaf
    if not packed or args.strategy == "tensor":
        _expect(zero, tiles, args, zero.dtype == codes, str(codes))
    else:
        *e, rows, columns = tiles
        words = -(-rows * args.bits // 32) if leaf.straddle else -(-rows // (32 // args.bits))
        _expect(zero, (*e, words, columns), args, zero.dtype == torch.int32, "torch.int32")
    return leaf


def _tiles(args: Args, shape: torch.Size, raw: OnDisk) -> tuple[int, ...]:
    *e, rows, columns = shape
    if args.block is not None:
        return (*e, -(-rows // args.block[0]), -(-columns // args.block[1]))
    if args.group_size is not None and args.strategy == "group":
        if columns % args.group_size and columns > args.group_size:
            raise BadInput(f"{raw.file}: {raw.name}: groups of {args.group_size} do not divide {columns} columns")
        return (*e, rows, -(-columns // args.group_size))
    return (*e, 1, 1) if args.strategy == "tensor" else (*e, rows, 1)


def _expect(tensor: OnDisk, tiles: tuple[int, ...], args: Args, right_type: bool, expected: str) -> None:
    got = (*tensor.shape, *[1] * (len(tiles) - len(tensor.shape)))
    if right_type and (got == tiles or (args.strategy == "tensor" and tensor.shape.numel() == 1)):
        return
    size = args.group_size or args.block or ""
    raise BadInput(
        f"{tensor.file}: {tensor.name}: got {tensor.dtype} {tuple(tensor.shape)}, expected {expected} {tiles} for "
        f"strategy {args.strategy} {size}".rstrip()
    )
