"""Divisors of weights that engines compute as one: made the same where no value changes, told where they differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptq
from conftest import llama_config, stock
from ptq.base import State
from ptq.io.divisors import shared
from ptq.numerics.fits import fit, nearest
from ptq.numerics.grids import Float8
from ptq.numerics.leaves import Quantized, Scales, Sparse, dense
from ptq.numerics.schemes import scheme
from test_naming import zoo

NVFP4 = scheme("NVFP4A16")
Q, K = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qk")


def made(rows: int = 32, peak: float = 1.0, by: float = 1.0) -> Quantized:
    """A weight in NVFP4 whose divisor is `by` times as large as it needs to be, and its scales with it."""
    w = torch.randn(rows, 32)
    w *= peak / w.abs().max()
    leaf = nearest(w, NVFP4, fit(w, NVFP4))
    scale: Any = leaf.scale
    return replace(leaf, scale=Scales((scale.codes.float() * by).to(torch.float8_e4m3fn), scale.divisor * by, Float8()))


def divisors(directory: Path, *names: str) -> list[float]:
    tensors = load_file(directory / "model.safetensors")
    return [tensors[f"{name}_global_scale"].item() for name in names]


@pytest.mark.parametrize("pruned", [False, True])
def test_divisors_that_are_powers_of_two_apart_become_one(pruned: bool) -> None:
    leaves: dict[str, Any] = {Q: made(), K: made(by=0.25), "model.layers.1.self_attn.k_proj.weight": made(by=0.5)}
    if pruned:
        leaves[K] = Sparse(leaves[K], torch.rand(32, 32) < 0.5, None)
    found = shared(leaves)
    assert found.keys() == {Q, K}
    inner = found[K].values if pruned else found[K]
    assert torch.equal(inner.scale.divisor, found[Q].scale.divisor)
    for name, leaf in found.items():
        assert torch.equal(dense(leaf), dense(leaves[name]))


def test_zeros_have_whatever_divisor_the_others_have() -> None:
    w = torch.zeros(32, 32)
    found = shared({Q: nearest(w, NVFP4, fit(w, NVFP4)), K: made(peak=0.3)})
    assert torch.equal(found[Q].scale.divisor, found[K].scale.divisor)
    assert bool((dense(found[Q].scale) > 0).all())


def test_a_scale_of_zeros_never_becomes_0() -> None:
    w = torch.cat([torch.zeros(1, 32), torch.randn(31, 32).clamp(-1, 1)])
    w[1, 0] = 1
    found = shared({Q: made(by=2.0**-7), K: nearest(w, NVFP4, fit(w, NVFP4))})
    assert found.keys() == {Q, K}
    assert bool((dense(found[K].scale) > 0).all())


def test_values_never_change() -> None:
    assert shared({Q: made(peak=1.0), K: made(peak=0.7)}) == {}
    same = made()
    assert shared({Q: same, K: same}) == {}


def test_a_checkpoint_has_one_divisor_for_a_fused_set_where_it_can(tmp_path: Path) -> None:
    stock(llama_config(hidden_size=32)).save_pretrained(tmp_path / "source")
    model = ptq.load(tmp_path / "source")
    leaves = {Q: made(), K: made(16, by=0.5), K.replace("k_", "v_"): made(16, by=0.125)}
    before = replace(model, state=State({**model.params, **leaves}))
    ptq.save(before, tmp_path / "one")
    assert len(set(divisors(tmp_path / "one", *leaves))) == 1
    after = ptq.load(tmp_path / "one")
    assert all(torch.equal(dense(after.params[n]), dense(leaf)) for n, leaf in leaves.items())


def test_a_file_s_divisors_become_one_as_it_is_saved_again(tmp_path: Path) -> None:
    stock(zoo()["mixtral"]).save_pretrained(tmp_path / "source")
    model = ptq.load(tmp_path / "source")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    e, rows, columns = model.params[name].shape
    w = torch.randn(e, rows, columns)
    leaf = nearest(w, NVFP4, fit(w, NVFP4))
    ptq.save(replace(model, state=State({**model.params, name: leaf})), tmp_path / "one")
    file = tmp_path / "one" / "model.safetensors"
    tensors = load_file(file)
    w1, w3 = (f"model.layers.0.block_sparse_moe.experts.2.{x}.weight" for x in ("w1", "w3"))
    tensors[f"{w3}_global_scale"] *= 0.5
    tensors[f"{w3}_scale"] = (tensors[f"{w3}_scale"].float() * 0.5).to(torch.float8_e4m3fn)
    save_file(tensors, file, {"format": "pt"})
    once = ptq.load(tmp_path / "one")
    ptq.save(once, tmp_path / "two")
    assert len(set(divisors(tmp_path / "two", w1, w3))) == 1
    assert torch.equal(dense(ptq.load(tmp_path / "two").params[name]), dense(once.params[name]))


def test_divisors_that_stay_apart_are_told_with_what_to_do(tmp_path: Path) -> None:
    source = stock(llama_config())
    parts = {"re:.*q_proj": ptq.rtn(NVFP4), "re:.*(k|v)_proj": ptq.rtn(NVFP4)}
    saved = ptq.save(ptq.compress(source, None, ptq.partition(parts)), tmp_path / "out")
    (note,) = saved.notes.values()
    assert "qkv_proj: one target for all" in note
    together = ptq.compress(source, None, ptq.targets("re:.*(q|k|v)_proj", ptq.rtn(NVFP4)))
    assert ptq.save(together, tmp_path / "one").notes == {}
