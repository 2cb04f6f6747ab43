"""Calibration statistics: commutative monoids over what flows into a weight.

A statistic holds sums, never means, so that batching, sharding, resuming and all-reduce are one operation, `merge`.
Each field declares how it reduces; merging (and reducing over ranks) follows from that declaration alone. Everything
is accumulated in float32, or in float64 where the inputs are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, fields, replace
from enum import Enum
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ptq._tree import node
from ptq.errors import BadInput
from ptq.types import Diagonal, GramMatrix, Rows


class Reduce(Enum):
    """How a field of two statistics becomes that of their union; the names are torch.distributed's."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"

    @property
    def merge(self) -> Callable[[Tensor, Tensor], Tensor]:
        return {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}[self.value]


def reduces(how: Reduce, features: int = 0, neutral: float = 0) -> Any:
    """Declares a statistic's field: how it merges, its dimensions `in` behind `*e`, and what it is of no rows."""
    return field(metadata={"reduce": how, "features": features, "neutral": neutral})


class Statistic:
    """The shared part: `merge` from the declarations, `update` as merge with a measurement."""

    kind: ClassVar[str]
    """the name that transforms ask for it by"""

    @classmethod
    def zero(
        cls,
        features: int,
        *,
        experts: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """The neutral element for inputs of `features`, as expanded scalars: it costs no memory."""

        def neutral(declared: Mapping[str, Any]) -> Tensor:
            shape = (*experts, *(features,) * declared["features"])
            number = dtype if declared["features"] else torch.int64
            return torch.full((), declared["neutral"], dtype=number, device=device).expand(shape)

        return cls(*(neutral(f.metadata) for f in fields(cls)))  # type: ignore[arg-type]  # subclasses are nodes

    @classmethod
    def measure(cls, x: Rows) -> Self:
        """The statistic of some rows; leading dimensions `*e` are kept apart."""
        raise NotImplementedError

    def merge(self, other: Self) -> Self:
        """The statistic of both sets of rows; it lies where this one does."""

        def merged(name: str, how: Reduce) -> Tensor:
            mine: Tensor = getattr(self, name)
            return how.merge(mine, getattr(other, name).to(mine.device))

        declared = {f.name: f.metadata["reduce"] for f in fields(self)}  # type: ignore[arg-type]  # subclasses are nodes
        return replace(self, **{name: merged(name, how) for name, how in declared.items()})  # type: ignore[type-var]

    def update(self, x: Rows) -> Self:
        """The statistic after some more rows."""
        return self.merge(self.measure(x))

    def rescale(self, s: Diagonal) -> Self:
        """The statistic of `x * s`, from this one alone."""
        raise NotImplementedError

    def rotate(self, r: GramMatrix) -> Self:
        """The statistic of `x @ r`, from this one alone, or `BadInput` where that cannot be known."""
        raise BadInput(f"{type(self).__name__} cannot follow a rotation; calibrate again after it")


@node
class Gram(Statistic):
    """The Gram matrix `X'X`: all that a layer's reconstruction error depends on (its Hessian is 2 X'X).

    >>> Gram.measure(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum
    tensor([[10., 14.],
            [14., 20.]])
    """

    sum: Tensor = reduces(Reduce.SUM, features=2)
    """`[*e, in, in]`"""
    count: Tensor = reduces(Reduce.SUM)
    """`[*e]`: rows seen"""
    kind: ClassVar[str] = "gram"

    @classmethod
    def measure(cls, x: Rows) -> Self:
        return cls(_outer(accumulated(x)), _count(x))

    def rescale(self, s: Diagonal) -> Self:
        return replace(self, sum=self.sum * s[..., :, None] * s[..., None, :])

    def rotate(self, r: GramMatrix) -> Self:
        return replace(self, sum=r.mT @ self.sum @ r)


@node
class SecondMoment(Statistic):
    """The Gram matrix's diagonal, `sum x_j^2`: what Wanda needs, at the cost of one pass."""

    sum: Tensor = reduces(Reduce.SUM, features=1)
    count: Tensor = reduces(Reduce.SUM)
    kind: ClassVar[str] = "second_moment"

    @classmethod
    def measure(cls, x: Rows) -> Self:
        return cls(accumulated(x).square().sum(-2), _count(x))

    def rescale(self, s: Diagonal) -> Self:
        return replace(self, sum=self.sum * s.square())


@node
class AbsMax(Statistic):
    """`max |x_j|` per feature."""

    max: Tensor = reduces(Reduce.MAX, features=1)
    count: Tensor = reduces(Reduce.SUM)
    kind: ClassVar[str] = "absmax"

    @classmethod
    def measure(cls, x: Rows) -> Self:
        return cls(_amax(accumulated(x).abs(), 0.0), _count(x))

    def rescale(self, s: Diagonal) -> Self:
        return replace(self, max=self.max * s.abs())


@node
class AbsMean(Statistic):
    """`sum |x_j|` per feature; the mean is `sum / count`, taken when it is used."""

    sum: Tensor = reduces(Reduce.SUM, features=1)
    count: Tensor = reduces(Reduce.SUM)
    kind: ClassVar[str] = "absmean"

    @classmethod
    def measure(cls, x: Rows) -> Self:
        return cls(accumulated(x).abs().sum(-2), _count(x))

    def rescale(self, s: Diagonal) -> Self:
        return replace(self, sum=self.sum * s.abs())


@node
class Range(Statistic):
    """Least and largest value per feature; of no rows: +inf and -inf, the empty range."""

    min: Tensor = reduces(Reduce.MIN, features=1, neutral=torch.inf)
    max: Tensor = reduces(Reduce.MAX, features=1, neutral=-torch.inf)
    count: Tensor = reduces(Reduce.SUM)
    kind: ClassVar[str] = "range"

    @classmethod
    def measure(cls, x: Rows) -> Self:
        x = accumulated(x)
        return cls(-_amax(-x, -torch.inf), _amax(x, -torch.inf), _count(x))

    def rescale(self, s: Diagonal) -> Self:
        a, b = self.min * s, self.max * s
        empty = self.min > self.max  # inf * 0 is NaN, and the empty range stays empty
        return replace(
            self,
            min=torch.where(empty, self.min, torch.minimum(a, b)),
            max=torch.where(empty, self.max, torch.maximum(a, b)),
        )


KINDS: dict[str, type[Statistic]] = {cls.kind: cls for cls in (Gram, SecondMoment, AbsMax, AbsMean, Range)}


def accumulated(x: Tensor) -> Tensor:
    """Rows in the dtype that statistics are kept in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _outer(x: Tensor) -> Tensor:
    """`x'x` with a little over half the flops: upper panels only, mirrored once."""
    features = x.shape[-1]
    width = -(-features // 4) if features >= 512 else features  # narrower panels lose more to GEMM than they save
    out = x.new_empty((*x.shape[:-2], features, features))
    for start in range(0, features, width):
        stop = min(start + width, features)
        panel = x[..., start:stop].mT @ x[..., start:]
        out[..., start:stop, start:] = panel
        out[..., stop:, start:stop] = panel[..., stop - start :].mT
    return out


def _amax(x: Tensor, of_nothing: float) -> Tensor:
    return x.amax(-2) if x.shape[-2] else x.new_full((*x.shape[:-2], x.shape[-1]), of_nothing)


def _count(x: Tensor) -> Tensor:
    return torch.full(x.shape[:-2], x.shape[-2], dtype=torch.int64, device=x.device)
