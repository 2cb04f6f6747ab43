"""The project's own promises: what it exports, how fast it imports, how big its files are."""

from __future__ import annotations

import ast
import re
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


def test_operations_are_seen_in_one_place() -> None:
    assert _holding(r"\(TorchFunctionMode\)") == ["ptq/models/interpret.py"]


def test_nothing_is_written_into_modules_but_fresh_skeletons() -> None:
    models = {f"ptq/models/{name}.py" for name in ("call", "probe", "skeleton")}
    allowed = models | {f"ptq/pipeline/{name}.py" for name in ("spine", "trial_forward")}
    for pattern in (
        r"\.data(\.\w+_\(| .?= )",
        "setattr",
        "register_forward",
        "register_module",
        r"_buffers\[",
        r"_parameters\[",
    ):
        assert set(_holding(pattern)) <= allowed, pattern


def test_numerics_know_no_modules_and_no_families() -> None:
    assert [f for f in _holding(r"nn\.Module|import nn\b|from pathlib") if f.startswith("ptq/numerics")] == []
    families = _holding(r"(?i)llama|gemma|gpt-?2\b|mistral|qwen")
    assert [f for f in families if not f.startswith(("ptq/io/gguf", "ptq/io/demo"))] == []


def _holding(pattern: str) -> list[str]:
    """The files whose code holds a pattern; docstrings and comments do not count."""
    return [str(path.relative_to(ROOT)) for path in SOURCES if re.search(pattern, _code(path))]


def _code(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]  # type: ignore[attr-defined]
    return ast.unparse(tree)
