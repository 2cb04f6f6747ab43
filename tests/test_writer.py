"""What a checkpoint says of modules that are not compressed, and of experts that are kept in one tensor."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import compressed, in_blocks, quantized
from conftest import stock
from ptq.base import State
from ptq.io.hub import load, open_model
from ptq.io.save import save
from ptq.models.model import Model
from ptq.numerics.grids import Float8
from ptq.numerics.indexed import Indexed
from ptq.numerics.leaves import dense
from test_naming import zoo


def source(directory: Path, family: str) -> Path:
    stock(zoo()[family]).save_pretrained(directory)
    return directory


def attention(model: Model) -> Model:
    """The model with its projections of attention quantized."""
    return compressed(model, lambda name, shape: quantized(*shape) if "self_attn" in name else None)


def config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def targets(directory: Path) -> list[str]:
    return [target for group in config(directory)["config_groups"].values() for target in group["targets"]]


# Targets and what is left out


@pytest.mark.parametrize("family", ["gpt_oss", "granite", "mixtral"])
def test_a_class_is_no_target_where_experts_are_dense(family: str, tmp_path: Path) -> None:
    """A loader may count them under it, and `ignore` has no name for them, whether in one tensor or in many."""
    from transformers import AutoModelForCausalLM

    model = attention(open_model(source(tmp_path / "source", family)))
    save(model, tmp_path / "out")
    assert set(targets(tmp_path / "out")) == {f"model.layers.{i}.self_attn.{x}_proj" for i in range(2) for x in "qkvo"}
    if family != "mixtral":  # 5.24 reads no dense experts out of several tensors where anything is compressed
        stock_model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(info.values()), info
        ids = torch.arange(8)[None]
        assert torch.equal(stock_model(ids).logits, model(ids).logits)


def test_experts_that_transformers_puts_others_in_the_place_of_are_told(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Llama4TextConfig

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "intermediate_size_mlp": 64}
    stock(Llama4TextConfig(**sizes, **heads)).save_pretrained(tmp_path / "source")
    saved = save(attention(open_model(tmp_path / "source")), tmp_path / "out")
    (note,) = saved.notes.values()
    assert note.startswith("transformers: replaced: got experts in one tensor")
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert info["missing_keys"]
    assert save(open_model(tmp_path / "source"), tmp_path / "dense").notes == {}


def test_transformers_reads_experts_of_another_scheme_than_the_rest(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = open_model(source(tmp_path / "source", "mixtral"))
    shapes = {n: leaf.shape for n, leaf in model.params.items()}
    leaves = {n: quantized(*s, tiles="channel") for n, s in shapes.items() if "experts" in n}
    leaves |= {n: quantized(*s, grid=Float8(), tiles="channel") for n, s in shapes.items() if "self_attn" in n}
    made = replace(model, state=State({**model.params, **leaves}))
    save(made, tmp_path / "out")
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.arange(8)[None]
    assert torch.equal(theirs(ids).logits, made(ids).logits)


def test_routers_are_ignored_under_the_names_of_the_file_and_in_memory(tmp_path: Path) -> None:
    save(attention(open_model(source(tmp_path / "source", "granite"))), tmp_path / "out")
    router = "model.layers.{}.block_sparse_moe.router"
    names = {router.format(i) for i in range(2)}
    assert set(config(tmp_path / "out")["ignore"]) == {"lm_head", *names, *(f"{name}.layer" for name in names)}


def test_every_dense_matrix_but_embeddings_is_ignored(tmp_path: Path) -> None:
    model = open_model(source(tmp_path / "source", "mixtral"))
    chosen = {n: leaf.shape for n, leaf in model.params.items() if "experts" in n or "self_attn" in n}
    leaves = {n: quantized(*shape, tiles="channel") for n, shape in chosen.items()}
    save(replace(model, state=State({**model.params, **leaves})), tmp_path / "out")
    assert targets(tmp_path / "out") == ["Linear"]
    gates = {f"model.layers.{i}.{block}.gate" for i in range(2) for block in ("block_sparse_moe", "mlp")}
    assert set(config(tmp_path / "out")["ignore"]) == {"lm_head", *gates}


def test_matrices_that_the_class_does_not_use_are_ignored(tiny_llama: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    extra = {
        "mtp.0.up_proj.weight": torch.randn(8, 4),
        "mtp.0.norm.weight": torch.randn(4),
        "mtp.0.bias": torch.ones(2),
    }
    save_file({**load_file(directory / "model.safetensors"), **extra}, directory / "model.safetensors")
    save(compressed(open_model(directory), in_blocks()), tmp_path / "out")
    assert targets(tmp_path / "out") == ["Linear"]
    assert set(config(tmp_path / "out")["ignore"]) == {"lm_head", "mtp.0.up_proj"}
    stack = {"mtp.0.experts.up_proj": torch.randn(2, 8, 4)}
    save_file({**load_file(directory / "model.safetensors"), **stack}, directory / "model.safetensors")
    save(compressed(open_model(directory), in_blocks()), tmp_path / "other")
    assert len(targets(tmp_path / "other")) == 14


# Experts that are several tensors


def test_experts_of_which_one_is_dense_stay_as_they_are(tmp_path: Path) -> None:
    model = open_model(source(tmp_path / "source", "mixtral"))
    stacks = {n: quantized(*leaf.shape) for n, leaf in model.params.items() if "experts" in n}
    save(replace(model, state=State({**model.params, **stacks})), tmp_path / "first")
    file = tmp_path / "first" / "model.safetensors"
    tensors = load_file(file)
    for weight in ("w1", "w2", "w3"):
        module = f"model.layers.0.block_sparse_moe.experts.2.{weight}"
        rows, columns = tensors.pop(f"{module}.weight_shape").tolist()
        del tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]
        tensors[f"{module}.weight"] = torch.randn(rows, columns)
    save_file(tensors, file, {"format": "pt"})
    before = load(tmp_path / "first")
    saved = save(before, tmp_path / "second")
    after = load_file(tmp_path / "second" / "model.safetensors")
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[name], t) for name, t in tensors.items())
    again = load(tmp_path / "second")
    assert all(torch.equal(dense(again.params[n]), dense(leaf)) for n, leaf in before.params.items())
    assert any("all or none" in note for note in saved.notes.values())  # what engines make of it


def test_a_stack_that_cannot_be_cut_is_stored_dense_and_said_so(tmp_path: Path) -> None:
    model = open_model(source(tmp_path / "source", "mixtral"))
    name = "model.layers.1.mlp.experts.down_proj"
    shape = model.params[name].shape
    leaf = Indexed(quantized(*shape), torch.randint(2, (shape[0], shape[-1])))
    changed = replace(model, state=State({**model.params, name: leaf}))
    saved = save(changed, tmp_path / "out")
    assert list(saved.notes) == [name]
    assert saved.notes[name].startswith("stored dense with its values: ")
    assert torch.equal(dense(load(saved.path).params[name]), dense(leaf))
    assert save(changed, tmp_path / "dense", format="dense").notes == {}
