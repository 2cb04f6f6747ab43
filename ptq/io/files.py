"""Files that are whole or not there, and JSON in them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ptq.errors import BadInput


def expanded(path: str | Path) -> Path:
    """A path as people write it: `~` is a home directory.

    >>> expanded("~nobody-of-that-name/model")
    Traceback (most recent call last):
    ptq.errors.BadInput: ~nobody-of-that-name/model: there is no such home directory; write the whole path
    """
    if "\0" in str(path):
        raise BadInput(f"{str(path)!r}: a path has no NUL in it")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise BadInput(f"{path}: there is no such home directory; write the whole path") from None


def sync(path: Path) -> None:
    """Waits until a file, or a directory's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Says which file: a system that cannot write does not, and libraries in Rust put what it says into words."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        BadInput: the file is not there, not JSON or not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{file}: no such file") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{file}: not a JSON file; download or copy it again") from None
    if not isinstance(value, dict):
        raise BadInput(f"{file}: holds {type(value).__name__}, expected an object")
    return value


def write_json(file: Path, value: Any) -> None:
    """Writes a file that appears whole or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    sync(partial)
    partial.replace(file)
