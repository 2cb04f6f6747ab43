"""A weight's line of the report: what it lost, on how many tokens, with how much damping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ptq.base import Stats, oriented
from ptq.numerics.chunks import few_rows
from ptq.numerics.leaves import Leaf, dense


def weight_line(
    name: str, site: str, before: Leaf, after: Leaf, stats: Stats, seen: Stats, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """One line.

    Args:
        name: the weight.
        site: whose input it reads.
        before: the weight as it was, `[*e, out, in]` or transposed.
        after: what became of it.
        stats: what was measured.
        seen: what the transforms returned, outcomes among it.
        notes: what else is to be said.
    """
    kinds = stats.get(site, {})
    outcome = seen.get(name, {}).get("outcome")
    return {
        "name": name,
        "site": site,
        "numel": before.shape.numel(),
        "tokens": max((int(s.count.sum()) for s in kinds.values()), default=0),
        "error": relative_error(before, after, kinds),
        "damping": _largest(outcome.damping) if outcome else None,
        "failures": int(outcome.failures.sum()) if outcome else 0,
        "note": "; ".join((*([outcome.note] if outcome and outcome.note else []), *notes)),
    }


def relative_error(before: Leaf, after: Leaf, kinds: Mapping[str, Any]) -> float:
    """tr(D G D') / tr(W G W'), with the best of Gram, its diagonal and the identity that was measured.

    >>> import torch
    >>> relative_error(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 0.0]]), {})
    0.64
    """

    def energy(m: Tensor) -> float:
        if "gram" in kinds:
            return float(((m @ kinds["gram"].sum.to(m)) * m).sum())
        if "second_moment" in kinds:
            return float((m.square() * kinds["second_moment"].sum.to(m.device)[..., None, :]).sum())
        return float(m.flatten().dot(m.flatten()))

    lost = total = 0.0
    pair = oriented(before), oriented(after)
    for old, new in [pair] if kinds else few_rows(*pair):
        w = dense(old).float()
        total += energy(w)
        lost += energy(w - dense(new).float())
    return lost / total if total > 0 else 0.0


def _largest(damping: Tensor) -> float | None:
    """None where no damping was enough: infinity is no JSON, and the note says what was done instead."""
    value = float(damping.max())
    return value if math.isfinite(value) else None
