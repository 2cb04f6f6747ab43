"""Magnitude pruning: the smallest weights go.

Objective: `min |W - Q|^2` over matrices Q of the pattern; needs no data.

Reference: Han et al. 2015, arXiv 1506.02626.
"""

from __future__ import annotations

from typing import Literal

from ptq.base import Leaf, Transform, leafwise
from ptq.numerics.leaves import Sparse, dense, unquantized
from ptq.numerics.patterns import Pattern


def magnitude(pattern: Pattern, per: Literal["tensor", "row"] = "tensor") -> Transform:
    """Prunes each weight by absolute value.

    Args:
        pattern: `Unstructured(ratio)` or `NM(keep, of)`.
        per: what unstructured scores are compared within; N:M compares groups within a row.

    Example:
        >>> import torch
        >>> from ptq.base import State
        >>> from ptq.numerics.patterns import Unstructured
        >>> stage = magnitude(Unstructured(0.5))
        >>> state, _ = stage.apply(State({"a.weight": torch.tensor([[0.1, -1.5]])}), {}, {"a.weight": ("a.weight",)})
        >>> dense(state.params["a.weight"])
        tensor([[ 0.0000, -1.5000]])
    """

    def check(leaf: Leaf) -> None:
        pattern.check(unquantized(leaf).shape[-1])

    def solve(leaf: Leaf) -> Leaf:
        w = dense(unquantized(leaf))
        mask = pattern.mask(w.abs(), per)
        return Sparse(w.masked_fill(~mask, 0), mask, pattern)

    return leafwise((), solve, check=check, name=f"magnitude({pattern}, per={per})")
