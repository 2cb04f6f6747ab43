"""What a checkpoint holds against what its config says: a table of modules, by what the reader makes of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ptq.errors import Refusals
from ptq.io.activations import ACTIVATIONS
from ptq.io.bitmask import Masked
from ptq.io.compressed_tensors import WEIGHT, Stored, by_module
from ptq.io.contents import Contents, classes_of, contents, source_of
from ptq.io.files import read_json
from ptq.io.foreign import Turned
from ptq.io.layouts import LAYOUTS
from ptq.io.pruned import Zeroed
from ptq.io.quantization_config import KEYS, QUANTIZED, Args, Config, Quantizers
from ptq.io.safetensors import OnDisk
from ptq.models.skeleton import head_of
from ptq.numerics.leaves import Leaf

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
    """empty where the line of a refusal says it"""
    loaders: str
    """whom it concerns"""
    severity: str = ERROR

    def __str__(self) -> str:
        what = f"got {self.got}, expected {self.expected}" if self.expected else self.got
        return f"{self.severity}: {self.about}: {self.rule}: {what} ({self.loaders})"


class Module(NamedTuple):
    """A module with a matrix that may be compressed."""

    name: str
    classes: Sequence[str]
    """its own and those it inherits from; none if the model has not its weight"""
    parts: Mapping[str, Entry]
    """local name -> tensor"""
    leaf: Leaf | None
    """what the reader makes of its weight; None: it refuses it"""
    given: Quantizers
    """the schemes that the config gives"""
    piece: bool
    """whether transformers stacks its weight with others, as those of experts"""

    @property
    def rounded(self) -> Stored | None:
        """Its codes, or the floats that they stand for, if it has scales."""
        leaf = self.leaf
        while isinstance(leaf, Turned | Zeroed):
            leaf = leaf.leaf
        return leaf if isinstance(leaf, Stored) else None

    @property
    def stored(self) -> Stored | None:
        """Its codes, if it has any."""
        return None if self.rounded is None or self.rounded.frozen else self.rounded

    @property
    def args(self) -> Args | None:
        """How its codes are stored, if it has any."""
        return None if self.stored is None else self.stored.args

    @property
    def scheme(self) -> Quantizers:
        """All that is quantized of it."""
        return self.given._replace(weights=self.args)

    @property
    def shape(self) -> torch.Size:
        """Of the weight."""
        leaf = self.stored or self.leaf
        return torch.Size() if leaf is None else leaf.shape

    def tensor(self, part: str) -> str:
        """The full name of a part: that in the file, if it is there."""
        if part in self.parts:
            return self.parts[part].name
        return f"{self.name}.{part}" if self.name else part


@dataclass(frozen=True)
class Survey:
    """A checkpoint, by what the reader makes of it and by its config."""

    table: Mapping[str, Any]
    """the quantization_config of compressed-tensors; empty where there is none, or that of another quantizer"""
    config: Config | None
    """its schemes, whoever quantized it"""
    entries: Mapping[str, Entry]
    modules: Mapping[str, Module]
    refusals: Refusals
    """what this reader refuses"""
    unused: Sequence[str]
    head: str
    """the module that gives logits"""
    tied: bool
    """whether the config says that it shares the embedding's weight"""
    heads: int | None
    """of attention"""
    key_value_heads: int | None
    buffers: Collection[str] = ()
    """tensors that may hold infinities, as masks do"""


def surveyed(where: Path, skeleton: nn.Module) -> Survey:
    """Reads a checkpoint as it would be opened, past whatever is refused.

    Args:
        where: its directory.
        skeleton: the model's structure, which learns how it is stored.

    Raises:
        BadInput: the files are damaged, or the config's schemes are not understood.
    """
    source, refusals, raw = source_of(where), Refusals(), read_json(where / "config.json")
    found = contents(where, source, skeleton, refusals)
    given: Any = next(filter(None, map(raw.get, KEYS)), {})
    path = f"{head_of(skeleton)}.weight"
    text: Any = raw.get("text_config") or {}
    config: Any = getattr(skeleton, "config", None)
    sizes: Any = getattr(config, "text_config", None) or config
    return Survey(
        table=unwrapped(given) if source.quantization == given else {},
        config=found.config,
        entries=found.entries,
        modules=_modules(found, skeleton),
        refusals=refusals,
        unused=found.reading.unused,
        head=found.reading.sources.get(path, (path,))[0].removesuffix(".weight"),
        tied=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        heads=getattr(sizes, "num_attention_heads", None),
        key_value_heads=getattr(sizes, "num_key_value_heads", None),
        buffers={name for name, _ in skeleton.named_buffers()},
    )


def unwrapped(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the second wrapping of old files."""
    return table.get("quantization_config") or table


def _modules(found: Contents, skeleton: nn.Module) -> dict[str, Module]:
    """Modules with a weight of their own, and what belongs to it."""
    known = ("weight",) if found.config is None else (*WEIGHT, *ACTIVATIONS)
    parts = by_module(found.entries, known)
    classes, unused = classes_of(skeleton, found.entries), {*found.reading.unused}
    pieces = {file for files in found.reading.sources.values() if len(files) > 1 for file in files}
    made: dict[str, Module] = {}
    for name, own in parts.items():
        weight = f"{name}.weight" if name else "weight"
        leaf = found.stored.get(name if name in found.source.stacks else weight)
        kinds = () if weight in unused and not isinstance(leaf, Stored) else classes(weight)
        has = found.config is not None and not QUANTIZED.isdisjoint(kinds)
        given = found.config.quantizers(name, kinds) if found.config and has else Quantizers(None)
        made[name] = Module(name, kinds, own, leaf, given, weight in pieces)
    return made


def packed_words(args: Args) -> bool:
    """Whether codes are joined in words of 32 bits."""
    return LAYOUTS[str(args.format)].packing == "words"
