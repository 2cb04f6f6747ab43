"""Schemes told by tensors alone, where a config is silent: by their names, types and shapes, always alike.

What these leave open is not guessed at, but for one thing: that blocks are square and their sides powers of two, as of
all known files. No more than one such size gives a scale's shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ptq.io.quantization_config import Args

SQUARES = tuple(1 << i for i in range(4, 12))
"""sides of blocks"""


def inferred(parts: Mapping[str, Any]) -> Args | None:
    """The scheme of a weight's tensors, or None where they leave a choice, or are no compressed weight.

    Args:
        parts: local name -> what has dtype and shape; a packed weight's `weight_shape` is a size already.
    """
    scale = parts.get("weight_scale")
    raw = parts.get("weight_packed", parts.get("weight"))
    if scale is None or raw is None:
        return None
    symmetric = "weight_zero_point" not in parts
    match raw.dtype:
        case torch.uint8:
            return _small_floats(parts, raw, scale)
        case torch.int32:
            return _words(parts, raw, scale, symmetric)
        case torch.int8:
            args = Args("int-quantized", 8, "int", symmetric, "tensor")
        case torch.float8_e4m3fn if scale.dtype == torch.uint8:
            return Args("mxfp8-quantized", 8, "float", True, "group", 32, scale_dtype="torch.uint8")
        case torch.float8_e4m3fn:
            args = Args("float-quantized", 8, "float", True, "tensor")
        case _:
            return None
    return by_shape(args, raw.shape, scale.shape)


def by_shape(args: Args, shape: Sequence[int], scales: Sequence[int], squares: Sequence[int] = SQUARES) -> Args | None:
    """The scheme with what is told by how many scales a weight has, or None where that leaves a choice.

    Args:
        args: grid and format.
        shape: of the weight, `[*e, out, in]`.
        scales: their shape; old writers left out dimensions of 1.
        squares: what sides blocks may have.

    >>> args = Args("float-quantized", 8, "float", True, "tensor")
    >>> by_shape(args, (160, 320), (2, 3)).block, by_shape(args, (160, 320), (2, 4))
    ((128, 128), None)
    """
    (rows, columns), (a, b) = shape[-2:], (*scales, *[1] * len(shape))[: len(shape)][-2:]
    if (a, b) == (1, 1) and rows > 1:
        return args
    if (a, b) == (rows, 1):
        return args._replace(strategy="channel")
    if a == rows and b > 0 and columns % b == 0:
        return args._replace(strategy="group", group_size=columns // b)
    blocks = [(side, side) for side in squares]
    if len(shape) > 2 and rows % 2 == 0:  # a stack of two projections, each with a scale of its own
        blocks.append((rows // 2, columns))
    fitting = {
        (min(high, rows), min(wide, columns)): (high, wide)
        for high, wide in blocks
        if (-(-rows // high), -(-columns // wide)) == (a, b)
    }
    return args._replace(strategy="block", block=fitting.popitem()[1]) if len(fitting) == 1 else None


def _words(parts: Mapping[str, Any], raw: Any, scale: Any, symmetric: bool) -> Args | None:
    """Of packed integers a width is told where no other gives as many words."""
    shape = parts.get("weight_shape")
    widths = [bits for bits in range(1, 9) if shape and -(-shape[-1] * bits // 32) == raw.shape[-1]]
    if len(widths) != 1:
        return None
    return by_shape(Args("pack-quantized", widths[0], "int", symmetric, "tensor"), shape, scale.shape)  # type: ignore[arg-type]


def _small_floats(parts: Mapping[str, Any], raw: Any, scale: Any) -> Args | None:
    if "weight_global_scale" in parts:
        return Args("nvfp4-pack-quantized", 4, "float", True, "tensor_group", 16, None, "torch.float8_e4m3fn")
    bits, rest = divmod(raw.shape[-1] * 8, max(scale.shape[-1] * 32, 1)) if scale.shape else (0, 0)
    form = {4: "mxfp4-pack-quantized", 6: "mxfp6-pack-quantized"}.get(bits)
    known = form and not rest and scale.dtype == torch.uint8
    return Args(form, bits, "float", True, "group", 32, None, "torch.uint8") if known else None
