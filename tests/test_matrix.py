"""What ptq writes, read by transformers with compressed-tensors: the same weights, in every scheme that it reads."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ptq
from conftest import llama_config, stock
from ptq.numerics.leaves import compressed, dense
from ptq.numerics.schemes import Scheme, scheme

SCHEMES: dict[str, tuple[str, Scheme]] = {
    **{f"w{b} group": ("pack-quantized", scheme(f"W{b}A16", 32)) for b in range(2, 9)},
    **{f"w{b} asymmetric group": ("pack-quantized", scheme(f"W{b}A16_ASYM", 32)) for b in (1, 2, 3, 4, 8)},
    "w4 channel": ("pack-quantized", scheme("W4A16", -1)),
    "w4 asymmetric channel": ("pack-quantized", scheme("W4A16_ASYM", -1)),
    "w8 channel": ("pack-quantized", scheme("W8A16", -1)),
    "w8 channel, a byte each": ("int-quantized", scheme("W8A16", -1)),
    "w4 channel, a byte each": ("naive-quantized", scheme("W4A16", -1)),
    "w8 tensor, a byte each": ("int-quantized", Scheme(scheme("W8A16").grid, "tensor")),
    "w8 asymmetric channel, a byte each": ("int-quantized", scheme("W8A16_ASYM", -1)),
    "float8 channel": ("float-quantized", scheme("FP8A16")),
    "float8 channel, naive": ("naive-quantized", scheme("FP8A16")),
    "float8 tensor": ("float-quantized", Scheme(scheme("FP8A16").grid, "tensor")),
    "float8 blocks": ("float-quantized", scheme("FP8A16", block=(32, 32))),
    "float8 ragged blocks": ("float-quantized", scheme("FP8A16", block=(48, 40))),
    "nvfp4": ("nvfp4-pack-quantized", scheme("NVFP4A16")),
    "mxfp4": ("mxfp4-pack-quantized", scheme("MXFP4A16")),
    "mxfp6": ("mxfp6-pack-quantized", scheme("MXFP6A16")),
    "mxfp8": ("mxfp8-quantized", scheme("MXFP8A16")),
    "w4 frozen": ("frozen", scheme("W4A16", 32)),
    "w4 asymmetric frozen": ("frozen", scheme("W4A16_ASYM", 32)),
    "float8 frozen": ("frozen", scheme("FP8A16")),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def loaded(path: Path, whole: bool) -> Any:
    """The model as transformers loads it, its weights as floats."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if whole else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **config).eval()
        if not whole:
            model(torch.arange(4)[None])  # the first forward decompresses
    return model


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_reads_the_same_weights(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    form, how = SCHEMES[name]
    source = stock(llama_config(hidden_size=64, intermediate_size=96, num_hidden_layers=1)).to(dtype)
    run = ptq.compress(source, None, ptq.rtn(how))
    made = run.model
    ptq.save(made, tmp_path / "out", format=form)
    # By default 5.24 reads no packed zero points, and decodes these formats to bfloat16 for a model of whatever dtype.
    whole = (form == "pack-quantized" and not how.symmetric) or (how.scales is not None and dtype != torch.bfloat16)
    theirs = dict(loaded(tmp_path / "out", whole).named_parameters())
    again = ptq.load(tmp_path / "out")
    compared = 0
    for weight, leaf in made.params.items():
        ours = dense(leaf)
        assert torch.equal(dense(again.params[weight]), ours)
        if how.scales and compressed(leaf):  # theirs decodes to bfloat16 always
            ours = dense(replace(leaf, dtype=torch.bfloat16))
        assert torch.equal(theirs[weight].to(dtype), ours.to(dtype)), weight
        compared += compressed(leaf)
    assert compared == 7


def test_transformers_reads_several_formats_in_one_checkpoint(tmp_path: Path) -> None:
    rules = {
        "re:.*self_attn.*": scheme("W4A16", 32),
        "re:.*gate_proj|.*up_proj": scheme("NVFP4A16"),
        "re:.*down_proj": scheme("FP8A16"),
    }
    source = stock(llama_config(hidden_size=64, intermediate_size=96, num_hidden_layers=2)).to(torch.bfloat16)
    made = ptq.compress(source, None, ptq.partition({p: ptq.rtn(how) for p, how in rules.items()})).model
    ptq.save(made, tmp_path / "out")
    theirs = dict(loaded(tmp_path / "out", whole=False).named_parameters())
    again = ptq.load(tmp_path / "out")
    for weight, leaf in made.params.items():
        assert torch.equal(dense(again.params[weight]), dense(leaf))
        assert torch.equal(theirs[weight], dense(leaf)), weight
