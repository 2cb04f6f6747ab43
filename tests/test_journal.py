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


@pytest.mark.parametrize("damage", ["changed", "lost", "moved", "twice", "no line of a journal"])
def test_a_line_that_is_not_as_it_was_written(damage: str, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    for n in range(4):
        journal.append({"line": n})
    one, two, three, four = journal.path.read_bytes().splitlines(keepends=True)
    lines = {
        "changed": [one, two.replace(b"1}", b"7}"), three, four],  # still JSON
        "lost": [one, three, four],
        "moved": [one, three, two, four],
        "twice": [one, one, two, three, four],
        "no line of a journal": [one, b'{"line": 1}\n', three, four],
    }
    journal.path.write_bytes(b"".join(lines[damage]))
    with pytest.raises(BadInput, match="j: line 2 is damaged"):
        Journal(journal.path)
