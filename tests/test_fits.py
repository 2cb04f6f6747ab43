"""Scales and zero points: against compressed-tensors, and against exhaustive searches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import GOLDEN, SCHEMES as FILES
from ptq.errors import BadInput
from ptq.numerics import fits
from ptq.numerics.fits import fit, nearest, qparams, quantize
from ptq.numerics.grids import Float8, Int
from ptq.numerics.leaves import dense, validate
from ptq.numerics.schemes import Scheme
from ptq.numerics.tiles import spread
from strategies import dtypes, randn, schemes, seeds, weights

QPARAMS = load_file(GOLDEN / "qparams.safetensors")
NAMES = sorted({name.split("/")[0] for name in QPARAMS if re.match("int|fp8", name)})
SHARES = torch.arange(1.05, 0.42, -0.025).tolist()


def golden_scheme(name: str) -> Scheme:
    bits, kind = re.match(r"int(\d)_(a?)sym|fp8_sym", name).groups()  # type: ignore[union-attr]  # all names match
    return Scheme(Int(int(bits)) if bits else Float8(), "channel", symmetric=not kind)


@pytest.mark.parametrize("name", NAMES)
def test_ranges_give_the_parameters_that_compressed_tensors_computes(name: str) -> None:
    low, high = QPARAMS[f"{name}/in/min"], QPARAMS[f"{name}/in/max"]
    scale, zero = qparams(low, high, golden_scheme(name), low.dtype)
    assert torch.equal(scale, QPARAMS[f"{name}/out/scale"])
    if zero is not None and "zero" not in name:  # its zero point of a dead tile is a cast NaN
        assert torch.equal(zero, QPARAMS[f"{name}/out/zero_point"])


@pytest.mark.parametrize("name", NAMES)
def test_minmax_takes_the_range_of_a_weight(name: str) -> None:
    low, high = QPARAMS[f"{name}/in/min"], QPARAMS[f"{name}/in/max"]
    w = torch.cat([low, (low + high) / 2, high], -1) if low.ndim == 2 else torch.stack([low, high], -1)
    scale, *_ = fit(w, golden_scheme(name))
    assert torch.equal(scale.flatten(), QPARAMS[f"{name}/out/scale"].flatten())


def codes() -> Iterator[Any]:
    """Golden codes of weights in float32: the 16-bit ones are divided in their own dtype there."""
    for file in ("pack-quantized", "int-quantized", "float-quantized"):
        tensors = load_file(GOLDEN / f"{file}.safetensors")
        for case, how in FILES[file]["cases"].items():
            key = f"{case}/x/quantized_values"
            if "_f32" in case and key in tensors and how["weights"]["num_bits"] > 1:
                yield pytest.param(tensors, case, how["weights"], id=f"{file}-{case}")


CODES = list(codes())


@pytest.mark.parametrize(("tensors", "case", "how"), CODES)
def test_codes_are_those_of_compressed_tensors(tensors: dict[str, Tensor], case: str, how: dict[str, Any]) -> None:
    w, scale = tensors[f"{case}/in/weight"], tensors[f"{case}/in/weight_scale"]
    zero = tensors.get(f"{case}/in/weight_zero_point") if not how["symmetric"] else None
    shape = (1, 1) if scale.ndim == 1 else scale.shape
    grid = Int(how["num_bits"]) if how["type"] == "int" else Float8()
    block = tuple(how["block_structure"]) if how["strategy"] == "block" else None
    got = quantize(w, scale.view(shape), None if zero is None else zero.view(shape), grid, block)
    assert torch.equal(got.codes.float(), tensors[f"{case}/x/quantized_values"].float())
    assert torch.equal(dense(validate(got, case)), tensors[f"{case}/x/decompressed_weight"])


@pytest.mark.parametrize(("tensors", "case", "how"), CODES)
def test_minmax_scales_are_those_of_compressed_tensors(
    tensors: dict[str, Tensor], case: str, how: dict[str, Any]
) -> None:
    grid = Int(how["num_bits"]) if how["type"] == "int" else Float8()
    block = tuple(how["block_structure"]) if how["strategy"] == "block" else None
    scheme = Scheme(grid, how["strategy"], how["group_size"], how["symmetric"], block)
    scale, zero, _ = fit(tensors[f"{case}/in/weight"], scheme)
    assert torch.equal(scale.flatten(), tensors[f"{case}/in/weight_scale"].flatten())
    if zero is not None:
        assert torch.equal(zero.flatten(), tensors[f"{case}/in/weight_zero_point"].flatten())


def cost(w: Tensor, fitted: fits.Fitted, scheme: Scheme, importance: Tensor | None) -> Tensor:
    """Error of each tile, by way of the leaf."""
    error = (dense(nearest(w, scheme, fitted)) - w).square()
    return scheme.grouped(error if importance is None else error * importance[..., None, :]).sum(-1)


def exhaustive(w: Tensor, scheme: Scheme, importance: Tensor | None) -> Tensor:
    """The least cost of each tile over the whole table of shares."""
    tiles = scheme.grouped(w)
    low, high = tiles.amin(-1), tiles.amax(-1)
    trials = [cost(w, fits.Fitted(*qparams(low * s, high * s, scheme, w.dtype)), scheme, importance) for s in SHARES]
    return torch.stack(trials).amin(0)


@given(weights(dtype=torch.float64), schemes, st.sampled_from(["mse", "gram"]), seeds)
def test_a_search_is_never_worse_than_minmax(w: Tensor, scheme: Scheme, method: Any, seed: int) -> None:
    importance = randn(seed, *w.shape[:-2], w.shape[-1]).square()
    weighting = importance if method == "gram" else None
    found, plain = fit(w, scheme, method, importance), fit(w, scheme)
    assert (cost(w, found, scheme, weighting) <= cost(w, plain, scheme, weighting) * (1 + 1e-9) + 1e-300).all()


def test_the_search_comes_near_the_exhaustive_one() -> None:
    """Coarse to fine loses next to nothing against all 26 shares, and both gain a lot over the whole range."""
    w, importance = randn(0, 64, 256), randn(1, 256).exp()
    for scheme in (Scheme(Int(4), "group", 64), Scheme(Int(3), "channel"), Scheme(Int(4), "channel", symmetric=False)):
        for method, weighting in (("mse", None), ("gram", importance)):
            found = cost(w, fit(w, scheme, method, importance), scheme, weighting).sum()  # type: ignore[arg-type]
            best = exhaustive(w, scheme, weighting).sum()
            assert best * 0.999 <= found < 1.02 * best
            assert found < 0.97 * cost(w, fit(w, scheme), scheme, weighting).sum()


def test_gram_and_mse_each_win_by_their_own_measure() -> None:
    w, importance = randn(0, 32, 128), randn(1, 128).mul(2).exp()
    scheme = Scheme(Int(3), "channel")
    mse, weighted = fit(w, scheme, "mse"), fit(w, scheme, "gram", importance)
    assert cost(w, mse, scheme, None).sum() < cost(w, weighted, scheme, None).sum()
    assert cost(w, weighted, scheme, importance).sum() < cost(w, mse, scheme, importance).sum()


def test_columns_without_weight_do_not_count() -> None:
    w = torch.linspace(-1, 1, 65)[None].index_fill(1, torch.tensor([3]), 2.0)
    importance = torch.ones(65).index_fill(0, torch.tensor([3]), 0.0)
    scheme = Scheme(Int(4), "channel")
    assert fit(w, scheme, "gram", importance)[0].item() == pytest.approx(1 / 7.5, rel=0.1)
    assert fit(w, scheme, "mse")[0].item() > 1.4 / 7.5


@given(weights(columns=(16, 40)), schemes, st.sampled_from(fits.FITS))
def test_scales_can_be_stored(w: Tensor, scheme: Scheme, method: Any) -> None:
    """Nothing unobserved is written: no zero, infinite or NaN scale, whatever the weight; in the asked dtype."""
    importance = torch.ones(*w.shape[:-2], w.shape[-1])
    for dtype in (None, torch.bfloat16, torch.float32):
        fitted = fit(w, scheme, method, importance, dtype)
        level, zero, _ = fitted
        if scheme.scales is None:
            assert level.dtype == (dtype or w.dtype)
        else:
            assert torch.equal(scheme.scales.decode(scheme.scales.encode(level)), level)
        assert level.shape == (*w.shape[:-2], *scheme.tiles(w.shape))
        assert (zero is None) == scheme.symmetric
        assert dense(validate(nearest(w, scheme, fitted), "w")).isfinite().all()


@given(weights(columns=(16, 40)), schemes, st.sampled_from(fits.FITS))
def test_rounding_is_idempotent(w: Tensor, scheme: Scheme, method: Any) -> None:
    fitted = fit(w, scheme, method, torch.ones(*w.shape[:-2], w.shape[-1]))
    once = nearest(w, scheme, fitted)
    twice = nearest(dense(once), scheme, fitted)
    assert torch.equal(dense(once), dense(twice))
    assert torch.equal(once.codes.float(), twice.codes.float())


@given(weights(dtype=torch.float64), schemes)
def test_rounding_takes_the_nearest_value(w: Tensor, scheme: Scheme) -> None:
    """Within half a step where the range covers the weight; elsewhere the end of the range."""
    fitted = fit(w, scheme)
    leaf = nearest(w, scheme, fitted)
    if scheme.grid.kind == "float":
        return
    offset = 0.0 if fitted.zero is None else spread(fitted.zero.double(), w.shape)
    step = spread(fitted.level, w.shape)
    low, high = (scheme.grid.low - offset) * step, (scheme.grid.high - offset) * step
    near = (dense(leaf) - w).abs() <= step / 2 * (1 + 1e-6)
    outside = (w < low) & (dense(leaf) == low) | (w > high) & (dense(leaf) == high)
    assert (near | outside).all()


@given(seeds, schemes, dtypes)
def test_experts_and_chunks_are_independent(seed: int, scheme: Scheme, dtype: torch.dtype) -> None:
    w, importance = randn(seed, 3, 9, 40, dtype=dtype), randn(seed + 1, 3, 40).exp()
    whole = fit(w, scheme, "gram", importance)
    alone = [fit(w[i], scheme, "gram", importance[i]) for i in range(3)]
    rows = [fit(w[:1, r : r + 1], scheme, "gram", importance[:1])[0] for r in range(9)]
    assert torch.equal(whole[0], torch.stack([f.level for f in alone]))
    if whole[1] is not None:
        assert torch.equal(whole[1], torch.stack([f.zero for f in alone]))  # type: ignore[arg-type]
    if scheme.granularity in ("channel", "group") and not scheme.divided:
        assert torch.equal(whole[0][:1], torch.cat(rows, -2))
    mapped = torch.func.vmap(lambda w, c: fit(w, scheme, "gram", c)[0])(w, importance)
    assert torch.equal(mapped, whole[0])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w, importance = randn(0, 50, 40), randn(1, 40).exp()
    whole = fit(w, Scheme(Int(3), "group", 8, symmetric=False), "gram", importance)
    monkeypatch.setattr(fits, "CHUNK", 200)
    pieces = fit(w, Scheme(Int(3), "group", 8, symmetric=False), "gram", importance)
    assert torch.equal(whole[0], pieces[0])
    assert whole[1] is not None
    assert pieces[1] is not None
    assert torch.equal(whole[1], pieces[1])


@given(seeds)
def test_a_search_in_bfloat16_is_made_in_float32_with_stored_scales(seed: int) -> None:
    w = randn(seed, 4, 64, dtype=torch.bfloat16)
    scheme = Scheme(Int(4), "channel")
    low, *_ = fit(w, scheme, "mse")
    exact, *_ = fit(w.float(), scheme, "mse", dtype=torch.bfloat16)
    assert torch.equal(low, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_zero_points_are_chosen_by_the_scale_as_it_is_stored(dtype: torch.dtype) -> None:
    low, high = -randn(0, 1000, dtype=torch.float32).abs(), randn(1, 1000, dtype=torch.float32).abs()
    scheme = Scheme(Int(8), "channel", symmetric=False)
    scale, zero = qparams(low, high, scheme, dtype)
    assert scale.dtype == dtype
    assert zero is not None
    assert torch.equal(zero.float(), (-128 - low / scale.float()).round().clamp(-128, 127))


def test_an_outlier_is_clipped_but_not_by_minmax() -> None:
    w = torch.cat([torch.linspace(-1, 1, 63), torch.tensor([2.0])])[None]
    scheme = Scheme(Int(3), "channel")
    assert fit(w, scheme, "mse")[0].item() < 0.8 * fit(w, scheme)[0].item()
    assert fit(w, scheme)[0].item() == pytest.approx(2.0 / 3.5)


def test_what_cannot_be_fitted_is_refused() -> None:
    w = torch.ones(2, 12)
    with pytest.raises(BadInput, match="group size 8 does not divide 12 inputs"):
        fit(w, Scheme(Int(4), "group", 8))
    with pytest.raises(BadInput, match="weights columns by the diagonal of a Gram matrix, got none"):
        fit(w, Scheme(Int(4), "channel"), "gram")
