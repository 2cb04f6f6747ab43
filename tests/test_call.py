"""Running a model on a state: bit-equal to the stock model, and nothing of anybody's is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import CONFIGS, stock
from ptq.base import State, leafwise
from ptq.models.call import as_module, call, merge_stats, observe
from ptq.models.model import Model
from ptq.models.skeleton import from_module
from ptq.numerics.fits import fit, nearest
from ptq.numerics.grids import Int
from ptq.numerics.leaves import Transposed, dense
from ptq.numerics.maps import FakeQuant
from ptq.numerics.schemes import scheme
from ptq.numerics.stats import Gram
from ptq.pipeline.calibrate import calibrate
from ptq.pipeline.evaluate import perplexity
from ptq.pipeline.run import compress


def quantized(params: dict[str, Any], transposed: bool) -> dict[str, Any]:
    """Every matrix as 8-bit codes, (in, out) parameters as transposed leaves."""
    s = scheme("W8A16", group_size=-1)

    def one(name: str, w: Tensor) -> Any:
        if w.ndim != 2:
            return w
        turned = transposed and ".h." in name
        w = w.mT if turned else w
        leaf = nearest(w, s, fit(w, s))
        return Transposed(leaf) if turned else leaf

    return {name: one(name, dense(leaf)) for name, leaf in params.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_call_is_bit_equal_to_stock(family: str, batches: list[Tensor], dtype: torch.dtype) -> None:
    module = stock(CONFIGS[family]()).to(dtype)
    model = from_module(module)
    with torch.no_grad():
        assert torch.equal(model(batches[0]).logits, module(batches[0]).logits)


def test_compressed_call_is_the_call_on_decoded_values(family: str, batches: list[Tensor]) -> None:
    model = from_module(stock(CONFIGS[family]()))
    params = quantized(model.params, family == "gpt2")
    decoded = {name: dense(leaf) for name, leaf in params.items()}
    with torch.no_grad():
        got = call(model, State(params), batches[0]).logits
        assert torch.equal(got, call(model, State(decoded), batches[0]).logits)
        assert not torch.equal(got, model(batches[0]).logits)


def test_the_users_module_stays_as_it_was(family: str, batches: list[Tensor]) -> None:
    module = stock(CONFIGS[family]())
    before = {name: (id(p), p._version, p.clone()) for name, p in module.named_parameters()}
    attributes = {path: dict(vars(m)) for path, m in module.named_modules()}
    model = from_module(module)
    call(model, State(quantized(model.params, family == "gpt2")), batches[0])
    for name, p in module.named_parameters():
        assert (id(p), p._version) == before[name][:2]
        assert torch.equal(p, before[name][2])
    for path, m in module.named_modules():
        assert vars(m).keys() == attributes[path].keys()
        assert all(vars(m)[k] is v for k, v in attributes[path].items())
        assert not m._forward_hooks
        assert not m._forward_pre_hooks


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_state_leaves_no_trace(kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
    config = CONFIGS["llama"](max_position_embeddings=32, rope_parameters=scaling)
    model = from_module(stock(config))
    buffers = {name: (b.clone(), b._version) for name, b in model.module.named_buffers()}
    short, long = torch.randint(300, (1, 16)), torch.randint(300, (1, 48))
    with torch.no_grad():
        first = model(short).logits
        model(long)
        assert torch.equal(model(short).logits, first)  # the order of batches does not matter
    for name, b in model.module.named_buffers():
        assert torch.equal(b, buffers[name][0])
        assert b._version == buffers[name][1]


def test_a_missing_parameter_is_an_error(batches: list[Tensor]) -> None:
    model = from_module(stock(CONFIGS["llama"]()))
    params = {name: p for name, p in model.params.items() if name != "model.norm.weight"}
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
        call(model, State(params), batches[0])


def test_gradients_flow_as_in_the_stock_model() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model, x = from_module(net), torch.randn(5, 3)
    grads = torch.func.grad(lambda p: call(model, State(p), x).sum())(model.params)
    net(x).sum().backward()
    for name, p in net.named_parameters():
        assert torch.allclose(grads[name], p.grad)


def test_observe_measures_inputs_and_gives_the_output(batches: list[Tensor]) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model = from_module(net)
    x, y = torch.randn(3, 5, 4), torch.randn(7, 4)
    out, seen = observe(model, model.state, {"0.weight": ["gram"], "2.weight": ["gram", "absmax"]}, x)
    assert torch.equal(out, net(x))
    hidden = net[0](x).relu().flatten(end_dim=-2).double()
    assert torch.allclose(seen["2.weight"]["gram"].sum.double(), hidden.T @ hidden, rtol=1e-5)
    assert torch.equal(seen["2.weight"]["absmax"].max, net[0](x).relu().abs().flatten(end_dim=-2).amax(0))
    _, more = observe(model, model.state, {"0.weight": ["gram"]}, y)
    both = merge_stats(seen, more)["0.weight"]["gram"]
    rows = torch.cat([x.flatten(end_dim=-2), y])
    assert int(both.count) == 22
    assert torch.allclose(both.sum, Gram.measure(rows).sum, rtol=1e-5)


def test_as_module_is_a_stock_module_of_its_own(tiny: Path, family: str, batches: list[Tensor]) -> None:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(tiny).eval()
    model = from_module(module)
    made = as_module(model)
    with torch.no_grad():
        assert torch.equal(made(batches[0]).logits, module(batches[0]).logits)
    tied = module.config.tie_word_embeddings
    assert (made.get_output_embeddings().weight is made.get_input_embeddings().weight) == tied
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(made.parameters(), module.parameters(), strict=True))
    assert made.generate(batches[0][:1, :4], max_new_tokens=2, do_sample=False).shape == (1, 6)


RUNS: dict[str, Callable[[Model, Tensor], Any]] = {
    "call": lambda model, ids: model(ids),
    "observe": lambda model, ids: observe(model, model.state, {}, ids),
    "as_module": lambda model, _: model.as_module(),
    "calibrate": lambda model, ids: calibrate(model, [ids]),
    "perplexity": lambda model, ids: perplexity(model, [ids]),
    "compress": lambda model, ids: compress(model, [ids], leafwise((), dense)),
}


@pytest.mark.parametrize("run", RUNS)
def test_activation_maps_do_not_act_yet(run: str, batches: list[Tensor]) -> None:
    model = from_module(stock(CONFIGS["llama"]()))
    mapped = replace(model, state=State(model.params, {"lm_head.weight": (FakeQuant(None, Int(2), "token"),)}))
    results = [RUNS[run](m, batches[0]) for m in (model, mapped)]
    if run == "call":
        assert torch.equal(results[0].logits, results[1].logits)
