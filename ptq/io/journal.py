"""What of a job is safely on disk: a line for each finished piece of work.

A line is appended and synced after the bytes that it speaks of. So whatever ends the process, the whole lines are true;
a last line that is torn was never said, and is cut off when the job goes on. Each line is a checksum of itself and of
all lines before it, and a JSON object: a line that was changed, lost or moved later on is found.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from ptq.errors import BadInput
from ptq.io.files import naming


class Journal:
    """An append-only file.

    Args:
        path: the file; made when the first line is appended.

    Raises:
        BadInput: a whole line is not as it was written, or the file is no journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self._sum = 0
        whole = path.read_bytes().rpartition(b"\n")[:2] if path.exists() else (b"", b"")
        for number, line in enumerate(whole[0].splitlines(), 1):
            checksum, _, data = line.partition(b" ")
            self._sum = zlib.crc32(data, self._sum)
            if checksum != b"%08x" % self._sum:
                raise BadInput(f"{path}: line {number} is damaged; remove the directory and start again")
            self.lines.append(json.loads(data))
        self._end = sum(map(len, whole))

    def append(self, line: dict[str, Any]) -> None:
        """Adds a line; it is on disk when this returns, after whatever was torn before it is cut off."""
        data = json.dumps(line, separators=(",", ":")).encode()
        self._sum = zlib.crc32(data, self._sum)
        written = b"%08x %s\n" % (self._sum, data)
        with naming(self.path), self.path.open("r+b" if self.path.exists() else "xb") as file:
            file.truncate(self._end)
            file.seek(self._end)
            file.write(written)
            file.flush()
            os.fsync(file.fileno())
        self._end += len(written)
        self.lines.append(line)
