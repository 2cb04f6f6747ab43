"""safetensors files, streamed both ways: a tensor is read when it is used and written as soon as it is known.

A file is 8 bytes of header length, a JSON header with dtype, shape and byte range of every tensor, and the bytes. It is
read by offset instead of through a memory map, so that what is resident is what is in use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.numerics.lazy import Lazy

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_SIZE = 4 << 30
_ROOM = 1 << 18  # bytes kept free for a header, whose length is known only when the last tensor is
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class OnDisk(Lazy):
    """A tensor in a file, read when it is used."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int

    def load(self) -> Tensor:
        count = self.shape.numel() * self.dtype.itemsize
        return read_bytes(self.file, self.offset, count, self.name).view(self.dtype).view(self.shape)


def read_bytes(file: Path, offset: int, count: int, name: str) -> Tensor:
    """`count` bytes of a file as uint8; `name` is the tensor, for the error when they are not there."""
    buffer = torch.empty(count, dtype=torch.uint8)
    with file.open("rb") as handle:
        handle.seek(offset)
        got = handle.readinto(buffer.numpy().data)  # type: ignore[attr-defined]  # "rb" opens a BufferedReader
    if got != count:
        raise BadInput(f"{file}: {name}: file ends after {got} of {count} bytes; download or copy it again")
    return buffer


def headers(path: Path) -> dict[str, OnDisk]:
    """All tensors of a checkpoint by name; only headers are read.

    Args:
        path: a file, or a directory with `model.safetensors.index.json` and its shards or with `model.safetensors`.

    Raises:
        BadInput: a file is missing, truncated or no safetensors; a tensor is not where the index says.
    """
    if path.is_file():
        return _header(path)
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / WEIGHTS).is_file():
        return _header(path / WEIGHTS)
    others = sorted(p.name for p in path.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".h5", ".msgpack"))
    held = f"; it has {others[0]}, which must be converted to safetensors first" if others else ""
    raise BadInput(f"{path}: no {WEIGHTS} and no {INDEX}{held}")


def _indexed(path: Path) -> dict[str, OnDisk]:
    table = read_json(path / INDEX).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise BadInput(f"{path / INDEX}: no weight_map; download or copy it again")
    wrong = [tensor for tensor, file in table.items() if not isinstance(file, str)]
    if wrong:
        raise BadInput(f"{path / INDEX}: {wrong[0]}: names no file; download or copy it again")
    files: dict[str, str] = table
    absent = [name for name in sorted(set(files.values())) if not (path / name).is_file()]
    if absent:
        raise BadInput(f"{path}: shard {absent[0]} is missing, which {INDEX} names; download or copy it again")
    found = {name: _header(path / name) for name in sorted(set(files.values()))}
    for tensor, file in files.items():
        if tensor not in found[file]:
            raise BadInput(f"{path / file}: no tensor {tensor}, which {INDEX} says is in this shard")
    return {tensor: found[file][tensor] for tensor, file in files.items()}


def _header(file: Path) -> dict[str, OnDisk]:
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise BadInput(f"{file}: truncated or no safetensors file ({size} bytes); download or copy it again")
        raw = handle.read(length)
    try:
        table = json.loads(raw)
        entries = {name: entry for name, entry in table.items() if name != "__metadata__"}
        found = {name: _entry(file, name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{file}: corrupt header; download or copy it again") from None
    for leaf in found.values():
        end = leaf.offset + leaf.shape.numel() * leaf.dtype.itemsize
        if end > size:
            raise BadInput(f"{file}: truncated: {leaf.name} ends at byte {end} of {size}; download or copy it again")
    return found


def _entry(file: Path, name: str, entry: Mapping[str, Any], start: int) -> OnDisk:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise BadInput(f"{file}: {name}: dtype {entry['dtype']} is not read; expected one of {', '.join(DTYPES)}")
    dtype, sizes = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in (begin, end, *sizes)):
        raise BadInput(f"{file}: {name}: bytes {begin} to {end} for {sizes}; download or copy it again")
    if end - begin != math.prod(sizes) * dtype.itemsize:
        raise BadInput(f"{file}: {name}: {end - begin} bytes for {sizes} of {dtype}; download or copy it again")
    return OnDisk(file, name, dtype, torch.Size(sizes), start + begin)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        BadInput: the file is not there, not JSON or not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{file}: no such file") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{file}: not a JSON file; download or copy it again") from None
    if not isinstance(value, dict):
        raise BadInput(f"{file}: holds {type(value).__name__}, expected an object")
    return value


class ShardWriter:
    """Writes tensors to shards one by one and holds none of them.

    Each shard keeps room for its header in front, and is full when it has `shard_size` bytes or when that room is
    used up. Shards have temporary names until `close`, since their number is part of their names.

    Args:
        directory: where the shards go; it exists.
        shard_size: bytes of tensors in a shard; a larger tensor has a shard of its own.
    """

    def __init__(self, directory: Path, shard_size: int = SHARD_SIZE) -> None:
        self.directory = directory
        self.shard_size = shard_size
        self._shards = [_Shard(directory / "shard-0.partial")]

    @property
    def total(self) -> int:
        """Bytes of tensors written so far."""
        return sum(shard.end for shard in self._shards)

    def write(self, name: str, tensor: Tensor) -> None:
        """Appends one tensor."""
        # A tensor of one element is contiguous whatever its strides say, and then cannot be viewed as bytes.
        flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
        data = flat.view(torch.uint8).numpy().data
        entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        if not self._shards[-1].takes(name, entry, len(data), self.shard_size):
            self._shards[-1].close()
            self._shards.append(_Shard(self.directory / f"shard-{len(self._shards)}.partial"))
        self._shards[-1].append(name, entry, data)

    def close(self) -> list[str]:
        """Names the shards, writes an index where there are several, and returns the names of all these files."""
        self._shards[-1].close()
        count = len(self._shards)
        names = [WEIGHTS] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        for shard, name in zip(self._shards, names, strict=True):
            shard.path.rename(self.directory / name)
        if count == 1:
            return names
        table = {tensor: name for shard, name in zip(self._shards, names, strict=True) for tensor in shard.entries}
        index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(table.items()))}
        (self.directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return [*names, INDEX]

    def abort(self) -> None:
        """Closes what is open; the files are left to whoever removes the directory."""
        self._shards[-1].file.close()


class _Shard:
    """One file that is being written, behind the room for its header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("wb")
        self.file.seek(_ROOM)
        self.entries: dict[str, dict[str, Any]] = {}
        self.end = 0
        self._header = len(_json({"__metadata__": _METADATA}))

    def takes(self, name: str, entry: dict[str, Any], count: int, size: int) -> bool:
        fits = self._header + _width(name, entry) <= _ROOM - 8 and self.end + count <= size
        return fits or not self.entries

    def append(self, name: str, entry: dict[str, Any], data: memoryview) -> None:
        self.file.write(data)
        self.entries[name] = {**entry, "data_offsets": [self.end, self.end + len(data)]}
        self.end += len(data)
        self._header += _width(name, entry)

    def close(self) -> None:
        header = _json({"__metadata__": _METADATA, **self.entries})
        self.file.seek(0)
        self.file.write((_ROOM - 8).to_bytes(8, "little") + header.ljust(_ROOM - 8))
        self.file.close()


def _width(name: str, entry: dict[str, Any]) -> int:
    """Bytes an entry takes in a header at most, whatever its offsets."""
    return len(_json({name: entry})) + 64


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
