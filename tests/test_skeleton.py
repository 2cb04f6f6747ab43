"""Skeletons: the stock model's structure and buffers, nothing of the caller's, no weight drawn or copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from conftest import CONFIGS, deepseek_config, llama_config, stock
from ptq.errors import BadInput
from ptq.models.skeleton import (
    aliases,
    buffers,
    checkpoint_dtype,
    from_config,
    from_module,
    persistent_buffers,
    rebuilt,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def zoo() -> dict[str, Any]:
    """Architectures whose buffers or ties are of different kinds."""
    from transformers import BertConfig, FalconH1Config, GPTJConfig, T5Config

    small = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        **{name: make() for name, make in CONFIGS.items()},
        "dynamic rope": llama_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "gptj": GPTJConfig(vocab_size=96, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
        "falcon_h1": FalconH1Config(**small, **heads, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
        "deepseek": deepseek_config(),
        "t5": T5Config(vocab_size=96, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8),
        "bert": BertConfig(**small, num_attention_heads=4),
    }


def model_class(config: Any) -> Any:
    from transformers import BertForMaskedLM, T5ForConditionalGeneration
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    own = {"bert": BertForMaskedLM, "t5": T5ForConditionalGeneration}
    return own.get(config.model_type) or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


@pytest.fixture(params=["llama", "gemma3", "gpt2", "dynamic rope", "gptj", "falcon_h1", "deepseek", "t5", "bert"])
def config(request: pytest.FixtureRequest) -> Any:
    return zoo()[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_are_those_of_the_loaded_model(config: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    cls = model_class(config)
    cls(copy.deepcopy(config)).save_pretrained(tmp_path)
    model = cls.from_pretrained(tmp_path, dtype=dtype)
    skeleton = from_config(cls, config, dtype)
    expected, found = dict(model.named_buffers()), dict(skeleton.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        assert found[name].dtype == buffer.dtype
        assert torch.equal(found[name], buffer), name
    assert persistent_buffers(skeleton).keys() == persistent_buffers(model).keys()
    shapes = [{n: p.shape for n, p in m.named_parameters(remove_duplicate=False)} for m in (model, skeleton)]
    assert shapes[0] == shapes[1]


def test_a_skeleton_holds_no_weight_and_draws_no_number(config: Any) -> None:
    before, given = torch.get_rng_state(), config.to_dict()
    skeleton = from_config(model_class(config), config, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)
    assert config.to_dict() == given
    assert skeleton.config is not config
    assert torch.get_default_dtype() is torch.float32
    assert all(p.is_meta and not p.requires_grad for p in skeleton.parameters())
    assert not any(b.is_meta for b in skeleton.buffers())
    assert not any(m.training for m in skeleton.modules())


def test_ties_are_those_that_the_class_declares(config: Any) -> None:
    model = model_class(config)._from_config(copy.deepcopy(config), dtype=torch.float32)
    assert aliases(from_config(type(model), config, torch.float32)) == model.all_tied_weights_keys
    assert from_module(model).aliases == model.all_tied_weights_keys


def test_a_live_model_runs_on_its_skeleton_and_stays_as_it_was(family: str, batches: list[torch.Tensor]) -> None:
    model = stock(CONFIGS[family]())
    seen: list[str] = []
    model.model.register_forward_hook(lambda *_: seen.append("hook")) if family == "llama" else None
    values = {n: p.clone() for n, p in model.named_parameters()}
    versions = {n: p._version for n, p in model.named_parameters()}
    before = (list(model.__dict__), model.config.to_dict(), {n: type(m) for n, m in model.named_modules()})
    expected = model(batches[0]).logits
    made = from_module(model)
    everything = {**made.params, **{a: made.params[n] for a, n in made.aliases.items()}, **buffers(made.module)}
    out = functional_call(made.module, everything, (batches[0],), strict=True, tie_weights=False).logits
    assert torch.equal(out, expected)
    assert seen == ["hook"] * 2 * (family == "llama")  # the copy keeps the user's hooks
    assert made.config is not model.config
    made.module._forward_hooks.clear()
    made.module.config.hidden_size = -1
    assert before == (list(model.__dict__), model.config.to_dict(), {n: type(m) for n, m in model.named_modules()})
    assert all(torch.equal(p, values[n]) and p._version == versions[n] for n, p in model.named_parameters())
    assert all(leaf.data_ptr() == model.get_parameter(n).data_ptr() for n, leaf in made.params.items())
    assert not any(leaf.requires_grad for leaf in made.params.values())


def test_edits_to_a_live_model_are_kept(batches: list[torch.Tensor]) -> None:
    model = stock(llama_config())
    model.model.layers[0].mlp = nn.Identity()
    made = from_module(model)
    out = functional_call(made.module, {**made.params, **buffers(made.module)}, (batches[0],)).logits
    assert torch.equal(out, model(batches[0]).logits)
    assert isinstance(rebuilt(made.module, torch.bfloat16).get_submodule("model.layers.0.mlp"), nn.Identity)


def doubled_scaling(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def other_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.7


def patched_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x))), mlp)


def hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, out: out * 2)


@pytest.mark.parametrize("edit", [doubled_scaling, other_frequencies, patched_forward, hooked])
def test_whatever_was_edited_stays_edited_in_another_dtype(edit: Callable[[Any], None]) -> None:
    model, ids = stock(llama_config()), torch.arange(24)[None]
    edit(model)
    made = from_module(model)
    for start in (made.module, rebuilt(made.module, torch.bfloat16)):
        again = rebuilt(start, torch.float32)
        assert torch.equal(functional_call(again, made.params | buffers(again), (ids,)).logits, model(ids).logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rebuilt_has_buffers_of_the_other_dtype(config: Any, dtype: torch.dtype) -> None:
    cls = model_class(config)
    skeleton = from_config(cls, config, torch.float32)
    again = rebuilt(skeleton, dtype)
    fresh = from_config(cls, config, dtype)
    for name, buffer in fresh.named_buffers():
        assert again.get_buffer(name).dtype == buffer.dtype
        assert torch.equal(again.get_buffer(name), buffer), name
    assert {p.dtype for p in again.parameters()} == {dtype}
    assert {p.dtype for p in skeleton.parameters()} == {
        p.dtype for p in from_config(cls, config, torch.float32).parameters()
    }


def test_rebuilt_keeps_persistent_buffers() -> None:
    config = zoo()["deepseek"]
    skeleton = from_config(model_class(config), config, torch.float32)
    name = next(iter(persistent_buffers(skeleton)))
    skeleton.get_buffer(name).add_(3)
    again = rebuilt(skeleton, torch.bfloat16)
    assert torch.equal(again.get_buffer(name).float(), skeleton.get_buffer(name).float())
    again.get_buffer(name).zero_()
    assert bool((skeleton.get_buffer(name) == 3).all())


def test_any_module_can_be_rebuilt() -> None:
    made = from_module(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    again = rebuilt(made.module, torch.float64)
    assert {p.dtype for p in again.parameters()} == {torch.float64}
    assert again.get_buffer("1.running_mean").dtype is torch.float64
    assert {p.dtype for p in made.module.parameters()} == {torch.float32}


def test_buffers_are_copies() -> None:
    module = nn.BatchNorm1d(2)
    buffers(module)["running_mean"].add_(1)
    assert module.running_mean is not None
    assert torch.equal(module.running_mean, torch.zeros(2))


class Tied(nn.Module):
    def __init__(self, share: Callable[[nn.Linear], nn.Linear]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = share(self.first)


def with_its_weight(first: nn.Linear) -> nn.Linear:
    second = nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    return second


def test_tied_parameters_have_one_name_and_a_table() -> None:
    made = from_module(Tied(with_its_weight))
    assert (list(made.params), made.aliases) == (["first.weight"], {"second.weight": "first.weight"})


def test_a_submodule_with_two_paths_is_refused() -> None:
    with pytest.raises(BadInput, match="first and second are one module"):
        from_module(Tied(lambda first: first))
    shared = nn.ReLU()
    assert from_module(nn.Sequential(nn.Linear(1, 1), shared, shared)).params  # without weights it does no harm


def test_offloaded_parameters_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(BadInput, match=r"parameter 1\.weight and 1 others have no values"):
        from_module(module)


def test_buffers_without_values_are_refused() -> None:
    module = nn.BatchNorm1d(2)
    module.running_var = torch.empty(2, device="meta")
    with pytest.raises(BadInput, match="buffer running_var has no values"):
        from_module(module)


def test_the_dtype_of_a_checkpoint_is_what_most_of_it_has() -> None:
    half, single, codes = torch.ones(9, dtype=torch.float16), torch.ones(3), torch.ones(99, dtype=torch.int8)
    assert checkpoint_dtype([half, single, codes]) is torch.float16
    assert checkpoint_dtype([codes]) is torch.float32


def test_a_skeleton_of_a_directory_is_that_of_the_live_model(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    skeleton = from_config(type(model), model.config, torch.float32)
    assert [n for n, _ in skeleton.named_modules()] == [n for n, _ in from_module(model).module.named_modules()]
