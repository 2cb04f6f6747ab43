"""safetensors files, streamed both ways: a tensor is read when it is used and written as soon as it is known.

A file is 8 bytes of header length, a JSON header with dtype, shape and byte range of every tensor, and the bytes. It is
read by offset instead of through a memory map, so that what is resident is what is in use.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.io.files import naming, read_json
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
    # What no weight is read from; a tensor that the model has no place for is carried along whatever it is.
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PIECE = 1 << 22
"""bytes that are worth a thread"""


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


def sizes(tensor: OnDisk, count: int) -> torch.Size:
    """The shape that a tensor of `count` integers spells out."""
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.shape.numel() != count:
        got = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise BadInput(f"{tensor.file}: {tensor.name}: got {got}, expected int64 ({count},)")
    found = tensor.load().flatten().tolist()
    if min(found, default=0) < 1:
        raise BadInput(f"{tensor.file}: {tensor.name}: got {found}, expected sizes above 0")
    return torch.Size(found)


def positive(tensor: OnDisk, values: Tensor) -> Tensor:
    """What a tensor of scales or divisors holds, as floats, if all are numbers above 0."""
    wrong = ~(values.isfinite() & (values > 0))
    if bool(wrong.any()):
        raise BadInput(f"{tensor.file}: {tensor.name}: got {values[wrong][0].item():g}, expected numbers above 0")
    return values


def read_bytes(file: Path, offset: int, count: int, name: str) -> Tensor:
    """`count` bytes of a file as uint8; `name` is the tensor, for the error when they are not there.

    Long stretches are read in as many pieces as torch would use threads: one alone reaches the speed neither of memory
    nor of a disk.
    """
    buffer = torch.empty(count, dtype=torch.uint8)
    size = max(-(-count // torch.get_num_threads()), _PIECE)
    starts = range(0, count, size)
    with naming(file), file.open("rb") as handle, ThreadPoolExecutor(max(len(starts), 1)) as pool:
        across = pool.map if len(starts) > 1 else map  # the pool starts no thread before it is given work
        got = sum(across(lambda at: _filled(handle.fileno(), buffer[at : at + size], offset + at), starts))
    if got != count:
        raise BadInput(f"{file}: {name}: file ends after {got} of {count} bytes; download or copy it again")
    return buffer


def _filled(descriptor: int, buffer: Tensor, offset: int) -> int:
    """How many bytes of the buffer were there: the system gives fewer than asked at the end of a file, or at 2 GiB."""
    room = buffer.numpy().data
    got = 0
    while len(room) > got and (read := os.preadv(descriptor, [room[got:]], offset + got)):
        got += read
    return got


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
        found = _indexed(path)
        if (path / WEIGHTS).is_file() and all(tensor.file.name != WEIGHTS for tensor in found.values()):
            what = f"has {WEIGHTS}, and {INDEX} that names other files; loaders differ in which they read"
            raise BadInput(f"{path}: {what}; remove what is out of date")
        return found
    if (path / WEIGHTS).is_file():
        return _header(path / WEIGHTS)
    others = sorted(p.name for p in path.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".h5", ".msgpack"))
    held = f"; it has {others[0]}, which must be converted to safetensors first" if others else ""
    raise BadInput(f"{path}: no {WEIGHTS} and no {INDEX}{held}")


def _indexed(path: Path) -> dict[str, OnDisk]:
    files = _weight_map(path / INDEX)
    absent = [name for name in sorted(set(files.values())) if not (path / name).is_file()]
    if absent:
        raise BadInput(f"{path}: shard {absent[0]} is missing, which {INDEX} names; download or copy it again")
    found = {name: _header(path / name) for name in sorted(set(files.values()))}
    for tensor, file in files.items():
        if tensor not in found[file]:
            raise BadInput(f"{path / file}: no tensor {tensor}, which {INDEX} says is in this shard")
    for file, tensor in ((file, tensor) for file, entries in found.items() for tensor in entries):
        if files.get(tensor) != file:
            where = f"in {files[tensor]}" if tensor in files else "in no shard"
            raise BadInput(f"{path / file}: {tensor}: {INDEX} has it {where}; download or copy it again")
    return {tensor: found[file][tensor] for tensor, file in files.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> the name of a file beside the index: one that leads elsewhere is no part of the model."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise BadInput(f"{index}: no weight_map; download or copy it again")
    files: dict[str, Any] = table
    for tensor, file in files.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise BadInput(f"{index}: {tensor}: got {file!r}, expected the name of a file beside it")
    return files


def metadata(file: Path) -> dict[str, str]:
    """The free text that a file carries beside its tensors."""
    _, _, raw = _raw(file)
    return json.loads(raw).get("__metadata__", {})


def _raw(file: Path) -> tuple[int, int, bytes]:
    """A file's size, its header's length and the header."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise BadInput(f"{file}: truncated or no safetensors file ({size} bytes); download or copy it again")
        return size, length, handle.read(length)


def _header(file: Path) -> dict[str, OnDisk]:
    size, length, raw = _raw(file)
    try:
        table = json.loads(raw)
        _texts(table.pop("__metadata__", None) or {})
        found = {name: _entry(file, name, entry, 8 + length) for name, entry in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{file}: corrupt header; download or copy it again") from None
    for leaf in found.values():
        end = leaf.offset + leaf.shape.numel() * leaf.dtype.itemsize
        if end > size:
            raise BadInput(f"{file}: truncated: {leaf.name} ends at byte {end} of {size}; download or copy it again")
    _refuse_gaps(file, found, 8 + length, size)
    return found


def _texts(told: Mapping[str, Any]) -> None:
    """What is beside the tensors is text: safetensors itself opens no file where it is not."""
    if not all(isinstance(text, str) for text in told.values()):
        raise ValueError(told)


def _refuse_gaps(file: Path, found: Mapping[str, OnDisk], end: int, size: int) -> None:
    """Tensors lie one behind the other up to the end of the file, or bytes have two meanings or none."""
    for leaf in sorted(found.values(), key=lambda leaf: (leaf.offset, leaf.shape.numel())):
        if leaf.offset != end:
            what = "overlaps the tensor before it" if leaf.offset < end else "leaves bytes unused before it"
            got = f"begins at byte {leaf.offset}, expected {end}"
            raise BadInput(f"{file}: {leaf.name}: {what}: {got}; download or copy it again")
        end += leaf.shape.numel() * leaf.dtype.itemsize
    if end != size:
        raise BadInput(f"{file}: {size} bytes, expected {end} by its header; download or copy it again")


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
