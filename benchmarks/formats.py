"""Are files read and written as fast as safetensors alone does, and codes packed as fast as compressed-tensors does?

    python benchmarks/formats.py --scratch DIR

Each pair does the same on the same data, in turns; the files are in the system's cache. Both must give the
same bytes. Needs the test extra, which has compressed-tensors.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from record import PACKAGES, ROOT, versions, write
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ptq.io.safetensors import headers
from ptq.io.shards import ShardWriter, rename_shards
from ptq.numerics.chunks import by_rows
from ptq.numerics.grids import Minifloat
from ptq.numerics.packing import pack, pack_bytes, unpack, unpack_bytes

SIZE = 4096
Row = dict[str, Any]


def main() -> None:
    args = arguments()
    args.scratch.mkdir(parents=True, exist_ok=True)
    rows = [row for bits in (4, 8, 3) for row in integers(bits, args.repeats)] + floats(args.repeats)
    rows += files(args.scratch, args.gigabytes, args.repeats)
    settings = {"gigabytes": args.gigabytes, "matrix": [SIZE, SIZE], "repeats": args.repeats}
    write(args.results, settings=settings, packages=versions((*PACKAGES, "compressed-tensors")), rows=rows)
    Console().print(table(rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scratch", type=Path, required=True, help="room for twice the files")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the files")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "formats.json")
    return parser.parse_args()


def in_turns(what: str, ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int) -> Row:
    """Median seconds of both; who goes first changes with each repeat."""
    seconds: dict[str, list[float]] = {"ptq": [], "other": []}
    tools = [("ptq", ours), ("other", theirs)]
    for repeat in range(repeats):
        for name, work in tools[:: 1 if repeat % 2 == 0 else -1]:
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    middle = {name: median(found) for name, found in seconds.items()}
    return {"what": what, **middle, "ratio": middle["ptq"] / middle["other"], "all": seconds}


def same(ours: Tensor, theirs: Tensor) -> None:
    """Refuses to time what does not do the same."""
    if not torch.equal(ours, theirs):
        raise SystemExit("the results differ")


def integers(bits: int, repeats: int) -> list[Row]:
    codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (SIZE, SIZE), dtype=torch.int8)
    words = pack(codes, bits)
    same(words, pack_to_int32(codes, bits))
    same(unpack(words, bits, SIZE), unpack_from_int32(words, bits, codes.shape))
    return [
        in_turns(f"pack {bits} bit", lambda: pack(codes, bits), lambda: pack_to_int32(codes, bits), repeats),
        in_turns(
            f"unpack {bits} bit",
            lambda: unpack(words, bits, SIZE),
            lambda: unpack_from_int32(words, bits, codes.shape),
            repeats,
        ),
    ]


def floats(repeats: int) -> list[Row]:
    """Values of e2m1 against bytes, both ways."""
    grid = Minifloat(1)
    values = grid.round(torch.randn(SIZE, SIZE))

    def packed() -> Tensor:
        return by_rows(lambda rows: pack_bytes(grid.encode(rows), 4), values)  # as weights are encoded

    data = packed()

    def unpacked() -> Tensor:
        return grid.decode(unpack_bytes(data, 4, SIZE)).bfloat16()

    def theirs() -> Tensor:
        return unpack_fp4_from_uint8(data, SIZE, SIZE, dtype=torch.bfloat16)

    same(data, pack_fp4_to_uint8(values))
    same(unpacked(), theirs())
    return [
        in_turns("pack e2m1", packed, lambda: pack_fp4_to_uint8(values), repeats),
        in_turns("unpack e2m1", unpacked, theirs, repeats),
    ]


def files(scratch: Path, gigabytes: float, repeats: int) -> list[Row]:
    """One file of bfloat16 matrices, as `ptq` streams it and as safetensors has it whole."""
    count = max(1, round(gigabytes * 1e9 / (2 * SIZE * SIZE)))
    tensors = {f"layers.{i}.weight": torch.randn(SIZE, SIZE).bfloat16() for i in range(count)}
    own, other = scratch / "own", scratch / "other"
    other.mkdir(exist_ok=True)
    made = in_turns(
        "write", lambda: streamed(own, tensors), lambda: save_file(tensors, other / "model.safetensors"), repeats
    )

    def read() -> list[Tensor]:
        return [leaf.load() for leaf in headers(own).values()]

    def theirs() -> list[Tensor]:
        with safe_open(own / "model.safetensors", "pt") as handle:
            return [handle.get_tensor(name).clone() for name in handle.keys()]  # noqa: SIM118  # no mapping

    for name, leaf in headers(own).items():
        same(leaf.load(), tensors[name])
    rows = [made, in_turns("read", read, theirs, repeats)]
    for directory in (own, other):
        shutil.rmtree(directory)
    return rows


def streamed(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """A checkpoint, tensor by tensor; without the sync that makes a block safe, which safetensors has not."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    writer = ShardWriter(directory)
    entries = [(name, writer.write(name, tensor)) for name, tensor in tensors.items()]
    rename_shards(directory, writer.close(), entries)


def table(rows: list[Row]) -> Table:
    made = Table(
        "", "ptq, seconds", "other, seconds", "ratio", title="Against compressed-tensors, and safetensors alone"
    )
    for row in rows:
        made.add_row(row["what"], *(f"{row[name]:.4f}" for name in ("ptq", "other")), f"{row['ratio']:.2f}")
    return made


if __name__ == "__main__":
    main()
