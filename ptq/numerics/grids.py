"""The number grids a weight can be rounded to: what values exist, how codes stand for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.numerics.chunks import by_rows


class Grid(Protocol):
    """A finite set of numbers closed under rounding.

    `round` maps any float tensor to the nearest grid value, still as a float and ties to even; values outside are
    clamped. `encode` stores such values as codes, `decode` gives them back, exactly. `kind` is int or float.
    """

    @property
    def kind(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def round(self, t: Tensor) -> Tensor: ...
    def encode(self, t: Tensor) -> Tensor: ...
    def decode(self, codes: Tensor) -> Tensor: ...


class ScaleGrid(Protocol):
    """Numbers that scales are stored as."""

    @property
    def bits(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def encode(self, t: Tensor) -> Tensor: ...
    def decode(self, codes: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Int:
    """Signed integers of 1 to 8 bits: -2^(b-1) .. 2^(b-1) - 1.

    >>> Int(4).round(torch.tensor([-9.0, 0.5, 1.5, 2.6]))
    tensor([-8.,  0.,  2.,  3.])
    """

    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise BadInput(f"Int grid: got {self.bits} bits, expected 1 to 8")

    def __str__(self) -> str:
        return f"int{self.bits}"

    @property
    def kind(self) -> str:
        return "int"

    @property
    def low(self) -> float:
        return -(2.0 ** (self.bits - 1))

    @property
    def high(self) -> float:
        return 2.0 ** (self.bits - 1) - 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8

    def round(self, t: Tensor) -> Tensor:
        return t.round().clamp(self.low, self.high)

    def encode(self, t: Tensor) -> Tensor:
        return t.to(torch.int8)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32)


@dataclass(frozen=True)
class Float8:
    """float8 e4m3fn: 4 exponent bits, 3 mantissa bits, largest value 448, no infinity.

    >>> Float8().round(torch.tensor([1000.0, 17.0, 0.3])).tolist()
    [448.0, 16.0, 0.3125]
    """

    def __str__(self) -> str:
        return "float8_e4m3fn"

    @property
    def kind(self) -> str:
        return "float"

    @property
    def bits(self) -> int:
        return 8

    @property
    def low(self) -> float:
        return -448.0

    @property
    def high(self) -> float:
        return 448.0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def round(self, t: Tensor) -> Tensor:
        # The cast rounds to nearest even but does not saturate, so clamp first.
        return t.clamp(self.low, self.high).to(torch.float8_e4m3fn).to(t.dtype)

    def encode(self, t: Tensor) -> Tensor:
        return t.to(torch.float8_e4m3fn)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32)


@dataclass(frozen=True)
class Minifloat:
    """Floats of a sign, two exponent bits (bias 1) and some mantissa bits, without infinity or NaN.

    With one mantissa bit this is e2m1, the elements of NVFP4 and MXFP4; with three e2m3, those of MXFP6. A code is the
    bits of the number, sign first. Below 2 neighbours are `2^-mantissa` apart, from 2 on twice and from 4 on four times
    as far.

    >>> Minifloat(1).round(torch.tensor([0.25, 0.75, 2.6, -5.1, 9.0])).tolist()
    [0.0, 1.0, 3.0, -6.0, 6.0]
    >>> Minifloat(1).encode(torch.tensor([0.0, 0.5, -6.0])).tolist()
    [0, 1, 15]
    """

    mantissa: int

    def __str__(self) -> str:
        return f"float{self.bits}_e2m{self.mantissa}"

    @property
    def kind(self) -> str:
        return "float"

    @property
    def bits(self) -> int:
        return 3 + self.mantissa

    @property
    def low(self) -> float:
        return -self.high

    @property
    def high(self) -> float:
        return 8.0 - 4 * 2.0**-self.mantissa

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def round(self, t: Tensor) -> Tensor:
        size = t.abs().clamp(max=self.high)
        step = (1 + (size >= 2).to(t.dtype) + 2 * (size >= 4).to(t.dtype)) * 2.0**-self.mantissa
        return ((size / step).round() * step).copysign(t)  # what rounds to 0 keeps its sign

    def encode(self, t: Tensor) -> Tensor:
        return by_rows(self._codes, t)

    def _codes(self, t: Tensor) -> Tensor:
        size = t.abs()
        halves = size.clamp(max=2) + (size - 2).clamp(0, 2) / 2 + (size - 4).clamp(min=0) / 4
        code = (halves * 2**self.mantissa).to(torch.uint8)
        return code + t.signbit().to(torch.uint8) * (4 << self.mantissa)

    def decode(self, codes: Tensor) -> Tensor:
        index = torch.arange(4 << self.mantissa, device=codes.device)
        exponent = ((index >> self.mantissa) - 1).clamp(min=0)
        size = torch.ldexp((index - (exponent << self.mantissa)).to(torch.float32), exponent - self.mantissa)
        return torch.cat([size, -size]).index_select(0, codes.flatten().int()).view(codes.shape)


@dataclass(frozen=True)
class PowersOfTwo:
    """e8m0, the scales of the MX formats: `2^(code - 127)`. Code 255 stands for no finite number and is never made.

    >>> PowersOfTwo().encode(torch.tensor([0.5, 1.0])).tolist()
    [126, 127]
    """

    def __str__(self) -> str:
        return "float8_e8m0"

    @property
    def bits(self) -> int:
        return 8

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def encode(self, t: Tensor) -> Tensor:
        return (torch.frexp(t).exponent + 126).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        ones = torch.ones_like(codes, dtype=torch.float32)
        return torch.where(codes == 255, torch.inf, torch.ldexp(ones, codes.to(torch.int32) - 127))
