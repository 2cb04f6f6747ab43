"""What the files of a directory are to a model: its parameters and maps, each from the tensors that it is kept as.

With a guard that goes on, what is refused is left out and the rest is there: so a checkpoint can be looked over by the
rules that it is read by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ptq.errors import BadInput, Guard, at_once
from ptq.io import bitmask
from ptq.io.activations import Maps, read_maps
from ptq.io.bitmask import Masked
from ptq.io.compressed_tensors import collected
from ptq.io.files import read_json
from ptq.io.foreign import Source, quantization_of, translated
from ptq.io.pruned import PRUNED, pruned
from ptq.io.quantization_config import KEYS, Config, parse
from ptq.io.safetensors import OnDisk, headers
from ptq.models.naming import Reading, assigned, names_in_files, read, splitting
from ptq.models.skeleton import aliases, checkpoint_dtype, remember_conversions
from ptq.numerics.leaves import Leaf, dense


class Contents(NamedTuple):
    """A checkpoint as this reader understands it."""

    source: Source
    config: Config | None
    """None: nothing is compressed"""
    entries: Mapping[str, OnDisk | Masked]
    """tensors of the files, the parts of pruned ones joined"""
    stored: Mapping[str, Leaf]
    """the same with the parts of compressed weights joined"""
    reading: Reading
    params: Mapping[str, Leaf]
    tied: Mapping[str, str]
    """alias -> parameter"""
    maps: Maps


def source_of(where: Path) -> Source:
    """What a directory holds, by headers and config alone.

    Raises:
        BadInput: a file is damaged, or of a quantizer that is not read.
    """
    raw = read_json(where / "config.json")
    return translated(headers(where), quantization_of([raw.get(key) for key in KEYS], where), where)


def contents(where: Path, source: Source, skeleton: nn.Module, guard: Guard = at_once) -> Contents:
    """What of a directory each parameter of a model is made of.

    Args:
        where: the directory.
        source: what it holds.
        skeleton: the model's structure, which learns how it is stored.
        guard: what becomes of what is refused.

    Raises:
        BadInput: as the guard lets it; whatever guard, the config or a pruned weight is not understood.
    """
    config = None if source.quantization is None else parse(source.quantization, where)
    entries = bitmask.joined(source.entries, where)
    stored = joined(skeleton, source, checkpoint_dtype(source.entries.values()), where, guard)
    reading = read(skeleton, stored)
    # Loaders know compressed experts one by one, wherever a file stacked them.
    remember_conversions(skeleton, [*reading.conversions, *splitting(skeleton, source.stacks)])
    params, tied = _parameters(skeleton, stored, reading, where, guard)
    kinds = classes_of(skeleton, source.entries)
    maps = read_maps(skeleton, reading, source.entries, config, kinds, where, guard) if config else {}
    return Contents(source, config, entries, stored, reading, params, tied, maps)


def joined(
    skeleton: nn.Module, source: Source, dtype: torch.dtype, where: Path, guard: Guard = at_once
) -> Mapping[str, Leaf]:
    """The leaves of a checkpoint by their names in the file, the parts of compressed weights joined."""
    parts = bitmask.joined(source.entries, where)
    classes = classes_of(skeleton, parts)
    leaves = collected(parts, source.quantization or {}, classes, dtype, where, guard)
    restored = source.restored(leaves, _transposed(skeleton, source.stacks))
    told = read_json(where / "config.json").get(PRUNED)
    if told is None:
        return restored
    turned = _transposed(skeleton, restored)
    return pruned(restored, told, lambda name: turned(name) or "Conv1D" in classes(name), where)


def _transposed(skeleton: nn.Module, stacks: Iterable[str]) -> Callable[[str], bool]:
    """Whether the model multiplies by a stack of experts as it is, `[e, in, out]`: transformers marks their modules."""
    names = assigned(skeleton, stacks)

    def turned(stack: str) -> bool:
        owner = skeleton.get_submodule(names[stack].rpartition(".")[0]) if stack in names else None
        return bool(getattr(owner, "is_transposed", False))

    return turned


def classes_of(skeleton: nn.Module, entries: Iterable[str]) -> Callable[[str], Sequence[str]]:
    """Name of a weight in a file -> class names of its module."""
    names = assigned(skeleton, {f"{name.rpartition('.')[0]}.weight" for name in entries})

    def classes(weight: str) -> list[str]:
        if weight not in names:  # a piece of a stack of experts: a linear wherever experts are modules
            return ["Linear", "Module"]
        return [c.__name__ for c in type(skeleton.get_submodule(names[weight].rpartition(".")[0])).__mro__]

    return classes


def _parameters(
    skeleton: nn.Module, stored: Mapping[str, Leaf], reading: Reading, where: Path, guard: Guard
) -> tuple[dict[str, Leaf], dict[str, str]]:
    """Canonical parameters in the module's order, and the aliases that hold in this checkpoint."""
    tied = aliases(skeleton)
    leaves = dict(reading.leaves)
    for alias, name in list(tied.items()):
        if alias in leaves and name not in leaves:
            leaves[name] = leaves[alias]
        elif alias in leaves and not torch.equal(dense(leaves[alias]), dense(leaves[name])):
            del tied[alias]  # the file has the last word: these were trained apart
    params: dict[str, Leaf] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        if name not in tied:
            leaf = leaves.get(name)
            files, absent = _files(skeleton, name, parameter, leaf, stored, reading)
            with guard(*absent, *files):
                params[name] = _checked(name, parameter, leaf, files, absent, where)
    return params, tied


def _files(
    skeleton: nn.Module,
    name: str,
    parameter: nn.Parameter,
    leaf: Leaf | None,
    stored: Mapping[str, Leaf],
    reading: Reading,
) -> tuple[Sequence[str], Sequence[str]]:
    """The tensors of the file that a parameter is made of, and those of them that are not there."""
    files = reading.sources.get(name, (name,))
    if leaf is not None and (leaf.shape == parameter.shape or len(files) == 1):
        return files, ()
    files = names_in_files(skeleton, {name: parameter.shape})[name]
    return files, [file for file in files if file not in stored]


def _checked(
    name: str,
    parameter: nn.Parameter,
    leaf: Leaf | None,
    files: Sequence[str],
    absent: Sequence[str],
    where: Path,
) -> Leaf:
    if absent:
        raise BadInput(f"{where}: no tensor {absent[0]}; the model's parameter {name} is made of it")
    if leaf is None:
        raise BadInput(f"{where}: {files[0]} and {len(files) - 1} others do not make one {name}: their shapes differ")
    if leaf.shape != parameter.shape:
        got, want = tuple(leaf.shape), tuple(parameter.shape)
        raise BadInput(f"{where}: {files[0]}: got shape {got}, expected {want} for {name}")
    if parameter.is_floating_point() and not (leaf.dtype.is_floating_point and leaf.dtype.itemsize > 1):
        what = f"got {leaf.dtype} without a scale, expected floats of 16 bits or more for {name}"
        raise BadInput(f"{where}: {files[0]}: {what}")
    return leaf
