"""The parameters of a run: final ones, those of the block at hand, and what the forward computes with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ptq._tree import tensors, tree_map
from ptq.base import Params, Stats
from ptq.errors import BadInput
from ptq.models.interpret import Use
from ptq.numerics.lazy import Lazy, load
from ptq.numerics.leaves import Leaf, Quantized, Sparse, compressed, dense, finite, validate
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
        self._reader = ThreadPoolExecutor(1, "ptq-read")
        self._reader.submit(bool)  # its thread starts now: those of the micro-batches may leave no room for it
        self._ahead: dict[str, tuple[Leaf, Future[Leaf]]] = {}

    def __call__(self, use: Use) -> Tensor:
        if use.name not in self._decoded:
            self._decoded[use.name] = self.place.cast(dense(self._read(use.name)))
        return self._decoded[use.name]

    def __contains__(self, name: object) -> bool:
        """Whether a weight is compressed by now, so that an operation that is not understood may not read it."""
        return name in self.params and compressed(self.params[str(name)])

    def begin_block(self, following: Iterable[str] = ()) -> None:
        """Forgets what was decoded for the block before; begins to read the following one from its files."""
        self._decoded.clear()
        wanted = {name for name in following if isinstance(self.params[name], Lazy)}
        for name in wanted - self._ahead.keys():
            leaf = self.params[name]
            self._ahead[name] = (leaf, self._reader.submit(load, leaf))

    def end_block(self, names: Iterable[str]) -> None:
        """Forgets what was read ahead for a block that is finished."""
        for name in names:
            self._ahead.pop(name, None)

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._reader.shutdown(cancel_futures=True)

    def load(self, names: Iterable[str]) -> Params:
        """Leaves for a transform: in memory, finite, on the device, as `[*e, out, in]`."""
        leaves = {name: self._read(name) for name in names}
        for name, leaf in leaves.items():
            _refuse_weight(name, leaf)
        moved = {n: _moved(leaf, self.place.device) for n, leaf in leaves.items()}
        params = oriented_params(moved, self.transposed)
        self._versions.update({n: _version(leaf) for n, leaf in params.items()})
        return params

    def _read(self, name: str) -> Leaf:
        leaf, ahead = self._ahead.get(name, (None, None))
        return ahead.result() if ahead is not None and leaf is self.params[name] else load(self.params[name])

    def refuse_written(self, loaded: Params, who: str) -> None:
        """Refuses a transform that wrote into a weight it was given instead of making a new one."""
        for name in (n for n in loaded if self._versions.pop(n) != _version(loaded[n])):
            raise BadInput(f"{name}: {who} changed this weight in place; a transform returns new tensors")

    def release(self, names: Iterable[str]) -> None:
        """Lets go of leaves that will not be read again."""
        for name in names:
            self.params.pop(name)
            self._decoded.pop(name, None)
            self._ahead.pop(name, None)

    def store(self, params: Mapping[str, Leaf]) -> None:
        """Takes new leaves, back on the CPU."""
        for name, leaf in params.items():
            self.params[name] = _moved(leaf, torch.device("cpu"))
            self._decoded.pop(name, None)
            self._ahead.pop(name, None)

    def replace(self, params: Params) -> None:
        """Takes the same values from another place: a file, where they are safe."""
        self.params.update({name: leaf for name, leaf in params.items() if name in self.params})


def _version(leaf: Leaf) -> tuple[int, ...]:
    return tuple(t._version for t in tensors(leaf))  # noqa: SLF001  # torch's own count of writes


def _moved(leaf: Leaf, device: torch.device) -> Leaf:
    return leaf if leaf.device == device else tree_map(lambda t: t.to(device), leaf)


def _refuse_weight(name: str, leaf: Leaf) -> None:
    if isinstance(leaf, Tensor) and not finite(leaf):
        bad = leaf.numel() - int(leaf.float().isfinite().sum())
        raise BadInput(f"{name}: {bad} of {leaf.numel()} weights are NaN or infinite; repair the checkpoint")


def refuse_result(name: str, leaf: Leaf, error: float, who: str) -> None:
    """What a solve returned is finite and can be decoded, or is refused at its own block."""
    values = leaf.values if isinstance(leaf, Sparse) else leaf
    if isinstance(values, Quantized):
        validate(values, f"{name}: {who}")
    if not math.isfinite(error):
        raise BadInput(f"{name}: {who} gave NaN or infinite values; leave this weight out with `ignore`")


def refuse_not_finite(stats: Stats) -> None:
    """NaN and infinity in an input show in every statistic of it; in a Gram matrix, on its diagonal."""
    for site, kinds in stats.items():
        for kind, statistic in kinds.items():
            values = [statistic.sum.diagonal(dim1=-2, dim2=-1)] if kind == "gram" else tensors(statistic)
            if not all(bool(t.isfinite().all()) for t in values):
                raise BadInput(f"{site}: its input has NaN or infinite activations ({kind}); check weights and data")


def refuse_unmeasured(stats: Stats, expected: Iterable[str] = ()) -> None:
    """A statistic of no tokens says nothing: no batch came there, everything was masked, or the batches were empty."""
    for site in dict.fromkeys((*expected, *stats)):
        kinds = stats.get(site, {})
        if not kinds or any(not bool(statistic.count.any()) for statistic in kinds.values()):
            raise BadInput(f"{site}: no calibration token reached it; all were masked, or the batches are empty")
