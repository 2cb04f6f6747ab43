"""Waiting activations elsewhere: the same results, and nothing of them in memory."""

from __future__ import annotations

import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import llama_config, stock
from ptq.base import chain
from ptq.errors import BadInput
from ptq.io.hub import open_model
from ptq.models.skeleton import from_module
from ptq.numerics.leaves import dense
from ptq.numerics.patterns import NM
from ptq.numerics.schemes import scheme
from ptq.numerics.stats import Gram
from ptq.pipeline import blocks, offload
from ptq.pipeline.offload import Live, Offload, Parked
from ptq.pipeline.run import compress
from ptq.pipeline.spine import Spine
from ptq.transforms.fold import fold_norms
from ptq.transforms.gptq import gptq
from ptq.transforms.wanda import wanda

W4 = scheme("W4A16", group_size=16)


@pytest.fixture(autouse=True)
def small_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_LEAST", 1)


@pytest.fixture(params=["cpu", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "cpu" if request.param == "cpu" else str(tmp_path)


def test_storages_come_back_as_they_were(place: str) -> None:
    whole = torch.arange(12.0).view(3, 4)
    view = whole[1:, ::2]
    before = view.clone()
    parked = Parked([whole.untyped_storage()], Offload(place))
    assert whole.untyped_storage().nbytes() == 0
    assert (whole.shape, view.stride()) == ((3, 4), (4, 2))
    parked.fill()
    assert torch.equal(view, before)
    parked.empty()
    assert whole.untyped_storage().nbytes() == 0
    parked.fill()
    assert torch.equal(view, before)


def test_files_have_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So they go with the process, however and whenever it ends."""
    names: list[Path] = []
    reserve = Offload._reserve

    def looked(file: int, nbytes: int) -> None:
        names.extend(tmp_path.iterdir())
        reserve(file, nbytes)

    monkeypatch.setattr(Offload, "_reserve", staticmethod(looked))
    kept = Offload(tmp_path).keep({"gram": Gram.measure(torch.eye(3))})
    assert names == []
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(kept["gram"].sum, torch.eye(3))
    assert int(kept["gram"].count) == 3


def test_no_such_place() -> None:
    with pytest.raises(BadInput, match="offload 'abacus': expected a directory that is there, or a device"):
        Offload("abacus")


@pytest.mark.parametrize(("place", "match"), [("", "expected a directory"), ("cpu", "forwards run there, so it frees")])
def test_a_place_that_gives_no_room(place: str, match: str, tiny_llama: Path) -> None:
    with pytest.raises(BadInput, match=f"offload '{place}': .*{match}"):
        compress(open_model(tiny_llama), [torch.zeros(1, 8, dtype=torch.long)], gptq(W4), device="cpu", offload=place)


def test_only_what_a_forward_made_is_taken() -> None:
    given, weight, decoded = torch.ones(4), torch.ones(4), []
    with Live({}) as live:
        with live.others():
            decoded.append(weight * 2)
        kept, views = given * 2, (given[1:], weight[1:], decoded[0][1:])
        del views
        given.mul(3)  # dropped at once
    assert [s.data_ptr() for s in live.storages()] == [kept.untyped_storage().data_ptr()]


TABLE = torch.randn(64, 16)


@cache
def made_once(count: int) -> Tensor:
    """The first micro-batch that comes makes it for all of them."""
    return torch.linspace(0.0, 1.0, count).view(-1, 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.linear(x) + table + made_once(x.shape[-2])


class Tabled(nn.Module):
    """Reads tables that are not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        table = TABLE[: x.shape[-2]]
        for layer in self.layers:
            x = layer(x, table)
        return x


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_what_others_have_is_whole_however_far_the_run_comes(blocks: int, tmp_path: Path) -> None:
    made_once.cache_clear()
    before, model, batches = TABLE.clone(), from_module(Tabled()), [torch.randn(1, 48, 16) for _ in range(3)]
    run = compress(model, batches, gptq(W4), offload=tmp_path)
    for _ in range(blocks):
        next(run)
    run.close()
    assert TABLE.untyped_storage().nbytes() == before.nbytes
    assert torch.equal(TABLE, before)
    assert torch.equal(made_once(48), torch.linspace(0.0, 1.0, 48).view(-1, 1))


def test_tables_of_others_change_no_result(tmp_path: Path) -> None:
    model, batches = from_module(Tabled()), [torch.randn(1, 48, 16) for _ in range(3)]
    made_once.cache_clear()
    here = compress(model, batches, gptq(W4)).model.params
    made_once.cache_clear()
    away = compress(model, batches, gptq(W4), offload=tmp_path).model.params
    assert all(torch.equal(dense(here[name]), dense(away[name])) for name in here)


@pytest.mark.slow
def test_as_much_is_put_away_at_the_end_as_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of weights that were let go of is given out again, to activations too."""
    held: list[float] = []
    step = Spine.__iter__

    def watched(self: Spine) -> Any:
        for stop in step(self):
            found = _tensors(list(self.waiting[stop].shapes()))
            held.append(sum(x.untyped_storage().nbytes() for x in found) / sum(x.nbytes for x in found))
            yield stop

    monkeypatch.setattr(Spine, "__iter__", watched)
    config = llama_config(num_hidden_layers=8, hidden_size=256, intermediate_size=512)
    ids = [torch.randint(300, (1, 128)) for _ in range(4)]
    _ = compress(stock(config).float(), ids, gptq(W4), offload=tmp_path, compute_dtype="bfloat16").model
    quarter = len(held) // 4
    assert max(held[quarter:]) <= max(held[:quarter])


STAGES = {"gptq": gptq(W4), "wanda": wanda(NM(keep=2, of=4)), "fold": chain(fold_norms(), gptq(W4))}


@pytest.mark.parametrize("stage", [s if s == "gptq" else pytest.param(s, marks=pytest.mark.slow) for s in STAGES])
def test_same_results(stage: str, tiny: Path, tmp_path: Path) -> None:
    ids = torch.randint(300, (6, 24))
    here, away = (
        compress(open_model(tiny), [ids], STAGES[stage], batch_size=2, offload=where).model.params
        for where in (None, tmp_path)
    )
    for name, leaf in here.items():
        assert torch.equal(dense(leaf), dense(away[name])), name


def test_parked_batches_hold_nothing(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a weight is solved, at most one micro-batch's input is in memory."""
    held: list[int] = []
    step = Spine.__iter__

    def watched(self: Spine) -> Any:
        for stop in step(self):
            held.append(sum(x.untyped_storage().nbytes() for x in _tensors(list(self.waiting[stop].shapes()))))
            yield stop

    monkeypatch.setattr(Spine, "__iter__", watched)
    ids = torch.randint(300, (6, 24))
    _ = compress(open_model(tiny_llama), [ids], gptq(W4), batch_size=2, offload=tmp_path).model
    away, held[:] = list(held), []
    _ = compress(open_model(tiny_llama), [ids], gptq(W4), batch_size=2).model
    assert len(away) == len(held)
    assert sum(away) < 0.1 * sum(held)  # ids and masks stay


def test_the_callers_batch_is_left_alone(tmp_path: Path) -> None:
    batch = torch.randn(64, 8)
    before = batch.clone()

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.view(-1, 8)  # of the caller's memory
            return self.two(self.one(flat)) + flat

    _ = compress(from_module(Keeps()), [batch], gptq(scheme("W4A16", group_size=-1)), offload=tmp_path).model
    assert torch.equal(batch, before)


def test_statistics_that_would_not_fit(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a whole block, and only where there is a place for them."""
    kept: list[Any] = []
    keep = Offload.keep

    def counted(self: Offload, tree: Any) -> Any:
        kept.append(tree)
        return keep(self, tree)

    monkeypatch.setattr(Offload, "keep", counted)
    ids, stage = torch.randint(300, (6, 24)), wanda(NM(keep=2, of=4))
    plain = compress(open_model(tiny_llama), [ids], stage, batch_size=2, offload=tmp_path).model.params
    assert not kept
    monkeypatch.setattr(blocks, "budget", lambda _: 100)
    short = compress(open_model(tiny_llama), [ids], stage, batch_size=2, offload=tmp_path).model.params
    assert kept
    assert {len(tree) for tree in kept} == {1}  # each by itself, as soon as it is measured
    assert all(torch.equal(dense(plain[name]), dense(short[name])) for name in plain)


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system reserves no room")
def test_a_full_directory_is_told_before_it_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        Offload(tmp_path).keep(torch.ones(1 << 16))


def test_room_is_really_there(tmp_path: Path) -> None:
    kept = Offload(tmp_path).keep(torch.arange(1 << 16))
    assert torch.equal(kept, torch.arange(1 << 16))
    assert Offload(tmp_path).storage(0).nbytes() == 0
