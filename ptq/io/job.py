"""A job on disk: what is finished of it, where, and how it goes on after whatever ended it.

    OUT.partial/
        .job/journal                    first the job's identity, then a line for each finished block (`ptq.io.journal`)
        .job/stage-0-17.safetensors     leaves of block 17 after the first of several stages (`ptq.io.scratch`)
        shard-0.partial                 the checkpoint; tensors that no line speaks of are cut off when the job goes on

The directory is locked by its process. When all is written it holds `ptq.json`, what made it, in the place of `.job`,
and is renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ptq.base import Params
from ptq.errors import BadInput
from ptq.io.files import sync
from ptq.io.journal import Journal
from ptq.io.output import JOURNAL, WORK, conclude, filled, locked, partial, valuable
from ptq.io.records import parts, record
from ptq.io.scratch import keep, kept
from ptq.io.shards import rename_shards
from ptq.io.writer import Writer
from ptq.models.model import Model
from ptq.models.naming import read
from ptq.numerics.lazy import Lazy
from ptq.numerics.leaves import nbytes

Identity = Mapping[str, Any]
"""what must be the same for a job to go on, as JSON"""
FILES = "file"
"""the part of an identity that says when each file of the model was written, by its path"""
Report = dict[str, Any]


class Past(NamedTuple):
    """What of a stage is done already."""

    reports: Sequence[Report] = ()
    """of its finished blocks, which are the first of the plan"""
    params: Params = {}
    """their leaves, read when they are used; what a stage left alone is not among them"""


class Store(Protocol):
    """Where a run's finished blocks go, and where those are that an earlier process finished."""

    def past(self, stage: int) -> Past: ...
    def settle(self, facts: Mapping[str, Any]) -> Mapping[str, Any]: ...
    def put(self, stage: int, params: Params, report: Report) -> tuple[Params, Report]: ...


class Workspace:
    """The state of a job, in a directory of its own that is locked.

    Args:
        target: the directory that it will be.
        start: the model that the job began from, ties settled.
        stages: how many stages there are; the last one's blocks go into the checkpoint.
        identity: what was asked for; None for a job that cannot go on.
        writer: makes the checkpoint's writer, given the directory and the records of what is there.
    """

    def __init__(
        self,
        target: Path,
        start: Model,
        stages: int,
        identity: Identity | None,
        writer: Callable[[Path, Sequence[Any]], Writer],
    ) -> None:
        self.target, self.directory = target, partial(target)
        self._replaces = filled(target)
        self._start, self._last = start, max(stages, 1) - 1
        (self.directory / WORK).mkdir(exist_ok=True)
        sync(self.directory)
        self._journal = Journal(self.directory / JOURNAL)
        self._begin(identity)
        lines = self._journal.lines[1:]
        self.blocks = sum(len(line.get("reports", ())) for line in lines)
        """how many are safe, over all stages"""
        records = [record(raw) for line in lines for raw in line.get("records", ())]
        self.names: list[str] | None = next((line["names"] for line in lines if "names" in line), None)
        """the shards' final names, once all tensors are on disk"""
        self._unsaid: list[Report] = []
        self.writer = writer(self.directory, records)
        self._said = len(records)

    def past(self, stage: int) -> Past:
        """What of a stage is done."""
        lines = [line for line in self._journal.lines[1:] if line.get("stage") == stage]
        reports = [report for line in lines for report in line["reports"]]
        if self.names is not None:  # nothing will be read again
            return Past(reports)
        if stage == self._last:
            return Past(reports, self._stored() if reports else {})
        work = self.directory / WORK
        return Past(reports, {n: leaf for line in lines for n, leaf in kept(work / line["file"]).items()})

    def settle(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this machine decides and results depend on: as it was when the job began, wherever it goes on."""
        told = next((line["settled"] for line in self._journal.lines if "settled" in line), None)
        if told is None:
            self._journal.append({"settled": dict(facts)})
        return told or facts

    def put(self, stage: int, params: Params, report: Report) -> tuple[Params, Report]:
        """Takes a finished block. It is safe when this returns, or with the next one where they share a tensor.

        Returns:
            The leaves to go on with, and the report with sizes and what the writer has to say.
        """
        return self._put_last(params, report) if stage == self._last else self._put_aside(stage, params, report)

    def finish(self, complete: Callable[[Path, Writer], None]) -> None:
        """Completes the directory and gives it its name.

        Args:
            complete: writes all files but the shards, and may be called again after an interruption.
        """
        if self.names is None:
            self.names = self.writer.finish()
            self._journal.append({"names": self.names, "records": self.writer.records[self._said :]})
        rename_shards(self.directory, self.names, parts(self.writer.records))
        complete(self.directory, self.writer)
        sync(self.directory)
        if filled(self.target) and not self._replaces:
            raise BadInput(f"{self.target}: has appeared while this was made; move it away, and resume")
        conclude(self.target)

    def _begin(self, identity: Identity | None) -> None:
        """Says what the job is, or refuses to go on with another one."""
        if self._journal.lines:
            refuse_changed(self._journal.lines[0].get("identity"), identity, self.directory)
        else:
            self._journal.append({"identity": identity})

    def _stored(self) -> Params:
        """What is in the shards, by the names in memory."""
        leaves = {r.file: r.leaf(self.directory) for r in self.writer.records}
        found = read(self._start.module, leaves).leaves
        return {name: leaf for name, leaf in found.items() if name in self._start.params}

    def _put_last(self, params: Params, report: Report) -> tuple[Params, Report]:
        before = len(self.writer.records)
        self.writer.add(params)
        sizes = {name: nbytes(leaf) for name, leaf in params.items() if name in self.writer.waiting}
        for r in self.writer.records[before:]:
            sizes[r.name] = sizes.get(r.name, 0) + r.nbytes
        report = completed(report, {**dict.fromkeys(params, 0), **sizes}, self.writer.notes)
        self._unsaid.append(report)
        if not self.writer.waiting:
            self.writer.sync()
            self._say({"stage": self._last, "reports": self._unsaid, "records": self.writer.records[self._said :]})
            self._unsaid, self._said = [], len(self.writer.records)
        return params, report

    def _put_aside(self, stage: int, params: Params, report: Report) -> tuple[Params, Report]:
        changed = {n: p for n, p in params.items() if not isinstance(p, Lazy) and p is not self._start.params.get(n)}
        done = sum(len(line["reports"]) for line in self._journal.lines[1:] if line.get("stage") == stage)
        file = self.directory / WORK / f"stage-{stage}-{done}.safetensors"
        keep(changed, file)
        report = completed(report, {name: nbytes(leaf) for name, leaf in params.items()}, {})
        self._say({"stage": stage, "reports": [report], "file": file.name})
        return {**params, **kept(file)}, report

    def _say(self, line: dict[str, Any]) -> None:
        self._journal.append(line)
        self.blocks += len(line["reports"])


@contextmanager
def opened(
    target: Path,
    start: Model,
    stages: int,
    identity: Identity | None,
    writer: Callable[[Path, Sequence[Any]], Writer],
    overwrite: bool,
) -> Generator[Workspace]:
    """A new job, or the one that an interrupted run left: it is kept where a block is finished, else removed.

    Raises:
        BadInput: the job that was left is another one; another process finished one in the meantime.
    """
    directory = partial(target)
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = locked(directory)
    except BaseException:
        _remove_empty(made)  # what another one has begun to fill stays
        raise
    try:
        with _emptied(made):
            for path in made:
                sync(path.parent)  # else a power cut may take its name
            if filled(target) and not overwrite:  # it was not when the output was checked
                raise BadInput(f"{target}: another run has just finished it; look at what it made")
            if not valuable(directory):
                _clear(directory)
            job = Workspace(target, start, stages, identity, writer)
        try:
            yield job
        except BaseException as error:
            job.writer.abort()
            if identity is not None and valuable(directory):
                count = max(job.blocks, 1)  # a signal may come between the line and the count
                blocks = f"{count} finished block{'s' if count > 1 else ''}"
                how = "once that is as it was, the same command" if isinstance(error, BadInput) else "the same command"
                error.add_note(f"{blocks} kept in {directory}; {how} with --resume goes on from there")
            else:
                _remove([directory, *made])
            raise
    finally:
        os.close(handle)


@contextmanager
def _emptied(made: Sequence[Path]) -> Generator[None]:
    """Leaves nothing of what was just made where a job cannot even begin."""
    try:
        yield
    except BaseException:
        _remove(made)
        raise


def _remove(directories: Sequence[Path]) -> None:
    """Removes a directory with all that is in it, and then the empty ones that it lies in."""
    for directory in directories[:1]:
        shutil.rmtree(directory, ignore_errors=True)
    _remove_empty(directories[1:])


def _remove_empty(directories: Iterable[Path]) -> None:
    for directory in directories:
        with suppress(OSError):  # it is not there, or others use it by now
            directory.rmdir()


def _clear(directory: Path) -> None:
    """Empties a directory, which stays: it is locked."""
    for entry in directory.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def refuse_changed(old: Any, new: Identity | None, where: Path) -> None:
    """Refuses to go on with, or to take for finished, what was made in another way; names what differs."""
    asked = json.loads(json.dumps(new))
    if not isinstance(old, dict) or asked is None:
        raise BadInput(f"{where}: was not made by a run that can be resumed; remove it")
    old, asked = _in_common(old, asked), _in_common(asked, old)
    way = list(_change(old, asked))
    if way:
        was, now = (_shown(reduce(_inside, way, table)) for table in (old, asked))
        what = f"{way[0]}: {' '.join((*way[1:], was))}"
        raise BadInput(f"{where}: was begun with another {what}, now {now}; pass the same, or remove it")


def _in_common(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Files have times of change that can be compared only where both jobs read them from one place."""
    return {**one, FILES: {file: at for file, at in one.get(FILES, {}).items() if file in other.get(FILES, {})}}


def _change(old: Any, new: Any) -> Iterator[str]:
    """The keys that lead to the first thing that differs."""
    for key in dict.fromkeys((*old, *new)) if isinstance(old, dict) and isinstance(new, dict) else ():
        if old.get(key) != new.get(key):
            yield key
            yield from _change(old.get(key), new.get(key))
            return


def _inside(table: Any, key: str) -> Any:
    return table.get(key)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def completed(report: Report, sizes: Mapping[str, int], notes: Mapping[str, str]) -> Report:
    """A block's report with the bytes of its weights, and with what the writer says of them in each one's last line."""
    last = {w["name"]: i for i, w in enumerate(report["weights"])}
    said = {i: notes[name] for name, i in last.items() if name in notes}
    rows = [
        {**w, "bytes": sizes[w["name"]], "note": "; ".join(filter(None, (w["note"], said.get(i))))}
        for i, w in enumerate(report["weights"])
    ]
    return {**report, "bytes": sum(sizes.values()), "weights": rows}
