"""Bit streams against big integers, and against what the library that defines them writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from checkpoints import CASES, golden
from ptq.numerics.packing import pack, pack_down, unpack, unpack_down

PACKED = [(file, case) for file, case in CASES if file in ("pack-quantized", "legacy-padded-pack-3567bit")]
BITS = st.integers(1, 8)


@st.composite
def codes(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    bits, rows, count = draw(BITS), draw(st.integers(1, 3)), draw(st.integers(1, 70))
    values = st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    flat = draw(st.lists(values, min_size=rows * count, max_size=rows * count))
    return torch.tensor(flat, dtype=torch.int8).view(rows, count), bits


def stream(row: list[int], bits: int) -> list[int]:
    """A row as one big integer, cut into words."""
    whole = sum((code + (1 << (bits - 1))) << (i * bits) for i, code in enumerate(row))
    words = -(-len(row) * bits // 32)
    unsigned = [(whole >> (32 * i)) & 0xFFFFFFFF for i in range(words)]
    return [w - (1 << 32) if w >> 31 else w for w in unsigned]


@given(codes())
def test_a_row_is_one_little_endian_integer(case: tuple[torch.Tensor, int]) -> None:
    values, bits = case
    assert pack(values, bits).tolist() == [stream(row, bits) for row in values.tolist()]


@given(codes())
def test_unpack_inverts_pack(case: tuple[torch.Tensor, int]) -> None:
    values, bits = case
    assert torch.equal(unpack(pack(values, bits), bits, values.shape[-1]), values)
    assert torch.equal(unpack_down(pack_down(values.mT, bits), bits, values.shape[-1]), values.mT)


@given(codes())
def test_stacked_experts_are_packed_each_by_itself(case: tuple[torch.Tensor, int]) -> None:
    values, bits = case
    stacked = torch.stack([values, -1 - values])
    assert torch.equal(pack(stacked, bits), torch.stack([pack(v, bits) for v in stacked]))
    assert torch.equal(unpack(pack(stacked, bits), bits, values.shape[-1]), stacked)


@given(codes())
def test_bits_that_divide_a_word_have_one_layout(case: tuple[torch.Tensor, int]) -> None:
    values, bits = case
    same = torch.equal(unpack(pack(values, bits), bits, values.shape[-1], straddle=False)[:, :1], values[:, :1])
    assert same  # the first code is where it is in either layout; all are, where none crosses a word
    if 32 % bits == 0:
        assert torch.equal(unpack(pack(values, bits), bits, values.shape[-1], straddle=False), values)


def test_nothing_given_is_changed() -> None:
    values = torch.randint(-4, 4, (3, 9), dtype=torch.int8)
    before, version = values.clone(), values._version
    words = pack(values, 3)
    kept = words.clone()
    unpack(words, 3, 9)
    assert torch.equal(values, before)
    assert torch.equal(words, kept)
    assert (values._version, words._version) == (version, 0)


@pytest.mark.parametrize(("file", "case"), PACKED)
def test_golden_words(file: str, case: str) -> None:
    tensors, scheme, _ = golden(file, case)
    bits, words = scheme["weights"]["num_bits"], tensors["out/weight_packed"].load()
    count = tensors["in/weight"].shape[-1]
    values = unpack(words, bits, count, straddle="legacy" not in file)
    if "x/quantized_values" in tensors:
        assert torch.equal(values, tensors["x/quantized_values"].load())
    if "legacy" not in file:
        assert torch.equal(pack(values, bits), words)


@pytest.mark.parametrize(("file", "case"), [(f, c) for f, c in PACKED if "asym" in c and "tensor" not in c])
def test_golden_zero_points(file: str, case: str) -> None:
    tensors, scheme, _ = golden(file, case)
    bits, zeros = scheme["weights"]["num_bits"], tensors["in/weight_zero_point"].load()
    words = tensors["out/weight_zero_point"].load()
    assert torch.equal(pack_down(zeros, bits), words)
    assert torch.equal(unpack_down(words, bits, len(zeros)), zeros)
