"""Whole runs on a device that is pretended: what they give is what the CPU gives, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from conftest import CONFIGS, VOCABULARY, stock
from laws.shared import IN, W4, identical
from pretend import CUDA, MEMORY, PretendCuda, everywhere, on_cuda, there
from ptq._tree import tensors, tree_map
from ptq.base import Params, Stage, State, Transform, chain, leafwise
from ptq.io.hub import load as load_model
from ptq.io.output import RECORD
from ptq.io.save import save
from ptq.models.call import call
from ptq.models.skeleton import from_module
from ptq.numerics.fits import fit, nearest
from ptq.numerics.lazy import load
from ptq.numerics.patterns import NM, Unstructured
from ptq.numerics.schemes import scheme
from ptq.numerics.stats import KINDS
from ptq.pipeline import blocks, offload
from ptq.pipeline.calibrate import calibrate
from ptq.pipeline.evaluate import perplexity
from ptq.pipeline.place import resolve
from ptq.pipeline.run import compress
from ptq.transforms.fold import fold_norms
from ptq.transforms.gptq import gptq
from ptq.transforms.magnitude import magnitude
from ptq.transforms.rtn import rtn
from ptq.transforms.sparsegpt import sparsegpt
from ptq.transforms.wanda import wanda
from strategies import randn

HERE: dict[str, Any] = {"device": "cpu", "compute_dtype": "float32"}
THERE: dict[str, Any] = {"device": "cuda", "compute_dtype": "float32"}
W4_16 = scheme("W4A16", 16)
STAGES: dict[str, tuple[Transform | Stage, ...]] = {
    "gptq": (gptq(W4_16),),
    "folded": (chain(fold_norms(), gptq(scheme("W3A16_ASYM", 16), order=None)),),
    "indefinite": (gptq(W4_16, damp=0.0),),
    "joint": (sparsegpt(NM(keep=2, of=4), W4_16),),
    "wanda, then gptq": (wanda(Unstructured(0.5)), gptq(scheme("W8A16", 16))),
    "magnitude, then rtn": (magnitude(NM(keep=2, of=4)), rtn(W4_16, "mse")),
    "fp8": (rtn(scheme("FP8A16")),),
}
RUNS = [*(("llama", name) for name in STAGES), ("gemma3", "folded"), ("gpt2", "gptq")]


@pytest.fixture(autouse=True)
def same_kernels() -> Iterator[None]:
    """Attention has kernels of its own on each device; this one is made of products."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def data() -> list[Any]:
    """Samples of two lengths, and a batch that is padded."""
    ids = torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return [*ids.unbind(), ids[0, :7], {"input_ids": ids, "attention_mask": mask}]


def in_memory(params: Params) -> Params:
    return {name: load(leaf) for name, leaf in params.items()}


def lines(report: dict[str, Any]) -> Any:
    return [(b["name"], b["weights"]) for b in report["blocks"]]


@pytest.mark.parametrize(("family", "name"), RUNS, ids=[f"{f}-{n}" for f, n in RUNS])
def test_a_run_is_that_on_the_cpu(family: str, name: str, model_dir: Callable[[str], Path]) -> None:
    """Weights rest on the disk before, and on the CPU after."""
    model = load_model(model_dir(family))
    here = compress(model, data(), *STAGES[name], **HERE)
    want = in_memory(here.model.params)
    with everywhere(PretendCuda()):
        run = compress(model, data(), *STAGES[name], **THERE)
        got = in_memory(run.model.params)
    assert {type(t) for t in tensors(got)} == {Tensor}
    assert identical(got, want)
    assert lines(run.report) == lines(here.report)


@pytest.mark.parametrize("away", ["cpu", "directory"])
@pytest.mark.slow
def test_what_waits_leaves_the_device(
    away: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations, and the statistics of a block that is solved at once."""
    monkeypatch.setattr(offload, "_LEAST", 1)
    monkeypatch.setattr(blocks, "budget", lambda _: 0)
    stages, place = (wanda(Unstructured(0.5)), gptq(W4_16)), str(tmp_path) if away == "directory" else away
    want = compress(load_model(tiny_llama), data(), *stages, offload=tmp_path, **HERE).model.params
    with everywhere(PretendCuda()):
        got = compress(load_model(tiny_llama), data(), *stages, offload=place, **THERE).model.params
    assert identical(in_memory(got), in_memory(want))


def living(net: nn.Module) -> nn.Module:
    """The module on the device, with parameters made anew, as those of a tensor subclass have to be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        return net.to("cuda")


def test_a_model_that_lives_on_the_device(tmp_path: Path) -> None:
    """Its files are those of the same model on the CPU; batches are there too."""
    net, stage = stock(CONFIGS["llama"]()), rtn(W4_16, "gram")
    ids = list(torch.randint(VOCABULARY, (3, 16)))
    save(compress(net, ids, stage, **HERE), tmp_path / "here")
    with everywhere(PretendCuda()):
        save(compress(living(net), on_cuda(ids), stage, **THERE), tmp_path / "there")
    for file in (f for f in (tmp_path / "here").iterdir() if f.name != RECORD):  # that one names the device
        assert file.read_bytes() == (tmp_path / "there" / file.name).read_bytes()


class Follows(nn.Module):
    """Moves its input to its weight, as models that are spread over devices do, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, 8)
        self.register_buffer("shift", torch.randn(IN))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.device) + self.shift)


def test_a_module_that_lives_on_the_device() -> None:
    net, x = Follows(), torch.randn(5, IN)
    want = compress(net, [x], gptq(W4), **HERE).model.params
    with everywhere(PretendCuda()):
        got = compress(living(net), [x.to("cuda")], gptq(W4), **THERE).model.params
        assert identical(tree_map(Tensor.cpu, got), want)


def test_a_transform_that_mixes_devices_is_caught(tiny_llama: Path) -> None:
    guilty = leafwise((), lambda w: w * torch.linspace(1, 2, w.shape[-1]))
    compress(load_model(tiny_llama), None, guilty, **HERE).model  # noqa: B018  # runs to the end
    with everywhere(PretendCuda()), pytest.raises(RuntimeError, match="on the same device"):
        compress(load_model(tiny_llama), None, guilty, **THERE).model  # noqa: B018


def peak(layers: int) -> int:
    """Bytes on the device at most, of a run over so many blocks."""
    model = from_module(stock(CONFIGS["llama"](num_hidden_layers=layers)))
    gc.collect()
    before = MEMORY.peak = MEMORY.used
    with everywhere(PretendCuda()):
        compress(model, data(), rtn(W4_16, "gram"), **THERE).model  # noqa: B018
    return MEMORY.peak - before


def test_one_block_at_a_time_is_on_the_device() -> None:
    """All that three more blocks cost is a handle for each of their nine parameters: one number."""
    assert peak(5) - peak(2) == 3 * 9 * 4


def test_calibration_and_perplexity(family: str, model_dir: Callable[[str], Path]) -> None:
    model = load_model(model_dir(family))
    seen, value = calibrate(model, data(), list(KINDS), **HERE), perplexity(model, data(), device="cpu")
    with PretendCuda():
        stats = calibrate(model, data(), list(KINDS), **THERE)
        assert there(stats)
        assert identical(tree_map(Tensor.cpu, stats), seen)
        assert perplexity(model, data(), device="cuda") == value


def test_a_compressed_state_is_called_where_it_lies() -> None:
    net = Follows()
    with PretendCuda():
        model = from_module(living(net))
        params = dict(model.params)
        w = params["linear.weight"]
        params["linear.weight"] = nearest(w, W4, fit(w, W4))
        assert there(call(model, State(params), on_cuda(randn(1, 5, IN).float())))


def test_a_chosen_device_has_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors there have it, and "cuda" is not equal to "cuda:0"."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with PretendCuda():
        assert {resolve(d, "float32", from_module(Follows())).device for d in ("auto", "cuda")} == {CUDA}
