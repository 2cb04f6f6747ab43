"""What `ptq inspect` says about a damaged compressed checkpoint: one line with file, tensor, got and expected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import GOLDEN
from ptq.cli.main import main
from ptq.io.safetensors import INDEX, WEIGHTS

UP = "model.layers.0.mlp.up_proj"


def retensored(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return apply


def replaced(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return retensored(lambda t: t.update({f"{UP}.{part}": change(t[f"{UP}.{part}"]).contiguous()}))


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same tensor with another number in front."""
    return lambda t: torch.cat([torch.full_like(t.flatten()[:1], value), t.flatten()[1:]]).view(t.shape)


def reconfigured(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        change(config["quantization_config"])
        (directory / "config.json").write_text(json.dumps(config))

    return apply


def reheadered(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        raw = (directory / WEIGHTS).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        table = json.loads(raw[8 : 8 + length])
        change(table)
        text = json.dumps(table).encode()
        (directory / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return apply


def indexed(shard: str) -> Callable[[Path], None]:
    """An index that puts one tensor into another shard."""

    def apply(directory: Path) -> None:
        table = {name: shard if name.startswith(UP) else WEIGHTS for name in load_file(directory / WEIGHTS)}
        (directory / INDEX).write_text(json.dumps({"weight_map": table}))

    return apply


def unlisted(directory: Path) -> None:
    table = dict.fromkeys(load_file(directory / WEIGHTS), WEIGHTS)
    del table[f"{UP}.weight_scale"]
    (directory / INDEX).write_text(json.dumps({"weight_map": table}))


def cut(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:-1])


def long_header(directory: Path) -> None:
    raw = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes((1 << 40).to_bytes(8, "little") + raw[8:])


def another_format(table: dict[str, Any]) -> None:
    for group in (table, *table["config_groups"].values()):
        group["format"] = "nonesuch"


CASES: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {
    "truncated": ("W4A16", cut, [WEIGHTS, "truncated", "ends at byte"]),
    "header beyond the file": ("W4A16", long_header, [WEIGHTS, "truncated or no safetensors file"]),
    "overlap": (
        "W4A16",
        reheadered(lambda t: t.update({f"{UP}.weight_scale": t[f"{UP.replace('up', 'gate')}.weight_scale"]})),
        [WEIGHTS, f"{UP}.weight_scale", "begins at byte", "expected"],
    ),
    "unlisted": ("W4A16", unlisted, [WEIGHTS, f"{UP}.weight_scale", INDEX]),
    "missing shard": ("W4A16", indexed("gone.safetensors"), ["gone.safetensors", INDEX]),
    "path above": ("W4A16", indexed("../x.safetensors"), [INDEX, UP, "'../x.safetensors'", "expected"]),
    "absolute path": ("W4A16", indexed("/etc/passwd"), [INDEX, UP, "'/etc/passwd'", "expected"]),
    "codes' dtype": (
        "W4A16",
        replaced("weight_packed", lambda t: t.long()),
        [WEIGHTS, f"{UP}.weight_packed", "got torch.int64", "expected torch.int32"],
    ),
    "codes' shape": (
        "W4A16",
        replaced("weight_packed", lambda t: t[:-1]),
        [WEIGHTS, f"{UP}.weight_packed", "got torch.int32", "expected"],
    ),
    "nvfp4 codes' shape": (
        "NVFP4A16",
        replaced("weight_packed", lambda t: t[:, :-1]),
        [UP, "groups of 16 do not divide"],
    ),
    "nvfp4 scales' dtype": (
        "NVFP4A16",
        replaced("weight_scale", lambda t: t.float()),
        [WEIGHTS, f"{UP}.weight_scale", "got torch.float32", "expected torch.float8_e4m3fn"],
    ),
    "nvfp4 without its divisor": (
        "NVFP4A16",
        retensored(lambda t: t.pop(f"{UP}.weight_global_scale")),
        [f"no tensor {UP}.weight_global_scale"],
    ),
    **{
        f"nvfp4 divisor {value}": (
            "NVFP4A16",
            replaced("weight_global_scale", first(value)),
            [WEIGHTS, f"{UP}.weight_global_scale", f"got {value:g}", "expected numbers above 0"],
        )
        for value in (0.0, -8.0, torch.inf, torch.nan)
    },
    "nvfp4 quotient beyond float32": (
        "NVFP4A16",
        replaced("weight_global_scale", first(1e-38)),
        [WEIGHTS, f"{UP}.weight_scale", "a scale is 0, negative, infinite or NaN"],
    ),
    **{
        f"{checkpoint} scale {value}": (
            checkpoint,
            replaced("weight_scale", first(value)),
            [WEIGHTS, f"{UP}.weight_scale", "got ", "expected numbers above 0"],
        )
        for checkpoint, values in {
            "W4A16": (0.0, -0.5),
            "NVFP4A16": (torch.nan, -2.0),
            "MXFP4A16": (255,),
            "FP8_BLOCK": (torch.nan, torch.inf, -0.5),
        }.items()
        for value in values
    },
    "missing scale": (
        "FP8",
        retensored(lambda t: t.pop(f"{UP}.weight_scale")),
        [f"{UP}.weight: got torch.float8_e4m3fn without a scale"],
    ),
    "unknown format": (
        "W8A8",
        lambda d: (reconfigured(another_format)(d), replaced("weight", lambda t: t.short())(d))[0],
        [UP, "torch.int16", "is in none of"],
    ),
    "bits of none": (
        "W4A16",
        reconfigured(lambda t: [g["weights"].update(num_bits=12) for g in t["config_groups"].values()]),
        ["group_0: int 12 bit", "expected"],
    ),
    "two lines in a name": (
        "W4A16",
        reheadered(lambda t: t[f"{UP}.weight_scale"].update(dtype="F\n\x1b[2J")),
        [WEIGHTS, f"{UP}.weight_scale", r"dtype F\n\x1b[2J is not read"],
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_one_line_names_what_is_wrong(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, damage, parts = CASES[case]
    directory = Path(shutil.copytree(GOLDEN / checkpoint, tmp_path / "model"))
    damage(directory)
    capsys.readouterr()
    code = main(["inspect", str(directory)])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n"), err[-1:]) == (2, "", 1, "\n"), err
    assert all(part in err for part in [str(directory), *parts]), err


@pytest.mark.filterwarnings("ignore")
def test_keys_that_nobody_knows_are_read_past(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path(shutil.copytree(GOLDEN / "W4A16", tmp_path / "model"))
    reconfigured(
        lambda t: [g.update(colour=1, weights={**g["weights"], "taste": 2}) for g in (t["config_groups"]).values()]
    )(directory)
    assert main(["inspect", str(directory)]) == 0
    assert UP in capsys.readouterr().out
