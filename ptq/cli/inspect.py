"""Show what a model's tensors are: format, shape, bits per weight, sparsity; or check that loaders take it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ptq.cli.options import add_model, notices, positive
from ptq.cli.process import importing

if TYPE_CHECKING:
    from ptq.io.survey import Finding
    from ptq.numerics.leaves import Leaf


def configure(parser: argparse.ArgumentParser) -> None:
    """MODEL, --json, --check and --tp."""
    add_model(parser)
    parser.add_argument("--check", action="store_true", help="print what loaders would fail at; exit code 1 if any")
    parser.add_argument("--tp", type=positive, metavar="N", help="with --check: devices that divide each weight")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Reads one tensor at a time; returns the exit code."""
    from ptq.errors import BadInput

    if args.tp and not args.check:
        raise BadInput("--tp says how weights are divided for --check; pass both")
    return _check(args) if args.check else _show(args)


def _check(args: argparse.Namespace) -> int:
    """A line for each finding, and one that sums up; 1 where there are errors."""
    with importing():
        from ptq.io.check import check
        from ptq.io.hub import directory_of, skeleton_of
        from ptq.io.survey import ERROR

    where = directory_of(args.model)
    found = check(where, args.tp or 1, skeleton_of(where, args.trust_remote_code))
    errors = sum(each.severity == ERROR for each in found)
    if args.json:
        rows = [each._asdict() for each in found]
        print(json.dumps({"findings": rows, "errors": errors, "notes": notices(args)}))
    else:
        print("\n".join([*map(str, found), _summary(errors, found)]))
    return 1 if errors else 0


def _summary(errors: int, found: Sequence[Finding]) -> str:
    notes = len(found) - errors
    return f"{errors or 'no'} error{'' if errors == 1 else 's'}, {notes or 'no'} note{'' if notes == 1 else 's'}"


def _show(args: argparse.Namespace) -> int:
    with importing():
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
        return 0
    show_tensors(rows)
    for alias, name in model.aliases.items():
        print(f"{alias} is {name}")
    print(f"{count} parameters, {size / 1e6:.1f} MB, {8 * size / count:.4g} bits per parameter")
    return 0


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
