"""Rows in chunks: the same values as all at once, however they are cut, stacked or mapped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from laws.shared import IN, OUT, identical, leaf, untouched
from laws.solves import Elsewhere
from ptq.numerics import chunks
from ptq.numerics.chunks import by_rows, few_rows
from ptq.numerics.fits import fit, nearest
from ptq.numerics.grids import Int
from ptq.numerics.leaves import Quantized, dense
from ptq.numerics.schemes import Scheme
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


def test_empty_matrices_have_no_rows() -> None:
    assert by_rows(lambda m: m, torch.empty(0, 8)).shape == (0, 8)
    assert by_rows(lambda m: m, torch.empty(3, 0, 8)).shape == (3, 0, 8)
