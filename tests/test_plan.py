"""What is settled before the first token: targets, ties, and every refusal that can be known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import CONFIGS, stock
from ptq.base import Transform, chain, identity, leafwise, partition, targets
from ptq.errors import BadInput, NoMatch
from ptq.models.model import Model
from ptq.models.skeleton import from_module
from ptq.numerics.fits import quantize
from ptq.numerics.grids import Int
from ptq.numerics.leaves import Quantized, dense
from ptq.numerics.patterns import NM, Unstructured
from ptq.numerics.schemes import scheme
from ptq.pipeline.batches import micro_batches
from ptq.pipeline.plan import Plan, make_plan
from ptq.pipeline.run import _stage, compress
from ptq.transforms.fold import fold_norms
from ptq.transforms.gptq import gptq
from ptq.transforms.magnitude import magnitude
from ptq.transforms.rtn import rtn
from ptq.transforms.sparsegpt import sparsegpt
from ptq.transforms.wanda import wanda

HALVE = leafwise((), lambda w: dense(w) / 2, name="halve")
MEASURE = leafwise(("gram",), lambda w, gram: w, name="measure")


def planned(model: Model, *stages: object) -> Plan:
    (batch,) = micro_batches(model, [torch.zeros(1, 4, dtype=torch.long)])
    return make_plan(model, [chain(s) for s in stages], batch)  # type: ignore[arg-type]


def taken(plan: Plan) -> list[set[str]]:
    return [{w for ws in m.sites.values() for w in ws} for stage in plan.stages for m in stage]


def test_default_targets_are_the_matrices_inside_the_blocks(family: str) -> None:
    model = from_module(stock(CONFIGS[family]()))
    (got,) = taken(planned(model, HALVE))
    assert got == {n for n, p in model.params.items() if p.ndim == 2 and (".h." in n or ".layers." in n)}


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("model.layers.0.mlp.up_proj.weight", 1),
        ("model.layers.0.mlp.up_proj", 1),
        ("model.layers.0.mlp", 3),
        ("model.layers.0", 7),
        ("model", 14),
        ("LlamaMLP", 6),
        ("Linear", 14),
        (r"re:.*\.mlp\.up_proj$", 2),
        ("re:.*attn", 8),
        ("lm_head", 1),
        ("re:.*lm_head", 1),
        ("model.embed_tokens", 1),
    ],
)
def test_a_pattern_names_a_weight_a_module_an_ancestor_or_a_class(pattern: str, count: int) -> None:
    (got,) = taken(planned(from_module(stock(CONFIGS["llama"]())), targets(pattern, HALVE)))
    assert len(got) == count


def test_checkpoint_names_reach_as_well() -> None:
    """Mixtral's router is `mlp.gate` in memory and `block_sparse_moe.gate` in files; a router is taken when named."""
    from transformers import MixtralConfig, MixtralForCausalLM

    from conftest import SIZES

    own = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = from_module(MixtralForCausalLM(MixtralConfig(**SIZES, **own)).eval())
    (got,) = taken(planned(model, targets("model.layers.0.block_sparse_moe.gate", HALVE)))
    assert got == {"model.layers.0.mlp.gate.weight"}
    (default,) = taken(planned(model, HALVE))
    assert default == {n for n in model.params if ".self_attn." in n and n.endswith("weight")}


def test_nothing_left_to_do_is_an_error() -> None:
    model = from_module(stock(CONFIGS["llama"]()))
    mlp = "model.layers.0.mlp"
    for stage in (
        targets(mlp, targets("model.layers.1", HALVE)),
        targets(mlp, HALVE, ignore=["model.layers.0"]),
        partition({"model": MEASURE, mlp: HALVE}),
    ):
        with pytest.raises(NoMatch, match="no weight is left"):
            planned(model, stage)


def test_a_reparam_outside_the_blocks_is_refused() -> None:
    fold = Transform("reparam", "block", lambda *_, **__: {}, lambda s, t, _: (s, t), name="fold")
    with pytest.raises(BadInput, match=r"fold: lm_head\.weight lies outside the blocks"):
        planned(from_module(stock(CONFIGS["llama"]())), targets("lm_head", fold))


def test_what_is_no_transform_is_refused() -> None:
    for wrong in ("gptq", (chain(HALVE),), None, [HALVE]):
        with pytest.raises(BadInput, match="expected transforms and stages"):
            _stage(wrong)
    assert _stage(HALVE) == _stage(chain(HALVE)) == (HALVE,)
    with pytest.raises(BadInput, match="unknown statistic 'hessian'"):
        leafwise(("hessian",), dense)


def test_a_target_that_matches_nothing_names_near_misses() -> None:
    model = from_module(stock(CONFIGS["llama"]()))
    with pytest.raises(
        NoMatch, match=r"'model.layers.0.mlp.up_prj' matches no weight .*near: model.layers.0.mlp.up_proj"
    ):
        planned(model, targets("model.layers.0.mlp.up_prj", HALVE))
    with pytest.raises(BadInput, match="no regular expression"):
        planned(model, targets("re:(", HALVE))


def test_an_ignore_that_matches_nothing_warns() -> None:
    model = from_module(stock(CONFIGS["llama"]()))
    with pytest.warns(UserWarning, match="'nothing_here' matches no weight"):
        (got,) = taken(planned(model, targets("Linear", HALVE, ignore=["nothing_here", "re:.*mlp"])))
    assert len(got) == 8


def test_in_a_partition_the_first_match_wins() -> None:
    model = from_module(stock(CONFIGS["llama"]()))
    first, second = taken(planned(model, partition({"re:.*up_proj": HALVE, "re:.*mlp": MEASURE})))
    assert {n.split(".")[-2] for n in first} == {"up_proj"}
    assert {n.split(".")[-2] for n in second} == {"gate_proj", "down_proj"}


def test_a_stage_restricted_twice_obeys_both() -> None:
    model = from_module(stock(CONFIGS["llama"]()))
    (got,) = taken(planned(model, targets("model.layers.1", targets("re:.*mlp", HALVE))))
    assert got == {f"model.layers.1.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}


def test_chain_is_a_monoid() -> None:
    assert chain(HALVE, identity) == chain(identity, HALVE) == chain(HALVE) == (HALVE,)
    assert chain(HALVE, chain(MEASURE, HALVE)) == chain(chain(HALVE, MEASURE), HALVE)


def test_ties_are_kept_unless_one_side_is_targeted() -> None:
    model = from_module(stock(CONFIGS["gemma3"]()))
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    assert planned(model, HALVE).model.aliases == tied
    for name in ("lm_head", "model.embed_tokens"):
        plan = planned(model, targets(name, HALVE))
        assert (plan.model.aliases, set(plan.untied)) == ({}, {"lm_head.weight", "model.embed_tokens.weight"})
    assert model.aliases == tied


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_the_report_says_that_a_targeted_weight_was_tied(name: str) -> None:
    run = compress(from_module(stock(CONFIGS["gemma3"]())), None, targets(name, HALVE), compute_dtype="float32")
    assert run.model.aliases == {}
    (line,) = [w for block in run.report["blocks"] for w in block["weights"]]
    assert (line["name"], line["note"]) == (f"{name}.weight", "was tied, has weights of its own now")


def test_a_convolution_is_refused_by_name() -> None:
    net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten())
    model = from_module(net)
    (batch,) = micro_batches(model, [torch.ones(1, 2, 4)])
    with pytest.raises(BadInput, match=r"0\.weight: measure needs to see its input, but no linear reads it"):
        make_plan(model, [targets("0", MEASURE)], batch)
    kernel = from_module(nn.Sequential(nn.Conv2d(2, 3, 1), nn.Flatten()))
    (image,) = micro_batches(kernel, [torch.ones(1, 2, 4, 4)])
    with pytest.raises(BadInput, match=r"0\.weight: shape \(3, 2, 1, 1\)"):
        make_plan(kernel, [targets("0", HALVE)], image)


def test_what_a_transform_cannot_take_is_known_at_once() -> None:
    def check(leaf: Tensor) -> None:
        raise BadInput(f"{leaf.shape[-1]} inputs are one too many")

    picky = leafwise((), dense, check=check)
    with pytest.raises(BadInput) as error:
        planned(from_module(stock(CONFIGS["llama"]())), HALVE, targets("model.layers.0.mlp", picky))
    names = [f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    first, second = "64 inputs are one too many", "128 inputs are one too many"
    assert str(error.value) == f"{names[0]}, {names[1]}: {first}; {names[2]}: {second}"


def test_an_extra_that_is_not_there_is_refused() -> None:
    wants = Transform("solve", "site", lambda *_, **__: {}, lambda s, t, _: (s, t), frozenset({"moon"}), name="odd")
    with pytest.raises(BadInput, match=r"odd.*moon"):
        planned(from_module(stock(CONFIGS["llama"]())), wants)


def test_a_norm_with_readers_left_out_is_refused_by_name() -> None:
    fold = Transform(
        "reparam", "block", lambda *_, **__: {}, lambda s, t, _, links: (s, t), frozenset({"links"}), name="fold"
    )
    model = from_module(stock(CONFIGS["llama"]()))
    with pytest.raises(BadInput, match=r"fold: model\.layers\.0\.input_layernorm\.weight also feeds .*k_proj"):
        planned(model, targets("re:.*q_proj", fold))
    (stage,) = planned(model, fold).stages
    assert len(stage[0].links) == 4


def test_plans_need_no_weights_in_memory(tiny_llama: object) -> None:
    from ptq.io.hub import load

    model = load(tiny_llama)  # type: ignore[arg-type]
    plan = planned(model, MEASURE)
    assert not any(isinstance(leaf, Tensor) for leaf in plan.model.params.values())


W4 = scheme("W4A16", group_size=32)
FOLD = fold_norms()


def signs(w: Tensor) -> Quantized:
    """What a researcher writes, with a leaf that nothing may choose again."""
    return quantize(w, dense(w).abs().mean(-1, keepdim=True), None, Int(2))


OWN = leafwise((), signs, name="signs")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [gptq(W4), targets("re:.*down_proj", rtn(W4))],
            r"layers\.0\.mlp\.down_proj\.weight, .*: is quantized already",
        ),
        ([chain(gptq(W4), rtn(W4))], "is quantized already"),
        ([chain(sparsegpt(NM(2, 4), W4), gptq(W4))], "is quantized already"),
        ([OWN, wanda(NM(2, 4))], "is quantized already"),
        ([rtn(W4), FOLD], r"q_proj\.weight: is compressed already"),
    ],
)
def test_stages_that_exclude_each_other_are_refused_at_once(stages: list[Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        planned(from_module(stock(CONFIGS["llama"]())), *stages)


def test_stages_that_go_together_pass(family: str) -> None:
    model = from_module(stock(CONFIGS[family]()))
    for stages in (
        [chain(sparsegpt(NM(2, 4)), gptq(W4))],
        [wanda(NM(2, 4)), rtn(W4)],
        [magnitude(Unstructured(0.5)), HALVE, OWN],
        [chain(rtn(W4), FOLD), targets("re:.*(lm_head|wte)", rtn(W4))],  # a stage's reparams come first
    ):
        assert len(planned(model, *stages).stages) == len(stages)


def test_what_looks_at_values_is_asked_when_it_comes_to_it() -> None:
    calls: list[str] = []

    def solve(w: Tensor) -> Tensor:
        calls.append(dense(w).device.type)
        return dense(w) * float(dense(w).amax())

    looks, model = leafwise((), solve), from_module(stock(CONFIGS["llama"]()))
    planned(model, looks)
    assert calls == []  # nothing follows it
    planned(model, chain(looks, rtn(W4)))
    assert set(calls) == {"meta"}


def test_weights_that_are_alike_are_looked_at_once() -> None:
    calls: list[tuple[int, ...]] = []
    count = leafwise((), lambda w: (calls.append(tuple(w.shape)), w)[1])
    planned(from_module(stock(CONFIGS["llama"]())), chain(count, HALVE))
    assert sorted(calls) == [(32, 64), (64, 64), (64, 128), (128, 64)]
