"""Rows in chunks: the same values as all at once, however they are cut, stacked or mapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from checkpoints import same_bits
from laws.shared import IN, OUT, identical, leaf, untouched
from laws.solves import Elsewhere
from ptq._tree import tree_map
from ptq.numerics import chunks
from ptq.numerics.chunks import by_rows, few_rows
from ptq.numerics.fits import fit, nearest
from ptq.numerics.grids import Float8, Int, Minifloat
from ptq.numerics.leaves import Quantized, dense, take
from ptq.numerics.schemes import Scheme
from ptq.numerics.tiles import spread
from strategies import dtypes, randn, schemes, seeds


@given(seeds, st.sampled_from([(), (1,), (3,), (2, 3)]), st.integers(1, 7), st.integers(1, 50), st.booleans())
def test_any_cut_gives_the_same(seed: int, e: tuple[int, ...], out: int, chunk: int, one: bool) -> None:
    m, s = randn(seed, *e, out, 8), randn(seed + 1, *e, 1 if one else out, 4)

    def function(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return m[..., :4] * s

    with pytest.MonkeyPatch.context() as patch, untouched((m, s)):
        patch.setattr(chunks, "CHUNK", chunk)
        assert torch.equal(by_rows(function, m, s), function(m, s))


def test_only_a_few_rows_are_seen_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 20)
    assert [tuple(m.shape) for (m,) in few_rows(randn(0, 2, 3, 8))] == [(2, 8), (1, 8)] * 2
    assert [tuple(m.shape) for (m,) in few_rows(randn(0, 2, 30))] == [(1, 30)] * 2


@pytest.mark.parametrize("kind", ["tensor", "int4", "int3 asymmetric", "nvfp4", "mxfp6", "sparse", "sparse int4"])
def test_leaves_are_cut_with_all_their_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 2 * IN)
    x = leaf(kind, 3)
    parts = [part for (part,) in few_rows(x)]
    assert len(parts) == 3 * OUT // 2
    assert torch.equal(torch.cat([dense(part) for part in parts]).view(x.shape), dense(x))


def test_what_cannot_be_cut_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 1)
    blocks = Quantized(torch.ones(4, 4, dtype=torch.int8), torch.ones(2, 2), None, Int(4), torch.float32)
    for whole in (blocks, torch.ones(4), torch.ones(4, 4, device="meta"), Elsewhere(torch.ones(4, 4))):
        assert list(few_rows(whole)) == [(whole,)]


@given(seeds, schemes, dtypes)
def test_chunks_round_alike(seed: int, scheme: Scheme, dtype: torch.dtype) -> None:
    w = randn(seed, 2, 9, 40, dtype=dtype)
    fitted = fit(w, scheme)
    whole = nearest(w, scheme, fitted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK", 100)
        assert identical(nearest(w, scheme, fitted), whole)
        mapped = torch.func.vmap(lambda w: nearest(w, scheme, fit(w, scheme)))(w)
    assert identical(mapped, whole)


KINDS = ["int4", "int3 asymmetric", "fp8", "fp8 block", "nvfp4", "mxfp6", "sparse int4", "transposed int4", "indexed"]


def expanded(x: Any) -> Any:
    """The same leaf with scales that lie in memory once for all experts."""
    return tree_map(lambda t: t[:1].expand(t.shape) if t.ndim > 2 else t, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("experts", [(), (3,), pytest.param((2, 3), marks=pytest.mark.slow)])
@given(chunk=st.integers(1, 4 * OUT * IN))
def test_leaves_decode_alike_however_they_are_cut(kind: str, experts: tuple[int, ...], chunk: int) -> None:
    x = leaf(kind, *experts)
    for each in (x, expanded(x)):
        with pytest.MonkeyPatch.context() as patch, untouched(each):
            patch.setattr(chunks, "CHUNK", 1 << 30)
            whole = torch.stack([dense(take(each, i)) for i in range(experts[0])]) if experts else dense(each)
            patch.setattr(chunks, "CHUNK", chunk)
            assert same_bits(dense(each), whole)


few = st.integers(1, 9)


@given(seeds, few, few, st.tuples(st.integers(1, 5), st.integers(1, 5)), st.integers(1, 40))
def test_cut_off_blocks_decode_alike(seed: int, out: int, inputs: int, tile: tuple[int, int], chunk: int) -> None:
    high, wide = tile
    a, b = -(-out // high), -(-inputs // wide)
    codes = randn(seed, 2, out, inputs, dtype=torch.float32).to(torch.float8_e4m3fn)
    scale = randn(seed, 2, a, b, dtype=torch.float32).abs() + 0.1
    x = Quantized(codes, scale, None, Float8(), torch.bfloat16, tile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK", chunk)
        expected = codes.float() * spread(scale, codes.shape, tile)
        assert same_bits(dense(x), expected.bfloat16())


@pytest.mark.parametrize("grid", [Minifloat(1), Minifloat(3)])
@pytest.mark.parametrize("shape", [(), (5,), (7, 6), (2, 7, 6), (2, 1, 7, 6), (0, 6), (7, 0)])
def test_small_floats_encode_alike_however_they_are_cut(
    grid: Minifloat, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    t = grid.round(randn(0, *shape, dtype=torch.float32) * 4)
    codes = grid.encode(t)
    assert torch.equal(grid.decode(codes), t)
    monkeypatch.setattr(chunks, "CHUNK", 10)
    assert same_bits(grid.encode(t), codes)


def test_empty_matrices_have_no_rows() -> None:
    assert by_rows(lambda m: m, torch.empty(0, 8)).shape == (0, 8)
    assert by_rows(lambda m: m, torch.empty(3, 0, 8)).shape == (3, 0, 8)
