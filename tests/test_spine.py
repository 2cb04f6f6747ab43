"""The threads: which stop completes next, and that nobody is left behind."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import Tensor, nn

from ptq.errors import Limited
from ptq.models.call import stand_ins
from ptq.models.skeleton import from_module
from ptq.numerics.leaves import dense
from ptq.pipeline.spine import Batch, Spine, Stop


class TwoTowers(nn.Module):
    """Images, where there are any, go through a tower of their own before they meet the text."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3, 4)
        self.text = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        if image is not None:
            x = torch.cat([self.tower(image), x])
        for block in self.text:
            x = block(x)
        return x


BATCHES = [
    Batch((torch.randn(5, 4),), {}),
    Batch((torch.randn(2, 4),), {"image": torch.randn(3, 3)}),
    Batch((torch.randn(1, 4),), {}),
]


def spine(stops: dict[str, Stop], entries: dict[str, Stop] | None = None) -> tuple[Spine, nn.Module]:
    net = TwoTowers()
    model = from_module(net)
    return Spine(
        model.module,
        stand_ins(model.params),
        {},
        BATCHES,
        lambda use: dense(model.params[use.name]),
        stops,
        entries or {},
    ), net


def test_the_smallest_stop_in_parameter_order_completes_first() -> None:
    """The one reached first would be the text's, with the images still in their tower: part of the tokens."""
    stops = {
        "tower.weight": Stop(0, 1, "tower"),
        **{f"text.{i}.0.weight": Stop(2 * i + 2, 1, f"text.{i}") for i in (0, 1)},
    }
    run, _ = spine(stops)
    with run:
        seen = [(s.name, sorted(run.waiting[s]), sum(len(x) for x in run.waiting[s].values())) for s in run]
    assert seen == [("tower", [1], 3), ("text.0", [0, 1, 2], 11), ("text.1", [0, 1, 2], 11)]
    assert run.rows == {"tower.weight": 3, "text.0.0.weight": 11, "text.1.0.weight": 11}


def test_entries_come_before_the_sites_of_their_block() -> None:
    stops = {f"text.{i}.0.weight": Stop(i, 1, f"site {i}") for i in (0, 1)}
    entries = {f"text.{i}": Stop(i, 0, f"text.{i}") for i in (0, 1)}
    run, _ = spine(stops, entries)
    with run:
        assert [stop.name for stop in run] == ["text.0", "site 0", "text.1", "site 1"]


def test_what_a_thread_brought_is_the_models_own_input() -> None:
    run, net = spine({"text.1.0.weight": Stop(0, 1, "last")})
    with run, torch.no_grad():
        for stop in run:
            for i, x in run.waiting[stop].items():
                args, kwargs = BATCHES[i]
                start = args[0] if not kwargs else torch.cat([net.tower(kwargs["image"]), args[0]])
                assert torch.equal(x, net.text[0](start))
                assert not x.requires_grad


def test_skipped_stops_are_walked_through() -> None:
    stops = {f"text.{i}.0.weight": Stop(i, 1, f"text.{i}") for i in (0, 1)}
    run, _ = spine(stops)
    with run:
        run.skip([stops["text.1.0.weight"]])
        assert [stop.name for stop in run] == ["text.0"]
    assert run.rows["text.1.0.weight"] == 11


def test_leaving_never_hangs_however_threads_are_switched() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            run, _ = spine({})
            with run:
                list(run)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("reached", [0, 1])
def test_leaving_ends_every_thread(reached: int) -> None:
    threads = threading.active_count()
    run, _ = spine({f"text.{i}.0.weight": Stop(i, 1, f"text.{i}") for i in (0, 1)})
    with run:
        for _ in zip(range(reached), run, strict=False):
            pass
        assert threading.active_count() == threads + len(BATCHES)
    assert threading.active_count() == threads


def test_the_error_of_one_micro_batch_surfaces() -> None:
    model = from_module(TwoTowers())
    bad = [*BATCHES, Batch((torch.randn(1, 5),), {})]
    threads = threading.active_count()
    with (
        pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error,
        Spine(model.module, stand_ins(model.params), {}, bad, lambda use: dense(model.params[use.name]), {}, {}) as run,
    ):
        list(run)
    assert error.value.__notes__ == ["in micro-batch 3"]
    assert threading.active_count() == threads


def test_fewer_threads_than_micro_batches_are_the_machines_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    start, begun = threading.Thread.start, []

    def limited(self: threading.Thread) -> None:
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        begun.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(Limited, match="got 2 threads for 3 micro-batches, expected one for each; pass a larger batch"):
        spine({})
    assert not any(thread.is_alive() for thread in begun)
