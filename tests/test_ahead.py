"""Working ahead: in order, not too far, and nothing is left running."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from ptq.pipeline.ahead import ahead, undivided


def test_results_come_in_order_whoever_is_first() -> None:
    def work(i: int) -> int:
        time.sleep(0.01 * (5 - i))
        return i

    assert list(ahead(work, range(5), workers=3)) == list(range(5))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_no_more_than_twice_the_workers_are_ahead(workers: int) -> None:
    begun: list[int] = []
    for i in ahead(lambda i: begun.append(i) or i, range(20), workers):
        assert len(begun) <= i + 1 + 2 * workers
    assert sorted(begun) == list(range(20))


def test_an_error_comes_where_its_result_would() -> None:
    def work(i: int) -> int:
        if i == 2:
            raise ValueError(f"no {i}")
        return i

    seen: list[int] = []
    with pytest.raises(ValueError, match=r"^no 2$"):
        seen.extend(ahead(work, range(9), workers=4))
    results = ahead(work, range(9), workers=4)
    assert [next(results), next(results)] == [0, 1]


def test_closing_ends_the_threads_and_begins_nothing_more() -> None:
    begun: list[int] = []
    results = ahead(lambda i: begun.append(i) or i, range(100), workers=2)
    assert next(results) == 0
    results.close()
    assert len(begun) <= 5
    assert not [t for t in threading.enumerate() if t.name.startswith("ptq-ahead")]


@pytest.fixture
def three() -> Iterator[None]:
    """Operations are divided among three threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three")
def test_threads_that_work_ahead_divide_nothing_and_others_divide_as_before() -> None:
    assert list(ahead(lambda _: torch.get_num_threads(), range(9), workers=2)) == [1] * 9
    assert torch.get_num_threads() == 3
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 3


@pytest.mark.usefixtures("three")
def test_what_is_undivided_is_so_until_its_end() -> None:
    with undivided():
        assert torch.get_num_threads() == 1
    with suppress(KeyError), undivided():
        raise KeyError
    assert torch.get_num_threads() == 3


def test_a_thread_that_cannot_begin_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.endswith("_1"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        next(ahead(lambda i: i, range(9), workers=2))
