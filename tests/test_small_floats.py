"""NVFP4 and the MX formats: scales, codes and divisors against what the library that defines them computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import CASES, GOLDEN, golden
from ptq.base import State
from ptq.numerics.fits import fit, nearest, qparams, shared_divisor
from ptq.numerics.leaves import Scales, dense
from ptq.numerics.schemes import NAMED, Scheme, scheme
from ptq.transforms.gptq import gptq
from ptq.transforms.rtn import rtn
from strategies import correlated, randn, seeds

FORMATS = {
    "nvfp4-pack-quantized": NAMED["NVFP4A16"],
    "mxfp4-pack-quantized": NAMED["MXFP4A16"],
    "mxfp6-pack-quantized": NAMED["MXFP6A16"],
    "mxfp8-quantized": NAMED["MXFP8A16"],
}
SMALL = [(file, case) for file, case in CASES if file in FORMATS]
QPARAMS = load_file(GOLDEN / "qparams.safetensors")
DIVISORS = load_file(GOLDEN / "nvfp4-global-scale.safetensors")


@pytest.mark.parametrize(("file", "case"), SMALL)
def test_codes_and_scales_are_those_of_compressed_tensors(file: str, case: str) -> None:
    tensors, _, _ = golden(file, case)
    w, how = tensors["in/weight"].load(), FORMATS[file]
    given_ = tensors.get("out/weight_global_scale")
    divisor = None if given_ is None else given_.load().view(1, 1)
    leaf = nearest(w, how, fit(w, how, divisor=divisor))
    assert isinstance(leaf.scale, Scales)
    assert torch.equal(leaf.scale.codes.view(torch.uint8), tensors["out/weight_scale"].load().view(torch.uint8))
    assert torch.equal(leaf.grid.decode(leaf.codes), tensors["x/quantized_values"].load().float())


@pytest.mark.parametrize("case", sorted({name.split("/")[0] for name in QPARAMS if name.startswith(("nvfp4", "mxfp"))}))
def test_levels_are_those_of_compressed_tensors(case: str) -> None:
    low, high = QPARAMS[f"{case}/in/min"], QPARAMS[f"{case}/in/max"]
    how = NAMED[f"{case[:5].upper()}A16"]
    divisor = QPARAMS.get(f"{case}/in/global_scale")
    level, zero = qparams(low, high, how, low.dtype, divisor)
    assert zero is None
    assert torch.equal(level, QPARAMS[f"{case}/out/scale"].float())


@pytest.mark.parametrize("case", sorted({name.split("/")[0] for name in DIVISORS}))
def test_divisors_are_those_of_compressed_tensors(case: str) -> None:
    peak = torch.maximum(-DIVISORS[f"{case}/in/min"], DIVISORS[f"{case}/in/max"])
    assert torch.equal(shared_divisor(peak, NAMED["NVFP4A16"]), DIVISORS[f"{case}/out/global_scale"])


def kept(leaf: Any, how: Scheme) -> bool:
    """Whether a leaf's divisor is what its own largest weight asks for, at the most."""
    return bool((leaf.scale.codes.float() <= 448).all()) and leaf.grid == how.grid


@pytest.mark.parametrize("transform", [rtn, gptq])
@given(seed=seeds, experts=st.sampled_from([(), (2,)]))
def test_weights_of_one_input_share_their_divisor(transform: Any, seed: int, experts: tuple[int, ...]) -> None:
    """Serving engines fuse them; stacked experts have one each."""
    how = scheme("NVFP4A16")
    params = {name: randn(seed + i, *experts, 6, 32) * 10**i for i, name in enumerate("abc")}
    x = correlated(seed, *experts, 64, 32)
    stage = transform(how)
    kinds = stage.init(State(dict(params)), {"a": ("a", "b", "c")})
    seen = {"a": {kind: type(zero).measure(x) for kind, zero in kinds.get("a", {}).items()}}
    state, _ = stage.apply(State(dict(params)), seen, {"a": ("a", "b", "c")})
    divisors: list[Tensor] = [leaf.scale.divisor for leaf in state.params.values()]
    expected = shared_divisor(params["c"].abs().amax((-2, -1), keepdim=True), how)
    assert all(torch.equal(d, expected) for d in divisors)
    assert all(kept(leaf, how) for leaf in state.params.values())


@pytest.mark.parametrize("name", NAMED)
def test_compensation_lowers_the_error_of_outputs(name: str) -> None:
    how = scheme(name)
    w, x = randn(0, 48, 128, dtype=torch.float32), correlated(1, 512, 128, dtype=torch.float32)
    site = {"a": ("a",)}
    plain = rtn(how).apply(State({"a": w}), {}, site)[0].params["a"]
    stage = gptq(how)
    stats = {"a": {"gram": type(stage.init(State({"a": w}), site)["a"]["gram"]).measure(x)}}
    made = stage.apply(State({"a": w}), stats, site)[0].params["a"]
    errors = [((dense(leaf) - w) @ x.T).square().sum() for leaf in (plain, made)]
    assert errors[1] < 0.9 * errors[0]
    assert (dense(made) - w).square().sum() > (dense(plain) - w).square().sum()
