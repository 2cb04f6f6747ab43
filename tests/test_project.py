"""The project's own promises: what it exports, how fast it imports, how big its files are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ptq

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "ptq").rglob("*.py"))


def test_importing_loads_nothing_heavy() -> None:
    code = "import ptq, ptq.cli.main, sys; print([m for m in ('torch', 'transformers', 'yaml') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_public_names_resolve_and_are_documented() -> None:
    names = [name for name in dir(ptq) if name != "jaxtyping"]  # which the test run's import hook adds
    assert {"chain", "gptq", "compress", "save", "load"} <= set(names)
    undocumented = [n for n in names if not (getattr(ptq, n).__doc__ or n == "identity")]
    assert undocumented == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        getattr(ptq, "no_such_name")  # noqa: B009  # a plain access is a useless expression


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_short(path: Path) -> None:
    limit = 60 if path.name in ("__init__.py", "_api.py") else 350
    assert len(path.read_text().splitlines()) <= limit
