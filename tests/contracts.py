"""Every member of ptq's small algebras, and the laws it must obey: a new member is one line here.

A law takes a member and fails by an assertion. `LAWS` says which laws hold for which kind of member.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from laws import grids, leaves, patterns, projections, reparams, solves, statistics
from laws.shared import FP8, IN, OUT, W3_ASYM, W4
from ptq.base import Transform, leafwise
from ptq.numerics import obs
from ptq.numerics.grids import Float8, Grid, Int
from ptq.numerics.leaves import dense
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
from strategies import randn


def ternary() -> Projection:
    """What a researcher writes: a projection of their own."""

    def fit(w: Tensor, importance: Tensor | None) -> Tensor:
        return w.abs().mean(-1, keepdim=True)

    def project(w: Tensor, step: Tensor) -> Tensor:
        return (w / step).round().clamp(-1, 1) * step

    return Projection(fit, project, encode=lambda values, step: values)


SOLVES: dict[str, Callable[[], Transform]] = {
    "rtn minmax": lambda: rtn(W4, "minmax"),
    "rtn mse": lambda: rtn(W3_ASYM, "mse"),
    "rtn gram": lambda: rtn(W4, "gram"),
    "rtn fp8": lambda: rtn(FP8),
    "magnitude 50": lambda: magnitude(Unstructured(0.5), "row"),
    "magnitude 2:4": lambda: magnitude(NM(keep=2, of=4)),
    "wanda 50": lambda: wanda(Unstructured(0.5)),
    "wanda 2:4": lambda: wanda(NM(keep=2, of=4)),
    "gptq": lambda: gptq(W4),
    "gptq natural": lambda: gptq(W3_ASYM, order=None, fit="mse"),
    # With zero points: a symmetric minmax scale puts the largest weight on a tie, and its rounding would then hang on
    # the last bit of what was compensated.
    "gptq refresh": lambda: gptq(Scheme(Int(4), "group", 8, symmetric=False), refresh=True),
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
STATISTICS: dict[str, type[Statistic]] = {cls.kind: cls for cls in (Gram, SecondMoment, AbsMax, AbsMean, Range)}
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

INTS, FLOATS = ("int4", "int3 asymmetric"), ("fp8", "fp8 block", "nvfp4", "mxfp6")
LEAVES = ["tensor", *INTS, *FLOATS, "sparse", "sparse int4", "transposed int4", "transposed", "indexed"]


Law = Callable[[Any], None]
LAWS: list[tuple[dict[str, Any], list[Law]]] = [
    (
        SOLVES,
        [
            solves.changes_no_input,
            solves.keeps_shape_and_dtype,
            solves.declares_from_shapes_alone,
            solves.is_foreseen_from_shapes,
            solves.treats_stacked_experts_one_by_one,
            solves.runs_under_vmap,
            solves.works_on_any_subset_of_sites,
            solves.does_not_depend_on_how_data_was_cut,
            solves.wraps_what_is_stored_transposed,
            solves.reads_lazy_leaves,
        ],
    ),
    ({n: make for n, make in SOLVES.items() if "custom" not in n}, [solves.refuses_what_is_quantized]),
    ({name: SOLVES[name] for name in QUANTIZERS}, [solves.quantizer_keeps_the_mask_of_a_sparse_leaf]),
    (
        REPARAMS,
        [reparams.keeps_the_function, reparams.moves_statistics, reparams.changes_no_input],
    ),
    (
        STATISTICS,
        [
            statistics.merge_is_a_commutative_monoid,
            statistics.measure_is_a_homomorphism,
            statistics.rescale_follows_the_data,
            statistics.empty_stays_empty_when_rescaled,
            statistics.rotate_follows_the_data_or_refuses,
            statistics.changes_no_input,
            statistics.runs_under_vmap,
            statistics.counts_rows,
        ],
    ),
    (
        {kind: kind for kind in LEAVES},
        [
            leaves.is_a_node_for_both_registries,
            leaves.decodes_to_its_shape_and_dtype,
            leaves.decodes_under_vmap,
            leaves.take_is_the_decoded_slice,
            leaves.multiplies_like_its_dense_form,
            leaves.costs_what_its_bits_cost,
            leaves.decoding_changes_no_input,
        ],
    ),
    (
        {kind: kind for kind in (*INTS, *FLOATS)},
        [leaves.quantized_values_quantize_to_themselves],
    ),
    (
        GRIDS,
        [
            grids.rounds_to_the_nearest,
            grids.values_are_fixed,
            grids.breaks_ties_to_even,
            grids.is_monotone_and_bounded,
            grids.changes_no_input,
        ],
    ),
    (
        PATTERNS,
        [patterns.has_exact_counts, patterns.keeps_the_largest, patterns.treats_stacks_one_by_one],
    ),
    (
        PROJECTIONS,
        [
            projections.encoding_loses_nothing,
            projections.infinite_damping_compensates_nothing,
            projections.diagonal_gram_compensates_nothing,
            projections.compensation_pays,
            projections.sweep_treats_stacks_one_by_one,
            projections.scale_of_the_gram_is_free,
            projections.order_of_rows_is_free,
            projections.sweep_changes_no_input,
        ],
    ),
]
CASES = [(name, law, member) for members, laws in LAWS for name, member in members.items() for law in laws]
