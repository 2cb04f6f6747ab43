"""The algebra of stages, and what `leafwise` does around a solve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from ptq.base import (
    Clause,
    Outcome,
    State,
    Transform,
    chain,
    identity,
    leafwise,
    oriented,
    partition,
    targets,
    zeros,
)
from ptq.errors import BadInput, NotPositiveDefinite
from ptq.numerics.grids import Int
from ptq.numerics.leaves import Leaf, Transposed, dense
from ptq.numerics.patterns import NM, Unstructured
from ptq.numerics.schemes import Scheme
from ptq.numerics.stats import Gram, SecondMoment
from ptq.targeting import label, select
from ptq.transforms.fold import fold_norms
from ptq.transforms.gptq import gptq
from ptq.transforms.magnitude import magnitude
from ptq.transforms.rtn import rtn
from ptq.transforms.wanda import wanda
from strategies import correlated, randn

MEMBERS = [rtn(Scheme(Int(4), "channel")), magnitude(Unstructured(0.5)), wanda(NM(keep=2, of=4)), fold_norms()]
stages = st.lists(st.sampled_from(MEMBERS), max_size=3).map(tuple)


# ------------------------------------------------------------------------------------------------------ chain, targets


@given(stages, stages, stages)
def test_chain_is_a_monoid(a: Any, b: Any, c: Any) -> None:
    assert chain(a, chain(b, c)) == chain(chain(a, b), c) == chain(a, b, c)
    assert chain(a, identity) == chain(identity, a) == chain(a)
    assert all(isinstance(t, Transform) for t in chain(a, b))


def test_a_transform_alone_is_a_stage_of_one() -> None:
    assert chain(MEMBERS[0]) == (MEMBERS[0],)
    assert chain() == identity == ()


def test_targets_restrict_every_member_and_add_up() -> None:
    stage = targets("re:.*mlp", targets("Linear", chain(*MEMBERS), ignore=["a"]))
    assert len(stage) == len(MEMBERS)
    for restricted, member in zip(stage, MEMBERS, strict=True):
        assert restricted.select == (Clause("Linear", ("a",)), Clause("re:.*mlp"))
        assert restricted._replace(select=()) == member


def test_in_a_partition_the_first_match_wins() -> None:
    stage = partition({"b": MEMBERS[0], "re:.*": chain(MEMBERS[1], MEMBERS[2])})
    table = {name: label(name) for name in ("a.weight", "b.weight", "c.weight")}
    assert [select(t.select, table) for t in stage] == [
        ["b.weight"],
        ["a.weight", "c.weight"],
        ["a.weight", "c.weight"],
    ]


def test_disjoint_partitions_commute() -> None:
    x, state = correlated(0, 40, 8), State({"a.weight": randn(1, 4, 8), "b.weight": randn(2, 4, 8)})
    parts = {"a": rtn(Scheme(Int(4), "channel")), "b": wanda(NM(keep=2, of=4))}
    stats = {"a.weight": {"second_moment": SecondMoment.measure(x)}}
    table = {name: label(name) for name in state.params}
    results = []
    for names in (("a", "b"), ("b", "a")):
        after = state
        for t in partition({name: parts[name] for name in names}):
            chosen = tuple(select(t.select, table))
            after, _ = t.apply(after, stats, {"a.weight": chosen})
        results.append(after.params)
    for name in state.params:
        assert torch.equal(dense(results[0][name]), dense(results[1][name]))
        assert not torch.equal(dense(results[0][name]), state.params[name])


# ------------------------------------------------------------------------------------------------------------ leafwise


def test_a_solve_gets_its_sites_statistics_and_leaves_the_rest_alone() -> None:
    state = State({"a.weight": torch.ones(2, 3), "b.weight": torch.ones(1, 3), "c.weight": torch.ones(2, 2)})
    transform = leafwise(("gram", "second_moment"), lambda leaf, gram, second_moment: leaf * gram.count)
    sites = {"a.weight": ("a.weight", "b.weight")}
    declared = transform.init(state, sites)
    assert {site: set(kinds) for site, kinds in declared.items()} == {"a.weight": {"gram", "second_moment"}}
    x = torch.ones(5, 3)
    stats = {"a.weight": {kind: zero.update(x) for kind, zero in declared["a.weight"].items()}}
    after, seen = transform.apply(state, stats, sites)
    assert after.params["a.weight"].eq(5).all()
    assert after.params["b.weight"].eq(5).all()
    assert after.params["c.weight"] is state.params["c.weight"]
    assert seen == stats


def test_without_kinds_nothing_is_declared() -> None:
    assert (
        leafwise((), lambda leaf: leaf).init(State({"a.weight": torch.ones(2, 2)}), {"a.weight": ("a.weight",)}) == {}
    )


def test_what_is_shared_is_made_once_a_site() -> None:
    made: list[int] = []

    def shared(gram: Gram) -> dict[str, Any]:
        made.append(int(gram.count))
        return {"factor": gram.sum.trace()}

    transform = leafwise(("gram",), lambda leaf, factor: leaf * factor, shared=shared)
    state = State({name: torch.ones(2, 2) for name in ("a.weight", "b.weight", "c.weight")})
    sites = {"a.weight": ("a.weight", "b.weight"), "c.weight": ("c.weight",)}
    stats = {s: {"gram": Gram.measure(n * torch.ones(n, 2))} for s, n in (("a.weight", 1), ("c.weight", 2))}
    after, _ = transform.apply(state, stats, sites)
    assert made == [1, 2]
    assert [int(after.params[n][0, 0]) for n in sorted(state.params)] == [2, 2, 16]


def test_an_outcome_goes_to_the_statistics_of_its_weight() -> None:
    outcome = Outcome(torch.tensor(0.1), torch.tensor(1), "tried twice")
    transform = leafwise((), lambda leaf: (leaf + 1, outcome))
    stats = {"a.weight": {"gram": Gram.measure(torch.ones(1, 2))}}
    after, seen = transform.apply(State({"a.weight": torch.ones(2, 2)}), stats, {"a.weight": ("a.weight",)})
    assert after.params["a.weight"].eq(2).all()
    assert seen["a.weight"]["outcome"] is outcome
    assert seen["a.weight"]["gram"] is stats["a.weight"]["gram"]
    assert "outcome" not in stats["a.weight"]


def test_errors_get_the_name_of_the_weight() -> None:
    def refuse(leaf: Leaf) -> Leaf:
        raise BadInput("is odd")

    with pytest.raises(BadInput, match=r"^b\.weight: is odd$"):
        leafwise((), refuse).apply(State({"b.weight": torch.ones(1)}), {}, {"a.weight": ("b.weight",)})


def test_a_check_names_every_weight_it_refuses() -> None:
    transform = rtn(Scheme(Int(4), "group", 128))
    state = State({"a.weight": torch.ones(2, 96), "b.weight": torch.ones(2, 96), "c.weight": torch.ones(2, 128)})
    with pytest.raises(
        BadInput, match=r"^a\.weight, b\.weight: group size 128 does not divide 96 inputs; 32, 96 would"
    ):
        transform.init(state, {name: (name,) for name in state.params})


def test_a_failed_factorization_names_weight_tokens_and_dampings() -> None:
    gram = Gram(torch.tensor([[1.0, 100.0], [100.0, 1.0]]), torch.tensor(12.0))
    transform = gptq(Scheme(Int(4), "channel"), on_failure="raise")
    message = r"^a\.weight: .*dampings 0\.01, 0\.1, 1, 10; .*\(12 tokens were seen\)$"
    with pytest.raises(NotPositiveDefinite, match=message):
        transform.apply(
            State({"a.weight": torch.ones(1, 2)}), {"a.weight": {"gram": gram}}, {"a.weight": ("a.weight",)}
        )


def test_neutral_statistics_have_the_shape_of_the_input() -> None:
    w = torch.ones(3, 4, 5)
    assert oriented(Transposed(w)) is w
    for leaf in (w, Transposed(w)):
        assert zeros(("gram",), leaf)["gram"].sum.shape == (3, 5, 5)  # type: ignore[attr-defined]
