"""Frozen weights: the floats that codes stand for, with scales and zero points beside them.

    weight float [out, in], weight_scale and weight_global_scale as in the format of the scheme,
    weight_zero_point int8 of the scale's shape

Codes are told by the floats again, each exactly, or the tensors do not belong together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.io.layouts import FLOATS, LAYOUTS, Part, default_format, encoded, expected, grid_of, scales_of, tile_of
from ptq.io.quantization_config import Args
from ptq.numerics.fits import quantize
from ptq.numerics.leaves import Quantized, dense


def frozen(leaf: Quantized, name: str) -> tuple[Args, dict[str, Tensor]]:
    """A weight as the float values that its codes stand for, its scales and zero points beside it.

    Raises:
        BadInput: no format has a place for its scales.
    """
    args, tensors = encoded(leaf, default_format(leaf), name)
    kept = {part: t for part, t in tensors.items() if part in ("weight_scale", "weight_global_scale")}
    zero = {} if leaf.zero is None else {"weight_zero_point": leaf.zero}
    return args._replace(format="dense"), {"weight": dense(leaf), **kept, **zero}


def thawed(tensors: Mapping[str, Tensor], args: Args, name: str) -> Quantized:
    """The inverse.

    Args:
        tensors: by local name.
        args: the scheme, in the format that would hold its codes.
        name: the file and the tensor, for the error.

    Raises:
        BadInput: a value is none that a code stands for.

    >>> args = Args("int-quantized", 4, "int", True, "tensor")
    >>> thawed({"weight": torch.tensor([[1.5, -4.0]]), "weight_scale": torch.tensor([0.5])}, args, "weight").codes
    tensor([[ 3, -8]], dtype=torch.int8)
    """
    weight, zero = tensors["weight"], tensors.get("weight_zero_point")
    scale = scales_of(tensors, args, weight.shape)
    leaf = quantize(weight, scale, zero if zero is None else zero.reshape(scale.shape), grid_of(args), tile_of(args))
    wrong = dense(leaf) != weight
    for step in (1, -1) if args.kind == "int" else ():
        # Codes may lie closer than floats do: then the nearest one need not be what rounds to the float.
        codes = (leaf.codes.short() + step * wrong).clamp(leaf.grid.low, leaf.grid.high).to(leaf.codes.dtype)
        found = replace(leaf, codes=torch.where(dense(replace(leaf, codes=codes)) == weight, codes, leaf.codes))
        leaf, wrong = found, dense(found) != weight
    if bool(wrong.any()):
        got = f"{int(wrong.sum())} of {wrong.numel()} values are no codes of {leaf.grid} times their scales"
        raise BadInput(f"{name}: {got}; remove the scales, and its scheme from quantization_config")
    return leaf


def held(parts: Mapping[str, Any], given: Args, packed: bool) -> Args | None:
    """The scheme of a frozen weight in the format that would hold its codes; None: these tensors are no frozen weight.

    Args:
        parts: local name -> what has dtype and shape.
        given: what the config says of the weight.
        packed: whether it says that codes are stored.
    """
    raw, scale = parts.get("weight"), parts.get("weight_scale")
    if raw is None or scale is None or raw.dtype not in FLOATS or "weight_g_idx" in parts:
        return None
    if packed and given.format != "dense":
        return None
    for form, layout in LAYOUTS.items():
        kept = FLOATS if layout.scales is None else (layout.scales.dtype,)
        if grid_of(given) in layout.grids and scale.dtype in kept:
            return given._replace(format=form)
    return None


def needed(args: Args, shape: torch.Size) -> dict[str, Part]:
    """The tensors of a frozen weight, by local name.

    Raises:
        BadInput: the scheme does not fit the weight.
    """
    tensors = expected(args, shape)
    scales = {part: tensors[part] for part in ("weight_scale", "weight_global_scale") if part in tensors}
    zero = tensors["weight_scale"]._replace(dtypes=[grid_of(args).dtype])
    return {"weight": Part(tuple(shape), FLOATS), **scales, **({} if args.symmetric else {"weight_zero_point": zero})}
