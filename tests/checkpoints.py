"""Helpers for tests of files: compressed leaves with known codes, golden cases, and damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ptq.base import State
from ptq.io.safetensors import headers
from ptq.models.model import Model
from ptq.numerics.grids import Float8, Grid, Int
from ptq.numerics.leaves import Leaf, Quantized, Transposed

GOLDEN = Path(__file__).parent / "golden" / "compressed-tensors"
SCHEMES: dict[str, Any] = json.loads((GOLDEN / "schemes.json").read_text())
ALL = [(file, case) for file, table in SCHEMES.items() for case in table["cases"]]
CASES = [(file, case) for file, case in ALL if "sparse" not in file and "gidx" not in file]
"""weights whose tensors are codes and scales alone"""


def golden(file: str, case: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """A golden case: its tensors on disk by local name, its scheme, the version that wrote it."""
    table = SCHEMES[file]
    tensors = headers(GOLDEN / f"{file}.safetensors")
    prefix = f"{case}/"
    return (
        {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)},
        table["cases"][case],
        table["version"],
    )


INT4 = Int(4)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of types, shapes and bits, NaN included."""
    bits = [t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def quantized(
    *shape: int, grid: Grid = INT4, tiles: str = "group", asymmetric: bool = False, dtype: torch.dtype = torch.float32
) -> Quantized:
    """Random codes with scales of a size that keeps a tiny model's logits sane; groups are of 16."""
    *e, out, inputs = shape
    a, b = {"tensor": (1, 1), "channel": (out, 1), "group": (out, inputs // 16)}[tiles]
    if isinstance(grid, Float8):
        codes = (torch.randn(shape) * 100).clamp(grid.low, grid.high).to(grid.dtype)
    else:
        codes = torch.randint(int(grid.low), int(grid.high) + 1, shape, dtype=torch.int8)
    zero = torch.randint(-2, 2, (*e, a, b), dtype=torch.int8) if asymmetric else None
    scale = (0.2 * torch.rand(*e, a, b) + 0.1) / grid.high
    return Quantized(codes, scale.to(dtype), zero, grid, dtype)


def compressed(model: Model, choose: Callable[[str, torch.Size], Leaf | None]) -> Model:
    """The model with some matrices replaced: `choose(name, [out, in])` gives a leaf or None."""
    params = dict(model.params)
    for name, leaf in model.params.items():
        conv1d = type(model.module.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
        new = choose(name, leaf.shape[::-1] if conv1d else leaf.shape) if len(leaf.shape) == 2 else None
        if new is not None:
            params[name] = Transposed(new) if conv1d else new
    return replace(model, state=State(params))


def in_blocks(**how: Any) -> Callable[[str, torch.Size], Leaf | None]:
    """For `compressed`: every matrix inside the blocks, with random codes."""
    return lambda name, shape: quantized(*shape, **how) if ".layers." in name or ".h." in name else None
