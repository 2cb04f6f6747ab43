"""Weights in the compressed-tensors formats: a leaf against the named tensors that stand for it in a file.

    format                weight                             scale                            other
    int-quantized         weight int8 [out, in]              weight_scale float               weight_zero_point, alike
    float-quantized       weight float8 [out, in]            weight_scale float
    naive-quantized       either of the two
    pack-quantized        weight_packed int32 [out, words]   weight_scale float               weight_shape int64 [2]
                                                             weight_zero_point int32 [words, groups]
    nvfp4-pack-quantized  weight_packed uint8 [out, in / 2]  weight_scale float8 [out, in / 16]
                                                             weight_global_scale float32 [1], a divisor
    mxfp4-pack-quantized  weight_packed uint8 [out, in / 2]  weight_scale uint8 [out, in / 32], exponents
    mxfp6-pack-quantized  weight_packed uint8 [out, 3 in / 4], alike
    mxfp8-quantized       weight float8 [out, in], alike

Float scales are `[1]` for one of a tensor, `[out, 1]` for channels, `[out, groups]`, or a matrix of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.io.quantization_config import Args
from ptq.numerics.grids import Float8, Grid, Int, Minifloat, PowersOfTwo, ScaleGrid
from ptq.numerics.leaves import Quantized, Scales
from ptq.numerics.packing import pack, pack_bytes, pack_down, unpack, unpack_bytes, unpack_down
from ptq.numerics.tiles import Tile

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTS = tuple(Int(bits) for bits in range(1, 9))
FP4, FP6 = Minifloat(1), Minifloat(3)
SCALE_GRIDS: Mapping[str | None, ScaleGrid] = {"torch.float8_e4m3fn": Float8(), "torch.uint8": PowersOfTwo()}
"""what a config calls the grids that scales are rounded to"""


class Layout(NamedTuple):
    """How a format keeps codes and scales."""

    grids: Sequence[Grid]
    packing: Literal["", "words", "bytes"] = ""
    scales: ScaleGrid | None = None
    group_size: int | None = None
    """the only one, where there is only one"""
    blocks: bool = False

    @property
    def weight(self) -> str:
        """The local name of the tensor with the codes."""
        return "weight_packed" if self.packing else "weight"


LAYOUTS: Mapping[str, Layout] = {
    "pack-quantized": Layout(INTS, "words"),
    "int-quantized": Layout(INTS),
    "float-quantized": Layout([Float8()], blocks=True),
    "naive-quantized": Layout([*INTS, Float8()], blocks=True),
    "nvfp4-pack-quantized": Layout([FP4], "bytes", Float8(), 16),
    "mxfp4-pack-quantized": Layout([FP4], "bytes", PowersOfTwo(), 32),
    "mxfp6-pack-quantized": Layout([FP6], "bytes", PowersOfTwo(), 32),
    "mxfp8-quantized": Layout([Float8()], "", PowersOfTwo(), 32),
}
"""The formats of quantized weights. What one leaf may have several of, the first is what engines have kernels for."""


def arguments(leaf: Quantized, form: str) -> Args | None:
    """The scheme of a leaf in a format, or None where the format cannot hold it."""
    layout = LAYOUTS.get(form)
    if layout is None or leaf.grid not in layout.grids or _scale_grid(leaf) != layout.scales:
        return None
    args = Args(form, leaf.grid.bits, leaf.grid.kind, leaf.zero is None, "tensor")
    if layout.scales is not None:
        return _with_scales(leaf, layout, args)
    if leaf.tile is not None:
        return _with_tile(leaf.tile, leaf.shape[-1], layout, args)
    (out, inputs), (a, b) = leaf.shape[-2:], leaf.scale.shape[-2:]
    if (a, b) == (1, 1) and not (layout.packing or out == 1):
        return args
    if (a, b) in ((out, 1), (1, 1)):
        return args._replace(strategy="channel")
    return args._replace(strategy="group", group_size=inputs // b) if a == out and inputs % b == 0 else None


def _with_tile(tile: Tile, columns: int, layout: Layout, args: Args) -> Args | None:
    high, wide = tile
    if high == 1 and (columns % wide == 0 or columns < wide):
        return args._replace(strategy="group", group_size=wide)
    return args._replace(strategy="block", block=tile) if layout.blocks else None


def _with_scales(leaf: Quantized, layout: Layout, args: Args) -> Args | None:
    (*_, out, inputs), (*_, a, b), divisor = leaf.shape, leaf.scale.shape, getattr(leaf.scale, "divisor", None)
    if (a, b * (layout.group_size or 0)) != (out, inputs) or (divisor is not None and divisor.shape[-2] > 1):
        return None  # other groups, or rows that were divided by different numbers
    divided = layout.scales == Float8()
    strategy, dtype = ("tensor_group", "torch.float8_e4m3fn") if divided else ("group", "torch.uint8")
    return args._replace(strategy=strategy, group_size=layout.group_size, scale_dtype=dtype)


def _scale_grid(leaf: Quantized) -> ScaleGrid | None:
    return leaf.scale.grid if isinstance(leaf.scale, Scales) else None


def default_format(leaf: Quantized) -> str:
    """The format that serving engines have kernels for."""
    grid, scales = leaf.grid, _scale_grid(leaf)
    return next((form for form, layout in LAYOUTS.items() if grid in layout.grids and layout.scales == scales), "dense")


def encoded(leaf: Quantized, form: str, name: str) -> tuple[Args, dict[str, Tensor]]:
    """The tensors that stand for a weight in a format, by local name, and the scheme that says how to read them.

    Raises:
        BadInput: the format cannot hold the leaf.
    """
    args = arguments(leaf, form)
    if args is None:
        raise BadInput(f"{name}: {described(leaf)} cannot be stored as {form}; choose another format, or dense")
    tensors = _codes(leaf, args) | _scales(leaf, args)
    if leaf.zero is not None:
        zero = _tiles(leaf.zero, leaf, args)
        packed = LAYOUTS[form].packing == "words" and args.strategy != "tensor"
        tensors["weight_zero_point"] = pack_down(zero, args.bits) if packed else zero
    return args, tensors


def described(leaf: Quantized) -> str:
    """Grid and scales, for errors."""
    return f"{leaf.grid} with scales {tuple(leaf.scale.shape)} for {tuple(leaf.shape)}"


def _codes(leaf: Quantized, args: Args) -> dict[str, Tensor]:
    match LAYOUTS[str(args.format)].packing:
        case "words":
            return {"weight_packed": pack(leaf.codes, args.bits), "weight_shape": torch.tensor(leaf.shape)}
        case "bytes":
            return {"weight_packed": pack_bytes(leaf.codes, args.bits)}
        case _:
            return {"weight": leaf.codes}


def _scales(leaf: Quantized, args: Args) -> dict[str, Tensor]:
    if not isinstance(leaf.scale, Scales):
        return {"weight_scale": _tiles(leaf.scale, leaf, args)}
    found = {"weight_scale": leaf.scale.codes}
    if args.strategy == "tensor_group":
        divisor = torch.ones(1) if leaf.scale.divisor is None else leaf.scale.divisor.reshape(-1)
        found["weight_global_scale"] = divisor
    return found


def _tiles(t: Tensor, leaf: Quantized, args: Args) -> Tensor:
    if args.strategy == "tensor":
        return t.reshape(-1)
    if args.strategy == "channel":
        # One scale for the tensor is repeated: no serving engine reads packed weights with a single scale.
        return t.expand(*t.shape[:-2], leaf.shape[-2], 1)
    return t


def decoded(
    tensors: Mapping[str, Tensor], args: Args, shape: torch.Size, dtype: torch.dtype, straddle: bool = True
) -> Quantized:
    """The inverse of `encoded`.

    Args:
        tensors: by local name.
        args: the scheme.
        shape: `[*e, out, in]`.
        dtype: what the weight decodes to.
        straddle: whether packed codes may cross words, which those of old writers do not.
    """
    layout, grid = LAYOUTS[str(args.format)], grid_of(args)
    raw = tensors[layout.weight]
    if layout.packing == "words":
        codes = unpack(raw, args.bits, shape[-1], straddle)
    else:
        codes = unpack_bytes(raw, args.bits, shape[-1]) if layout.packing else raw
    scale, zero = scales_of(tensors, args, shape), _zeros(tensors, args, shape, straddle)
    return Quantized(codes, scale, zero, grid, dtype, tile_of(args))


def scales_of(tensors: Mapping[str, Tensor], args: Args, shape: torch.Size) -> Tensor | Scales:
    """The scales of a weight, from its tensors by local name."""
    grid, scale = LAYOUTS[str(args.format)].scales, tensors["weight_scale"].reshape(tiles_of(args, shape))
    if grid is None:
        return scale
    divisor = tensors.get("weight_global_scale")
    return Scales(scale, None if divisor is None else divisor.float().reshape(*shape[:-2], 1, 1), grid)


def tile_of(args: Args) -> Tile | None:
    """Rows and columns of a tile, where the scheme says them."""
    return args.block or (None if args.group_size is None else (1, args.group_size))


def _zeros(tensors: Mapping[str, Tensor], args: Args, shape: torch.Size, straddle: bool) -> Tensor | None:
    zero = tensors.get("weight_zero_point")
    if args.symmetric or zero is None:
        return None
    if LAYOUTS[str(args.format)].packing == "words" and args.strategy != "tensor":
        return unpack_down(zero, args.bits, shape[-2], straddle)
    return zero.reshape(tiles_of(args, shape))


def grid_of(args: Args) -> Grid:
    """The grid of a scheme's codes.

    >>> grid_of(Args(None, 6, "float", True, "group", 32))
    Minifloat(mantissa=3)
    """
    return Int(args.bits) if args.kind == "int" else {8: Float8(), 6: FP6, 4: FP4}[args.bits]


def tiles_of(args: Args, shape: torch.Size) -> tuple[int, ...]:
    """The shape of a weight's scales.

    Raises:
        BadInput: groups do not divide the weight's columns.
    """
    *e, rows, columns = shape
    if args.block is not None:
        return (*e, -(-rows // args.block[0]), -(-columns // args.block[1]))
    if args.group_size is not None and args.strategy in ("group", "tensor_group"):
        if columns % args.group_size and columns > args.group_size:
            raise BadInput(f"groups of {args.group_size} do not divide {columns} columns")
        return (*e, rows, -(-columns // args.group_size))
    return (*e, 1, 1) if args.strategy == "tensor" else (*e, rows, 1)


class Part(NamedTuple):
    """What a tensor of a file must be."""

    shape: tuple[int, ...]
    dtypes: Sequence[torch.dtype]
    loose: bool = False
    """whether only the number of elements counts, dimensions of 1 aside"""


def expected(args: Args, shape: torch.Size, straddle: bool = True) -> dict[str, Part]:
    """The tensors of a weight in a scheme, by local name.

    Raises:
        BadInput: the scheme does not fit the weight.
    """
    layout, tiles, (*e, rows, columns) = LAYOUTS[str(args.format)], tiles_of(args, shape), shape
    each = 32 // args.bits
    words = (lambda n: -(-n * args.bits // 32)) if straddle else (lambda n: -(-n // each))
    codes = {
        "": Part(tuple(shape), [grid_of(args).dtype]),
        "words": Part((*e, rows, words(columns)), [torch.int32]),
        "bytes": Part((*e, rows, -(-columns * args.bits // 8)), [torch.uint8]),
    }[layout.packing]
    scale = Part(tiles, FLOATS if layout.scales is None else [layout.scales.dtype], loose=layout.scales is None)
    found = {layout.weight: codes, "weight_scale": scale}
    if layout.packing == "words":
        found["weight_shape"] = Part((len(shape),), [torch.int64, torch.int32])
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = Part((math.prod(e),), FLOATS, loose=True)
    if not args.symmetric and layout.packing == "words" and args.strategy != "tensor":
        found["weight_zero_point"] = Part((*e, words(rows), tiles[-1]), [torch.int32])
    elif not args.symmetric:
        found["weight_zero_point"] = Part(tiles, [grid_of(args).dtype], loose=True)
    return found


def fits(part: Part, shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape may be that part: old writers left out dimensions of 1."""
    if tuple(shape) == part.shape:
        return True
    bare = [n for n in shape if n != 1] == [n for n in part.shape if n != 1]
    return part.loose and bare
