"""The parameters of a run: final ones, those of the block at hand, and what the forward computes with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ptq._tree import tensors, tree_map
from ptq.base import Params, Stats
from ptq.errors import BadInput
from ptq.models.interpret import Use
from ptq.numerics.lazy import load
from ptq.numerics.leaves import Leaf, dense
from ptq.pipeline.place import Place
from ptq.pipeline.plan import oriented_params


class Weights:
    """Serves parameters in the dtype that is computed in, each decoded once until the next block begins.

    Args:
        params: leaves; those of files stay there until they are read.
        transposed: names stored as (in, out).
        place: where and in what dtype the forward computes.
    """

    def __init__(self, params: Params, transposed: frozenset[str], place: Place) -> None:
        self.params: Params = dict(params)
        self.transposed = transposed
        self.place = place
        self._decoded: dict[str, Tensor] = {}
        self._versions: dict[str, tuple[int, ...]] = {}

    def __call__(self, use: Use) -> Tensor:
        if use.name not in self._decoded:
            self._decoded[use.name] = self.place.cast(dense(self.params[use.name]))
        return self._decoded[use.name]

    def begin_block(self) -> None:
        """Forgets what was decoded for the block before."""
        self._decoded.clear()

    def load(self, names: Iterable[str]) -> Params:
        """Leaves for a transform: in memory, finite, on the device, as `[*e, out, in]`."""
        leaves = {name: load(self.params[name]) for name in names}
        for name, leaf in leaves.items():
            _refuse_weight(name, leaf)
        moved = {n: _moved(leaf, self.place.device) for n, leaf in leaves.items()}
        params = oriented_params(moved, self.transposed)
        self._versions = {n: _version(leaf) for n, leaf in params.items()}
        return params

    def refuse_written(self, loaded: Params, who: str) -> None:
        """Refuses a transform that wrote into a weight it was given instead of making a new one."""
        for name in (n for n in loaded if n in self._versions and self._versions[n] != _version(loaded[n])):
            raise BadInput(f"{name}: {who} changed this weight in place; a transform returns new tensors")

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


def _version(leaf: Leaf) -> tuple[int, ...]:
    return tuple(t._version for t in tensors(leaf))  # noqa: SLF001  # torch's own count of writes


def _moved(leaf: Leaf, device: torch.device) -> Leaf:
    return leaf if leaf.device == device else tree_map(lambda t: t.to(device), leaf)


def _refuse_weight(name: str, leaf: Leaf) -> None:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        bad = leaf.numel() - int(leaf.isfinite().sum())
        if bad:
            raise BadInput(f"{name}: {bad} of {leaf.numel()} weights are NaN or infinite; repair the checkpoint")


def refuse_not_finite(stats: Stats) -> None:
    """NaN and infinity in an input show in every statistic of it; in a Gram matrix, on its diagonal."""
    for site, kinds in stats.items():
        for kind, statistic in kinds.items():
            values = [statistic.sum.diagonal(dim1=-2, dim2=-1)] if kind == "gram" else tensors(statistic)
            if not all(bool(t.isfinite().all()) for t in values):
                raise BadInput(f"{site}: its input has NaN or infinite activations ({kind}); check weights and data")


def refuse_unmeasured(stats: Stats) -> None:
    """A statistic of no tokens says nothing: everything was masked, or the batches were empty."""
    for site, kinds in stats.items():
        if any(not bool(statistic.count.any()) for statistic in kinds.values()):
            raise BadInput(f"{site}: no calibration token reached it; all were masked, or the batches are empty")
