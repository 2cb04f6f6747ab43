"""Working ahead: in order, not too far, and nothing is left running."""

from __future__ import annotations

import threading
import time

import pytest

from ptq.pipeline.ahead import ahead


def test_results_come_in_order_whoever_is_first() -> None:
    def work(i: int) -> int:
        time.sleep(0.01 * (5 - i))
        return i

    assert list(ahead(work, range(5), workers=3)) == list(range(5))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_no_more_than_the_workers_are_ahead(workers: int) -> None:
    begun: list[int] = []
    for i in ahead(lambda i: begun.append(i) or i, range(20), workers):
        assert len(begun) <= i + 1 + workers
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
    assert len(begun) <= 3
    assert not [t for t in threading.enumerate() if t.name.startswith("ptq-ahead")]
