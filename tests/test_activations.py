"""Activation maps in files: what is asked of activations and the cache is kept bit for bit, and written back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import GOLDEN, compressed, quantized, same_bits
from conftest import llama_config, stock
from ptq.base import State, targets
from ptq.errors import BadInput, Notice
from ptq.io.activations import arguments
from ptq.io.hub import load
from ptq.io.quantization_config import Args, Quantizers
from ptq.io.records import Record, record
from ptq.io.save import save
from ptq.io.shards import Entry
from ptq.models.model import Model
from ptq.numerics.grids import Float8, Int, Minifloat
from ptq.numerics.leaves import dense
from ptq.numerics.maps import FakeQuant, StaticQuant
from ptq.numerics.schemes import scheme
from ptq.pipeline.run import compress
from ptq.transforms.rtn import rtn

pytestmark = pytest.mark.filterwarnings("ignore:.*only weights are computed with:UserWarning")
WEIGHTS = "model.safetensors"
SIX = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic")
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "group_size": None, "dynamic": False}
TOKEN = FakeQuant(None, Int(8), "token")
ATTENTION = "model.layers.0.self_attn"
UP = "model.layers.0.mlp.up_proj"


def asked(directory: Path) -> dict[str, Any]:
    """What a config asks of weights, activations and the cache: six fields of each, and blocks."""
    table = json.loads((directory / "config.json").read_text())["quantization_config"]
    groups = [
        (set(g["targets"]), *map(g.get, ("weights", "input_activations", "output_activations")))
        for g in table["config_groups"].values()
    ]
    fields: Callable[[Any], Any] = lambda args: args and {name: args.get(name) for name in (*SIX, "block_structure")}  # noqa: E731
    return {
        "groups": [(targets, *map(fields, args)) for targets, *args in groups],
        "cache": fields(table["kv_cache_scheme"]),
        "status": (table["quantization_status"], table["format"]),
    }


def same_tensors(a: Path, b: Path) -> bool:
    one, two = load_file(a / WEIGHTS), load_file(b / WEIGHTS)
    return one.keys() == two.keys() and all(same_bits(t, two[name]) for name, t in one.items())


def changed(
    source: Path, path: Path, tensors: dict[str, torch.Tensor], change: Callable[[Any], Any], drop: str = "-"
) -> Path:
    """A copy of a checkpoint with other tensors and another config."""
    shutil.copytree(source, path)
    kept = {name: t for name, t in load_file(source / WEIGHTS).items() if not name.endswith(drop)}
    save_file({**kept, **tensors}, path / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))
    return path


MAPS = {"W8A8": 14, "FP8": 14, "FP8_DYNAMIC": 14, "FP8_BLOCK": 14, "kv_only_fp8_tensor": 4}


@pytest.mark.parametrize("name", sorted(p.parent.name for p in GOLDEN.glob("*/config.json") if p.parent.name != "base"))
def test_golden_checkpoints_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    first = load(GOLDEN / name)
    save(first, tmp_path / "again")
    assert same_tensors(GOLDEN / name, tmp_path / "again")
    assert asked(tmp_path / "again") == asked(GOLDEN / name)
    second = load(tmp_path / "again")
    assert second.state.maps.keys() == first.state.maps.keys()
    assert len(first.state.maps) == MAPS.get(name, 0)
    save(second, tmp_path / "twice")
    assert same_tensors(tmp_path / "again", tmp_path / "twice")
    configs = [(tmp_path / d / "config.json").read_text() for d in ("again", "twice")]
    assert configs[0] == configs[1]


def test_maps_by_their_places() -> None:
    maps = load(GOLDEN / "FP8").state.maps
    (static,) = maps[f"{UP}.weight"]
    assert isinstance(static, StaticQuant)
    assert (static.grid, static.granularity, static.zero) == (Float8(), "tensor", None)
    assert static.scale.item() == pytest.approx(0.03, rel=1e-2)
    (dynamic,) = load(GOLDEN / "W8A8").state.maps[f"{UP}.weight"]
    assert (dynamic.grid, dynamic.granularity, dynamic.divisor) == (Int(8), "token", None)
    (group,) = load(GOLDEN / "FP8_BLOCK").state.maps[f"{UP}.weight"]
    assert (group.granularity, group.group_size) == ("group", 128)
    cache = load(GOLDEN / "kv_only_fp8_tensor").state.maps
    assert set(cache) == {f"model.layers.{i}.self_attn@{letter}" for i in range(2) for letter in "kv"}


def test_a_local_scheme_keeps_its_divisor(tmp_path: Path) -> None:
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    args |= {"dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}
    modules = [
        n.removesuffix(".weight_packed") for n in load_file(GOLDEN / "NVFP4A16" / WEIGHTS) if n.endswith("_packed")
    ]
    divisors = {f"{m}.input_global_scale": torch.tensor([40.0 + i]) for i, m in enumerate(modules)}
    change = lambda q: q["config_groups"]["group_0"].update(input_activations=args)  # noqa: E731  # short
    source = changed(GOLDEN / "NVFP4A16", tmp_path / "source", divisors, change)
    model = load(source)
    (found,) = model.state.maps[f"{modules[3]}.weight"]
    assert (found.grid, found.scales, found.divisor.item()) == (Minifloat(1), Float8(), 43.0)
    save(model, tmp_path / "again")
    assert same_tensors(source, tmp_path / "again")
    table = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert table["config_groups"]["group_0"]["input_activations"] == args


def test_zero_points_outputs_and_attention_are_kept(tmp_path: Path) -> None:
    int8 = {
        "num_bits": 8,
        "type": "int",
        "symmetric": False,
        "strategy": "tensor",
        "group_size": None,
        "dynamic": False,
    }
    heads = {**FP8, "strategy": "attn_head"}
    group = {"targets": ["LlamaAttention"], "weights": None, "input_activations": heads, "output_activations": None}

    def change(table: Any) -> None:
        table["config_groups"]["group_0"].update(input_activations=int8, output_activations=FP8)
        table["config_groups"]["group_1"] = {**group, "format": None}
        table["kv_cache_scheme"] = heads

    tensors: dict[str, torch.Tensor] = {}
    for name in load_file(GOLDEN / "W8A8" / WEIGHTS):
        if name.endswith("weight_scale"):
            module = name.removesuffix(".weight_scale")
            tensors[f"{module}.input_scale"], tensors[f"{module}.output_scale"] = torch.rand(2, 1).bfloat16() + 1
            tensors[f"{module}.input_zero_point"] = torch.tensor([-3], dtype=torch.int8)
    for module in (f"model.layers.{i}.self_attn" for i in range(2)):
        for letter, count in (("q", 4), ("k", 2), ("v", 2)):
            tensors[f"{module}.{letter}_scale"] = torch.rand(count, 1, 1).bfloat16() + 1
            tensors[f"{module}.{letter}_zero_point"] = torch.zeros(count, 1, 1, dtype=torch.float8_e4m3fn)
    source = changed(GOLDEN / "W8A8", tmp_path / "source", tensors, change)
    model = load(source)
    assert len(model.state.maps) == 14 + 14 + 6
    save(model, tmp_path / "again")
    assert same_tensors(source, tmp_path / "again")
    assert asked(tmp_path / "again") == asked(source)


@pytest.mark.parametrize("letter", ["k", "v"])
def test_one_scale_of_a_cache_without_the_other_is_refused(letter: str, tmp_path: Path) -> None:
    """Engines would take 1 for it; attention that has neither, such as over an image, has no cache."""
    source = changed(
        GOLDEN / "kv_only_fp8_tensor", tmp_path / "half", {}, lambda _: None, f"0.self_attn.{letter}_scale"
    )
    with pytest.raises(BadInput, match=rf"half: no tensor {ATTENTION}\.{letter}_scale; its config asks for it"):
        load(source)
    neither = changed(source, tmp_path / "neither", {}, lambda _: None, ".layers.0.self_attn.v_scale")
    neither = changed(neither, tmp_path / "none", {}, lambda _: None, ".layers.0.self_attn.k_scale")
    assert set(load(neither).state.maps) == {"model.layers.1.self_attn@k", "model.layers.1.self_attn@v"}


@pytest.mark.parametrize("spelling", ["k_proj.output_scale", "k_proj.k_scale", "kv_scale"])
def test_old_places_of_the_cache_s_scales(spelling: str, tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.self_attn.{spelling}": torch.tensor([2.0 + i]) for i in range(2)}
    source = changed(GOLDEN / "kv_only_fp8_tensor", tmp_path / "old", tensors, lambda _: None, drop=".k_scale")
    assert load(source).state.maps[f"{ATTENTION}@k"][0].scale.item() == 2.0
    save(load(source), tmp_path / "again")
    assert load_file(tmp_path / "again" / WEIGHTS)[f"{ATTENTION}.k_scale"].item() == 2.0


@pytest.mark.parametrize("target", ["Linear", "re:.*layers"])
def test_biases_and_norms_have_no_inputs_to_round(target: str, tmp_path: Path) -> None:
    stock(llama_config(attention_bias=True)).save_pretrained(tmp_path / "dense")
    choose = lambda n, s: quantized(*s, tiles="channel", grid=Float8()) if ".layers." in n else None  # noqa: E731  # short
    made = save(compressed(load(tmp_path / "dense"), choose), tmp_path / "made").path
    names = [name for name in load_file(made / WEIGHTS) if name.endswith("weight_scale")]
    scales = {name.replace("weight_scale", "input_scale"): torch.ones(1) for name in names}

    def change(table: dict[str, Any]) -> None:
        table["config_groups"]["group_0"] |= {"targets": [target], "input_activations": FP8}

    model = load(changed(made, tmp_path / "static", scales, change))
    assert len(model.state.maps) == len(scales) > 0
    assert all(name.endswith("_proj.weight") for name in model.state.maps)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, rf"no tensor {UP}\.input_scale"),
        (torch.ones(2), rf"{UP}\.input_scale: got torch\.float32 \(2,\), expected one float"),
        (torch.tensor([0]), r"got torch\.int64 \(1,\), expected one float"),
        (torch.tensor([torch.nan]), r"got nan, expected numbers above 0"),
        (torch.tensor([0.0]), r"got 0, expected numbers above 0"),
    ],
)
def test_scales_that_are_none_are_refused_by_name(scale: Any, message: str, tmp_path: Path) -> None:
    name = f"{UP}.input_scale"
    tensors = {} if scale is None else {name: scale}
    source = changed(GOLDEN / "FP8", tmp_path / "bad", tensors, lambda _: None, drop=name)
    with pytest.raises(BadInput, match=message) as caught:
        load(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"strategy": "channel"}, {"strategy": "token"}, {"dynamic": "local"}, {"num_bits": 16}]
)
def test_schemes_of_activations_that_are_not_read(change: dict[str, Any], tmp_path: Path) -> None:
    source = changed(
        GOLDEN / "FP8",
        tmp_path / "bad",
        {},
        lambda q: q["config_groups"]["group_0"]["input_activations"].update(change),
    )
    with pytest.raises(BadInput, match=r"group_0: activations in .* are not read"):
        load(source)


@pytest.mark.filterwarnings("default")
def test_transforms_that_act_as_a_model_runs_are_told(tmp_path: Path) -> None:
    online = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}
    change = lambda q: q.update(transform_config={"config_groups": {"u": online}})  # noqa: E731  # short
    with pytest.warns(Notice, match="its config also has transforms, which are not read"):
        load(changed(GOLDEN / "W4A16", tmp_path / "turned", {}, change))


# What becomes of maps


@pytest.fixture
def mapped(tiny_llama: Path) -> Model:
    """One compressed weight with a map, one dense weight with one, and a cache."""
    only = lambda name, shape: quantized(*shape, grid=Int(8), tiles="channel") if name == f"{UP}.weight" else None  # noqa: E731  # short
    model = compressed(load(tiny_llama), only)
    static = StaticQuant(torch.tensor([0.5]), None, Int(8))
    cache = {f"{ATTENTION}@k": static, f"{ATTENTION}@v": static}
    places = {f"{UP}.weight": static, "model.layers.1.mlp.up_proj.weight": TOKEN, **cache}
    return Model(model.module, State(model.params, {k: (m,) for k, m in places.items()}), model.aliases, model.config)


def test_a_weight_that_changes_loses_its_maps(mapped: Model, tmp_path: Path) -> None:
    recipe = rtn(scheme("W4A16", group_size=32))
    run = compress(mapped, None, targets("re:.*layers.1.*", recipe))
    assert set(run.model.state.maps) == {f"{UP}.weight", f"{ATTENTION}@k", f"{ATTENTION}@v"}
    save(compress(mapped, None, targets("re:.*layers.1.*", recipe)), tmp_path / "out")
    back = load(tmp_path / "out")
    assert set(back.state.maps) == {f"{UP}.weight", f"{ATTENTION}@k", f"{ATTENTION}@v"}
    assert torch.equal(dense(back.params[f"{UP}.weight"]), dense(mapped.params[f"{UP}.weight"]))


def test_shards_and_dense_checkpoints(mapped: Model, tmp_path: Path) -> None:
    save(mapped, tmp_path / "small", shard_size=10_000)
    assert set(load(tmp_path / "small").state.maps) == set(mapped.state.maps)
    save(mapped, tmp_path / "dense", format="dense")
    assert load(tmp_path / "dense").state.maps == {}
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_one_scheme_for_the_cache(tmp_path: Path) -> None:
    from ptq.models.skeleton import from_module

    model = from_module(stock(llama_config()))
    places = {f"model.layers.{i}.self_attn@k": (StaticQuant(torch.ones(1), None, Int(7 + i)),) for i in range(2)}
    with pytest.raises(BadInput, match="one scheme for all of its cache"):
        save(Model(model.module, State(model.params, places), model.aliases, model.config), tmp_path / "out")


def test_records_survive_their_journal() -> None:
    args = Args("float-quantized", 8, "float", True, "block", block=(4, 8))
    entry = {"input_scale": Entry(0, "F32", [1], 0, 4)}
    made = Record("m.weight", "m.weight", entry, "F32", [8, 8], args, activations={"input": arguments(TOKEN)})
    back = record(json.loads(json.dumps(made)))
    assert back == made
    assert back.quantizers == Quantizers(args, arguments(TOKEN))


@pytest.mark.parametrize("name", ["W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_transformers_rounds_activations_as_before(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save(load(GOLDEN / name), tmp_path / "again")
    known = load_file(GOLDEN / "logits" / f"{name}.safetensors")
    again, before = (
        AutoModelForCausalLM.from_pretrained(path)(known["input_ids"]).logits
        for path in (tmp_path / "again", GOLDEN / name)
    )
    assert torch.equal(again, before)
