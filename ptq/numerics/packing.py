"""Codes of 1 to 8 bits as a bit stream in 32-bit words, the layout that loaders read.

A row is one little-endian stream: code c takes bits `[c b, (c + 1) b)`, bit 0 of word 0 first, so codes may straddle
words. A signed code q is stored as `q + 2^(b-1)`; unused trailing bits are 0. Where b divides 8 the codes of a byte are
joined in a byte; else eight codes are b whole bytes, joined in a 64-bit integer whose first b bytes are kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Int8, Int32
from torch import Tensor


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
    count, (dtype, each, size) = codes.shape[-1], _unit(bits)
    # Modulo 256 an offset of 128 is the same for int8 and uint8, so b = 8 needs no wider type here.
    unsigned = F.pad((codes + (1 << (bits - 1))).view(torch.uint8), (0, -count % each)).unflatten(-1, (-1, each))
    joined = torch.zeros(unsigned.shape[:-1], dtype=dtype, device=codes.device)
    for j in range(each):
        joined |= unsigned[..., j].to(dtype) << (j * bits)
    stream = joined.unsqueeze(-1).view(torch.uint8)[..., :size].flatten(-2)
    need = 4 * -(-count * bits // 32)
    return _dense(F.pad(stream, (0, need - stream.shape[-1]))).view(torch.int32)


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
        dtype, each, size = _unit(bits)
        stream = _dense(words).view(torch.uint8)
        stream = F.pad(stream, (0, size * -(-count // each) - stream.shape[-1])).unflatten(-1, (-1, size))
        joined = _dense(F.pad(stream, (0, dtype.itemsize - size))).view(dtype).squeeze(-1)
    else:
        joined, each = words, 32 // bits
    mask, offset = (1 << bits) - 1, 1 << (bits - 1)
    codes = torch.stack([(joined >> (j * bits)).bitwise_and_(mask).to(torch.int8) for j in range(each)], dim=-1)
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


def _unit(bits: int) -> tuple[torch.dtype, int, int]:
    """The integer that codes are joined in, how many codes, and how many of its bytes they fill."""
    return (torch.uint8, 8 // bits, 1) if 8 % bits == 0 else (torch.int64, 8, bits)


def _dense(t: Tensor) -> Tensor:
    """A copy that can be viewed as another type: `contiguous` leaves odd strides where a dimension is 1."""
    return t.clone(memory_format=torch.contiguous_format)
