"""Laws of statistics: commutative monoids, homomorphic in the rows, that follow a change of variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from laws.shared import close, identical, untouched
from ptq.errors import BadInput
from ptq.numerics.stats import Gram, Statistic
from strategies import correlated, randn


def samples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for seed, experts in ((1, ()), (2, (3,))):
        yield tuple(correlated(seed + n, *experts, n, 5, dtype=dtype) for n in (7, 1, 12))  # type: ignore[misc]


def merge_is_a_commutative_monoid(cls: type[Statistic]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        for x, y, z in samples(dtype):
            a, b, c = map(cls.measure, (x, y, z))
            zero = cls.zero(5, experts=tuple(x.shape[:-2]), dtype=dtype)
            assert identical(a.merge(b), b.merge(a))
            close(a.merge(b).merge(c), a.merge(b.merge(c)), tolerance)
            assert identical(zero.merge(a), a)
            assert identical(a.merge(zero), a)


def measure_is_a_homomorphism(cls: type[Statistic]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        for x, y, z in samples(dtype):
            whole = cls.measure(torch.cat((x, y, z), -2))
            close(cls.measure(x).update(y).update(z), whole, tolerance)
            close(cls.measure(x[..., :0, :]).update(torch.cat((x, y, z), -2)), whole, tolerance)


def rescale_follows_the_data(cls: type[Statistic]) -> None:
    for x, y, _ in samples(torch.float64):
        s = randn(9, 5)
        close(cls.measure(x).merge(cls.measure(y)).rescale(s), cls.measure(torch.cat((x, y), -2) * s))


def empty_stays_empty_when_rescaled(cls: type[Statistic]) -> None:
    zero = cls.zero(5, dtype=torch.float64)
    assert identical(
        zero.rescale(torch.tensor([0.0, 1.0, -2.0, 3.0, -0.5], dtype=torch.float64)).merge(zero), zero.merge(zero)
    )


def rotate_follows_the_data_or_refuses(cls: type[Statistic]) -> None:
    x, r = correlated(1, 20, 5), torch.linalg.qr(randn(2, 5, 5)).Q
    if cls is Gram:
        close(cls.measure(x).rotate(r), cls.measure(x @ r))
    else:
        with pytest.raises(BadInput, match=cls.__name__):
            cls.measure(x).rotate(r)


def changes_no_input(cls: type[Statistic]) -> None:
    x, s, r = correlated(1, 20, 5), randn(2, 5), torch.linalg.qr(randn(3, 5, 5)).Q
    a, b = cls.measure(x), cls.measure(2 * x)
    with untouched((x, s, r, a, b)):
        a.merge(b)
        a.update(x)
        a.rescale(s)
        with contextlib.suppress(BadInput):
            a.rotate(r)


def runs_under_vmap(cls: type[Statistic]) -> None:
    x = correlated(1, 3, 20, 5)
    close(torch.func.vmap(cls.measure)(x), cls.measure(x))


def counts_rows(cls: type[Statistic]) -> None:
    a = cls.measure(correlated(1, 3, 20, 5)).update(correlated(1, 3, 4, 5))
    assert a.count.tolist() == [24.0] * 3  # type: ignore[attr-defined]  # every statistic has one
