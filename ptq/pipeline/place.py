"""Where and in what a model is computed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.models.model import Model
from ptq.models.skeleton import buffers, copied, rebuilt, set_buffers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Place(NamedTuple):
    """Where and in what a run computes."""

    device: torch.device
    dtype: torch.dtype | None
    """of forwards; None: each parameter's own"""

    def cast(self, value: Tensor) -> Tensor:
        """A parameter as it is computed with."""
        dtype = self.dtype if self.dtype and value.is_floating_point() else value.dtype
        return value.to(device=self.device, dtype=dtype)

    @contextmanager
    def alone(self) -> Generator[None]:
        """Computes in the dtypes that are asked for, whatever autocast the caller is in."""
        with torch.autocast("cpu", enabled=False), torch.autocast(self.device.type, enabled=False):
            yield


def computed(model: Model, place: Place) -> Model:
    """The model with a skeleton to compute with there: its buffers in the right dtype and on the device."""
    module = rebuilt(model.module, place.dtype) if place.dtype else copied(model.module)
    set_buffers(module, {name: b.to(place.device) for name, b in buffers(module).items()})
    return replace(model, module=module)


def resolve(device: str | torch.device, compute_dtype: str | torch.dtype, model: Model) -> Place:
    """What is meant by "auto": the first CUDA device, else the CPU; bfloat16 where that is fast, else float32.

    A plain module may mix dtypes on purpose, so "auto" leaves them alone.

    Raises:
        BadInput: the device cannot be used, or the dtype is none to compute in.
    """
    place = _device(device)
    return Place(place, _dtype(compute_dtype, model, place))


def _device(choice: str | torch.device) -> torch.device:
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=choice).device  # with its index, as tensors there have it
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise BadInput(f"device {str(choice)!r} cannot be used: {reason}") from None
    if device.type == "meta":
        raise BadInput("device 'meta' cannot be used: it holds no values; choose cpu or cuda")
    return device


def _dtype(choice: str | torch.dtype, model: Model, device: torch.device) -> torch.dtype | None:
    if isinstance(choice, torch.dtype):
        if not choice.is_floating_point or choice.itemsize == 1:
            raise BadInput(f"compute dtype {choice}: expected floats of 16 bits or more")
        return choice
    if choice != "auto" and choice not in DTYPES:
        raise BadInput(f"compute dtype {choice!r}: expected auto or one of {', '.join(DTYPES)}")
    if choice != "auto":
        return DTYPES[choice]
    if model.config is None:
        return None
    return torch.bfloat16 if _fast_bf16(device) else torch.float32


def _fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # torch has no public word for it
