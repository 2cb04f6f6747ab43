"""Where and in what a model is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ptq.errors import BadInput
from ptq.models.skeleton import from_module
from ptq.pipeline.place import Place, resolve

MODEL = from_module(nn.Linear(2, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, "bfloat16", "float16"])
def test_floats_of_16_bits_or_more_are_computed_in(dtype: torch.dtype | str) -> None:
    expected = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    assert resolve("cpu", dtype, MODEL) == Place(torch.device("cpu"), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool, torch.complex64, "int8", "float8"])
def test_nothing_else_is(dtype: torch.dtype | str) -> None:
    with pytest.raises(BadInput, match=r"compute dtype .*(int8|float8|bool|complex64).*: expected"):
        resolve("cpu", dtype, MODEL)


def test_a_plain_module_keeps_its_dtypes() -> None:
    assert resolve("cpu", "auto", MODEL).dtype is None
