"""The driver where models, methods and data are not the usual ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import VOCABULARY, llama_config, stock
from ptq.base import Outcome, State, Transform, chain, leafwise, partition, targets
from ptq.errors import BadInput
from ptq.models.call import observe
from ptq.models.model import Model
from ptq.models.skeleton import from_module
from ptq.numerics.grids import Int
from ptq.numerics.leaves import Quantized, dense
from ptq.numerics.patterns import NM
from ptq.numerics.schemes import scheme
from ptq.pipeline.run import compress
from ptq.transforms.gptq import gptq
from ptq.transforms.magnitude import magnitude
from ptq.transforms.rtn import rtn
from ptq.transforms.sparsegpt import sparsegpt
from ptq.transforms.wanda import wanda
from test_scan import AT_ONCE, FLOAT, SHRINK, model_of, ragged, shrink

W8 = scheme("W8A16", group_size=-1)


def spy(solve: Transform, seen: dict[str, Tensor]) -> Transform:
    """The same transform, with the Grams (or second moments) that it is given on record."""
    apply = solve.apply

    def spied(state: State, stats: Any, sites: Any, **extra: Any) -> Any:
        seen.update({site: next(iter(stats[site].values())).sum for site in sites})
        return apply(state, stats, sites, **extra)

    return solve._replace(apply=spied)


def measured(model: Model, params: dict[str, Any], site: str, kind: str, data: list[Tensor]) -> Tensor:
    sums = []
    for ids in data:
        with torch.no_grad():
            sums.append(observe(model, State(params), {site: (kind,)}, input_ids=ids[None])[1][site][kind].sum)
    return torch.stack(sums).sum(0)


# Scopes


def test_wanda_sees_its_block_dense_behind_compressed_ones() -> None:
    model, data, seen = model_of("llama"), ragged(), {}
    done = compress(model, data, spy(wanda(NM(keep=2, of=4)), seen), **FLOAT).model
    for block in range(2):
        mixed = {n: (done if f"layers.{b}." in n else model).params[n] for n in model.params for b in range(block)}
        params = {**model.params, **mixed, **{n: p for n, p in done.params.items() if f"layers.{block - 1}." in n}}
        for site in (f"model.layers.{block}.self_attn.o_proj.weight", f"model.layers.{block}.mlp.down_proj.weight"):
            want = measured(model, params, site, "second_moment", data)
            assert torch.allclose(seen[site], want, rtol=1e-4, atol=1e-5)
            staged = measured(model, done.params, site, "second_moment", data)
            assert not torch.allclose(seen[site], staged, rtol=1e-3)


def test_a_block_solve_makes_no_other_solve_see_a_dense_block() -> None:
    """Wanda on the attention is measured at once, the rest of the block with the pruned attention."""
    model, data, seen = model_of("llama"), ragged(), {}
    run = compress(model, data, partition({"re:.*self_attn": AT_ONCE, "re:.*mlp": spy(SHRINK, seen)}), **FLOAT)
    done = run.model
    site = "model.layers.1.mlp.down_proj.weight"
    assert torch.allclose(seen[site], measured(model, done.params, site, "gram", data), rtol=1e-4, atol=1e-4)
    assert not any(w["note"] for b in run.report["blocks"] for w in b["weights"])


def test_solves_of_both_scopes_on_one_weight_keep_their_order_and_say_so() -> None:
    model, data = model_of("llama"), ragged()
    run = compress(model, data, chain(SHRINK, AT_ONCE), **FLOAT)
    leaf = run.model.params["model.layers.0.self_attn.q_proj.weight"]
    lines = [w for b in run.report["blocks"] for w in b["weights"]]
    assert all("with its block still dense" in w["note"] for w in lines)
    gram = type("Gram", (), {"sum": torch.eye(64), "count": 1})
    assert not torch.equal(leaf, shrink(dense(model.params["model.layers.0.self_attn.q_proj.weight"]), gram))


# Blocks that write into what they are given


class InPlace(nn.Module):
    """A residual that is added to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x += self.two(self.act(self.one(x)))
        return x


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_block_may_write_into_its_input() -> None:
    model, data, seen = from_module(Stack(InPlace)), [torch.randn(40, 8)], {}
    done = compress(model, data, spy(AT_ONCE, seen), **FLOAT).model
    site = "layers.1.one.weight"
    watched: Any = observe(model, done.state, {site: ("gram",)}, data[0])[1]
    assert torch.allclose(seen[site], watched[site]["gram"].sum, rtol=1e-4)


# What no token reaches, and what several blocks read


class Shy(nn.Module):
    """A block with a linear that is met only while the weights are zeros, as a probe's are."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.never = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return y if bool(y.any()) else self.never(2 * x)


@pytest.mark.parametrize("how", [SHRINK, AT_ONCE], ids=["staged", "at once"])
def test_a_linear_that_no_token_reached_is_refused_by_name(how: Transform) -> None:
    with pytest.raises(BadInput, match=r"layers\.0\.never\.weight: no calibration token reached it"):
        compress(from_module(Stack(Shy)), [torch.ones(2, 8)], how, **FLOAT).model  # noqa: B018


def bart() -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    own = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    tokens = {"vocab_size": VOCABULARY, "forced_eos_token_id": None, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    return BartForConditionalGeneration(BartConfig(**own, **heads, **tokens, init_std=0.2)).eval()


@pytest.mark.parametrize("how", [SHRINK, AT_ONCE], ids=["staged", "at once"])
def test_a_tensor_that_several_blocks_read(how: Transform) -> None:
    """The cross attention of every decoder layer reads the encoder's output: one site, weights of all blocks."""
    model = from_module(bart())
    batch = {"input_ids": ragged()[0][None], "decoder_input_ids": ragged()[2][None]}
    run = compress(model, [batch], how, **FLOAT)
    done = run.model.params
    keys = [n for n in done if "encoder_attn.k_proj.weight" in n]
    assert len(keys) == 2
    assert all(not torch.equal(dense(done[n]), dense(model.params[n])) for n in keys)
    for block in run.report["blocks"]:
        assert {w["name"] for w in block["weights"]} <= {n for n in done if n.startswith(block["name"])}


# What transforms return


def test_a_reparam_that_writes_in_place_is_refused() -> None:
    module = stock(llama_config())

    def apply(state: State, stats: Any, sites: Any, **extra: Any) -> Any:
        for name in sites:
            dense(state.params[name]).mul_(2)
        return state, stats

    double = Transform("reparam", "block", lambda *_, **__: {}, apply, name="double")
    with pytest.raises(BadInput, match="double changed this weight in place"):
        compress(module, ragged(), double, **FLOAT).model  # noqa: B018


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_is_refused_at_its_block(value: float) -> None:
    spoil = leafwise((), lambda w: dense(w).index_fill(0, torch.tensor([1]), value), name="spoil")
    with pytest.raises(BadInput, match=r"layers\.0\.self_attn\.q_proj\.weight: spoil gave NaN or infinite values"):
        compress(model_of("llama"), None, spoil).model  # noqa: B018


def test_a_scale_of_zero_is_refused_at_its_block() -> None:
    def nothing(w: Any) -> Quantized:
        w = dense(w)
        return Quantized(torch.zeros_like(w, dtype=torch.int8), torch.zeros(len(w), 1), None, Int(8), w.dtype)

    with pytest.raises(BadInput, match=r"q_proj\.weight: nothing: a scale is 0"):
        compress(model_of("llama"), None, leafwise((), nothing, name="nothing")).model  # noqa: B018


@pytest.mark.parametrize("how", [SHRINK, AT_ONCE], ids=["staged", "at once"])
def test_autocast_around_a_run_changes_nothing(how: Transform) -> None:
    model, data = model_of("llama"), ragged()
    plain = compress(model, data, how, **FLOAT).model.params
    with torch.autocast("cpu", torch.bfloat16):
        around = compress(model, data, how, **FLOAT).model.params
    assert all(torch.equal(dense(plain[name]), dense(around[name])) for name in plain)


# What reports say


def test_every_stage_is_in_the_report() -> None:
    stages = magnitude(NM(keep=2, of=4)), targets("re:.*mlp", rtn(W8))
    run = compress(model_of("llama"), None, *stages)
    assert run.model
    lines = [w for b in run.report["blocks"] for w in b["weights"]]
    assert [sum(w["stage"] == n for w in lines) for n in (1, 2)] == [14, 6]
    attention, mlp = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64), 6 * 64 * 128
    scales = 4 * 2 * (128 + 128 + 64)
    bits = (32 * attention + 8 * mlp + 8 * scales) / (attention + mlp)
    assert run.report["totals"]["bits_per_weight"] == pytest.approx(bits)


def test_what_an_earlier_member_had_to_do_is_not_forgotten() -> None:
    one = Outcome(torch.tensor(0.5), torch.tensor(2), "first")
    both = Outcome(torch.tensor(0.1), torch.tensor(1), "second").after(one)
    assert (float(both.damping), int(both.failures), both.note) == (0.5, 3, "first; second")
    model = model_of("llama")
    stage = chain(sparsegpt(NM(keep=2, of=4), damp=0.3), gptq(W8, damp=0.01))
    run = compress(model, ragged(), targets("model.layers.0.mlp", stage), **FLOAT)
    assert run.model
    lines = [w for b in run.report["blocks"] for w in b["weights"]]
    assert all(w["damping"] == pytest.approx(0.3) for w in lines)
