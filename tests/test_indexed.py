"""Weights with a column order: golden files, what the indices mean, what a checkpoint makes of them, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from checkpoints import ALL, compressed, golden, quantized
from ptq.base import State
from ptq.errors import BadInput
from ptq.io.compressed_tensors import collected
from ptq.io.hub import load, open_model
from ptq.io.layouts import encoded
from ptq.io.quantization_config import Quantizers, dump
from ptq.io.safetensors import headers
from ptq.io.save import save
from ptq.numerics.grids import Int
from ptq.numerics.indexed import Indexed, simplest
from ptq.numerics.leaves import Leaf, Quantized, Sparse, dense, nbytes
from ptq.numerics.tiles import spread
from ptq.pipeline.report import format_name
from strategies import seeds

WHERE = Path("somewhere")
Q_PROJ = "model.layers.0.self_attn.q_proj"


def linear(_: str) -> list[str]:
    return ["Linear", "Module"]


def stored(directory: Path, leaf: Quantized, columns: torch.Tensor) -> Leaf:
    """The leaf that a file with these indices gives."""
    args, parts = encoded(leaf, "pack-quantized", "m")
    tensors = {f"m.{part}": t.contiguous() for part, t in {**parts, "weight_g_idx": columns}.items()}
    save_file(tensors, directory / "model.safetensors")
    return collected(headers(directory), dump({Quantizers(args): ["m"]}, []), linear, leaf.dtype, WHERE)["m.weight"]


@pytest.mark.parametrize(("file", "case"), [(f, c) for f, c in ALL if "gidx" in f])
def test_golden_weights_decode_exactly(file: str, case: str) -> None:
    tensors, scheme, version = golden(file, case)
    parts = {f"m.{k.removeprefix('out/')}": t for k, t in tensors.items() if k.startswith("out/")}
    config = {"version": version, "config_groups": {"group_0": {**scheme, "targets": ["Linear"]}}}
    leaf = collected(parts, config, linear, torch.float32, WHERE)["m.weight"]
    held = leaf.load()
    assert isinstance(held, Indexed)
    assert torch.equal(held.leaf.codes, tensors["x/quantized_values"].load())
    assert torch.equal(held.columns, tensors["out/weight_g_idx"].load())
    assert torch.equal(dense(leaf), tensors["x/decompressed_weight"].load())


@given(seeds, st.sampled_from(["tensor", "channel", "group"]), st.booleans(), st.integers(1, 5))
def test_every_column_uses_the_scale_that_it_names(seed: int, tiles: str, asymmetric: bool, rows: int) -> None:
    torch.manual_seed(seed)
    leaf = quantized(rows, 48, tiles=tiles, asymmetric=asymmetric, grid=Int(5), dtype=torch.bfloat16)
    columns = torch.randint(leaf.scale.shape[-1], (48,))
    got = dense(Indexed(leaf, columns))
    for c, group in enumerate(columns.tolist()):
        zero = None if leaf.zero is None else leaf.zero[:, [group]]
        one = Quantized(leaf.codes[:, [c]], leaf.scale[:, [group]], zero, leaf.grid, leaf.dtype)  # type: ignore[index]  # a tensor
        assert torch.equal(got[:, [c]], dense(one))


@given(seeds)
def test_sorting_columns_by_their_group_gives_plain_groups(seed: int) -> None:
    """What such a quantizer did: groups are runs of the sorted columns."""
    torch.manual_seed(seed)
    leaf, order = quantized(4, 64, asymmetric=True), torch.randperm(64)
    columns = torch.empty(64, dtype=torch.int64).scatter_(0, order, torch.arange(64) // 16)
    original = torch.empty_like(leaf.codes).index_copy_(1, order, leaf.codes)
    assert torch.equal(dense(Indexed(replace(leaf, codes=original), columns))[:, order], dense(leaf))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_that_say_nothing_are_left_out(tmp_path: Path, dtype: torch.dtype) -> None:
    leaf = quantized(4, 64)
    runs = torch.arange(64) // 16
    for columns in (runs, torch.full((64,), -1), torch.where(runs == 2, -1, runs), runs.flip(0) - 2):
        again = stored(tmp_path, leaf, columns.to(dtype)).load()
        assert isinstance(again, Quantized)
        assert torch.equal(dense(again), dense(leaf))


def test_indices_of_blocks_count_whole_tiles() -> None:
    leaf = replace(quantized(8, 32), scale=torch.rand(2, 2) + 1, tile=(5, 20))
    assert simplest(Indexed(leaf, torch.arange(32) // 20)) is leaf
    assert simplest(Indexed(leaf, torch.arange(32) // 16)) is not leaf


def test_a_file_s_indices_are_read_when_they_are_used(tmp_path: Path) -> None:
    leaf, columns = quantized(4, 64), (torch.arange(64) % 4).int()
    found = stored(tmp_path, leaf, columns)
    assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
    held = found.load()
    assert nbytes(held) == nbytes(leaf) + columns.nbytes
    assert format_name(held) == "int4 per group 16, columns in an order of their own"
    expected = leaf.codes * spread(leaf.scale, leaf.shape)[:, ::16][:, columns.long()]  # type: ignore[arg-type]  # a tensor
    assert torch.equal(dense(found), expected)


@pytest.mark.parametrize("group", [4, -2])
def test_indices_out_of_range_are_refused(tmp_path: Path, group: int) -> None:
    leaf = stored(tmp_path, quantized(4, 64), torch.full((64,), group, dtype=torch.int32))
    message = f"got groups {group} to {group}, expected 0 to 3 or all -1"
    with pytest.raises(BadInput, match=rf"model\.safetensors: m\.weight_g_idx: {message}$"):
        leaf.load()


@pytest.mark.parametrize("columns", [torch.zeros(63, dtype=torch.int32), torch.zeros(64)])
def test_indices_of_another_kind_are_refused_by_their_header(tmp_path: Path, columns: torch.Tensor) -> None:
    with pytest.raises(BadInput, match=r"m\.weight_g_idx: got .* expected torch.int32 or torch.int64 \(64,\)"):
        stored(tmp_path, quantized(4, 64), columns)


# Whole checkpoints


def test_a_checkpoint_with_indices_is_read_and_stored_dense(tmp_path: Path, tiny_llama: Path) -> None:
    choose = lambda name, shape: quantized(*shape) if ".layers." in name else None  # noqa: E731  # one line
    old = save(compressed(open_model(tiny_llama), choose), tmp_path / "old").path
    tensors = load_file(old / "model.safetensors")
    columns = (torch.arange(64) % 4).int()
    save_file({**tensors, f"{Q_PROJ}.weight_g_idx": columns}, old / "model.safetensors", {"format": "pt"})
    model = load(old)
    held = model.params[f"{Q_PROJ}.weight"].load()
    assert isinstance(held, Indexed)
    for form in ("auto", "pack-quantized", "int-quantized"):
        saved = save(model, tmp_path / form, format=form)
        assert "no loader of today reads columns in an order of their own" in saved.notes[f"{Q_PROJ}.weight"]
        back = load(saved.path)
        assert all(torch.equal(dense(back.params[name]), dense(leaf)) for name, leaf in model.params.items())
    assert save(model, tmp_path / "dense", format="dense").notes == {}


def test_indices_that_only_say_runs_cost_nothing_in_a_file(tmp_path: Path, tiny_llama: Path) -> None:
    source, name = open_model(tiny_llama), f"{Q_PROJ}.weight"
    leaf = quantized(*source.params[name].shape)
    runs = torch.arange(leaf.shape[-1]) // 16
    plain, indexed, sparse = (
        replace(source, state=State({**source.params, name: x}))
        for x in (leaf, Indexed(leaf, runs), Sparse(Indexed(leaf, runs.flip(0)), torch.rand(leaf.shape) < 0.5, None))
    )
    assert name not in save(indexed, tmp_path / "indexed").notes
    save(plain, tmp_path / "plain")
    files = [(tmp_path / which / "model.safetensors").read_bytes() for which in ("plain", "indexed")]
    assert files[0] == files[1]
    saved = save(sparse, tmp_path / "sparse")
    assert name in saved.notes
    assert torch.equal(dense(load(saved.path).params[name]), dense(sparse.params[name]))
