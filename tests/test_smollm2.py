"""A real language model, SmolLM2-135M-Instruct: two blocks in every run, the whole model under the marker `slow`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ptq
from ptq.cli.main import main

TWO = r"re:.*layers\.(3|17)\."
W4 = ptq.scheme("W4A16", group_size=64)


@pytest.fixture(scope="module")
def model() -> Any:
    return ptq.open_model("demo")


@pytest.fixture(scope="module")
def calibration(model: Any) -> Any:
    return ptq.tokens("builtin", model.tokenizer, samples=32, seq_len=256)


@pytest.fixture(scope="module")
def held_out(model: Any) -> Any:
    return ptq.tokens("builtin:eval", model.tokenizer, samples=2, seq_len=256)


@pytest.mark.slow
def test_gptq_beats_rounding_on_every_weight_of_two_blocks(model: Any, calibration: Any, held_out: Any) -> None:
    rounded = ptq.compress(model, None, ptq.targets(TWO, ptq.rtn(W4))).model
    run = ptq.compress(model, [calibration], ptq.targets(TWO, ptq.gptq(W4)))
    solved = run.model
    lines = [w for block in run.report["blocks"] for w in block["weights"]]
    stats = ptq.calibrate(model, [calibration[:8]])
    for line in lines[:4]:  # the first block's attention sees what the dense model sees
        name, g = line["name"], stats[line["site"]]["gram"].sum
        plain, better = (ptq.dense(m.params[name]) - ptq.dense(model.params[name]) for m in (rounded, solved))
        assert float(((better @ g) * better).sum()) < 0.7 * float(((plain @ g) * plain).sum())
        assert float(better.norm()) > float(plain.norm())
    assert {w["tokens"] for w in lines} == {32 * 256}
    assert len(lines) == 14
    ratio = ptq.perplexity(solved, [held_out]) / ptq.perplexity(model, [held_out])
    assert 0.97 < ratio < 1.03  # two of thirty blocks; on so little text it may fall below 1


@pytest.mark.slow
def test_pruning_leaves_exact_masks_in_two_blocks(model: Any, calibration: Any) -> None:
    stage = ptq.targets(TWO, ptq.sparsegpt(ptq.NM(keep=2, of=4)))
    done = ptq.compress(model, [calibration[:8]], stage).model
    sparse = {name: leaf for name, leaf in done.params.items() if isinstance(leaf, ptq.Sparse)}
    assert len(sparse) == 14
    assert all(".layers.3." in name or ".layers.17." in name for name in sparse)
    for leaf in sparse.values():
        kept = leaf.mask.view(-1, 4).sum(-1)
        assert int(kept.min()) == int(kept.max()) == 2
        assert int(ptq.dense(leaf).view(-1, 4).count_nonzero(-1).max()) == 2


@pytest.fixture(scope="module")
def dense_perplexity(model: Any) -> float:
    return ptq.perplexity(model, [ptq.tokens("builtin:eval", model.tokenizer, samples=8, seq_len=512)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "limit"),
    [("gptq-w4a16-g64", 1.12), ("rtn-w4a16-g64", 1.5), ("sparsegpt-2of4", 3.0), ("wanda-50", 3.0)],
)
def test_the_whole_model_through_the_command_line(
    recipe: str, limit: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], dense_perplexity: float
) -> None:
    out = tmp_path / "out"
    size = ["--samples", "32", "--seq-len", "512"]
    assert main(["compress", "demo", str(out), "--recipe", recipe, *size, "--report", str(tmp_path / "r.json")]) == 0
    capsys.readouterr()
    assert main(["eval", str(out), "--samples", "8", "--seq-len", "512"]) == 0
    perplexity = json.loads(capsys.readouterr().out.splitlines()[-1])["perplexity"]
    assert 1.0 < perplexity / dense_perplexity < limit
    lines = [w for block in json.loads((tmp_path / "r.json").read_text())["blocks"] for w in block["weights"]]
    assert len(lines) == 210
    assert all(w["failures"] == 0 for w in lines)


@pytest.mark.slow
def test_transformers_loads_the_whole_model_with_the_same_logits(model: Any, tmp_path: Path, held_out: Any) -> None:
    from transformers import AutoModelForCausalLM

    run = ptq.compress(model, None, ptq.rtn(W4))
    ptq.save(run, tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        ours, theirs = ptq.load(tmp_path / "out")(held_out[:1]).logits, stock(held_out[:1]).logits
    assert torch.equal(ours, theirs)
