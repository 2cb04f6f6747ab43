"""The check of a change of variables: what a block computes, output by output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.pipeline.preserve import refuse_change

X = torch.linspace(-1, 1, 8)


def check(*new: Tensor) -> None:
    refuse_change([X * 2] * len(new), list(new), (X,), {"w": X}, "block: fold", ["norm"])


def test_rounding_passes() -> None:
    check(X * 2, X * 2 * (1 + 1e-6))
    check()


@pytest.mark.parametrize("bad", [X * 2.1, X * torch.nan, (X * 2).index_fill(0, torch.tensor([3]), torch.inf)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_changed_output_is_enough(bad: Tensor, place: int) -> None:
    outputs = [X * 2] * 3
    outputs[place] = bad
    with pytest.raises(BadInput, match=r"block: fold changes the function by .* through norm"):
        check(*outputs)


def test_what_a_residual_adds_is_compared_not_the_residual() -> None:
    old = X + 1e-6 * torch.ones(8)
    with pytest.raises(BadInput, match="changes the function"):
        refuse_change(old, X + 2e-6 * torch.ones(8), (X,), {"w": X}, "block: fold", ["norm"])
