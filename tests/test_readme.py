"""What the README shows runs, in the order in which it is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ptq.cli.main import main
from ptq.recipes.presets import PRESETS, recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_examples(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model instead of the one that is downloaded, with fewer tokens."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    code = re.sub(r"samples=\d+, seq_len=\d+", "samples=4, seq_len=32", code.replace('"demo"', repr(str(tiny_llama))))
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102  # our own text
    assert {"out", "out2"} <= {p.name for p in tmp_path.iterdir()}
    assert names["run"].report["totals"]["bits_per_weight"] < 9


def test_commands_and_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    commands = set(re.findall(r"^ptq (\w+)", README, re.MULTILINE))
    helps = {command: _help(capsys, command) for command in commands}
    assert set(re.findall(r"^    (\w+)  ", _help(capsys), re.MULTILINE)) == commands
    shown = set(re.findall(r"--[a-z][a-z-]+", README))
    assert shown <= set(re.findall(r"--[a-z][a-z-]+", "".join(helps.values())))
    assert set(re.findall(r"--[a-z][a-z-]+", helps["compress"])) - {"--help"} <= shown


def _help(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    return capsys.readouterr().out


def test_recipes_are_recipes() -> None:
    names = set(re.findall(r"`((?:rtn|gptq|magnitude|wanda|sparsegpt)-[\w-]+)`", README))
    assert names <= set(PRESETS)
    assert len(names) > 12
    assert all(recipe(name) for name in names)


@pytest.mark.parametrize("extra", ["demo", "test"])
def test_set_up_commands_are_those_that_ci_runs(extra: str, request: Any) -> None:
    script = (ROOT / ".ci" / "run").read_text()
    [line] = [line for line in README.splitlines() if f"'.[{extra}]'" in line]
    venv, install, use = line.split(" && ")
    assert venv == "python -m venv .venv"
    assert install == f".venv/bin/pip install -e '.[{extra}]'"
    assert use == {"demo": ".venv/bin/ptq demo", "test": ".venv/bin/pytest -n 2"}[extra]
    if extra == "test":
        assert "pip install --quiet -e '.[test]'" in script
        assert "\nrun pytest -n 2 " in script
