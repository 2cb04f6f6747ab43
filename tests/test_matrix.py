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
ASYMMETRIC = Scheme(scheme("W8A16_ASYM").grid, "tensor", symmetric=False)
MORE: dict[str, tuple[str, Scheme]] = {
    **{f"w{b} asymmetric group": ("pack-quantized", scheme(f"W{b}A16_ASYM", 32)) for b in (5, 6, 7)},
    **{f"w{b} channel": ("pack-quantized", scheme(f"W{b}A16", -1)) for b in (2, 3, 5, 6, 7)},
    **{f"w{b} asymmetric channel": ("pack-quantized", scheme(f"W{b}A16_ASYM", -1)) for b in (1, 2, 3, 5, 6, 7, 8)},
    **{f"w{b} group, a byte each": ("int-quantized", scheme(f"W{b}A16", 32)) for b in range(2, 9)},
    **{f"w{b} asymmetric group, a byte each": ("int-quantized", scheme(f"W{b}A16_ASYM", 32)) for b in range(1, 9)},
    **{f"w{b} group, naive": ("naive-quantized", scheme(f"W{b}A16", 32)) for b in (4, 8)},
    "w4 asymmetric group, naive": ("naive-quantized", scheme("W4A16_ASYM", 32)),
    "w8 asymmetric channel, naive": ("naive-quantized", scheme("W8A16_ASYM", -1)),
    "w8 tensor, packed": ("pack-quantized", Scheme(scheme("W8A16").grid, "tensor")),
    "w8 tensor, naive": ("naive-quantized", Scheme(scheme("W8A16").grid, "tensor")),
    "w8 asymmetric tensor, packed": ("pack-quantized", ASYMMETRIC),
    "w8 asymmetric tensor, a byte each": ("int-quantized", ASYMMETRIC),
    "w8 asymmetric tensor, naive": ("naive-quantized", ASYMMETRIC),
    "w8 blocks, naive": ("naive-quantized", scheme("W8A16", block=(32, 32))),
    "w8 ragged asymmetric blocks, naive": ("naive-quantized", scheme("W8A16_ASYM", block=(48, 40))),
    "float8 group": ("float-quantized", scheme("FP8A16", 32)),
    "float8 group, naive": ("naive-quantized", scheme("FP8A16", 32)),
    "float8 tensor, naive": ("naive-quantized", Scheme(scheme("FP8A16").grid, "tensor")),
    "float8 ragged blocks, naive": ("naive-quantized", scheme("FP8A16", block=(48, 40))),
    "float8 group, frozen": ("frozen", scheme("FP8A16", 32)),
}
QUICK = {"w6 asymmetric group", "w4 group, naive", "w8 asymmetric tensor, a byte each", "float8 group"}
"""of `MORE`, what is tried each time, in bfloat16"""
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


def cases(table: dict[str, Any], quick: set[str]) -> list[Any]:
    """Names with dtypes; all but some in bfloat16 are slow."""
    slow = pytest.mark.slow
    return [
        pytest.param(name, dtype, marks=() if name in quick and dtype == torch.bfloat16 else slow)
        for name in table
        for dtype in DTYPES
    ]


@pytest.mark.parametrize(("name", "dtype"), [*cases(SCHEMES, set(SCHEMES)), *cases(MORE, QUICK)], ids=str)
def test_transformers_reads_the_same_weights(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    form, how = (SCHEMES | MORE)[name]
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


EXPERTS: dict[str, tuple[str, Scheme]] = {
    **{f"w{b} group": ("pack-quantized", scheme(f"W{b}A16", 32)) for b in range(2, 9)},
    **{f"w{b} channel": ("pack-quantized", scheme(f"W{b}A16", -1)) for b in (4, 8)},
    "float8 channel": ("float-quantized", scheme("FP8A16")),
    "float8 channel, naive": ("naive-quantized", scheme("FP8A16")),
    "float8 tensor": ("float-quantized", Scheme(scheme("FP8A16").grid, "tensor")),
}
"""Those for which 5.24 makes a stack of experts of their tensors: packed ones without zero points, and float8."""


@pytest.mark.parametrize(("name", "dtype"), cases(EXPERTS, {"w4 group", "float8 channel"}), ids=str)
def test_transformers_reads_the_same_experts(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import MixtralConfig

    form, how = EXPERTS[name]
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    source = stock(MixtralConfig(**sizes, **heads)).to(dtype)
    stage = ptq.targets("re:.*(experts|self_attn)", ptq.rtn(how))
    made = ptq.compress(source, None, stage).model
    ptq.save(made, tmp_path / "out", format=form)
    theirs = dict(loaded(tmp_path / "out", whole=False).named_parameters())
    again = ptq.load(tmp_path / "out")
    for weight, leaf in made.params.items():
        assert torch.equal(dense(again.params[weight]), dense(leaf))
        assert torch.equal(theirs[weight], dense(leaf)), weight
    assert sum(map(compressed, made.params.values())) == 6


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
