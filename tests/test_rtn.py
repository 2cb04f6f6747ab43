"""Round to nearest: what it costs to be plain."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, strategies as st

from laws.solves import solved
from ptq.base import State, chain
from ptq.numerics.fits import fit, nearest
from ptq.numerics.leaves import Quantized, Sparse, dense
from ptq.numerics.patterns import NM
from ptq.numerics.schemes import Scheme, scheme
from ptq.numerics.stats import SecondMoment
from ptq.transforms.rtn import rtn
from ptq.transforms.wanda import wanda
from strategies import correlated, randn, schemes, weights


@given(weights(columns=(16, 40)), schemes, st.sampled_from(["minmax", "mse"]))
def test_it_is_the_nearest_value_with_fitted_scales(w: torch.Tensor, s: Scheme, method: Any) -> None:
    got = solved(rtn(s, method), w, torch.ones(1, w.shape[-1]))
    assert isinstance(got, Quantized)
    assert torch.equal(dense(got), dense(nearest(w, s, fit(w, s, method))))


def test_only_gram_scales_need_data() -> None:
    state, sites = State({"a.weight": torch.ones(2, 128)}), {"a.weight": ("a.weight",)}
    assert rtn(scheme("W4A16")).init(state, sites) == {}
    assert set(rtn(scheme("W4A16"), fit="gram").init(state, sites)["a.weight"]) == {"second_moment"}


def test_gram_scales_lower_the_output_error_and_raise_the_weights() -> None:
    w, x = randn(0, 32, 64), correlated(1, 500, 64)
    plain, weighted = (dense(solved(rtn(scheme("W3A16", -1), fit), w, x)) - w for fit in ("mse", "gram"))
    assert (weighted * x.square().sum(0).sqrt()).square().sum() < (plain * x.square().sum(0).sqrt()).square().sum()
    assert weighted.square().sum() > plain.square().sum()


def test_after_a_pruner_in_one_chain_the_mask_stays_and_scales_are_of_what_is_left() -> None:
    w, x = randn(0, 4, 16), correlated(1, 50, 16)
    w[:, 3] = 50.0  # pruned below: nothing comes in there
    x[:, 3] = 0.0
    state, sites = State({"a.weight": w}), {"a.weight": ("a.weight",)}
    stats = {"a.weight": {"second_moment": SecondMoment.measure(x)}}
    masks = []
    for transform in chain(wanda(NM(keep=2, of=4)), rtn(scheme("W4A16", -1), "minmax")):
        state, stats = transform.apply(state, stats, sites)
        masks.append(state.params["a.weight"].mask)
    leaf = state.params["a.weight"]
    assert isinstance(leaf, Sparse)
    assert torch.equal(*masks)
    assert (leaf.values.scale < 1).all()
    assert ((dense(leaf) - w * leaf.mask).abs() <= leaf.values.scale * 0.51).all()
