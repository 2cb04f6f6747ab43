"""What a run will take: against runs, and against what must change it and what must not."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import llama_config, stock
from ptq._tree import tensors
from ptq.base import chain, targets
from ptq.io.hub import open_model
from ptq.io.output import WORK
from ptq.io.safetensors import OnDisk, headers
from ptq.io.save import save, write
from ptq.models.model import Model
from ptq.models.skeleton import from_module
from ptq.numerics.leaves import nbytes
from ptq.numerics.patterns import NM
from ptq.numerics.schemes import scheme
from ptq.pipeline import activations, blocks, estimate as estimating, run as running
from ptq.pipeline.estimate import estimate
from ptq.pipeline.estimates import BlockEstimate, Estimate, Seconds
from ptq.pipeline.offload import Offload
from ptq.pipeline.place import Place
from ptq.pipeline.plan import Plan
from ptq.pipeline.plan_report import plan_report
from ptq.pipeline.run import Run, compress
from ptq.pipeline.spine import STACK, Batch
from ptq.pipeline.tasks import Task
from ptq.pipeline.trial_files import Rates
from ptq.pipeline.trial_forward import Kind, Passage, kind
from ptq.pipeline.trial_solve import Cost
from ptq.recipes.presets import recipe
from ptq.transforms.fold import fold_norms
from ptq.transforms.gptq import gptq
from ptq.transforms.magnitude import magnitude
from ptq.transforms.rtn import rtn
from ptq.transforms.sparsegpt import sparsegpt
from ptq.transforms.wanda import wanda

W4 = scheme("W4A16", group_size=32)
CPU = {"device": "cpu", "compute_dtype": "float32"}


def planned(model: Model, ids: Tensor | None, *stages: Any, **more: Any) -> Run:
    return compress(model, None if ids is None else [ids], *stages, **CPU, **more)


def estimated(run: Run, out: Path | None = None) -> Estimate:
    return estimate(run.job, out)


def llama(**changes: Any) -> Model:
    return from_module(stock(llama_config(**changes)))


def block(found: Estimate, name: str = "model.layers.0") -> BlockEstimate:
    return next(b for b in found.blocks if b.name == name)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(320, (8, 32))


# Disk


@pytest.mark.parametrize(
    "name",
    [
        "gptq-w4a16-g64",
        "rtn-w8a16",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("gptq-w3a16", "sparsegpt-2of4", "wanda-2of4-fp8")),
    ],
)
def test_disk_is_what_a_run_writes(tiny: Path, tmp_path: Path, ids: Tensor, name: str) -> None:
    run = planned(open_model(tiny), ids, *recipe(name))
    found = estimated(run, out=tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == []
    assert found.disk == pytest.approx(save(run, tmp_path / "out").nbytes, rel=0.01)


def test_the_disk_is_that_which_a_link_leads_to(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []
    monkeypatch.setattr("ptq.pipeline.estimate._tried", lambda job, form, scratch: tried.append(scratch) or ())
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    estimated(planned(open_model(tiny_llama), None, rtn(scheme("W4A16", group_size=16))), tmp_path / "link")
    assert [scratch.parent for scratch in tried] == [tmp_path / "disk"]


def test_disk_of_a_head_that_gets_weights_of_its_own(tiny_gemma3: Path, tmp_path: Path) -> None:
    model = open_model(tiny_gemma3)
    run = planned(model, None, targets("lm_head", rtn(W4)))
    found = estimated(run)
    assert found.disk == pytest.approx(save(run, tmp_path / "out").nbytes, rel=0.01)
    assert found.disk > estimated(planned(model, None, rtn(W4))).disk


@pytest.mark.parametrize(
    "stages", [(sparsegpt(NM(2, 4)), gptq(W4)), (fold_norms(), sparsegpt(NM(2, 4)), gptq(W4)), (gptq(W4),)], ids=len
)
@pytest.mark.slow
def test_what_earlier_stages_leave_beside_the_result(
    stages: tuple[Any, ...], tiny_llama: Path, tmp_path: Path, ids: Tensor
) -> None:
    run = planned(open_model(tiny_llama), ids, *stages)
    found, left = estimated(run), 0
    for _ in write(run, tmp_path / "out"):
        files = headers_of(tmp_path / "out.partial" / WORK)
        left = sum(leaf.shape.numel() * leaf.dtype.itemsize for leaf in files)
    assert found.kept == pytest.approx(left, rel=0.01)
    assert (left > 0) == (len(stages) > 1)


def headers_of(directory: Path) -> list[OnDisk]:
    return [leaf for file in directory.glob("*.safetensors") for leaf in headers(file).values()]


@pytest.mark.slow
def test_disk_is_that_of_the_last_stage(tiny_llama: Path, tmp_path: Path, ids: Tensor) -> None:
    run = planned(open_model(tiny_llama), ids, sparsegpt(NM(2, 4)), gptq(W4))
    found = estimated(run)
    assert found.disk == pytest.approx(save(run, tmp_path / "out").nbytes, rel=0.01)
    assert found.disk < estimated(planned(open_model(tiny_llama), ids, sparsegpt(NM(2, 4)))).disk


def test_reduced_sizes_tell_the_full_one(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned(open_model(tiny_llama), None, rtn(scheme("W8A16", group_size=8)))
    whole = estimated(run)
    monkeypatch.setattr("ptq.pipeline.trial_solve._QUICK", 500)
    reduced = estimated(run)
    assert reduced.disk == pytest.approx(whole.disk, rel=0.05)  # a packed weight's shape is some bytes at any size
    assert block(reduced).working == pytest.approx(block(whole).working, rel=0.5)


# Memory


def test_activations_grow_with_tokens_and_weights_do_not(ids: Tensor) -> None:
    one, four = (block(estimated(planned(llama(), ids[:n], gptq(W4), batch_size=2))) for n in (2, 8))
    assert four.activations.held == pytest.approx(4 * one.activations.held, rel=0.05)
    assert (four.read, four.computed, four.stored) == (one.read, one.computed, one.stored)


@pytest.mark.slow
def test_memory_does_not_grow_with_blocks(ids: Tensor) -> None:
    few, many = (estimated(planned(llama(num_hidden_layers=n), ids, gptq(W4))) for n in (2, 6))
    assert many.peak - many.resident == pytest.approx(few.peak - few.resident, rel=0.05)
    assert many.disk - few.disk == pytest.approx(4 * block(few).stored, rel=0.01)


def test_without_data_nothing_is_parked() -> None:
    found = estimated(planned(llama(), None, magnitude(NM(2, 4))))
    assert {b.activations.parked for b in found.blocks} == {"nothing"}
    assert {(b.computed, b.seconds.forward, b.seconds.statistics) for b in found.blocks} == {(0, 0.0, 0.0)}
    assert found.blocks[0].seconds.writing > 0


@pytest.mark.slow
def test_what_does_not_fit_is_measured_in_two_forwards_or_offloaded(
    ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = block(estimated(planned(llama(), ids, gptq(W4))))
    monkeypatch.setattr(running, "budget", lambda device: 10_000)
    twice, away = (block(estimated(planned(llama(), ids, gptq(W4), offload=place))) for place in (None, tmp_path))
    parked = [b.activations for b in (roomy, twice, away)]
    assert [a.parked for a in parked] == ["memory", "two forwards", "offload"]
    assert parked[0].held > parked[1].held > parked[2].held == 0
    assert parked[2].spilled == parked[0].held


def test_statistics_that_would_not_fit_are_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a block that is seen at once: the plan tells what a run then puts away of each block."""
    monkeypatch.setattr(blocks, "budget", lambda _: 700)  # two sites of a block have room, the third and fourth none
    monkeypatch.setattr(activations, "budget", lambda _: 700)
    kept: dict[str, int] = {}
    keep = Offload.keep

    def counted(self: Offload, tree: Any) -> Any:
        kept.update({site: sum(map(nbytes, tensors(of))) for site, of in tree.items()})
        return keep(self, tree)

    monkeypatch.setattr(Offload, "keep", counted)
    work = planned(llama(), torch.randint(300, (4, 16)), wanda(NM(2, 4)), batch_size=2, offload=tmp_path)
    found = {b.name: b.activations.statistics for b in estimated(work).blocks}
    assert not kept
    _ = work.model
    for name in ("model.layers.0", "model.layers.1"):
        assert found[name] == sum(size for site, size in kept.items() if site.startswith(f"{name}.")) > 0


def test_a_disk_without_room_for_trials_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials move to another disk; any other error is not hidden."""
    tried: list[Path | None] = []
    real = estimating._blocks

    def blocks(job: Any, form: str, disk: Path | None) -> Any:
        tried.append(disk)
        if disk is not None:
            raise OSError(code, os.strerror(code))
        return real(job, form, disk)

    monkeypatch.setattr(estimating, "_blocks", blocks)
    monkeypatch.setattr(estimating.shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    run, code = planned(llama(), None, rtn(W4)), errno.ENOSPC
    found = estimated(run, tmp_path / "out")
    assert (tried, found.free, found.fits) == ([tmp_path, None], 1, False)
    code = errno.EIO
    with pytest.raises(OSError, match=os.strerror(code)):
        estimated(run, tmp_path / "out")


def test_memory_that_others_use_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "available_bytes", lambda device: 5)
    found = estimated(planned(llama(), None, rtn(W4)))
    assert found.limit == found.resident + 5
    assert not found.fits


# Seconds, with trials that take what they are told


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch of 64 tokens takes 2 s through a block; a row takes 1 ms, a solve 3 s, writing its result 1 s."""
    nothing = Rates(reading=0.0, writing=0.0, syncing=0.0, safe=0.0, room=0.0)

    def forward(plan: Plan, batch: Batch, place: Place) -> dict[Kind, Passage]:
        kinds = {kind(plan, s) for s in plan.segments if s.module}
        return dict.fromkeys(kinds, Passage(2.0, batch.kwargs["input_ids"].numel(), 64, 0, {}, 0))

    def solve(plan: Plan, task: Task, *_: Any) -> Cost:
        return Cost(0.001, 3.0, 1.0, 0.0, (0.0,) * len(task.weights), 0)

    monkeypatch.setattr("ptq.pipeline.estimate.trial_forward", forward)
    monkeypatch.setattr("ptq.pipeline.estimate.cost", solve)
    monkeypatch.setattr("ptq.pipeline.estimate.file_rates", lambda *_: nothing)


@pytest.mark.usefixtures("clocked")
def test_seconds_are_those_of_all_tokens_sites_and_blocks(ids: Tensor) -> None:
    """256 tokens are four micro-batches; a Llama block has four sites."""
    found = estimated(planned(llama(num_hidden_layers=3), ids, gptq(W4), batch_size=2))
    assert block(found).seconds == pytest.approx(Seconds(4 * 2.0, 4 * 0.256, 4 * 3.0, 0.0, 4 * 1.0))
    assert found.seconds.total == pytest.approx(3 * block(found).seconds.total)


@pytest.mark.usefixtures("clocked")
def test_stages_are_summed(ids: Tensor) -> None:
    parts = [targets("re:.*mlp", gptq(W4)), targets("re:.*attn", gptq(W4))]
    found = block(estimated(planned(llama(), ids, *parts, batch_size=2)))
    assert found.seconds == pytest.approx(Seconds(2 * 8.0, 4 * 0.256, 4 * 3.0, 0.0, 4 * 1.0))


@pytest.mark.usefixtures("clocked")
def test_what_must_see_a_whole_block_takes_another_forward(ids: Tensor) -> None:
    found = block(estimated(planned(llama(), ids, wanda(NM(2, 4)), batch_size=2)))
    assert found.seconds == pytest.approx(Seconds(2 * 8.0, 0.256, 3.0, 0.0, 1.0))


@pytest.mark.usefixtures("clocked")
def test_a_change_of_variables_is_checked_in_two_forwards_of_a_micro_batch(ids: Tensor) -> None:
    found = block(estimated(planned(llama(), ids, chain(fold_norms(), gptq(W4)), batch_size=2)))
    assert found.seconds.forward == pytest.approx(8.0 + 2 * 2.0)


@pytest.mark.usefixtures("clocked")
def test_what_does_not_fit_takes_another_forward(ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "budget", lambda device: 10_000)
    twice, away = (planned(llama(), ids, gptq(W4), batch_size=2, offload=place) for place in (None, tmp_path))
    assert block(estimated(twice)).seconds.forward == pytest.approx(2 * 8.0)
    assert block(estimated(away)).seconds.forward == pytest.approx(8.0)


@pytest.mark.usefixtures("clocked")
def test_where_nothing_is_measured_weights_are_written_beside_the_solves() -> None:
    """A Llama block has four sites; all is written in less time than they take."""
    found = block(estimated(planned(llama(), None, rtn(W4))))
    assert found.seconds == pytest.approx(Seconds(0.0, 0.0, 4 * 3.0, 0.0, 0.0))


@pytest.mark.usefixtures("clocked")
def test_forwards_end_with_the_last_weight_to_solve(ids: Tensor) -> None:
    found = estimated(planned(llama(num_hidden_layers=4), ids, targets("model.layers.1", gptq(W4)), batch_size=2))
    assert [b.activations.parked for b in found.blocks] == ["memory"] * 3 + ["nothing"] * 3
    assert [b.seconds.forward for b in found.blocks] == pytest.approx([0.0, 8.0, 8.0, 0.0, 0.0, 0.0])


@pytest.mark.slow
def test_stacks_count_where_private_memory_is_limited(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resident(stage: Any) -> int:
        run = compress(open_model(tiny_llama), [torch.zeros(6, 16, dtype=torch.long)], stage, batch_size=2)
        return estimate(run.job).resident

    monkeypatch.setattr("ptq.pipeline.estimate.resident_bytes", lambda device: 1000)
    w4 = scheme("W4A16", group_size=16)
    assert resident(gptq(w4)) == 1000
    monkeypatch.setattr("ptq.pipeline.estimate.limits_private", lambda device: True)
    assert resident(gptq(w4)) == 1000 + 3 * STACK
    assert resident(rtn(w4)) == 1000


# A model that is not there

HOLLOW = """
import json, resource, sys, time
import torch
from pathlib import Path
from types import SimpleNamespace
import ptq
from ptq.io.safetensors import OnDisk
from ptq.pipeline.estimate import estimate
from ptq.pipeline.plan_report import plan_report

def refuse(leaf):
    raise AssertionError(f"{leaf.name} was read")

OnDisk.load = refuse
torch.set_num_threads(1)
ids = torch.zeros(16, 256, dtype=torch.long)
torch.zeros(8, 8) @ torch.zeros(8, 8)
(line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")]
resource.setrlimit(resource.RLIMIT_DATA, ((int(line.split()[1]) << 10) + int(sys.argv[2]), resource.RLIM_INFINITY))
model, stages = ptq.open_model(sys.argv[1]), ptq.recipe("gptq-w4a16-g128")
run = ptq.compress(model, [ids], *stages, compute_dtype="bfloat16", device="cpu")
began = time.perf_counter()
found = estimate(run.job)
print(json.dumps({**plan_report(run.plan, found), "took": time.perf_counter() - began}))
"""


def hollow(path: Path, config: Any) -> Path:
    """A directory with the headers of a model and none of its bytes: its file is one hole."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        tensors = LlamaForCausalLM(config).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    path.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return path


def llama_of(hidden: int, inner: int, blocks: int) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": hidden // 128}
    return LlamaConfig(vocab_size=32000, num_hidden_layers=blocks, tie_word_embeddings=False, **sizes)


LARGE = [
    pytest.param(1024, 2816, 24, 1 << 29, id="0.4B, 512 MiB", marks=pytest.mark.slow),
    pytest.param(8192, 28672, 80, 1 << 30, id="78B, 1 GiB", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("hidden", "inner", "blocks", "limit"), LARGE)
def test_a_large_model_is_planned_without_its_weights_in_little_memory(
    tmp_path: Path, hidden: int, inner: int, blocks: int, limit: int
) -> None:
    """The limit is on private memory beside the interpreter's."""
    model = hollow(tmp_path / "model", llama_of(hidden, inner, blocks))
    command = [sys.executable, "-c", HOLLOW, str(model), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    each = found["blocks"][1]
    assert len(found["blocks"]) == blocks + 2
    assert each["read"] == each["computed"] == 2 * (4 * hidden**2 + 3 * hidden * inner + 2 * hidden)
    assert each["stored"] == pytest.approx(each["read"] * (4 + 16 / 128) / 16, rel=0.01)
    assert each["activations"]["held"] > 16 * 256 * (hidden + inner) * 2
    assert found["took"] < 120


# The report


@pytest.mark.slow
def test_the_report_says_what_matches_what(ids: Tensor) -> None:
    stage = chain(targets("re:.*mlp", sparsegpt(NM(2, 4)), ignore=["re:.*down_proj"]), gptq(W4))
    run = planned(llama(), ids, stage)
    report = json.loads(json.dumps(plan_report(run.plan, estimated(run))))
    pruning, rounding = report["stages"][0]
    (clause,) = pruning["targets"]
    assert clause["pattern"] == "re:.*mlp"
    assert len(clause["reaches"]) == 6
    assert len(pruning["weights"]) == 4
    assert rounding["targets"] == []
    assert len(rounding["weights"]) == 14
    assert len(report["blocks"]) == len(run)
    sites = report["blocks"][1]["sites"]
    assert [len(site["weights"]) for site in sites] == [3, 1, 2, 1]
    assert all(site["statistics"] == ["gram"] for site in sites)
    parts = report["totals"]["seconds"]
    assert parts["total"] == pytest.approx(sum(v for k, v in parts.items() if k != "total"))


def test_the_report_says_what_is_tied(tiny_gemma3: Path) -> None:
    model = open_model(tiny_gemma3)
    tied = planned(model, None, rtn(W4))
    assert plan_report(tied.plan, estimated(tied))["ties"] == {"lm_head.weight": "model.embed_tokens.weight"}
    loose = planned(model, None, targets("lm_head", rtn(W4)))
    report = plan_report(loose.plan, estimated(loose))
    assert (report["ties"], report["untied"]) == ({}, ["model.embed_tokens.weight", "lm_head.weight"])
