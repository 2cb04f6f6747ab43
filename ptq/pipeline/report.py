"""What a run reports: sizes, versions, totals, names of formats."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Container
from functools import singledispatch
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from ptq.base import Params
from ptq.numerics.grids import Int
from ptq.numerics.leaves import Leaf, Quantized, Sparse, Transposed, nbytes
from ptq.numerics.patterns import NM


class Size(NamedTuple):
    """Bytes of a model, and bytes and number of the weights that were compressed."""

    total: int = 0
    compressed: int = 0
    weights: int = 0

    def plus(self, other: Size) -> Size:
        return Size(self.total + other.total, self.compressed + other.compressed, self.weights + other.weights)


def size(params: Params, worked_on: Container[str]) -> Size:
    """The size of some leaves, of which `worked_on` were compressed.

    >>> import torch
    >>> size({"a": torch.ones(2), "b": torch.ones(3)}, {"b"})
    Size(total=20, compressed=12, weights=3)
    """
    sized = {name: nbytes(leaf) for name, leaf in params.items()}
    mine = [name for name in params if name in worked_on]
    weights = sum(params[name].shape.numel() for name in mine)
    return Size(sum(sized.values()), sum(sized[name] for name in mine), weights)


def totals(sized: Size, seconds: float) -> dict[str, Any]:
    """The report's last lines; bits per weight are those of the compressed weights, scales and zero points included."""
    bits = 8 * sized.compressed / sized.weights if sized.weights else None
    return {"bits_per_weight": bits, "bytes": sized.total, "seconds": seconds}


def peak_bytes() -> int:
    """The most memory this process has had resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, kilobytes elsewhere


def versions() -> dict[str, str]:
    """What made a result: ptq, its numerical dependencies, Python."""
    return {"python": platform.python_version(), **{name: _version(name) for name in ("ptq", "torch", "transformers")}}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


@singledispatch
def format_name(leaf: Leaf) -> str:
    """How a leaf is stored, in words.

    >>> import torch
    >>> format_name(torch.ones(2, dtype=torch.bfloat16))
    'bfloat16'
    """
    return str(leaf.dtype).removeprefix("torch.")


@format_name.register
def _(leaf: Quantized) -> str:
    (*_, rows, columns), (*_, high, wide) = leaf.shape, leaf.scale.shape
    per = f"group {-(-columns // wide)}" if wide > 1 else "channel" if high > 1 or rows == 1 else "tensor"
    name = f"int{leaf.grid.bits}" if isinstance(leaf.grid, Int) else str(leaf.grid.dtype).removeprefix("torch.")
    return f"{name} per {per}{'' if leaf.zero is None else ', zero points'}"


@format_name.register
def _(leaf: Sparse) -> str:
    pattern = f"{leaf.pattern.keep} of {leaf.pattern.of}" if isinstance(leaf.pattern, NM) else "unstructured"
    return f"{format_name(leaf.values)}, {pattern} sparse"


@format_name.register
def _(leaf: Transposed) -> str:
    return format_name(leaf.leaf)
