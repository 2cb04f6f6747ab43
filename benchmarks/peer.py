"""How does ptq compare with llm-compressor on the same model, tokens and machine?

Both are run as commands, one after the other and method by method, so that a machine that slows down slows both:

    python benchmarks/peer.py --model DIR --calibration calibration.txt --evaluation evaluation.txt \
        --peer-python peer/bin/python --peer-script llmcompressor_baseline.py

Seconds are those of the whole command: start, load, compress, save. Evaluation counts nowhere: ptq's is a command of
its own, and the peer's script takes its own out of `total_seconds`, and measures its peak memory before it.
"""

from __future__ import annotations

import argparse
import json
import os
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

RECIPES = {
    "rtn-w4g64": "rtn-w4a16-g64",
    "gptq-w4g64": "gptq-w4a16-g64",
    "gptq-w4channel": "gptq-w4a16",
    "sparsegpt-50": "sparsegpt-50",
    "sparsegpt-2of4": "sparsegpt-2of4",
    "wanda-50": "wanda-50",
    "wanda-2of4": "wanda-2of4",
}
PTQ = [sys.executable, "-m", "ptq"]
PEER_PACKAGES = ("llmcompressor", "compressed-tensors", "torch", "transformers")
GIB = 2**20  # of the kibibytes that Linux counts resident memory in
MEASURES = {"perplexity": median, "ratio": median, "seconds": median, "peak_gib": max}
Run = dict[str, Any]


def main() -> None:
    args = arguments()
    dense = evaluate(args, args.model)["perplexity"]
    runs = []
    for run in measured(args):
        runs.append(run | {"ratio": run["perplexity"] / dense})
        print(json.dumps(runs[-1]), flush=True)
    packages = peer_versions(args.peer_python)
    write(args.results, settings=settings(args), peer_versions=packages, dense_perplexity=dense, runs=runs)
    Console().print(table(runs, dense))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory with float weights")
    parser.add_argument("--calibration", type=Path, required=True, help="text to calibrate on")
    parser.add_argument("--evaluation", type=Path, required=True, help="text to take the perplexity of")
    parser.add_argument("--peer-python", type=Path, required=True, help="the Python of llm-compressor's environment")
    parser.add_argument("--peer-script", type=Path, required=True, help="the script that runs llm-compressor")
    parser.add_argument("--methods", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="METHOD")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--eval-samples", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "peer.json")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if isinstance(value, Path):
            setattr(args, name, value.absolute())  # not resolved: an environment's python is a link out of it
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that decide the numbers, files by name."""
    files = {name: getattr(args, name).name for name in ("model", "calibration", "evaluation")}
    return files | {name: getattr(args, name) for name in ("methods", "samples", "seq_len", "eval_samples", "repeats")}


def measured(args: argparse.Namespace) -> Iterator[Run]:
    """Every run, the tools in turn; who goes first changes with each repeat."""
    tools = [peer, ptq]
    for repeat in range(args.repeats):
        for method in args.methods:
            for tool in tools[:: 1 if repeat % 2 == 0 else -1]:
                with tempfile.TemporaryDirectory() as scratch:
                    found = tool(args, method, Path(scratch))
                yield {"method": method, "tool": tool.__name__, "repeat": repeat, **found}


def peer(args: argparse.Namespace, method: str, scratch: Path) -> Run:
    texts = ["--calibration", args.calibration, "--evaluation", args.evaluation]
    sizes = ["--samples", args.samples, "--seq-len", args.seq_len, "--eval-samples", args.eval_samples]
    command = [args.peer_python, args.peer_script, args.model, method, *texts, *sizes, "--out", scratch / "peer"]
    output, usage = timed(command, scratch)
    report = last_json(output)
    return {
        "seconds": report["total_seconds"],
        "peak_gib": report["peak_gib"],
        "perplexity": report["perplexity"],
        "oneshot_seconds": report["seconds"],
        "with_evaluation": usage,
    }


def ptq(args: argparse.Namespace, method: str, scratch: Path) -> Run:
    sizes = ["--samples", args.samples, "--seq-len", args.seq_len]
    out = scratch / "ptq"
    command = [*PTQ, "compress", args.model, out, "--recipe", RECIPES[method], "--data", args.calibration, *sizes]
    _, usage = timed(command, ROOT)
    judged = evaluate(args, out)
    return {**usage, "perplexity": judged["perplexity"], "evaluation": judged}


def evaluate(args: argparse.Namespace, model: Path) -> Run:
    sizes = ["--samples", args.eval_samples, "--seq-len", args.seq_len]
    output, usage = timed([*PTQ, "eval", model, "--data", args.evaluation, *sizes], ROOT)
    return {**usage, "perplexity": last_json(output)["perplexity"]}


def timed(command: Sequence[object], directory: Path) -> tuple[str, dict[str, float]]:
    """Standard output of a command, its seconds and its own peak memory.

    A process starts with its parent's peak, so nothing heavy is imported in this file.
    """
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        words = [str(word) for word in command]
        process = subprocess.Popen(words, cwd=directory, stdout=subprocess.PIPE, stderr=errors, text=True)
        output, usage = drained(process)
        seconds = time.perf_counter() - began
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(words)}\nended with {process.returncode}:\n{errors.read()[-4000:]}")
    return output, {"seconds": seconds, "peak_gib": usage.ru_maxrss / GIB}


def drained(process: subprocess.Popen[str]) -> tuple[str, Any]:
    """What a process prints until it ends, and its resources; `wait` would drop the latter."""
    with process:
        output = process.stdout.read() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return output, usage


def last_json(output: str) -> dict[str, Any]:
    return json.loads(output.strip().splitlines()[-1])


def peer_versions(python: Path) -> dict[str, str]:
    code = f"import json, importlib.metadata as m; print(json.dumps({{p: m.version(p) for p in {PEER_PACKAGES}}}))"
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def table(runs: list[Run], dense: float) -> Table:
    """Three lines a method: the peer's numbers, ptq's, and the one over the other; medians and the largest peaks."""
    shown = Table("method", "", title=f"Dense perplexity {dense:.2f}")
    for name in ("perplexity", "over dense", "seconds", "peak GiB"):
        shown.add_column(name, justify="right")
    for method in dict.fromkeys(run["method"] for run in runs):
        theirs, ours = (summary(runs, method, tool.__name__) for tool in (peer, ptq))
        quotients = [b / a for a, b in zip(theirs, ours, strict=True)]
        shown.add_row(method, "llm-compressor", *map(number, theirs))
        shown.add_row("", "ptq", *map(number, ours))
        shown.add_row("", "quotient", *map(number, quotients), end_section=True)
    return shown


def summary(runs: list[Run], method: str, tool: str) -> list[float]:
    mine = [run for run in runs if (run["method"], run["tool"]) == (method, tool)]
    return [of(run[name] for run in mine) for name, of in MEASURES.items()]


def number(value: float) -> str:
    return f"{value:.3f}"


if __name__ == "__main__":
    main()
