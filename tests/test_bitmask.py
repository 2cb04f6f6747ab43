"""Pruned weights as bits and values: golden files both ways, round trips, whole checkpoints, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import ALL, compressed, golden, quantized, same_bits
from conftest import stock
from ptq.base import targets
from ptq.errors import BadInput
from ptq.io import bitmask
from ptq.io.bitmask import FORMATS, Masked, joined, sparse, structure, unfit
from ptq.io.check import check
from ptq.io.compressed_tensors import Stored, collected
from ptq.io.hub import load, open_model
from ptq.io.quantization_config import Quantizers, dump, parse
from ptq.io.records import record
from ptq.io.safetensors import OnDisk, headers
from ptq.io.save import PRUNED, save
from ptq.io.shards import SHARD_SIZE
from ptq.io.writer import Writer
from ptq.models.model import Model
from ptq.numerics.grids import Float8, Int
from ptq.numerics.leaves import Leaf, Quantized, Sparse, Transposed, dense, nbytes
from ptq.numerics.patterns import NM, Unstructured
from ptq.numerics.schemes import scheme
from ptq.pipeline.run import compress
from ptq.transforms.magnitude import magnitude
from ptq.transforms.rtn import rtn

BITMASK, SPARSE_24 = FORMATS
TWO_OF_FOUR = NM(keep=2, of=4)
WHERE = Path("somewhere")
PRUNED_CASES = [(file, case) for file, case in ALL if "sparse" in file]
Q_PROJ = "model.layers.0.self_attn.q_proj"


def linear(_: str) -> list[str]:
    return ["Linear", "Module"]


def on_disk(directory: Path, parts: Mapping[str, Tensor], owner: str = "m") -> dict[str, OnDisk]:
    """Tensors through a real file."""
    named = {f"{owner}.{part}": t.contiguous() for part, t in parts.items()}
    save_file(named, directory / "model.safetensors")
    return headers(directory)


def reloaded(directory: Path, parts: Mapping[str, Tensor], owner: str = "m") -> Masked:
    leaf = joined(on_disk(directory, parts, owner), WHERE)["m.weight"]
    assert isinstance(leaf, Masked)
    return leaf


def numbers(t: Tensor) -> Tensor:
    return t.float()  # float8 has no equality of its own


# Golden files


@pytest.mark.parametrize(("file", "case"), PRUNED_CASES)
def test_golden_weights_both_ways(file: str, case: str) -> None:
    tensors, _, _ = golden(file, case)
    out = {k.removeprefix("out/"): t for k, t in tensors.items() if k.startswith("out/") and "scale" not in k}
    leaf = joined({f"m.{part}": t for part, t in out.items()}, WHERE)["m.weight"]
    assert isinstance(leaf, Masked)
    assert nbytes(leaf) == sum(nbytes(t) for t in out.values())
    held = leaf.load()
    expected = tensors.get("x/decompressed_weight") or tensors["x/quantized_weight"]
    assert same_bits(held.values, expected.load())
    assert held.pattern == (None if file == BITMASK else TWO_OF_FOUR)
    args, parts = sparse(held, BITMASK if file == BITMASK else SPARSE_24, "m")
    assert args is None
    assert parts.keys() == out.keys()
    for part, tensor in parts.items():
        assert same_bits(tensor, out[part].load())


@pytest.mark.parametrize("case", [case for file, case in PRUNED_CASES if file == BITMASK])
def test_golden_values_tell_their_bits(case: str) -> None:
    """What the format's own compressor made of a dense matrix: a bit for all that is not 0."""
    tensors, _, _ = golden(BITMASK, case)
    weight = tensors["in/weight"].load()
    _, parts = sparse(Sparse(weight, torch.ones(weight.shape, dtype=torch.bool), None), BITMASK, "m")
    for part, tensor in parts.items():
        assert same_bits(tensor, tensors[f"out/{part}"].load())


@pytest.mark.parametrize("case", [case for file, case in PRUNED_CASES if "stacked" in file])
def test_golden_codes_are_those_of_a_quantized_leaf(case: str) -> None:
    tensors, scheme, version = golden("stacked-sparse24-fp8", case)
    entries = {f"m.{k.removeprefix('out/')}": t for k, t in tensors.items() if k.startswith("out/")}
    group = {"targets": ["Linear"], "weights": scheme["weights"]}
    table = {"version": version, "format": "float-quantized", "config_groups": {"group_0": group}}
    leaf = collected(joined(entries, WHERE), table, linear, torch.float32, WHERE)["m.weight"]
    assert isinstance(leaf, Stored)
    held = leaf.load()
    assert isinstance(held, Sparse)
    assert isinstance(held.values, Quantized)
    codes = tensors["x/quantized_weight"].load()
    assert same_bits(held.values.codes, codes)
    assert torch.equal(dense(leaf), codes.float() * tensors["out/weight_scale"].load())
    args, parts = sparse(held, SPARSE_24, "m")
    assert args is not None
    assert args.strategy == "channel"
    for part, tensor in parts.items():
        assert same_bits(tensor, tensors[f"out/{part}"].load())


# Round trips

_TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]


@st.composite
def pruned(draw: st.DrawFn, pattern: NM | None = None) -> Sparse:
    """Any pruned matrix: of every type, ragged, with empty rows, with zeros of both signs that the mask keeps."""
    columns = draw(st.integers(1, 6)) * 4 if pattern else draw(st.integers(1, 37))
    shape, dtype = (draw(st.integers(1, 5)), columns), draw(st.sampled_from(_TYPES))
    torch.manual_seed(draw(st.integers(0, 2**31 - 1)))
    values = torch.randn(shape) * draw(st.sampled_from([0.0, 1.0, 30.0]))
    values = torch.where(torch.rand(shape) < 0.1, torch.tensor(-0.0), values)
    mask = pattern.mask(torch.rand(shape)) if pattern else torch.rand(shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    if draw(st.booleans()) and not pattern:
        mask[draw(st.integers(0, shape[0] - 1))] = False
    return Sparse(values.clamp(-127, 127).to(dtype), mask, pattern)


def values_of(leaf: Sparse) -> Tensor:
    return numbers(leaf.values).masked_fill(~leaf.mask, 0)


@given(pruned())
def test_bits_and_values_are_the_matrix(tmp_path_factory: pytest.TempPathFactory, leaf: Sparse) -> None:
    _, parts = sparse(leaf, BITMASK, "m")
    found = reloaded(tmp_path_factory.mktemp("bits"), parts)
    assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
    again = found.load()
    assert torch.equal(numbers(again.values), values_of(leaf))
    assert torch.equal(again.mask, values_of(leaf) != 0)
    for part, tensor in sparse(again, BITMASK, "m")[1].items():
        assert same_bits(tensor, parts[part])


@given(pruned(TWO_OF_FOUR))
def test_two_of_four_is_the_matrix_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, leaf: Sparse) -> None:
    _, parts = sparse(leaf, SPARSE_24, "m")
    assert parts["compressed"].shape == (leaf.shape[0], leaf.shape[1] // 2)
    again = reloaded(tmp_path_factory.mktemp("two"), parts).load()
    assert torch.equal(again.mask, leaf.mask)
    assert again.pattern == TWO_OF_FOUR
    assert same_bits(again.values[again.mask], leaf.values[leaf.mask])
    assert torch.equal(numbers(again.values), values_of(leaf))


@pytest.mark.parametrize("pattern", [NM(1, 4), None])
def test_a_mask_of_fewer_bits_is_filled_up_to_two_of_four(pattern: NM | None, tmp_path: Path) -> None:
    mask = NM(1, 4).mask(torch.rand(3, 16))
    leaf = Sparse(torch.randn(3, 16), mask, pattern)
    again = reloaded(tmp_path, sparse(leaf, SPARSE_24, "m")[1]).load()
    assert torch.equal(dense(again), dense(leaf))
    assert not bool((mask & ~again.mask).any())


def test_names_of_the_first_writers_are_read(tmp_path: Path) -> None:
    leaf = Sparse(torch.randn(3, 10), torch.rand(3, 10) < 0.5, None)
    again = reloaded(tmp_path, sparse(leaf, BITMASK, "m")[1], "m.weight").load()
    assert torch.equal(dense(again), dense(leaf))


def test_a_dense_matrix_is_never_taken_for_a_pruned_one(tmp_path: Path) -> None:
    weight = torch.zeros(2, 8)
    entries = on_disk(tmp_path, {"weight": weight, "shape": torch.tensor([2, 8]), "compressed": torch.ones(2)})
    assert joined(entries, WHERE) == entries
    (tmp_path / "other").mkdir()
    alone = on_disk(tmp_path / "other", {"bitmask": torch.zeros(2, dtype=torch.uint8), "weight": weight})
    assert joined(alone, WHERE) == alone


@pytest.mark.parametrize("tiles", ["tensor", "channel", "group"])
@pytest.mark.parametrize("grid", [Int(8), Int(4), Float8()])
@pytest.mark.parametrize("form", FORMATS)
def test_codes_are_kept_with_their_scales(form: str, grid: Any, tiles: str, tmp_path: Path) -> None:
    leaf = Sparse(quantized(8, 32, grid=grid, tiles=tiles), TWO_OF_FOUR.mask(torch.rand(8, 32)), TWO_OF_FOUR)
    args, parts = sparse(leaf, form, "m")
    assert args is not None
    table = dump({Quantizers(args): ["m"]}, [], sparsity=bitmask.config(form, {"m": (1, 2)}))
    found = collected(joined(on_disk(tmp_path, parts), WHERE), table, linear, leaf.dtype, WHERE)["m.weight"]
    again = found.load()
    assert isinstance(again, Sparse)
    assert torch.equal(dense(found), dense(leaf))
    assert again.pattern == (TWO_OF_FOUR if form == SPARSE_24 else None)
    silent = collected(joined(headers(tmp_path), WHERE), {**table, "ignore": ["m"]}, linear, leaf.dtype, WHERE)
    if grid != Int(4):  # tensors alone do not say that codes of 8 bits are small
        assert torch.equal(dense(silent["m.weight"]), dense(leaf))


def test_codes_with_zero_points_are_codes_and_no_mask(tmp_path: Path) -> None:
    """A stacked file of another writer: what is not there is a code of 0, which is not a weight of 0."""
    plain = quantized(4, 32, grid=Int(8), tiles="channel", asymmetric=True)
    inner = replace(plain, codes=plain.codes.where(torch.rand(4, 32) < 0.5, 0))
    mask = inner.codes != 0
    scheme = {"num_bits": 8, "strategy": "channel", "symmetric": False}
    parts = sparse(Sparse(inner.codes, mask, None), BITMASK, "m")[1]
    more = {"weight_scale": inner.scale, "weight_zero_point": inner.zero}
    table = {"format": "int-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": scheme}}}
    entries = joined(on_disk(tmp_path, {**parts, **more}), WHERE)  # type: ignore[dict-item]  # tensors
    found = collected(entries, table, linear, torch.float32, WHERE)["m.weight"]
    assert isinstance(found.load(), Quantized)
    assert torch.equal(dense(found), dense(inner))


# Refusals

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
BAD: dict[str, tuple[str, Change, str]] = {
    "offsets": (BITMASK, lambda p: {"row_offsets": p["row_offsets"] + 1}, "m.row_offsets: got offsets that disagree"),
    "count of offsets": (BITMASK, lambda p: {"row_offsets": p["row_offsets"][:2]}, r"m.row_offsets: got .*\(2,\)"),
    "too few values": (
        BITMASK,
        lambda p: {"compressed": p["compressed"][:-1]},
        "m.compressed: got 11 values, expected 12",
    ),
    "too many values": (BITMASK, lambda p: {"compressed": p["compressed"].repeat(2)}, "m.compressed: got 24 values"),
    "bits beyond": (BITMASK, lambda p: {"bitmask": p["bitmask"] | 128}, "m.bitmask: got bits beyond the 12 columns"),
    "type of bits": (
        BITMASK,
        lambda p: {"bitmask": p["bitmask"].char()},
        r"m.bitmask: got torch.int8 \(3, 2\), expected",
    ),
    "width of bits": (
        BITMASK,
        lambda p: {"bitmask": p["bitmask"][:, :1]},
        r"m.bitmask: got torch.uint8 \(3, 1\), expected",
    ),
    "type of values": (BITMASK, lambda p: {"compressed": p["compressed"].long()}, "m.compressed: got torch.int64"),
    "type of offsets": (
        BITMASK,
        lambda p: {"row_offsets": p["row_offsets"].float()},
        "m.row_offsets: got torch.float32",
    ),
    "shape": (BITMASK, lambda _: {"shape": torch.tensor([3, -12])}, r"m.shape: got \[3, -12\], expected sizes above 0"),
    "shape of three": (BITMASK, lambda _: {"shape": torch.tensor([1, 3, 12])}, r"m.shape: got torch.int64 \(3,\)"),
    "other shape": (BITMASK, lambda _: {"shape": torch.tensor([4, 12])}, r"m.bitmask: got .*, expected .* \(4, 2\)"),
    "three of four": (SPARSE_24, lambda p: {"bitmask": p["bitmask"] | 7}, "m.bitmask: got groups of four with other"),
    "width of pairs": (SPARSE_24, lambda p: {"compressed": p["compressed"][:, 1:]}, r"m.compressed: got .*\(3, 5\)"),
    "ragged groups": (
        SPARSE_24,
        lambda p: {"shape": torch.tensor([3, 10]), "compressed": p["compressed"][:, 1:]},
        r"m.compressed: got two of every four for 10 columns",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_damage_is_named_in_one_line(what: str, tmp_path: Path) -> None:
    form, change, message = BAD[what]
    mask = (
        torch.tensor([1, 1, 0, 0] * 3, dtype=torch.bool).expand(3, 12)
        if form == SPARSE_24
        else (torch.arange(36) % 3 == 0).view(3, 12)
    )
    parts = sparse(Sparse(torch.rand(3, 12) + 1, mask, None), form, "m")[1]
    entries = on_disk(tmp_path, {**parts, **change(parts)})
    with pytest.raises(BadInput, match=rf"model\.safetensors: (?:{message})") as error:
        joined(entries, WHERE)["m.weight"].load()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["shape", "compressed", "row_offsets"])
def test_a_missing_part_is_named(missing: str, tmp_path: Path) -> None:
    parts = sparse(Sparse(torch.rand(3, 12), torch.ones(3, 12).bool(), None), BITMASK, "m")[1]
    entries = on_disk(tmp_path, {part: t for part, t in parts.items() if part != missing})
    with pytest.raises(BadInput, match=rf"^somewhere: no tensor m\.{missing}; "):
        joined(entries, WHERE)


def test_a_weight_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    parts = sparse(Sparse(torch.rand(3, 12), torch.ones(3, 12).bool(), None), BITMASK, "m")[1]
    entries = on_disk(tmp_path, {**parts, "weight": torch.ones(3, 12)})
    with pytest.raises(BadInput, match=r"^somewhere: m\.weight is there dense and as bits"):
        joined(entries, WHERE)


@pytest.mark.parametrize("shape", [(3, 12), (3, 10)])
def test_what_is_not_two_of_four_is_refused_by_name(shape: tuple[int, int]) -> None:
    leaf = Sparse(torch.rand(shape), torch.ones(shape, dtype=torch.bool), None)
    with pytest.raises(BadInput, match=r"^a\.b: is not 2 of 4 sparse and cannot be stored as sparse-24-bitmask"):
        sparse(leaf, SPARSE_24, "a.b")


def test_marlin_24_is_refused_by_name() -> None:
    table = {"format": "marlin-24", "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}}
    with pytest.raises(BadInput, match=r"^somewhere: group_0: format marlin-24 is not read; "):
        parse(table, WHERE)


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (torch.ones(2, 4), "it is not sparse"),
        (Transposed(torch.ones(2, 4)), "it is not sparse"),
        (Sparse(quantized(2, 16, asymmetric=True), torch.ones(2, 16).bool(), None), "with zero points"),
        (Sparse(replace(quantized(4, 32), scale=torch.ones(4, 5)), torch.ones(4, 32).bool(), None), "no format"),
    ],
)
def test_what_has_no_bits_says_why(leaf: Leaf, reason: str) -> None:
    assert reason in unfit(leaf, "sparse-bitmask")


# Whole checkpoints


def pruned_model(directory: Path, quantize: bool) -> Model:
    """Linears of the attention are 2 of 4 sparse, or codes that are."""

    def choose(name: str, shape: torch.Size) -> Leaf | None:
        if "self_attn" not in name:
            return None
        values = quantized(*shape, grid=Int(8), tiles="channel") if quantize else 0.1 * torch.randn(shape)
        return Sparse(values, TWO_OF_FOUR.mask(torch.rand(shape)), TWO_OF_FOUR)

    return compressed(open_model(directory), choose)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_of_bits_is_the_same_model(form: str, quantize: bool, tmp_path: Path, tiny_llama: Path) -> None:
    model = pruned_model(tiny_llama, quantize)
    saved = save(model, tmp_path / "first", format=form)
    assert not saved.notes.keys() & model.params.keys()
    assert "no loader of today reads these" in saved.notes[f"{Q_PROJ}.compressed"]
    assert {f.about for f in check(saved.path) if f.rule == "bitmask"} == {
        f"{n.removesuffix('.weight')}.compressed" for n in model.params if "self_attn" in n
    }
    first = load(saved.path)
    for name, leaf in model.params.items():
        assert torch.equal(dense(first.params[name]), dense(leaf))
    assert isinstance(first.params[f"{Q_PROJ}.weight"].load(), Sparse)
    again = save(first, tmp_path / "again", format=form).path
    tensors = [load_file(path / "model.safetensors") for path in (saved.path, again)]
    assert tensors[0].keys() == tensors[1].keys()
    assert {f"{Q_PROJ}.{part}" for part in ("shape", "compressed", "bitmask")} <= tensors[0].keys()
    assert f"{Q_PROJ}.weight" not in tensors[0]
    assert all(same_bits(t, tensors[1][name]) for name, t in tensors[0].items())


def test_the_config_says_what_the_bits_are(tmp_path: Path, tiny_llama: Path) -> None:
    model = pruned_model(tiny_llama, quantize=False)
    save(model, tmp_path / "out", format=SPARSE_24)
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    sparsity = quantization["sparsity_config"]
    assert set(sparsity.pop("targets")) == {n.removesuffix(".weight") for n in model.params if "self_attn" in n}
    assert sparsity == {"format": SPARSE_24, "ignore": [], "global_sparsity": 0.5, "sparsity_structure": "2:4"}
    assert (quantization["format"], quantization["config_groups"]) == ("dense", {})


def test_bits_are_told_by_tensors_and_not_by_a_config(tmp_path: Path, tiny_llama: Path) -> None:
    out = save(pruned_model(tiny_llama, quantize=False), tmp_path / "out", format=BITMASK).path
    config = json.loads((out / "config.json").read_text())
    silent = {key: value for key, value in config.items() if key != "quantization_config"}
    (out / "config.json").write_text(json.dumps(silent))
    assert isinstance(load(out).params[f"{Q_PROJ}.weight"].load(), Sparse)


def test_zeros_are_stored_unless_asked_and_named_where_loaders_pass_over_them(tmp_path: Path, tiny_llama: Path) -> None:
    model = pruned_model(tiny_llama, quantize=True)
    saved = save(model, tmp_path / "out")
    config = json.loads((saved.path / "config.json").read_text())
    assert config["quantization_config"]["sparsity_config"] == {}
    assert config[PRUNED] == {"2:4": [n.removesuffix(".weight") for n in model.params if "self_attn" in n]}
    again = save(load(saved.path), tmp_path / "again").path
    assert json.loads((again / "config.json").read_text()) == config
    first, second = (load_file(path / "model.safetensors") for path in (saved.path, again))
    assert all(same_bits(t, second[name]) for name, t in first.items())
    held = save(load(save(model, tmp_path / "bits", format=SPARSE_24).path), tmp_path / "auto").path
    assert json.loads((held / "config.json").read_text())[PRUNED] == config[PRUNED]
    assert "bitmask" not in "".join(headers(held))


def halved(values: Leaf) -> Sparse:
    return Sparse(values, TWO_OF_FOUR.mask(torch.rand(values.shape)), TWO_OF_FOUR)


UNFIT: dict[str, tuple[Callable[[torch.Size], Leaf], Sequence[str], str]] = {
    "quantized": (lambda s: quantized(*s), tuple(FORMATS), "it is not sparse"),
    "with zero points": (lambda s: halved(quantized(*s, asymmetric=True)), tuple(FORMATS), "with zero points"),
    "of another grid": (lambda s: quantized(*s), ("float-quantized",), "int4"),
}


@pytest.mark.parametrize("form", ["frozen", "pack-quantized", "nvfp4-pack-quantized"])
def test_a_format_of_codes_for_a_model_that_is_only_pruned_is_refused(
    form: str, tmp_path: Path, tiny_llama: Path
) -> None:
    with pytest.raises(BadInput, match=f"has no quantized weights to store as {form}"):
        save(pruned_model(tiny_llama, quantize=False), tmp_path / "out", format=form)


@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind, (_, forms, _) in UNFIT.items() for form in forms])
def test_what_a_format_cannot_hold_is_refused_by_name(kind: str, form: str, tmp_path: Path, tiny_llama: Path) -> None:
    """What would lose codes or bits in the format that is asked for is not stored; `auto` takes each as it is."""
    make, _, reason = UNFIT[kind]
    model = compressed(open_model(tiny_llama), lambda name, shape: make(shape) if Q_PROJ in name else None)
    with pytest.raises(BadInput, match=rf"^{Q_PROJ}\.weight: .*{reason}") as caught:
        save(model, tmp_path / "out", format=form)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert f"{Q_PROJ}.weight" not in save(model, tmp_path / "auto").notes


def said(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A checkpoint whose config says something else of what is pruned."""
    config = json.loads((path / "config.json").read_text())
    config[PRUNED] = change(config[PRUNED])
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("pattern", [NM(2, 4), NM(4, 8), Unstructured(0.5)])
def test_what_was_pruned_in_one_run_stays_so_in_the_next(
    pattern: NM | Unstructured, tmp_path: Path, tiny_llama: Path
) -> None:
    once = compress(open_model(tiny_llama), None, targets("re:.*self_attn", magnitude(pattern)))
    first = save(once, tmp_path / "first").path
    kept = load(first).params[f"{Q_PROJ}.weight"].load()
    assert isinstance(kept, Sparse)
    assert kept.pattern == (pattern if isinstance(pattern, NM) else None)
    assert not bool(((dense(kept) != 0) & ~kept.mask).any())
    twice = compress(load(first), None, targets("re:.*self_attn", rtn(scheme("W8A16_ASYM", group_size=-1))))
    second = save(twice, tmp_path / "second").path
    quantized_ = dense(load(second).params[f"{Q_PROJ}.weight"])
    assert not bool(quantized_[~kept.mask].any())
    assert bool(quantized_.any())
    tables = [json.loads((path / "config.json").read_text())[PRUNED] for path in (first, second)]
    assert tables[0] == tables[1]


def test_what_is_stored_the_other_way_round_is_pruned_along_its_inputs(tmp_path: Path) -> None:
    from transformers import GPT2Config

    stock(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16)).save_pretrained(
        tmp_path / "source"
    )
    once = compress(open_model(tmp_path / "source"), None, targets("re:.*c_attn", magnitude(NM(2, 4))))
    first = save(once, tmp_path / "first").path
    leaf = load(first).params["transformer.h.0.attn.c_attn.weight"].load()
    assert isinstance(leaf, Transposed)
    assert bool((leaf.leaf.mask.unflatten(-1, (-1, 4)).sum(-1) == 2).all())
    second = save(load(first), tmp_path / "second").path
    tables = [json.loads((path / "config.json").read_text()) for path in (first, second)]
    assert tables[0] == tables[1]
    assert list(tables[0][PRUNED]) == ["2:4"]


def test_a_mask_is_completed_to_its_pattern_always_alike(tmp_path: Path, tiny_llama: Path) -> None:
    """Zeros among what is kept are zeros of the file like any others."""
    scarce = lambda _, shape: Sparse(torch.eye(*shape), TWO_OF_FOUR.mask(torch.eye(*shape)), TWO_OF_FOUR)  # noqa: E731
    path = save(
        compressed(open_model(tiny_llama), lambda n, s: scarce(n, s) if Q_PROJ in n else None), tmp_path / "out"
    ).path
    leaf = load(path).params[f"{Q_PROJ}.weight"].load()
    assert torch.equal(leaf.mask, TWO_OF_FOUR.mask(torch.eye(*leaf.shape)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda told: {"1:4": told["2:4"]}, r"q_proj\.weight: got more than 1 of 4 that are not 0"),
        (lambda told: {"2:4": ["nowhere"]}, r"weight_sparsity: there is no matrix nowhere\.weight"),
        (lambda told: {"2:7": told["2:4"]}, r"weight_sparsity: .* has \d+ columns, which 7"),
        (lambda told: {"many": told["2:4"]}, "weight_sparsity is malformed"),
        (lambda told: ["2:4"], "weight_sparsity is malformed"),
        (lambda told: {"2:4": 3}, "weight_sparsity is malformed"),
    ],
)
def test_what_is_said_of_zeros_and_is_not_so_is_refused(
    change: Any, message: str, tmp_path: Path, tiny_llama: Path
) -> None:
    path = said(save(pruned_model(tiny_llama, quantize=False), tmp_path / "out").path, change)
    with pytest.raises(BadInput, match=message) as caught:
        dense(load(path).params[f"{Q_PROJ}.weight"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", FORMATS)
def test_a_run_is_written_as_bits(form: str, tmp_path: Path, tiny_llama: Path) -> None:
    run = compress(open_model(tiny_llama), None, magnitude(NM(2, 4)))
    saved = save(run, tmp_path / "out", format=form)
    again = load(saved.path)
    assert isinstance(again.params[f"{Q_PROJ}.weight"].load(), Sparse)
    whole = compress(open_model(tiny_llama), None, magnitude(NM(2, 4))).model
    for name, leaf in whole.params.items():
        assert torch.equal(dense(again.params[name]), dense(leaf))
    assert not saved.notes.keys() & whole.params.keys()


def test_a_checkpoint_of_bits_is_quantized_within_its_mask(tmp_path: Path, tiny_llama: Path) -> None:
    first = save(pruned_model(tiny_llama, quantize=False), tmp_path / "first", format=SPARSE_24).path
    model = compress(load(first), None, targets("re:.*self_attn", rtn(scheme("W8A16", group_size=-1)))).model
    back = load(save(model, tmp_path / "stacked", format=SPARSE_24).path)
    leaf = back.params[f"{Q_PROJ}.weight"].load()
    assert isinstance(leaf, Sparse)
    assert isinstance(leaf.values, Quantized)
    assert torch.equal(leaf.mask, load(first).params[f"{Q_PROJ}.weight"].load().mask)
    with pytest.raises(BadInput, match=f"^{Q_PROJ}.* is quantized already"):
        compress(back, None, targets("re:.*q_proj", rtn(scheme("W4A16", group_size=-1))))


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_so_far_is_read_by_its_records(
    form: str, quantize: bool, tmp_path: Path, tiny_llama: Path
) -> None:
    model = pruned_model(tiny_llama, quantize)
    writer = Writer(model, tmp_path, form, SHARD_SIZE)
    writer.add(model.params)
    writer.sync()
    for r in (record(json.loads(json.dumps(r))) for r in writer.records):
        leaf = r.leaf(tmp_path)
        assert torch.equal(dense(leaf), dense(model.params[r.name]))
        assert r.nbytes == nbytes(leaf) - 16 * ("shape" in r.parts)
    writer.abort()


def test_a_leaf_of_another_pattern_is_refused_by_name(tmp_path: Path, tiny_llama: Path) -> None:
    half = lambda name, shape: Sparse(torch.rand(shape), torch.rand(shape) < 0.9, None) if "q_proj" in name else None  # noqa: E731  # one line
    with pytest.raises(BadInput, match=rf"^{Q_PROJ}\.weight: is not 2 of 4 sparse"):
        save(compressed(open_model(tiny_llama), half), tmp_path / "out", format=SPARSE_24)
    assert list(tmp_path.iterdir()) == []


def test_structures_are_spelled_as_configs_do() -> None:
    mask = torch.ones(2, 4, dtype=torch.bool)
    leaves = [Sparse(mask.float(), mask, pattern) for pattern in (NM(4, 8), None)]
    assert [structure(leaf) for leaf in (*leaves, Transposed(leaves[0]), mask.float())] == [
        "4:8",
        "unstructured",
        "4:8",
        "",
    ]
