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
from ptq.io.survey import ERROR, Finding
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


BOTH, VLLM, TRANSFORMERS, EVERY = "vLLM and transformers", "vLLM", "transformers", "every reader"
G0 = "config_groups.group_0"
ZERO = torch.zeros(1, dtype=torch.int32)
LOCAL = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
CASES: dict[str, Case] = {
    "scale is missing": Case("group", "missing", f"{Q}.weight_scale", EVERY, lambda t: t.pop(f"{Q}.weight_scale")),
    "norm is missing": Case("group", "missing", "model.norm.weight", EVERY, lambda t: t.pop("model.norm.weight")),
    "shape is missing": Case("group", "missing", f"{Q}.weight_shape", EVERY, lambda t: t.pop(f"{Q}.weight_shape")),
    "zero points of symmetric": Case(
        "group", "unexpected", f"{Q}.weight_zero_point", VLLM, lambda t: t.update({f"{Q}.weight_zero_point": ZERO})
    ),
    "column order": Case(
        "group", "unexpected", f"{Q}.weight_g_idx", VLLM, lambda t: t.update({f"{Q}.weight_g_idx": ZERO})
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
    "codes of another type": Case(
        "group", "dtype", f"{Q}.weight_packed", EVERY, put(f"{Q}.weight_packed", lambda t: t.long())
    ),
    "codes of another shape": Case(
        "group", "shape", f"{Q}.weight_packed", EVERY, put(f"{Q}.weight_packed", lambda t: t[:, :-1])
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
    "another method": Case(
        "group", "method", "quantization_config.quant_method", EVERY, config=top(quant_method="fp8"), severity="note"
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
        "group", "cache", "kv_cache_scheme", TRANSFORMERS, config=top(kv_cache_scheme={"num_bits": 8}), severity="note"
    ),
    "groups": Case("group", "group-width", f"{Q}.weight_packed", EVERY, config=scheme(group_size=48)),
    "no target": Case(
        "group", "untargeted", f"{OUT}.weight", EVERY, config=group(targets=["re:.*mlp", "re:.*[qkv]_proj"])
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
    "groups over devices": Case("group", "group-straddles", f"{DOWN}.weight_scale", VLLM, tp=8),
    "words over devices": Case("channel", "word-straddles", f"{OUT}.weight_packed", VLLM, tp=16),
    "rows over devices": Case("channel", "shards", UP, VLLM, tp=3),
    "zero points over devices": Case(
        "asymmetric",
        "zero-point-straddles",
        f"{Q}.weight_zero_point",
        VLLM,
        dense(*INWARD),
        quantization(lambda q: q["ignore"].extend(INWARD)),
        tp=16,
        also=("packed-zero-points",),
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
    "a format that does not hold it": Case("group", "scheme", Q, EVERY, config=scheme(type="float")),
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
    "NaN in a scale": Case(
        "group", "values", f"{Q}.weight_scale", EVERY, put(f"{Q}.weight_scale", first(float("nan")))
    ),
    "infinity in a norm": Case(
        "group", "values", "model.norm.weight", EVERY, put("model.norm.weight", first(float("inf")))
    ),
    "exponent byte 255": Case("MXFP4A16", "values", f"{Q}.weight_scale", EVERY, put(f"{Q}.weight_scale", first(255))),
    "zero in a scale": Case(
        "group", "zero-scale", f"{Q}.weight_scale", EVERY, put(f"{Q}.weight_scale", first(0)), severity="note"
    ),
    "NaN in codes": Case("FP8", "values", f"{UP}.weight", EVERY, put(f"{UP}.weight", first(float("nan")))),
    "negative scale": Case("group", "values", f"{Q}.weight_scale", EVERY, put(f"{Q}.weight_scale", first(-0.5))),
    "negative divisor": Case(
        "NVFP4A16",
        "values",
        f"{DOWN}.weight_global_scale",
        EVERY,
        put(f"{DOWN}.weight_global_scale", lambda t: -t),
    ),
    "infinite divisor": Case(
        "NVFP4A16",
        "values",
        f"{DOWN}.weight_global_scale",
        EVERY,
        put(f"{DOWN}.weight_global_scale", lambda t: t / 0),
    ),
    "no scale of static inputs": Case(
        "FP8", "missing", f"{DOWN}.input_scale", EVERY, lambda t: t.pop(f"{DOWN}.input_scale")
    ),
    "no divisor of inputs": Case(
        "NVFP4A16", "missing", f"{DOWN}.input_global_scale", EVERY, config=group(input_activations=LOCAL)
    ),
    "zero in a scale of inputs": Case(
        "FP8", "zero-scale", f"{DOWN}.input_scale", EVERY, put(f"{DOWN}.input_scale", lambda t: t * 0)
    ),
    "zero divisor": Case(
        "NVFP4A16",
        "zero-scale",
        f"{DOWN}.weight_global_scale",
        EVERY,
        put(f"{DOWN}.weight_global_scale", lambda t: t * 0),
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
    errors = {each.rule for each in found if each.severity == ERROR}
    assert errors == ({case.rule, *case.also} if case.severity == ERROR else set())


def test_every_rule_is_broken_by_a_case() -> None:
    written = "".join(file.read_text() for file in Path(checking.__file__).parent.glob("check*.py"))
    rules = set(re.findall(r'Finding\(\s*[^,]+(?:\([^)]*\))?, "([a-z_-]+)"', written))
    assert rules - {case.rule for case in CASES.values()} == {
        "unreadable",
        "bitmask",
        "replaced",
    }  # below, in test_bitmask.py and in test_writer.py


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


def test_the_writer_refuses_damage_and_names_the_tensor(
    good: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Finding(f"{Q}.weight_scale", "values", "NaN", "finite values", EVERY)
    monkeypatch.setattr(saving, "check", lambda *_, **__: [found])
    with pytest.raises(BadInput, match=f"{Q}.weight_scale"):
        save(open_model(good("group")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_writer_notes_what_some_loaders_fail_at(tmp_path: Path, good: Callable[[str], Path]) -> None:
    saved = save(open_model(good("gate apart")), tmp_path / "out")
    assert list(saved.notes) == ["model.layers.0.mlp.up_proj"]
    assert "vLLM: fused-scheme" in saved.notes["model.layers.0.mlp.up_proj"]
    assert "(and 1 more)" in saved.notes["model.layers.0.mlp.up_proj"]
