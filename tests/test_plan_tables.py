"""The command's dry run: what it shows, what it writes, what it refuses, and that nothing is left."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ptq.cli.main import main
from ptq.cli.plan_tables import show_plan
from ptq.pipeline.offload import Offload

SMALL = ["--samples", "4", "--seq-len", "32", "--device", "cpu"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dry(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Plans a compression into `results/out`, and sees that nothing is there afterwards."""
    results = tmp_path / "results"
    results.mkdir()

    def run(model: Path, recipe: str, *more: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        command = ["compress", model, results / "out", "--recipe", recipe, "--dry-run", *SMALL, *more]
        code = main([str(word) for word in command])
        assert list(results.iterdir()) == []
        assert [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon] == []
        return code, *capsys.readouterr()

    return run


def test_blocks_of_equal_cost_are_one_line(dry: Run, tiny_llama: Path, tmp_path: Path) -> None:
    code, out, err = dry(tiny_llama, "gptq-w4a16-g64", "--report", tmp_path / "plan.json")
    assert (code, err) == (0, "")
    assert out.count("model.layers.0 .. 1 (2)") == 2
    for part in ("self_attn.q_proj, self_attn.k_proj, self_attn.v_proj", "gptq(int4/64", "gram", "memory ", "disk "):
        assert part in out
    report = json.loads((tmp_path / "plan.json").read_text())
    names = [block["name"] for block in report["blocks"]]
    assert names == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    assert f"disk {report['totals']['bytes'] / 1e6:.1f} MB" in out
    assert report["model"] == str(tiny_llama)


@pytest.mark.parametrize("short", ["memory", "disk", "offload"])
def test_what_does_not_fit_is_exit_code_1(
    short: str, dry: Run, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, usage = ["--offload", tmp_path] if short == "offload" else [], shutil.disk_usage(tmp_path)
    if short == "memory":
        monkeypatch.setattr("ptq.pipeline.estimate.memory_limit", lambda device: 1000)
    elif short == "disk":
        monkeypatch.setattr("ptq.pipeline.estimate.shutil.disk_usage", lambda path: usage._replace(free=1000))
    else:
        monkeypatch.setattr(Offload, "free", 1000)
    code, out, err = dry(tiny_llama, "gptq-w4a16-g64", *place)
    assert (code, err) == (1, "")
    assert [line.partition(" ")[0] for line in out.splitlines() if "too much: there is only 0.0 MB" in line] == [short]


def test_patterns_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets are words of the terminal's markup, and of regular expressions."""
    pattern = "re:.*[upgate]+_proj :+1:"
    clause = {"pattern": pattern, "ignore": ["re:[a-z]"], "earlier": [], "reaches": ["a", "b"]}
    member = {"transform": "halve", "targets": [clause], "weights": ["a"]}
    totals = {"memory": {"peak": 2, "now": 1, "limit": 1}, "bytes": 3, "free": 4, "seconds": {"total": 0.0}}
    totals |= {"kept": 2, "offload": {"peak": 7_000_000, "free": 10**9}}
    show_plan({"stages": [[member]], "blocks": [], "ties": {}, "untied": [], "totals": totals})
    shown = capsys.readouterr().out
    assert f"{pattern} (2) without re:[a-z]" in shown
    assert "too much: there is only" in shown


def test_ties_are_shown(dry: Run, tiny_gemma3: Path) -> None:
    _, out, _ = dry(tiny_gemma3, "rtn-w8a16")
    assert "lm_head.weight is model.embed_tokens.weight" in out


@pytest.mark.slow
def test_the_run_that_follows_takes_that_much(
    dry: Run, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry(tiny, "gptq-w8a16", "--report", tmp_path / "plan.json")
    command = ["compress", tiny, tmp_path / "out", "--recipe", "gptq-w8a16", *SMALL, "--report", tmp_path / "run.json"]
    assert main([str(word) for word in command]) == 0
    plan, run = (json.loads((tmp_path / name).read_text()) for name in ("plan.json", "run.json"))
    assert plan["totals"]["bytes"] == pytest.approx(run["totals"]["bytes"], rel=0.01)
    assert [b["name"] for b in plan["blocks"]] == [b["name"] for b in run["blocks"]]
    weights = [w for stage in plan["stages"] for member in stage for w in member["weights"]]
    assert sorted(weights) == sorted(w["name"] for b in run["blocks"] for w in b["weights"])


@pytest.mark.parametrize(
    ("recipe", "more", "parts"),
    [
        ("gptq-w4a16-g128", [], ["128", "model.layers.0.self_attn.q_proj.weight", "and 8 more"]),
        ("sparsegpt-2of7", [], ["2 of 7", "model.layers.0"]),
        ("nonsense", [], ["unknown recipe"]),
        ("gptq-w4a16", ["--samples", "99999"], ["99999"]),
        ("gptq-w4a16", ["--seq-len", "500"], ["128 positions"]),
        ("gptq-w4a16", ["--device", "abacus"], ["abacus"]),
        ("gptq-w4a16", ["--report", "absent/plan.json"], ["absent/plan.json"]),
        ("gptq-w4a16", ["--report", "{out}/plan.json"], ["out/plan.json", "a dry run makes none"]),
    ],
)
def test_all_refusals_that_can_be_known(
    dry: Run, tiny_llama: Path, tmp_path: Path, recipe: str, more: list[str], parts: list[str]
) -> None:
    given = [word.format(out=tmp_path / "results" / "out") for word in more]
    code, out, err = dry(tiny_llama, recipe, *given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(part in err for part in parts), err


def test_a_result_that_exists_is_refused_now(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious.txt").write_text("x")
    assert main(["compress", str(tiny_llama), str(tmp_path), "--recipe", "rtn-w8a16", "--dry-run"]) == 2
    assert "overwrite" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]
