"""Statistics as a value: measured once, saved, merged, and used by what needs them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conftest import CONFIGS, stock
from ptq.base import State, Stats
from ptq.errors import BadInput
from ptq.models.call import merge_stats, observe
from ptq.models.skeleton import from_module
from ptq.numerics.schemes import scheme
from ptq.numerics.stats import KINDS, Gram
from ptq.pipeline.calibrate import calibrate, load_stats, save_stats
from ptq.pipeline.evaluate import perplexity
from ptq.transforms.gptq import gptq


def equal(a: Stats, b: Stats, rtol: float = 0.0) -> bool:
    pairs = [(a[s][k], b[s][k]) for s in a for k in a[s]]
    values = [(getattr(x, f.name), getattr(y, f.name)) for x, y in pairs for f in fields(x)]
    same = [float((x - y).abs().max()) <= rtol * float(y.abs().max()) for x, y in values]
    return a.keys() == b.keys() and all(a[s].keys() == b[s].keys() for s in a) and all(same)


def test_calibrate_is_observe_on_every_default_site(family: str, batches: list[Tensor]) -> None:
    model = from_module(stock(CONFIGS[family]()))
    got = calibrate(model, batches, list(KINDS), compute_dtype="float32", batch_size=2)
    assert len(got) == 8  # four tensors in each of two blocks; not the head
    want: Stats = {}
    for ids in batches:
        with torch.no_grad():
            want = merge_stats(want, observe(model, model.state, dict.fromkeys(got, tuple(KINDS)), input_ids=ids)[1])
    assert equal(got, want, rtol=1e-5)


def test_halves_merge_to_the_whole(batches: list[Tensor]) -> None:
    model = from_module(stock(CONFIGS["llama"]()))
    whole, first, second = (
        calibrate(model, data, compute_dtype="float32") for data in (batches, batches[:1], batches[1:])
    )
    assert equal(merge_stats(first, second), whole, rtol=1e-5)


def test_saved_is_loaded_bit_for_bit(tmp_path: Path, batches: list[Tensor]) -> None:
    model = from_module(stock(CONFIGS["llama"]()))
    stats = calibrate(model, batches, list(KINDS), compute_dtype="float32")
    save_stats(stats, tmp_path / "stats.safetensors")
    assert equal(load_stats(tmp_path / "stats.safetensors"), stats)
    assert [p.name for p in tmp_path.iterdir()] == ["stats.safetensors"]


def test_a_file_that_is_no_statistics_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(BadInput, match="is no statistic"):
        load_stats(tiny_llama / "model.safetensors")
    with pytest.raises(BadInput, match="cannot be read"):
        load_stats(tmp_path / "missing")
    (tmp_path / "short").write_bytes(b"\x10")
    with pytest.raises(BadInput, match="cannot be read"):
        load_stats(tmp_path / "short")


def test_activations_that_are_not_finite_are_refused_by_name(batches: list[Tensor]) -> None:
    module = stock(CONFIGS["llama"]())
    with torch.no_grad():
        module.model.layers[1].input_layernorm.weight[3] = float("nan")
    with pytest.raises(BadInput, match=r"layers\.1\.self_attn\.q_proj\.weight: its input has NaN"):
        calibrate(module, batches, compute_dtype="float32")


def test_an_unknown_statistic_is_refused(batches: list[Tensor]) -> None:
    with pytest.raises(BadInput, match="unknown statistic 'hessian'"):
        calibrate(from_module(stock(CONFIGS["llama"]())), batches, ["hessian"])


def test_a_surrounding_autocast_changes_nothing(batches: list[Tensor]) -> None:
    model = from_module(stock(CONFIGS["llama"]()))
    plain = calibrate(model, batches, compute_dtype="float32")
    loss = perplexity(model, batches)
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(calibrate(model, batches, compute_dtype="float32"), plain)
        assert perplexity(model, batches) == loss
        _, seen = observe(model, model.state, {"lm_head.weight": ["gram"]}, batches[0])
    gram = seen["lm_head.weight"]["gram"].sum
    assert gram.dtype == torch.float32
    assert not torch.equal(gram, gram.bfloat16().float())  # the forward was the caller's, the product is not


def test_data_that_is_all_masked_is_refused() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(BadInput, match=r"q_proj\.weight: no calibration token reached it; all were masked"):
        calibrate(from_module(stock(CONFIGS["llama"]())), [{"input_ids": ids, "attention_mask": torch.zeros_like(ids)}])


def test_what_solves_reported_is_left_out(tmp_path: Path) -> None:
    stage = gptq(scheme("W4A16", group_size=-1))
    seen = {"a.weight": {"gram": Gram.measure(torch.randn(9, 4))}}
    _, after = stage.apply(State({"a.weight": torch.randn(2, 4)}), seen, {"a.weight": ("a.weight",)})
    assert "outcome" in after["a.weight"]
    save_stats(after, tmp_path / "stats.safetensors")
    assert equal(load_stats(tmp_path / "stats.safetensors"), seen)
    both = merge_stats(after, after)
    assert both["a.weight"].keys() == {"gram"}
    assert int(both["a.weight"]["gram"].count) == 18
    assert merge_stats({}, {"b.weight": {"outcome": after["a.weight"]["outcome"]}}) == {}
