"""GPTQ: rounding column by column, each error made up for by the columns that follow.

Objective: `min tr((W - Q) G (W - Q)')` over matrices Q of the scheme's values, G the Gram matrix of the input.

Reference: Frantar et al. 2023, arXiv 2210.17323. Deliberate differences from the published code and llm-compressor:
scales minimize the error weighted by diag(G) instead of covering the range; everything is float32 whatever the
weight's dtype; a failed factorization is retried with more damping before the layer falls back to rounding; a dead
column keeps its rounded value instead of 0; the Gram matrix is a plain sum, without 2 / n, which changes no weight.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor

from ptq.base import Leaf, Outcome, Transform, leafwise
from ptq.errors import NotPositiveDefinite
from ptq.numerics import fits, obs
from ptq.numerics.leaves import dense, unquantized
from ptq.numerics.projections import affine, keeping
from ptq.numerics.schemes import Scheme
from ptq.numerics.stats import Gram

Order = Literal["activation"] | None
OnFailure = Literal["fallback", "raise"]


def gptq(
    scheme: Scheme,
    damp: float = 0.01,
    order: Order = "activation",
    fit: fits.Fit = "gram",
    refresh: bool = False,
    on_failure: OnFailure = "fallback",
) -> Transform:
    """Rounds each weight with compensation. A leaf that is sparse already keeps its mask.

    Args:
        scheme: grid and granularity.
        damp: what is added to G's diagonal, relative to its mean.
        order: "activation" rounds the columns with the largest inputs first. The order is static: scales belong to
            the weight's own groups, and nothing about it has to be stored. None: left to right.
        fit: how scales are chosen: "minmax", "mse" or "gram".
        refresh: choose a group's scales again from compensated weights when it is reached, as the published code does
            (left to right then, whatever `order` says).
        on_failure: when G stays indefinite after all dampings, "fallback" to plain rounding (reported) or "raise".

    Example:
        >>> import torch
        >>> from ptq.base import State
        >>> from ptq.numerics.schemes import scheme
        >>> seen = {"a.weight": {"gram": Gram.measure(torch.tensor([[1.0, 1.0], [0.0, 0.1]]))}}
        >>> stage, sites = gptq(scheme("W4A16", group_size=-1), fit="minmax"), {"a.weight": ("a.weight",)}
        >>> state, _ = stage.apply(State({"a.weight": torch.tensor([[0.7, 1.5]])}), seen, sites)
        >>> dense(state.params["a.weight"])  # plainly rounded it would be 0.8 and 1.4
        tensor([[0.8000, 1.4000]])
    """

    def check(leaf: Leaf) -> None:
        scheme.check(unquantized(leaf).shape[-1])

    def shared(gram: Gram) -> dict[str, Any]:
        return {"factor": factored(gram, damp, None if refresh else order, on_failure)}

    def solve(leaf: Leaf, factor: obs.Factor, divisor: Tensor | None = None) -> tuple[Leaf, Outcome]:
        projection = keeping(leaf, affine(scheme, fit, refresh, divisor))
        return obs.sweep(dense(unquantized(leaf)), factor, projection), outcome(factor)

    how = "refresh" if refresh else f"order={order}"
    name = f"gptq({scheme}, {fit}, damp={damp:g}, {how}, on_failure={on_failure})"
    together = partial(fits.agreed, scheme=scheme)
    return leafwise(("gram",), solve, shared=shared, together=together, check=check, name=name)


def factored(gram: Gram, damp: float, order: Order, on_failure: OnFailure) -> obs.Factor:
    """The factor for all weights that read one input."""
    try:
        return obs.inverse_factor(gram.sum, damp, order, on_failure)
    except NotPositiveDefinite as error:
        raise NotPositiveDefinite(f"{error} ({int(gram.count.sum())} tokens were seen)") from error


def outcome(factor: obs.Factor) -> Outcome:
    """What the factorization took, for the report."""
    retried, given_up = obs.shown(factor.failures.any()), obs.shown(factor.damping.isinf().any())
    note = "damped more than asked for" if retried else ""
    note = "no damping made the Gram matrix positive definite: not compensated" if given_up else note
    return Outcome(factor.damping, factor.failures, note)
