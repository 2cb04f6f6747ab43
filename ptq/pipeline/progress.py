"""What a run has done so far.

It stands apart from the run because the work refers to it: a run that its own generators referred to would not be
closed when it is dropped, and its threads and its lock would stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ptq.base import Params
from ptq.io.job import Past, Report, Store, completed
from ptq.numerics.leaves import nbytes
from ptq.pipeline.scan import Block, Step


class InMemory:
    """The store of a run that is not written: every leaf stays where it is."""

    def past(self, stage: int) -> Past:
        return Past()

    def settle(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        return facts

    def put(self, stage: int, params: Params, report: Report) -> tuple[Params, Report]:
        return params, completed(report, {name: nbytes(leaf) for name, leaf in params.items()}, {})


class Progress:
    """Finished blocks and their reports: where they go, and who is told."""

    def __init__(self) -> None:
        self.store: Store = InMemory()
        self.keeps = True
        self.held: list[Block] = []
        """finished blocks, of a run that keeps them"""
        self.reports: list[Report] = []
        self.seconds = 0.0
        """until the last block was finished"""
        self.watch: Callable[[Step], None] = lambda _: None
        """called when a block is begun"""
        self._began = time.perf_counter()

    def recall(self, reports: Sequence[Report]) -> None:
        """Blocks that an earlier process finished, in the time that it took."""
        self.reports += reports
        self._began -= sum(report["seconds"] or 0 for report in reports)

    def note(self, report: Report) -> None:
        """Another block is finished."""
        self.reports.append(report)
        self.seconds = time.perf_counter() - self._began
