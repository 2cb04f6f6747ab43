"""Does a large model take more memory or time than it must?

Memory: gptq of a synthetic Llama under a limit of private memory, and of one with half its blocks: the peaks agree.
Time: round to nearest against a copy of the same files, both with `sync`, in turns.

    python benchmarks/bounded.py --scratch DIR

Both use the command line alone. Linux only: the limit is `RLIMIT_DATA`, the peak that of `RssAnon`. Nothing heavy is
imported here, since a process starts with its parent's peak.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from record import ROOT, write
from rich.console import Console
from rich.table import Table

GIB = 2**30
PTQ = [sys.executable, "-m", "ptq", "compress"]
PEAKS = {"RssAnon": "peak_private_gib", "VmData": "peak_mapped_gib"}
POLL = 0.05  # seconds between two looks at a process
SAMPLES, TOKENS = 8, 128
Run = dict[str, Any]


def main() -> None:
    args = arguments()
    args.scratch.mkdir(parents=True, exist_ok=True)
    model = synthetic(args.scratch / "model", "--gigabytes", args.gigabytes)
    found: dict[str, list[Run]] = {}
    if "memory" in args.parts:
        half = synthetic(args.scratch / "half", "--layers", blocks(model) // 2)
        found["memory"] = shown(gptq(args, path) for path in (half, model))
    if "time" in args.parts:
        found["time"] = shown(rtn_and_copy(args, model))
    write(args.results, settings=settings(args), **found)
    for part, runs in found.items():
        Console().print({"memory": memory_table, "time": time_table}[part](runs))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scratch", type=Path, required=True, help="room for twice the model; models are kept there")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="of weights")
    parser.add_argument("--limit-gib", type=float, default=2.0, help="of private memory for gptq")
    parser.add_argument("--repeats", type=int, default=3, help="of the timing")
    parser.add_argument("--parts", nargs="+", choices=("memory", "time"), default=["memory", "time"])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "bounded.json")
    args = parser.parse_args()
    args.scratch, args.results = args.scratch.absolute(), args.results.absolute()
    return args


def settings(args: argparse.Namespace) -> Run:
    named = {name: getattr(args, name) for name in ("gigabytes", "limit_gib", "repeats", "parts")}
    return {**named, "samples": SAMPLES, "tokens": TOKENS, "recipes": ["gptq-w4a16-g64", "rtn-w4a16-g64"]}


def shown(runs: Iterator[Run]) -> list[Run]:
    """All runs, each printed as soon as it is there."""
    done = []
    for run in runs:
        print(json.dumps(run), flush=True)
        done.append(run)
    return done


def synthetic(path: Path, *size: object) -> Path:
    """The model's directory, made where it is not there yet."""
    if not path.exists():
        script = Path(__file__).with_name("synthetic.py")
        unfinished = path.with_name(f"{path.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        watched([sys.executable, script, unfinished, *size])
        unfinished.rename(path)
    return path


def blocks(model: Path) -> int:
    return json.loads((model / "config.json").read_text())["num_hidden_layers"]


def gigabytes(model: Path) -> float:
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9


def gptq(args: argparse.Namespace, model: Path) -> Run:
    """GPTQ on a few tokens, under the limit."""
    ids = args.scratch / "ids.jsonl"
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    drawn = random.Random(0).choices(range(vocabulary), k=SAMPLES * TOKENS)  # noqa: S311  # token ids, no secret
    ids.write_text(json.dumps({"input_ids": drawn}) + "\n")
    sizes = ["--samples", SAMPLES, "--seq-len", TOKENS]
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        command = [*PTQ, model, Path(scratch) / "out", "--recipe", "gptq-w4a16-g64", "--data", ids, *sizes]
        run = watched(command, int(args.limit_gib * GIB))
    return {"blocks": blocks(model), "gigabytes": gigabytes(model), **run}


def rtn_and_copy(args: argparse.Namespace, model: Path) -> Iterator[Run]:
    """Both tools in turns; who goes first changes with each repeat."""
    tools: list[tuple[str, list[object]]] = [
        ("cp", ["cp", "-r", model]),
        ("ptq", [*PTQ, "--recipe", "rtn-w4a16-g64", model]),
    ]
    for repeat in range(args.repeats):
        for tool, command in tools[:: 1 if repeat % 2 == 0 else -1]:
            yield {"tool": tool, "repeat": repeat, **synced(args.scratch, model, command)}


def synced(scratch: Path, model: Path, command: Sequence[object]) -> Run:
    """Seconds of a command that makes a directory, and of a `sync` after it.

    Before the clock starts nothing waits to be written, and all of the model's files have just been read.
    """
    watched(["sync"])
    watched(["cat", *sorted(model.iterdir())])
    pages = {name.lower(): gib(name) for name in ("Cached", "Dirty")}
    with tempfile.TemporaryDirectory(dir=scratch) as made:
        run = watched([*command, Path(made) / "out"])
        sync = watched(["sync"])["seconds"]
    return {**run, "sync_seconds": sync, "pages_before_gib": pages}


def watched(command: Sequence[object], limit: int | None = None) -> Run:
    """Seconds of a command, and the most private memory that it was seen to hold and to have mapped.

    Args:
        command: what to run; its output is thrown away.
        limit: bytes of private memory that it may map.
    """
    words = [str(word) for word in command]
    if limit:
        words = ["prlimit", f"--data={limit}", *words]
    with tempfile.TemporaryFile("w+") as errors:
        began, peaks = time.perf_counter(), dict.fromkeys(PEAKS, 0.0)
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
        while not ended(process):
            peaks = {name: max(peak, gib(name, Path(f"/proc/{process.pid}/status"))) for name, peak in peaks.items()}
        seconds = time.perf_counter() - began
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(words)}\nended with {process.returncode}:\n{errors.read()[-4000:]}")
    return {"seconds": seconds, **{PEAKS[name]: peak for name, peak in peaks.items()}}


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process ends before it is time for the next look at it."""
    try:
        process.wait(POLL)
    except subprocess.TimeoutExpired:
        return False
    return True


def gib(name: str, file: Path = Path("/proc/meminfo")) -> float:
    """A line of an account of memory; 0 where it has none, as that of a process that has ended."""
    found = re.search(rf"^{name}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    return int(found[1]) / 2**20 if found else 0.0


MEMORY = {"blocks": "blocks", "gigabytes": "GB", "peak_private_gib": "private GiB", "peak_mapped_gib": "mapped GiB"}


def memory_table(runs: list[Run]) -> Table:
    """Half the blocks, all of them, and the one over the other."""
    first, last = runs
    table = Table(*MEMORY.values(), "seconds", title="gptq w4 g64: peaks")
    for run in (first, last, {name: last[name] / first[name] for name in (*MEMORY, "seconds")}):
        table.add_row(*(number(run[name]) for name in (*MEMORY, "seconds")))
    return table


def time_table(runs: list[Run]) -> Table:
    """Seconds by repeat, with and without `sync`, each also over those of `cp` and `sync`."""
    table = Table("repeat", "cp + sync", "ptq", "quotient", "ptq + sync", "quotient", title="rtn w4 g64: seconds")
    quotients = []
    for repeat in sorted({run["repeat"] for run in runs}):
        copy, ours = (next(r for r in runs if (r["tool"], r["repeat"]) == (tool, repeat)) for tool in ("cp", "ptq"))
        base = copy["seconds"] + copy["sync_seconds"]
        seconds = (ours["seconds"], ours["seconds"] + ours["sync_seconds"])
        quotients.append([s / base for s in seconds])
        pairs = zip(seconds, quotients[-1], strict=True)
        table.add_row(str(repeat), number(base), *(number(value) for pair in pairs for value in pair))
    first, second = (number(median(column)) for column in zip(*quotients, strict=True))
    table.add_row("median", "", "", first, "", second)
    return table


def number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


if __name__ == "__main__":
    main()
