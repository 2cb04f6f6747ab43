"""What people read of a dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ptq.cli.tables import columns, show

Row = tuple[str, ...]
Block = Mapping[str, Any]


def show_plan(report: Mapping[str, Any]) -> None:
    """What is done to which weights, block by block, and what it will take; see `plan_report`."""
    _show_targets(report["stages"])
    _show_sites(report["blocks"])
    _show_costs(report["blocks"])
    for line in (*_ties(report), *_totals(report["totals"]), *_done(report)):
        print(line)


def folded(names: Sequence[str]) -> str:
    """The names of blocks that follow each other, as one.

    >>> folded(["model.layers.0", "model.layers.1", "model.layers.2"])
    'model.layers.0 .. 2 (3)'
    >>> folded(["model.norm"])
    'model.norm'
    """
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1].rpartition('.')[2]} ({len(names)})"


def amount(count: int) -> str:
    """Bytes for people.

    >>> amount(1_404_000_000), amount(98_300_000), amount(0)
    ('1.40 GB', '98.3 MB', '-')
    """
    return "-" if not count else f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _show_targets(stages: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """A line for each transform; in brackets how many weights a pattern reaches by itself."""
    shown = columns("stage", "transform", "target", "such as", "weights", text=4)
    for number, stage in enumerate(stages, 1):
        for member in stage:
            weights = member["weights"]
            shown.add_row(str(number), member["transform"], _target(member["targets"]), weights[0], str(len(weights)))
    show(shown)


def _target(clauses: Sequence[Mapping[str, Any]]) -> str:
    """All patterns of a transform, less what others reach.

    >>> _target([{"pattern": "re:.*mlp", "reaches": ["a", "b"], "ignore": ["re:.*down_proj"], "earlier": []}])
    're:.*mlp (2) without re:.*down_proj'
    """
    reached = " and ".join(f"{clause['pattern']} ({len(clause['reaches'])})" for clause in clauses)
    less = ", ".join(pattern for clause in clauses for pattern in (*clause["ignore"], *clause["earlier"]))
    return (reached or "linears inside the blocks") + (f" without {less}" if less else "")


def _show_sites(blocks: Sequence[Block]) -> None:
    """A line for each tensor that weights read; blocks of equal lines are one."""
    shown = columns("block", "stage", "weights that read one tensor", "shapes", "measured", text=5)
    for names, lines in _alike(blocks, _site_lines):
        for i, line in enumerate(lines):
            shown.add_row("" if i else folded(names), *line)
    show(shown)


def _site_lines(block: Block) -> tuple[Row, ...]:
    return tuple(
        (
            str(site["stage"]),
            ", ".join(w.removeprefix(f"{block['name']}.").removesuffix(".weight") for w in site["weights"]),
            ", ".join(dict.fromkeys(" x ".join(map(str, shape)) for shape in site["weights"].values())),
            ", ".join(site["statistics"]) or "-",
        )
        for site in block["sites"]
    )


def _show_costs(blocks: Sequence[Block]) -> None:
    """A line for each block, or for several that cost the same."""
    shown = columns("block", "parked in", "read", "computed", "stored", "activations", "working", "seconds", text=2)
    for names, (line,) in _alike(blocks, _cost_line):
        shown.add_row(folded(names), *line)
    show(shown)


def _cost_line(block: Block) -> tuple[Row]:
    parked = block["activations"]
    held = parked["held"] + parked["running"]
    sizes = (block["read"], block["computed"], block["stored"], held, block["working"])
    where: str = "-" if parked["parked"] == "nothing" else parked["parked"]
    away = parked["spilled"] + parked["statistics"]
    where += f", {amount(away)}" if away else ""
    return ((where, *map(amount, sizes), f"{block['seconds']['total']:.2f}"),)


def _alike(blocks: Sequence[Block], lines: Callable[[Block], tuple[Row, ...]]) -> Iterator[tuple[list[str], Any]]:
    """Names of blocks that follow each other and have the same lines, and these lines."""
    for made, group in groupby(blocks, lines):
        yield [block["name"] for block in group], made


def _ties(report: Mapping[str, Any]) -> Iterator[str]:
    for alias, name in report["ties"].items():
        yield f"{alias} is {name}"
    for name in report["untied"]:
        yield f"{name} was tied, gets weights of its own"


def _done(report: Mapping[str, Any]) -> Iterator[str]:
    if report.get("done"):
        count = len(report["stages"] or "-") * len(report["blocks"])
        yield f"{report['done']} of {count} blocks are finished already; the time is that of all"


def _totals(totals: Mapping[str, Any]) -> Iterator[str]:
    memory, seconds = totals["memory"], totals["seconds"]
    now = amount(memory["now"])
    yield f"memory {amount(memory['peak'])}, of which {now} now; {_room(memory['peak'], memory['limit'])}"
    besides = f" and {amount(totals['kept'])} until it is whole" if totals["kept"] else ""
    yield f"disk {amount(totals['bytes'])}{besides}; {_room(totals['bytes'] + totals['kept'], totals['free'])}"
    away = totals["offload"]
    if away["peak"]:
        yield f"offload {amount(away['peak'])}; {_room(away['peak'], away['free'])}"
    parts = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if name != "total")
    yield f"time {seconds['total']:.1f} s: {parts}"


def _room(needed: int, there: int) -> str:
    return f"there is {amount(there)}" if needed <= there else f"too much: there is only {amount(there)}"
