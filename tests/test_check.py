"""Checks of checkpoints: each rule is broken by itself in a good one, and a good one breaks none."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import GOLDEN, compressed, quantized
from conftest import llama_config, stock
from ptq.cli.main import main
from ptq.errors import BadInput
from ptq.io import check as checking, save as saving
from ptq.io.check import check
from ptq.io.fused import FUSED
from ptq.io.hub import open_model
from ptq.io.matching import Targets
from ptq.io.save import save
from ptq.io.survey import ERROR
from ptq.numerics.grids import Float8, Int
from ptq.numerics.leaves import Leaf, Quantized

Tensors = dict[str, Tensor]
MATCHING: list[dict[str, Any]] = json.loads((GOLDEN / "target-matching.json").read_text())["cases"]
CHECKPOINTS = sorted(path.name for path in GOLDEN.iterdir() if (path / "config.json").is_file())
LAYER = "model.layers.1"
Q, K, OUT = (f"{LAYER}.self_attn.{name}_proj" for name in "qko")
DOWN, GATE, UP = (f"{LAYER}.mlp.{name}_proj" for name in ("down", "gate", "up"))
INWARD = [name.replace("1", i) for name in (OUT, DOWN) for i in "01"]
"""what is cut along its columns"""


def grouped(out: int, inputs: int) -> Quantized:
    leaf = channels(out, inputs)
    return replace(leaf, scale=leaf.scale.repeat(1, inputs // 32))


def channels(out: int, inputs: int, **how: Any) -> Quantized:
    return quantized(out, inputs, tiles="channel", **how)


MAKERS: dict[str, Callable[[str, int, int], Leaf]] = {
    "channel": lambda _, *shape: channels(*shape),
    "group": lambda _, *shape: grouped(*shape),
    "float8": lambda _, *shape: channels(*shape, grid=Float8()),
    "asymmetric": lambda _, *shape: channels(*shape, asymmetric=True),
    "gate apart": lambda name, *shape: (channels if "gate" in name else grouped)(*shape),
    "two formats": lambda name, *shape: channels(*shape, **({"grid": Float8()} if "mlp" in name else {})),
    "float8 groups": lambda _, *shape: quantized(*shape, grid=Float8()),
    "int8": lambda _, *shape: channels(*shape, grid=Int(8)),
}
FORMS = {"int8": "int-quantized"}


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`good("group")`: a checkpoint that ptq wrote, or one of another writer. Read only."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            base = tmp_path_factory.mktemp("check")
            source = base / "source"
            stock(llama_config()).save_pretrained(source)
            choose = MAKERS[kind]
            model = compressed(open_model(source), lambda n, shape: choose(n, *shape) if ".layers." in n else None)
            made[kind] = save(model, base / "good", format=FORMS.get(kind, "auto")).path
        return made[kind]

    return lambda kind: get(kind) if kind in MAKERS else GOLDEN / kind


def edited(source: Path, out: Path, tensors: Any = None, config: Any = None) -> Path:
    """A copy with other tensors or another config; edits are done in place."""
    shutil.copytree(source, out)
    if tensors is not None:
        held = load_file(out / "model.safetensors")
        tensors(held)
        save_file({n: t.contiguous() for n, t in held.items()}, out / "model.safetensors", {"format": "pt"})
    if config is not None:
        table = json.loads((out / "config.json").read_text())
        config(table)
        (out / "config.json").write_text(json.dumps(table))
    return out


class Case(NamedTuple):
    """How a good checkpoint is broken, and what is said of it."""

    kind: str
    rule: str
    about: str
    loaders: str
    tensors: Callable[[Tensors], Any] | None = None
    config: Callable[[dict[str, Any]], Any] | None = None
    tp: int = 1
    severity: str = ERROR
    also: tuple[str, ...] = ()
    """what else the same damage breaks"""
    says: str = ""
    """what its line has in it"""


def quantization(edit: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda table: edit(table["quantization_config"])


def scheme(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return quantization(lambda q: q["config_groups"]["group_0"]["weights"].update(changes))


def group(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return quantization(lambda q: q["config_groups"]["group_0"].update(changes))


def top(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return quantization(lambda q: q.update(changes))


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Any]:
    return lambda t: t.__setitem__(name, change(t[name]))


def first(value: float) -> Callable[[Tensor], Tensor]:
    """The same tensor with another first element."""

    def change(t: Tensor) -> Tensor:
        other = t.float().flatten()
        other[0] = value
        return other.view(t.shape).to(t.dtype)

    return change


def overlapped(q: dict[str, Any]) -> None:
    """A regex that comes before names which mean something else."""
    groups, downs = q["config_groups"], [DOWN.replace("1", i) for i in "01"]
    other = {**groups["group_0"]["weights"], "group_size": 64}
    groups["group_1"] = {**groups["group_0"], "targets": ["re:.*down_proj"], "weights": other}
    groups["group_2"] = {**groups["group_0"], "targets": downs}


def dense(*modules: str) -> Callable[[Tensors], Any]:
    """Modules of which the weight is stored as it is."""

    def edit(t: Tensors) -> None:
        for module in modules:
            shape = [int(n) for n in t.pop(f"{module}.weight_shape")]
            for part in ("weight_packed", "weight_scale", "weight_zero_point"):
                t.pop(f"{module}.{part}", None)
            t[f"{module}.weight"] = torch.randn(shape)

    return edit


def apart(q: dict[str, Any]) -> None:
    """The activations of attention's linears are rounded, and no others."""
    attention = q["config_groups"]["group_0"]
    q["config_groups"]["group_1"] = {**attention, "targets": ["re:.*mlp.*_proj$"], "input_activations": None}
    attention["targets"] = ["re:.*self_attn.*_proj$"]


def transformed(location: str) -> Callable[[dict[str, Any]], Any]:
    scheme = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": location}]}
    return top(transform_config={"config_groups": {"v": scheme}})


def refused(kind: str, about: str, says: str, tensors: Any = None, config: Any = None, **more: Any) -> Case:
    """What the reader refuses, and so the check says in its words."""
    return Case(kind, "unreadable", about, EVERY, tensors, config, says=says, **more)


BOTH, VLLM, TRANSFORMERS, EVERY = "vLLM and transformers", "vLLM", "transformers", "every reader"
G0 = "config_groups.group_0"
ZERO = torch.full((8, 2), -0x77777778, dtype=torch.int32)
"""zero points of 0, packed"""
ORDER = torch.arange(64, dtype=torch.int32).flip(0) // 32
LOCAL = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
CASES: dict[str, Case] = {
    "scale is missing": refused(
        "group", f"{Q}.weight", f"no tensor {Q}.weight_scale", lambda t: t.pop(f"{Q}.weight_scale")
    ),
    "norm is missing": refused(
        "group", "model.norm.weight", "no tensor model.norm.weight", lambda t: t.pop("model.norm.weight")
    ),
    "shape is missing": refused(
        "group", f"{Q}.weight", f"no tensor {Q}.weight_shape", lambda t: t.pop(f"{Q}.weight_shape")
    ),
    "shape below 1": refused(
        "group",
        f"{Q}.weight",
        "got [-3, 1], expected sizes above 0",
        put(f"{Q}.weight_shape", lambda t: torch.tensor([-3, 1])),
    ),
    "zero points of symmetric": Case(
        "group", "unexpected", f"{Q}.weight_zero_point", VLLM, lambda t: t.update({f"{Q}.weight_zero_point": ZERO})
    ),
    "column order": Case(
        "group", "unexpected", f"{Q}.weight_g_idx", BOTH, lambda t: t.update({f"{Q}.weight_g_idx": ORDER})
    ),
    "zero points above 0 of symmetric": refused(
        "group",
        Q,
        f"{Q}.weight_zero_point: got zero points, and its config says that there are none",
        lambda t: t.update({f"{Q}.weight_zero_point": torch.zeros_like(ZERO)}),
        also=("unexpected",),
    ),
    "column order of groups that are not there": refused(
        "group",
        Q,
        f"{Q}.weight_g_idx: got groups 0 to 9, expected 0 to",
        lambda t: t.update({f"{Q}.weight_g_idx": ORDER.clone().index_fill_(0, torch.tensor([3]), 9)}),
        also=("unexpected",),
    ),
    "a quotient that is no number": refused(
        "NVFP4A16",
        Q,
        f"{Q}.weight_scale: a scale is 0, negative, infinite or NaN",
        put(f"{Q}.weight_global_scale", lambda t: t * 1e-43),
        also=("fused-global-scale",),
    ),
    "activation scale": Case(
        "group", "unexpected", f"{Q}.input_scale", VLLM, lambda t: t.update({f"{Q}.input_scale": torch.ones(1)})
    ),
    "cache scale": Case(
        "group", "unexpected", f"{LAYER}.k_scale", VLLM, lambda t: t.update({f"{LAYER}.k_scale": torch.ones(1)})
    ),
    "a name that no module has": Case(
        "group",
        "unexpected",
        "mtp.weight",
        BOTH,
        lambda t: t.update({"mtp.weight": torch.ones(4, 4)}),
        severity="note",
    ),
    "codes of another type": refused(
        "group", f"{Q}.weight", f"{Q}.weight_packed: got torch.int64", put(f"{Q}.weight_packed", lambda t: t.long())
    ),
    "codes of another shape": refused(
        "group",
        f"{Q}.weight",
        f"{Q}.weight_packed: got torch.int32 (64, 7)",
        put(f"{Q}.weight_packed", lambda t: t[:, :-1]),
    ),
    "flat scales": Case(
        "channel", "scale-rank", f"{Q}.weight_scale", BOTH, put(f"{Q}.weight_scale", lambda t: t.flatten())
    ),
    "scale without dimensions": Case(
        "FP8", "scale-rank", f"{Q}.weight_scale", TRANSFORMERS, put(f"{Q}.weight_scale", lambda t: t.reshape(()))
    ),
    "status": Case(
        "group",
        "status",
        "quantization_status",
        TRANSFORMERS,
        config=quantization(lambda q: q.pop("quantization_status")),
    ),
    "no format": Case("group", "format", "format", VLLM, config=top(format=None)),
    "unknown format": Case("group", "format", "format", BOTH, config=top(format="marlin-24")),
    "no format of the group": Case(
        "group", "group-format", f"{G0}.format", BOTH, config=group(format=None), severity="note"
    ),
    "key of a scheme": Case("group", "unknown-key", f"{G0}.kernel", BOTH, config=group(kernel="x")),
    "key of weights": Case("group", "unknown-key", f"{G0}.weights.clip", BOTH, config=scheme(clip=1)),
    "ignore is null": Case(
        "group",
        "ignore-null",
        "ignore",
        BOTH,
        config=lambda c: (top(ignore=None)(c), group(targets=["re:.*layers"])(c)),
    ),
    "class in ignore": Case(
        "group",
        "ignore-class",
        "ignore: Embedding",
        VLLM,
        config=quantization(lambda q: q["ignore"].append("Embedding")),
    ),
    "sparsity": Case(
        "group", "sparsity", "sparsity_config.targets", VLLM, config=top(sparsity_config={"targets": ["Linear"]})
    ),
    "cache": Case(
        "group",
        "cache",
        "kv_cache_scheme",
        TRANSFORMERS,
        config=top(kv_cache_scheme={"num_bits": 8, "type": "float"}),
        severity="note",
    ),
    "tokens in the cache": Case(
        "group",
        "cache-kind",
        "kv_cache_scheme",
        VLLM,
        config=top(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}),
    ),
    "integers in the cache": Case(
        "group", "cache-kind", "kv_cache_scheme", VLLM, config=top(kv_cache_scheme={"num_bits": 8})
    ),
    "groups": refused("group", f"{Q}.weight", "groups of 48 do not divide 64 columns", config=scheme(group_size=48)),
    "no target": Case(
        "group", "untargeted", f"{OUT}.weight", BOTH, config=group(targets=["re:.*mlp", "re:.*[qkv]_proj"])
    ),
    "head by class": Case(
        "group",
        "head-by-class",
        "lm_head",
        VLLM,
        lambda t: t.update({f"lm_head.{p}": v for p, v in packed(t.pop("lm_head.weight")).items()}),
        quantization(lambda q: q["ignore"].clear()),
    ),
    "tied head": Case(
        "group",
        "tied-head",
        "lm_head",
        BOTH,
        lambda t: t.update({f"lm_head.{p}": v for p, v in packed(t.pop("lm_head.weight")).items()}),
        lambda c: (
            c.update(tie_word_embeddings=True),
            group(targets=["re:.*"])(c),
            quantization(lambda q: q["ignore"].clear())(c),
            quantization(lambda q: q["ignore"].append("model.embed_tokens"))(c),
        ),
    ),
    "copy of a tied head": Case(
        "group",
        "tied-head",
        "lm_head.weight",
        VLLM,
        config=lambda c: c.update(tie_word_embeddings=True),
        severity="note",
    ),
    "orders of matching": Case("group", "overlapping-targets", DOWN, VLLM, config=quantization(overlapped)),
    "one of a fused set in ignore": Case(
        "group",
        "fused-ignore",
        K,
        VLLM,
        dense(K),
        quantization(lambda q: q["ignore"].append(K)),
    ),
    "divisors": Case(
        "NVFP4A16",
        "fused-global-scale",
        f"{K}.weight_global_scale",
        VLLM,
        put(f"{K}.weight_global_scale", lambda t: t * 2),
    ),
    "groups over devices": Case("group", "group-straddles", f"{DOWN}.weight_scale", VLLM, tp=8, also=("heads",)),
    "words over devices": Case("channel", "word-straddles", f"{OUT}.weight_packed", VLLM, tp=16, also=("heads",)),
    "rows over devices": Case("channel", "shards", UP, VLLM, tp=3, also=("heads",)),
    "heads over devices": Case("FP8_DYNAMIC", "heads", "num_attention_heads", VLLM, tp=8),
    "zero points over devices": Case(
        "asymmetric",
        "zero-point-straddles",
        f"{Q}.weight_zero_point",
        VLLM,
        dense(*INWARD),
        quantization(lambda q: q["ignore"].extend(INWARD)),
        tp=16,
        also=("heads", "packed-zero-points"),
    ),
    "blocks over devices": Case(
        "FP8_BLOCK",
        "block-straddles",
        f"{Q}.weight_scale",
        VLLM,
        tp=2,
        also=("fused-blocks", "group-straddles"),
    ),
    "blocks of a fused set": Case("FP8_BLOCK", "fused-blocks", K, VLLM),
    "two schemes in a fused set": Case("gate apart", "fused-scheme", UP, VLLM),
    "one format for two": Case("two formats", "format", "format", BOTH, config=top(format="pack-quantized")),
    "no format for two": Case("two formats", "group-format", f"{G0}.format", BOTH, config=group(format=None)),
    "a format that does not hold it": refused(
        "group", f"{Q}.weight", "float of 4 bits in format pack-quantized", config=scheme(type="float")
    ),
    "no weights": Case(
        "group",
        "no-weights",
        "config_groups.x.weights",
        VLLM,
        config=quantization(lambda q: q["config_groups"].update(x={"targets": ["re:.*attn"], "format": "dense"})),
    ),
    "packed zero points": Case("W4A16_ASYM", "packed-zero-points", "model.layers.0.mlp.down_proj", TRANSFORMERS),
    "no kernel": Case("int8", "kernel", "model.layers.0.self_attn.q_proj", VLLM),
    "an embedding": Case(
        "group",
        "embedding",
        "model.embed_tokens",
        TRANSFORMERS,
        lambda t: t.update(
            {f"model.embed_tokens.{p}": v for p, v in packed(t.pop("model.embed_tokens.weight")).items()}
        ),
        group(targets=["Linear", "Embedding"]),
    ),
    "NaN in a scale": refused("group", f"{Q}.weight_scale", "got nan", put(f"{Q}.weight_scale", first(float("nan")))),
    "infinity in a norm": Case(
        "group", "values", "model.norm.weight", EVERY, put("model.norm.weight", first(float("inf")))
    ),
    "exponent byte 255": refused("MXFP4A16", f"{Q}.weight_scale", "got inf", put(f"{Q}.weight_scale", first(255))),
    "zero in a scale": refused(
        "group", f"{Q}.weight_scale", "got 0, expected numbers above 0", put(f"{Q}.weight_scale", first(0))
    ),
    "NaN in codes": Case("FP8", "values", f"{UP}.weight", EVERY, put(f"{UP}.weight", first(float("nan")))),
    "negative scale": refused("group", f"{Q}.weight_scale", "got -0.5", put(f"{Q}.weight_scale", first(-0.5))),
    **{
        f"{kind} divisor": refused(
            "NVFP4A16",
            f"{DOWN}.weight_global_scale",
            "expected numbers above 0",
            put(f"{DOWN}.weight_global_scale", change),
        )
        for kind, change in {"negative": torch.neg, "infinite": lambda t: t / 0, "zero": torch.zeros_like}.items()
    },
    "no scale of static inputs": refused(
        "FP8", f"{DOWN}.input_scale", "no tensor", lambda t: t.pop(f"{DOWN}.input_scale")
    ),
    "an order of columns": Case(
        "group", "column-order", f"{G0}.weights.actorder", BOTH, config=scheme(actorder="group")
    ),
    "transforms": Case("group", "transforms", "transform_config", TRANSFORMERS, config=transformed("input")),
    "transforms over devices": Case(
        "group", "engine-transforms", "transform_config", VLLM, config=transformed("output"), tp=2, also=("transforms",)
    ),
    "transforms of queries": Case(
        "group", "engine-transforms", "transform_config", VLLM, config=transformed("q_attn"), also=("transforms",)
    ),
    "sparsity is no table": Case("group", "sparsity", "sparsity_config.targets", VLLM, config=top(sparsity_config="x")),
    "tensors of another format": Case("group", "other-format", Q, BOTH, config=group(format="float-quantized")),
    "a dense weight that is targeted": Case("group", "not-compressed", f"{DOWN}.weight", BOTH, dense(DOWN)),
    "words of an old writer": Case(
        "W3A16", "old-packing", f"{Q}.weight_packed", BOTH, put(f"{Q}.weight_packed", lambda t: t.new_zeros(len(t), 13))
    ),
    "float8 in groups": Case("float8 groups", "kernel", "model.layers.0.self_attn.q_proj", VLLM),
    "a group without activations beside one with": Case(
        "W8A8",
        "unexpected",
        f"{UP}.input_scale",
        VLLM,
        lambda t: t.update({f"{UP}.input_scale": torch.ones(1)}),
        quantization(apart),
        also=("kernel",),
    ),
    "activation scale of a scheme that keeps none": Case(
        "W8A8", "unexpected", f"{Q}.input_scale", VLLM, lambda t: t.update({f"{Q}.input_scale": torch.ones(1)})
    ),
    "no divisor of inputs": refused(
        "NVFP4A16", f"{DOWN}.input_global_scale", "no tensor", config=group(input_activations=LOCAL)
    ),
    "zero in a scale of inputs": refused(
        "FP8", f"{DOWN}.input_scale", "got 0", put(f"{DOWN}.input_scale", torch.zeros_like)
    ),
    "scale of inputs of another shape": refused(
        "FP8", f"{DOWN}.input_scale", "got torch.float32 (3,)", put(f"{DOWN}.input_scale", lambda _: torch.ones(3))
    ),
    "no scale of static outputs": refused(
        "FP8", f"{DOWN}.output_scale", "no tensor", config=group(output_activations={"num_bits": 8, "type": "float"})
    ),
}


def packed(weight: Tensor) -> Tensors:
    """Parts of a compressed weight of that shape."""
    rows, columns = weight.shape
    return {
        "weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32),
        "weight_scale": torch.ones(rows, columns // 32),
        "weight_shape": torch.tensor([rows, columns]),
    }


@pytest.mark.parametrize("name", CASES)
def test_what_is_broken_is_found_and_nothing_else(name: str, good: Callable[[str], Path], tmp_path: Path) -> None:
    case = CASES[name]
    found = check(edited(good(case.kind), tmp_path / "bad", case.tensors, case.config), case.tp)
    meant = [each for each in found if each.rule == case.rule and each.severity == case.severity]
    assert case.about in [each.about for each in meant], found
    assert {each.loaders for each in meant} == {case.loaders}
    assert case.says in next(each.got for each in meant if each.about == case.about)
    errors = {each.rule for each in found if each.severity == ERROR}
    assert errors == ({case.rule, *case.also} if case.severity == ERROR else set())


def test_every_rule_is_broken_by_a_case() -> None:
    written = "".join(file.read_text() for file in Path(checking.__file__).parent.glob("check*.py"))
    rules = set(re.findall(r'Finding\(\s*[^,]+(?:\([^)]*\))?, "([a-z_-]+)"', written))
    elsewhere = {"activations", "bitmask", "replaced", "experts", "dense-experts", "experts-group"}
    # test_check_kernels.py, test_bitmask.py, test_writer.py, test_check_experts.py
    assert rules - {case.rule for case in CASES.values()} == elsewhere


@pytest.mark.parametrize("kind", ["channel", "group", "float8", "two formats"])
@pytest.mark.parametrize("tp", [1, 2])
def test_nothing_is_found_in_what_ptq_writes(kind: str, tp: int, good: Callable[[str], Path]) -> None:
    assert check(good(kind), tp) == []


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_transformers_takes_what_the_library_wrote_unless_zero_points_are_packed(name: str) -> None:
    errors = [each for each in check(GOLDEN / name) if each.severity == ERROR]
    assert {each.rule for each in errors if "transformers" in each.loaders} == (
        {"packed-zero-points"} if name == "W4A16_ASYM" else set()
    )
    assert not any(each.loaders == EVERY for each in errors)


def test_a_name_that_only_ends_like_a_scale_may_be_any_number(good: Callable[[str], Path], tmp_path: Path) -> None:
    extra = {"logit_scale": torch.tensor(-4.6), "model.norm_scale": torch.zeros(3)}
    found = check(edited(good("group"), tmp_path / "out", lambda t: t.update(extra)))
    assert {(each.about, each.rule, each.severity) for each in found} == {(n, "unexpected", "note") for n in extra}


def test_heads_of_keys_are_shared_or_repeated(tmp_path: Path) -> None:
    stock(llama_config(hidden_size=96, num_attention_heads=6, num_key_value_heads=3)).save_pretrained(tmp_path)
    assert check(tmp_path, 3) == check(tmp_path, 6) == []
    (found,) = check(tmp_path, 2)
    assert (found.about, found.rule, found.loaders) == ("num_key_value_heads", "heads", VLLM)


def test_one_head_of_keys_is_on_every_device(tmp_path: Path) -> None:
    """Its 8 rows are not cut, though there are 16 devices."""
    stock(llama_config(hidden_size=128, num_attention_heads=16, num_key_value_heads=1)).save_pretrained(
        tmp_path / "source"
    )
    model = compressed(open_model(tmp_path / "source"), lambda n, shape: channels(*shape) if ".layers." in n else None)
    assert check(save(model, tmp_path / "out").path, 16) == []


# Configs that make no sense


@pytest.mark.parametrize(
    "damage",
    [
        top(config_groups=5),
        top(config_groups={"W4A16": ["Linear"]}),
        top(transform_config={"config_groups": [1]}),
        top(format=["pack-quantized"]),
        scheme(symmetric=[]),
        group(weights="W4"),
        group(targets="Linear"),
        group(targets=5),
        group(format=[]),
    ],
)
def test_a_config_that_makes_no_sense_is_one_finding(
    damage: Callable[[dict[str, Any]], Any], good: Callable[[str], Path], tmp_path: Path
) -> None:
    (found,) = check(edited(good("group"), tmp_path / "out", config=damage))
    assert (found.rule, found.loaders) == ("unreadable", EVERY)
    with pytest.raises(BadInput) as caught:
        open_model(tmp_path / "out")
    assert str(caught.value) == found.got


def test_groups_that_are_null_are_none(good: Callable[[str], Path], tmp_path: Path) -> None:
    found = check(edited(good("FP8_DYNAMIC"), tmp_path / "out", config=top(config_groups=None)))
    assert {(each.rule, each.loaders) for each in found} == {("untargeted", BOTH)}


# Shards


def sharded(good: Path, out: Path) -> tuple[Path, dict[str, str]]:
    """In two shards, of which each has a half."""
    shutil.copytree(good, out)
    tensors = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    names, half = sorted(tensors), len(tensors) // 2
    files = {n: f"model-0000{1 + (i >= half)}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, out / file, {"format": "pt"})
    return out, files


def listed(directory: Path, files: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_a_tensor_that_the_index_does_not_list(good: Callable[[str], Path], tmp_path: Path) -> None:
    directory, files = sharded(good("group"), tmp_path / "out")
    listed(directory, files)
    assert check(directory) == []
    listed(directory, {n: f for n, f in files.items() if n != "model.norm.weight"})
    (found,) = check(directory)
    assert found.rule == "unreadable"
    assert "model.norm.weight" in found.got


def test_a_shard_that_is_missing(good: Callable[[str], Path], tmp_path: Path) -> None:
    directory, files = sharded(good("group"), tmp_path / "out")
    listed(directory, files)
    (directory / files["model.norm.weight"]).unlink()
    (found,) = check(directory)
    assert found.rule == "unreadable"
    assert files["model.norm.weight"] in found.got


# Orders of matching


@pytest.mark.parametrize("case", MATCHING, ids=[case["note"] for case in MATCHING])
def test_targets_are_chosen_as_loaders_choose_them(case: dict[str, Any]) -> None:
    targets, ignore = Targets(case["targets_in_config_order"]), Targets(case["ignore"])
    for row in case["compressed_tensors"]:
        classes = [row["class"], "Module"]
        ignored = ignore.library(row["module"], classes) is not None
        chosen = None if ignored else targets.library(row["module"], classes)
        assert chosen == row["winning_target"]
    for row in case["vllm"]:
        parent, _, name = row["module"].rpartition(".")
        shards = [f"{parent}.{shard}" for shard in FUSED.get(name, ())]
        ignored = ignore.vllm_ignores(row["module"], shards)
        chosen = None if ignored else targets.vllm(row["module"], row["class"], shards)
        if str(row["winning_target"]).startswith("ERROR"):
            assert ignored is None
        else:
            assert (ignored is not None, chosen) == (True, row["winning_target"])


# The command line and the writer


def test_the_command_prints_findings_and_a_summary(
    good: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--check", str(good("group"))]) == 0
    assert capsys.readouterr().out == "no errors, no notes\n"
    bad = edited(good("group"), tmp_path / "bad", CASES["zero points of symmetric"].tensors)
    assert main(["inspect", "--check", str(bad)]) == 1
    first_line, summary = capsys.readouterr().out.splitlines()
    assert first_line.startswith(f"error: {Q}.weight_zero_point: unexpected: got a tensor, expected none")
    assert summary == "1 error, no notes"
    assert main(["inspect", "--check", "--json", str(bad)]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["errors"] == 1
    assert result["findings"][0]["about"] == f"{Q}.weight_zero_point"
    assert main(["inspect", "--check", "--tp", "8", str(good("group"))]) == 1
    assert "group-straddles" in capsys.readouterr().out


def test_bad_input_is_no_finding(good: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--check", "nowhere"], ["--tp", "2", str(good("group"))]):
        assert main(["inspect", *args]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_writer_refuses_what_was_damaged_on_its_way_and_names_the_tensor(
    good: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = saving._write_config  # what comes between the shards and the check

    def damage(model: Any, writer: Any, directory: Path) -> None:
        rest(model, writer, directory)
        tensors = load_file(directory / "model.safetensors")
        save_file({n: t for n, t in tensors.items() if n != f"{Q}.weight_scale"}, directory / "model.safetensors")

    monkeypatch.setattr(saving, "_write_config", damage)
    with pytest.raises(BadInput, match=f"no tensor {Q}.weight_scale"):
        save(open_model(good("group")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_writer_notes_what_some_loaders_fail_at(tmp_path: Path, good: Callable[[str], Path]) -> None:
    saved = save(open_model(good("gate apart")), tmp_path / "out")
    assert list(saved.notes) == ["model.layers.0.mlp.up_proj"]
    assert "vLLM: fused-scheme" in saved.notes["model.layers.0.mlp.up_proj"]
    assert "(and 1 more)" in saved.notes["model.layers.0.mlp.up_proj"]
