"""Which weights a pattern reaches.

A pattern is tried on the weight's name, its module's, each ancestor's (then it reaches everything below) and the names
these have in the checkpoint: exactly, or as `re:` and a regular expression that must match from the start; then as the
class name of the module or of an ancestor. Weights outside the default targets (heads, embeddings, routers,
convolutions, vision towers) are reached only by their own or their module's name, exact or matched in full.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ptq.base import Clause
from ptq.errors import BadInput, NoMatch, Notice


class Labels(NamedTuple):
    """All that a pattern can be compared with, for one weight."""

    own: tuple[str, ...]
    """the weight's name and its module's, in memory and in the checkpoint"""
    ancestors: tuple[str, ...]
    classes: tuple[str, ...]
    """class names of the module and its ancestors"""
    default: bool
    """whether a transform takes this weight when nothing is said"""


def label(name: str, classes: Mapping[str, str] = {}, default: bool = True, others: Iterable[str] = ()) -> Labels:
    """Labels from a dotted name, a table module -> class name, and the weight's other names.

    >>> label("a.b.weight", {"a": "Block", "a.b": "Linear"}).classes
    ('Linear', 'Block')
    """
    names = (name, *others)
    chains = [[n.rsplit(".", i)[0] for i in range(1, n.count(".") + 1)] for n in names]
    own = (*names, *(c[0] for c in chains if c))
    ancestors = tuple(a for c in chains for a in c[1:])
    return Labels(own, ancestors, tuple(classes[m] for m in chains[0] if m in classes), default)


def reaches(pattern: str, labels: Labels) -> bool:
    """Whether a pattern reaches a weight.

    >>> reaches("layers.0", label("layers.0.mlp.up.weight"))
    True
    >>> reaches("layers", label("layers.0.up.weight", default=False))
    False
    """
    if not pattern.startswith("re:"):
        if not labels.default:
            return pattern in labels.own
        return pattern in labels.own or pattern in labels.ancestors or pattern in labels.classes
    regex = _compiled(pattern)
    if not labels.default:
        return any(regex.fullmatch(n) for n in labels.own)
    return any(regex.match(n) for n in (*labels.own, *labels.ancestors))


def select(clauses: Sequence[Clause], table: Mapping[str, Labels]) -> list[str]:
    """The weights of a model that a transform takes, in the table's order.

    Raises:
        NoMatch: a pattern reaches no weight at all; names those that come near.
    """
    for clause in clauses:
        _complain(clause, table)
    passing = [n for n, labels in table.items() if all(_passes(c, labels) for c in clauses)]
    chosen = passing if clauses else [n for n in passing if table[n].default]
    if not chosen:
        wanted = " and ".join(repr(c.pattern) for c in clauses) or "the default"
        raise NoMatch(f"targets {wanted}: no weight is left after what is ignored or taken by earlier patterns")
    return chosen


def _passes(clause: Clause, labels: Labels) -> bool:
    return reaches(clause.pattern, labels) and not any(reaches(p, labels) for p in (*clause.ignore, *clause.earlier))


def _complain(clause: Clause, table: Mapping[str, Labels]) -> None:
    if not any(reaches(clause.pattern, labels) for labels in table.values()):
        raise NoMatch(f"target {clause.pattern!r} matches no weight of the model{_near(clause.pattern, table)}")
    for pattern in clause.ignore:
        if not any(reaches(pattern, labels) for labels in table.values()):
            warnings.warn(f"ignore {pattern!r} matches no weight of the model", Notice, stacklevel=2)


def _near(pattern: str, table: Mapping[str, Labels]) -> str:
    known = dict.fromkeys(n for labels in table.values() for n in (*labels.own, *labels.ancestors, *labels.classes))
    near = difflib.get_close_matches(pattern.removeprefix("re:"), known, n=3, cutoff=0.5)
    return f"; near: {', '.join(near)}" if near else f"; weights are named like {next(iter(known), 'nothing')}"


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise BadInput(f"target {pattern!r} is no regular expression: {error}") from None
