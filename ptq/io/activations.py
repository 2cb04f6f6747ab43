"""Activation maps in checkpoints: arguments of the config and small tensors beside the weights, against `State.maps`.

    place                               key                  tensors
    input of a weight                   <weight>             <module>.input_scale, input_zero_point
                                                             NVFP4: input_global_scale, a divisor
    output of a weight                  <weight>@out         <module>.output_scale, output_zero_point
    queries, keys, values of attention  <module>@q, @k, @v   <module>.q_scale, q_zero_point, k_...

Old files keep scales of the cache beside the projections, `k_proj.output_scale` or `k_proj.k_scale`, or one for keys
and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ptq._tree import tensors, tree_map, with_tensors
from ptq.errors import BadInput, Guard, at_once
from ptq.io.layouts import SCALE_GRIDS, grid_of
from ptq.io.quantization_config import QUANTIZED, Args, Config, Quantizers
from ptq.io.safetensors import OnDisk, positive
from ptq.models.naming import Reading, in_order
from ptq.numerics.grids import ScaleGrid
from ptq.numerics.maps import FakeQuant, Map, StaticQuant

Maps = dict[str, tuple[Any, ...]]
Classes = Callable[[str], Sequence[str]]
_NUMBERS = ("scale", "zero_point", "global_scale")
ACTIVATIONS = tuple(f"{role}_{part}" for role in ("input", "output") for part in _NUMBERS)
CACHE = tuple(f"{role}_{part}" for role in ("q", "k", "v", "kv") for part in _NUMBERS)
PARTS = ACTIVATIONS + CACHE
"""local names of all tensors that belong to maps"""
_LETTERS = ("q", "k", "v")
_CACHE = {
    letter: (f"{letter}_scale", f"{letter}_proj.{letter}_scale", f"{letter}_proj.output_scale", "kv_scale")
    for letter in ("k", "v")
}
"""where the scales of the cache may be, of an attention module"""


def read_maps(
    skeleton: nn.Module,
    reading: Reading,
    entries: Mapping[str, OnDisk],
    config: Config,
    classes: Classes,
    where: Path,
    guard: Guard = at_once,
) -> Maps:
    """The maps of a checkpoint by the names in memory.

    Args:
        skeleton: the model's structure.
        reading: which tensors of the file its parameters are made of.
        entries: what the files hold.
        config: what the checkpoint says.
        classes: name of a weight in the file -> class names of its module.
        where: the directory, for errors.
        guard: what becomes of what is refused.

    Raises:
        BadInput: a scale is missing, of a wrong shape or no number above 0.
    """
    found: Maps = {}
    for name, sources in reading.sources.items():
        modules = [_module(source, entries) for source in in_order(sources)]
        given = [_quantizers(config, module, classes) for module in modules]
        for key, role, side in ((name, "input", 1), (f"{name}@out", "output", 2)):
            maps: list[Map] = []
            for module, quantizers in zip(modules, given, strict=True):
                if quantizers[side] is not None:
                    prefix = f"{module}.{role}"
                    with guard(*(f"{module}.{part}" for part in kept(quantizers[side], role)), prefix):
                        maps.append(_map(entries, prefix, quantizers[side], where))
            if maps and len(maps) == len(modules):
                with guard(name):
                    found[key] = (_together(name, maps),)
    return found | _attention_maps(skeleton, reading, entries, config, where, guard)


def _module(source: str, entries: Mapping[str, OnDisk]) -> str | None:
    """Whose weight a tensor of a file is: its module's, or its own where it is a stack of compressed experts."""
    stack = any(f"{source}.{part}" in entries for part in ("weight", "weight_packed"))
    return source if stack else source.removesuffix(".weight") if source.endswith(".weight") else None


def _quantizers(config: Config, module: str | None, classes: Classes) -> Quantizers:
    kinds = () if module is None else classes(f"{module}.weight")
    if module is None or QUANTIZED.isdisjoint(kinds):
        return Quantizers(None)
    return config.quantizers(module, kinds)


def _map(entries: Mapping[str, OnDisk], prefix: str, args: Any, where: Path) -> Map:
    grid = grid_of(args)
    if args.dynamic is not False:
        divisor = _number(entries, f"{prefix}_global_scale", args, where) if args.dynamic == "local" else None
        per: Any = "group" if args.strategy == "tensor_group" else args.strategy
        return FakeQuant(divisor, grid, per, args.group_size, args.symmetric, SCALE_GRIDS.get(args.scale_dtype))
    scale, zero = _number(entries, f"{prefix}_scale", args, where), entries.get(f"{prefix}_zero_point")
    if zero is None and not args.symmetric:
        raise BadInput(f"{where}: no tensor {prefix}_zero_point; its config asks for it (symmetric: false)")
    if zero is not None and zero.shape.numel() != scale.numel():
        raise BadInput(f"{zero.file}: {zero.name}: got shape {tuple(zero.shape)}, expected {tuple(scale.shape)}")
    kept = None if zero is None else zero.load().reshape(scale.shape)
    return StaticQuant(scale, kept, grid, args.strategy, args.symmetric)


def _number(entries: Mapping[str, OnDisk], name: str, args: Args, where: Path) -> Tensor:
    """A scale or divisor: read at once, since it is a few bytes."""
    if name not in entries:
        raise BadInput(f"{where}: no tensor {name}; its config asks for it (dynamic: {args.dynamic})")
    entry, heads = entries[name], args.strategy == "attn_head"
    if not entry.dtype.is_floating_point or entry.dtype.itemsize == 1 or (entry.shape.numel() != 1 and not heads):
        expected = "floats (heads, 1, 1)" if heads else "one float"
        raise BadInput(f"{entry.file}: {entry.name}: got {entry.dtype} {tuple(entry.shape)}, expected {expected}")
    value = positive(entry, entry.load())
    return value if value.ndim else value.reshape(1)


def _together(name: str, maps: Sequence[Map]) -> Map:
    """One map of several tensors that are one parameter in memory: stacked where they differ."""
    first, *others = maps
    if len({(arguments(m), len(tensors(m))) for m in maps}) > 1:
        raise BadInput(f"{name}: is kept as several tensors with different schemes of activations, which is not read")
    values = list(zip(*map(tensors, maps), strict=True))
    if not others or all(torch.equal(v.float(), column[0].float()) for column in values for v in column):
        return first
    return with_tensors(first, [torch.stack(column) for column in values])


def _attention_maps(
    skeleton: nn.Module, reading: Reading, entries: Mapping[str, OnDisk], config: Config, where: Path, guard: Guard
) -> Maps:
    found: Maps = {}
    for path, stored in _attentions(skeleton, reading):
        inputs = config.quantizers(stored, [c.__name__ for c in type(skeleton.get_submodule(path)).__mro__]).inputs
        wanted = {"q": inputs, "k": inputs or config.cache, "v": inputs or config.cache}
        held = {letter: _held(entries, stored, letter) for letter, args in wanted.items() if args is not None}
        for letter, known in held.items():
            args = wanted[letter]
            # Where none has a scale nothing is cached: attention over an image.
            if any(held.values()) or (args is not None and args.dynamic):
                prefix = known or f"{stored}.{letter}"
                with guard(f"{prefix}_scale"):
                    found[f"{path}@{letter}"] = (_map(entries, prefix, args, where),)
    return found


def _held(entries: Mapping[str, OnDisk], stored: str, letter: str) -> str | None:
    """The prefix of the tensors of an attention module's queries, keys or values, if they are there."""
    spellings = (f"{stored}.{part}" for part in _CACHE.get(letter, (f"{letter}_scale",)))
    return next((name.removesuffix("_scale") for name in spellings if name in entries), None)


def _attentions(skeleton: nn.Module, reading: Reading) -> Iterator[tuple[str, str]]:
    """Modules that do attention, by their class's name: their names in memory and in the file."""
    stored: dict[str, str] = {}
    for name, sources in reading.sources.items():
        inner, outer = name.split("."), sources[0].split(".")
        while inner and outer and inner.pop() == outer.pop():
            stored.setdefault(".".join(inner), ".".join(outer))
    for path, module in skeleton.named_modules():
        if type(module).__name__.endswith("Attention") and path in stored:
            yield path, stored[path]


def weight_maps(maps: Mapping[str, Sequence[Map]], name: str, i: int, count: int) -> dict[str, Map]:
    """Role -> map, of a parameter that files keep as so many tensors; of the one with number `i`."""
    keys = {"input": name, "output": f"{name}@out"}
    return {role: _piece(maps[key][0], i, count) for role, key in keys.items() if key in maps}


def _piece(given: Map, i: int, count: int) -> Map:
    stacked = count > 1 and any(t.ndim == 2 for t in tensors(given))
    return tree_map(lambda t: t[i], given) if stacked else given


def attention_maps(maps: Mapping[str, Sequence[Map]]) -> dict[str, dict[str, Map]]:
    """Attention module -> letter -> map."""
    found: dict[str, dict[str, Map]] = {}
    for key, (given, *_) in maps.items():
        module, _, letter = key.partition("@")
        if letter in _LETTERS:
            found.setdefault(module, {})[letter] = given
    return found


def arguments(given: Map) -> Args:
    """What a config says of a map."""
    grid = given.grid
    if isinstance(given, StaticQuant):
        return Args(None, grid.bits, grid.kind, given.symmetric, given.granularity)
    local, scales = given.divisor is not None, _dtype_name(given.scales)
    strategy = "tensor_group" if local else given.granularity
    dynamic = "local" if local else True
    return Args(None, grid.bits, grid.kind, given.symmetric, strategy, given.group_size, None, scales, dynamic)


def named_tensors(given: Map, role: str) -> dict[str, Tensor]:
    """What a map stores, by local name; `role` is input, output, q, k or v."""
    if isinstance(given, StaticQuant):
        stored = {"scale": given.scale, "zero_point": given.zero}
    else:
        stored = {"global_scale": given.divisor}
    return {f"{role}_{part}": t for part, t in stored.items() if t is not None}


def kept(args: Args | None, role: str) -> tuple[str, ...]:
    """Local names of the tensors without which a file does not say how activations are rounded.

    >>> kept(Args(None, 8, "float", True, "tensor"), "input")
    ('input_scale',)
    """
    if args is None or args.dynamic is True:
        return ()
    if args.dynamic == "local":
        return (f"{role}_global_scale",)
    return (f"{role}_scale",) if args.symmetric else (f"{role}_scale", f"{role}_zero_point")


def _dtype_name(scales: ScaleGrid | None) -> str | None:
    return next((name for name, grid in SCALE_GRIDS.items() if grid == scales), None)
