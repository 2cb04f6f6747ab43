"""Laws of projections, plain and swept: what is stored is what was decided, and compensation pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from laws.shared import IN, OUT, untouched
from ptq.numerics import obs
from ptq.numerics.leaves import Leaf, dense, take
from ptq.numerics.projections import Projection
from strategies import gram, randn


def projection_case(*experts: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return randn(1, *experts, OUT, IN, dtype=dtype), gram(2, IN, experts=experts)


def encoding_loses_nothing(make: Callable[[], Projection]) -> None:
    """`dense(encode(w_hat)) == w_hat`, whatever the dtype it is stored in."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        w, g = projection_case(dtype=dtype)
        seen: list[Tensor] = []
        spied = make()
        encode = spied.encode

        def spy(values: Any, facts: Any, encode: Any = encode, seen: list[Tensor] = seen) -> Leaf:
            seen.append(values)
            return encode(values, facts)

        spied = spied._replace(encode=spy)
        results = obs.project(w, spied, g.diagonal()), obs.sweep(w, obs.inverse_factor(g), spied)
        for result, values in zip(results, seen, strict=True):
            assert torch.equal(dense(result), values)
            assert dense(result).dtype == dtype


def infinite_damping_compensates_nothing(make: Callable[[], Projection]) -> None:
    """The limit of the sweep is the plain projection, on columns that count alike."""
    w, g = projection_case()
    even = torch.full((IN,), 1.0, dtype=torch.float64)
    g = g / (g.diagonal().sqrt()[:, None] * g.diagonal().sqrt())
    swept = obs.sweep(w, obs.inverse_factor(g, damp=1e30), make())
    assert torch.equal(dense(swept), dense(obs.project(w, make(), even)))


def diagonal_gram_compensates_nothing(make: Callable[[], Projection]) -> None:
    w, g = projection_case()
    diagonal = g.diagonal()
    swept = obs.sweep(w, obs.inverse_factor(diagonal.diag(), damp=0.0), make())
    assert torch.equal(dense(swept), dense(obs.project(w, make(), diagonal)))


def compensation_pays(make: Callable[[], Projection]) -> None:
    """It raises the error of the weight, and lowers that of the output: greedily, so on the whole."""
    w = torch.cat([randn(seed, 8, OUT, IN) for seed in range(8)])
    g = torch.stack([gram(seed + 50, IN) for seed in range(8)]).repeat_interleave(8, 0)
    swept = dense(obs.sweep(w, obs.inverse_factor(g), make())) - w
    plain = dense(obs.project(w, make(), g.diagonal(dim1=-2, dim2=-1))) - w

    def by_gram(error: Tensor) -> Tensor:
        return error.unflatten(0, (8, 8)).sum((1, 2, 3))

    output = (by_gram(swept @ g * swept) / by_gram(plain @ g * plain)).log().sum()
    weight = (by_gram(swept.square()) / by_gram(plain.square())).log().sum()
    assert output < 0 < weight


def sweep_treats_stacks_one_by_one(make: Callable[[], Projection]) -> None:
    w, g = projection_case(3)
    projection = make()
    whole = obs.sweep(w, obs.inverse_factor(g), projection)
    mapped = torch.func.vmap(lambda w, g: obs.sweep(w, obs.inverse_factor(g), projection))(w, g)
    for i in range(3):
        alone = dense(obs.sweep(w[i], obs.inverse_factor(g[i]), projection))
        assert torch.allclose(dense(take(whole, i)), alone, rtol=0, atol=1e-9)
        assert torch.allclose(dense(take(mapped, i)), alone, rtol=0, atol=1e-9)


def scale_of_the_gram_is_free(make: Callable[[], Projection]) -> None:
    w, g = projection_case()
    one, other = (dense(obs.sweep(w, obs.inverse_factor(c * g), make())) for c in (1.0, 2.0**-20))
    assert torch.allclose(one, other, rtol=0, atol=1e-9)


def order_of_rows_is_free(make: Callable[[], Projection]) -> None:
    """Rows share nothing but the Gram matrix, unless a mask or a scale is chosen for all of them at once."""
    w, g = projection_case()
    turned = torch.arange(OUT - 1, -1, -1)
    projection = make()
    one = dense(obs.sweep(w, obs.inverse_factor(g), projection))
    other = dense(obs.sweep(w[turned], obs.inverse_factor(g), keep_turned(projection, turned)))
    assert torch.allclose(one[turned], other, rtol=0, atol=1e-9)


def keep_turned(projection: Projection, turned: Tensor) -> Projection:
    """A projection whose own masks, if it brought any along, are turned like the weight."""

    def fit(w: Tensor, importance: Tensor | None) -> Any:
        facts = projection.fit(w, importance)
        return optree.tree_map(lambda t: t[turned] if t.dtype == torch.bool and brought(t) else t, facts)

    def brought(t: Tensor) -> bool:
        return torch.equal(t, randn(5, OUT, IN) > 0)

    return projection._replace(fit=fit)


def sweep_changes_no_input(make: Callable[[], Projection]) -> None:
    w, g = projection_case()
    factor = obs.inverse_factor(g)
    with untouched((w, g, factor)):
        obs.sweep(w, factor, make())
        obs.project(w, make(), g.diagonal())
        obs.inverse_factor(g, order="activation")
