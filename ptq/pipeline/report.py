"""What a run reports: sizes, versions, totals, names of formats."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Iterable, Mapping
from functools import singledispatch
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ptq.numerics.indexed import Indexed
from ptq.numerics.leaves import Leaf, Quantized, Scales, Sparse, Transposed
from ptq.numerics.patterns import NM


def totals(blocks: Iterable[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """The report's last lines; bits per weight are those of the compressed weights, scales and zero points included.

    >>> rows = [{"name": "a", "bytes": 5, "numel": 8}, {"name": "a", "bytes": 5, "numel": 8}]
    >>> totals([{"bytes": 9, "weights": rows}], 1.5)
    {'bits_per_weight': 5.0, 'bytes': 9, 'seconds': 1.5}
    """
    blocks = list(blocks)
    rows = {row["name"]: (row["bytes"], row["numel"]) for block in blocks for row in block["weights"]}
    size, count = (sum(values) for values in zip(*rows.values(), strict=True)) if rows else (0, 0)
    bits = 8 * size / count if count else None
    return {"bits_per_weight": bits, "bytes": sum(block["bytes"] for block in blocks), "seconds": seconds}


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
    per = "channel" if high > 1 or rows == 1 else "tensor"
    if leaf.tile is not None:
        per = f"group {leaf.tile[1]}" if leaf.tile[0] == 1 else f"block {leaf.tile[0]} x {leaf.tile[1]}"
    elif wide > 1 or isinstance(leaf.scale, Scales):
        per = f"group {-(-columns // wide)}"
    scales = f", scales {leaf.scale.grid}" if isinstance(leaf.scale, Scales) else ""
    return f"{leaf.grid} per {per}{scales}{'' if leaf.zero is None else ', zero points'}"


@format_name.register
def _(leaf: Sparse) -> str:
    pattern = f"{leaf.pattern.keep} of {leaf.pattern.of}" if isinstance(leaf.pattern, NM) else "unstructured"
    return f"{format_name(leaf.values)}, {pattern} sparse"


@format_name.register
def _(leaf: Transposed) -> str:
    return format_name(leaf.leaf)


@format_name.register
def _(leaf: Indexed) -> str:
    return f"{format_name(leaf.leaf)}, columns in an order of their own"
