"""Where the numbers that a weight makes are used: a linear whose numbers become an index is a router.

Every tensor of a forward has at most one origin, the weight whose product it is made of by operations on that product
alone. What is made of several products (a residual, attention) has none, and each product begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ptq.models.interpret import Use, flat


class Flow:
    """Follows the numbers of one forward; to be shown each use of a weight, and then the operation that it was for.

    Args:
        inputs: what the model is called with.
    """

    def __init__(self, inputs: Any) -> None:
        self.choosing: set[str] = set()
        """weights whose numbers became an index that was used"""
        self._origin: Any = WeakIdKeyDictionary()
        self._reading: str | None = None
        self._mark((t for t in flat(inputs) if t.is_floating_point()), None)

    def read(self, use: Use) -> None:
        """A weight that the operation at hand multiplies by or looks up in."""
        if use.kind != "other":
            self._reading = use.name

    def __call__(self, func: Any, arguments: Any, out: Any) -> None:
        """An operation that ran."""
        given = [t for t in flat(arguments) if t in self._origin]
        indices = (self._origin[t] for t in given if _is_index(t))
        self.choosing.update(origin for origin in indices if origin)
        origins = {self._origin[t] for t in given} if self._reading is None else {self._reading}
        self._reading = None
        if origins and not _is_constant(func):
            self._mark(flat(out), origins.pop() if len(origins) == 1 else None)

    def _mark(self, tensors: Iterable[Tensor], origin: str | None) -> None:
        for t in tensors:
            self._origin[t] = origin


def _is_index(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _is_constant(func: Any) -> bool:
    """Whether an operation takes no more than shape and dtype from its tensor: `zeros_like`, `new_ones`."""
    name = getattr(func, "__name__", "")
    return name.endswith("_like") or name.startswith("new_")
