"""One divisor for weights that engines compute as one, where that changes no value.

vLLM takes the largest divisor of q, k and v (of gate and up, of w1 and w3) for all of them. Weights that one transform
rounds together have one; weights of several transforms, or of another quantizer, may not. Scales are float8, so by
another divisor most of them are no numbers of their grid: each would move by up to 1/16, more than what vLLM's choice
costs where divisors are alike. Values are therefore kept, and divisors that still differ are told by `check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ptq.io.compressed_tensors import Stored
from ptq.io.fused import fused_sets
from ptq.numerics.lazy import load
from ptq.numerics.leaves import Leaf, Quantized, Scales, Sparse, dense


def shared(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Those leaves that are the same values by a divisor that others of their fused set have already.

    Args:
        leaves: by names in the checkpoint; one that is not divided, or in a file, is not read.
    """
    divisors = {file.removesuffix(".weight"): _divisor(leaf) for file, leaf in leaves.items()}
    found: dict[str, Leaf] = {}
    for each in fused_sets(module for module, divisor in divisors.items() if divisor is not None):
        if len({divisors[module] for module in each.shards}) > 1:
            files = [f"{module}.weight" for module in each.shards]
            found |= _common({file: load(leaves[file]) for file in files})
    return found


def _common(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """The leaves by the first of their divisors that all of them can be written with."""
    for divisor in (_inner(leaf).scale.divisor for leaf in leaves.values()):
        made = {file: _divided(leaf, divisor) for file, leaf in leaves.items()}
        if all(torch.equal(_values(leaf), _values(leaves[file])) for file, leaf in made.items()):
            return made
    return {}


def _divided(leaf: Leaf, divisor: Tensor) -> Leaf:
    """The same codes with the nearest scales by another divisor."""
    if isinstance(leaf, Sparse):
        return replace(leaf, values=_divided(leaf.values, divisor))
    grid = leaf.scale.grid
    level = grid.round(dense(leaf.scale) * divisor)
    # As where scales are fitted: that of a tile of zeros does not matter, but is not 0.
    codes = grid.encode(torch.where(level == 0, 0.125, level))
    return replace(leaf, scale=Scales(codes, divisor, grid))


def _values(leaf: Leaf) -> Tensor:
    return dense(replace(_inner(leaf), dtype=torch.float32))


def _inner(leaf: Leaf) -> Leaf:
    return leaf.values if isinstance(leaf, Sparse) else leaf


def _divisor(leaf: Leaf) -> float | None:
    """What the scales of a matrix are divided by, told without its codes; None where there is no one number."""
    if isinstance(leaf, Stored):
        found = leaf.parts.get("weight_global_scale")
    else:
        inner = _inner(leaf)
        found = inner.scale.divisor if isinstance(inner, Quantized) and isinstance(inner.scale, Scales) else None
    return dense(found).float().item() if found is not None and found.shape.numel() == 1 else None
