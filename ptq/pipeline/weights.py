"""The parameters of a run: final ones, those of the block at hand, and what the forward computes with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ptq._tree import tree_map
from ptq.base import Params
from ptq.errors import BadInput
from ptq.models.interpret import Use
from ptq.numerics.lazy import load
from ptq.numerics.leaves import Leaf, dense
from ptq.pipeline.plan import oriented_params


class Weights:
    """Serves parameters in the dtype that is computed in, each decoded once until the next block begins.

    Args:
        params: leaves; those of files stay there until they are read.
        transposed: names stored as (in, out).
        dtype: what the forward computes in; None: each parameter's own.
        device: where it computes.
    """

    def __init__(
        self, params: Params, transposed: frozenset[str], dtype: torch.dtype | None, device: torch.device
    ) -> None:
        self.params: Params = dict(params)
        self.transposed = transposed
        self.dtype = dtype
        self.device = device
        self._decoded: dict[str, Tensor] = {}

    def __call__(self, use: Use) -> Tensor:
        if use.name not in self._decoded:
            self._decoded[use.name] = self.cast(dense(self.params[use.name]))
        return self._decoded[use.name]

    def cast(self, value: Tensor) -> Tensor:
        dtype = self.dtype if self.dtype and value.is_floating_point() else value.dtype
        return value.to(device=self.device, dtype=dtype)

    def begin_block(self) -> None:
        """Forgets what was decoded for the block before."""
        self._decoded.clear()

    def load(self, names: Iterable[str]) -> Params:
        """Leaves for a transform: in memory, finite, on the device, as `[*e, out, in]`."""
        leaves = {name: load(self.params[name]) for name in names}
        for name, leaf in leaves.items():
            _refuse_not_finite(name, leaf)
        return oriented_params({n: _moved(leaf, self.device) for n, leaf in leaves.items()}, self.transposed)

    def release(self, names: Iterable[str]) -> None:
        """Lets go of leaves that will not be read again."""
        for name in names:
            self.params.pop(name)
            self._decoded.pop(name, None)

    def store(self, params: Mapping[str, Leaf]) -> None:
        """Takes new leaves, back on the CPU."""
        for name, leaf in params.items():
            self.params[name] = _moved(leaf, torch.device("cpu"))
            self._decoded.pop(name, None)


def _moved(leaf: Leaf, device: torch.device) -> Leaf:
    return leaf if leaf.device == device else tree_map(lambda t: t.to(device), leaf)


def _refuse_not_finite(name: str, leaf: Leaf) -> None:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        bad = leaf.numel() - int(leaf.isfinite().sum())
        if bad:
            raise BadInput(f"{name}: {bad} of {leaf.numel()} weights are NaN or infinite; repair the checkpoint")
