"""The factorization and the sweep: against published loops, closed forms and brute force, all in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import textbook
from ptq.errors import BadInput, NotPositiveDefinite
from ptq.numerics import obs
from ptq.numerics.fits import fit
from ptq.numerics.grids import Int
from ptq.numerics.leaves import Sparse, dense
from ptq.numerics.patterns import NM, Unstructured
from ptq.numerics.projections import Projection, affine, prune, then
from ptq.numerics.schemes import Scheme
from ptq.numerics.tiles import spread
from strategies import correlated, gram, randn, seeds

IN = 200  # more than one block of each width, and no multiple of them
W4 = Scheme(Int(4), "group", 40)
W3 = Scheme(Int(3), "channel", symmetric=False)
FLOAT64 = torch.float64


def problem(seed: int, out: int = 5, columns: int = IN) -> tuple[Tensor, Tensor]:
    return randn(seed, out, columns), gram(seed + 1, columns)


def loss(q: Tensor, w: Tensor, g: Tensor) -> float:
    return float(((q - w) @ g * (q - w)).sum())


def rounding(w: Tensor, scheme: Scheme, method: Any, importance: Tensor) -> Any:
    """A column's rounding with the scales of the whole weight, in plain arithmetic."""
    scale, zero, _ = fit(w, scheme, method, importance)
    wide = spread(scale, w.shape)
    offset = torch.zeros_like(wide) if zero is None else spread(zero.double(), w.shape)
    low, high = scheme.grid.low, scheme.grid.high

    def column(values: Tensor, j: int) -> Tensor:
        code = torch.round(values / wide[:, j] + offset[:, j]).clamp(low, high)
        return (code - offset[:, j]) * wide[:, j]

    return column


# ------------------------------------------------------------------------------------------------ the published loops


@pytest.mark.parametrize("order", [None, "activation"])
@pytest.mark.parametrize(("scheme", "method"), [(W4, "minmax"), (W4, "gram"), (W3, "mse")])
@settings(max_examples=5)
@given(seed=seeds)
def test_gptq_is_the_published_loop(seed: int, scheme: Scheme, method: Any, order: Any) -> None:
    w, g = problem(seed)
    columns = g.diagonal().argsort(descending=True, stable=True) if order else torch.arange(IN)
    expected = textbook.gptq(w, g, rounding(w, scheme, method, g.diagonal()), 0.01, columns)
    got = dense(obs.sweep(w, obs.inverse_factor(g, 0.01, order), affine(scheme, method)))
    assert torch.allclose(got, expected, rtol=0, atol=1e-9)


@settings(max_examples=5)
@given(seed=seeds)
def test_sparsegpt_is_the_published_loop(seed: int) -> None:
    w, g = problem(seed)
    for pattern, how in ((Unstructured(0.6), {"ratio": 0.6}), (NM(keep=2, of=4), {"n_of_m": (2, 4)})):
        expected, kept = textbook.sparsegpt(w, g, 0.01, **how)
        got = obs.sweep(w, obs.inverse_factor(g), prune(pattern))
        assert torch.equal(got.mask, kept)
        assert torch.allclose(dense(got), expected, rtol=0, atol=1e-9)


@settings(max_examples=5)
@given(seed=seeds)
def test_joint_pruning_and_rounding_is_the_published_loop(seed: int) -> None:
    w, g = problem(seed)
    column = rounding(w, W4, "mse", g.diagonal())
    expected, kept = textbook.sparsegpt(w, g, 0.01, n_of_m=(2, 4), column=column)
    got = obs.sweep(w, obs.inverse_factor(g), then(prune(NM(keep=2, of=4)), affine(W4, "mse")))
    assert torch.equal(got.mask, kept)
    assert torch.allclose(dense(got), expected, rtol=0, atol=1e-9)


@settings(max_examples=5)
@given(seed=seeds)
def test_refreshed_scales_are_those_of_the_weight_when_its_group_is_reached(seed: int) -> None:
    w, g = problem(seed)
    moving, u, q = w.clone(), textbook.upper(textbook.damped(g, 0.01)), torch.zeros_like(w)
    scale, tied = torch.empty(0), torch.zeros(len(w), dtype=torch.bool)
    for j in range(IN):
        if j % 40 == 0:
            scale = moving[:, j : j + 40].abs().amax(1) / 7.5
        tied |= (moving[:, j] / scale + 7.5).abs() < 1e-9  # a negative extreme lies between two codes
        q[:, j] = (moving[:, j] / scale).round().clamp(-8, 7) * scale
        moving[:, j:] -= ((moving[:, j] - q[:, j]) / u[j, j])[:, None] * u[j, j:]
    got = obs.sweep(w, obs.inverse_factor(g), affine(W4, "minmax", refresh=True))
    assert got.scale.shape == (5, 5)
    equal = (dense(got) - q).abs().amax(1) < 1e-9
    assert bool((equal | tied).all())
    assert bool(equal.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_takes_the_decisions_of_float64(dtype: torch.dtype) -> None:
    """All but those that are near a tie: the published loop in float64 on the same stored weights and scales."""
    w, g = randn(0, 16, IN).to(dtype), gram(1, IN)
    column = rounding(w.double(), W4, "minmax", g.diagonal())
    expected = textbook.gptq(w.double(), g, column, 0.01, torch.arange(IN))
    got = obs.sweep(w.float(), obs.inverse_factor(g.float()), affine(W4))
    assert ((dense(got).double() - expected).abs() > 1e-4).double().mean() < 0.01
    low = obs.sweep(w, obs.inverse_factor(g.float()), affine(W4))
    assert low.scale.dtype == dense(low).dtype == dtype
    assert loss(dense(low).double(), w.double(), g) < 1.1 * loss(expected, w.double(), g)


def test_what_is_made_up_for_is_the_error_of_the_stored_value() -> None:
    """The first column's stored bfloat16 error, and not that of the float32 product, moves the second one."""
    g = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    w = torch.tensor([[1.01, 3.0]]).bfloat16()
    scale = torch.tensor(1.2345)
    thirds = Projection(
        lambda w, importance: scale.expand(1, 1), lambda w, s: (w / s).round() * s, encode=lambda values, s: values
    )
    seen = obs.sweep(w, obs.inverse_factor(g, damp=0.0), thirds._replace(project=lambda w, s: (w / s).round() * s))
    first = (w[0, 0].float() / scale).round() * scale
    stored = first.bfloat16().float()
    moved = w[0, 1].float() + (w[0, 0].float() - stored) * 0.5
    assert first != stored
    assert seen[0, 0] == stored
    assert seen[0, 1] == ((moved / scale).round() * scale).bfloat16()


# ------------------------------------------------------------------------------------------------------- closed forms


def frozen(values: Tensor, count: int) -> Projection:
    """Sets the first columns to given values and leaves all others free."""

    def fit(w: Tensor, importance: Any) -> Any:
        return torch.arange(w.shape[-1]).expand(1, -1) < count, values.expand(w.shape)

    return Projection(fit, lambda w, facts: torch.where(facts[0], facts[1], w), encode=lambda values, facts: values)


@settings(max_examples=10)
@given(seed=seeds, count=st.integers(0, 40))
def test_free_columns_end_where_they_make_up_best(seed: int, count: int) -> None:
    """OBS for a set in closed form: with columns S at q, the others are `w_F + (w_S - q_S) H_SF H_FF^-1`."""
    w, g = problem(seed, columns=40)
    fixed = randn(seed + 9, 5, 40)
    h = textbook.damped(g, 0.01)
    got = obs.sweep(w, obs.inverse_factor(g), frozen(fixed, count))
    s, f = slice(0, count), slice(count, 40)
    expected = w[:, f] + torch.linalg.solve(h[f, f], h[f, s] @ (w - fixed)[:, s].mT).mT
    assert torch.allclose(got[:, f], expected, rtol=0, atol=1e-8)
    assert torch.equal(got[:, s], fixed[:, s])


@settings(max_examples=10)
@given(seed=seeds, columns=st.sampled_from([7, 40, 150]))
def test_the_cost_of_a_sweep_is_its_pivots(seed: int, columns: int) -> None:
    """`tr(D H D') = sum_j (e_j / U_jj)^2` with e_j the error of column j against its moved weight."""
    w, g = problem(seed, columns=columns)
    h = textbook.damped(g, 0.01)
    factor, moved = obs.inverse_factor(g), []
    whole = Scheme(Int(3), "channel")
    watched = affine(whole)
    project = watched.project
    q = dense(obs.sweep(w, factor, watched._replace(project=lambda w, f: (moved.append(w.clone()), project(w, f))[1])))
    errors = (torch.stack(moved, -1) - q) / factor.pivot
    assert torch.allclose(errors.square().sum(), torch.tensor(loss(q, w, h), dtype=FLOAT64), rtol=1e-9)


@settings(max_examples=10)
@given(seed=seeds, order=st.sampled_from([None, "activation"]))
def test_the_factor_is_that_of_the_inverse(seed: int, order: Any) -> None:
    g = gram(seed, 30)
    factor = obs.inverse_factor(g, 0.01, order)
    at = torch.arange(30) if factor.order is None else factor.order
    h = textbook.damped(g, 0.01)[at][:, at]
    assert torch.allclose(factor.pivot, textbook.upper(h).diagonal(), rtol=1e-9)
    a = factor.feedback.tril(-1).mT + torch.eye(30, dtype=FLOAT64)  # with a unit diagonal: A diag(U)
    assert torch.allclose(a / factor.pivot @ (a / factor.pivot).mT, h, rtol=0, atol=1e-9 * h.abs().max())
    assert torch.equal(factor.importance, g.diagonal())
    if order:
        assert (g.diagonal()[at].diff() <= 0).all()


# -------------------------------------------------------------------------------------------------------- brute force


@settings(max_examples=20)
@given(seed=seeds)
def test_all_roundings_of_four_weights(seed: int) -> None:
    """The sweep never beats the best of all roundings, and is on the whole far nearer to it than plain rounding."""
    w, g = randn(seed, 4, 4), gram(seed + 1, 4)
    scheme = Scheme(Int(2), "channel")
    scale = fit(w, scheme)[0]
    codes = torch.tensor(list(itertools.product(range(-2, 2), repeat=4)), dtype=FLOAT64)
    errors = scale[:, None] * codes - w[:, None]
    best = (errors @ g * errors).sum(-1).amin(-1)
    swept = dense(obs.sweep(w, obs.inverse_factor(g, 0.0), affine(scheme)))
    error = ((swept - w) @ g * (swept - w)).sum(-1)
    assert (error >= best * (1 - 1e-6)).all()


def test_the_sweep_comes_near_the_best_rounding() -> None:
    ratios, plain = [], []
    for seed in range(50):
        w, g = randn(seed, 4, 4), gram(seed + 1, 4)
        scheme = Scheme(Int(3), "channel")
        codes = torch.tensor(list(itertools.product(range(-4, 4), repeat=4)), dtype=FLOAT64)
        errors = fit(w, scheme)[0][:, None] * codes - w[:, None]
        best = (errors @ g * errors).sum(-1).amin(-1).sum()
        swept = dense(obs.sweep(w, obs.inverse_factor(g, 0.0, "activation"), affine(scheme)))
        ratios.append(loss(swept, w, g) / best)
        plain.append(loss(dense(obs.project(w, affine(scheme))), w, g) / best)
    assert 1 <= torch.tensor(ratios).median() < 2 < torch.tensor(plain).median()


@settings(max_examples=20)
@given(seed=seeds)
def test_all_masks_of_four_weights(seed: int) -> None:
    """No mask with its best weights costs less than the best of the six, and the sweep's weights are feasible."""
    w, g = randn(seed, 4, 4), gram(seed + 1, 4)
    swept = obs.sweep(w, obs.inverse_factor(g, 0.0), prune(NM(keep=2, of=4)))
    for row in range(4):
        costs = {}
        for pruned in itertools.combinations(range(4), 2):
            s = list(pruned)
            inverse = torch.linalg.inv(g)
            costs[pruned] = float(w[row, s] @ torch.linalg.solve(inverse[s][:, s], w[row, s]))
        chosen = tuple(j for j in range(4) if not swept.mask[row, j])
        cost = loss(dense(swept)[row : row + 1], w[row : row + 1], g)
        assert cost >= costs[chosen] * (1 - 1e-6)
        assert cost >= min(costs.values()) * (1 - 1e-6)


def test_a_diagonal_gram_makes_the_choice_exact() -> None:
    w, sizes = randn(0, 3, 8), torch.arange(1.0, 9.0, dtype=FLOAT64)
    mask = obs.sweep(w, obs.inverse_factor(sizes.diag(), 0.0), prune(NM(keep=2, of=4))).mask
    cost = (w.square() * sizes).unflatten(-1, (2, 4))
    for row, group in itertools.product(range(3), range(2)):
        best = min(itertools.combinations(range(4), 2), key=lambda s: float(cost[row, group, list(s)].sum()))
        assert [j for j in range(4) if not mask[row, 4 * group + j]] == list(best)


# ----------------------------------------------------------------------------------------------- failures and dead ends


def indefinite(shortfall: float, columns: int = 8) -> Tensor:
    """A matrix with mean diagonal 1 whose least eigenvalue is the negative of the shortfall."""
    q = torch.linalg.qr(randn(3, columns, columns)).Q
    values = torch.full((columns,), (columns + shortfall) / (columns - 1), dtype=FLOAT64)
    values[0] = -shortfall
    return q @ values.diag() @ q.mT


@pytest.mark.parametrize(
    ("shortfall", "damping", "failures"), [(-0.1, 0.01, 0), (0.05, 0.1, 1), (0.5, 1.0, 2), (5.0, 10.0, 3)]
)
def test_the_ladder_of_dampings(shortfall: float, damping: float, failures: int) -> None:
    factor = obs.inverse_factor(indefinite(shortfall))
    assert (factor.damping.item(), factor.failures.item()) == (pytest.approx(damping), failures)
    by_hand = obs.inverse_factor(indefinite(shortfall), damp=damping)
    assert torch.equal(factor.feedback, by_hand.feedback)


def test_the_end_of_the_ladder_is_the_plain_projection() -> None:
    g, w = indefinite(50.0), randn(0, 3, 8)
    factor = obs.inverse_factor(g)
    assert (factor.damping.item(), factor.failures.item()) == (torch.inf, 4)
    for projection in (affine(Scheme(Int(3), "channel")), prune(NM(keep=2, of=4))):
        plain = obs.project(w, projection, g.diagonal().clamp(min=0))
        assert torch.equal(dense(obs.sweep(w, factor, projection)), dense(plain))


def test_a_failure_can_be_raised() -> None:
    with pytest.raises(NotPositiveDefinite, match=r"dampings 0\.01, 0\.1, 1, 10; calibrate on more text"):
        obs.inverse_factor(indefinite(50.0), on_failure="raise")
    assert issubclass(NotPositiveDefinite, torch.linalg.LinAlgError)
    assert obs.inverse_factor(indefinite(5.0), on_failure="raise").failures == 3


def test_each_expert_has_its_own_ladder() -> None:
    matrices = [indefinite(s) for s in (-0.1, 0.5, 50.0)]
    stacked = obs.inverse_factor(torch.stack(matrices))
    mapped = torch.func.vmap(obs.inverse_factor)(torch.stack(matrices))
    assert stacked.failures.tolist() == mapped.failures.tolist() == [0, 2, 4]
    assert stacked.damping.tolist() == mapped.damping.tolist() == [pytest.approx(0.01), 1.0, torch.inf]
    for i, matrix in enumerate(matrices):
        alone = obs.inverse_factor(matrix)
        for made in (stacked, mapped):
            assert torch.allclose(made.feedback[i], alone.feedback, rtol=0, atol=1e-12)
            assert torch.allclose(made.pivot[i], alone.pivot, rtol=1e-12)


def test_without_damping_the_ladder_still_climbs() -> None:
    factor = obs.inverse_factor(indefinite(0.005), damp=0.0)
    assert (factor.damping.item(), factor.failures.item()) == (pytest.approx(0.01), 1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gram_that_is_not_finite_is_refused(bad: float) -> None:
    x = correlated(0, 20, 6)
    x[3, 2] = bad
    with pytest.raises(BadInput, match="NaN or infinity"):
        obs.inverse_factor(x.mT @ x)


@pytest.mark.parametrize("damp", [0.0, 0.01])
@pytest.mark.parametrize("order", [None, "activation"])
def test_a_dead_column_is_left_to_itself(damp: float, order: Any) -> None:
    """It gets its plain rounding; the others get what they get without it."""
    w, g = problem(0, columns=24)
    dead = torch.tensor([3, 17])
    g[dead], g[:, dead] = 0.0, 0.0
    alive = torch.ones(24, dtype=torch.bool).index_fill(0, dead, False)
    scheme = Scheme(Int(3), "channel")
    fixed = fit(w, scheme)
    same = affine(scheme)._replace(fit=lambda w, importance: fixed)
    got = dense(obs.sweep(w, obs.inverse_factor(g, damp, order), same))
    assert torch.equal(got[:, dead], dense(obs.project(w, same))[:, dead])
    shrunk = damp * float(g.diagonal().mean() / g.diagonal()[alive].mean())
    without = obs.sweep(w[:, alive], obs.inverse_factor(g[alive][:, alive], shrunk, order), same)
    assert torch.allclose(got[:, alive], dense(without), rtol=0, atol=1e-9)


def test_a_dead_column_is_pruned_first() -> None:
    w, g = problem(0, columns=24)
    g[5], g[:, 5] = 0.0, 0.0
    mask = obs.sweep(100 * w, obs.inverse_factor(g), prune(Unstructured(5 / 120), block=24)).mask
    assert (~mask).sum(0).tolist() == [5 if j == 5 else 0 for j in range(24)]


def test_an_input_that_never_came_compensates_nothing() -> None:
    w = randn(0, 3, 8)
    factor = obs.inverse_factor(torch.zeros(8, 8, dtype=FLOAT64))
    assert torch.equal(
        dense(obs.sweep(w, factor, prune(NM(keep=2, of=4)))), dense(obs.project(w, prune(NM(keep=2, of=4))))
    )


def test_spans_need_the_natural_order() -> None:
    w, g = problem(0, columns=24)
    factor = obs.inverse_factor(g, order="activation")
    for projection in (prune(NM(keep=2, of=4)), affine(Scheme(Int(4), "group", 8), refresh=True)):
        with pytest.raises(BadInput, match="natural order"):
            obs.sweep(w, factor, projection)


# ----------------------------------------------------------------------------------------------------- exact structure


@settings(max_examples=10)
@given(seed=seeds, columns=st.integers(1, 300), ratio=st.sampled_from([0.1, 0.5, 0.9]))
def test_each_block_loses_exactly_its_share(seed: int, columns: int, ratio: float) -> None:
    w, g = problem(seed, 3, columns)
    mask = obs.sweep(w, obs.inverse_factor(g), prune(Unstructured(ratio))).mask
    assert [int((~m).sum()) for m in mask.split(128, -1)] == [int(m.numel() * ratio) for m in mask.split(128, -1)]


@settings(max_examples=10)
@given(seed=seeds, span=st.integers(1, 140))
def test_spans_of_any_width_tile_the_columns(seed: int, span: int) -> None:
    """Each column is decided exactly once, in order, whatever the blocks around it."""
    w, g = problem(seed, 2, 150)
    widths: list[int] = []

    def choose(facts: Any, w: Tensor, pivot: Tensor) -> Any:
        widths.append(w.shape[-1])
        return prune(Unstructured(0.5)).choose(facts, w, pivot)  # type: ignore[misc]  # it has one

    got = obs.sweep(w, obs.inverse_factor(g), prune(Unstructured(0.5), block=span)._replace(choose=choose))
    assert widths == [min(span, 150 - a) for a in range(0, 150, span)]
    assert torch.allclose(dense(got), textbook.sparsegpt(w, g, 0.01, ratio=0.5, block=span)[0], rtol=0, atol=1e-8)


def test_one_gram_serves_a_stack_of_weights() -> None:
    w, g = randn(0, 3, 5, 24), gram(1, 24)
    factor = obs.inverse_factor(g, order="activation")
    scheme = Scheme(Int(3), "channel")
    whole = dense(obs.sweep(w, factor, affine(scheme)))
    mapped = dense(torch.func.vmap(lambda w: obs.sweep(w, factor, affine(scheme)))(w))
    for i in range(3):
        alone = dense(obs.sweep(w[i], factor, affine(scheme)))
        assert torch.allclose(whole[i], alone, rtol=0, atol=1e-12)
        assert torch.allclose(mapped[i], alone, rtol=0, atol=1e-12)


def test_many_grams_serve_one_weight() -> None:
    w, g = randn(0, 5, 24), gram(1, 24, experts=(3,))
    swept = torch.func.vmap(lambda g: obs.sweep(w, obs.inverse_factor(g), prune(NM(keep=2, of=4))))(g)
    assert isinstance(swept, Sparse)
    for i in range(3):
        alone = obs.sweep(w, obs.inverse_factor(g[i]), prune(NM(keep=2, of=4)))
        assert torch.allclose(dense(swept)[i], dense(alone), rtol=0, atol=1e-9)
