"""A place for what waits: parked activations, and statistics where they need more room than there is.

A micro-batch that is parked holds its residual, the input that it brought, and whatever else its frames keep. None of
it is read until its turn comes, so the bytes go elsewhere and the storages are emptied; every view of them stays as it
is, and the bytes come back before the forward goes on.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from ptq._tree import tree_map
from ptq.errors import BadInput
from ptq.io.files import naming

_LEAST = 1 << 16  # bytes; what is smaller is not worth a copy


class Offload:
    """Memory on another device, or in unnamed files of a directory, which go with the process however it ends.

    Args:
        place: a device such as "cpu", or a directory that is there.
        computes: the device that forwards run on, where nothing would be gained.

    Raises:
        BadInput: it is neither, or that device.
    """

    def __init__(self, place: str | Path, computes: torch.device | None = None) -> None:
        self.place = place
        self._directory = Path(place).expanduser() if str(place) and Path(place).expanduser().is_dir() else None
        if self._directory is None:
            self._device = _device(place)
            if self._device == computes:
                raise BadInput(f"offload {str(place)!r}: forwards run there, so it frees no memory; name a directory")

    def storage(self, nbytes: int) -> UntypedStorage:
        """Room for some bytes."""
        if self._directory is None:
            return UntypedStorage(nbytes, device=self._device)
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix="ptq-") as file:
            with naming(self._directory):
                self._reserve(file.fileno(), nbytes)
            mapped: Any = UntypedStorage.from_file(file.name, shared=True, nbytes=nbytes)
            return mapped  # it outlives the name

    @staticmethod
    def _reserve(file: int, nbytes: int) -> None:
        """A hole that a full disk cannot fill would end the process when it is written to; this is told at once."""
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, nbytes)
        else:
            os.ftruncate(file, nbytes)

    def keep(self, tree: Any) -> Any:
        """The same tensors in that place."""
        return tree_map(self._kept, tree)

    def _kept(self, tensor: Tensor) -> Tensor:
        storage = self.storage(tensor.numel() * tensor.element_size())
        made: Any = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        return made.set_(storage, 0, tensor.shape).copy_(tensor)


class Parked:
    """The storages of one micro-batch, emptied while it waits."""

    def __init__(self, storages: Iterable[UntypedStorage], offload: Offload) -> None:
        self._away: list[tuple[UntypedStorage, UntypedStorage]] = []
        for storage in storages:
            kept = offload.storage(storage.nbytes())
            kept.copy_(storage)
            self._away.append((storage, kept))
        self.empty()

    def fill(self) -> None:
        """Brings the bytes back."""
        for storage, kept in self._away:
            if not storage.nbytes():
                storage.resize_(kept.nbytes())
                storage.copy_(kept)

    def empty(self) -> None:
        """Frees the memory again; nothing has been written since the bytes were copied."""
        for storage, _ in self._away:
            storage.resize_(0)


class Live:
    """The tensors that a forward has made and still holds.

    Args:
        foreign: tensors of others: a caller's batch. Views of them are left alone.
    """

    def __init__(self, foreign: Iterable[Tensor]) -> None:
        self._foreign = {t.untyped_storage().data_ptr() for t in foreign}
        self._made: list[weakref.ref[Tensor]] = []

    def note(self, func: Any, arguments: Any, result: Any) -> None:
        """Notes what an operation returned."""
        self._made += [weakref.ref(t) for t in _tensors(result)]

    def lend(self, value: Tensor) -> Tensor:
        """Notes a weight that an operation is given, which others read too."""
        self._foreign.add(value.untyped_storage().data_ptr())
        return value

    def storages(self) -> list[UntypedStorage]:
        """What holds their values, each once."""
        alive = [(r, t) for r in self._made if (t := r()) is not None]
        self._made = [r for r, _ in alive]
        found = {s.data_ptr(): s for _, t in alive if (s := t.untyped_storage()).nbytes() >= _LEAST}
        return [s for pointer, s in found.items() if pointer not in self._foreign]


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _tensors(item)


def _device(place: str | Path) -> torch.device:
    try:
        device = torch.empty(0, device=str(place)).device
    except (RuntimeError, AssertionError):
        device = torch.device("meta")  # which holds nothing either
    if device.type == "meta":
        raise BadInput(f"offload {str(place)!r}: expected a directory that is there, or a device such as cpu")
    return device
