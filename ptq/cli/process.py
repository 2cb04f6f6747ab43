"""What only a process of its own may decide: where memory comes from, when garbage is looked for, how it ends."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # as malloc.h numbers them
_LARGE = 8 << 20
_SPARE = 64 << 20


def one_heap() -> None:
    """Makes glibc give back what is freed, whichever thread freed it.

    By default each thread gets a heap of its own and keeps in it what it once needed. Micro-batches run one at a time,
    each in its thread, so that is memory for all of them at once. In one heap what is parked leaves holes; tensors of
    8 MiB and more are kept out of it, where they come and go without a trace, and less would cost time. SmolLM2 at 64
    windows takes 1.43 GiB by default, 0.98 in one heap and 0.89 without the large ones. Other C libraries have no such
    words.
    """
    with suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _SPARE)  # else a fixed threshold makes the heap shrink and grow all the time


def speaking() -> None:
    """Makes it safe to print, also names that a terminal has no letters for, and where there is no output at all."""
    nowhere = Path(os.devnull)
    sys.stdout = sys.stdout or nowhere.open("w")
    sys.stderr = sys.stderr or nowhere.open("w")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def importing() -> Generator[None]:
    """No garbage is looked for among what is being imported, now or ever: it stays.

    torch and transformers are half a million objects, which would be gone through again and again while they come.
    """
    if "torch" in sys.modules:  # somebody else's process, who may want his garbage collected
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave(code: int) -> NoReturn:
    """Ends the process at once: to take all modules apart first takes a second, and is for nothing."""
    with suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
