"""Show what a model's tensors are: format, shape, bits per weight, sparsity."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ptq.cli.options import add_model, notices

if TYPE_CHECKING:
    from ptq.numerics.leaves import Leaf


def configure(parser: argparse.ArgumentParser) -> None:
    """MODEL and --json."""
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Reads one tensor at a time."""
    from ptq.cli.tables import show_tensors
    from ptq.io.hub import open_model

    model = open_model(args.model, args.trust_remote_code)
    rows = [_row(name, leaf) for name, leaf in model.params.items()]
    size = sum(row.pop("bytes") for row in rows)
    count = sum(leaf.shape.numel() for leaf in model.params.values())
    if args.json:
        totals = {"parameters": count, "bytes": size, "bits_per_weight": 8 * size / count}
        result = {"tensors": rows, "tied": dict(model.aliases), "totals": totals, "notes": notices(args)}
        print(json.dumps(result))
        return
    show_tensors(rows)
    for alias, name in model.aliases.items():
        print(f"{alias} is {name}")
    print(f"{count} parameters, {size / 1e6:.1f} MB, {8 * size / count:.4g} bits per parameter")


def _row(name: str, lazy: Leaf) -> dict[str, Any]:
    from ptq.numerics.lazy import load
    from ptq.numerics.leaves import dense, nbytes
    from ptq.pipeline.report import format_name

    leaf = load(lazy)
    value, size = dense(leaf), nbytes(leaf)
    return {
        "name": name,
        "format": format_name(leaf),
        "shape": list(value.shape),
        "bits_per_weight": 8 * size / value.numel(),
        "sparsity": int((value == 0).sum()) / value.numel(),
        "bytes": size,
    }
