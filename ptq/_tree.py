"""Frozen dataclasses as pytree nodes, for optree (namespace "ptq") and for torch's own registry, which vmap reads.

Without the namespace a node is an opaque leaf; with it the node opens into its tensors: one object, two granularities.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

import optree
import torch.utils._pytree as torch_pytree

NAMESPACE = "ptq"
T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """A field that is part of a node's structure (a grid, a dtype) and not a child."""
    return field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(field, static))
def node(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass whose non-static, non-None fields are its children.

    Unflattening bypasses `__init__`, since a tree may hold shapes, axes or sentinels where tensors were. A child that
    is None is left out, because torch's registry would take None for a leaf and vmap over it.
    """
    made = dataclass(frozen=True, eq=False)(cls)
    children = [f.name for f in fields(made) if not f.metadata.get("static")]  # type: ignore[arg-type]  # made is a dataclass
    statics = [f.name for f in fields(made) if f.metadata.get("static")]  # type: ignore[arg-type]

    def present(x: T) -> tuple[str, ...]:
        return tuple(name for name in children if getattr(x, name) is not None)

    def flatten(x: T) -> tuple[list[Any], tuple[Any, ...]]:
        names = present(x)
        return [getattr(x, name) for name in names], (names, *(getattr(x, name) for name in statics))

    def unflatten(aux: tuple[Any, ...], values: Iterable[Any]) -> T:
        x = object.__new__(made)
        x.__dict__.update(dict.fromkeys(children), **dict(zip(statics, aux[1:], strict=True)))
        x.__dict__.update(zip(aux[0], values, strict=True))
        return x

    untyped: Any = made  # optree wants a Collection, which it then does not use
    with_names: Any = lambda x: (*flatten(x), present(x))  # noqa: E731  # typed, as optree's protocol cannot be met
    back: Any = unflatten
    optree.register_pytree_node(untyped, with_names, back, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE)
    torch_pytree.register_pytree_node(made, flatten, lambda values, aux: unflatten(aux, values))
    return made


def tensors(tree: Any) -> Sequence[Any]:
    """All tensors of a tree, nodes opened."""
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def structure(tree: Any) -> Any:
    """What a tree is but for its tensors; equal for trees of the same nodes with the same static fields."""
    return optree.tree_structure(tree, namespace=NAMESPACE)


def with_tensors(tree: T, values: Sequence[Any]) -> T:
    """A tree of the same structure with other tensors."""
    return optree.tree_unflatten(structure(tree), values)  # type: ignore[return-value]  # the same nodes


def tree_map(function: Any, tree: Any, *rest: Any) -> Any:
    """Maps over the tensors of a tree, nodes opened."""
    return optree.tree_map(function, tree, *rest, namespace=NAMESPACE)
