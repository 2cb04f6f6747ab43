"""Zeros for weights that are not read: all in one place, and in no memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ptq.models.zeros import Zeros
from ptq.pipeline.budget import resident_bytes

MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (0, 5)])
def test_zeros_of_any_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = Zeros([24 * 8])(torch.Size(shape), dtype)
    assert (made.shape, made.dtype, made.is_contiguous()) == (torch.Size(shape), dtype, True)
    assert not made.to(torch.float32).any()


def test_all_weights_are_one_buffer_that_takes_no_memory() -> None:
    before = resident_bytes(torch.device("cpu"))
    zeros = Zeros([256 * MIB, 64 * MIB])
    large, small = zeros(torch.Size((8192, 8192)), torch.float32), zeros(torch.Size((4096, 4096)), torch.float32)
    assert large.data_ptr() == small.data_ptr()
    assert not F.linear(torch.ones(1, 8192), large).any()
    assert resident_bytes(torch.device("cpu")) - before < 64 * MIB


def test_a_model_without_parameters_has_none() -> None:
    assert Zeros([])(torch.Size((0,)), torch.float32).shape == (0,)
