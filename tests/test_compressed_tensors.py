"""Leaves against the tensors that stand for them: golden files, round trips, refusals; and the config that says how."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from checkpoints import CASES, GOLDEN, golden, quantized, same_bits
from ptq.errors import BadInput
from ptq.io.compressed_tensors import Stored, collected, zeroed
from ptq.io.frozen import frozen
from ptq.io.layouts import arguments, encoded
from ptq.io.quantization_config import Args, Quantizers, dump, parse
from ptq.io.safetensors import headers
from ptq.numerics.fits import quantize
from ptq.numerics.grids import Float8, Int
from ptq.numerics.leaves import Quantized, compressed, dense, nbytes

SIX = {"num_bits", "type", "symmetric", "strategy", "group_size", "dynamic"}
WHERE = Path("somewhere")


def config(scheme: dict[str, Any], version: str = "0.20.1", **more: Any) -> dict[str, Any]:
    group = {**scheme, "targets": ["Linear"], "input_activations": None}
    return {"quant_method": "compressed-tensors", "version": version, "config_groups": {"group_0": group}, **more}


def linear(_: str) -> list[str]:
    return ["Linear", "Module"]


def written(directory: Path, args: Args, parts: dict[str, torch.Tensor], name: str = "m") -> tuple[Any, dict[str, Any]]:
    """Tensors through a real file, and the configuration that goes with them."""
    save_file({f"{name}.{part}": t.contiguous() for part, t in parts.items()}, directory / "model.safetensors")
    return headers(directory), dump({Quantizers(args): [name]}, [])


# Golden files


@pytest.mark.parametrize(("file", "case"), CASES)
def test_golden_weights_decode_exactly(file: str, case: str) -> None:
    tensors, scheme, version = golden(file, case)
    parts = {f"m.{k.removeprefix('out/')}": t for k, t in tensors.items() if k.startswith("out/weight")}
    expected = tensors["x/decompressed_weight"].load() if "x/decompressed_weight" in tensors else None
    dtype = tensors["in/weight"].dtype if expected is None else expected.dtype
    leaf = collected(parts, config(scheme, version), linear, dtype, WHERE)["m.weight"]
    assert isinstance(leaf, Stored)
    assert leaf.shape == tensors["in/weight"].shape
    if expected is not None:
        assert torch.equal(dense(leaf), expected)
    if "x/quantized_values" in tensors:
        loaded = leaf.load()
        assert torch.equal(loaded.grid.decode(loaded.codes), tensors["x/quantized_values"].load().float())


@pytest.mark.parametrize(("file", "case"), [(f, c) for f, c in CASES if not ("legacy" in f or "naive" in f)])
def test_golden_weights_encode_to_the_same_bytes(file: str, case: str) -> None:
    tensors, scheme, _ = golden(file, case)
    out = {k.removeprefix("out/"): t for k, t in tensors.items() if k.startswith("out/weight")}
    entries = {f"m.{part}": t for part, t in out.items()}
    leaf = collected(entries, config(scheme), linear, tensors["in/weight"].dtype, WHERE)["m.weight"].load()
    weights = scheme["weights"]
    args, parts = encoded(leaf, file, "m")
    repeated = file == "pack-quantized" and weights["strategy"] == "tensor"
    assert args.strategy == ("channel" if repeated else weights["strategy"])
    assert (args.bits, args.kind, args.symmetric) == (weights["num_bits"], weights["type"], weights["symmetric"])
    assert args.group_size == weights["group_size"]
    assert parts.keys() == out.keys()
    for part, tensor in parts.items():
        if not (repeated and part in ("weight_scale", "weight_zero_point")):
            assert same_bits(tensor, out[part].load())


@pytest.mark.parametrize("case", ["dense_2x16_bf16", "dense_asym_4x16_f32", "dense_fp8_channel_2x16_f16"])
def test_golden_frozen_weights_have_their_scales_beside_them(case: str) -> None:
    tensors = {k: t.load() for k, t in headers(GOLDEN / "dense.safetensors").items() if k.startswith(f"{case}/")}
    out = {k.removeprefix(f"{case}/out/"): t for k, t in tensors.items() if "/out/" in k}
    scale, w = out["weight_scale"], out["weight"]
    grid = Float8() if "fp8" in case else Int(4)
    leaf = quantize(w, scale, out.get("weight_zero_point"), grid)
    args, parts = frozen(leaf, "m")
    assert args.format == "dense"
    assert dump({Quantizers(args): ["m"]}, [])["quantization_status"] == "frozen"
    assert parts.keys() == out.keys()
    assert torch.equal(parts["weight"], dense(leaf))
    assert all(same_bits(parts[part], t) for part, t in out.items() if part != "weight")


# Round trips


@st.composite
def leaves(draw: st.DrawFn) -> tuple[Quantized, str]:
    form = draw(st.sampled_from(["pack-quantized", "int-quantized", "float-quantized"]))
    grid = Float8() if form == "float-quantized" else Int(draw(st.integers(2, 8)))
    out, groups = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    tiles = draw(st.sampled_from(["tensor", "channel", "group"]))
    asymmetric = draw(st.booleans()) and form != "float-quantized"
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return quantized(out, 16 * groups, grid=grid, tiles=tiles, asymmetric=asymmetric, dtype=dtype), form


@given(leaves())
def test_reloaded_is_saved(tmp_path_factory: pytest.TempPathFactory, case: tuple[Quantized, str]) -> None:
    leaf, form = case
    args, parts = encoded(leaf, form, "m")
    entries, table = written(tmp_path_factory.mktemp("one"), args, parts)
    back = collected(entries, table, linear, leaf.dtype, WHERE)["m.weight"]
    assert compressed(back)
    assert (back.shape, back.dtype) == (leaf.shape, leaf.dtype)
    again = back.load()
    assert torch.equal(again.codes.float(), leaf.codes.float())
    assert torch.equal(dense(again), dense(leaf))
    assert (again.zero is None) == (leaf.zero is None)
    assert again.scale.dtype == leaf.scale.dtype
    assert nbytes(back) == sum(t.nbytes for t in parts.values())
    assert encoded(again, form, "m")[0] == args


@given(leaves())
def test_scales_are_never_flat_unless_there_is_one(case: tuple[Quantized, str]) -> None:
    args, parts = encoded(*case, "m")
    assert parts["weight_scale"].shape == ((1,) if args.strategy == "tensor" else parts["weight_scale"].shape[:2])
    assert ("weight_zero_point" in parts) == (not args.symmetric)


def test_a_stack_is_packed_expert_by_expert(tmp_path: Path) -> None:
    leaf = quantized(3, 4, 32)
    args, parts = encoded(leaf, "pack-quantized", "m")
    assert parts["weight_packed"].shape == (3, 4, 4)
    assert parts["weight_shape"].tolist() == [3, 4, 32]
    entries, table = written(tmp_path, args, parts)
    assert torch.equal(dense(collected(entries, table, linear, leaf.dtype, WHERE)["m.weight"]), dense(leaf))


def test_blocks_are_told_by_their_size() -> None:
    leaf = replace(quantized(8, 32, grid=Float8()), scale=torch.rand(2, 2) + 1, tile=(5, 16))
    args = arguments(leaf, "float-quantized")
    assert args is not None
    assert (args.strategy, args.block) == ("block", (5, 16))
    assert arguments(replace(leaf, tile=None), "float-quantized") is None  # neither channels nor groups
    assert arguments(replace(leaf, grid=Int(8)), "pack-quantized") is None


@pytest.mark.parametrize("asymmetric", [False, True])
def test_pruned_codes_stand_for_zero(asymmetric: bool) -> None:
    leaf, mask = quantized(8, 32, asymmetric=asymmetric), torch.rand(8, 32) < 0.5
    pruned = zeroed(leaf, mask)
    assert torch.equal(dense(pruned), dense(leaf).masked_fill(~mask, 0))
    assert torch.equal(pruned.codes[mask], leaf.codes[mask])


# Refusals


@pytest.mark.parametrize(
    ("leaf", "form"),
    [
        (quantized(4, 32, grid=Float8()), "pack-quantized"),
        (quantized(4, 32, grid=Float8()), "int-quantized"),
        (quantized(4, 32), "float-quantized"),
        (replace(quantized(4, 32), scale=torch.ones(4, 5)), "pack-quantized"),
        (replace(quantized(4, 32), scale=torch.ones(2, 2)), "pack-quantized"),
    ],
    ids=["float8 packed", "float8 as int", "int as float8", "ragged groups", "int blocks"],
)
def test_what_a_format_cannot_hold_is_refused_by_name(leaf: Quantized, form: str) -> None:
    assert arguments(leaf, form) is None
    with pytest.raises(BadInput, match=f"^a.b: .* cannot be stored as {form}"):
        encoded(leaf, form, "a.b")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("weight_packed", r"m\.weight: there is .* but no weight"),
        ("weight_scale", r"no tensor m\.weight_scale"),
        ("weight_zero_point", r"no tensor m\.weight_zero_point"),
        ("weight_shape", r"no tensor m\.weight_shape"),
    ],
)
def test_a_missing_part_is_named(tmp_path: Path, missing: str, message: str) -> None:
    args, parts = encoded(quantized(4, 32, asymmetric=True), "pack-quantized", "m")
    entries, table = written(tmp_path, args, {part: t for part, t in parts.items() if part != missing})
    with pytest.raises(BadInput, match=f"^somewhere: {message}"):
        collected(entries, table, linear, torch.float32, WHERE)


@pytest.mark.parametrize("change", [{"weight_shape": [4, 99]}, {"weight_shape": [5, 32]}])
def test_words_that_cannot_hold_the_shape_are_refused(tmp_path: Path, change: dict[str, list[int]]) -> None:
    args, parts = encoded(quantized(4, 32), "pack-quantized", "m")
    entries, table = written(tmp_path, args, {**parts, **{k: torch.tensor(v) for k, v in change.items()}})
    words = r"m\.weight_packed: got torch\.int32 \(4, 4\), expected torch\.int32 \(5, 4\)"
    with pytest.raises(BadInput, match=rf"m\.weight: groups of 16 do not divide 99|{words}"):
        collected(entries, table, linear, torch.float32, WHERE)


def test_a_weight_that_no_group_covers_is_told_by_its_tensors(tmp_path: Path) -> None:
    leaf = quantized(4, 32)
    entries, table = written(tmp_path, *encoded(leaf, "pack-quantized", "m"))
    silent = collected(entries, {**table, "ignore": ["m"]}, linear, torch.float32, WHERE)["m.weight"]
    assert torch.equal(dense(silent), dense(leaf))


def test_a_weight_that_nothing_tells_is_refused(tmp_path: Path) -> None:
    """Eight codes in one word may have one to four bits."""
    entries, table = written(tmp_path, *encoded(quantized(4, 8, tiles="channel"), "pack-quantized", "m"))
    with pytest.raises(BadInput, match="no config group says how"):
        collected(entries, {**table, "ignore": ["m"]}, linear, torch.float32, WHERE)


@pytest.mark.parametrize(
    ("weights", "form"),
    [
        ({"num_bits": 5, "type": "float", "strategy": "group", "group_size": 32}, "mxfp6-pack-quantized"),
        ({"num_bits": 8, "type": "float", "strategy": "token"}, "float-quantized"),
        ({"num_bits": 0, "type": "int", "strategy": "channel"}, "pack-quantized"),
        ({"num_bits": 16, "type": "int", "strategy": "channel"}, "int-quantized"),
    ],
)
def test_schemes_that_are_not_read(weights: dict[str, Any], form: str) -> None:
    with pytest.raises(BadInput, match=r"group_0: .* is not read"):
        parse(config({"weights": weights, "format": form}), WHERE)


def test_another_method_is_refused() -> None:
    with pytest.raises(BadInput, match="quantized by 'awq', which is not read"):
        parse({"quant_method": "awq", "bits": 4}, WHERE)


# The configuration


def test_activations_are_no_part_of_a_weight(tmp_path: Path) -> None:
    args, parts = encoded(quantized(4, 32, grid=Int(8), tiles="channel"), "int-quantized", "m")
    entries, table = written(tmp_path, args, {**parts, "input_scale": torch.ones(1)})
    table["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False}
    leaves_ = collected(entries, table, linear, torch.float32, WHERE)
    assert list(leaves_) == ["m.weight"]


def test_a_frozen_checkpoint_has_its_values_in_the_weight(tmp_path: Path) -> None:
    save_file({"m.weight": torch.ones(2, 4), "m.weight_scale": torch.ones(2, 1)}, tmp_path / "model.safetensors")
    table = config({"weights": {"num_bits": 4, "strategy": "channel"}}, quantization_status="frozen")
    leaves_ = collected(headers(tmp_path), table, linear, torch.float32, WHERE)
    assert list(leaves_) == ["m.weight"]
    assert torch.equal(dense(leaves_["m.weight"]), torch.ones(2, 4))


def test_what_is_not_compressed_stays_as_it_is(tmp_path: Path) -> None:
    args, parts = encoded(quantized(4, 32), "pack-quantized", "m")
    save_file(
        {"norm.weight": torch.ones(3), "m.bias": torch.ones(4), "weight": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    plain = headers(tmp_path)
    (tmp_path / "other").mkdir()
    entries, table = written(tmp_path / "other", args, parts)
    leaves_ = collected({**plain, **entries}, table, linear, torch.float32, WHERE)
    assert {name: leaves_[name] for name in plain} == plain
    assert leaves_.keys() == {*plain, "m.weight"}


def test_the_written_config_keeps_to_what_every_loader_takes() -> None:
    packed = Args("pack-quantized", 4, "int", True, "group", 64)
    table = dump({Quantizers(packed): ["a", "b"]}, ["lm_head"])
    group = table["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    assert group["weights"].keys() == SIX
    assert (table["format"], group["format"], table["ignore"]) == ("pack-quantized", "pack-quantized", ["lm_head"])
    assert table["quantization_status"] == "compressed"
    json.dumps(table)
    assert dump({Quantizers(packed): ["a"]}, [], by_class=False)["config_groups"]["group_0"]["targets"] == ["a"]


def test_several_schemes_are_told_apart_by_full_names() -> None:
    table = dump({Quantizers(Args("pack-quantized", b, "int", True, "channel")): [f"m{b}"] for b in range(2, 9)}, [])
    assert table["format"] == "pack-quantized"
    back = parse(table, WHERE)
    assert [back.args(f"m{b}", ["Linear"]).bits for b in range(2, 9)] == list(range(2, 9))  # type: ignore[union-attr]  # found
    mixed = dump(
        {
            Quantizers(Args("pack-quantized", 4, "int", True, "channel")): ["a"],
            Quantizers(Args("float-quantized", 8, "float", True, "tensor")): ["b"],
        },
        [],
    )
    assert mixed["format"] == "mixed-precision"
    assert {g["format"] for g in mixed["config_groups"].values()} == {"pack-quantized", "float-quantized"}


def test_group_names_sort_as_they_were_written() -> None:
    schemes = [Args("pack-quantized", 4, "int", True, "group", g) for g in range(1, 14)]
    groups = dump({Quantizers(args): [f"m{args.group_size}"] for args in schemes}, [])["config_groups"]
    assert list(groups) == sorted(groups)


@given(st.lists(st.sampled_from(["a.b", "re:a", "re:a.b$", "Linear", "Module", "c"]), min_size=1, unique=True))
def test_targets_are_tried_in_the_library_s_order(targets: list[str]) -> None:
    from compressed_tensors.utils.match import match_targets
    from torch import nn

    bits = {target: 2 + i for i, target in enumerate(targets)}
    groups = {f"g{b}": {"targets": [t], "weights": {"num_bits": b, "strategy": "channel"}} for t, b in bits.items()}
    mine = parse({"config_groups": groups, "format": "pack-quantized"}, WHERE).args("a.b", ["Linear", "Module"])
    theirs = match_targets("a.b", nn.Linear(1, 1), targets)
    assert (mine.bits if mine else None) == (bits[theirs[0]] if theirs else None)


@pytest.mark.parametrize("pattern", ["a.b", "re:a", "Linear"])
def test_ignore_beats_targets(pattern: str) -> None:
    groups = {"g": {"targets": ["a.b"], "weights": {"num_bits": 4, "strategy": "channel"}}}
    assert parse({"config_groups": groups, "ignore": [pattern]}, WHERE).args("a.b", ["Linear"]) is None
    assert parse({"config_groups": groups, "ignore": ["b", "re:b"]}, WHERE).args("a.b", ["Linear"]) is not None


def test_old_spellings_are_read() -> None:
    weights = {"num_bits": 8, "type": "FLOAT", "block_structure": "128x64", "strategy": "block"}
    nested = {"quantization_config": config({"weights": weights})}
    args = parse(nested, WHERE).groups[0].weights
    assert (args.kind, args.block) == ("float", (128, 64))
    inferred = {None: "tensor", -1: "channel", 32: "group"}
    for size, strategy in inferred.items():
        table = config({"weights": {"num_bits": 4, "group_size": size}}, version="0.9.dev")
        assert parse(table, WHERE).groups[0].weights.strategy == strategy
    assert parse(table, WHERE).version == (0, 9)


def test_the_two_layouts_of_odd_widths_are_told_by_words_then_by_version(tmp_path: Path) -> None:
    args, parts = encoded(quantized(3, 48, grid=Int(3), tiles="channel"), "pack-quantized", "m")
    entries, table = written(tmp_path, args, parts)  # 5 words in one layout and in the other
    for version, straddle in (("0.20.1", True), ("0.18.0", True), ("0.17.3", False), ("0.9", False)):
        leaf = collected(entries, {**table, "version": version}, linear, torch.float32, WHERE)["m.weight"]
        assert isinstance(leaf, Stored)
        assert leaf.straddle == straddle


# Shapes and types that do not fit


TILED = {
    "tensor": ("int-quantized", {"grid": Int(8), "tiles": "tensor"}),
    "channel": ("int-quantized", {"grid": Int(8), "tiles": "channel", "asymmetric": True}),
    "group": ("int-quantized", {"asymmetric": True}),
    "packed": ("pack-quantized", {"asymmetric": True}),
    "float8": ("float-quantized", {"grid": Float8(), "tiles": "channel"}),
}


@pytest.mark.parametrize("part", ["weight_scale", "weight_zero_point", "weight_shape", "weight"])
@pytest.mark.parametrize("kind", TILED)
def test_parts_that_do_not_fit_the_scheme_are_refused(kind: str, part: str, tmp_path: Path) -> None:
    form, how = TILED[kind]
    args, parts = encoded(quantized(8, 32, **how), form, "m")
    if part not in parts:
        return
    good = parts[part]
    entries, table = written(tmp_path, args, parts)
    assert dense(collected(entries, table, linear, torch.float32, WHERE)["m.weight"]).shape == (8, 32)
    wrong = [good.float().to(torch.int16), torch.cat([good, good])]
    wrong += [torch.cat([good, good], -1)] if good.ndim == 2 else []
    wrong += [good[:4].clone()] if len(good) == 8 else []
    for bad in wrong if part != "weight" else wrong[:1]:
        entries, table = written(tmp_path, args, {**parts, part: bad})
        with pytest.raises(BadInput, match=rf"model\.safetensors: m\.{part}: got .*expected") as error:
            collected(entries, table, linear, torch.float32, WHERE)
        assert "\n" not in str(error.value)


def test_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    args, parts = encoded(quantized(8, 32), "int-quantized", "m")
    entries, table = written(tmp_path, args._replace(group_size=20), parts)
    with pytest.raises(BadInput, match="groups of 20 do not divide 32 columns"):
        collected(entries, table, linear, torch.float32, WHERE)


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
def test_a_scale_that_is_no_number_is_refused_when_it_is_read(bad: float, tmp_path: Path) -> None:
    args, parts = encoded(quantized(8, 32), "pack-quantized", "m")
    parts["weight_scale"] = parts["weight_scale"].clone()
    parts["weight_scale"][3, 1] = bad
    leaf = collected(*written(tmp_path, args, parts), linear, torch.float32, WHERE)["m.weight"]
    with pytest.raises(BadInput, match=rf"model\.safetensors: m\.weight_scale: got {bad:g}, expected numbers above 0"):
        dense(leaf)


@pytest.mark.parametrize(
    "weights", [{"strategy": "group"}, {"strategy": "group", "group_size": 0}, {"strategy": "block"}]
)
def test_a_scheme_without_its_size_is_refused(weights: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"group_0: strategy .* expected sizes above 0"):
        parse(config({"weights": {"num_bits": 8, **weights}}), WHERE)


@pytest.mark.parametrize(
    "table",
    [
        {"config_groups": 7},
        {"config_groups": {"a": {"weights": 3}}},
        {"config_groups": {"a": {"weights": {"num_bits": "4"}}}},
        {"ignore": 7},
        {"ignore": "lm_head"},
        {"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": {}}}}},
        {"config_groups": {"a": {"weights": {"num_bits": 4, "zp_dtype": [1]}}}},
        {"ignore": [7]},
        {"ignore": ["re:("]},
    ],
    ids=str,
)
def test_a_malformed_config_is_one_line(table: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="somewhere: quantization_config is malformed") as caught:
        parse({"quant_method": "compressed-tensors", **table}, WHERE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [None, "", "unknown"])
def test_a_version_that_says_nothing_is_that_of_today(version: str | None) -> None:
    """Codes of 3, 5, 6 and 7 bits have been packed in another way before 0.18."""
    assert parse({"version": version}, WHERE).version == parse({}, WHERE).version >= (0, 18)
