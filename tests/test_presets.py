"""The grammar of recipe names: each name against the transforms it stands for, written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from ptq.base import State
from ptq.errors import BadInput
from ptq.numerics.leaves import Quantized, Sparse
from ptq.numerics.stats import KINDS
from ptq.recipes.presets import PRESETS, recipe


def solved(name: str, rows: int = 8, columns: int = 128) -> Any:
    """What the recipe makes of a random weight that reads random inputs."""
    generator = torch.Generator().manual_seed(0)
    state = State({"w": torch.randn(rows, columns, generator=generator)})
    x = torch.randn(4 * columns, columns, generator=generator)
    for stage in recipe(name):
        for t in stage:
            wanted = t.init(state, {"w": ("w",)}).get("w", {})
            state, _ = t.apply(state, {"w": {kind: KINDS[kind].measure(x) for kind in wanted}}, {"w": ("w",)})
    return state.params["w"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_listed_recipe_works(name: str) -> None:
    assert isinstance(solved(name), Quantized | Sparse)
    assert PRESETS[name]


@given(
    algorithm=st.sampled_from(["rtn", "gptq"]), bits=st.integers(2, 8), group=st.sampled_from([None, 16, 32, 64, 128])
)
def test_bits_and_groups(algorithm: str, bits: int, group: int | None) -> None:
    leaf = solved(f"{algorithm}-w{bits}a16{f'-g{group}' if group else ''}")
    assert leaf.grid.bits == bits
    assert leaf.scale.shape == (8, 128 // (group or 128))
    assert leaf.zero is None


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_float8_has_a_scale_per_channel(algorithm: str) -> None:
    leaf = solved(f"{algorithm}-fp8a16")
    assert leaf.codes.dtype == torch.float8_e4m3fn
    assert leaf.scale.shape == (8, 1)


@given(algorithm=st.sampled_from(["magnitude", "wanda", "sparsegpt"]), percent=st.integers(1, 99))
def test_percentages_are_exact(algorithm: str, percent: int) -> None:
    mask = solved(f"{algorithm}-{percent}", rows=10, columns=40).mask
    ratio = percent / 100
    # magnitude compares a tensor, wanda a row, sparsegpt all rows of a block of columns
    expected = 10 * int(40 * ratio) if algorithm == "wanda" else int(400 * ratio)
    assert int((~mask).sum()) == expected


@given(
    algorithm=st.sampled_from(["magnitude", "wanda", "sparsegpt"]), keep_of=st.sampled_from([(1, 4), (2, 4), (4, 8)])
)
def test_n_of_m_keeps_n(algorithm: str, keep_of: tuple[int, int]) -> None:
    keep, of = keep_of
    mask = solved(f"{algorithm}-{keep}of{of}").mask
    assert bool((mask.unflatten(-1, (-1, of)).sum(-1) == keep).all())


@pytest.mark.parametrize("algorithm", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize(
    ("what", "bits", "groups"), [("fp8", 8, 1), ("fp8a16", 8, 1), ("w4a16-g64", 4, 2), ("w3a16", 3, 1)]
)
def test_what_is_kept_is_quantized(algorithm: str, what: str, bits: int, groups: int) -> None:
    leaf = solved(f"{algorithm}-2of4-{what}")
    assert isinstance(leaf, Sparse)
    assert isinstance(leaf.values, Quantized)
    assert leaf.values.grid.bits == bits
    assert leaf.values.scale.shape == (8, groups)
    assert bool((leaf.mask.unflatten(-1, (-1, 4)).sum(-1) == 2).all())


def test_names_are_in_any_case() -> None:
    one, two = solved("GPTQ-W4A16-G64"), solved("gptq-w4a16-g64")
    assert torch.equal(one.codes, two.codes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gptq-w4a16-64", "near: gptq-w4a16-g64"),
        ("gptq-w9a16", "near: .*gptq-w8a16"),
        ("gptq", "near: gptq"),
        ("sparsegpt-2:4", "near: sparsegpt-2of4"),
        ("", "ptq recipes"),
        ("gptq-w4a16-g64 ", "unknown recipe"),
        ("smooth-gptq-w8a8", "unknown recipe"),
        ("rtn-fp8-dynamic", "unknown recipe"),
        ("rotate-w4a16", "unknown recipe"),
        ("sparsegpt-100", "ratio 1.0"),
        ("wanda-0of4", "keep=0 of=4"),
        ("gptq-w4a16-g0", "group_size 0"),
        ("rtn-fp8a16-b0", "block"),
        ("mine.yaml", "recipe files are not read by this version"),
    ],
)
def test_what_is_no_recipe(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        recipe(name)
    assert "\n" not in str(caught.value)
