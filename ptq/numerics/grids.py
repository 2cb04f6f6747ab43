"""The number grids a weight can be rounded to: what values exist, how codes stand for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ptq.errors import BadInput


class Grid(Protocol):
    """A finite set of numbers closed under rounding.

    `round` maps any float tensor to the nearest grid value, still as a float and ties to even; values outside are
    clamped. `encode` stores such values as codes, `decode` gives them back, exactly.
    """

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


@dataclass(frozen=True)
class Int:
    """Signed integers of 2 to 8 bits: -2^(b-1) .. 2^(b-1) - 1.

    >>> Int(4).round(torch.tensor([-9.0, 0.5, 1.5, 2.6]))
    tensor([-8.,  0.,  2.,  3.])
    """

    bits: int

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise BadInput(f"Int grid: got {self.bits} bits, expected 2 to 8")

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
