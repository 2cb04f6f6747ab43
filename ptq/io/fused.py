"""What vLLM makes one matrix of, and how it cuts matrices for several devices: its own tables, by names.

The rules are vLLM's, so what decides is the names that vLLM knows, not what a model computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "w13": ("w1", "w3"),
}
ROWS = ("o_proj", "down_proj", "out_proj", "c_proj", "fc2", "w2", "dense_4h_to_h", "dense")
"""cut along their columns, of which each device has some, since their inputs are"""
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "gate", "router", "shared_expert_gate")
"""on every device"""
HEADS = ("k_proj", "v_proj")
"""not cut below one head"""
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.")


class FusedSet(NamedTuple):
    """Modules that are one in vLLM."""

    name: str
    shards: tuple[str, ...]


def fused_sets(modules: Iterable[str]) -> list[FusedSet]:
    """Those of a checkpoint that vLLM computes as one.

    >>> fused_sets(["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj"])
    [FusedSet(name='layers.0.mlp.gate_up_proj', shards=('layers.0.mlp.gate_proj', 'layers.0.mlp.up_proj'))]
    """
    names = dict.fromkeys(modules)
    parents = dict.fromkeys(name.rpartition(".")[0] for name in names)
    found = [
        FusedSet(_join(parent, fused), tuple(n for n in (_join(parent, shard) for shard in shards) if n in names))
        for parent in parents
        for fused, shards in FUSED.items()
    ]
    return [each for each in found if len(each.shards) > 1]


def expert_sets(modules: Iterable[str]) -> list[FusedSet]:
    """All matrices of all experts of a layer, which have one scheme."""
    found: dict[str, list[str]] = {}
    for name in modules:
        match = _EXPERT.match(name)
        if match:
            found.setdefault(match[1], []).append(name)
    return [FusedSet(name, tuple(shards)) for name, shards in found.items()]


def cut(module: str) -> Literal["rows", "columns", ""]:
    """Which side of a weight is divided among devices.

    >>> cut("layers.0.mlp.down_proj"), cut("layers.0.mlp.up_proj"), cut("layers.0.mlp.gate")
    ('columns', 'rows', '')
    """
    last = module.rpartition(".")[2]
    return "" if last in WHOLE else "columns" if last in ROWS else "rows"


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
