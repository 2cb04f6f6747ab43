"""Weights and activations together: what no kernel of vLLM multiplies is told, and what one does is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import GOLDEN, compressed, quantized
from conftest import llama_config, stock
from ptq.io.check import check
from ptq.io.hub import open_model
from ptq.io.save import save
from ptq.numerics.grids import Float8, Int

Given = Mapping[str, Any] | None
INT: Given = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FLOAT: Given = {**INT, "type": "float"}
STATIC: Given = {**INT, "strategy": "tensor", "dynamic": False}
STATIC_FLOAT: Given = {**STATIC, "type": "float"}
SHIFTED: Given = {**INT, "symmetric": False}
MADE = {"int8": (Int(8), "int-quantized"), "float8": (Float8(), "auto"), "int4": (Int(4), "auto")}
PAIRS: list[tuple[str, Given, Given, bool]] = [
    ("int8", INT, None, True),
    ("int8", SHIFTED, None, True),
    ("int8", STATIC, None, True),
    ("int8", FLOAT, None, False),
    ("int8", None, STATIC, False),
    ("float8", FLOAT, None, True),
    ("float8", STATIC_FLOAT, None, True),
    ("float8", INT, None, False),
    ("float8", None, STATIC_FLOAT, False),
    ("FP8_BLOCK", FLOAT, None, True),
    ("FP8_BLOCK", STATIC_FLOAT, None, False),
    ("int4", INT, None, True),
    ("int4", SHIFTED, None, False),
    ("int4", STATIC, None, False),
    ("int4", STATIC, STATIC, True),
    ("int4", FLOAT, None, False),  # in groups of 128 only
    ("NVFP4A16", INT, None, False),
    ("NVFP4A16", FLOAT, None, False),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each kind, without activations."""
    base = tmp_path_factory.mktemp("kernels")
    stock(llama_config()).save_pretrained(base / "source")
    for kind, (grid, form) in MADE.items():
        model = open_model(base / "source")
        made = compressed(
            model, lambda n, s, g=grid: quantized(*s, grid=g, tiles="channel") if ".layers." in n else None
        )
        save(made, base / kind, format=form)
    for kind in {kind for kind, *_ in PAIRS} - MADE.keys():
        shutil.copytree(GOLDEN / kind, base / kind)
    return base


def given(model: Path, out: Path, inputs: Given, outputs: Given) -> Path:
    """A copy with activations in its config, and with the scales that static ones need."""
    shutil.copytree(model, out)
    table = json.loads((out / "config.json").read_text())
    for group in table["quantization_config"]["config_groups"].values():
        group.update(input_activations=inputs, output_activations=outputs)
    (out / "config.json").write_text(json.dumps(table))
    held = load_file(out / "model.safetensors")
    modules = {name.removesuffix(".weight_scale") for name in held if name.endswith(".weight_scale")}
    for role, args in (("input", inputs), ("output", outputs)):
        stale = [name for name in held if name.endswith((f".{role}_scale", f".{role}_zero_point"))]
        for name in stale:
            held.pop(name)
        if args and args["dynamic"] is False:
            held |= {f"{module}.{role}_scale": torch.ones(1) for module in modules}
    save_file(held, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize(("kind", "inputs", "outputs", "taken"), PAIRS)
def test_pairs_that_no_kernel_multiplies(
    kind: str, inputs: Given, outputs: Given, taken: bool, models: Path, tmp_path: Path
) -> None:
    found = [
        each for each in check(given(models / kind, tmp_path / "model", inputs, outputs)) if each.loaders == "vLLM"
    ]
    told = [each for each in found if each.rule == "activations"]
    assert len(told) == (0 if taken else 1), found
    assert all(each.severity == "error" and ".layers." in each.about for each in told)
