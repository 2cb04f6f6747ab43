"""The gauge: tensors count from the operation that makes them until nothing holds them."""

from __future__ import annotations

import time

import pytest
import torch

from ptq.pipeline.meter import Meter, timed, timed_well

KIB = 1024


def block() -> torch.Tensor:
    return torch.ones(KIB, dtype=torch.uint8)


def test_what_is_dropped_counts_in_the_peak_only() -> None:
    with Meter() as meter:
        kept, dropped = block(), block()
        assert meter.live == 2 * KIB
        del dropped
        assert meter.live == KIB
    assert meter.peak == 2 * KIB
    del kept
    assert meter.live == 0


def test_views_and_writes_are_no_memory() -> None:
    outside = block()
    with Meter() as meter:
        _ = outside[:100].view(10, 10).t()
        outside.add_(1)
        outside.copy_(outside)
    assert meter.peak == 0


def test_a_view_keeps_its_storage() -> None:
    with Meter() as meter:
        part = block()[:1]
        assert meter.live == KIB
        del part
    assert (meter.live, meter.peak) == (0, KIB)


def test_memory_that_is_used_again_is_counted_again() -> None:
    with Meter() as meter:
        for _ in range(100):
            block()
    assert (meter.live, meter.peak) == (0, KIB)


def test_tensors_without_values_are_no_memory() -> None:
    with Meter() as meter:
        _ = torch.ones(KIB, device="meta") + 1
    assert meter.peak == 0


def test_results_of_several_tensors() -> None:
    with Meter() as meter:
        values, indices = torch.ones(4, 8).sort(-1)
        assert meter.live == values.nbytes + indices.nbytes


def test_a_clock_gives_the_result_too() -> None:
    seconds, result = timed(torch.device("cpu"), lambda: 3)
    assert seconds >= 0
    assert result == 3


@pytest.mark.parametrize(("naps", "expected"), [([0.05, 0.01, 0.01, 0.01, 0.01], 0.01), ([0.6], 0.6)])
def test_short_work_is_timed_several_times(naps: list[float], expected: float) -> None:
    """One nap that is too long does not count; long work is done once."""
    left = iter(naps)
    seconds, _ = timed_well(torch.device("cpu"), lambda: time.sleep(next(left)))
    assert expected <= seconds < 2 * expected
    assert list(left) == []
