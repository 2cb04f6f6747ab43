"""The directory that is written: where it may be, who writes it, and how it gets its final name.

What is written lies in `<path>.partial` until it is whole, and is then renamed: a directory under its final name is
always a checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ptq.errors import BadInput
from ptq.io.files import expanded, sync
from ptq.io.journal import Journal

RECORD = "ptq.json"
"""in a finished directory: what made it"""
WORK = ".job"
"""in an unfinished one: the journal and what else goes when it is whole; nothing of a source has such a name"""
JOURNAL = f"{WORK}/journal"

_handles: set[int] = set()
"""of directories that this process has locked; some are closed by now"""


def check_output(
    path: str | Path, overwrite: bool = False, source: str | Path | None = None, resume: bool = False
) -> Path:
    """The directory to write to, absolute.

    Args:
        path: the directory.
        overwrite: whether a model that is there may be replaced.
        source: what the model is read from, which is never replaced.
        resume: whether an interrupted run, or a finished one, may be there.

    Raises:
        BadInput: no directory can be made there; it is not empty and may not be overwritten, is no model, or holds the
            source; an earlier run left finished blocks, or another one is at work.
    """
    given, target = expanded(path).absolute(), resolved(path)
    left = bool(target.name) and (_left(given) or _left(target))
    if target.is_mount():
        raise BadInput(f"{given}: a disk is mounted there, so no directory can be given its name; name one inside it")
    broken = next((path for path in (given, *given.parents) if path.is_symlink() and not path.exists()), None)
    if broken is not None:
        raise BadInput(f"{broken}: is a link to nothing; name a directory")
    if target.exists() and not target.is_dir():
        raise BadInput(f"{target}: is a file; name a directory")
    finished = resume and not left and (target / RECORD).is_file()
    if target.is_dir() and any(target.iterdir()) and not finished:
        _check_replaceable(target, overwrite, None if source is None else expanded(source))
    if left and not partial(target).is_dir():
        raise BadInput(f"{partial(target)}: is in the way; remove it")
    if left and not resume:
        os.close(locked(partial(target)))  # another run at work is refused by that name
        if valuable(partial(target)):
            raise BadInput(f"{partial(target)}: left by a run that was interrupted; resume it, or remove it")
    return target


def resolved(path: str | Path) -> Path:
    """The directory that a path is for. A link gets no other meaning: what it leads to is made or replaced."""
    return Path(os.path.realpath(expanded(path)))


def partial(target: Path) -> Path:
    """Where a directory is until it is whole."""
    return target.with_name(f"{target.name}.partial")


def locked(directory: Path) -> int:
    """A handle to a directory that holds it for this process, until it is closed or the process ends.

    Raises:
        BadInput: another run holds it, of this process or another one; or it is no directory.
    """
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except NotADirectoryError:
        raise BadInput(f"{directory}: is in the way; remove it") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise BadInput(f"{directory}: {_writing(directory)}, or name another directory") from None
    if not _is(directory, handle):  # it was given its final name between the two steps
        os.close(handle)
        raise BadInput(f"{directory}: another run has just finished it; look at what it made")
    _handles.add(handle)
    return handle


def valuable(directory: Path) -> bool:
    """Whether a job could go on with what is in its directory, so that something is lost if that goes.

    Raises:
        BadInput: the journal is damaged; or there is none, so the directory is someone else's.
    """
    if (directory / RECORD).exists():
        return True  # it only lacks its name
    if not (directory / JOURNAL).exists() and any(entry.name != WORK for entry in directory.iterdir()):
        raise BadInput(f"{directory}: is not what an interrupted run leaves; remove it")
    identity, blocks = begun(directory)
    return identity is not None and blocks > 0


def begun(directory: Path) -> tuple[Any, int]:
    """The identity of an unfinished job, and how many blocks are finished, over all stages."""
    first, *lines = Journal(directory / JOURNAL).lines or [{}]
    return first.get("identity"), sum(len(line.get("reports", ())) for line in lines)


def swap(target: Path) -> None:
    """Gives a whole directory its final name. An old one makes room, and is gone when the new one is there."""
    old = _old(target)
    if target.exists():
        tidy(target)
        target.rename(old)
    try:
        partial(target).rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    sync(target.parent)
    tidy(target)


def tidy(target: Path) -> None:
    """Removes what made room for a directory."""
    if _old(target).exists():
        shutil.rmtree(_old(target))


def conclude(target: Path) -> None:
    """Gives a whole directory its name, less what was only needed while it was made."""
    (partial(target) / JOURNAL).unlink(missing_ok=True)  # first: without it, what made the directory says it is whole
    if (partial(target) / WORK).exists():
        shutil.rmtree(partial(target) / WORK)
    swap(target)


def filled(target: Path) -> bool:
    """Whether something is lost if a directory takes a name."""
    return target.exists() and (not target.is_dir() or any(target.iterdir()))


def _is(directory: Path, handle: int) -> bool:
    try:
        return os.path.samestat(directory.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _writing(directory: Path) -> str:
    """Who holds a directory, and what to do."""
    for handle in _handles:
        with suppress(OSError):  # it is closed
            if _is(directory, handle):
                return "a run of this process is writing it; close that run"
    return "another run is writing it; wait for it"


def _old(target: Path) -> Path:
    return target.with_name(f"{target.name}.old.partial")


def _left(target: Path) -> bool:
    """Whether an earlier run left its partial result."""
    try:
        partial(target).lstat()
    except FileNotFoundError:
        return False
    except OSError as error:  # under a file, a loop of links, a name too long
        raise BadInput(f"{target}: cannot be made: {error.strerror}; name another directory") from None
    return True


def _check_replaceable(target: Path, overwrite: bool, source: Path | None) -> None:
    if not overwrite:
        raise BadInput(f"{target}: exists and is not empty; choose another directory or overwrite it")
    # Files too, since those of a model may be links to where the bytes are.
    files = [] if source is None or not source.exists() else [source, *filter(Path.is_file, source.glob("*"))]
    if any(file.resolve().is_relative_to(target.resolve()) for file in files):
        raise BadInput(f"{target}: the model is read from it ({source}); choose another directory")
    if not (target / "config.json").is_file():
        raise BadInput(f"{target}: holds no config.json, so it is no model to overwrite; choose another directory")
