"""Projections: what a weight may become. Rounding and pruning are the same thing with other facts.

A projection decides facts (scales, zero points, masks) and then maps each element by itself, given its facts. The
same projection is applied plainly (round to nearest, magnitude pruning) or inside a sweep that compensates each
column's error in the columns that follow (GPTQ, SparseGPT).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ptq.numerics import fits
from ptq.numerics.facts import Facts
from ptq.numerics.leaves import Leaf, Sparse
from ptq.numerics.patterns import NM, Pattern
from ptq.numerics.schemes import Scheme
from ptq.numerics.tiles import spread
from ptq.types import Diagonal, Mask, Weight


class Fitting(Protocol):
    """Decides facts of a whole weight."""

    def __call__(self, w: Weight, importance: Diagonal | None) -> Facts:
        """Facts of the whole weight as it is at first, in its own dtype; `importance` is the Gram's diagonal."""
        ...


class Choosing(Protocol):
    """Decides facts of neighbouring columns."""

    def __call__(self, facts: Facts, w: Weight, pivot: Diagonal) -> Facts:
        """Facts of `span` columns, from their weights as compensated so far.

        Args:
            facts: what `fit` gave, for these columns, broadcastable to `w`.
            w: `[*e, out, span]`; at the end of a weight it may be narrower.
            pivot: `[*e, span]`, the diagonal of U, where `H^-1 = U'U`: changing column j by d costs `(d / pivot_j)^2`.
        """
        ...


class Projection(NamedTuple):
    """What a weight may become, as a value.

    Example: ternary weights, which then run in every sweep.

        >>> def ternary():
        ...     def fit(w, importance):
        ...         return w.abs().mean(-1, keepdim=True)
        ...
        ...     def project(w, step):
        ...         return (w / step).round().clamp(-1, 1) * step
        ...
        ...     return Projection(fit, project, encode=lambda w, step: w)
        >>> from ptq.numerics import obs
        >>> obs.project(torch.tensor([[1.0, 0.2, 0.9]]), ternary())
        tensor([[0.7000, 0.0000, 0.7000]])
    """

    fit: Fitting
    project: Callable[[Tensor, Facts], Tensor]
    """the value that each element gets; elementwise, since it sees a weight, a span or one column `[*e, out]`, with
    facts that broadcast against it"""
    encode: Callable[[Any, Facts], Leaf]
    """the leaf, from projected values in the weight's dtype and the facts that made them"""
    choose: Choosing | None = None
    """decides again on compensated weights; None keeps what `fit` said"""
    span: int = 1
    """columns that `choose` decides together; their order must then be the natural one"""


def affine(
    scheme: Scheme, fit: fits.Fit = "minmax", refresh: bool = False, divisor: Tensor | None = None
) -> Projection:
    """Rounding to a scheme's grid: `(round(w / s + z) - z) s`.

    Args:
        scheme: grid and granularity.
        fit: how scales are chosen, see `ptq.numerics.fits`.
        refresh: choose a group's scales again when a sweep reaches it, as the original GPTQ code does.
        divisor: `[*e, 1, 1]`, what the scales of several weights share, see `fits.shared_divisor`.
    """
    grid, method = scheme.grid, fits.known(fit)

    def fitted(w: Weight, importance: Diagonal | None) -> Facts:
        return _each(fits.fit(w, scheme, method, importance, divisor=divisor), scheme, w.shape)

    def project(w: Tensor, facts: Facts) -> Tensor:
        step, zero = facts.step, facts.zero
        if zero is None:
            return grid.round(w / step) * step
        return (grid.round(w / step + zero) - zero) * step

    def encode(values: Tensor, facts: Facts) -> Leaf:
        return fits.nearest(values, scheme, _once(facts, scheme, values.shape))

    def choose(facts: Facts, w: Weight, pivot: Diagonal) -> Facts:
        return fits.fit(w, scheme, method, pivot.square().reciprocal(), facts.level.dtype, facts.divisor)

    if refresh and scheme.group_size:
        return Projection(fitted, project, encode, choose, scheme.group_size)
    return Projection(fitted, project, encode)


def _each(fitted: fits.Fitted, scheme: Scheme, shape: torch.Size) -> fits.Fitted:
    """For every row, and for every column where tiles are cut off: facts know neither blocks nor ragged ends."""
    if scheme.block is None:
        return fitted
    wide = fitted.level.shape[-1] if shape[-1] % scheme.block[1] == 0 else shape[-1]
    to = torch.Size((*shape[:-1], wide))
    tile = (scheme.block[0], 1 if wide == fitted.level.shape[-1] else scheme.block[1])
    every = [None if t is None else spread(t, to, tile) for t in (fitted.level, fitted.zero)]
    return fits.Fitted(every[0], every[1], fitted.divisor)  # type: ignore[arg-type]  # a level is always there


def _once(facts: fits.Fitted, scheme: Scheme, shape: torch.Size) -> fits.Fitted:
    """The inverse: also of facts that spans have said more than once a group."""
    (high, wide), columns = scheme.tile(shape), facts.level.shape[-1]
    down, across = high if facts.level.shape[-2] == shape[-2] else 1, max(1, wide * columns // shape[-1])
    once = [None if t is None else t[..., ::down, ::across].contiguous() for t in (facts.level, facts.zero)]
    return fits.Fitted(once[0], once[1], None if facts.divisor is None else facts.divisor[..., :1, :1])  # type: ignore[arg-type]  # as above


def prune(pattern: Pattern, preserve: bool = False, block: int = 128) -> Projection:
    """Setting to 0 what costs least, by the score `(w / pivot)^2` of optimal brain surgery.

    Args:
        pattern: `Unstructured(ratio)`, over `block` columns at a time; or `NM(keep, of)`, over each `of` of a row.
        preserve: zeros stay zeros, and count first towards what is to be pruned.
        block: columns that an unstructured mask is chosen for at a time.
    """

    def fitted(w: Weight, importance: Diagonal | None) -> Facts:
        return w != 0 if preserve else ()

    def choose(facts: Facts, w: Weight, pivot: Diagonal) -> Facts:
        score = w.abs() / pivot[..., None, :]  # its square orders alike
        return pattern.mask(score * facts) & facts if preserve else pattern.mask(score)

    return Projection(fitted, _masked, _sparse(pattern), choose, pattern.of if isinstance(pattern, NM) else block)


def keep(mask: Mask, pattern: Pattern | None = None) -> Projection:
    """A mask that is decided already; it follows the weight to its device."""
    return Projection(lambda w, importance: mask.to(w.device).expand(w.shape), _masked, _sparse(pattern))


def then(first: Projection, second: Projection) -> Projection:
    """Both at once: `then(prune(p), affine(s))` chooses a mask, and quantizes what it keeps.

    `first` has the last word on each element, so that what it prunes is 0 on any grid; `second` chooses on what
    `first` would make of the weights. Columns are decided in spans that suit both.
    """

    def fitted(w: Weight, importance: Diagonal | None) -> Facts:
        return first.fit(w, importance), second.fit(w, importance)

    def project(w: Tensor, facts: Facts) -> Tensor:
        return first.project(second.project(w, facts[1]), facts[0])

    def encode(values: Any, facts: Facts) -> Leaf:
        return first.encode(second.encode(values, facts[1]), facts[0])

    def choose(facts: Facts, w: Weight, pivot: Diagonal) -> Facts:
        a = first.choose(facts[0], w, pivot) if first.choose else facts[0]
        b = second.choose(facts[1], first.project(w, a), pivot) if second.choose else facts[1]
        return a, b

    if not (first.choose or second.choose):
        return Projection(fitted, project, encode)
    return Projection(fitted, project, encode, choose, math.lcm(first.span, second.span))


def keeping(leaf: Leaf, projection: Projection) -> Projection:
    """The projection for a leaf that may be sparse already: its mask stays."""
    return then(keep(leaf.mask, leaf.pattern), projection) if isinstance(leaf, Sparse) else projection


def _masked(w: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, w, 0.0)


def _sparse(pattern: Pattern | None) -> Callable[[Any, Facts], Leaf]:
    return lambda values, mask: Sparse(values, mask, pattern)
