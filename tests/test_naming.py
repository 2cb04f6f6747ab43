"""Names: a checkpoint read and written again is what it was, whatever transformers' own `save_pretrained` wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.core_model_loading import Chunk, Transpose, WeightConverter

from checkpoints import quantized
from conftest import CONFIGS, deepseek_config, llama_config, stock
from ptq.io.safetensors import WEIGHTS, OnDisk, headers
from ptq.models.naming import Converted, assigned, joint, names_in_files, read, written
from ptq.models.skeleton import from_config, remember_conversions
from ptq.numerics.leaves import Quantized, compressed, dense, nbytes, take

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def qwen3_moe(experts: int = 12) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**SMALL, **HEADS, num_experts=experts, moe_intermediate_size=16, num_experts_per_tok=2)


def zoo() -> dict[str, Any]:
    """Experts stacked, renamed, or stacked in the file too; a persistent buffer; models with nothing to convert."""
    from transformers import GptOssConfig, GraniteMoeConfig, JambaConfig, MixtralConfig

    plain = {k: v for k, v in HEADS.items() if k != "head_dim"}
    mamba = {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
    return {
        **{name: make() for name, make in CONFIGS.items()},
        "qwen3_moe": qwen3_moe(),
        "mixtral": MixtralConfig(**SMALL, **plain, num_local_experts=4),
        "deepseek": deepseek_config(),
        "granite": GraniteMoeConfig(**SMALL, **plain, num_local_experts=4),
        "gpt_oss": GptOssConfig(**SMALL, **HEADS, num_local_experts=4),
        "jamba": JambaConfig(**SMALL, **plain, **mamba, use_mamba_kernels=False),
    }


@pytest.fixture(params=["llama", "gemma3", "gpt2", "qwen3_moe", "mixtral", "deepseek", "granite", "gpt_oss", "jamba"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any, dict[str, OnDisk]]:
    """A stock model, its skeleton, and what it wrote."""
    model = stock(zoo()[request.param])
    model.save_pretrained(tmp_path)
    return model, from_config(type(model), model.config, torch.float32), headers(tmp_path)


def test_every_parameter_is_read_exactly(saved: tuple[Any, Any, dict[str, OnDisk]]) -> None:
    model, skeleton, stored = saved
    reading = read(skeleton, stored)
    assert reading.unused == ()
    assert {key for keys in reading.sources.values() for key in keys} == stored.keys()
    expected = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in model.state_dict()}}
    assert reading.leaves.keys() == expected.keys()
    for name, value in expected.items():
        leaf = reading.leaves[name]
        assert (leaf.shape, leaf.dtype) == (value.shape, value.dtype), name
        assert nbytes(leaf) == value.nbytes
        assert not compressed(leaf)
        assert torch.equal(dense(leaf), value), name


def test_read_then_written_is_the_identity(saved: tuple[Any, Any, dict[str, OnDisk]]) -> None:
    _, skeleton, stored = saved
    reading = read(skeleton, stored)
    remember_conversions(skeleton, reading.conversions)
    back = written(skeleton, reading.leaves)
    assert back.keys() == stored.keys()
    for name, leaf in back.items():
        assert torch.equal(dense(leaf), stored[name].load()), name
    renamed = [name for name, leaf in reading.leaves.items() if isinstance(leaf, OnDisk)]
    assert all(back[reading.sources[name][0]] is reading.leaves[name] for name in renamed)  # never read: only renamed


def test_names_in_files_are_what_is_written(saved: tuple[Any, Any, dict[str, OnDisk]]) -> None:
    _, skeleton, stored = saved
    reading = read(skeleton, stored)
    remember_conversions(skeleton, reading.conversions)
    names = names_in_files(skeleton, {name: leaf.shape for name, leaf in reading.leaves.items()})
    assert {n: sorted(files) for n, files in names.items()} == {n: sorted(s) for n, s in reading.sources.items()}
    plain = assigned(skeleton, stored)
    assert plain == {files[0]: name for name, files in names.items() if isinstance(reading.leaves[name], OnDisk)}


def test_one_block_at_a_time_is_the_whole(saved: tuple[Any, Any, dict[str, OnDisk]]) -> None:
    _, skeleton, stored = saved
    reading = read(skeleton, stored)
    remember_conversions(skeleton, reading.conversions)
    groups = joint(skeleton, reading.leaves)
    assert sorted(name for group in groups for name in group) == sorted(reading.leaves)
    pieces = [written(skeleton, {name: reading.leaves[name] for name in group}) for group in groups]
    assert sum(map(len, pieces)) == len(stored)
    assert {name for piece in pieces for name in piece} == stored.keys()


def test_experts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    model = stock(qwen3_moe(experts=12))
    model.save_pretrained(tmp_path)
    skeleton = from_config(type(model), model.config, torch.float32)
    name = "model.layers.1.mlp.experts.down_proj"
    leaf = read(skeleton, headers(tmp_path)).leaves[name]
    assert isinstance(leaf, Converted)
    files = load_file(tmp_path / WEIGHTS)
    for i in (2, 10, 11):
        assert torch.equal(dense(leaf)[i], files[f"model.layers.1.mlp.experts.{i}.down_proj.weight"])


@pytest.mark.parametrize("tiles", ["tensor", "channel", "group"])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_codes_scales_and_zero_points_go_through_the_conversion(tiles: str, asymmetric: bool) -> None:
    model = stock(qwen3_moe(experts=4))
    skeleton = from_config(type(model), model.config, torch.float32)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    leaf = quantized(4, 32, 32, tiles=tiles, asymmetric=asymmetric)
    pieces = written(skeleton, {name: leaf})
    assert len(pieces) == 8
    for i in range(4):
        gate, up = (pieces[f"model.layers.0.mlp.experts.{i}.{x}_proj.weight"] for x in ("gate", "up"))
        assert isinstance(gate, Quantized)
        assert (gate.zero is not None) == asymmetric
        assert torch.equal(torch.cat([dense(gate), dense(up)]), dense(take(leaf, i)))
    whole = read(skeleton, pieces).leaves[name]
    assert isinstance(whole, Converted)
    assert compressed(whole)
    assert isinstance(whole.load(), Quantized)
    assert torch.equal(dense(whole), dense(leaf))


def test_experts_of_which_some_are_dense_are_dense_in_memory() -> None:
    model = stock(qwen3_moe(experts=4))
    skeleton = from_config(type(model), model.config, torch.float32)
    name = "model.layers.0.mlp.experts.down_proj"
    leaf = quantized(4, 32, 16)
    pieces = written(skeleton, {name: leaf})
    pieces["model.layers.0.mlp.experts.1.down_proj.weight"] = torch.ones(32, 16)
    whole = read(skeleton, pieces).leaves[name]
    assert isinstance(whole.load(), torch.Tensor)
    assert torch.equal(dense(whole)[1], torch.ones(32, 16))
    assert torch.equal(dense(whole)[2], dense(take(leaf, 2)))


def test_what_is_untouched_is_written_as_it_was_read() -> None:
    model = stock(qwen3_moe(experts=4))
    skeleton = from_config(type(model), model.config, torch.float32)
    names = [f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(2)]
    pieces = written(skeleton, {name: quantized(4, 32, 32) for name in names})
    pieces["model.layers.0.mlp.experts.1.up_proj.weight"] = torch.ones(16, 32)
    reading = read(skeleton, pieces)
    remember_conversions(skeleton, reading.conversions)
    back = written(skeleton, reading.leaves)
    assert back.keys() == pieces.keys()
    assert all(back[file] is leaf for file, leaf in pieces.items())
    # Under another name the same leaf is another parameter.
    swapped = written(skeleton, dict(zip(names, (reading.leaves[n] for n in reversed(names)), strict=True)))
    for file in (file for file in pieces if ".layers.0." in file):
        assert torch.equal(dense(swapped[file]), dense(pieces[file.replace("layers.0", "layers.1")]))


def test_halves_of_one_tensor_that_changed_places_are_written_so() -> None:
    model = stock(llama_config())
    skeleton = from_config(type(model), model.config, torch.float32)
    file, names = "model.layers.0.mlp.both.weight", [f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up")]
    patterns = [rf"\.{x}_proj\.weight" for x in ("gate", "up")]
    remember_conversions(skeleton, [WeightConverter(r"\.both\.weight", patterns, [Chunk(dim=0)])])
    whole = torch.randn(256, 64)
    own = WeightConverter(file, names, [Chunk(dim=0)])
    shape = torch.Size((128, 64))
    gate, up = (Converted(skeleton, own, file, ((file, file, whole),), n, whole.dtype, shape) for n in names)
    assert written(skeleton, dict(zip(names, (gate, up), strict=True)))[file] is whole
    swapped = written(skeleton, dict(zip(names, (up, gate), strict=True)))[file]
    assert torch.equal(swapped, torch.cat([whole[128:], whole[:128]]))


def test_columns_that_a_file_has_as_rows_are_written_with_their_values() -> None:
    model = stock(qwen3_moe(experts=4))
    skeleton = from_config(type(model), model.config, torch.float32)
    name = "model.layers.0.mlp.experts.down_proj"
    remember_conversions(skeleton, [WeightConverter(r"\.kept_proj", r"\.down_proj", [Transpose(1, 2)])])
    leaf = replace(quantized(4, 32, 32), tile=(1, 16))
    (piece,) = written(skeleton, {name: leaf}).values()
    assert torch.equal(dense(piece), dense(leaf).mT)


def test_a_body_without_the_prefix_of_the_whole_is_read(tmp_path: Path) -> None:
    model = stock(llama_config())
    model.model.save_pretrained(tmp_path)
    skeleton = from_config(type(model), model.config, torch.float32)
    reading = read(skeleton, headers(tmp_path))
    assert "layers.0.mlp.up_proj.weight" in headers(tmp_path)
    assert reading.leaves.keys() == dict(model.named_parameters()).keys() - {"lm_head.weight"}


def test_old_names_of_norms_are_read_and_written_back(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    model = BertForMaskedLM(config)
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): p.detach().clone()
        for n, p in model.named_parameters()
    }
    save_file(old, tmp_path / WEIGHTS)
    skeleton = from_config(BertForMaskedLM, config, torch.float32)
    reading = read(skeleton, headers(tmp_path))
    assert reading.unused == ()
    assert reading.leaves.keys() == dict(model.named_parameters()).keys()
    remember_conversions(skeleton, reading.conversions)
    assert written(skeleton, reading.leaves).keys() == old.keys()


def test_what_the_model_has_no_place_for_is_listed(tmp_path: Path) -> None:
    model = stock(llama_config())
    model.save_pretrained(tmp_path)
    extra = {**load_file(tmp_path / WEIGHTS), "mtp.head.weight": torch.ones(2), "model.layers.9.x": torch.ones(1)}
    save_file(extra, tmp_path / WEIGHTS)
    reading = read(from_config(type(model), model.config, torch.float32), headers(tmp_path))
    assert sorted(reading.unused) == ["model.layers.9.x", "mtp.head.weight"]


def test_another_module_has_the_same_names_in_both() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    stored = {**module.state_dict(), "other": torch.ones(1)}
    reading = read(module, stored)
    assert reading.unused == ("other",)
    assert reading.leaves.keys() == module.state_dict().keys()
    assert written(module, reading.leaves).keys() == module.state_dict().keys()
    assert assigned(module, ["0.weight"]) == {"0.weight": "0.weight"}
