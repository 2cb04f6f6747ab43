"""The check that a change of variables kept the function, on real inputs, before anything lossy follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ptq.base import Params
from ptq.errors import BadInput


def refuse_change(old: Any, new: Any, args: Sequence[Any], params: Params, who: str, through: Sequence[str]) -> None:
    """Refuses a reparam whose block computes something else than before.

    The limit is 1e-4, or four units in the last place of the dtype that weights are stored in.

    Args:
        old: what the block computed before, in float32.
        new: what it computes now.
        args: what it was given: what it adds to its first argument is compared, since a residual would hide it.
        params: its weights.
        who: block and transform, for the error.
        through: what the change acted on.

    Raises:
        BadInput: the outputs differ by more than the limit.
    """
    x = args[0] if args and isinstance(args[0], Tensor) else None
    changes = [_relative(a, b, x) for a, b in zip(floats(old), floats(new), strict=True)]
    change = float(torch.tensor([0.0, *changes]).max())  # which a NaN wins, wherever it stands
    limit = max(1e-4, 4 * max(torch.finfo(leaf.dtype).eps for leaf in params.values()))
    if not change <= limit:
        raise BadInput(
            f"{who} changes the function by {change:.1e} (limit {limit:.1e}) through {', '.join(through)}; "
            "leave this block out with `ignore`"
        )


def float32(tree: Any) -> Any:
    """The same arguments in float32; masks and ids stay."""
    return pytree.tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t, tree)


def floats(tree: Any) -> Iterator[Tensor]:
    """All float tensors of a tree."""
    leaves = pytree.tree_leaves(tree)
    return (t for t in leaves if isinstance(t, Tensor) and t.is_floating_point())


def _relative(a: Tensor, b: Tensor, x: Tensor | None) -> float:
    own = a - x if x is not None and x.shape == a.shape else a
    return float((a - b).norm() / own.norm().clamp_min(torch.finfo(a.dtype).tiny))
