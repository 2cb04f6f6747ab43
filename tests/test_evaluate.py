"""Perplexity against transformers' own loss, and against a float64 sum written out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from conftest import CONFIGS, VOCABULARY, llama_config, stock
from ptq.errors import BadInput
from ptq.models.model import Model
from ptq.models.skeleton import from_module
from ptq.pipeline import evaluate
from ptq.pipeline.evaluate import perplexity


@pytest.fixture(scope="module")
def model() -> Model:
    return from_module(stock(llama_config()))


def reference(model: Any, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """One row and one position at a time, in float64."""
    loss, count = 0.0, 0
    with torch.no_grad():
        for ids, mask in rows:
            logits = model(ids[None], attention_mask=mask[None]).logits[0].double()
            for t in range(len(ids) - 1):
                if mask[t] and mask[t + 1]:
                    loss += float(logits[t].logsumexp(0) - logits[t, ids[t + 1]])
                    count += 1
    return math.exp(loss / count)


def test_equals_the_sum_written_out(family: str) -> None:
    model = stock(CONFIGS[family]())
    ids = torch.randint(VOCABULARY, (5, 17))
    expected = reference(model, [(row, torch.ones_like(row)) for row in ids])
    assert expected > 2
    assert perplexity(from_module(model), [ids], device="cpu") == pytest.approx(expected, rel=1e-5)


@settings(max_examples=10)
@given(cuts=st.lists(st.integers(1, 5), max_size=4, unique=True), batch_size=st.integers(1, 7))
def test_does_not_depend_on_how_samples_are_batched(model: Model, cuts: list[int], batch_size: int) -> None:
    ids = torch.arange(6 * 9).view(6, 9) % VOCABULARY
    parts = torch.tensor_split(ids, sorted(cuts))
    whole = perplexity(model, [ids])
    assert perplexity(model, parts, batch_size=batch_size) == pytest.approx(whole, rel=1e-6)


def test_chunks_add_up(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(VOCABULARY, (3, 20))
    whole = perplexity(model, [ids])
    monkeypatch.setattr(evaluate, "_CHUNK", 7 * VOCABULARY)
    assert perplexity(model, [ids]) == pytest.approx(whole, rel=1e-6)


def test_masked_positions_do_not_count() -> None:
    model = stock(llama_config())
    ids = torch.randint(VOCABULARY, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    got = perplexity(from_module(model), [{"input_ids": ids, "attention_mask": mask}])
    assert got == pytest.approx(reference(model, list(zip(ids, mask, strict=True))), rel=1e-5)
    assert got != pytest.approx(perplexity(from_module(model), [ids]), rel=1e-3)


def test_computes_in_the_dtype_asked_for() -> None:
    model = stock(llama_config())
    ids = torch.randint(VOCABULARY, (2, 12))
    exact = perplexity(from_module(model), [ids])
    rounded = perplexity(from_module(model), [ids], compute_dtype="bfloat16")
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.05)
    half = from_module(stock(llama_config()).to(torch.bfloat16))
    assert perplexity(half, [ids]) == pytest.approx(exact, rel=0.02)  # weights rounded, products not


def test_weights_are_read_and_left_alone() -> None:
    module = stock(llama_config())
    before = {name: (p.clone(), p._version) for name, p in module.named_parameters()}
    perplexity(from_module(module), [torch.randint(VOCABULARY, (2, 12))], compute_dtype="bfloat16")
    assert all(torch.equal(p, before[n][0]) and p._version == before[n][1] for n, p in module.named_parameters())


class Bare(nn.Embedding):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids)


KINDS = ["no position", "no logits", "no text", "NaN", "beyond", "device", "dtype", "nothing", "no ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_evaluated(kind: str, model: Model, tiny_llama: Path) -> None:
    ids, more = torch.randint(VOCABULARY, (2, 12)), {}
    told = {"device": "cannot be used", "dtype": "expected auto", "nothing": "no batch", "no ids": "input_ids"}
    message = {**told, "no text": "LlamaModel does not predict what follows"}.get(kind, kind)
    others = {"nothing": [], "no position": [ids[:, :1]], "no ids": [{"inputs_embeds": ids.float()}]}
    batches: Any = {**others, "no logits": [{"input_ids": ids}]}.get(kind, [ids])
    if kind == "no logits":
        model = from_module(Bare(VOCABULARY, 4))
    if kind == "no text":
        from transformers import AutoModel

        model = from_module(AutoModel.from_pretrained(tiny_llama))
    if kind in ("NaN", "beyond"):
        head = model.params["lm_head.weight"]
        head = torch.full_like(head, torch.nan) if kind == "NaN" else head * 1e6
        bad = {**model.params, "lm_head.weight": head}
        model = replace(model, state=model.state._replace(params=bad))
    if kind in ("device", "dtype"):
        more = {"device": {"device": "nowhere"}, "dtype": {"compute_dtype": "float8"}}[kind]
    with pytest.raises(BadInput, match=message) as caught:
        perplexity(model, batches, **more)
    assert "\n" not in str(caught.value)
