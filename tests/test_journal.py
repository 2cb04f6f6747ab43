"""Lines that are true, whatever ended the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptq.errors import BadInput
from ptq.io.journal import Journal


def test_lines_come_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    assert journal.lines == []
    assert not journal.path.exists()
    journal.append({"a": 1})
    journal.append({"b": ["ü\n"]})
    assert Journal(tmp_path / "j").lines == journal.lines == [{"a": 1}, {"b": ["ü\n"]}]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_line_was_never_said(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    for n in range(2):
        journal.append({"line": n})
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    again = Journal(path)
    assert again.lines == [{"line": 0}]
    again.append({"line": 1})
    assert path.read_bytes() == whole


def test_a_damaged_line(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b'{"a": 1}\n{"b"\n{"c": 1}\n')
    with pytest.raises(BadInput, match="j: line 2 is damaged"):
        Journal(tmp_path / "j")
