"""What property tests draw from: seeds for tensors, and tables of schemes, patterns and shapes."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ptq.numerics.grids import Float8, Int, Minifloat, PowersOfTwo
from ptq.numerics.patterns import NM, Pattern, Unstructured
from ptq.numerics.schemes import Scheme

GRIDS = [Int(1), Int(2), Int(3), Int(4), Int(8), Float8(), Minifloat(1), Minifloat(3)]
PATTERNS: list[Pattern] = [Unstructured(0.0), Unstructured(0.37), Unstructured(0.5), Unstructured(0.9)]
PATTERNS += [NM(keep=2, of=4), NM(keep=1, of=4), NM(keep=4, of=8), NM(keep=2, of=2)]
SCHEMES = [
    Scheme(Int(4), "group", 8),
    Scheme(Int(4), "group", 8, symmetric=False),
    Scheme(Int(3), "channel"),
    Scheme(Int(2), "channel", symmetric=False),
    Scheme(Int(8), "tensor"),
    Scheme(Int(8), "tensor", symmetric=False),
    Scheme(Float8(), "channel"),
    Scheme(Float8(), "tensor"),
    Scheme(Float8(), "block", block=(4, 6)),
    Scheme(Minifloat(1), "group", 8, scales=Float8()),
    Scheme(Minifloat(1), "group", 8, scales=PowersOfTwo()),
    Scheme(Minifloat(3), "group", 8, scales=PowersOfTwo()),
    Scheme(Float8(), "group", 8, scales=PowersOfTwo()),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

seeds = st.integers(0, 2**31 - 1)
schemes = st.sampled_from(SCHEMES)
patterns = st.sampled_from(PATTERNS)
dtypes = st.sampled_from(DTYPES)


drawn: ContextVar[int] = ContextVar("drawn", default=0)
"""What hypothesis drew for a law: all numbers below are others for another value."""


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers that a seed stands for."""
    generator = torch.Generator().manual_seed(seed + 1_000_003 * drawn.get())
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def correlated(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows like a network's: columns of very different sizes that depend on each other."""
    features = shape[-1]
    sizes = randn(seed + 1, features).exp()
    mix = torch.eye(features, dtype=torch.float64) + 0.4 * randn(seed + 2, features, features)
    return (randn(seed, *shape) * sizes @ mix).to(dtype)


def gram(seed: int, features: int, *, experts: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> Tensor:
    """A Gram matrix of full rank, as sums over tokens."""
    x = correlated(seed, *experts, 4 * features, features)
    return (x.mT @ x).to(dtype)


@st.composite
def weights(
    draw: st.DrawFn, columns: tuple[int, ...] = (16, 24, 40), dtype: torch.dtype | None = None, stacked: bool = True
) -> Tensor:
    """A weight `[*e, out, in]`, sometimes with a row or a column of zeros."""
    experts = draw(st.sampled_from([(), (), (1,), (3,)])) if stacked else ()
    shape = (*experts, draw(st.integers(1, 7)), draw(st.sampled_from(columns)))
    w = randn(draw(seeds), *shape) * draw(st.sampled_from([1e-3, 0.05, 1.0, 300.0]))
    if draw(st.integers(0, 4)) == 0:
        w = w.index_fill(draw(st.sampled_from([-1, -2])), torch.tensor([0]), 0.0)
    return w.to(dtype or draw(dtypes))
