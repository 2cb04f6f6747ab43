"""What a check says of experts and of latent attention; and of experts, whether transformers does as it says."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptq
from conftest import stock
from ptq.io.check import check
from ptq.io.survey import ERROR, TRANSFORMERS, VLLM
from ptq.numerics.leaves import dense
from ptq.numerics.schemes import Scheme, scheme

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
ROUTED = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 6, "qk_nope_head_dim": 16, "v_head_dim": 16}
EXPERTS, ATTENTION = "re:.*experts", "re:.*self_attn.*_proj"
W4, W8, FLOAT8 = scheme("W4A16", 32), scheme("W8A16", -1), scheme("FP8A16")


def mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**SIZES, intermediate_size=32, num_key_value_heads=2, num_local_experts=3)


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**SIZES, **ROUTED, intermediate_size=64, num_key_value_heads=2, head_dim=16)


def deepseek() -> Any:
    from transformers import DeepseekV3Config

    routed = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return DeepseekV3Config(**SIZES, **LATENT, **routed, intermediate_size=64, num_key_value_heads=4)


def written(config: Any, path: Path, schemes: Mapping[str, Scheme], form: str = "auto") -> tuple[Path, Any]:
    """A checkpoint with weights in some schemes, and the model that it is of."""
    stock(config).to(torch.bfloat16).save_pretrained(path / "source")
    how = ptq.partition({pattern: ptq.rtn(each) for pattern, each in schemes.items()})
    made = ptq.compress(ptq.load(path / "source"), None, how).model
    return ptq.save(made, path / "out", format=form).path, made


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def reverse_groups(file: Path) -> None:
    table = json.loads(file.read_text())
    groups = table["quantization_config"]["config_groups"]
    table["quantization_config"]["config_groups"] = dict(zip(groups, reversed(groups.values()), strict=True))
    file.write_text(json.dumps(table))


# What transformers makes of experts

CASES: dict[str, tuple[dict[str, Scheme], str, str]] = {
    "w4": ({EXPERTS: W4}, "auto", ""),
    "w8 channel": ({EXPERTS: W8}, "auto", ""),
    "mxfp4": ({EXPERTS: scheme("MXFP4A16")}, "auto", ""),
    "mxfp6": ({EXPERTS: scheme("MXFP6A16")}, "auto", ""),
    "float8 channel": ({EXPERTS: FLOAT8}, "auto", ""),
    "float8 tensor": ({EXPERTS: Scheme(FLOAT8.grid, "tensor")}, "auto", ""),
    "nvfp4": ({EXPERTS: scheme("NVFP4A16")}, "auto", "experts"),
    "float8 blocks": ({EXPERTS: scheme("FP8A16", block=(32, 32))}, "auto", "experts"),
    "float8 groups": ({EXPERTS: Scheme(FLOAT8.grid, "group", 32)}, "auto", "experts"),
    "mxfp8": ({EXPERTS: scheme("MXFP8A16")}, "auto", "experts"),
    "asymmetric": ({EXPERTS: scheme("W4A16_ASYM", 32)}, "auto", "experts"),
    "a byte each": ({EXPERTS: W8}, "int-quantized", "experts"),
    "attention alone": ({ATTENTION: W4}, "auto", "dense-experts"),
    "attention alone, frozen": ({ATTENTION: W4}, "frozen", "dense-experts"),
    "attention alone, float8": ({ATTENTION: FLOAT8}, "auto", ""),
    "both alike": ({ATTENTION: W4, EXPERTS: W4}, "auto", ""),
    "another width, the experts' first": ({ATTENTION: W4, EXPERTS: W8}, "auto", ""),
    "another width first": ({ATTENTION: W4, EXPERTS: W8}, "reversed", "experts-group"),
    "another format first": ({ATTENTION: FLOAT8, EXPERTS: scheme("MXFP4A16")}, "reversed", "experts-group"),
}


def theirs(path: Path, whole: bool) -> dict[str, torch.Tensor] | None:
    """The parameters that transformers loads, or None where it raises."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if whole else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **config).eval()
            model(torch.arange(4)[None])  # the first forward decompresses
        except (RuntimeError, AttributeError):
            return None
    return dict(model.named_parameters())


@pytest.mark.parametrize("config", [mixtral, pytest.param(qwen3_moe, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_what_transformers_cannot_load_of_experts_is_found(
    name: str, config: Callable[[], Any], tmp_path: Path
) -> None:
    schemes, form, rule = CASES[name]
    path, made = written(config(), tmp_path, schemes, "auto" if form == "reversed" else form)
    if form == "reversed":
        reverse_groups(path / "config.json")
    said = {each.rule for each in check(path) if TRANSFORMERS in each.loaders and each.severity == ERROR}
    assert said - {"status"} == ({rule} if rule else set())
    stacks = {n: dense(leaf) for n, leaf in made.params.items() if ".experts." in n}
    # Whole, it reads all that are no experts by one scheme, which is no fault of the experts'.
    for whole in (False, True) if rule or len(schemes) == 1 else (False,):
        loaded = theirs(path, whole)
        right = loaded is not None and all(torch.equal(loaded[n], value) for n, value in stacks.items())
        assert right == (not rule)


# What vLLM makes one of


@pytest.mark.parametrize("config", [mixtral, qwen3_moe])
def test_experts_of_a_layer_have_one_scheme(config: Callable[[], Any], tmp_path: Path) -> None:
    path, _ = written(config(), tmp_path, {"re:.*gate_up_proj": W4, "re:.*experts.down_proj": W8})
    (found,) = [each for each in check(path) if each.rule == "fused-scheme"]
    assert ".experts.0." in found.about
    assert found.expected.endswith(".experts")
    assert found.loaders == VLLM


@pytest.mark.parametrize(
    ("config", "first", "second"),
    [
        (mixtral, "block_sparse_moe.experts.1.w1", "block_sparse_moe.experts.1.w3"),
        (qwen3_moe, "mlp.experts.1.gate_proj", "mlp.experts.1.up_proj"),
        (deepseek, "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    ],
)
def test_matrices_that_are_fused_share_a_divisor(
    config: Callable[[], Any], first: str, second: str, tmp_path: Path
) -> None:
    nvfp4 = scheme("NVFP4A16")
    path, _ = written(config(), tmp_path, {ATTENTION: nvfp4} if config is deepseek else {EXPERTS: nvfp4})
    assert "fused-global-scale" not in {each.rule for each in check(path)}
    name = f"model.layers.0.{second}.weight_global_scale"
    changed(path, lambda t: t.update({name: t[name] * 2}))
    (found,) = [each for each in check(path) if each.rule == "fused-global-scale"]
    assert (found.about, found.loaders) == (name, VLLM)
    assert f".{first}." in found.got


def test_latent_attention_is_fused_and_whole_on_every_device(tmp_path: Path) -> None:
    path, _ = written(deepseek(), tmp_path, {"re:.*self_attn.(kv_a_proj_with_mqa|(q_b|kv_b|o)_proj)": W8})
    for devices in (1, 4):
        (found,) = check(path, devices)
        assert (found.about, found.rule) == ("model.layers.0.self_attn.q_a_proj", "fused-ignore")
        assert found.expected.endswith("self_attn.fused_qkv_a_proj")
