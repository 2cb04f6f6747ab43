"""Does a dry run tell what a run will take?

Each recipe is planned and then run, as commands, on the same model and tokens:

    python benchmarks/dry_run.py --model DIR --calibration calibration.txt

Memory is the largest resident memory of the whole command. Seconds are those that the run reports, from the first block
to the last: start, imports and tokens come before the estimate, too. What the dry run itself took is in the results.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer import PTQ, Run, timed
from record import ROOT, write
from rich.console import Console
from rich.table import Table

RECIPES = ("gptq-w4a16-g64", "sparsegpt-2of4", "rtn-w4a16-g64")
GIB = 2**30


def main() -> None:
    args = arguments()
    runs = []
    for run in measured(args):
        runs.append(run)
        print(json.dumps(run), flush=True)
    settings = {"model": args.model.name, "calibration": args.calibration.name}
    sizes = {name: getattr(args, name) for name in ("recipes", "samples", "seq_len")}
    write(args.results, settings=settings | sizes, runs=runs)
    Console().print(table(runs))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory with float weights")
    parser.add_argument("--calibration", type=Path, required=True, help="text to calibrate on")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "dry_run.json")
    args = parser.parse_args()
    args.model, args.calibration = args.model.absolute(), args.calibration.absolute()
    return args


def measured(args: argparse.Namespace) -> Iterator[Run]:
    for recipe in args.recipes:
        with tempfile.TemporaryDirectory() as scratch:
            planned, planning = compress(args, recipe, Path(scratch), "--dry-run")
            done, usage = compress(args, recipe, Path(scratch))
        yield {"recipe": recipe, "planning": planning, **compared(planned["totals"], done["totals"], usage)}


def compress(args: argparse.Namespace, recipe: str, scratch: Path, *more: str) -> tuple[Run, Run]:
    """The report of a command, and what it took."""
    report = scratch / "report.json"
    data = ["--data", args.calibration, "--samples", args.samples, "--seq-len", args.seq_len]
    command = [*PTQ, "compress", args.model, scratch / "out", "--recipe", recipe, *data, "--report", report, *more]
    _, usage = timed(command, ROOT)
    return json.loads(report.read_text()), usage


def compared(planned: Run, done: Run, usage: Run) -> Run:
    """Estimate, truth, and the one over the other."""
    estimates = {
        "peak_gib": planned["memory"]["peak"] / GIB,
        "seconds": planned["seconds"]["total"],
        "bytes": planned["bytes"],
    }
    truth = {"peak_gib": usage["peak_gib"], "seconds": done["seconds"], "bytes": done["bytes"]}
    ratios = {name: estimates[name] / truth[name] for name in truth}
    parts = {"seconds": planned["seconds"], "memory": planned["memory"]}
    return {"estimated": estimates, "measured": truth, "ratio": ratios, "parts": parts, "command": usage}


def table(runs: list[dict[str, Any]]) -> Table:
    """A line for each recipe: estimates, and in brackets what they are of the truth."""
    shown = Table("recipe", title="Estimated (of what was measured)")
    for name in ("peak GiB", "seconds", "MB on disk", "dry run, seconds"):
        shown.add_column(name, justify="right")
    for run in runs:
        values = {**run["estimated"], "bytes": run["estimated"]["bytes"] / 1e6}
        cells = (f"{value:.2f} ({run['ratio'][name]:.2f})" for name, value in values.items())
        shown.add_row(run["recipe"], *cells, f"{run['planning']['seconds']:.1f}")
    return shown


if __name__ == "__main__":
    main()
