"""Sizes counted by hand, and the words for formats."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ptq.cli.tables import show_report, show_tensors
from ptq.numerics.grids import Float8, Int
from ptq.numerics.leaves import Quantized, Sparse, Transposed
from ptq.numerics.patterns import NM, Unstructured
from ptq.pipeline.report import format_name, totals, versions


def quantized(rows: int, groups: int, bits: int = 4, zero: bool = False) -> Quantized:
    codes = torch.zeros(8, 64, dtype=torch.int8)
    scale = torch.ones(rows, groups, dtype=torch.float16)
    return Quantized(
        codes, scale, torch.zeros_like(scale, dtype=torch.int8) if zero else None, Int(bits), torch.float16
    )


def test_totals_count_each_weight_once_however_many_stages_worked_on_it() -> None:
    rows = [{"name": name, "bytes": size, "numel": 512} for name, size in (("a", 288), ("b", 296), ("a", 288))]
    blocks = [{"bytes": 600, "weights": rows[:2]}, {"bytes": 40, "weights": rows[2:]}]
    assert totals(blocks, 2.5) == {"bits_per_weight": 8 * (288 + 296) / 1024, "bytes": 640, "seconds": 2.5}


def test_nothing_compressed_has_no_bits_per_weight() -> None:
    assert totals([{"bytes": 8, "weights": []}], 0.0)["bits_per_weight"] is None


@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        (torch.ones(2, 2, dtype=torch.float16), "float16"),
        (quantized(1, 1), "int4 per tensor"),
        (quantized(8, 1), "int4 per channel"),
        (quantized(8, 2, bits=3), "int3 per group 32"),
        (quantized(8, 4, zero=True), "int4 per group 16, zero points"),
        (Transposed(quantized(8, 2)), "int4 per group 32"),
        (replace(quantized(8, 1), tile=(1, 64)), "int4 per group 64"),
        (replace(quantized(2, 2), tile=(4, 32)), "int4 per block 4 x 32"),
        (Sparse(torch.ones(2, 4), torch.ones(2, 4).bool(), NM(2, 4)), "float32, 2 of 4 sparse"),
        (Sparse(quantized(8, 1), torch.ones(8, 64).bool(), Unstructured(0.5)), "int4 per channel, unstructured sparse"),
        (
            Quantized(torch.ones(2, 4).to(torch.float8_e4m3fn), torch.ones(2, 1), None, Float8(), torch.float32),
            "float8_e4m3fn per channel",
        ),
    ],
)
def test_formats_have_names(leaf: object, name: str) -> None:
    assert format_name(leaf) == name


def test_versions_are_those_installed() -> None:
    assert versions()["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert json.loads(json.dumps(versions())) == versions()


def test_tables_hold_every_row_at_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    name = "model.layers.10.a_rather_long_name_for_a_block_of_weights"
    weight = {"name": f"{name}.w", "error": 0.0125, "damping": 0.1, "failures": 1, "note": "damped ten times more"}
    blocks = [{"name": name, "seconds": 1.25, "weights": [weight, {**weight, "error": 0.0375, "note": ""}]}]
    blocks.append({"name": "other", "seconds": 0.0, "weights": [{**weight, "name": "other.w", "damping": None}]})
    blocks.append({"name": "lm_head", "seconds": 0.0, "weights": []})
    show_report({"blocks": blocks, "totals": {"bits_per_weight": 4.25, "bytes": 2_500_000, "seconds": 61.0}})
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    row = next(line for line in lines if line.startswith(f"{name} "))
    assert row.split() == [name, "2", "2.50e-02", "0.1", "1.2"]
    assert next(line for line in lines if line.startswith("lm_head")).split() == ["lm_head", "-", "-", "-", "0.0"]
    assert lines[-2] == f"{name}.w and 1 more: damped ten times more"
    assert lines[-1] == "bits per compressed weight 4.25, size 2.5 MB, time 61.0 s"

    show_tensors(
        [{"name": name, "format": "int4 per group 64", "shape": [8, 64], "bits_per_weight": 4.5, "sparsity": 0.5}]
    )
    row = next(line for line in capsys.readouterr().out.splitlines() if name in line)
    assert row.split() == [name, *["int4", "per", "group", "64", "8", "x", "64", "4.5", "50.0%"]]
