"""Names and shapes in files against those in memory, by transformers' own conversion, one parameter at a time.

Most parameters are only renamed, or not even that. Some are stored as several tensors, one per expert, that
transformers stacks when it loads a model and splits when it saves one. Any other module has the same names in both.

Reference: `transformers.core_model_loading`, whose loader and saver this follows without reading any weight.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from ptq._tree import structure, tensors, tree_map, with_tensors
from ptq.numerics.lazy import Lazy, load
from ptq.numerics.leaves import Leaf, Quantized, Scales, Sparse, compressed, dense, nbytes, rounded
from ptq.numerics.patterns import NM
from ptq.numerics.tiles import spread, tile_of


class Reading(NamedTuple):
    """What a checkpoint holds for a model."""

    leaves: dict[str, Leaf]
    """parameters and persistent buffers by the names they have in memory"""
    sources: dict[str, tuple[str, ...]]
    """memory name -> the names in the file that it is made of"""
    unused: tuple[str, ...]
    """names in the file that the model has no place for"""
    conversions: list[Any]
    """the conversions that took part, which writing reverts"""


def read(skeleton: nn.Module, stored: Mapping[str, Leaf]) -> Reading:
    """Assigns the tensors of a checkpoint to the parameters of a model; reads nothing.

    Args:
        skeleton: the model's structure; shapes are those of its parameters.
        stored: leaves by their names in the file; lazy ones stay lazy.
    """
    if not isinstance(skeleton, PreTrainedModel):
        names = skeleton.state_dict(keep_vars=True).keys()
        leaves = {name: leaf for name, leaf in stored.items() if name in names}
        return Reading(leaves, {n: (n,) for n in leaves}, tuple(n for n in stored if n not in leaves), [])
    mapping = get_model_conversion_mapping(skeleton)
    sources, converters, unused = _assigned(skeleton, mapping, stored)
    leaves: dict[str, Leaf] = {}
    found: dict[str, tuple[str, ...]] = {}
    for target, keys in sources.items():
        made = {target: stored[keys[0][0]]}
        if target in converters:
            try:
                made = _converted(skeleton, converters[target], target, [(k, p, stored[k]) for k, p in keys])
            except RuntimeError:  # what torch raises where shapes do not join: a piece is missing, and so the parameter
                continue
        leaves |= made
        found |= dict.fromkeys(made, tuple(k for k, _ in keys))
    return Reading(leaves, found, unused, [conversion for conversion in mapping if conversion.was_used()])


def assigned(skeleton: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names of plain tensors in a file -> names in memory; what is converted or has no place is left out."""
    if not isinstance(skeleton, PreTrainedModel):
        return {name: name for name in names}
    sources, converters, _ = _assigned(skeleton, get_model_conversion_mapping(skeleton), names)
    return {keys[0][0]: target for target, keys in sources.items() if target not in converters}


def splitting(skeleton: nn.Module, stored: Iterable[str]) -> list[Any]:
    """The conversions that make these parameters out of several tensors, for a file that has each as one.

    Args:
        skeleton: the model's structure.
        stored: their names in the file.
    """
    names = assigned(skeleton, stored).values()
    if not names or not isinstance(skeleton, PreTrainedModel):
        return []
    mapping: list[Any] = [c for c in get_model_conversion_mapping(skeleton) if isinstance(c, WeightConverter)]
    return [c for c in mapping if any(apply_converters(n, [c.reverse_transform()])[1] is not None for n in names)]


def written(skeleton: nn.Module, params: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """The same leaves under the names and in the shapes that a checkpoint has for them.

    What is only renamed, or was made of a file's tensors and is made into them again, stays as it is there, lazy leaves
    too. What cannot be cut as the checkpoint has it is given by its values. `params` holds whole groups of `joint`.
    """
    renamed: dict[str, Leaf] = {}
    for group in joint(skeleton, params):
        stand_ins = {name: torch.empty(params[name].shape, device="meta") for name in group}
        names = {id(tensor): name for name, tensor in stand_ins.items()}
        back = _reverted(skeleton, stand_ins)
        if all(id(tensor) in names for tensor in back.values()):
            renamed |= {file: params[names[id(tensor)]] for file, tensor in back.items()}
        else:
            own = {name: params[name] for name in group}
            renamed |= _as_read(own, back) or _split(skeleton, {name: load(leaf) for name, leaf in own.items()})
    return renamed


def names_in_files(skeleton: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, tuple[str, ...]]:
    """Memory name -> names in a checkpoint; several where a parameter is stored in pieces.

    >>> names_in_files(nn.Linear(2, 1), {"weight": torch.Size((1, 2))})
    {'weight': ('weight',)}
    """
    return {
        name: tuple(_reverted(skeleton, {n: torch.empty(shapes[n], device="meta") for n in group}))
        for group in joint(skeleton, shapes)
        for name in group
    }


def in_order(names: Iterable[str]) -> list[str]:
    """Names of a file in the order in which transformers stacks them: numbers by their value.

    >>> in_order(["experts.10.w", "experts.9.w"])
    ['experts.9.w', 'experts.10.w']
    """
    return sorted(names, key=dot_natural_key)


def joint(skeleton: nn.Module, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of parameters that are written together, since a checkpoint keeps them in one tensor; mostly single."""
    converters: list[Any] = [
        c.reverse_transform() for c in _conversions(skeleton)[::-1] if isinstance(c, WeightConverter)
    ]
    groups: dict[tuple[int, str], list[str]] = {}
    for name in names:
        made = (c.rename_source_key(name) for c in converters)
        found = next(((i, key) for i, (key, pattern) in enumerate(made) if pattern is not None), (-1, name))
        groups.setdefault(found, []).append(name)
    return [tuple(group) for group in groups.values()]


@dataclass(frozen=True)
class Converted(Lazy):
    """A parameter that transformers makes of several tensors of a file, or of a part of one."""

    skeleton: nn.Module
    converter: Any
    target: str
    sources: tuple[tuple[str, str, Leaf], ...]
    """(name in the file, pattern of the converter, leaf)"""
    output: str
    dtype: torch.dtype
    shape: torch.Size

    def load(self) -> Leaf:
        leaves = _alike([load(leaf) for _, _, leaf in self.sources])
        rows = tree_map(lambda *parts: self._of(parts), *map(_by_rows, leaves))
        return _by_tiles(rows, leaves[0])

    def _of(self, values: Sequence[Tensor | None]) -> Tensor:
        parts = [(key, pattern, v) for (key, pattern, _), v in zip(self.sources, values, strict=True)]
        return _apply(self.skeleton, self.converter, self.target, parts)[self.output]


@compressed.register
def _(leaf: Converted) -> bool:
    return any(compressed(source) for _, _, source in leaf.sources)


@rounded.register
def _(leaf: Converted) -> bool:
    return any(rounded(source) for _, _, source in leaf.sources)


@nbytes.register
def _(leaf: Converted) -> int:
    whole = sum(source.shape.numel() for _, _, source in leaf.sources)
    return sum(nbytes(source) for _, _, source in leaf.sources) * leaf.shape.numel() // whole


def _assigned(
    skeleton: PreTrainedModel, mapping: Sequence[Any], stored: Iterable[str]
) -> tuple[dict[str, list[tuple[str, str]]], dict[str, Any], tuple[str, ...]]:
    """Target -> [(name in the file, pattern)], target -> converter, names without a target."""
    renamings = [t for t in mapping if isinstance(t, WeightRenaming)]
    converters = [t for t in mapping if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    known, prefix = skeleton.state_dict(keep_vars=True), skeleton.base_model_prefix
    sources: dict[str, list[tuple[str, str]]] = {}
    chosen: dict[str, Any] = {}
    unused: list[str] = []
    for key in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if target not in known and key in known:  # it has the name in memory already
            target, pattern = rename_source_key(key, [], [], prefix, known)
        if target not in known:
            unused.append(key)
        else:
            sources.setdefault(target, []).append((key, pattern or key))
            if pattern is not None:
                chosen.setdefault(target, by_pattern[pattern])
    return sources, chosen, tuple(unused)


def _converted(
    skeleton: nn.Module, converter: Any, target: str, sources: Sequence[tuple[str, str, Leaf]]
) -> dict[str, Leaf]:
    metas = [(key, pattern, torch.empty(leaf.shape, device="meta")) for key, pattern, leaf in sources]
    dtype = sources[0][2].dtype
    return {
        name: Converted(skeleton, converter, target, tuple(sources), name, dtype, value.shape)
        for name, value in _apply(skeleton, converter, target, metas).items()
    }


def _apply(
    skeleton: Any, converter: Any, target: str, parts: Sequence[tuple[str, str, Tensor | None]]
) -> dict[str, Tensor]:
    conversion = copy.deepcopy(converter)  # it collects tensors, so each use has its own
    for key, pattern, value in parts:
        conversion.add_tensor(target, key, pattern, value)
    made = conversion.convert(target, model=skeleton, config=skeleton.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _as_read(group: Mapping[str, Leaf], back: Mapping[str, Tensor]) -> dict[str, Leaf]:
    """The leaves in a file that parameters are made of, if those are what is to be written; else nothing.

    Nothing is read then, and what has no common leaf, such as experts of which some are dense, stays what it is.
    """
    leaves = [leaf for name, leaf in group.items() if isinstance(leaf, Converted) and leaf.output == name]
    origins = {tuple((key, id(source)) for key, _, source in leaf.sources) for leaf in leaves}
    if len(leaves) < len(group) or len(origins) > 1:
        return {}
    sources = {key: source for key, _, source in leaves[0].sources}
    same = {file: t.shape for file, t in back.items()} == {key: source.shape for key, source in sources.items()}
    return {file: sources[file] for file in back} if same else {}


def _split(skeleton: nn.Module, group: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Sends codes, scales, zero points and masks through the conversion one by one: it only cuts and rearranges."""
    before, *_ = leaves = _alike(list(group.values()))
    rows = list(map(_by_rows, leaves))
    parts = list(zip(*map(tensors, rows), strict=True))
    made = [_reverted(skeleton, dict(zip(group, part, strict=True))) for part in parts]
    if any(t.shape[-1] != part[0].shape[-1] for m, part in zip(made, parts, strict=True) for t in m.values()):
        return dict(_reverted(skeleton, {name: dense(leaf) for name, leaf in group.items()}))  # columns became rows
    return {name: _by_tiles(with_tensors(rows[0], [m[name] for m in made]), before) for name in made[0]}


def _alike(leaves: Sequence[Leaf]) -> Sequence[Leaf]:
    """The leaves, if they consist of the same parts, which can be cut and joined each for itself; else their values."""
    parted = all(isinstance(leaf.values if isinstance(leaf, Sparse) else leaf, Tensor | Quantized) for leaf in leaves)
    same = parted and len({structure(_by_rows(leaf)) for leaf in leaves}) == 1
    return leaves if same else [dense(leaf) for leaf in leaves]


def _by_rows(leaf: Leaf) -> Leaf:
    """The same values with scales (and a divisor) for every row, so that rows can be cut and joined."""
    if isinstance(leaf, Sparse):
        # What is promised for groups of columns holds for any rows; other promises are of all of them together.
        return Sparse(_by_rows(leaf.values), leaf.mask, leaf.pattern if isinstance(leaf.pattern, NM) else None)
    if not isinstance(leaf, Quantized):
        return leaf
    high, wide = leaf.tile or tile_of(leaf.scale.shape, leaf.shape)

    def tall(t: Tensor) -> Tensor:
        return spread(t, torch.Size((*leaf.shape[:-1], t.shape[-1])), (leaf.shape[-2] if t.shape[-2] == 1 else high, 1))

    scale = tree_map(tall, leaf.scale)
    return replace(leaf, scale=scale, zero=None if leaf.zero is None else tall(leaf.zero), tile=(1, wide))


def _by_tiles(leaf: Leaf, before: Leaf) -> Leaf:
    """Scales of rows as those of tiles again, such as they were before, wherever that says the same."""
    if isinstance(leaf, Sparse):
        return replace(leaf, values=_by_tiles(leaf.values, before.values))
    if not isinstance(leaf, Quantized):
        return leaf
    rows, scale = leaf.shape[-2], leaf.scale
    high = before.tile[0] if before.tile else rows if before.scale.shape[-2] == 1 else 1

    def fewer(t: Any, every: int) -> Any:
        if t is None:
            return None
        few = t[..., ::every, :].contiguous()
        return few if torch.equal(_bytes(spread(few, t.shape, (every, 1))), _bytes(t)) else t

    if isinstance(scale, Scales):
        scale = replace(scale, codes=fewer(scale.codes, high), divisor=fewer(scale.divisor, rows))
    else:
        scale = fewer(scale, high)
    zero = fewer(leaf.zero, high)
    if scale.shape[-2] != -(-rows // high) or (zero is not None and zero.shape != scale.shape):
        return leaf if before.tile else replace(leaf, tile=None)
    return replace(leaf, scale=scale, zero=zero, tile=before.tile)


def _bytes(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.itemsize == 1 else t


def _reverted(skeleton: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return revert_weight_conversion(skeleton, values) if isinstance(skeleton, PreTrainedModel) else values


def _conversions(skeleton: nn.Module) -> list[Any]:
    """What `revert_weight_conversion` will revert."""
    if not isinstance(skeleton, PreTrainedModel):
        return []
    known = getattr(skeleton, "_weight_conversions", None)
    if known is not None:
        return list(known)
    mapping = get_model_conversion_mapping(skeleton, add_legacy=False)
    return [conversion for conversion in mapping if not isinstance(conversion, PrefixChange)]
