"""Codes of 1 to 8 bits as a bit stream in 32-bit words, the layout that loaders read.

A row is one little-endian stream: code c takes bits `[c b, (c + 1) b)`, bit 0 of word 0 first, so codes may straddle
words. A signed code q is stored as `q + 2^(b-1)`; unused trailing bits are 0.

Eight codes are b whole bytes. They are read as one 64-bit integer whose 8-bit lanes hold a code each; three times two
neighbouring lanes are joined, until the integer's first b bytes are the stream. Unpacking goes the other way. Where b
divides 8 the codes of a single byte do, in a smaller integer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Int8, Int32, UInt8
from torch import Tensor

from ptq.numerics.chunks import by_rows

_LANES = (8, 16, 32)
"""bits of the lanes that are joined in pairs"""
_UNITS = {1: torch.int64, 2: torch.int32, 4: torch.int16}
"""integers with as many bytes as a byte of the stream has codes: where that comes out even, no more need be joined"""


def pack(codes: Int8[Tensor, "*rows count"], bits: int) -> Int32[Tensor, "*rows words"]:
    """Packs signed codes along the last dimension.

    Args:
        codes: `[*rows, count]`, in `-2^(b-1) .. 2^(b-1) - 1`.
        bits: b, 1 to 8.

    Returns:
        `[*rows, ceil(count b / 32)]`.

    >>> f"{pack(torch.tensor([[-7, -3, -3, -8, 0, -3, -5, -7]], dtype=torch.int8), 4).item():x}"
    '13580551'
    """
    need = 4 * -(-codes.shape[-1] * bits // 32)

    def words(rows: Tensor) -> Tensor:
        stream = _joined(rows, bits)
        return _dense(F.pad(stream, (0, need - stream.shape[-1]))).view(torch.int32)

    return by_rows(words, codes)


def pack_bytes(codes: UInt8[Tensor, "*rows count"], bits: int) -> UInt8[Tensor, "*rows bytes"]:
    """Packs unsigned codes, such as those of small floats, along the last dimension: the same stream, as bytes.

    >>> pack_bytes(torch.tensor([[2, 6, 5, 0]], dtype=torch.uint8), 4)
    tensor([[98,  5]], dtype=torch.uint8)
    """
    need = -(-codes.shape[-1] * bits // 8)
    return by_rows(lambda rows: _joined(rows.view(torch.int8), bits, signed=False)[..., :need], codes)


def unpack_bytes(data: UInt8[Tensor, "*rows bytes"], bits: int, count: int) -> UInt8[Tensor, "*rows count"]:
    """The inverse of `pack_bytes`."""
    return by_rows(lambda rows: _parted(rows, bits, count).view(torch.uint8), data)


def unpack(
    words: Int32[Tensor, "*rows words"], bits: int, count: int, straddle: bool = True
) -> Int8[Tensor, "*rows count"]:
    """The inverse of `pack`.

    Args:
        words: `[*rows, words]`.
        bits: b, 1 to 8.
        count: codes in a row, which the words alone do not tell.
        straddle: False for the older layout in which a code never crosses a word (`32 // b` codes in each).

    >>> unpack(pack(torch.tensor([[3, -4, 0]], dtype=torch.int8), 3), 3, 3)
    tensor([[ 3, -4,  0]], dtype=torch.int8)
    """
    if straddle:
        return by_rows(lambda rows: _parted(rows, bits, count).sub_(1 << (bits - 1)), words)
    each, mask, offset = 32 // bits, (1 << bits) - 1, 1 << (bits - 1)
    codes = torch.stack([(words >> (j * bits)).bitwise_and_(mask).to(torch.int8) for j in range(each)], dim=-1)
    return codes.flatten(-2)[..., :count].contiguous().sub_(offset)


def pack_down(zeros: Int8[Tensor, "*e out groups"], bits: int) -> Int32[Tensor, "*e words groups"]:
    """Packs zero points, which loaders keep as streams along the outputs: one for each group of inputs.

    >>> [f"{word & 0xFFFFFFFF:08x}" for word in pack_down(
    ...     torch.tensor([-2, 0, -1, -1, -2, -3, -5, -1, -5, 1], dtype=torch.int8)[:, None], 4).flatten().tolist()]
    ['73567786', '00000093']
    """
    return pack(zeros.mT, bits).mT.contiguous()


def unpack_down(
    words: Int32[Tensor, "*e words groups"], bits: int, count: int, straddle: bool = True
) -> Int8[Tensor, "*e out groups"]:
    """The inverse of `pack_down`; `count` is the number of outputs."""
    return unpack(words.mT.contiguous(), bits, count, straddle).mT.contiguous()


def _joined(codes: Tensor, bits: int, signed: bool = True) -> Tensor:
    """The stream's bytes."""
    unit, offset = _UNITS.get(bits, torch.int64), 1 << (bits - 1) if signed else 0
    lanes = _dense(F.pad(codes, (0, -codes.shape[-1] % unit.itemsize), value=-offset)).view(unit)
    lanes &= _repeated((1 << bits) - 1, 8, unit)
    lanes ^= _repeated(offset, 8, unit)  # modulo 2^b the same as adding
    for lane, field in _steps(bits, unit):
        upper = (lanes >> (lane - field)).bitwise_and_(_repeated(((1 << field) - 1) << field, 2 * lane, unit))
        lanes.bitwise_and_(_repeated((1 << field) - 1, 2 * lane, unit)).bitwise_or_(upper)
    if bits in _UNITS:
        return lanes.to(torch.uint8)
    return lanes.view(torch.uint8).unflatten(-1, (-1, 8))[..., :bits].flatten(-2)


def _parted(words: Tensor, bits: int, count: int) -> Tensor:
    """The codes of streams, without a sign."""
    unit, stream = _UNITS.get(bits, torch.int64), _dense(words).view(torch.uint8)
    need = -(-count // unit.itemsize) * (unit.itemsize * bits // 8)
    if stream.shape[-1] != need:
        stream = _dense(F.pad(stream, (0, need - stream.shape[-1])))
    if bits in _UNITS:
        lanes = stream.to(unit)
    else:
        lanes = _dense(F.pad(stream.unflatten(-1, (-1, bits)), (0, 8 - bits))).view(unit).squeeze(-1)
    for lane, field in reversed(_steps(bits, unit)):
        upper = (lanes << (lane - field)).bitwise_and_(_repeated(((1 << field) - 1) << lane, 2 * lane, unit))
        lanes.bitwise_and_(_repeated((1 << field) - 1, 2 * lane, unit)).bitwise_or_(upper)
    return lanes.view(torch.int8)[..., :count].contiguous()


def _steps(bits: int, unit: torch.dtype) -> list[tuple[int, int]]:
    """Widths of the lanes that are joined, and of what is used of each."""
    return [(lane, lane // 8 * bits) for lane in _LANES if lane < 8 * unit.itemsize and bits < 8]


def _repeated(field: int, lane: int, unit: torch.dtype) -> int:
    """A signed integer with the same bits in each of its lanes."""
    size = 8 * unit.itemsize
    whole = sum(field << at for at in range(0, size, lane))
    return whole - (1 << size) if whole >> (size - 1) else whole


def _dense(t: Tensor) -> Tensor:
    """A copy that can be viewed as another type: `contiguous` leaves odd strides where a dimension is 1."""
    return t.clone(memory_format=torch.contiguous_format)
