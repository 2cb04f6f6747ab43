"""Rules of single tensors: which there are, of what type and shape, and what no value may be."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.io.activations import ACTIVATIONS, CACHE, kept
from ptq.io.compressed_tensors import WEIGHT
from ptq.io.layouts import LAYOUTS, Part, expected, fits, grid_of
from ptq.io.quantization_config import Args
from ptq.io.survey import BOTH, EVERY, NOTE, TRANSFORMERS, VLLM, Finding, Module, Survey
from ptq.numerics.chunks import few_rows
from ptq.numerics.leaves import dense, finite


def presence(survey: Survey) -> Iterator[Finding]:
    """What the model needs and lacks, and what it has no place for."""
    for name in survey.missing:
        yield Finding(name, "missing", "no tensor", "one for the model's parameter", EVERY)
    for name in survey.unused:
        part = name.rpartition(".")[2]
        if part in (*WEIGHT[1:], *ACTIVATIONS):
            yield Finding(name, "unexpected", "a tensor", "none: no module has it", VLLM)
        else:
            yield Finding(name, "unexpected", "a tensor", "none: the model has no such parameter", BOTH, NOTE)


def part_findings(survey: Survey) -> Iterator[Finding]:
    """The tensors of each weight against its scheme."""
    for module in survey.modules.values():
        if module.args is not None and survey.config is not None and survey.config.packed:
            yield from _layout(module, module.args)
        elif survey.table and not module.compressed:
            for part in module.parts.keys() - {"weight", *ACTIVATIONS}:
                yield _extra(module, part, "its weight is dense")
    yield from _activations(survey)


def _layout(module: Module, args: Args) -> Iterator[Finding]:
    layout = LAYOUTS.get(str(args.format))
    if layout is None or grid_of(args) not in layout.grids:
        got = f"{args.kind} of {args.bits} bits in {args.format}"
        yield Finding(module.name, "scheme", got, f"one of {', '.join(LAYOUTS)} that holds it", EVERY)
        return
    if len(module.shape) < 2:
        raw = next((part for part in (layout.weight, "weight") if part in module.parts), layout.weight)
        yield Finding(module.tensor(raw), "missing", f"shape {tuple(module.shape)}", "a matrix", EVERY)
        return
    try:
        needed = expected(args, module.shape)
    except BadInput as error:
        yield Finding(module.tensor(layout.weight), "group-width", str(error), "groups that divide the width", EVERY)
        return
    for part, need in needed.items():
        yield from _part(module, args, part, need)
    for part in module.parts.keys() - needed.keys() - set(ACTIVATIONS):
        yield _extra(module, part, "the scheme is symmetric" if part == "weight_zero_point" else f"{args.format}")


def _part(module: Module, args: Args, part: str, need: Part) -> Iterator[Finding]:
    name, got = module.tensor(part), module.parts.get(part)
    types = "floats" if len(need.dtypes) > 2 else " or ".join(map(str, need.dtypes))
    shape = _exact(need, args, part)
    if got is None:
        yield Finding(name, "missing", "no tensor", f"{types} {shape}", EVERY)
    elif got.dtype not in need.dtypes:
        yield Finding(name, "dtype", str(got.dtype), types, EVERY)
    elif not fits(need, got.shape):
        yield Finding(name, "shape", str(tuple(got.shape)), str(shape), EVERY)
    elif tuple(got.shape) != shape and len(module.shape) == 2:
        concerned = TRANSFORMERS if not got.shape else BOTH
        yield Finding(name, "scale-rank", str(tuple(got.shape)), str(shape), concerned)


def _exact(need: Part, args: Args, part: str) -> tuple[int, ...]:
    """What loaders register, which do not take a tensor with other dimensions of 1."""
    return (1,) if need.loose and args.strategy == "tensor" and part != "weight" else need.shape


def _extra(module: Module, part: str, why: str) -> Finding:
    return Finding(module.tensor(part), "unexpected", "a tensor", f"none: {why}", VLLM)


def _activations(survey: Survey) -> Iterator[Finding]:
    """Scales of activations, where the config asks for none, or for some that are not there."""
    for module in survey.modules.values():
        yield from _asked_for(module)
    groups = (survey.table.get("config_groups") or {}).values()
    asked = any(group.get(key) for group in groups for key in ("input_activations", "output_activations"))
    if survey.table and not asked:
        for module in survey.modules.values():
            for part in module.parts.keys() & set(ACTIVATIONS):
                yield _extra(module, part, "the config quantizes no activations")
    if survey.table and not (asked or survey.table.get("kv_cache_scheme")):
        for name in survey.entries:
            if name.rpartition(".")[2] in CACHE:
                yield Finding(name, "unexpected", "a tensor", "none: the config quantizes no cache", VLLM)


def _asked_for(module: Module) -> Iterator[Finding]:
    """What the scheme of a module's input or output keeps in files, since nothing finds it as the model runs."""
    for role, args in (("input", module.inputs), ("output", module.outputs)):
        for part in (part for part in kept(args, role) if part not in module.parts):
            want = f"what its {role}s are rounded by: its scheme is not dynamic"
            yield Finding(module.tensor(part), "missing", "no tensor", want, EVERY)


def value_findings(survey: Survey, weights: bool) -> Iterator[Finding]:
    """Scales, and other floats, that are not numbers; one tensor in memory at a time.

    Args:
        survey: a checkpoint.
        weights: whether floats other than scales are read too, codes that are floats among them.
    """
    for name, entry in survey.entries.items():
        if name.endswith("_scale"):
            yield from _scales(name, dense(entry))
        elif weights and entry.dtype.is_floating_point and name not in survey.buffers:
            yield from _not_finite(name, dense(entry))


def _scales(name: str, t: Tensor) -> Iterator[Finding]:
    if t.dtype == torch.uint8:
        if bool((t == 255).any()):
            yield Finding(name, "values", "exponent byte 255", "at most 254", EVERY)
        return
    yield from _not_finite(name, t)
    wide = t.float()
    if bool((wide < 0).any()):
        yield Finding(name, "values", f"{float(wide.min()):g}", "scales above 0", EVERY)
    if bool((wide == 0).any()):
        weight = name.endswith("weight_scale")  # the others are divided by
        yield Finding(name, "zero-scale", "0", "scales above 0", EVERY, **({"severity": NOTE} if weight else {}))


def _not_finite(name: str, t: Tensor) -> Iterator[Finding]:
    if all(finite(rows) for (rows,) in few_rows(t)):
        return
    nan = "NaN, a code of 0x7f or 0xff" if t.dtype == torch.float8_e4m3fn else "NaN"
    for what, bad in ((nan, t.float().isnan()), ("infinity", t.float().isinf())):
        if bool(bad.any()):
            yield Finding(name, "values", what, "finite values", EVERY)
