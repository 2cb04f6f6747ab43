"""Compressed models as floats, to be compressed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ptq
from laws.shared import identical
from ptq.errors import BadInput
from ptq.numerics.grids import Int
from ptq.numerics.lazy import Decoded, load
from ptq.numerics.leaves import Quantized, Sparse, Transposed, compressed, dense, nbytes
from ptq.numerics.patterns import NM
from ptq.numerics.schemes import scheme
from strategies import randn

W4 = scheme("W4A16", -1)


def leaf() -> Quantized:
    codes = randn(0, 4, 8).clamp(-3, 3).mul(2).round().to(torch.int8)
    return Quantized(codes, torch.ones(4, 1), None, Int(4), torch.float32)


def test_a_leaf_keeps_its_values_and_is_not_compressed_any_more() -> None:
    made = Decoded(leaf())
    assert not compressed(made)
    assert torch.equal(dense(made), dense(leaf()))
    assert (made.shape, made.dtype, nbytes(made)) == ((4, 8), torch.float32, 4 * 32)


def test_what_is_pruned_stays_so() -> None:
    mask = NM(keep=2, of=4).mask(randn(1, 4, 8).abs())
    inner = load(Decoded(Transposed(Sparse(leaf(), mask, NM(keep=2, of=4)))))
    assert isinstance(inner, Transposed)
    assert identical(inner.leaf, Sparse(dense(leaf()), mask, NM(keep=2, of=4)))


def test_a_quantized_model_is_compressed_again_only_when_it_is_decoded(tiny_llama: Path, tmp_path: Path) -> None:
    ptq.save(ptq.compress(ptq.load(tiny_llama), None, ptq.rtn(W4)), tmp_path / "four")
    four = ptq.load(tmp_path / "four")
    with pytest.raises(BadInput, match=r"quantized already.*--decode"):
        ptq.compress(four, None, ptq.rtn(scheme("FP8A16")))
    run = ptq.compress(four.decoded(), None, ptq.rtn(scheme("FP8A16")))
    ptq.save(run, tmp_path / "eight")
    eight = ptq.load(tmp_path / "eight")
    name = "model.layers.0.mlp.up_proj.weight"
    w = dense(four.params[name])
    expected = ptq.rtn(scheme("FP8A16")).apply(ptq.State({name: w}), {}, {name: (name,)})[0].params[name]
    assert torch.equal(dense(eight.params[name]), dense(expected))


def test_a_weight_is_its_original_until_its_turn_comes(tiny_llama: Path) -> None:
    """What a later block is given is what the file holds, bit for bit, whatever ran before."""
    model, met = ptq.load(tiny_llama), {}

    def note(name: str) -> Any:
        def solve(w: torch.Tensor, gram: Any) -> torch.Tensor:
            met[name] = w.clone()
            return w * 0.5

        return ptq.leafwise(("gram",), solve, name=name)

    ids = torch.arange(24).view(2, 12)
    names = [n for n in model.params if n.endswith("proj.weight")]
    ptq.compress(model, [ids], ptq.chain(*(t for n in names for t in ptq.targets(n, note(n))))).model  # noqa: B018
    assert met.keys() == set(names)
    assert all(torch.equal(met[n], dense(model.params[n])) for n in names)
