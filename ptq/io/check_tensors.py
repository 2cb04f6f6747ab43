"""Rules of single tensors that this reader takes: what loaders register no place for, and what no value may be."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ptq.io.activations import ACTIVATIONS, CACHE, kept
from ptq.io.compressed_tensors import SCALES, WEIGHT, Stored
from ptq.io.layouts import LAYOUTS, Part, expected
from ptq.io.quantization_config import Args
from ptq.io.survey import BOTH, EVERY, NOTE, TRANSFORMERS, VLLM, Finding, Module, Survey, packed_words
from ptq.numerics.chunks import few_rows
from ptq.numerics.leaves import dense, finite


def presence(survey: Survey) -> Iterator[Finding]:
    """What the model has no place for."""
    parts = (item for module in survey.modules.values() for item in module.parts.items())
    taken = {entry.name for part, entry in parts if part != "weight"}
    for name in survey.unused:
        part = name.rpartition(".")[2]
        if name in taken or (part in CACHE and survey.table):
            continue  # told with their modules, and with the cache
        if part in (*WEIGHT[1:], *ACTIVATIONS):
            yield Finding(name, "unexpected", "a tensor", "none: no module has it", VLLM)
        else:
            yield Finding(name, "unexpected", "a tensor", "none: the model has no such parameter", BOTH, NOTE)


def part_findings(survey: Survey) -> Iterator[Finding]:
    """The tensors of each weight against what its scheme makes loaders register."""
    if not survey.table or survey.config is None:
        return
    for module in survey.modules.values():
        if module.stored is not None:
            yield from _registered(module, module.stored)
        elif module.leaf is not None and survey.config.packed:
            yield from _beside_dense(module)
        yield from _activations(module)
    yield from _cache(survey)


def _registered(module: Module, leaf: Stored) -> Iterator[Finding]:
    args, needed = leaf.args, expected(leaf.args, leaf.shape)
    given = module.given.weights
    if given is not None and given.format in LAYOUTS and given.format != args.format:
        yield Finding(module.name, "other-format", f"tensors of {args.format}", f"those of {given.format}", BOTH)
    if packed_words(args) and 32 % args.bits and not leaf.straddle:
        want = "codes that may straddle words, as since compressed-tensors 0.18"
        yield Finding(module.tensor("weight_packed"), "old-packing", "whole codes in each word", want, BOTH)
    elif len(leaf.shape) == 2:
        for part, need in needed.items():
            yield from _rank(module, args, part, need)
    for part in module.parts.keys() - needed.keys() - set(ACTIVATIONS):
        why = "the scheme is symmetric" if part == "weight_zero_point" else f"{args.format}"
        yield _extra(module, part, why, BOTH if part == "weight_g_idx" else VLLM)


def _rank(module: Module, args: Args, part: str, need: Part) -> Iterator[Finding]:
    """Loaders do not take a tensor with other dimensions of 1 than those they register."""
    got = tuple(module.parts[part].shape)
    shape = (1,) if need.loose and args.strategy == "tensor" and part != "weight" else need.shape
    if got != shape:
        yield Finding(module.tensor(part), "scale-rank", str(got), str(shape), BOTH if got else TRANSFORMERS)


def _beside_dense(module: Module) -> Iterator[Finding]:
    for part in module.parts.keys() - {"weight", *ACTIVATIONS}:
        yield _extra(module, part, "its weight is dense")
    if module.given.weights is not None and module.given.weights.format in LAYOUTS:
        want = f"{module.given.weights.format}, or the module in ignore"
        yield Finding(module.tensor("weight"), "not-compressed", "a dense weight", want, BOTH)


def _extra(module: Module, part: str, why: str, loaders: str = VLLM) -> Finding:
    return Finding(module.tensor(part), "unexpected", "a tensor", f"none: {why}", loaders)


def _activations(module: Module) -> Iterator[Finding]:
    """Scales of activations that the scheme of the module has not."""
    asked = {*kept(module.given.inputs, "input"), *kept(module.given.outputs, "output")}
    for part in module.parts.keys() & set(ACTIVATIONS) - asked:
        yield _extra(module, part, "the scheme of its module keeps no such number of activations")


def _cache(survey: Survey) -> Iterator[Finding]:
    config = survey.config
    if config is None or config.cache is not None or any(g.weights is None and g.inputs for g in config.groups):
        return
    for name in survey.entries:
        if name.rpartition(".")[2] in CACHE:
            yield Finding(name, "unexpected", "a tensor", "none: the config quantizes no cache", VLLM)


def value_findings(survey: Survey, weights: bool) -> Iterator[Finding]:
    """Floats that are not numbers, one weight in memory at a time; what is compressed by the reader, which refuses it.

    Args:
        survey: a checkpoint.
        weights: whether more than scales is read: dense weights, codes, zero points, orders of columns.
    """
    known = {*survey.buffers}
    for module in survey.modules.values():
        if module.rounded is not None:
            module.rounded.check_scales(survey.refusals)
            if weights and survey.refusals.found.keys().isdisjoint(e.name for e in module.rounded.parts.values()):
                with survey.refusals(module.name):
                    module.rounded.load()
            known |= {entry.name for part, entry in module.rounded.parts.items() if part in SCALES}
    for name, entry in survey.entries.items():
        if weights and entry.dtype.is_floating_point and known.isdisjoint((name, entry.name)):
            yield from _not_finite(entry.name, dense(entry))


def _not_finite(name: str, t: Tensor) -> Iterator[Finding]:
    if all(finite(rows) for (rows,) in few_rows(t)):
        return
    nan = "NaN, a code of 0x7f or 0xff" if t.dtype == torch.float8_e4m3fn else "NaN"
    for what, bad in ((nan, t.float().isnan()), ("infinity", t.float().isinf())):
        if bool(bad.any()):
            yield Finding(name, "values", what, "finite values", EVERY)
