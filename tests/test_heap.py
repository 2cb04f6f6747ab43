"""Threads share a heap where the command line asks for it, and do not where nobody does."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT = """
import ctypes, sys, threading
from ptq.cli.heap import one_heap

if sys.argv[1] == "one":
    one_heap()
libc, here = ctypes.CDLL(None), threading.Barrier(5)
libc.malloc.restype = ctypes.c_void_p

def hold():
    libc.malloc(ctypes.c_size_t(1000))
    here.wait()
    here.wait()

threads = [threading.Thread(target=hold) for _ in range(4)]
for thread in threads:
    thread.start()
here.wait()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
here.wait()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has several heaps")
@pytest.mark.parametrize(("asked", "heaps"), [("one", 1), ("none", 5)])
def test_threads_share_a_heap(asked: str, heaps: int) -> None:
    done = subprocess.run([sys.executable, "-c", COUNT, asked], capture_output=True, text=True, check=True)
    assert done.stdout.count("<heap nr=") == heaps
