"""Wanda: pruning by weights and activations, without any update of what stays.

Objective: `min sum_ij (w_ij - q_ij)^2 |x_j|^2` over each row's patterns: the layer's error without its cross terms.

Reference: Sun et al. 2023, arXiv 2306.11695. As there, a block is measured with its own weights still dense. Nothing
here makes up for the errors of earlier weights, so measuring their effect does not help: SmolLM2 pruned to 2:4 has
perplexity 254 this way, and 266 when each weight is measured behind the pruned ones of its block.
"""

from __future__ import annotations

from ptq.base import Leaf, Transform, leafwise
from ptq.numerics.leaves import Sparse, dense, unquantized
from ptq.numerics.patterns import Pattern
from ptq.numerics.stats import SecondMoment, accumulated


def wanda(pattern: Pattern) -> Transform:
    """Prunes what scores least in its row, or in its group of a row: `|w_ij| sqrt(sum_t x_tj^2)`.

    Prunes exactly `int(in * ratio)` of a row, and among equals the last ones.

    Args:
        pattern: `Unstructured(ratio)` or `NM(keep, of)`.

    Example:
        >>> import torch
        >>> from ptq.base import State
        >>> from ptq.numerics.patterns import NM
        >>> seen = {"a.weight": {"second_moment": SecondMoment.measure(torch.tensor([[3.0, 1.0]]))}}
        >>> stage, sites = wanda(NM(keep=1, of=2)), {"a.weight": ("a.weight",)}
        >>> state, _ = stage.apply(State({"a.weight": torch.tensor([[1.0, -2.0]])}), seen, sites)
        >>> dense(state.params["a.weight"])
        tensor([[1., 0.]])
    """

    def check(leaf: Leaf) -> None:
        pattern.check(unquantized(leaf).shape[-1])

    def solve(leaf: Leaf, second_moment: SecondMoment) -> Leaf:
        w = dense(unquantized(leaf))
        mask = pattern.mask(accumulated(w).abs() * second_moment.sum.sqrt()[..., None, :], per="row")
        return Sparse(w.masked_fill(~mask, 0), mask, pattern)

    return leafwise(("second_moment",), solve, check=check, name=f"wanda({pattern})")._replace(scope="block")
