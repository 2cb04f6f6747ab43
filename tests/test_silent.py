"""Checkpoints whose config says nothing of how they are compressed: tensors do, the same ones always alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import test_foreign as foreign
from checkpoints import GOLDEN, same_bits
from ptq.errors import BadInput
from ptq.io.hub import load
from ptq.io.save import save
from ptq.numerics.leaves import compressed, dense

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj"
NAMES = ["W3A16", "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_BLOCK", "NVFP4A16", "MXFP4A16"]
pytestmark = pytest.mark.filterwarnings("ignore:.*only weights are computed with:UserWarning")


def silent(source: Path, path: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    """A copy without a word on quantization, and with other tensors."""
    shutil.copytree(source, path)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (path / "config.json").write_text(json.dumps(config))
    save_file({**load_file(source / WEIGHTS), **(tensors or {})}, path / WEIGHTS, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("name", NAMES)
def test_tensors_tell_what_a_config_does_not(name: str, tmp_path: Path) -> None:
    said, told = load(GOLDEN / name), load(silent(GOLDEN / name, tmp_path / "silent"))
    for parameter, leaf in said.params.items():
        assert compressed(told.params[parameter]) == compressed(leaf)
        assert torch.equal(dense(told.params[parameter]), dense(leaf))
    save(told, tmp_path / "again")
    again = load_file(tmp_path / "again" / WEIGHTS)
    for n, t in load_file(GOLDEN / name / WEIGHTS).items():
        assert same_bits(t.flatten() if t.numel() == 1 else t, again[n])  # one block may be all of a weight


def fp8_blocks(name: str, w: Tensor) -> foreign.Written:
    return foreign.in_fp8_blocks(name, w, 32)


@pytest.mark.parametrize(
    ("config", "encode"),
    [
        (foreign.deepseek_config, foreign.linears(fp8_blocks)),
        (foreign.qwen3_config, foreign.linears(foreign.in_fp8_tensor)),
        (foreign.qwen3_config, foreign.linears(foreign.in_nvfp4)),
        (foreign.gpt_oss_config, foreign.stacks),
    ],
)
def test_tensors_of_other_quantizers_tell_whose_they_are(
    config: Callable[[], Any], encode: Callable[[str, Tensor], foreign.Written | None], tmp_path: Path
) -> None:
    source, reference = foreign.rewritten(config(), tmp_path, encode, {})
    model = load(source)
    assert any(map(compressed, model.params.values()))
    foreign.agrees(model, reference)


def test_what_tensors_leave_open_is_refused(tmp_path: Path) -> None:
    """16 columns in two words are 3 bits to each, or 4."""
    packed = {f"{Q_PROJ}.weight_packed": torch.zeros(128, 2, dtype=torch.int32)}
    packed |= {f"{Q_PROJ}.weight_shape": torch.tensor([128, 16]), f"{Q_PROJ}.weight_scale": torch.ones(128, 1)}
    with pytest.raises(BadInput, match=rf"{Q_PROJ}\.weight is compressed, but no config group says how"):
        load(silent(GOLDEN / "W4A16", tmp_path / "silent", packed))


def test_a_dense_matrix_with_zeros_is_dense(tmp_path: Path) -> None:
    w = load_file(GOLDEN / "base" / WEIGHTS)[f"{Q_PROJ}.weight"]
    half = w * torch.tensor([1, 0, 0, 1]).repeat(w.shape[1] // 4)
    scales = {f"{Q_PROJ}.weight": half, f"{Q_PROJ}.weight_scale": torch.ones(len(w), 1)}
    model = load(silent(GOLDEN / "base", tmp_path / "silent", scales))
    assert not any(map(compressed, model.params.values()))
    again = load_file(save(model, tmp_path / "again").path / WEIGHTS)
    assert all(same_bits(t, again[n]) for n, t in load_file(tmp_path / "silent" / WEIGHTS).items())


def test_tensors_without_a_place_pass_whatever_they_hold(tmp_path: Path) -> None:
    dtypes = [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e8m0fnu, torch.float8_e5m2fnuz]
    extra = {f"extra.{dtype}": torch.ones(3).to(dtype) for dtype in dtypes} | {"mask": torch.tensor([0, -torch.inf])}
    source = silent(GOLDEN / "base", tmp_path / "source", extra)
    again = load_file(save(load(source), tmp_path / "again").path / WEIGHTS)
    assert all(same_bits(t, again[n]) for n, t in extra.items())


def test_a_weight_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    words = {f"{Q_PROJ}.weight": torch.zeros(128, 128, dtype=torch.uint16)}
    with pytest.raises(BadInput, match=rf"{Q_PROJ}\.weight: got torch\.uint16 without a scale"):
        load(silent(GOLDEN / "base", tmp_path / "source", words))


@pytest.mark.parametrize("status", ["compressed", "frozen"])
def test_zero_points_that_a_config_denies_are_not_passed_over(status: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "W4A16_ASYM", tmp_path / "denied")
    config = json.loads((tmp_path / "denied/config.json").read_text())
    config["quantization_config"]["quantization_status"] = status
    del config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"]  # true where it is not said
    (tmp_path / "denied/config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"q_proj\.weight_zero_point: got zero points, and its config says"):
        dense(load(tmp_path / "denied").params[f"{Q_PROJ}.weight"])


def test_zero_points_of_zero_beside_symmetric_weights_are_those_of_old_writers(tmp_path: Path) -> None:
    weights = load_file(GOLDEN / "W8A8" / WEIGHTS)
    scales = {n: t for n, t in weights.items() if n.endswith("weight_scale")}
    zeros = {n.replace("scale", "zero_point"): torch.zeros_like(t, dtype=torch.int8) for n, t in scales.items()}
    shutil.copytree(GOLDEN / "W8A8", tmp_path / "old")
    save_file({**weights, **zeros}, tmp_path / "old" / WEIGHTS, metadata={"format": "pt"})
    again = load_file(save(load(tmp_path / "old"), tmp_path / "again").path / WEIGHTS)
    assert again.keys() == weights.keys()
    assert all(same_bits(t, again[n]) for n, t in weights.items())
