"""SparseGPT: pruning column by column, each error made up for by the columns that follow; quantizing in the same sweep.

Objective: `min tr((W - Q) G (W - Q)')` over matrices Q of the pattern (and of the scheme's values, where there is one).

Reference: Frantar and Alistarh 2023, arXiv 2301.00774. Deliberate differences from the published code and
llm-compressor: masks are exact (their threshold prunes one weight more in each block of 128 columns); a failed
factorization is retried with more damping before the layer falls back to scores of its diagonal; a dead column is
pruned first instead of set to 0 beforehand; the Gram matrix is a plain sum, without 2 / n, which changes no weight.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ptq.base import Leaf, Outcome, Transform, leafwise
from ptq.numerics import fits, obs
from ptq.numerics.leaves import dense, unquantized
from ptq.numerics.patterns import Pattern
from ptq.numerics.projections import affine, prune, then
from ptq.numerics.schemes import Scheme
from ptq.numerics.stats import Gram
from ptq.transforms.gptq import OnFailure, factored, outcome


def sparsegpt(
    pattern: Pattern,
    scheme: Scheme | None = None,
    damp: float = 0.01,
    fit: fits.Fit = "gram",
    preserve_sparsity_mask: bool = False,
    on_failure: OnFailure = "fallback",
) -> Transform:
    """Prunes each weight with compensation, and with a scheme rounds what stays in the same sweep.

    Args:
        pattern: `NM(keep, of)`, decided group by group on weights as compensated so far; or `Unstructured(ratio)`,
            decided over 128 columns at a time, of which exactly `int(numel * ratio)` go.
        scheme: what kept weights are rounded to; None keeps them as they are.
        damp: what is added to G's diagonal, relative to its mean.
        fit: how the scheme's scales are chosen: "minmax", "mse" or "gram".
        preserve_sparsity_mask: zeros stay zeros, and count first towards what is to be pruned.
        on_failure: when G stays indefinite after all dampings, "fallback" to no compensation (reported) or "raise".

    Example:
        >>> import torch
        >>> from ptq.base import State
        >>> from ptq.numerics.patterns import NM
        >>> seen = {"a.weight": {"gram": Gram.measure(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))}}
        >>> stage, sites = sparsegpt(NM(keep=1, of=2), damp=0.0), {"a.weight": ("a.weight",)}
        >>> state, _ = stage.apply(State({"a.weight": torch.tensor([[1.0, 2.0]])}), seen, sites)
        >>> dense(state.params["a.weight"])
        tensor([[0.0000, 2.5000]])
    """
    pruned = prune(pattern, preserve_sparsity_mask)

    def check(leaf: Leaf) -> None:
        columns = unquantized(leaf).shape[-1]
        pattern.check(columns)
        if scheme:
            scheme.check(columns)

    def shared(gram: Gram) -> dict[str, Any]:
        return {"factor": factored(gram, damp, None, on_failure)}

    def solve(leaf: Leaf, factor: obs.Factor, divisor: Tensor | None = None) -> tuple[Leaf, Outcome]:
        projection = then(pruned, affine(scheme, fit, divisor=divisor)) if scheme else pruned
        return obs.sweep(dense(unquantized(leaf)), factor, projection), outcome(factor)

    kept = ", preserve_sparsity_mask" if preserve_sparsity_mask else ""
    name = f"sparsegpt({pattern}{f', {scheme}, {fit}' if scheme else ''}, damp={damp:g}{kept}, on_failure={on_failure})"
    together = partial(fits.agreed, scheme=scheme) if scheme else None
    return leafwise(("gram",), solve, shared=shared, together=together, check=check, name=name)
