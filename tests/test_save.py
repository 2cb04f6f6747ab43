"""Writing checkpoints: transformers loads what was saved and computes what ptq computes; nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from checkpoints import compressed, in_blocks, quantized, same_bits
from conftest import CONFIGS, llama_config, stock
from ptq.base import State
from ptq.errors import BadInput
from ptq.io.hub import load, open_model
from ptq.io.journal import Journal
from ptq.io.output import JOURNAL, WORK, check_output
from ptq.io.safetensors import headers
from ptq.io.save import save, write
from ptq.io.shards import ShardWriter
from ptq.models.model import Model
from ptq.models.skeleton import from_module
from ptq.numerics.grids import Float8, Int
from ptq.numerics.leaves import Quantized, Sparse, Transposed, dense
from ptq.numerics.patterns import NM
from ptq.numerics.schemes import scheme
from ptq.pipeline.run import compress
from ptq.transforms.rtn import rtn

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "pack4 group": ("auto", {}),
    "pack3 channel": ("auto", {"grid": Int(3), "tiles": "channel"}),
    "pack8 tensor": ("auto", {"grid": Int(8), "tiles": "tensor"}),
    "pack4 asymmetric": ("auto", {"asymmetric": True}),
    "int8 channel": ("int-quantized", {"grid": Int(8), "tiles": "channel"}),
    "int8 tensor": ("int-quantized", {"grid": Int(8), "tiles": "tensor"}),
    "int4 asymmetric group": ("int-quantized", {"asymmetric": True}),
    "float8 channel": ("auto", {"grid": Float8(), "tiles": "channel"}),
    "float8 tensor": ("auto", {"grid": Float8(), "tiles": "tensor"}),
}


def quantization(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def transformers_loads(directory: Path, **how: Any) -> Any:
    """The stock model, or an error about anything that was missing, left over or of another shape."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True, **how)
    assert not any(info.values()), info
    return model


def dequantizing() -> dict[str, Any]:
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def saved_stock(directory: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    stock(CONFIGS[family](**changes)).to(dtype).save_pretrained(directory)
    return directory


# What loaders make of it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_transformers_computes_the_same(
    kind: str, dtype: torch.dtype, tmp_path: Path, batches: list[torch.Tensor]
) -> None:
    form, how = FORMATS[kind]
    source = open_model(saved_stock(tmp_path / "source", "llama", dtype))
    model = compressed(source, in_blocks(**how, dtype=dtype))
    # Packed zero points: transformers 5.24 makes a skeleton for them that has another shape than the file.
    notes = list(save(model, tmp_path / "out", format=form).notes.values())
    concerned = "transformers" if kind == "pack4 asymmetric" else "vLLM" if form == "int-quantized" else ""
    assert [note.partition(": ")[0] for note in notes] == ([concerned] if concerned else [])
    assert ("dequantize=True" in str(notes)) is (concerned == "transformers")
    back, expected = load(tmp_path / "out"), model(batches[0]).logits
    assert torch.equal(back(batches[0]).logits, expected)
    for name, leaf in model.params.items():
        assert same_bits(dense(back.params[name]), dense(leaf)), name
    more = dequantizing() if kind == "pack4 asymmetric" else {}
    stock_model = transformers_loads(tmp_path / "out", **more)
    assert stock_model.dtype is dtype
    assert torch.equal(stock_model(batches[0]).logits, expected)
    assert not torch.equal(source(batches[0]).logits, expected)


@pytest.mark.parametrize("kind", ["pack4 group", "int8 channel", "float8 channel"])
@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_other_families(kind: str, family: str, tmp_path: Path, batches: list[torch.Tensor]) -> None:
    form, how = FORMATS[kind]
    model = compressed(open_model(saved_stock(tmp_path / "source", family)), in_blocks(**how))
    saved = save(model, tmp_path / "out", format=form)
    expected = model(batches[0]).logits
    assert torch.equal(load(tmp_path / "out")(batches[0]).logits, expected)
    assert torch.equal(transformers_loads(tmp_path / "out")(batches[0]).logits, expected)
    files = headers(tmp_path / "out")
    assert "lm_head.weight" not in files  # tied
    if family == "gpt2":  # Conv1D: no loader can name the parts of a compressed one
        assert len(saved.notes) == 8
        assert all("stored dense with its quantized values" in note for note in saved.notes.values())
        assert {leaf.dtype for leaf in files.values()} == {torch.float32}
        assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    else:
        assert all("vLLM" in note for note in saved.notes.values())
        assert bool(saved.notes) is (kind == "int8 channel")
        assert quantization(tmp_path / "out")["ignore"] == ["lm_head"]


def test_several_schemes_in_one_model(tmp_path: Path, batches: list[torch.Tensor]) -> None:
    def choose(name: str, shape: torch.Size) -> Any:
        if "self_attn" in name:
            return quantized(*shape, grid=Float8(), tiles="channel")
        return quantized(*shape) if "mlp" in name and ".1." in name else None

    model = compressed(open_model(saved_stock(tmp_path / "source", "llama")), choose)
    save(model, tmp_path / "out")
    table = quantization(tmp_path / "out")
    assert table["format"] == "mixed-precision"
    targets = [t for group in table["config_groups"].values() for t in group["targets"]]
    mlp = {f"model.layers.{{}}.mlp.{x}_proj" for x in ("gate", "up", "down")}
    assert {t for t in targets if "mlp" in t} == {m.format(1) for m in mlp}
    assert len(targets) == len(set(targets)) == 11
    assert set(table["ignore"]) == {"lm_head", *(m.format(0) for m in mlp)}
    expected = model(batches[0]).logits
    assert torch.equal(load(tmp_path / "out")(batches[0]).logits, expected)
    assert torch.equal(transformers_loads(tmp_path / "out")(batches[0]).logits, expected)


def test_pruned_weights(tmp_path: Path, batches: list[torch.Tensor]) -> None:
    def choose(name: str, shape: torch.Size) -> Any:
        if ".layers." not in name:
            return None
        pattern = NM(2, 4)
        mask = pattern.mask(torch.rand(shape))
        values = quantized(*shape, asymmetric=True) if "mlp" in name else torch.randn(shape) * 0.1
        return Sparse(values, mask, pattern)

    model = compressed(open_model(saved_stock(tmp_path / "source", "llama")), choose)
    notes = save(model, tmp_path / "out", format="int-quantized").notes
    only = {name for name in model.params if ".layers." in name and "_proj" in name and "mlp" not in name}
    assert {name for name, note in notes.items() if "pruned, and not quantized" in note} == only
    back = load(tmp_path / "out")
    assert torch.equal(back(batches[0]).logits, model(batches[0]).logits)
    assert torch.equal(transformers_loads(tmp_path / "out")(batches[0]).logits, model(batches[0]).logits)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert int((dense(back.params[name]).unflatten(-1, (-1, 4)) != 0).sum(-1).max()) <= 2
    assert isinstance(back.params["model.layers.0.mlp.up_proj.weight"].load().values, Quantized)


def test_a_head_that_is_compressed_by_itself_is_untied(tmp_path: Path, batches: list[torch.Tensor]) -> None:
    source = open_model(saved_stock(tmp_path / "source", "llama", tie_word_embeddings=True))
    head = quantized(*source.params["model.embed_tokens.weight"].shape, grid=Int(8), tiles="channel")
    model = replace(source, state=State({**source.params, "lm_head.weight": head}), aliases={})
    save(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert {"lm_head.weight_packed", "model.embed_tokens.weight"} <= headers(tmp_path / "out").keys()
    expected = model(batches[0]).logits
    assert torch.equal(load(tmp_path / "out")(batches[0]).logits, expected)
    assert torch.equal(transformers_loads(tmp_path / "out")(batches[0]).logits, expected)
    table = quantization(tmp_path / "out")
    assert "lm_head" not in table["ignore"]
    assert table["config_groups"]["group_0"]["targets"] == ["lm_head"]  # a class does not reach it in every engine
    assert len(table["ignore"]) == 14


def test_embeddings_are_stored_dense(tmp_path: Path, batches: list[torch.Tensor]) -> None:
    source = open_model(saved_stock(tmp_path / "source", "llama"))
    model = compressed(source, lambda name, shape: quantized(*shape) if "embed" in name else None)
    saved = save(model, tmp_path / "out")
    assert list(saved.notes) == ["model.embed_tokens.weight"]
    assert torch.equal(transformers_loads(tmp_path / "out")(batches[0]).logits, model(batches[0]).logits)


@pytest.mark.parametrize("which", ["all", "attention"])
def test_experts_are_stored_one_by_one(which: str, tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2)
    stock(config).save_pretrained(tmp_path / "source")
    model = open_model(tmp_path / "source")
    chosen = [n for n in model.params if n.endswith("_proj.weight") or (which == "all" and "experts" in n)]
    params = {**model.params, **{name: quantized(*model.params[name].shape) for name in chosen}}
    model, ids = replace(model, state=State(params)), torch.randint(96, (2, 8))
    saved = save(model, tmp_path / "out")
    notes = [] if which == "all" else ["dense-experts"]  # which transformers does not stack beside compressed weights
    assert [note.split(": ")[1] for note in saved.notes.values()] == notes
    back = load(tmp_path / "out")
    assert torch.equal(back(ids).logits, model(ids).logits)
    file = f"model.layers.0.mlp.experts.3.down_proj.weight{'_packed' if which == 'all' else ''}"
    assert file in headers(tmp_path / "out")
    group = quantization(tmp_path / "out")["config_groups"]["group_0"]
    # By class the dense experts would be targets too, in engines that have no module for each of them.
    attention = [f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"]
    assert group["targets"] == (["Linear"] if which == "all" else attention)
    if which == "all":
        assert torch.equal(transformers_loads(tmp_path / "out")(ids).logits, model(ids).logits)


# Formats


@pytest.mark.parametrize("form", ["dense", "int-quantized", "pack-quantized", "auto"])
def test_converted_values_are_the_same(form: str, tmp_path: Path, batches: list[torch.Tensor]) -> None:
    model = compressed(open_model(saved_stock(tmp_path / "source", "llama")), in_blocks())
    first = save(model, tmp_path / "first", format="int-quantized").path
    again = load(save(load(first), tmp_path / "again", format=form).path)
    assert torch.equal(again(batches[0]).logits, model(batches[0]).logits)
    expected = {"dense": None, "auto": "int-quantized"}.get(form, form)  # auto keeps what is there
    found = json.loads((tmp_path / "again" / "config.json").read_text()).get("quantization_config", {"format": None})
    assert found["format"] == expected


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            "float-quantized",
            r"model\.layers\.0\.self_attn\.q_proj\.weight: cannot be stored as float-quantized: it is int4 with",
        ),
        ("nvfp4", "format 'nvfp4' is not written; expected auto, dense, frozen, pack-quantized"),
    ],
)
def test_a_format_that_does_not_fit_is_refused(form: str, message: str, tmp_path: Path, tiny_llama: Path) -> None:
    model = compressed(open_model(tiny_llama), in_blocks())
    with pytest.raises(BadInput, match=message):
        save(model, tmp_path / "out", format=form)
    assert list(tmp_path.iterdir()) == []


def test_there_is_nothing_to_pack_in_a_dense_model(tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(BadInput, match="has no quantized weights to store as pack-quantized"):
        save(open_model(tiny_llama), tmp_path / "out", format="pack-quantized")
    assert list(tmp_path.iterdir()) == []


def test_scales_that_no_format_holds_are_stored_dense(tmp_path: Path, tiny_llama: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    odd = replace(quantized(128, 64), scale=torch.rand(128, 3) + 1)  # groups of 22, 22 and 20
    model = compressed(open_model(tiny_llama), lambda n, _: odd if n == name else None)
    saved = save(model, tmp_path / "out")
    assert list(saved.notes) == [name]
    assert torch.equal(dense(load(saved.path).params[name]), dense(odd))


@pytest.mark.parametrize("bad", [0.0, -0.5, float("nan"), float("inf")])
def test_a_scale_that_was_never_measured_is_refused_by_name(bad: float, tmp_path: Path, tiny_llama: Path) -> None:
    broken = quantized(128, 64)
    broken.scale[3, 1] = bad
    model = compressed(open_model(tiny_llama), lambda n, _: broken if n.endswith("1.mlp.up_proj.weight") else None)
    with pytest.raises(BadInput, match=r"1\.mlp\.up_proj\.weight: a scale is 0, negative, infinite or NaN"):
        save(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# What goes along


def test_dense_is_copied_bit_for_bit(tiny: Path, tmp_path: Path) -> None:
    saved = save(open_model(tiny), tmp_path / "out")
    before, after = headers(tiny), headers(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(same_bits(before[n].load(), after[n].load()) for n in before)
    assert saved.nbytes == sum(leaf.load().nbytes for leaf in before.values())
    assert saved.path == tmp_path / "out"


def test_files_that_are_no_weights_are_carried_along(tiny_llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    kept = {"chat_template.jinja": "{{ x }}", "own_code.py": "x = 1", "parts/notes.txt": "y", "README.md": "z"}
    left = {
        "pytorch_model.bin": "w",
        "old.safetensors.index.json": "{}",
        ".cache/x": "w",
        "checkpoint-5/model.safetensors": "w",
    }
    for name, text in {**kept, **left, "checkpoint-5/config.json": "{}"}.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    out = save(open_model(source), source / "compressed").path  # inside the source, which is not copied into itself
    names = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    own = {p.name for p in tiny_llama.iterdir()}
    assert names == own | kept.keys()
    for name in (own - {"config.json", "model.safetensors"}) | kept.keys():
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert load(out).tokenizer("The cat")["input_ids"] == load(source).tokenizer("The cat")["input_ids"]


def test_weights_that_the_class_does_not_use_are_carried_along(tiny_llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    extra = {"mtp.0.weight": torch.randn(3, 2), "mtp.norm.weight": torch.randn(2)}
    save_file({**load_file(source / "model.safetensors"), **extra}, source / "model.safetensors", {"format": "pt"})
    first = save(compressed(open_model(source), in_blocks()), tmp_path / "first").path
    again = save(load(first), tmp_path / "again").path
    for directory in (first, again):
        found = headers(directory)
        assert all(same_bits(found[name].load(), value) for name, value in extra.items())
    assert "mtp.0" not in str(quantization(again)["config_groups"])


def test_a_live_model_is_saved_with_what_it_has(tmp_path: Path, tokenizer: Any, batches: list[torch.Tensor]) -> None:
    live = stock(llama_config(tie_word_embeddings=True))
    live.generation_config.max_new_tokens = 7
    out = save(from_module(live, tokenizer), tmp_path / "out").path
    back = transformers_loads(out)
    assert torch.equal(back(batches[0]).logits, live(batches[0]).logits)
    assert back.generation_config.max_new_tokens == 7
    assert "lm_head.weight" not in headers(out)
    assert load(out).tokenizer("The cat")["input_ids"] == tokenizer("The cat")["input_ids"]


def test_a_live_model_that_was_untied_by_hand_stays_untied(tmp_path: Path, batches: list[torch.Tensor]) -> None:
    live = stock(llama_config(tie_word_embeddings=True))
    live.lm_head.weight = nn.Parameter(torch.randn_like(live.lm_head.weight))
    out = save(from_module(live), tmp_path / "out").path
    assert torch.equal(transformers_loads(out)(batches[0]).logits, live(batches[0]).logits)


def test_a_live_model_that_was_tied_by_hand_is_whole(tmp_path: Path, batches: list[torch.Tensor]) -> None:
    live = stock(llama_config(tie_word_embeddings=False))
    live.lm_head.weight = live.model.embed_tokens.weight
    out = save(from_module(live), tmp_path / "out").path
    assert torch.equal(transformers_loads(out)(batches[0]).logits, live(batches[0]).logits)


def test_any_module_is_written_by_its_own_names(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4))
    model = from_module(module)
    leaf = quantized(4, 16)
    saved = save(replace(model, state=State({**model.params, "0.weight": leaf})), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    parts = {"0.weight_packed", "0.weight_scale", "0.weight_shape"}
    assert found.keys() == (module.state_dict().keys() - {"0.weight"}) | parts
    assert quantization(saved.path)["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_small_shards_have_an_index(tiny_llama: Path, tmp_path: Path, batches: list[torch.Tensor]) -> None:
    model = compressed(open_model(tiny_llama), in_blocks())
    out = save(model, tmp_path / "out", shard_size=20_000).path
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert shards == sorted(p.name for p in out.glob("*.safetensors"))
    assert all(f"-of-{len(shards):05}." in name for name in shards)
    expected = model(batches[0]).logits
    assert torch.equal(load(out)(batches[0]).logits, expected)
    assert torch.equal(transformers_loads(out)(batches[0]).logits, expected)


def test_saving_changes_no_input(tiny_llama: Path, tmp_path: Path) -> None:
    model = compressed(open_model(tiny_llama), in_blocks(asymmetric=True))
    leaf = model.params["model.layers.0.mlp.up_proj.weight"]
    before = [t.clone() for t in (leaf.codes, leaf.scale, leaf.zero)]
    config, params = model.config.to_dict(), dict(model.params)
    save(model, tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(before, (leaf.codes, leaf.scale, leaf.zero), strict=True))
    assert [t._version for t in (leaf.codes, leaf.scale, leaf.zero)] == [0, 0, 0]
    assert model.config.to_dict() == config
    assert model.params == params


def test_transposed_leaves_say_what_they_are_in_the_config(tmp_path: Path, tiny_gpt2: Path) -> None:
    model = open_model(tiny_gpt2)
    name = "transformer.h.0.mlp.c_fc.weight"
    leaf = Transposed(Sparse(quantized(128, 64), torch.rand(128, 64) < 0.5, None))
    saved = save(replace(model, state=State({**model.params, name: leaf})), tmp_path / "out")
    assert list(saved.notes) == [name]
    assert torch.equal(dense(load(saved.path).params[name]), dense(leaf))


# Runs


class Blocks:
    """What `save` sees of a run."""

    stages = 1
    identity: Mapping[str, Any] = {}

    def __init__(self, model: Model, params: dict[str, Any], fail: BaseException | None = None) -> None:
        self.start = model
        self.params = params
        self.fail = fail
        self.closed = False
        self.report: dict[str, Any] = {"blocks": [], "totals": {}}

    def stream(self, store: Any) -> Iterator[Any]:
        names = list(self.params)
        for i in range(0, len(names), 5):
            params = {n: self.params[n] for n in names[i : i + 5]}
            store.put(0, params, {"name": str(i), "weights": []})
            yield SimpleNamespace(state=State(params))
        if self.fail:
            raise self.fail

    def end(self) -> None:
        self.closed = True


def test_a_run_is_written_as_its_model_would_be(tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model(tiny_llama)
    model = compressed(source, in_blocks())
    changed = {n: leaf for n, leaf in reversed(model.params.items()) if leaf is not source.params[n]}
    run = Blocks(source, changed)  # what no block brings is taken from the source
    assert save(run, tmp_path / "run")._replace(path=Path()) == save(model, tmp_path / "model")._replace(path=Path())
    assert run.closed
    one, two = headers(tmp_path / "run"), headers(tmp_path / "model")
    assert one.keys() == two.keys()
    assert all(same_bits(one[n].load(), two[n].load()) for n in one)


def test_a_run_is_streamed(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    write = ShardWriter.write

    def watched(writer: ShardWriter, name: str, tensor: torch.Tensor) -> Any:
        events.append(name)
        return write(writer, name, tensor)

    class Noted(Blocks):
        def stream(self, store: Any) -> Iterator[Any]:
            for block in super().stream(store):
                events.append("block")
                yield block

    monkeypatch.setattr(ShardWriter, "write", watched)
    model = open_model(tiny_llama)
    save(Noted(model, dict(model.params)), tmp_path / "out")
    assert [i for i, event in enumerate(events) if event == "block"] == [5, 11, 17, 23, 25]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("solver"), OSError(errno.ENOSPC, "disk full")])
def test_failure_keeps_what_is_finished_and_nothing_else(
    error: BaseException, tiny_llama: Path, tmp_path: Path
) -> None:
    model = open_model(tiny_llama)
    for params in ({}, dict(model.params)):
        run = Blocks(model, params, fail=error)
        with pytest.raises(type(error)) as caught:
            save(run, tmp_path / "deep" / "er" / "out")
        assert caught.value is error
        assert run.closed
        assert [p.name for p in (tmp_path / "deep" / "er").glob("*")] == (["out.partial"] if params else [])
        assert (tmp_path / "deep").exists() == bool(params)
    assert error.__notes__[-1].startswith("5 finished blocks kept in ")
    assert error.__notes__[-1].endswith("out.partial; the same command with --resume goes on from there")


# Directories


def test_an_output_that_is_not_empty_is_refused_unless_overwritten(tiny_llama: Path, tmp_path: Path) -> None:
    out, model = tmp_path / "out", open_model(tiny_llama)
    out.mkdir()
    save(model, out)  # empty is fine
    (out / "mine.txt").write_text("precious")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(BadInput, match="exists and is not empty"):
        save(model, out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    save(compressed(model, in_blocks()), out, overwrite=True)
    assert not (out / "mine.txt").exists()
    assert quantization(out)["format"] == "pack-quantized"
    assert list(tmp_path.iterdir()) == [out]


def test_a_failed_overwrite_keeps_the_old_one(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, model = tmp_path / "out", open_model(tiny_llama)
    save(model, out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(RuntimeError, match="solver"):
        save(Blocks(model, {}, fail=RuntimeError("solver")), out, overwrite=True)
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name == "out.partial" and target == out:
            raise OSError(errno.EIO, "broken")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="broken"):
        save(model, out, overwrite=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("how", ["itself", "above", "link to it", "link above", "link in the model"])
def test_what_a_model_is_read_from_is_never_replaced(how: str, tiny_llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_llama, tmp_path / "up" / "source"))
    (tmp_path / "up" / "config.json").write_text("{}")  # as if it were a model
    (tmp_path / "link").symlink_to(source if how == "link to it" else tmp_path / "up")
    out = {"itself": source, "above": tmp_path / "up"}.get(how, tmp_path / "link")
    if how == "link in the model":
        (tmp_path / "files").mkdir()
        for file in source.iterdir():
            (tmp_path / "files" / file.name).symlink_to(file)
        source, out = tmp_path / "files", source
    before = {p: p.read_bytes() for p in source.iterdir()}
    model = open_model(source)
    for attempt in (lambda: save(model, out, overwrite=True), lambda: check_output(out, True, str(source))):
        with pytest.raises(BadInput, match="the model is read from it"):
            attempt()
    assert {p: p.read_bytes() for p in source.iterdir()} == before
    save(model, source / "inside")
    save(model, source / "inside", overwrite=True)


def test_only_a_model_is_overwritten(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(BadInput, match=r"holds no config\.json"):
        save(open_model(tiny_llama), tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize(
    ("out", "reason"), [("file/out", "Not a directory"), ("x" * 300, "File name too long"), ("link", "link to nothing")]
)
def test_where_no_directory_can_be_made(out: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for path in (tmp_path / out, tmp_path / out / "deeper"):
        with pytest.raises(BadInput, match=reason):
            check_output(path)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_what_is_not_finite_is_refused_by_name(value: float, name: str, tiny_llama: Path, tmp_path: Path) -> None:
    model = open_model(tiny_llama)
    broken = dense(model.params[name]).clone()
    broken.view(-1)[7] = value
    with pytest.raises(BadInput, match=f"{name}: has NaN or infinite values"):
        save(replace(model, state=State({**model.params, name: broken})), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_float8_codes_that_are_nan_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    leaf = quantized(128, 64, grid=Float8(), tiles="channel")
    leaf.codes.view(torch.uint8)[3, 5] = 0x7F
    with pytest.raises(BadInput, match=f"{name}: has NaN"):
        save(compressed(open_model(tiny_llama), lambda n, _: leaf if n == name else None), tmp_path / "out")


def test_a_linear_with_a_forward_of_its_own_is_stored_dense(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the name in torch
            return input @ self.weight.T

    class Plain(nn.Linear):
        pass

    model = from_module(nn.Sequential(Own(16, 4), Plain(16, 4)))
    leaves = {"0.weight": quantized(4, 16), "1.weight": quantized(4, 16)}
    saved = save(replace(model, state=State({**model.params, **leaves})), tmp_path / "out")
    assert list(saved.notes) == ["0.weight"]
    assert {"0.weight", "1.weight_packed"} <= headers(saved.path).keys()
    assert quantization(saved.path)["ignore"] == ["0"]


def test_while_it_works_the_output_does_not_exist(tiny_llama: Path, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Looking(Blocks):
        def stream(self, store: Any) -> Iterator[Any]:
            for block in super().stream(store):
                seen.append([p.name for p in tmp_path.iterdir()])
                yield block

    model = open_model(tiny_llama)
    save(Looking(model, dict(model.params)), tmp_path / "out")
    assert seen == [["out.partial"]] * 5
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_an_interrupted_run_left_is_refused_where_a_block_is_finished(tmp_path: Path) -> None:
    (tmp_path / "out.partial" / WORK).mkdir(parents=True)
    journal = Journal(tmp_path / "out.partial" / JOURNAL)
    check_output(tmp_path / "out")
    journal.append({"identity": {"seed": 0}})
    check_output(tmp_path / "out")
    journal.append({"stage": 0, "reports": [{}]})
    with pytest.raises(BadInput, match=r"out\.partial: left by a run that was interrupted"):
        check_output(tmp_path / "out")


def test_a_file_is_no_place_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(BadInput, match="is a file"):
        check_output(tmp_path / "out", overwrite=True)
    assert check_output(tmp_path / "other") == tmp_path / "other"


# What others do meanwhile


def test_what_appears_at_the_target_meanwhile_is_kept(tmp_path: Path) -> None:
    run = compress(open_model(saved_stock(tmp_path / "source", "llama")), None, rtn(scheme("W8A16", -1)))
    writing = write(run, tmp_path / "out")
    next(writing)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(BadInput, match="has appeared while this was made; move it away, and resume"):
        list(writing)
    assert (tmp_path / "out" / "precious.txt").read_text() == "mine"
    (tmp_path / "out").rename(tmp_path / "aside")
    again = compress(open_model(tmp_path / "source"), None, rtn(scheme("W8A16", -1)))
    assert save(again, tmp_path / "out", resume=True).path == tmp_path / "out"


def test_a_link_is_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    saved = save(open_model(saved_stock(tmp_path / "source", "llama")), tmp_path / "link")
    assert saved.path == tmp_path / "real"
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "link").params


def test_a_source_s_files_are_not_mistaken_for_those_of_a_job(tmp_path: Path) -> None:
    source = saved_stock(tmp_path / "source", "llama")
    names = {"job.jsonl", "journal", "stage-0-1.safetensors.txt", "stage-1/notes.txt", "shard-0/notes.txt"}
    for name in (*names, ".job/journal"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("not a journal\n")
    (source / "stage-1" / "back").symlink_to(source)
    (source / "stage-1").chmod(0o500)
    save(open_model(source), tmp_path / "out")
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert names < found
    assert ".job/journal" not in found
    assert os.access(tmp_path / "out" / "stage-1", os.W_OK)


def test_no_directory_gets_the_name_of_a_disk() -> None:
    with pytest.raises(BadInput, match="a disk is mounted there"):
        check_output("/", False, None)
