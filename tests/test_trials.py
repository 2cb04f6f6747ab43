"""Trials: what a block's forward and a site's solve take, small against what the real thing does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from conftest import CONFIGS, llama_config, stock
from ptq.base import chain, leafwise, targets
from ptq.numerics.leaves import dense
from ptq.numerics.patterns import NM
from ptq.numerics.schemes import scheme
from ptq.pipeline.batches import few_tokens
from ptq.pipeline.place import Place
from ptq.pipeline.run import Run, compress
from ptq.pipeline.tasks import signature, tasks
from ptq.pipeline.trial_forward import kind, trial_forward
from ptq.pipeline.trial_solve import full_size
from ptq.transforms.gptq import gptq
from ptq.transforms.magnitude import magnitude
from ptq.transforms.rtn import rtn
from ptq.transforms.sparsegpt import sparsegpt
from ptq.transforms.wanda import wanda

F32 = Place(torch.device("cpu"), torch.float32)
W4 = scheme("W4A16", group_size=32)


def run_of(module: nn.Module, ids: Tensor, *stages: Any) -> Run:
    return compress(module, [ids], *stages, compute_dtype="float32", device="cpu")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(320, (4, 32))


# The law of two terms


@given(
    low=st.integers(1, 2),
    step=st.integers(1, 2),
    a=st.floats(0, 100),
    b=st.floats(0, 100),
    k=st.integers(1, 8),
    factor=st.integers(2, 4),
)
def test_two_sizes_give_the_full_one(low: int, step: int, a: float, b: float, k: int, factor: int) -> None:
    high = low + step
    at = {n: a / n**low + b / n**high for n in (k, k * factor)}
    assert full_size(at, low, high) == pytest.approx(a + b, rel=1e-6, abs=1e-9)


@given(y=st.floats(0, 100), z=st.floats(0, 100))
def test_no_term_is_negative(y: float, z: float) -> None:
    """Whatever a noisy clock says, the full size is between growth by the low power and by the high one."""
    assert y * 2 * (1 - 1e-9) <= full_size({2: y, 4: z}, 1, 3) <= y * 8 * (1 + 1e-9)


# Tasks


def test_solves_go_site_by_site_or_block_by_block(ids: Tensor) -> None:
    run = run_of(stock(llama_config()), ids, sparsegpt(NM(2, 4)), chain(wanda(NM(2, 4)), rtn(W4)))
    block = next(s for s in run.plan.segments if s.module)
    by_site, (whole,) = ([*tasks(stage, block)] for stage in run.plan.stages)
    assert [len(task.weights) for task in by_site] == [3, 1, 2, 1]
    assert all(task.kinds(site) == ("gram",) for task in by_site for site in task.sites)
    assert len(whole.weights) == 7
    assert set(whole.params) == set(block.params)
    assert {whole.kinds(site) for site in whole.sites} == {("second_moment",)}


def test_tasks_are_those_of_the_plan(family: str, ids: Tensor) -> None:
    run = run_of(stock(CONFIGS[family]()), ids, chain(targets("re:.*(up_proj|c_fc)", magnitude(NM(2, 4))), gptq(W4)))
    (stage,) = run.plan.stages
    solved = [w for s in run.plan.segments for task in tasks(stage, s) for w in task.weights]
    assert sorted(solved) == sorted({w for m in stage for ws in m.sites.values() for w in ws})


def test_equal_blocks_have_equal_tasks_and_kinds(ids: Tensor) -> None:
    plan = run_of(stock(llama_config(num_hidden_layers=3)), ids, gptq(W4)).plan
    blocks = [s for s in plan.segments if s.module]
    first, *others = ([signature(plan, t) for t in tasks(plan.stages[0], b)] for b in blocks)
    assert all(other == first for other in others)
    assert len(set(first)) == 4
    assert len({kind(plan, b) for b in blocks}) == 1


# Forwards


def test_a_parked_micro_batch_holds_its_residual_and_its_inputs(ids: Tensor) -> None:
    """At a Llama's last linear: the residual before and behind attention, the normed input, and the product of two.

    Its forward also holds the embeddings to its end.
    """
    run = run_of(stock(llama_config()), ids, gptq(W4))
    (passage,) = trial_forward(run.plan, run.job.batches[0], F32).values()
    numbers = ids.numel() * 4
    assert (passage.tokens, passage.hidden) == (ids.numel(), 64)
    assert numbers * (64 + 64) <= passage.entered <= numbers * (64 + 64) * 1.1  # with rotary tables
    inside = passage.held["mlp.down_proj.weight"] - passage.entered
    assert inside == numbers * (64 + 64 + 128)
    assert passage.held["self_attn.q_proj.weight"] < passage.held["mlp.down_proj.weight"] < passage.peak


def test_what_is_held_grows_with_tokens(ids: Tensor) -> None:
    run = run_of(stock(llama_config()), ids, gptq(W4))
    cut = [few_tokens(run.job.batches[0], n) for n in (32, 128)]
    (small,), (large,) = (trial_forward(run.plan, batch, F32).values() for batch in cut)
    assert large.tokens == 4 * small.tokens
    for name, size in small.held.items():
        assert 3 * size < large.held[name] <= 4 * size  # rotary tables are those of one sample


def test_two_blocks_of_a_kind_are_enough() -> None:
    """Eight blocks, of which two run; a model of one block of a kind runs to its end."""
    entered = []
    module = stock(llama_config(num_hidden_layers=8))
    ids = torch.zeros(1, 8, dtype=torch.long)
    run = run_of(module, ids, gptq(W4))
    for i, layer in enumerate(run.plan.model.module.model.layers):
        layer.register_forward_hook(lambda *_, i=i: entered.append(i))
    assert len(trial_forward(run.plan, run.job.batches[0], Place(F32.device, None))) == 1
    assert entered == [0, 1]
    one = run_of(stock(llama_config(num_hidden_layers=1)), ids, gptq(W4))
    assert len(trial_forward(one.plan, one.job.batches[0], F32)) == 1


def test_a_plain_module_is_one_block() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    run = run_of(net, torch.ones(4, 8), leafwise(("gram",), lambda w, gram: dense(w)))
    (passage,) = trial_forward(run.plan, run.job.batches[0], F32).values()
    assert passage.held == {"0.weight": 0, "2.weight": 4 * 8 * 4}
