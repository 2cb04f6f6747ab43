"""Zeros that stand for weights which are not read."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch
from torch import Tensor


class Zeros:
    """Views of one buffer, as large as the largest weight.

    On a CPU it is memory that was never written, so the system backs all of it with one page of zeros and it costs
    addresses only; `torch.zeros` would write. An expanded scalar would cost a copy of a weight's size at every product.

    Args:
        sizes: bytes of each weight that will be asked for.
        device: where they are.

    >>> zeros = Zeros([8, 4])
    >>> zeros(torch.Size((2, 1)), torch.float32)
    tensor([[0.],
            [0.]])
    """

    def __init__(self, sizes: Iterable[int], device: torch.device | str = "cpu") -> None:
        size = max(sizes, default=0)
        if torch.device(device).type == "cpu":
            pages = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._buffer = torch.frombuffer(pages, dtype=torch.uint8)
        else:
            self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)

    def __call__(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self._buffer[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
