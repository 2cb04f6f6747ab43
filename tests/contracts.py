"""Every member of ptq's small algebras, and the laws it must obey: a new member is one line here.

A law takes a member and fails by an assertion. `LAWS` says which laws hold for which kind of member.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from ptq._tree import NAMESPACE, tensors
from ptq.base import Link, State, Transform, leafwise
from ptq.errors import BadInput
from ptq.numerics import obs
from ptq.numerics.fits import fit, quantize
from ptq.numerics.grids import Float8, Grid, Int
from ptq.numerics.lazy import Lazy
from ptq.numerics.leaves import Leaf, Quantized, Sparse, Transposed, dense, linear, nbytes, take, validate
from ptq.numerics.patterns import NM, Pattern, Unstructured
from ptq.numerics.projections import Projection, affine, keep, prune, then
from ptq.numerics.schemes import Scheme
from ptq.numerics.stats import AbsMax, AbsMean, Gram, Range, SecondMoment, Statistic
from ptq.transforms.fold import fold_norms
from ptq.transforms.gptq import gptq
from ptq.transforms.magnitude import magnitude
from ptq.transforms.rtn import rtn
from ptq.transforms.sparsegpt import sparsegpt
from ptq.transforms.wanda import wanda
from strategies import correlated, gram, randn

W4 = Scheme(Int(4), "group", 8)
W3_ASYM = Scheme(Int(3), "channel", symmetric=False)
FP8 = Scheme(Float8(), "channel")
OUT, IN = 6, 16


def ternary() -> Projection:
    """What a researcher writes: a projection of their own."""

    def fit(w: Tensor, importance: Tensor | None) -> Tensor:
        return w.abs().mean(-1, keepdim=True)

    def project(w: Tensor, step: Tensor) -> Tensor:
        return (w / step).round().clamp(-1, 1) * step

    return Projection(fit, project, encode=lambda values, step: values)


SOLVES: dict[str, Callable[[], Transform]] = {
    "rtn minmax": lambda: rtn(W4, "minmax"),
    "rtn mse": lambda: rtn(W3_ASYM),
    "rtn gram": lambda: rtn(W4, "gram"),
    "rtn fp8": lambda: rtn(FP8),
    "magnitude 50": lambda: magnitude(Unstructured(0.5), "row"),
    "magnitude 2:4": lambda: magnitude(NM(keep=2, of=4)),
    "wanda 50": lambda: wanda(Unstructured(0.5)),
    "wanda 2:4": lambda: wanda(NM(keep=2, of=4)),
    "gptq": lambda: gptq(W4),
    "gptq natural": lambda: gptq(W3_ASYM, order=None, fit="mse"),
    "gptq refresh": lambda: gptq(W4, refresh=True),
    "gptq fp8": lambda: gptq(FP8, fit="minmax"),
    "sparsegpt 37": lambda: sparsegpt(Unstructured(0.37)),
    "sparsegpt 2:4": lambda: sparsegpt(NM(keep=2, of=4)),
    "sparsegpt 2:4 int4": lambda: sparsegpt(NM(keep=2, of=4), W4),
    "sparsegpt 50 fp8": lambda: sparsegpt(Unstructured(0.5), FP8),
    "custom": lambda: leafwise((), lambda leaf: dense(leaf).sign()),
    "custom projection": lambda: leafwise(
        ("gram",), lambda leaf, gram: obs.sweep(dense(leaf), obs.inverse_factor(gram.sum), ternary())
    ),
}
QUANTIZERS = [name for name in SOLVES if name.startswith(("rtn", "gptq"))]
REPARAMS: dict[str, Callable[[], Transform]] = {"fold_norms": fold_norms}
STATISTICS: dict[str, type[Statistic]] = {kind.needs: kind for kind in (Gram, SecondMoment, AbsMax, AbsMean, Range)}
GRIDS: dict[str, Grid] = {str(grid): grid for grid in (*map(Int, range(2, 9)), Float8())}
PATTERNS: dict[str, Pattern] = {
    str(p): p for p in (Unstructured(0.0), Unstructured(0.37), Unstructured(0.9), NM(2, 4), NM(1, 4), NM(4, 8))
}
PROJECTIONS: dict[str, Callable[[], Projection]] = {
    "affine": lambda: affine(W4, "mse"),
    "affine asymmetric": lambda: affine(W3_ASYM),
    "affine fp8": lambda: affine(FP8, "gram"),
    "affine tensor": lambda: affine(Scheme(Int(8), "tensor", symmetric=False), "mse"),
    "affine refresh": lambda: affine(W4, "gram", refresh=True),
    "prune 50": lambda: prune(Unstructured(0.5), block=8),
    "prune 2:4": lambda: prune(NM(keep=2, of=4)),
    "prune preserve": lambda: prune(NM(keep=2, of=4), preserve=True),
    "then": lambda: then(prune(NM(keep=2, of=4)), affine(W4)),
    "then asymmetric": lambda: then(prune(Unstructured(0.5), block=8), affine(W3_ASYM, "mse")),
    "then refresh": lambda: then(prune(NM(keep=2, of=4)), affine(W4, "mse", refresh=True)),
    "keep": lambda: then(keep(randn(5, OUT, IN) > 0), affine(W4, "mse")),
    "ternary": ternary,
    "pruned ternary": lambda: then(prune(NM(keep=2, of=4)), ternary()),
}


def leaf(kind: str, *experts: int) -> Leaf:
    """A leaf of each kind, `[*experts, OUT, IN]`."""
    w = randn(3, *experts, OUT, IN, dtype=torch.bfloat16)
    mask = NM(keep=2, of=4).mask(w.abs())
    four = quantize(w, *fit(w, W4), W4.grid)
    return {
        "tensor": w,
        "int4": four,
        "int3 asymmetric": quantize(w, *fit(w, W3_ASYM), W3_ASYM.grid),
        "fp8": quantize(w, *fit(w, FP8), FP8.grid),
        "sparse": Sparse(w.masked_fill(~mask, 0), mask, NM(keep=2, of=4)),
        "sparse int4": Sparse(four, mask, None),
        "transposed int4": Transposed(four),
        "transposed": Transposed(w),
    }[kind]


LEAVES = ["tensor", "int4", "int3 asymmetric", "fp8", "sparse", "sparse int4", "transposed int4", "transposed"]


# ---------------------------------------------------------------------------------------------------------- comparing


def bits(t: Tensor) -> Tensor:
    return t.reshape(-1).contiguous().view(torch.uint8)


def identical(a: Any, b: Any) -> bool:
    """The same structure with bit-equal tensors."""
    (x, s), (y, t) = (optree.tree_flatten(tree, namespace=NAMESPACE) for tree in (a, b))
    return s == t and all(p.dtype == q.dtype and torch.equal(bits(p), bits(q)) for p, q in zip(x, y, strict=True))


class untouched:  # noqa: N801  # a context manager, used like a function
    """Checks that the tensors of a tree are bit-equal with the same version after a block."""

    def __init__(self, tree: Any) -> None:
        self.tensors = tensors(tree)
        self.before = [(t.clone(), t._version) for t in self.tensors]

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None:
        for t, (copy, version) in zip(self.tensors, self.before, strict=True):
            assert t._version == version
            assert torch.equal(bits(t), bits(copy))


# ------------------------------------------------------------------------------------------------------------- solves


def site(transform: Transform, state: State, x: Tensor, weights: tuple[str, ...] = ("a.weight",)) -> Any:
    """Statistics of one site, measured as the transform declares."""
    declared = transform.init(state, {weights[0]: weights})
    return {s: {kind: zero.update(x) for kind, zero in kinds.items()} for s, kinds in declared.items()}


def solved(transform: Transform, w: Leaf, x: Tensor) -> Leaf:
    state = State({"a.weight": w})
    return transform.apply(state, site(transform, state, x), {"a.weight": ("a.weight",)})[0].params["a.weight"]


def solve_changes_no_input(make: Callable[[], Transform]) -> None:
    transform, state = make(), State({"a.weight": randn(0, OUT, IN, dtype=torch.float32)})
    stats = site(transform, state, correlated(1, 64, IN, dtype=torch.float32))
    with untouched((state, stats)):
        transform.apply(state, stats, {"a.weight": ("a.weight",)})
    assert list(state.params) == ["a.weight"]


def solve_keeps_shape_and_dtype(make: Callable[[], Transform]) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        new = solved(make(), randn(0, OUT, IN, dtype=dtype), correlated(1, 64, IN))
        assert dense(new).shape == (OUT, IN)
        assert dense(new).dtype == dtype
        assert dense(new).isfinite().all()


def solve_declares_from_shapes_alone(make: Callable[[], Transform]) -> None:
    transform = make()
    sites = {"a.weight": ("a.weight", "b.weight")}
    abstract = State({name: torch.empty(OUT, IN, device="meta") for name in ("a.weight", "b.weight")})
    declared = transform.init(abstract, sites)
    assert set(declared) <= {"a.weight"}
    x = correlated(1, 64, IN, dtype=torch.float32)
    for zero in declared.get("a.weight", {}).values():
        assert identical(zero.update(x), type(zero).measure(x))


def solve_treats_stacked_experts_one_by_one(make: Callable[[], Transform]) -> None:
    w, x = randn(0, 3, OUT, IN), correlated(1, 3, 64, IN)
    whole = solved(make(), w, x)
    for i in range(3):
        alone = solved(make(), w[i], x[i])
        assert torch.allclose(dense(take(whole, i)), dense(alone), rtol=0, atol=1e-9)


def solve_runs_under_vmap(make: Callable[[], Transform]) -> None:
    w, x = randn(0, 3, OUT, IN), correlated(1, 3, 64, IN)
    batched = torch.func.vmap(lambda w, x: solved(make(), w, x))(w, x)
    assert torch.allclose(dense(batched), dense(solved(make(), w, x)), rtol=0, atol=1e-9)


def solve_works_on_any_subset_of_sites(make: Callable[[], Transform]) -> None:
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


def solve_does_not_depend_on_how_data_was_cut(make: Callable[[], Transform]) -> None:
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


def solve_wraps_what_is_stored_transposed(make: Callable[[], Transform]) -> None:
    w, x = randn(0, OUT, IN), correlated(1, 64, IN)
    new = solved(make(), Transposed(w), x)
    assert isinstance(new, Transposed)
    assert torch.equal(dense(new).mT, dense(solved(make(), w, x)))


def solve_reads_lazy_leaves(make: Callable[[], Transform]) -> None:
    w, x = randn(0, OUT, IN, dtype=torch.float32), correlated(1, 64, IN)
    assert identical(solved(make(), Elsewhere(w), x), solved(make(), w, x))


def solve_refuses_what_is_quantized(make: Callable[[], Transform]) -> None:
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


# ----------------------------------------------------------------------------------------------------------- reparams


def reparam_case(bias: bool = True, offset: float = 0.0) -> tuple[State, dict[str, tuple[str, ...]], tuple[Link, ...]]:
    params = {"n.weight": randn(7, IN), "a.weight": randn(8, OUT, IN), "b.weight": Transposed(randn(9, 4, IN))}
    params |= {"n.bias": randn(10, IN)} if bias else {}
    sites = {"a.weight": ("a.weight", "b.weight")}
    return State(params), sites, (Link("n.weight", ("a.weight", "b.weight"), offset),)


def reparam_block(state: State, x: Tensor, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    """The norm's output and what its two readers make of it."""
    p = state.params
    y = (p["n.weight"] + offset) * x + p.get("n.bias", 0.0)
    return y, linear(y, p["a.weight"]), y @ dense(p["b.weight"])


def reparam_keeps_the_function(make: Callable[[], Transform]) -> None:
    for bias, offset in itertools.product((True, False), (0.0, 1.0)):
        state, sites, links = reparam_case(bias, offset)
        new, _ = make().apply(state, {}, sites, links=links)
        x = randn(11, 5, IN)
        assert not torch.equal(new.params["a.weight"], state.params["a.weight"])
        for before, after in zip(reparam_block(state, x, offset)[1:], reparam_block(new, x, offset)[1:], strict=True):
            assert torch.allclose(before, after, rtol=1e-10, atol=1e-10)


def reparam_moves_statistics(make: Callable[[], Transform]) -> None:
    for offset in (0.0, 1.0):
        state, sites, links = reparam_case(offset=offset)
        x = randn(11, 50, IN)
        old = reparam_block(state, x, offset)[0]
        stats = {"a.weight": {kind: cls.measure(old) for kind, cls in STATISTICS.items()}}
        new, moved = make().apply(state, stats, sites, links=links)
        inputs = reparam_block(new, x, offset)[0]
        for kind, cls in STATISTICS.items():
            close(moved["a.weight"][kind], cls.measure(inputs))


def reparam_changes_no_input(make: Callable[[], Transform]) -> None:
    state, sites, links = reparam_case()
    stats = {"a.weight": {kind: cls.measure(randn(1, 9, IN)) for kind, cls in STATISTICS.items()}}
    with untouched((state, stats)):
        make().apply(state, stats, sites, links=links)


# --------------------------------------------------------------------------------------------------------- statistics


def close(a: Statistic, b: Statistic, tolerance: float = 1e-12) -> None:
    """Equal up to rounding: exact means 1e-12 of the largest entry in float64, 1e-6 in float32."""
    for p, q in zip(tensors(a), tensors(b), strict=True):
        finite = q.isfinite()
        size = q[finite].abs().max() if finite.any() else torch.tensor(1.0)
        assert torch.equal(p.isfinite(), finite)
        assert torch.equal(p[~finite], q[~finite])
        assert torch.allclose(p[finite], q[finite], rtol=0, atol=tolerance * max(1e-30, float(size)))


def samples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for seed, experts in ((1, ()), (2, (3,))):
        yield tuple(correlated(seed + n, *experts, n, 5, dtype=dtype) for n in (7, 1, 12))  # type: ignore[misc]


def merge_is_a_commutative_monoid(cls: type[Statistic]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        for x, y, z in samples(dtype):
            a, b, c = map(cls.measure, (x, y, z))
            zero = cls.zero(5, experts=tuple(x.shape[:-2]), dtype=dtype)
            assert identical(a.merge(b), b.merge(a))
            close(a.merge(b).merge(c), a.merge(b.merge(c)), tolerance)
            assert identical(zero.merge(a), a)
            assert identical(a.merge(zero), a)


def measure_is_a_homomorphism(cls: type[Statistic]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        for x, y, z in samples(dtype):
            whole = cls.measure(torch.cat((x, y, z), -2))
            close(cls.measure(x).update(y).update(z), whole, tolerance)
            close(cls.measure(x[..., :0, :]).update(torch.cat((x, y, z), -2)), whole, tolerance)


def rescale_follows_the_data(cls: type[Statistic]) -> None:
    for x, y, _ in samples(torch.float64):
        s = randn(9, 5)
        close(cls.measure(x).merge(cls.measure(y)).rescale(s), cls.measure(torch.cat((x, y), -2) * s))


def empty_stays_empty_when_rescaled(cls: type[Statistic]) -> None:
    zero = cls.zero(5, dtype=torch.float64)
    assert identical(
        zero.rescale(torch.tensor([0.0, 1.0, -2.0, 3.0, -0.5], dtype=torch.float64)).merge(zero), zero.merge(zero)
    )


def rotate_follows_the_data_or_refuses(cls: type[Statistic]) -> None:
    x, r = correlated(1, 20, 5), torch.linalg.qr(randn(2, 5, 5)).Q
    try:
        rotated = cls.measure(x).rotate(r)
    except BadInput as refusal:
        assert cls.__name__ in str(refusal)
        return
    close(rotated, cls.measure(x @ r))


def statistic_changes_no_input(cls: type[Statistic]) -> None:
    x, s, r = correlated(1, 20, 5), randn(2, 5), torch.linalg.qr(randn(3, 5, 5)).Q
    a, b = cls.measure(x), cls.measure(2 * x)
    with untouched((x, s, r, a, b)):
        a.merge(b)
        a.update(x)
        a.rescale(s)
        try:
            a.rotate(r)
        except BadInput:
            assert cls is not Gram


def statistic_runs_under_vmap(cls: type[Statistic]) -> None:
    x = correlated(1, 3, 20, 5)
    close(torch.func.vmap(cls.measure)(x), cls.measure(x))


def statistic_counts_rows(cls: type[Statistic]) -> None:
    a = cls.measure(correlated(1, 3, 20, 5)).update(correlated(1, 3, 4, 5))
    assert a.count.tolist() == [24.0] * 3  # type: ignore[attr-defined]  # every statistic has one


# ------------------------------------------------------------------------------------------------------------- leaves


def leaf_is_a_node_for_both_registries(kind: str) -> None:
    x = leaf(kind)
    values, spec = torch_pytree.tree_flatten(x)
    assert identical(torch_pytree.tree_unflatten(values, spec), x)
    assert identical(optree.tree_map(lambda t: t, x, namespace=NAMESPACE), x)
    assert len(values) == len(tensors(x)) == len(optree.tree_paths(x, namespace=NAMESPACE))


def leaf_decodes_to_its_shape_and_dtype(kind: str) -> None:
    x = leaf(kind)
    assert dense(x).shape == x.shape
    assert dense(x).dtype == x.dtype
    assert x.device.type == "cpu"


def leaf_decodes_under_vmap(kind: str) -> None:
    x = leaf(kind, 3)
    assert torch.equal(torch.func.vmap(dense)(x), dense(x))


def take_is_the_decoded_slice(kind: str) -> None:
    x = leaf(kind, 3)
    for i in range(3):
        assert torch.equal(dense(take(x, i)), dense(x)[i])
        assert take(x, i).shape == x.shape[1:]


def leaf_multiplies_like_its_dense_form(kind: str) -> None:
    x = leaf(kind)
    rows = randn(1, 5, x.shape[-1], dtype=torch.bfloat16)
    assert torch.equal(linear(rows, x), rows @ dense(x).mT)


def leaf_costs_what_its_bits_cost(kind: str) -> None:
    x = leaf(kind)
    assert 0 < nbytes(x) <= dense(x).numel() * dense(x).element_size()


def decoding_changes_no_input(kind: str) -> None:
    x = leaf(kind, 3)
    with untouched(x):
        dense(x)
        take(x, 0)
        nbytes(x)
        linear(randn(1, 5, x.shape[-1], dtype=torch.bfloat16), take(x, 1))


def quantized_values_quantize_to_themselves(kind: str) -> None:
    x = leaf(kind, 3)
    if isinstance(x, Quantized):
        again = quantize(dense(validate(x, kind)), x.scale, x.zero, x.grid)
        assert identical(again, x)


# -------------------------------------------------------------------------------------------------- grids and patterns


def every_value(grid: Grid) -> Tensor:
    """All values of a grid, ascending, by decoding every code there is."""
    codes = torch.arange(-128, 128, dtype=torch.int8)
    if isinstance(grid, Float8):
        decoded = grid.decode(codes.view(torch.float8_e4m3fn))
        return decoded[decoded.isfinite()].unique()
    return grid.decode(codes[(codes >= grid.low) & (codes <= grid.high)])


def grid_rounds_to_the_nearest(grid: Grid) -> None:
    values, t = every_value(grid).double(), randn(1, 500).float() * grid.high
    distance = (t.double()[:, None] - values).abs()
    assert torch.equal((grid.round(t).double() - t.double()).abs(), distance.amin(-1))


def grid_values_are_fixed(grid: Grid) -> None:
    values = every_value(grid)
    assert torch.equal(grid.round(values), values)
    assert torch.equal(grid.decode(grid.encode(values)), values)
    assert grid.encode(values).dtype == grid.dtype
    assert (values.min(), values.max()) == (grid.low, grid.high)
    assert len(values) <= 2**grid.bits


def grid_breaks_ties_to_even(grid: Grid) -> None:
    values = every_value(grid)
    middles = (values[1:] + values[:-1]) / 2
    lower, rounded = values[:-1], grid.round(middles)
    code = grid.encode(rounded).view(torch.uint8 if isinstance(grid, Float8) else torch.int8)
    assert (code % 2 == 0).all()
    assert ((rounded == lower) | (rounded == values[1:])).all()


def grid_is_monotone_and_bounded(grid: Grid) -> None:
    t = torch.linspace(2 * grid.low, 2 * grid.high, 1001)
    assert (grid.round(t).diff() >= 0).all()
    assert (grid.round(t)[0], grid.round(t)[-1]) == (grid.low, grid.high)


def grid_changes_no_input(grid: Grid) -> None:
    t = randn(1, 50).float()
    with untouched(t):
        grid.decode(grid.encode(grid.round(t)))


def mask_has_exact_counts(pattern: Pattern) -> None:
    for score in (randn(1, 3, 7, 40), torch.zeros(3, 7, 40), randn(1, 3, 7, 40).round()):
        if isinstance(pattern, NM):
            assert (pattern.mask(score).unflatten(-1, (-1, pattern.of)).sum(-1) == pattern.keep).all()
        else:
            pruned = [(~pattern.mask(score)).sum((-1, -2)), (~pattern.mask(score, per="row")).sum(-1)]
            assert (pruned[0] == int(280 * pattern.ratio)).all()
            assert (pruned[1] == int(40 * pattern.ratio)).all()


def mask_keeps_the_largest(pattern: Pattern) -> None:
    score = randn(1, 7, 40).round(decimals=1)
    groups = score.unflatten(-1, (-1, pattern.of)) if isinstance(pattern, NM) else score
    mask = pattern.mask(score, per="row").view(groups.shape)
    for values, kept in zip(groups.flatten(0, -2).tolist(), mask.flatten(0, -2).tolist(), strict=True):
        ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))  # noqa: B023  # used at once
        assert {i for i, k in enumerate(kept) if k} == set(ranked[: sum(kept)])


def mask_treats_stacks_one_by_one(pattern: Pattern) -> None:
    score = randn(1, 3, 7, 40).round(decimals=1)
    alone = torch.stack([pattern.mask(s) for s in score])
    with untouched(score):
        assert torch.equal(pattern.mask(score), alone)
        assert torch.equal(torch.func.vmap(pattern.mask)(score), alone)


# -------------------------------------------------------------------------------------------------------- projections


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
    output, weight = 0.0, 0.0
    for seed in range(8):
        w, g = randn(seed, OUT, IN), gram(seed + 50, IN)
        swept = dense(obs.sweep(w, obs.inverse_factor(g), make())) - w
        plain = dense(obs.project(w, make(), g.diagonal())) - w
        output += ((swept @ g * swept).sum() / (plain @ g * plain).sum()).log().item()
        weight += (swept.square().sum() / plain.square().sum()).log().item()
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


Law = Callable[[Any], None]
LAWS: list[tuple[dict[str, Any], list[Law]]] = [
    (
        SOLVES,
        [
            solve_changes_no_input,
            solve_keeps_shape_and_dtype,
            solve_declares_from_shapes_alone,
            solve_treats_stacked_experts_one_by_one,
            solve_runs_under_vmap,
            solve_works_on_any_subset_of_sites,
            solve_does_not_depend_on_how_data_was_cut,
            solve_wraps_what_is_stored_transposed,
            solve_reads_lazy_leaves,
        ],
    ),
    ({n: make for n, make in SOLVES.items() if "custom" not in n}, [solve_refuses_what_is_quantized]),
    ({name: SOLVES[name] for name in QUANTIZERS}, [quantizer_keeps_the_mask_of_a_sparse_leaf]),
    (REPARAMS, [reparam_keeps_the_function, reparam_moves_statistics, reparam_changes_no_input]),
    (
        STATISTICS,
        [
            merge_is_a_commutative_monoid,
            measure_is_a_homomorphism,
            rescale_follows_the_data,
            empty_stays_empty_when_rescaled,
            rotate_follows_the_data_or_refuses,
            statistic_changes_no_input,
            statistic_runs_under_vmap,
            statistic_counts_rows,
        ],
    ),
    (
        {kind: kind for kind in LEAVES},
        [
            leaf_is_a_node_for_both_registries,
            leaf_decodes_to_its_shape_and_dtype,
            leaf_decodes_under_vmap,
            take_is_the_decoded_slice,
            leaf_multiplies_like_its_dense_form,
            leaf_costs_what_its_bits_cost,
            decoding_changes_no_input,
            quantized_values_quantize_to_themselves,
        ],
    ),
    (
        GRIDS,
        [
            grid_rounds_to_the_nearest,
            grid_values_are_fixed,
            grid_breaks_ties_to_even,
            grid_is_monotone_and_bounded,
            grid_changes_no_input,
        ],
    ),
    (PATTERNS, [mask_has_exact_counts, mask_keeps_the_largest, mask_treats_stacks_one_by_one]),
    (
        PROJECTIONS,
        [
            encoding_loses_nothing,
            infinite_damping_compensates_nothing,
            diagonal_gram_compensates_nothing,
            compensation_pays,
            sweep_treats_stacks_one_by_one,
            scale_of_the_gram_is_free,
            order_of_rows_is_free,
            sweep_changes_no_input,
        ],
    ),
]
CASES = [(name, law, member) for members, laws in LAWS for name, member in members.items() for law in laws]
