"""Checkpoints of other quantizers, told in the words of compressed-tensors: names of tensors, and the config.

    method    tensors                                              become
    fp8       weight float8, weight_scale_inv or weight_scale      weight, weight_scale: float-quantized
    mxfp4     <stack>_blocks [e, out, in / 32, 16], <stack>_scales weight_packed, weight_scale: mxfp4-pack-quantized
    modelopt  weight uint8, weight_scale float8, weight_scale_2    weight_packed, weight_scale and, upside down,
                                                                   weight_global_scale: nvfp4-pack-quantized
              weight float8, weight_scale                          float-quantized
              <stack> [e, out, in / 2] or [e, in / 2, out],        as those of a weight
              <stack>_weight_scale, <stack>_weight_scale_2

A stack of experts is a parameter of its own name, `<experts>.gate_up_proj`; here it is that module's weight until its
leaf is made. Nothing is read, and no value is changed, but for NVFP4's global scales, which this side divides by.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.io.files import read_json
from ptq.io.inference import SQUARES, by_shape
from ptq.io.quantization_config import Args
from ptq.io.safetensors import OnDisk, positive
from ptq.numerics.lazy import Around, load
from ptq.numerics.leaves import Leaf, Transposed, compressed, nbytes
from ptq.numerics.tiles import fits

MODELOPT_CONFIG = "hf_quant_config.json"
_ALGORITHMS = ("NVFP4", "FP8", "MIXED_PRECISION")
_FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
_ARGS = Args("float-quantized", 8, "float", True, "tensor")
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_LOCAL = {**_NVFP4, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}


class Source(NamedTuple):
    """A checkpoint in the words of compressed-tensors."""

    entries: Mapping[str, OnDisk]
    quantization: Any
    """its `quantization_config`, None where it is dense"""
    stacks: Mapping[str, bool | None] = {}
    """parameters that are no module's `weight` -> whether the model has them as (in, out); None: it tells"""

    def restored(self, leaves: Mapping[str, Leaf], turned: Callable[[str], bool]) -> dict[str, Leaf]:
        """The leaves with stacks under their own names, in their own orientation.

        Args:
            leaves: by their names in the file.
            turned: whether the model has a stack as (in, out).
        """
        found = dict(leaves)
        for name, told in self.stacks.items():
            leaf = found.pop(f"{name}.weight", None)
            if leaf is not None:  # else it was refused
                found[name] = Turned(leaf) if (turned(name) if told is None else told) else leaf
        return found


class Turned(Around):
    """A leaf of a file whose parameter is stored as (in, out)."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # read only
        return _swapped(self.leaf.shape)

    def load(self) -> Transposed:
        return Transposed(load(self.leaf))


@compressed.register
def _(leaf: Turned) -> bool:
    return True


@nbytes.register
def _(leaf: Turned) -> int:
    return nbytes(leaf.leaf)


@dataclass(frozen=True)
class Reciprocal(OnDisk):
    """One over a tensor of a file, or over its only number for each expert of a stack."""

    stored: torch.Size

    def load(self) -> Tensor:
        return positive(self, _stored(self, self.stored).load().float()).reciprocal().expand(self.shape).contiguous()


@dataclass(frozen=True)
class Swapped(OnDisk):
    """A tensor of a file with its last two dimensions the other way round."""

    def load(self) -> Tensor:
        return _stored(self, _swapped(self.shape)).load().mT.contiguous()


def _stored(entry: OnDisk, shape: torch.Size) -> OnDisk:
    return OnDisk(entry.file, entry.name, entry.dtype, shape, entry.offset)


def _swapped(shape: torch.Size) -> torch.Size:
    *e, rows, columns = shape
    return torch.Size((*e, columns, rows))


def quantization_of(given: Sequence[Any], where: Path) -> Any:
    """What a checkpoint says of its quantization: in `config.json`, or in the file that ModelOpt writes beside it."""
    table = next(filter(None, given), None)
    if (where / MODELOPT_CONFIG).is_file() and (table is None or _method(table).startswith("modelopt")):
        own = read_json(where / MODELOPT_CONFIG).get("quantization")
        if not isinstance(own, dict):
            raise BadInput(f"{where / MODELOPT_CONFIG}: no quantization; download or copy it again")
        return {**own, **(table or {}), "quant_method": "modelopt"}
    return table


def translated(entries: Mapping[str, OnDisk], quantization: Any, where: Path) -> Source:
    """The checkpoint as if compressed-tensors had written it; one that it has written stays as it is.

    Raises:
        BadInput: a part of a weight is missing, or of a shape or a kind that its method does not have.
    """
    method = _METHODS.get(_told(entries) if quantization is None else _method(quantization))
    if method is None:
        return Source(entries, quantization)
    try:
        weights = list(method(entries, quantization or {}, where))
    except (IndexError, KeyError, TypeError) as error:
        raise BadInput(f"{where}: quantization_config is malformed ({error}); download or copy it again") from None
    used = {part.name for weight in weights for part in weight.parts.values()}
    kept = {name: entry for name, entry in entries.items() if name not in used}
    made = {f"{weight.module}.{part}": entry for weight in weights for part, entry in weight.parts.items()}
    stacks = {weight.name: weight.turned for weight in weights if weight.name == weight.module}
    return Source(kept | made, _config(weights, kept), stacks)


def _config(weights: Sequence[_Weight], others: Iterable[str]) -> dict[str, Any]:
    """The config of compressed-tensors for weights, each named; scales of a cache speak for themselves."""
    groups: dict[str, dict[str, Any]] = {}
    for weight in weights:
        group = {"weights": weight.args, "input_activations": weight.inputs, "format": weight.form}
        groups.setdefault(json.dumps(group), {**group, "targets": []})["targets"].append(weight.module)
    cached = any(name.endswith((".k_scale", ".v_scale", ".kv_scale")) for name in others)
    numbered = {f"group_{i}": group for i, group in enumerate(groups.values())}
    return {"config_groups": numbered, "kv_cache_scheme": _FP8 if cached else None}


def _told(entries: Mapping[str, OnDisk]) -> str:
    """The method that tensors tell, where a config is silent; empty: none of another quantizer."""
    for name in entries:
        for mark, codes, dtype, method in _MARKS:
            owner = entries.get(f"{name.removesuffix(mark)}{codes}") if name.endswith(mark) else None
            if owner is not None and owner.dtype == dtype:
                return method
    return ""


def _method(quantization: Any) -> str:
    return str(quantization.get("quant_method")) if isinstance(quantization, dict) else ""


class _Weight(NamedTuple):
    """A compressed weight of another method."""

    name: str
    parts: Mapping[str, OnDisk]
    """its tensors by their local names on this side, those of its input too"""
    form: str
    args: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None
    turned: bool | None = False
    """whether it is (out, in) here and (in, out) in the model; None: the model tells"""

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


def _fp8(entries: Mapping[str, OnDisk], table: Mapping[str, Any], where: Path) -> Iterator[_Weight]:
    """Fine-grained float8, of DeepSeek and others."""
    scheme, found = table.get("activation_scheme"), dict(_float8(entries))
    if scheme not in (None, "dynamic", "static"):
        raise BadInput(f"{where}: activation_scheme {scheme!r} is not read; expected dynamic or static")
    silent = "weight_block_size" not in table  # null says that there are no blocks
    block = _common_block(found.values()) if silent else table["weight_block_size"]
    grouped = {"strategy": "group", "group_size": block[1]} if block else {"strategy": "token"}
    inputs = {"dynamic": {**_FP8, **grouped, "dynamic": True}, "static": _FP8}.get(str(scheme))
    for name, (weight, scale) in found.items():
        module = name.removesuffix(".weight")
        known = _first(entries, f"{module}.input_scale", f"{module}.activation_scale", f"{module}_activation_scale")
        parts = {"weight": weight, "weight_scale": scale, **({"input_scale": known} if known else {})}
        args = _fp8_args(weight, scale, block, SQUARES if silent else ())
        yield _Weight(name, parts, "float-quantized", args, _FP8 if known else inputs)


def _float8(entries: Mapping[str, OnDisk]) -> Iterator[tuple[str, tuple[OnDisk, OnDisk]]]:
    """Weights with their scales."""
    for name, weight in entries.items():
        if weight.dtype == torch.float8_e4m3fn:
            scale = _first(entries, f"{name}_scale_inv", f"{name}_scale")
            if scale is None:
                need = f"no tensor {name}_scale_inv, which float8 needs; download or copy it again"
                raise BadInput(f"{weight.file}: {need}")
            yield name, (weight, scale)


def _common_block(weights: Iterable[tuple[OnDisk, OnDisk]]) -> tuple[int, int] | None:
    """The only sides that all scales agree with: narrow weights, which have one, are in blocks where others are."""
    shapes = [(w.shape[-2:], scale.shape[-2:]) for w, scale in weights if len(scale.shape) > 1]
    sides = [side for side in SQUARES if all(fits(tiles, shape, (side, side)) for shape, tiles in shapes)]
    return (sides[0], sides[0]) if len(sides) == 1 else None


def _fp8_args(weight: OnDisk, scale: OnDisk, block: Any = None, sides: Sequence[int] = SQUARES) -> dict[str, Any]:
    """By the config where that says rows and columns and there is more than one number, else by what shapes tell."""
    if block and (scale.shape.numel() > 1 or len(scale.shape) > 1):
        return {**_FP8, "strategy": "block", "block_structure": list(block)}
    told = by_shape(_ARGS, weight.shape, scale.shape, sides)
    if told is None:
        got = f"got {tuple(scale.shape)} for {tuple(weight.shape)}, from which no sides of blocks can be told"
        raise BadInput(f"{scale.file}: {scale.name}: {got}; set weight_block_size in config.json")
    size = {"block_structure": list(told.block)} if told.block else {}
    return {**_FP8, "strategy": told.strategy, "group_size": told.group_size, **size}


def _mxfp4(entries: Mapping[str, OnDisk], table: Mapping[str, Any], where: Path) -> Iterator[_Weight]:
    """The stacks of gpt-oss: written by rows of outputs, even where the model multiplies by `[e, in, out]`."""
    for name, blocks in entries.items():
        stack = name.removesuffix("_blocks")
        if stack == name:
            continue
        if blocks.dtype != torch.uint8 or len(blocks.shape) != 4 or blocks.shape[-1] != 16:
            got = f"{blocks.dtype} {tuple(blocks.shape)}"
            raise BadInput(f"{blocks.file}: {name}: got {got}, expected torch.uint8 (experts, out, in / 32, 16)")
        scales = entries.get(f"{stack}_scales")
        if scales is None:
            raise BadInput(f"{blocks.file}: no tensor {stack}_scales; download or copy it again")
        packed = replace(blocks, shape=torch.Size((*blocks.shape[:2], blocks.shape[2] * 16)))
        parts = {"weight_packed": packed, "weight_scale": scales}
        yield _Weight(stack, parts, "mxfp4-pack-quantized", _MXFP4, turned=None)


def _modelopt(entries: Mapping[str, OnDisk], table: Mapping[str, Any], where: Path) -> Iterator[_Weight]:
    """NVIDIA's ModelOpt: each weight is told by its own tensors, so lists of what is left out are not needed."""
    algorithm = table.get("quant_algo")
    if algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:  # None where only the cache is quantized
        raise BadInput(f"{where}: quant_algo {algorithm!r} is not read; expected {', '.join(_ALGORITHMS)}")
    for name, weight in entries.items():
        stack = len(weight.shape) == 3 and not name.endswith((".weight", "_weight_scale"))
        if not (stack or name.endswith(".weight")) or weight.dtype not in (torch.uint8, torch.float8_e4m3fn):
            continue
        packed, beside = weight.dtype == torch.uint8, f"{name}_" if stack else name.removesuffix("weight")
        for part in ("weight_scale", "weight_scale_2") if packed else ("weight_scale",):
            if f"{beside}{part}" not in entries:
                what = f"no tensor {beside}{part}, which {weight.dtype} needs"
                raise BadInput(f"{weight.file}: {what}; download or copy it again")
        scale, own = entries[f"{beside}weight_scale"], entries.get(f"{beside}input_scale")
        if packed:
            turned = stack and scale.shape[-1:] == weight.shape[-1:]  # pairs and groups run down the columns
            codes, scale = (_turned(weight), _turned(scale)) if turned else (weight, scale)
            divisor = _reciprocal(entries[f"{beside}weight_scale_2"], weight.shape[:-2])
            own = {"input_global_scale": _reciprocal(own)} if own else {}
            parts = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": divisor, **own}
            inputs, layout = _LOCAL if own else None, (turned or None) if stack else False
            yield _Weight(name, parts, "nvfp4-pack-quantized", _NVFP4, inputs, layout)
        else:
            parts = {"weight": weight, "weight_scale": scale, **({"input_scale": own} if own else {})}
            yield _Weight(name, parts, "float-quantized", _fp8_args(weight, scale), _FP8 if own else None)


def _first(entries: Mapping[str, OnDisk], *names: str) -> OnDisk | None:
    return next((entries[name] for name in names if name in entries), None)


def _turned(entry: OnDisk) -> Swapped:
    return Swapped(entry.file, entry.name, entry.dtype, _swapped(entry.shape), entry.offset)


def _reciprocal(entry: OnDisk, e: Sequence[int] = ()) -> Reciprocal:
    shape = torch.Size(e) if e and entry.shape.numel() == 1 else entry.shape
    return Reciprocal(entry.file, entry.name, entry.dtype, shape, entry.offset, entry.shape)


_METHODS: Mapping[str, Callable[[Mapping[str, OnDisk], Mapping[str, Any], Path], Iterator[_Weight]]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}
_MARKS = (
    ("_scale_inv", "", torch.float8_e4m3fn, "fp8"),
    ("weight_scale_2", "weight", torch.uint8, "modelopt"),
    ("_weight_scale_2", "", torch.uint8, "modelopt"),
    ("_scales", "_blocks", torch.uint8, "mxfp4"),
)
"""how the name of a scale ends, and instead of that its codes', their type -> the method"""
