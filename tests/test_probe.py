"""The probe: what it finds in three families, without a weight and without a family's name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import CONFIGS, stock
from ptq.models.probe import blocks, links, probe
from ptq.models.skeleton import from_module

SHARED = {
    "llama": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)],
    "gemma3": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)],
    "gpt2": [("c_attn",), ("c_proj",), ("c_fc",), ("c_proj",)],
}
OFFSETS = {"llama": 0.0, "gemma3": 1.0, "gpt2": 0.0}


def test_sites_are_the_weights_that_read_one_tensor(family: str) -> None:
    model = from_module(stock(CONFIGS[family]()))
    trace = probe(model, input_ids=torch.zeros(1, 4, dtype=torch.long))
    inside = [ws for ws in trace.sites.values() if any(p in ws[0] for p in ("layers.0.", "h.0."))]
    assert [tuple(w.split(".")[-2] for w in ws) for ws in inside] == SHARED[family]


def test_orientation_is_learned_from_the_operation(family: str) -> None:
    model = from_module(stock(CONFIGS[family]()))
    trace = probe(model, input_ids=torch.zeros(1, 4, dtype=torch.long))
    inside = {w for ws in trace.sites.values() for w in ws if "layers." in w or ".h." in w}
    assert trace.transposed == (inside if family == "gpt2" else set())


def test_norms_and_their_readers_are_found_with_their_offset(family: str) -> None:
    model = from_module(stock(CONFIGS[family]()))
    found = links(model, probe(model, input_ids=torch.zeros(1, 4, dtype=torch.long)))
    feeding = {link.source: link.sinks for link in found}
    first = [s for s in feeding if any(p in s for p in ("layers.0.", "h.0."))]
    assert len(first) == 2
    assert [tuple(w.split(".")[-2] for w in feeding[s]) for s in first] == [SHARED[family][0], SHARED[family][2]]
    assert {link.offset for link in found} == {OFFSETS[family]}


def test_segments_cover_every_parameter_once_in_reading_order(family: str) -> None:
    model = from_module(stock(CONFIGS[family]()))
    trace = probe(model, input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert sorted(n for s in trace.segments for n in s.params) == sorted(model.params)
    assert [s.module is not None for s in trace.segments] == [False, True, True, False]
    assert [s.module for s in trace.segments if s.module is not None] == blocks(model.module)


def test_a_model_without_block_lists_is_one_block() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    trace = probe(from_module(net), torch.ones(1, 2))
    (segment,) = trace.segments
    assert (segment.module, set(segment.params)) == ("", {"0.weight", "0.bias", "2.weight", "2.bias"})


def test_a_weight_read_twice_is_counted() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Linear(3, 3, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.same(self.same(x))

    trace = probe(from_module(Twice()), torch.ones(1, 3))
    assert trace.reads == {"same.weight": 2}
    assert trace.sites == {"same.weight": ("same.weight",)}


def test_a_probe_reads_no_weight() -> None:
    from dataclasses import replace

    from ptq.numerics.lazy import Lazy

    class Unreadable(Lazy):
        def __init__(self, shape: torch.Size) -> None:
            self.shape, self.dtype = shape, torch.float32

        def load(self) -> torch.Tensor:
            pytest.fail("a probe needs shapes only")

    model = from_module(stock(CONFIGS["llama"]()))
    params = {name: Unreadable(p.shape) for name, p in model.params.items()}
    lazy = replace(model, state=model.state._replace(params=params))
    assert len(probe(lazy, input_ids=torch.zeros(1, 4, dtype=torch.long)).sites) == 2 * 4 + 1


def test_a_norm_that_takes_a_gate_is_no_link() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return self.weight * x * gate

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = Gated(), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(x, x))

    model = from_module(Net())
    trace = probe(model, torch.ones(1, 3))
    assert trace.norms == {"out.weight": "norm"}
    assert links(model, trace) == ()
