"""What a transform will make of its weights, known from their shapes before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import optree
import torch

from ptq._tree import NAMESPACE, tree_map
from ptq.base import Params, State, Transform
from ptq.errors import PtqError
from ptq.numerics.lazy import Lazy
from ptq.numerics.leaves import Leaf, compressed


def abstract(leaf: Leaf) -> Leaf:
    """The leaf without its values: on the meta device. A compressed one that lies in a file stays there.

    >>> abstract(torch.ones(2, 3))
    tensor(..., device='meta', size=(2, 3))
    """
    if isinstance(leaf, Lazy):
        return leaf if compressed(leaf) else torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return tree_map(lambda t: torch.empty_like(t, device="meta"), leaf)


def foreseen(t: Transform, params: Params, names: Iterable[str], **given: Any) -> Params:
    """What a solve makes of abstract weights: `apply` on them, and on the statistics that `init` declares.

    A transform that looks at values cannot be run on shapes; nothing is said of its weights then, and a conflict with
    what follows shows when it comes to it. Weights that are alike are looked at once.
    """
    if t.kind == "reparam":  # a weight stays what it is
        return {}
    known: dict[Any, Leaf | None] = {}
    made: Params = {}
    for name in (n for n in names if not isinstance(params[n], Lazy)):
        values, structure = optree.tree_flatten(params[name], namespace=NAMESPACE)
        like = (structure, *((v.shape, v.dtype) for v in values))
        if like not in known:
            known[like] = _applied(t, name, params[name], given)
        if known[like] is not None:
            made[name] = known[like]
    return made


def _applied(t: Transform, name: str, leaf: Leaf, given: dict[str, Any]) -> Leaf | None:
    state, sites = State({name: leaf}), {name: (name,)}
    try:
        after, _ = t.apply(state, abstract(t.init(state, sites, **given)), sites, **given)
    except PtqError:
        raise
    except Exception:  # noqa: BLE001  # anyone's code, on tensors that hold nothing, fails in any way
        return None
    return after.params[name]
