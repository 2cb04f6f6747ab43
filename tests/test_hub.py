"""Opening models: what is found where, laziness, ties, and one line for everything that can be wrong."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import GOLDEN
from conftest import deepseek_config, gpt2_config, llama_config, stock
from ptq.errors import BadInput, Notice
from ptq.io.check import check
from ptq.io.compressed_tensors import Stored
from ptq.io.hub import foreign, load, open_model
from ptq.io.safetensors import OnDisk, headers
from ptq.io.save import save
from ptq.numerics.leaves import dense

WEIGHTS = "model.safetensors"


@pytest.fixture
def copied(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def rewritten(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


def reconfigured(directory: Path, **changes: Any) -> Path:
    config = {**json.loads((directory / "config.json").read_text()), **changes}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return directory


def test_logits_are_those_of_the_stock_model(tiny: Path, batches: list[torch.Tensor]) -> None:
    from transformers import AutoModelForCausalLM

    model, expected = open_model(tiny), AutoModelForCausalLM.from_pretrained(tiny)
    assert torch.equal(model(batches[0]).logits, expected(batches[0]).logits)
    assert model.params.keys() == dict(expected.named_parameters()).keys()
    assert list(model.params) == [n for n, _ in expected.named_parameters()]  # in the module's order
    assert all(isinstance(leaf, OnDisk) for leaf in model.params.values())
    assert model.aliases == expected.all_tied_weights_keys
    assert model.source == tiny
    assert model.tokenizer("The cat")["input_ids"]
    assert model.module.generation_config.to_dict() == expected.generation_config.to_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_keep_the_dtype_of_their_file(
    dtype: torch.dtype, tmp_path: Path, batches: list[torch.Tensor]
) -> None:
    from transformers import AutoModelForCausalLM

    stock(llama_config()).to(dtype).save_pretrained(tmp_path)
    rewritten(tmp_path, lambda t: t.update({n: w.float() for n, w in t.items() if "norm" in n}))
    model = open_model(tmp_path)
    assert {leaf.dtype for n, leaf in model.params.items() if "norm" in n} == {torch.float32}
    assert {leaf.dtype for n, leaf in model.params.items() if "norm" not in n} == {dtype}
    assert {p.dtype for p in model.module.parameters()} == {dtype}
    assert model.config.dtype is dtype
    rewritten(tmp_path, lambda t: t.update({n: w.to(dtype) for n, w in t.items()}))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(batches[0]).logits
    assert torch.equal(open_model(tmp_path)(batches[0]).logits, expected)


@pytest.mark.parametrize("checkpoint", sorted(file.stem for file in (GOLDEN / "logits").iterdir()))
@pytest.mark.filterwarnings("ignore:.*only weights are computed with:UserWarning")
def test_golden_checkpoints(checkpoint: str) -> None:
    model = load(GOLDEN / checkpoint)
    cache_only = checkpoint.startswith("kv_only")
    assert sum(isinstance(leaf, Stored) for leaf in model.params.values()) == (0 if cache_only else 14)
    assert not hasattr(model.config, "quantization_config")
    known = load_file(GOLDEN / "logits" / f"{checkpoint}.safetensors")
    expected = known["base_logits" if cache_only else "logits_dequantize"]
    logits = model(known["input_ids"]).logits
    assert (logits - expected).abs().max() <= 2e-2 * expected.abs().max()  # in bfloat16, perhaps by another kernel


def test_the_golden_base_checkpoint() -> None:
    known = load_file(GOLDEN / "logits" / "W8A8.safetensors")
    logits, expected = load(GOLDEN / "base")(known["input_ids"]).logits, known["base_logits"]
    assert (logits - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_what_acts_on_activations_is_said_once() -> None:
    with pytest.warns(UserWarning, match="also quantizes input activations; only weights") as caught:
        load(GOLDEN / "FP8")
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("targets", "theirs"),
    [
        ([["re:.*self_attn.*"], ["re:.*layers.*"]], "vLLM by that of 're:.*self_attn.*'"),
        ([["Linear"], ["re:.*mlp.up_proj"]], None),  # a name comes before a class in both orders
        ([["re:.*layers.0.*", "re:.*layers.1.*"], ["re:.*"]], "vLLM by that of 're:.*layers.0.*'"),
    ],
)
def test_targets_that_vllm_chooses_otherwise_are_said_in_one_line(
    targets: list[list[str]], theirs: str | None, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(GOLDEN / "W4A16", tmp_path / "model"))
    table = json.loads((directory / "config.json").read_text())["quantization_config"]
    ((_, group),) = table["config_groups"].items()
    weights = [{**group["weights"], "observer": name} for name in ("minmax", "mse")]
    groups = [{**group, "targets": t, "weights": w} for t, w in zip(targets, weights, strict=True)]
    same = {f"group_{i}": g for i, g in enumerate(groups)}
    reconfigured(directory, quantization_config={**table, "config_groups": same})
    load(directory)  # both are one scheme: what calibrated it is no part of it
    groups[0]["input_activations"] = {"num_bits": 8, "strategy": "token", "dynamic": True}
    reconfigured(directory, quantization_config={**table, "config_groups": same})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(directory)
    said = [str(each.message) for each in caught if "make targets exclude each other" in str(each.message)]
    assert len(said) == (theirs is not None)
    assert all(str(directory) in text and "(and " in text and str(theirs) in text and "\n" not in text for text in said)


def test_the_old_place_of_the_quantization_config(tmp_path: Path) -> None:
    old = Path(shutil.copytree(GOLDEN / "W3A16", tmp_path / "old"))
    config = json.loads((old / "config.json").read_text())
    reconfigured(old, quantization_config=None, compression_config=config["quantization_config"])
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(dense(load(old).params[name]), dense(load(GOLDEN / "W3A16").params[name]))


def test_opening_reads_no_weight(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    stored = OnDisk.load

    def watched(leaf: OnDisk) -> torch.Tensor:
        read.append(leaf.name)
        return stored(leaf)

    monkeypatch.setattr(OnDisk, "load", watched)
    model = open_model(tiny_llama)
    compressed = open_model(GOLDEN / "W3A16")
    assert {name.rpartition(".")[2] for name in read} == {"weight_shape"}
    dense(model.params["model.norm.weight"])
    dense(compressed.params["model.norm.weight"])
    assert read[-2:] == ["model.norm.weight"] * 2


def test_persistent_buffers_come_from_the_file(tmp_path: Path) -> None:
    reference = stock(deepseek_config(num_hidden_layers=1, first_k_dense_replace=0, moe_intermediate_size=16))
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    reference.get_buffer(name).copy_(torch.tensor([3.0, -1.0, 0.5, 0.0]))
    reference.save_pretrained(tmp_path)
    model, ids = open_model(tmp_path), torch.randint(96, (2, 8))
    assert torch.equal(model.module.get_buffer(name), reference.get_buffer(name))
    assert torch.equal(model(ids).logits, reference(ids).logits)


# Ties


def test_a_file_with_the_head_only_is_tied(tmp_path: Path, batches: list[torch.Tensor]) -> None:
    reference = stock(llama_config(tie_word_embeddings=True))
    reference.save_pretrained(tmp_path)
    rewritten(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    model = open_model(tmp_path)
    assert model.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert torch.equal(model(batches[0]).logits, reference(batches[0]).logits)


@pytest.mark.parametrize("apart", [False, True])
def test_a_file_with_both_is_tied_when_they_are_equal(apart: bool, tmp_path: Path, batches: list[torch.Tensor]) -> None:
    stock(llama_config(tie_word_embeddings=True)).save_pretrained(tmp_path)
    rewritten(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + float(apart)}))
    from transformers import AutoModelForCausalLM

    model = open_model(tmp_path)
    assert bool(model.aliases) != apart
    assert ("lm_head.weight" in model.params) == apart
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(batches[0]).logits
    assert torch.equal(model(batches[0]).logits, expected)


# Classes, tokenizers, hub


def test_a_config_without_architectures_is_a_causal_model(copied: Path) -> None:
    assert type(open_model(reconfigured(copied, architectures=None)).module).__name__ == "LlamaForCausalLM"


def test_the_class_that_the_config_names(copied: Path) -> None:
    model = open_model(reconfigured(copied, architectures=["LlamaModel"]))
    assert type(model.module).__name__ == "LlamaModel"
    assert "layers.0.mlp.up_proj.weight" in model.params


def test_code_that_comes_with_a_model_runs_only_when_trusted(
    copied: Path, batches: list[torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])  # the library adds its cache to it
    plain = open_model(copied)(batches[0]).logits
    (copied / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        "    def forward(self, *a, **k):\n        out = super().forward(*a, **k)\n        out.logits = out.logits + 1\n"
        "        return out\n"
    )
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    reconfigured(copied, architectures=["OwnModel"], model_type="own", auto_map=auto)
    assert torch.equal(open_model(copied, trust_remote_code=True)(batches[0]).logits, plain + 1)
    with pytest.raises(BadInput, match="trust_remote_code") as caught:
        open_model(copied)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_tokenizer(copied: Path) -> None:
    for file in copied.glob("tokenizer*"):
        file.unlink()
    assert open_model(copied).tokenizer is None


def test_a_hub_id_is_downloaded_without_other_weights(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def snapshot(name: str, ignore_patterns: list[str]) -> str:
        asked.append((name, "*.bin" in ignore_patterns))
        return str(tiny_llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert open_model("owner/name-1.0").source == tiny_llama
    assert asked == [("owner/name-1.0", True)]


def test_a_hub_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no connection\nand nothing in the cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(BadInput, match=r"^owner/name: no such directory, .*: no connection and nothing in the cache$"):
        open_model("owner/name")


# Bad input


def damaged(change: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def apply(directory: Path) -> Path:
        change(directory)
        return directory

    return apply


def shorter(directory: Path) -> None:
    file = directory / WEIGHTS
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d / "nothing", "no such file or directory"),
        (lambda d: d / "config.json", r"expected a directory or a \.gguf file"),
        (damaged(lambda d: (d / "config.json").unlink()), "not a model directory: no config.json"),
        (damaged(lambda d: (d / "config.json").write_text("{")), r"config\.json: not a JSON file"),
        (damaged(lambda d: (d / "config.json").write_text("[]")), r"config\.json: holds list"),
        (damaged(lambda d: (d / "config.json").write_text("{}")), r"config\.json: no model_type"),
        (lambda d: reconfigured(d, model_type="nonesuch"), r"config\.json: .*nonesuch"),
        (lambda d: reconfigured(d, quantization_config={"quant_method": "gptq"}), "quantized by 'gptq'"),
        (damaged(lambda d: (d / WEIGHTS).unlink()), r"no model\.safetensors"),
        (damaged(shorter), r"model\.safetensors: truncated"),
        (
            lambda d: rewritten(d, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
            r"no tensor model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (
            lambda d: rewritten(d, lambda t: t.update({"model.norm.weight": torch.ones(63)})),
            r"model\.norm\.weight: got shape \(63,\), expected \(64,\)",
        ),
        (damaged(lambda d: (d / "tokenizer.json").write_text("{")), "Tokenizer cannot read it"),
        (
            damaged(lambda d: (d / "generation_config.json").write_text("{")),
            r"generation_config\.json: not a JSON file",
        ),
    ],
    ids=[
        "missing",
        "file",
        "no-config",
        "config-cut",
        "list",
        "no-type",
        "type",
        "method",
        "no-weights",
        "truncated",
        "tensor",
        "shape",
        "tokenizer",
        "generation",
    ],
)
def test_bad_input_is_one_line_that_names_the_place(copied: Path, change: Callable[[Path], Path], message: str) -> None:
    open_model(copied)
    with pytest.raises(BadInput, match=message) as caught:
        open_model(change(copied))
    assert str(copied) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lost", ["w1", ""], ids=["one matrix", "a whole expert"])
def test_a_piece_of_a_stack_of_experts_that_is_missing_is_named(tmp_path: Path, lost: str) -> None:
    from transformers import MixtralConfig

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 3}
    stock(MixtralConfig(vocab_size=96, num_attention_heads=4, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path)
    expert = "model.layers.0.block_sparse_moe.experts.2."
    rewritten(tmp_path, lambda t: [t.pop(name) for name in list(t) if name.startswith(expert + lost)])
    with pytest.raises(BadInput, match=rf"no tensor {expert}w1\.weight; .* model\.layers\.0\.mlp\.experts\.gate_up"):
        load(tmp_path)


def test_a_class_that_nobody_has_is_named(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING", {})
    with pytest.raises(BadInput, match="transformers has no class NoSuchModel"):
        open_model(reconfigured(copied, architectures=["NoSuchModel"]))


def test_load_is_for_directories(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such directory"):
        load(tmp_path / "owner" / "name")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"hidden_size": -64},
        {"num_attention_heads": 0},
        {"hidden_act": "nonesuch"},
        {"rope_parameters": {"rope_type": "nonesuch", "rope_theta": 1.0}},
        {"architectures": ["LlamaTokenizer"]},
        {"architectures": ["PreTrainedModel"]},
        {"architectures": [7]},
        {"architectures": ["GPT2LMHeadModel"]},
        {"model_type": ["llama"]},
    ],
    ids=str,
)
def test_configs_that_make_no_model_are_one_line(copied: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"config\.json: ") as caught:
        open_model(reconfigured(copied, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_values_without_a_scale_are_refused_by_name(copied: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(BadInput, match=rf"{name}: got {dtype} without a scale"):
        open_model(rewritten(copied, lambda t: t.update({name: t[name].to(dtype)})))


@pytest.mark.parametrize("layers", [10**30, 10**9, 0, -1])
@pytest.mark.parametrize("reads", [open_model, check], ids=["open_model", "check"])
def test_layers_that_no_tensors_are_there_for(reads: Callable[[Path], object], layers: int, copied: Path) -> None:
    """They would be built for hours, in all memory that there is."""
    changed(copied, num_hidden_layers=layers)
    with pytest.raises(BadInput, match=rf"config\.json: num_hidden_layers: got {layers}, expected 1 to 21, since"):
        reads(copied)


def test_layers_by_another_name(tmp_path: Path) -> None:
    stock(gpt2_config()).save_pretrained(tmp_path)
    changed(tmp_path, n_layer=10**9)
    with pytest.raises(BadInput, match=r"config\.json: n_layer: got 1000000000, expected 0 to 28, since"):
        open_model(tmp_path)


def changed(directory: Path, **values: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_tokenizer_config_that_is_a_list(copied: Path) -> None:
    (copied / "tokenizer_config.json").write_text("[]")
    with pytest.raises(BadInput, match=r"tokenizer_config\.json: holds list"):
        open_model(copied)


def test_too_little_memory_is_no_fault_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(MemoryError), foreign(tmp_path):
        raise MemoryError


@pytest.mark.parametrize("ahead", [0, 1])
def test_blocks_that_a_config_leaves_out_are_told(ahead: int, copied: Path) -> None:
    """Nothing is lost, since they are carried along; one that predicts tokens further ahead is meant to be there."""
    changed(copied, num_hidden_layers=1, num_nextn_predict_layers=ahead)
    with (
        nullcontext() if ahead else pytest.warns(Notice, match=r"model: model\.layers\.1 is a block that the model has")
    ):
        model = open_model(copied)
    save(model, copied.with_name("out"))
    assert headers(copied).keys() == headers(copied.with_name("out")).keys()
