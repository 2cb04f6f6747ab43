"""Frozen weights: floats with scales beside them are codes still, and go back as they came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

import ptq
from checkpoints import same_bits
from conftest import llama_config, stock
from laws.shared import identical
from ptq.errors import BadInput
from ptq.io.frozen import frozen, held, thawed
from ptq.numerics.fits import fit, nearest
from ptq.numerics.leaves import compressed, dense
from ptq.numerics.schemes import NAMED, Scheme, scheme
from strategies import randn, seeds

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj"
SCHEMES = {
    "int4 groups": scheme("W4A16", 32),
    "int8 with zero points": scheme("W8A16_ASYM", -1),
    "int8 tensor": Scheme(scheme("W8A16").grid, "tensor"),
    "float8 channels": scheme("FP8A16"),
    "float8 blocks": scheme("FP8A16", block=(24, 40)),
    **{name: how for name, how in NAMED.items() if how.scales},
}


@given(
    seed=seeds,
    name=st.sampled_from(list(SCHEMES)),
    rows=st.integers(2, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_floats_tell_their_codes(seed: int, name: str, rows: int, dtype: torch.dtype) -> None:
    w = randn(seed, rows, 64, dtype=dtype)
    leaf = nearest(w, SCHEMES[name], fit(w, SCHEMES[name]))
    args, tensors = frozen(leaf, "m")
    kept = held(tensors, args, packed=False)
    assert kept is not None
    again = thawed(tensors, kept, "m")
    assert torch.equal(dense(again), dense(leaf))
    if dtype != torch.bfloat16 or leaf.grid.bits < 8 or leaf.zero is None:  # there two codes may be one float
        assert torch.equal(dense(again).float(), tensors["weight"].float())
        assert identical(again, leaf) or torch.equal(again.codes.float(), leaf.codes.float())  # but for the sign of 0


def test_where_two_codes_are_one_float_one_of_them_is_found() -> None:
    """All codes of 8 bits with a zero point, by scales that bring them near a power of two from either side."""
    codes = torch.arange(-128, 128, dtype=torch.int8).repeat(4096, 1)
    scale = (0.5 + torch.arange(4096).float() / 8192)[:, None]
    zero = torch.full((4096, 1), -128, dtype=torch.int8)
    leaf = ptq.Quantized(codes, scale, zero, scheme("W8A16").grid, torch.bfloat16)
    args, tensors = frozen(leaf, "m")
    kept = held(tensors, args, packed=False)
    assert kept is not None
    assert torch.equal(dense(thawed(tensors, kept, "m")), tensors["weight"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frozen") / "source"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    stock(llama_config(**sizes)).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", SCHEMES)
def test_frozen_checkpoints_come_back_as_they_were(name: str, source: Path, tmp_path: Path) -> None:
    made = ptq.compress(ptq.load(source), None, ptq.rtn(SCHEMES[name])).model
    first = ptq.save(made, tmp_path / "one", format="frozen")
    model = ptq.load(first.path)
    assert {n for n, leaf in model.params.items() if compressed(leaf)} == {
        n for n, leaf in made.params.items() if compressed(leaf)
    }
    second = ptq.save(model, tmp_path / "two")
    before, after = (load_file(path / WEIGHTS) for path in (first.path, second.path))
    assert before.keys() == after.keys()
    assert all(same_bits(t, after[n]) for n, t in before.items())
    assert (first.path / "config.json").read_text() == (second.path / "config.json").read_text()
    packed = ptq.save(made, tmp_path / "packed").path
    again = ptq.save(model, tmp_path / "again", format=form(packed)).path
    written = load_file(again / WEIGHTS)
    other = {n for n, t in load_file(packed / WEIGHTS).items() if not same_bits(t, written[n])}
    # Of 8 bits with zero points, two codes may be one bfloat16.
    assert not other or (name == "int8 with zero points" and all(n.endswith("weight_packed") for n in other))
    assert all(torch.equal(dense(leaf), dense(made.params[n])) for n, leaf in ptq.load(again).params.items())
    with pytest.raises(BadInput, match=r"q_proj.*: is quantized already"):
        ptq.compress(model, None, ptq.rtn(SCHEMES[name]))


def form(path: Path) -> str:
    return json.loads((path / "config.json").read_text())["quantization_config"]["format"]


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("weight", lambda t: t * 1.01, r"q_proj\.weight: \d+ of 4096 values are no codes of int4"),
        ("weight", lambda t: t[:1].expand(3, 64), r"q_proj\.weight_scale: got torch\.bfloat16 \(64, 2\), expected"),
        ("weight_scale", lambda t: t * 0, r"q_proj\.weight_scale: got 0, expected numbers above 0"),
    ],
)
def test_what_does_not_belong_together_is_named(
    part: str, change: Any, message: str, source: Path, tmp_path: Path
) -> None:
    made = ptq.compress(ptq.load(source), None, ptq.rtn(SCHEMES["int4 groups"]))
    path = ptq.save(made, tmp_path / "out", format="frozen").path
    tensors = load_file(path / WEIGHTS)
    tensors[f"{Q_PROJ}.{part}"] = change(tensors[f"{Q_PROJ}.{part}"]).contiguous()
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=message) as caught:
        dense(ptq.load(path).params[f"{Q_PROJ}.weight"])
    assert "\n" not in str(caught.value)
    assert str(path / WEIGHTS) in str(caught.value)


def test_scales_beside_floats_of_which_no_config_speaks_are_kept(source: Path, tmp_path: Path) -> None:
    made = ptq.compress(ptq.load(source), None, ptq.rtn(SCHEMES["int4 groups"]))
    path = ptq.save(made, tmp_path / "out", format="frozen").path
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    again = load_file(ptq.save(ptq.load(path), tmp_path / "again").path / WEIGHTS)
    assert all(same_bits(t, again[n]) for n, t in load_file(path / WEIGHTS).items())
