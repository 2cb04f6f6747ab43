"""Nodes: one object that is a leaf without the namespace and a tree with it."""

from __future__ import annotations

import dataclasses

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from ptq._tree import NAMESPACE, node, static, tensors, tree_map
from ptq.numerics.grids import Int
from ptq.numerics.leaves import Quantized


@node
class Pair:
    first: Tensor
    second: Tensor | None
    label: str = static(default="x")


def test_a_node_opens_only_in_the_namespace() -> None:
    pair = Pair(torch.ones(1), torch.zeros(2), "y")
    assert optree.tree_leaves({"a": pair}) == [pair]
    assert len(tensors({"a": pair})) == 2
    assert optree.tree_paths({"a": pair}, namespace=NAMESPACE) == [("a", "first"), ("a", "second")]


def test_absent_children_and_static_fields_survive() -> None:
    pair = Pair(torch.ones(1), None, "y")
    for back in (
        tree_map(lambda t: t + 1, pair),
        torch_pytree.tree_map(lambda t: t + 1, pair),
    ):
        assert (back.first.item(), back.second, back.label) == (2.0, None, "y")
    assert optree.tree_structure(pair, namespace=NAMESPACE) != optree.tree_structure(
        Pair(torch.ones(1), None, "z"), namespace=NAMESPACE
    )


def test_a_tree_may_hold_anything_where_tensors_were() -> None:
    pair = Pair(torch.ones(3, 4), torch.zeros(2))
    shapes = tree_map(lambda t: tuple(t.shape), pair)
    assert (shapes.first, shapes.second) == ((3, 4), (2,))


def test_nodes_pass_through_vmap() -> None:
    out = torch.func.vmap(lambda p: Pair(p.first * 2, None))(Pair(torch.arange(3.0), None))
    assert out.first.tolist() == [0.0, 2.0, 4.0]


def test_nodes_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Pair(torch.ones(1), None).first = torch.ones(2)  # type: ignore[misc]


def test_paths_name_the_parts_of_parameters() -> None:
    leaf = Quantized(torch.ones(1, 2, dtype=torch.int8), torch.ones(1, 1), None, Int(4), torch.float32)
    assert optree.tree_paths({"a.weight": leaf}, namespace=NAMESPACE) == [("a.weight", "codes"), ("a.weight", "scale")]
