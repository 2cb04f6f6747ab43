"""Writing safetensors files: tensors are appended as they come, and what was synced can be gone on with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import BufferedRandom
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.io.files import naming, sync, write_json
from ptq.io.safetensors import DTYPES, INDEX, NAMES, WEIGHTS, OnDisk

SHARD_SIZE = 4 << 30
_ROOM = 1 << 18  # bytes kept free for a header, whose length is known only when the last tensor is
_METADATA = {"format": "pt"}


class Entry(NamedTuple):
    """Where a tensor was written."""

    shard: int
    dtype: str
    shape: list[int]
    begin: int
    """in the shard, after its header"""
    end: int

    def on_disk(self, name: str, directory: Path) -> OnDisk:
        """The tensor, while the shards have their temporary names."""
        shape = torch.Size(self.shape)
        return OnDisk(_partial(directory, self.shard), name, DTYPES[self.dtype], shape, _ROOM + self.begin)


class ShardWriter:
    """Writes tensors to shards one by one and holds none of them.

    Each shard keeps room for its header in front, and is full when it has `shard_size` bytes or when that room is
    used up. Shards have temporary names until `rename`, since their number is part of their names.

    Args:
        directory: where the shards go; it exists.
        shard_size: bytes of tensors in a shard; a larger tensor has a shard of its own.
        written: what an earlier writer left there, in the order of writing; whatever the files hold beyond is cut off.
    """

    def __init__(
        self, directory: Path, shard_size: int = SHARD_SIZE, written: Iterable[tuple[str, Entry]] = ()
    ) -> None:
        self.directory = directory
        self.shard_size = shard_size
        self._shards: list[_Shard] = []
        for name, entry in written:
            while entry.shard >= len(self._shards):
                self._shards.append(_Shard(_partial(directory, len(self._shards))))
            self._shards[entry.shard].note(name, entry)
        if not any(directory.glob("*.safetensors")):  # some have their final names: the last tensor is in its shard
            for shard in self._shards:
                shard.refuse_short()
        for stray in set(directory.glob("shard-*.partial")) - {shard.path for shard in self._shards}:
            stray.unlink()

    def write(self, name: str, tensor: Tensor) -> Entry:
        """Appends one tensor."""
        # A tensor of one element is contiguous whatever its strides say, and then cannot be viewed as bytes.
        flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
        data = flat.view(torch.uint8).numpy().data
        dtype, shape = NAMES[tensor.dtype], list(tensor.shape)
        if not (self._shards and self._shards[-1].takes(name, shape, len(data), self.shard_size)):
            self._next()
        begin = self._shards[-1].end
        entry = Entry(len(self._shards) - 1, dtype, shape, begin, begin + len(data))
        self._shards[-1].append(name, entry, data)
        return entry

    def sync(self) -> None:
        """Waits until all that was written is on disk."""
        if self._shards:
            self._shards[-1].sync()
            sync(self.directory)

    def close(self) -> list[str]:
        """Completes the last shard, and returns the names that `rename` will give."""
        if not self._shards:
            self._next()
        self._shards[-1].close()
        sync(self.directory)
        count = len(self._shards)
        return [WEIGHTS] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]

    def abort(self) -> None:
        """Closes what is open; what was synced can be gone on with."""
        if self._shards:
            self._shards[-1].abandon()

    def _next(self) -> None:
        if self._shards:
            self._shards[-1].close()
        self._shards.append(_Shard(_partial(self.directory, len(self._shards))))


def rename_shards(directory: Path, names: Sequence[str], written: Iterable[tuple[str, Entry]]) -> None:
    """Gives complete shards their names, with an index where there are several; may be done again."""
    for i, name in enumerate(names):
        if _partial(directory, i).exists():
            _partial(directory, i).rename(directory / name)
    if len(names) == 1:
        return
    table = {tensor: (names[entry.shard], entry.end - entry.begin) for tensor, entry in written}
    total = sum(count for _, count in table.values())
    weight_map = {tensor: table[tensor][0] for tensor in sorted(table)}
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _partial(directory: Path, shard: int) -> Path:
    return directory / f"shard-{shard}.partial"


class _Shard:
    """One file that is being written, behind the room for its header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: BufferedRandom | None = None
        self.entries: dict[str, dict[str, Any]] = {}
        self.end = 0
        self._header = len(_json({"__metadata__": _METADATA}))

    @property
    def file(self) -> BufferedRandom:
        """The file, behind the last tensor that was noted; what is there beyond does not count, and is cut off."""
        if self._open is None:
            if self.entries:
                self.refuse_short()
            end = _ROOM + self.end if self.entries else 0
            self._open = self.path.open("r+b" if self.path.exists() else "w+b")
            self._open.truncate(end)
            self._open.seek(_ROOM + self.end)
        return self._open

    def refuse_short(self) -> None:
        """Refuses a file that is gone or lacks what was noted."""
        size, end = self.path.stat().st_size if self.path.exists() else 0, _ROOM + self.end
        if size < end:
            what = f"holds {size} bytes, where its journal says {end}"
            raise BadInput(f"{self.path}: {what}; remove the directory and start again")

    def abandon(self) -> None:
        """Closes the file as it is."""
        if self._open is not None:
            with suppress(OSError):  # what is still in the buffer does not count
                self._open.close()

    def takes(self, name: str, shape: Sequence[int], count: int, size: int) -> bool:
        fits = self._header + _width(name, shape) <= _ROOM - 8 and self.end + count <= size
        return fits or not self.entries

    def append(self, name: str, entry: Entry, data: memoryview) -> None:
        with naming(self.path):
            self.file.write(data)
        self.note(name, entry)

    def note(self, name: str, entry: Entry) -> None:
        offsets = [entry.begin, entry.end]
        self.entries[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        self.end = entry.end
        self._header += _width(name, entry.shape)

    def sync(self) -> None:
        with naming(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        header = _json({"__metadata__": _METADATA, **self.entries})
        with naming(self.path):
            self.file.seek(0)
            self.file.write((_ROOM - 8).to_bytes(8, "little") + header.ljust(_ROOM - 8))
        self.sync()
        self.file.close()


def _width(name: str, shape: Sequence[int]) -> int:
    """Bytes an entry takes in a header at most, whatever its dtype and offsets."""
    return len(_json({name: list(shape)})) + 128


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
