"""Routers, found by what becomes of their numbers, in mixtures of experts of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from conftest import SIZES
from ptq.models.probe import probe
from ptq.models.skeleton import from_module

IDS = torch.arange(6)[None]
HEADS = {"num_key_value_heads": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}


def deepseek() -> Any:
    heads = {"num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**SIZES, **LATENT, **GROUPS, **heads))


def jetmoe() -> Any:
    sizes = {name: size for name, size in SIZES.items() if name != "num_attention_heads"}
    own = {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    return hf.JetMoeForCausalLM(hf.JetMoeConfig(**sizes, **HEADS, **own))


def of(name: str, **own: Any) -> Callable[[], Any]:
    config, cls = getattr(hf, f"{name}Config"), getattr(hf, f"{name}ForCausalLM")
    return lambda: cls(config(**SIZES, **HEADS, num_experts_per_tok=2, **own))


def llama4() -> Any:
    own = {"num_local_experts": 4, "intermediate_size_mlp": 64, "head_dim": 16}
    return hf.Llama4ForCausalLM(hf.Llama4TextConfig(**SIZES, **HEADS, **own))


# model -> its routers in each of two layers, less those of layers that have none
ROUTERS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "mixtral": (of("Mixtral", num_local_experts=4), {"mlp.gate"}),
    "qwen3 moe": (of("Qwen3Moe", num_experts=4, moe_intermediate_size=32), {"mlp.gate"}),
    "olmoe": (of("Olmoe", num_experts=4), {"mlp.gate"}),
    "deepseek v3": (deepseek, {"mlp.gate"}),
    "gpt-oss": (of("GptOss", num_local_experts=4, head_dim=16), {"mlp.router"}),
    "llama 4": (llama4, {"feed_forward.router"}),
    "granite moe": (of("GraniteMoe", num_local_experts=4), {"block_sparse_moe.router"}),
    "jetmoe": (jetmoe, {"mlp.router.layer", "self_attention.experts.router.layer"}),
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_router_is_a_linear_whose_numbers_become_an_index(kind: str) -> None:
    make, expected = ROUTERS[kind]
    model = from_module(make().eval())
    found = probe(model, input_ids=IDS, use_cache=False).choosing
    assert {name.partition(".1.")[2].removesuffix(".weight") for name in found if ".1." in name} == expected
    assert len(found) == len(expected) * (1 if kind == "deepseek v3" else 2)


class Layer(nn.Module):
    """Two linears in a residual block; what is done with the first one's numbers is the case."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.use = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), use

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.last(self.use(self.first(x)))
        return x + x.argmax(-1, keepdim=True)  # of a residual: nobody's choice


USES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "an activation": (torch.relu, False),
    "a threshold": (lambda y: torch.where(y >= y.topk(2).values[..., -1:], y, 0.0), False),
    "a constant of its shape": (lambda y: y + torch.ones_like(y, dtype=torch.int64), False),
    "the largest": (lambda y: nn.functional.one_hot(y.softmax(-1).argmax(-1), 4).float(), True),
    "groups first": (lambda y: y.gather(-1, (y.view(-1, 2, 2).topk(1).values.sum(-1)).topk(1).indices), True),
    "those above a bar": (lambda y: y[(y.sigmoid() > 0.4).nonzero(as_tuple=True)].view(y.shape), True),
    "the largest, in place": (lambda y: torch.zeros_like(y).scatter_(-1, y.topk(2).indices, 1.0), True),
}


@pytest.mark.parametrize("use", USES)
def test_only_an_index_that_is_used_makes_a_router(use: str) -> None:
    operation, choosing = USES[use]
    layer = Layer(operation)
    if use == "groups first":
        layer.last = nn.Linear(1, 4, bias=False)
    found = probe(from_module(layer), torch.randn(3, 4)).choosing
    assert found == ({"first.weight"} if choosing else set())


def test_what_returns_more_than_a_tensor_is_no_router_for_that() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x), x  # type: ignore[return-value]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(x)[0]

    trace = probe(from_module(Net()), torch.randn(3, 4))
    assert (trace.choosing, trace.sites) == (set(), {"pair.weight": ("pair.weight",)})
