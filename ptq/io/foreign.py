"""Checkpoints of other quantizers, told in the words of compressed-tensors: names of tensors, and the config.

    method    tensors                                              become
    fp8       weight float8, weight_scale_inv or weight_scale      weight, weight_scale: float-quantized
    mxfp4     <stack>_blocks [e, out, in / 32, 16], <stack>_scales weight_packed, weight_scale: mxfp4-pack-quantized
    modelopt  weight uint8, weight_scale float8, weight_scale_2    weight_packed, weight_scale and, upside down,
                                                                   weight_global_scale: nvfp4-pack-quantized
              weight float8, weight_scale                          float-quantized

A stack of experts is a parameter of its own name, `<experts>.gate_up_proj`; here it is that module's weight until its
leaf is made. Nothing is read, and no value is changed, but for NVFP4's global scales, which this side divides by.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.io.files import read_json
from ptq.io.safetensors import OnDisk, positive
from ptq.numerics.lazy import Lazy, load
from ptq.numerics.leaves import Leaf, Transposed, compressed, nbytes

MODELOPT_CONFIG = "hf_quant_config.json"
_ALGORITHMS = ("NVFP4", "FP8", "MIXED_PRECISION")
_FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_LOCAL = {**_NVFP4, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}


class Source(NamedTuple):
    """A checkpoint in the words of compressed-tensors."""

    entries: Mapping[str, OnDisk]
    quantization: Any
    """its `quantization_config`, None where it is dense"""
    stacks: Mapping[str, bool] = {}
    """parameters that are no module's `weight` -> whether the model has them as (in, out)"""

    def restored(self, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
        """The leaves with stacks under their own names, in their own orientation."""
        found = dict(leaves)
        for name, turned in self.stacks.items():
            leaf = found.pop(f"{name}.weight", None)
            if leaf is not None:  # else it was refused
                found[name] = Turned(leaf) if turned else leaf
        return found


class Turned(Lazy):
    """A leaf of a file whose parameter is stored as (in, out)."""

    def __init__(self, leaf: Lazy) -> None:
        self.leaf, self.dtype = leaf, leaf.dtype
        *e, rows, columns = leaf.shape
        self.shape = torch.Size((*e, columns, rows))

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
    """One over a tensor of a file."""

    def load(self) -> Tensor:
        return positive(self, super().load().float()).reciprocal()


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
    method = _METHODS.get(_method(quantization))
    if method is None:
        return Source(entries, quantization)
    try:
        weights = list(method(entries, quantization, where))
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
    turned: bool = False

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


def _fp8(entries: Mapping[str, OnDisk], table: Mapping[str, Any], where: Path) -> Iterator[_Weight]:
    """Fine-grained float8, of DeepSeek and others."""
    scheme, block = table.get("activation_scheme"), table.get("weight_block_size")
    if scheme not in (None, "dynamic", "static"):
        raise BadInput(f"{where}: activation_scheme {scheme!r} is not read; expected dynamic or static")
    grouped = {"strategy": "group", "group_size": block[1]} if block else {"strategy": "token"}
    inputs = {"dynamic": {**_FP8, **grouped, "dynamic": True}, "static": _FP8}.get(str(scheme))
    for name, weight in entries.items():
        if weight.dtype != torch.float8_e4m3fn:
            continue
        module, scale = name.removesuffix(".weight"), _first(entries, f"{name}_scale_inv", f"{name}_scale")
        if scale is None:
            raise BadInput(f"{weight.file}: no tensor {name}_scale_inv, which float8 needs; download or copy it again")
        known = _first(entries, f"{module}.input_scale", f"{module}.activation_scale", f"{module}_activation_scale")
        parts = {"weight": weight, "weight_scale": scale, **({"input_scale": known} if known else {})}
        args = _fp8_args(weight, scale, block)
        yield _Weight(name, parts, "float-quantized", args, _FP8 if known else inputs)


def _fp8_args(weight: OnDisk, scale: OnDisk, block: Any = None) -> dict[str, Any]:
    """By the config where there is more than one number; stacks may have one for each half of their rows."""
    if scale.shape.numel() == 1 and len(scale.shape) < 2:
        return _FP8
    (rows, columns), (a, b) = weight.shape[-2:], (*scale.shape, 1, 1)[len(weight.shape) - 2 :][:2]
    if block or (a, b) not in ((1, 1), (rows, 1)):
        block = block or [-(-rows // max(a, 1)), -(-columns // max(b, 1))]
        return {**_FP8, "strategy": "block", "block_structure": list(block)}
    return _FP8 if (a, b) == (1, 1) else {**_FP8, "strategy": "channel"}


def _mxfp4(entries: Mapping[str, OnDisk], table: Mapping[str, Any], where: Path) -> Iterator[_Weight]:
    """The stacks of gpt-oss: written by rows of outputs, while the model multiplies by `[e, in, out]`."""
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
        yield _Weight(
            stack, {"weight_packed": packed, "weight_scale": scales}, "mxfp4-pack-quantized", _MXFP4, None, True
        )


def _modelopt(entries: Mapping[str, OnDisk], table: Mapping[str, Any], where: Path) -> Iterator[_Weight]:
    """NVIDIA's ModelOpt: each weight is told by its own tensors, so lists of what is left out are not needed."""
    algorithm = table.get("quant_algo")
    if algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:  # None where only the cache is quantized
        raise BadInput(f"{where}: quant_algo {algorithm!r} is not read; expected {', '.join(_ALGORITHMS)}")
    for name, weight in entries.items():
        if not name.endswith(".weight") or weight.dtype not in (torch.uint8, torch.float8_e4m3fn):
            continue
        packed, module = weight.dtype == torch.uint8, name.removesuffix(".weight")
        for need in (f"{name}_scale", f"{name}_scale_2") if packed else (f"{name}_scale",):
            if need not in entries:
                raise BadInput(
                    f"{weight.file}: no tensor {need}, which {weight.dtype} needs; download or copy it again"
                )
        scale, own = entries[f"{name}_scale"], entries.get(f"{module}.input_scale")
        if packed:
            divisor = {"weight_global_scale": _reciprocal(entries[f"{name}_scale_2"])}
            own = {"input_global_scale": _reciprocal(own)} if own else {}
            parts = {"weight_packed": weight, "weight_scale": scale, **divisor, **own}
            yield _Weight(name, parts, "nvfp4-pack-quantized", _NVFP4, _LOCAL if own else None)
        else:
            parts = {"weight": weight, "weight_scale": scale, **({"input_scale": own} if own else {})}
            yield _Weight(name, parts, "float-quantized", _fp8_args(weight, scale), _FP8 if own else None)


def _first(entries: Mapping[str, OnDisk], *names: str) -> OnDisk | None:
    return next((entries[name] for name in names if name in entries), None)


def _reciprocal(entry: OnDisk) -> Reciprocal:
    return Reciprocal(*(getattr(entry, field.name) for field in fields(entry)))


_METHODS: Mapping[str, Callable[[Mapping[str, OnDisk], Mapping[str, Any], Path], Iterator[_Weight]]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}
