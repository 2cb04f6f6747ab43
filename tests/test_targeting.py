"""Which patterns reach which weights."""

from __future__ import annotations

import pytest

from ptq.base import Clause
from ptq.errors import BadInput, NoMatch
from ptq.targeting import label, reaches, select

CLASSES = {"model": "Llama", "model.layers.0": "Block", "model.layers.0.mlp": "MLP", "model.layers.0.mlp.up": "Linear"}
CLASSES |= {"model.layers.1.mlp.up": "Linear", "model.layers.1": "Block", "lm_head": "Linear"}
UP = label("model.layers.0.mlp.up.weight", CLASSES)
STORED = label("h.0.fc.weight", CLASSES, others=["transformer.h.0.fc.weight"])
HEAD = label("lm_head.weight", CLASSES, default=False)
TABLE = {
    "model.layers.0.mlp.up.weight": UP,
    "model.layers.1.mlp.up.weight": label("model.layers.1.mlp.up.weight", CLASSES),
    "lm_head.weight": HEAD,
}


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.0.mlp.up.weight",
        "model.layers.0.mlp.up",
        "model.layers.0.mlp",
        "model.layers",
        "model",
        "re:.*up$",
        r"re:model\.layers\.0",
        "re:model",
        "Linear",
        "MLP",
        "Block",
        "Llama",
    ],
)
def test_a_weight_is_reached_by_its_names_ancestors_and_classes(pattern: str) -> None:
    assert reaches(pattern, UP)


@pytest.mark.parametrize(
    "pattern", ["up", "layers.0", "model.layers.1", "re:up", "re:.*down", "linear", "model.layers.0.mlp.up.bias", ""]
)
def test_a_weight_is_not_reached_by_parts_of_names(pattern: str) -> None:
    assert not reaches(pattern, UP)


@pytest.mark.parametrize("pattern", ["transformer.h.0.fc.weight", "transformer.h", "re:transformer.*fc", "h.0.fc"])
def test_names_in_the_checkpoint_count(pattern: str) -> None:
    assert reaches(pattern, STORED)


def test_what_is_no_default_target_must_be_named_in_full() -> None:
    assert all(reaches(p, HEAD) for p in ("lm_head", "lm_head.weight", "re:lm_head", r"re:.*head\.weight"))
    assert not any(reaches(p, HEAD) for p in ("Linear", "re:lm", "re:.*hea"))
    inside = label("vision.layers.0.up.weight", {"vision.layers.0.up": "Linear"}, default=False)
    assert not any(reaches(p, inside) for p in ("vision", "vision.layers.0", "Linear"))
    assert reaches("re:vision.*up", inside)


def test_nothing_said_takes_the_defaults() -> None:
    assert select((), TABLE) == list(TABLE)[:2]


def test_clauses_all_hold() -> None:
    first, second, head = TABLE
    assert select((Clause("Linear"),), TABLE) == [first, second]
    assert select((Clause("Linear", ignore=("model.layers.1",)),), TABLE) == [first]
    assert select((Clause("Linear"), Clause("model.layers.1")), TABLE) == [second]
    assert select((Clause("Linear", earlier=("model.layers.0",)),), TABLE) == [second]
    assert select((Clause("re:.*"),), TABLE) == [first, second, head]


def test_a_pattern_without_a_match_is_refused_with_near_ones() -> None:
    with pytest.raises(NoMatch, match=r"target 'model\.layers\.0\.mlp\.upp' matches no weight .*near: .*mlp\.up"):
        select((Clause("model.layers.0.mlp.upp"),), TABLE)
    with pytest.raises(NoMatch, match=r"target 'zzz' matches no weight .*named like model\.layers\.0\.mlp\.up\.weight"):
        select((Clause("zzz"),), TABLE)
    assert issubclass(NoMatch, BadInput)


def test_an_ignore_without_a_match_only_warns() -> None:
    with pytest.warns(UserWarning, match="ignore 'nothing' matches no weight"):
        assert select((Clause("Linear", ignore=("nothing",)),), TABLE) == list(TABLE)[:2]


def test_a_broken_regular_expression_is_refused() -> None:
    with pytest.raises(BadInput, match=r"target 're:\(' is no regular expression"):
        select((Clause("re:("),), TABLE)
