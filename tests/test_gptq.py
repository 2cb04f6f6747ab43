"""GPTQ as a transform: what its settings do. The sweep itself is tested in test_obs.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laws.solves import solved
from ptq.base import State
from ptq.numerics.fits import fit
from ptq.numerics.leaves import Quantized, dense
from ptq.numerics.schemes import Scheme, scheme
from ptq.numerics.stats import Gram
from ptq.transforms.gptq import gptq
from ptq.transforms.rtn import rtn
from strategies import correlated, randn

W3 = scheme("W3A16", 16)
SITES = {"a.weight": ("a.weight",)}


def error(transform: Any, w: torch.Tensor, x: torch.Tensor) -> tuple[float, float]:
    """Errors of the output and of the weight."""
    d = dense(solved(transform, w, x)) - w
    return float((x @ d.mT).square().sum()), float(d.square().sum())


@pytest.mark.parametrize("s", [W3, scheme("W3A16", -1), scheme("W2A16_ASYM", 16), scheme("FP8A16")], ids=str)
def test_compensation_lowers_the_output_error_and_raises_the_weights(s: Scheme) -> None:
    w, x = randn(0, 24, 64), correlated(1, 600, 64)
    for order in ("activation", None):
        ours, plain = error(gptq(s, order=order, fit="minmax"), w, x), error(rtn(s, "minmax"), w, x)  # type: ignore[arg-type]
        assert ours[0] < 0.7 * plain[0]
        assert ours[1] > plain[1]


def test_default_order_and_scales_pay() -> None:
    w, x = randn(0, 48, 128), correlated(1, 1000, 128)
    s = scheme("W3A16", -1)
    best = error(gptq(s), w, x)[0]
    assert best < 0.9 * error(gptq(s, order=None), w, x)[0]
    assert best < 0.9 * error(gptq(s, fit="minmax"), w, x)[0]


def test_the_order_is_static() -> None:
    """Scales are those of the weight's own groups, whatever the order: nothing about it is stored."""
    w, x = randn(0, 24, 64), correlated(1, 600, 64)
    expected, *_ = fit(w, W3, "gram", x.square().sum(0))
    for order in ("activation", None):
        leaf = solved(gptq(W3, order=order), w, x)  # type: ignore[arg-type]
        assert isinstance(leaf, Quantized)
        assert torch.allclose(leaf.scale, expected, rtol=1e-12)


def test_refreshed_scales_follow_the_weight() -> None:
    w, x = randn(0, 24, 64), correlated(1, 600, 64)
    fixed, fresh = (solved(gptq(W3, order=None, fit="mse", refresh=r), w, x).scale for r in (False, True))
    assert torch.allclose(fixed[:, 0], fresh[:, 0], rtol=1e-9)  # nothing has been moved yet
    assert not torch.allclose(fixed[:, 1:], fresh[:, 1:], rtol=1e-3)


def test_damping_is_between_full_compensation_and_none() -> None:
    w, x = randn(0, 24, 64), correlated(1, 600, 64)
    outputs, weights = zip(*(error(gptq(W3, damp=d, order=None), w, x) for d in (1e-3, 1.0, 1e3, 1e9)), strict=True)
    assert list(outputs) == sorted(outputs)
    assert list(weights) == sorted(weights, reverse=True)
    assert outputs[-1] == pytest.approx(error(rtn(W3, "gram"), w, x)[0])


def outcome(gram: torch.Tensor, **how: Any) -> Any:
    state = State({"a.weight": randn(0, 3, len(gram))})
    _, seen = gptq(scheme("W4A16", -1), **how).apply(
        state, {"a.weight": {"gram": Gram(gram, torch.tensor(9.0))}}, SITES
    )
    return seen["a.weight"]["outcome"]


def test_the_report_says_what_the_factorization_took() -> None:
    x = correlated(1, 100, 8)
    fine = outcome(x.mT @ x)
    assert (fine.damping.item(), fine.failures.item(), fine.note) == (pytest.approx(0.01), 0, "")
    bad = torch.eye(8, dtype=torch.float64)
    bad[0, 1] = bad[1, 0] = 1.05
    again = outcome(bad)
    assert (again.damping.item(), again.failures.item()) == (pytest.approx(0.1), 1)
    assert again.note == "damped more than asked for"
    bad[0, 1] = bad[1, 0] = 100.0
    hopeless = outcome(bad)
    assert (hopeless.damping.item(), hopeless.failures.item()) == (torch.inf, 4)
    assert "not compensated" in hopeless.note


def test_a_lone_token_is_enough_to_run() -> None:
    """A Gram of rank 1: damping makes it definite, and its one direction is made up for."""
    w, x = randn(0, 24, 64), correlated(1, 1, 64)
    ours, plain = error(gptq(W3, fit="minmax"), w, x), error(rtn(W3, "minmax"), w, x)
    assert ours[0] < 0.1 * plain[0]
