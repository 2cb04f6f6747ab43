"""A place for what waits: parked activations, and statistics where they need more room than there is.

A micro-batch that is parked holds its residual, the input that it brought, and whatever else its frames keep. None of
it is read until its turn comes, so the bytes go elsewhere and the storages are emptied; every view of them stays as it
is, and the bytes come back before the forward goes on.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from ptq._tree import tree_map
from ptq.errors import BadInput
from ptq.io.files import expanded, naming
from ptq.pipeline.allocations import Allocations, identity, storages
from ptq.pipeline.budget import memory_limit

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
        self._directory = expanded(place) if str(place) and expanded(place).is_dir() else None
        if self._directory is None:
            self._device = _device(place)
            if self._device == computes:
                raise BadInput(f"offload {str(place)!r}: forwards run there, so it frees no memory; name a directory")

    @property
    def free(self) -> int:
        """Bytes that there is room for."""
        return memory_limit(self._device) if self._directory is None else shutil.disk_usage(self._directory).free

    def storage(self, nbytes: int) -> UntypedStorage:
        """Room for some bytes."""
        if self._directory is None:
            return UntypedStorage(nbytes, device=self._device)
        with tempfile.TemporaryFile(dir=self._directory, prefix="ptq-") as file:
            with naming(self._directory):
                self._reserve(file.fileno(), nbytes)
            mapped: Any = UntypedStorage.from_file(f"/dev/fd/{file.fileno()}", shared=True, nbytes=nbytes)
            return mapped

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
    """The storages of one micro-batch, emptied while it waits. They live no longer for it."""

    def __init__(self, storages: Iterable[UntypedStorage], offload: Offload) -> None:
        self._away: dict[int, tuple[weakref.ref[UntypedStorage], UntypedStorage]] = {}
        for storage in storages:
            kept = offload.storage(storage.nbytes())
            kept.copy_(storage)
            self._away[identity(storage)] = (weakref.ref(storage), kept)
        self.empty()

    def fill(self) -> None:
        """Brings the bytes back."""
        for ref, kept in self._away.values():
            if (storage := ref()) is not None:
                _refill(storage, kept)

    def empty(self) -> None:
        """Frees the memory again; nothing has been written since the bytes were copied."""
        for ref, _ in self._away.values():
            if (storage := ref()) is not None:
                storage.resize_(0)

    def give(self, storage: UntypedStorage) -> None:
        """Brings one back for good, if it is here: another than its micro-batch uses it."""
        ref, kept = self._away.get(identity(storage), (None, None))
        if ref is not None and kept is not None and ref() is storage:
            del self._away[identity(storage)]
            _refill(storage, kept)


def _refill(storage: UntypedStorage, kept: UntypedStorage) -> None:
    if not storage.nbytes():
        storage.resize_(kept.nbytes())
        storage.copy_(kept)


class Live(Allocations):
    """The memory that a forward has allocated and still holds.

    A model may keep a table that one micro-batch has made, for all of them: whoever meets it away gets it back.

    Args:
        parked: what waits, of any micro-batch.
    """

    def __init__(self, parked: Mapping[int, Parked]) -> None:
        super().__init__()
        self._parked = parked
        self._others = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for storage in (s for s in storages((args, kwargs)) if not s.nbytes()):
            for parked in self._parked.values():
                parked.give(storage)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def born(self, storage: UntypedStorage) -> None:
        if not self._others:
            super().born(storage)

    @contextmanager
    def others(self) -> Generator[None]:
        """What is made in here is not this forward's: a weight that is decoded for all of them."""
        self._others = True
        try:
            yield
        finally:
            self._others = False

    def storages(self) -> list[UntypedStorage]:
        """What is worth a copy."""
        return [s for s in self.alive() if s.nbytes() >= _LEAST and s.resizable()]


def _device(place: str | Path) -> torch.device:
    try:
        device = torch.empty(0, device=str(place)).device
    except (RuntimeError, AssertionError):
        device = torch.device("meta")  # which holds nothing either
    if device.type == "meta":
        raise BadInput(f"offload {str(place)!r}: expected a directory that is there, or a device such as cpu")
    return device
