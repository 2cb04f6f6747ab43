"""Folding of norms: a norm's weight moves into the weights that read its output.

A change of variables that keeps the function: with `y = n(x) * a + b` and readers `W y`,

    W y = (W diag(a)) (n(x) + b / a).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ptq.base import Link, Params, Sites, State, Stats, Transform, oriented
from ptq.errors import BadInput
from ptq.numerics.leaves import Leaf, Transposed, compressed, dense
from ptq.numerics.stats import Statistic, accumulated


def fold_norms() -> Transform:
    """Makes every linked norm a plain normalization; what its readers' inputs were measured to be follows.

    Example:
        >>> norm, reader = torch.tensor([2.0, 0.5]), torch.ones(1, 2)
        >>> state = State({"norm.weight": norm, "a.weight": reader})
        >>> link = Link("norm.weight", ("a.weight",))
        >>> state, _ = fold_norms().apply(state, {}, {"a.weight": ("a.weight",)}, links=(link,))
        >>> state.params
        {'norm.weight': tensor([1., 1.]), 'a.weight': tensor([[2.0000, 0.5000]])}
    """

    def init(state: State, sites: Sites, *, links: tuple[Link, ...] = (), **extra: Any) -> Stats:
        for sink in (sink for link in links for sink in link.sinks):
            _refuse_compressed(sink, state.params[sink])
        return {}

    def apply(
        state: State, stats: Stats, sites: Sites, *, links: tuple[Link, ...] = (), **extra: Any
    ) -> tuple[State, Stats]:
        for link in links:
            a = _factor(state.params, link)
            state, stats = state._replace(params=_folded(state.params, link, a)), _moved(stats, sites, link, a)
        return state, stats

    return Transform("reparam", "block", init, apply, needs=frozenset({"links"}), name="fold_norms()")


def _factor(params: Params, link: Link) -> Tensor:
    a = accumulated(dense(params[link.source])) + link.offset
    if bool((a == 0).any()):
        zeros = a.numel() - int(a.count_nonzero())
        raise BadInput(f"{link.source}: {zeros} of {a.numel()} factors are 0 and cannot be folded; leave this norm out")
    return a


def _folded(params: Params, link: Link, a: Tensor) -> Params:
    changed: Params = {link.source: torch.full_like(dense(params[link.source]), 1 - link.offset)}
    bias = f"{link.source.removesuffix('weight')}bias"
    if bias in params:
        changed[bias] = (accumulated(dense(params[bias])) / a).to(params[bias].dtype)
    for sink in link.sinks:
        _refuse_compressed(sink, params[sink])
        w = (accumulated(dense(oriented(params[sink]))) * a).to(params[sink].dtype)
        changed[sink] = Transposed(w) if isinstance(params[sink], Transposed) else w
    return {**params, **changed}


def _refuse_compressed(name: str, leaf: Leaf) -> None:
    if compressed(leaf):
        raise BadInput(f"{name}: is compressed already; fold norms before anything lossy")


def _moved(stats: Stats, sites: Sites, link: Link, a: Tensor) -> Stats:
    """Statistics of the readers' inputs, which are now smaller by the factor."""
    moved = {site for site, weights in sites.items() if set(weights) & set(link.sinks)}
    for stranger in (w for site in moved for w in sites[site] if w not in link.sinks):
        raise BadInput(f"{link.source}: {stranger} reads its output too and would change; link all of its readers")

    def move(value: Any) -> Any:
        return value.rescale(1 / a) if isinstance(value, Statistic) else value

    return {k: {n: move(s) for n, s in kinds.items()} if k in moved else kinds for k, kinds in stats.items()}
