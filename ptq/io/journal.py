"""What of a job is safely on disk: a line of JSON for each finished piece of work.

A line is appended and synced after the bytes that it speaks of. So whatever ends the process, the whole lines are true;
a last line that is torn was never said, and is cut off when the job goes on.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ptq.errors import BadInput
from ptq.io.files import naming


class Journal:
    """An append-only file.

    Args:
        path: the file; made when the first line is appended.

    Raises:
        BadInput: a whole line is no JSON object, so the file is not a journal or was damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        whole = path.read_bytes().rpartition(b"\n")[:2] if path.exists() else (b"", b"")
        for number, line in enumerate(whole[0].splitlines(), 1):
            self.lines.append(_parsed(line, f"{path}: line {number}"))
        self._end = sum(map(len, whole))

    def append(self, line: dict[str, Any]) -> None:
        """Adds a line; it is on disk when this returns, after whatever was torn before it is cut off."""
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with naming(self.path), self.path.open("r+b" if self.path.exists() else "xb") as file:
            file.truncate(self._end)
            file.seek(self._end)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._end += len(data)
        self.lines.append(line)


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BadInput(f"{where} is damaged; remove the directory and start again")
    return value
