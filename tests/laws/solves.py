"""Laws of solves: pure, one weight and one expert at a time, whatever the order, the cut and the storage."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from laws.shared import IN, OUT, identical, leaf, untouched
from ptq._tree import tensors, tree_map
from ptq.base import State, Transform
from ptq.errors import BadInput
from ptq.numerics.lazy import Lazy
from ptq.numerics.leaves import Leaf, Quantized, Sparse, Transposed, dense, take
from ptq.pipeline.foresee import abstract, foreseen
from strategies import correlated, randn


def site(transform: Transform, state: State, x: Tensor, weights: tuple[str, ...] = ("a.weight",)) -> Any:
    """Statistics of one site, measured as the transform declares."""
    declared = transform.init(state, {weights[0]: weights})
    return {s: {kind: zero.update(x) for kind, zero in kinds.items()} for s, kinds in declared.items()}


def solved(transform: Transform, w: Leaf, x: Tensor) -> Leaf:
    state = State({"a.weight": w})
    return transform.apply(state, site(transform, state, x), {"a.weight": ("a.weight",)})[0].params["a.weight"]


def changes_no_input(make: Callable[[], Transform]) -> None:
    transform, state = make(), State({"a.weight": randn(0, OUT, IN, dtype=torch.float32)})
    stats = site(transform, state, correlated(1, 64, IN, dtype=torch.float32))
    with untouched((state, stats)):
        transform.apply(state, stats, {"a.weight": ("a.weight",)})
    assert list(state.params) == ["a.weight"]


def keeps_shape_and_dtype(make: Callable[[], Transform]) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        new = solved(make(), randn(0, OUT, IN, dtype=dtype), correlated(1, 64, IN))
        assert dense(new).shape == (OUT, IN)
        assert dense(new).dtype == dtype
        assert dense(new).isfinite().all()


def declares_from_shapes_alone(make: Callable[[], Transform]) -> None:
    transform = make()
    sites = {"a.weight": ("a.weight", "b.weight")}
    abstract = State({name: torch.empty(OUT, IN, device="meta") for name in ("a.weight", "b.weight")})
    declared = transform.init(abstract, sites)
    assert set(declared) <= {"a.weight"}
    x = correlated(1, 64, IN, dtype=torch.float32)
    for zero in declared.get("a.weight", {}).values():
        assert identical(zero.update(x), type(zero).measure(x))


def is_foreseen_from_shapes(make: Callable[[], Transform]) -> None:
    w = randn(0, OUT, IN, dtype=torch.float32)
    got = foreseen(make(), {"a.weight": abstract(w)}, ["a.weight"])["a.weight"]
    assert all(t.is_meta for t in tensors(got))
    nothing = tree_map(lambda t: torch.zeros(t.shape, dtype=t.dtype), (got, solved(make(), w, correlated(1, 64, IN))))
    assert identical(*nothing)


def treats_stacked_experts_one_by_one(make: Callable[[], Transform]) -> None:
    w, x = randn(0, 3, OUT, IN), correlated(1, 3, 64, IN)
    whole = solved(make(), w, x)
    for i in range(3):
        alone = solved(make(), w[i], x[i])
        assert torch.allclose(dense(take(whole, i)), dense(alone), rtol=0, atol=1e-9)


def runs_under_vmap(make: Callable[[], Transform]) -> None:
    w, x = randn(0, 3, OUT, IN), correlated(1, 3, 64, IN)
    batched = torch.func.vmap(lambda w, x: solved(make(), w, x))(w, x)
    assert torch.allclose(dense(batched), dense(solved(make(), w, x)), rtol=0, atol=1e-9)


def works_on_any_subset_of_sites(make: Callable[[], Transform]) -> None:
    transform = make()
    state = State({"a.weight": randn(0, OUT, IN), "b.weight": randn(1, 4, IN), "c.weight": randn(2, OUT, 8)})
    sites = {"a.weight": ("a.weight", "b.weight"), "c.weight": ("c.weight",)}
    stats = site(transform, state, correlated(3, 64, IN), ("a.weight", "b.weight"))
    stats |= site(transform, state, correlated(4, 64, 8), ("c.weight",))
    together, _ = transform.apply(state, stats, sites)
    for order in itertools.permutations(sites):
        apart = state
        for one in order:
            apart, _ = transform.apply(apart, stats, {one: sites[one]})
        assert identical(apart.params, together.params)


def does_not_depend_on_how_data_was_cut(make: Callable[[], Transform]) -> None:
    transform, state = make(), State({"a.weight": randn(0, OUT, IN)})
    x = correlated(1, 64, IN)
    declared = transform.init(state, {"a.weight": ("a.weight",)})
    results = []
    for cuts in ((64,), (1, 20, 43), (0, 63, 1)):
        stats = {s: dict(kinds) for s, kinds in declared.items()}
        for part in x.split(cuts):
            stats = {s: {k: v.update(part) for k, v in kinds.items()} for s, kinds in stats.items()}
        results.append(dense(transform.apply(state, stats, {"a.weight": ("a.weight",)})[0].params["a.weight"]))
    assert all(torch.allclose(r, results[0], rtol=0, atol=1e-9) for r in results)


def wraps_what_is_stored_transposed(make: Callable[[], Transform]) -> None:
    w, x = randn(0, OUT, IN), correlated(1, 64, IN)
    new = solved(make(), Transposed(w), x)
    assert isinstance(new, Transposed)
    assert torch.equal(dense(new).mT, dense(solved(make(), w, x)))


def reads_lazy_leaves(make: Callable[[], Transform]) -> None:
    w, x = randn(0, OUT, IN, dtype=torch.float32), correlated(1, 64, IN)
    assert identical(solved(make(), Elsewhere(w), x), solved(make(), w, x))


def refuses_what_is_quantized(make: Callable[[], Transform]) -> None:
    transform, x = make(), correlated(1, 64, IN)
    for kind in ("int4", "sparse int4"):
        state = State({"a.weight": leaf(kind)})
        with pytest.raises(BadInput, match=r"^a\.weight: is quantized already"):
            transform.init(state, {"a.weight": ("a.weight",)})
        stats = site(transform, State({"a.weight": dense(leaf(kind))}), x)
        with pytest.raises(BadInput, match=r"^a\.weight: is quantized already"):
            transform.apply(state, stats, {"a.weight": ("a.weight",)})


def quantizer_keeps_the_mask_of_a_sparse_leaf(make: Callable[[], Transform]) -> None:
    w = leaf("sparse")
    new = solved(make(), w, correlated(1, 64, IN))
    assert isinstance(new, Sparse)
    assert isinstance(new.values, Quantized)
    assert new.pattern == w.pattern
    assert torch.equal(new.mask, w.mask)
    assert (dense(new)[~w.mask] == 0).all()


class Elsewhere(Lazy):
    """A leaf that is no tensor until it is read."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def load(self) -> Leaf:
        return self.values
