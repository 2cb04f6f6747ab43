"""What a checkpoint holds against what its config says: a table of modules, made of headers alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ptq.io.activations import ACTIVATIONS, CACHE
from ptq.io.bitmask import Masked
from ptq.io.compressed_tensors import WEIGHT
from ptq.io.inference import inferred
from ptq.io.layouts import LAYOUTS
from ptq.io.quantization_config import KEYS, QUANTIZED, Args, Config, Quantizers, parse
from ptq.io.safetensors import OnDisk
from ptq.models.naming import assigned, names_in_files, read
from ptq.models.skeleton import aliases
from ptq.numerics.leaves import Leaf, dense

VLLM, TRANSFORMERS, EVERY = "vLLM", "transformers", "every reader"
Entry = OnDisk | Masked
BOTH = f"{VLLM} and {TRANSFORMERS}"
ERROR, NOTE = "error", "note"


class Finding(NamedTuple):
    """Something that a loader fails at or computes wrong numbers of, or ought to be known."""

    about: str
    """a tensor, a module, or a key of the config"""
    rule: str
    got: str
    expected: str
    loaders: str
    """whom it concerns"""
    severity: str = ERROR

    def __str__(self) -> str:
        return f"{self.severity}: {self.about}: {self.rule}: got {self.got}, expected {self.expected} ({self.loaders})"


class Module(NamedTuple):
    """A module with a matrix that may be compressed."""

    name: str
    classes: Sequence[str]
    parts: Mapping[str, Entry]
    """local name -> tensor"""
    shape: torch.Size
    """of the weight"""
    args: Args | None
    """the scheme that the config gives"""
    inputs: Args | None = None
    """how what it reads is rounded"""
    outputs: Args | None = None

    @property
    def compressed(self) -> bool:
        """Whether codes are there."""
        raw = self.parts.get("weight")
        return "weight_packed" in self.parts or (raw is not None and raw.dtype.itemsize == 1)

    def tensor(self, part: str) -> str:
        """The full name of a part."""
        return f"{self.name}.{part}" if self.name else part


@dataclass(frozen=True)
class Survey:
    """A checkpoint, by its headers and its config."""

    table: Mapping[str, Any]
    """quantization_config; empty where there is none"""
    config: Config | None
    entries: Mapping[str, Entry]
    modules: Mapping[str, Module]
    missing: Sequence[str]
    """tensors that the model needs and that nothing in the files is made of"""
    unused: Sequence[str]
    head: str
    """the module that gives logits"""
    tied: bool
    """whether the config says that it shares the embedding's weight"""
    key_value_heads: int | None
    buffers: Collection[str] = ()
    """tensors that may hold infinities, as masks do"""


def surveyed(where: Path, raw: Mapping[str, Any], entries: Mapping[str, Entry], skeleton: nn.Module) -> Survey:
    """Brings together a checkpoint's config, its headers and the structure of its model.

    Raises:
        BadInput: the config's schemes are not understood.
    """
    table = unwrapped(next(filter(None, map(raw.get, KEYS)), None) or {})
    config = parse(table, where) if table else None
    parts = _parts(entries, quantized=bool(table))
    names = assigned(skeleton, [f"{module}.weight" for module in parts])
    modules = {
        name: _module(name, found, config, _classes(skeleton, names.get(f"{name}.weight")))
        for name, found in parts.items()
    }
    missing, unused = _unmatched(skeleton, _leaves(entries, modules))
    dense = {n for n, m in modules.items() if m.tensor("weight") in unused and not m.compressed}
    # Schemes are for what the model has.
    modules |= {name: Module(name, (), modules[name].parts, modules[name].shape, None) for name in dense}
    text: Any = raw.get("text_config") or {}
    heads = text.get("num_key_value_heads", raw.get("num_key_value_heads"))
    tied = bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    buffers = {name for name, _ in skeleton.named_buffers()}
    path = head_of(skeleton)
    head = next((file for file, name in names.items() if name == f"{path}.weight"), f"{path}.weight")
    head = head.removesuffix(".weight")
    return Survey(table, config, entries, modules, missing, unused, head, tied, heads, buffers)


def unwrapped(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the second wrapping of old files."""
    return table.get("quantization_config") or table


def _parts(entries: Mapping[str, Entry], quantized: bool) -> dict[str, dict[str, Entry]]:
    """Modules with a weight of their own, and what belongs to it."""
    known = (*WEIGHT, *ACTIVATIONS) if quantized else ("weight",)
    found: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        module, _, part = name.rpartition(".")
        if part in known:
            found.setdefault(module, {})[part] = entry
    return found


def _classes(skeleton: nn.Module, weight: str | None) -> list[str]:
    """A module's class and those that it inherits from; a piece of a stack of experts is a linear."""
    if weight is None:
        return ["Linear", "Module"]
    try:
        return [c.__name__ for c in type(skeleton.get_submodule(weight.rpartition(".")[0])).__mro__]
    except AttributeError:  # a tensor that no module has
        return []


def _module(name: str, parts: Mapping[str, Entry], config: Config | None, classes: Sequence[str]) -> Module:
    has = config is not None and not QUANTIZED.isdisjoint(classes)
    weights, *activations = config.quantizers(name, classes) if config and has else Quantizers(None)
    args = _scheme(weights, parts)
    return Module(name, classes, parts, _shape(parts, args), args, *activations)


def _scheme(args: Args | None, parts: Mapping[str, Entry]) -> Args | None:
    """What the config gives, in the format that the tensors are in where it names none: that is told by itself."""
    if args is None or args.format in LAYOUTS:
        return args
    told = inferred({part: entry for part, entry in parts.items() if part != "weight_shape"})
    form = told.format if told else "pack-quantized" if "weight_packed" in parts else None
    return args._replace(format=form) if form else None


def _shape(parts: Mapping[str, Entry], args: Args | None) -> torch.Size:
    told, raw = parts.get("weight_shape"), parts.get("weight_packed") or parts.get("weight")
    if raw is None:
        return torch.Size()
    if told is not None and told.shape.numel() == len(raw.shape):
        return torch.Size(dense(told).flatten().tolist())
    if "weight_packed" not in parts or args is None:
        return raw.shape
    return torch.Size((*raw.shape[:-1], raw.shape[-1] * raw.dtype.itemsize * 8 // args.bits))


def _leaves(entries: Mapping[str, Entry], modules: Mapping[str, Module]) -> dict[str, Leaf]:
    """What the model's parameters are made of, each weight as one, without values."""
    taken = {module.tensor(part) for module in modules.values() for part in module.parts}
    found: dict[str, Leaf] = {n: e for n, e in entries.items() if n not in taken and n.rpartition(".")[2] not in CACHE}
    for module in modules.values():
        raw = module.parts.get("weight_packed") or module.parts.get("weight")
        if raw is not None:
            found[module.tensor("weight")] = torch.empty(module.shape, dtype=raw.dtype, device="meta")
    return found


def _unmatched(skeleton: nn.Module, leaves: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    reading = read(skeleton, leaves)
    tied = aliases(skeleton)
    settled = {*reading.leaves, *(tied[name] for name in reading.leaves if name in tied)}
    shapes = {n: p.shape for n, p in skeleton.named_parameters(remove_duplicate=False) if n not in tied}
    absent = {name: shape for name, shape in shapes.items() if name not in settled}
    files = names_in_files(skeleton, absent) if absent else {}
    return [file for names in files.values() for file in names], list(reading.unused)


def head_of(skeleton: nn.Module) -> str:
    """The name in memory of the module that gives logits."""
    made: Any = getattr(skeleton, "get_output_embeddings", lambda: None)()
    return next((path for path, module in skeleton.named_modules() if module is made), "lm_head")


def packed_words(args: Args) -> bool:
    """Whether codes are joined in words of 32 bits."""
    return LAYOUTS[str(args.format)].packing == "words"
