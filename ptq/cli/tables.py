"""What people read at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def show_report(report: Mapping[str, Any]) -> None:
    """A line per block, notes on weights below, and totals."""
    table = columns("block", "weights", "error", "damping", "seconds")
    for block in report["blocks"]:
        table.add_row(*_block(block))
    show(table)
    for line in _notes(w for block in report["blocks"] for w in block["weights"]):
        print(line)
    for line in report.get("notes", ()):
        print(line)
    print(totals_line(report["totals"]))


def totals_line(totals: Mapping[str, Any]) -> str:
    """Bits per weight, size, time.

    >>> totals_line({"bits_per_weight": 4.25, "bytes": 123456789, "seconds": 12.34})
    'bits per compressed weight 4.25, size 123.5 MB, time 12.3 s'
    """
    bits, size, seconds = totals["bits_per_weight"], totals["bytes"] / 1e6, totals["seconds"]
    shown = "-" if bits is None else f"{bits:.4g}"
    time = "" if seconds is None else f", time {seconds:.1f} s"
    return f"bits per compressed weight {shown}, size {size:.1f} MB{time}"


def show_tensors(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line per tensor: name, format, shape, bits per weight, sparsity."""
    table = columns("tensor", "format", "shape", "bits", "sparsity", text=3)
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        table.add_row(row["name"], row["format"], shape, f"{row['bits_per_weight']:.4g}", f"{row['sparsity']:.1%}")
    show(table)


def _notes(weights: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A line per note, however many weights it is about; the report names them all."""
    names: dict[str, list[str]] = {}
    for weight in (w for w in weights if w["note"]):
        names.setdefault(weight["note"], []).append(weight["name"])
    for note, about in names.items():
        yield f"{about[0]}{f' and {len(about) - 1} more' if len(about) > 1 else ''}: {note}"


def _block(block: Mapping[str, Any]) -> tuple[str, ...]:
    weights = block["weights"]
    errors = [w["error"] for w in weights]
    dampings = [w["damping"] for w in weights if w["damping"] is not None]
    return (
        block["name"],
        str(len(weights) or "-"),
        f"{sum(errors) / len(errors):.2e}" if errors else "-",
        f"{max(dampings):g}" if dampings else "-",
        "-" if block["seconds"] is None else f"{block['seconds']:.1f}",
    )


def columns(*headers: str, text: int = 1) -> Table:
    """Columns that never wrap; the first `text` hold words, the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(headers):
        table.add_column(name, justify="left" if i < text else "right", no_wrap=True)
    return table


def show(table: Table) -> None:
    """Names are never cut, nor read as markup: a line may be wider than the terminal, or go to a file."""
    Console(width=1000, markup=False, emoji=False).print(table)
