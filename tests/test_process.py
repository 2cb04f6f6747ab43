"""Threads share a heap, without large tensors, where the command line asks for it, and not where nobody does."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT = """
import ctypes, sys, threading
from ptq.cli.process import one_heap

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


LARGE = """
import ctypes, sys
from ptq.cli.process import one_heap

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

if sys.argv[1] == "one":
    one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.mallinfo2.restype = ctypes.c_void_p, Info
before = libc.mallinfo2().hblks
for _ in range(2):
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(16 << 20)))
    apart = libc.mallinfo2().hblks - before
    libc.free(block)
print(apart)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc learns from what it gave back")
@pytest.mark.parametrize(("asked", "apart"), [("one", "1"), ("none", "0")])
def test_what_is_large_stays_out_of_it(asked: str, apart: str) -> None:
    """By default memory that was given back once is kept in the heap the next time."""
    done = subprocess.run([sys.executable, "-c", LARGE, asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == apart


IMPORTS = """
import gc, sys
from ptq.cli.process import importing

for name in ["torch", "wave"]:
    try:
        with importing():
            __import__(name)
            print(gc.isenabled(), end=" ")
            raise ImportError
    except ImportError:
        print(gc.isenabled(), gc.get_freeze_count() > 0)
        gc.unfreeze()
"""


def test_what_is_imported_is_not_looked_through_for_garbage() -> None:
    """Once: where torch is there already the process may be somebody else's."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False True True", "True True False"]


LEAVES = """
import atexit, sys
from ptq.cli.process import leave

atexit.register(print, "late")
print("said", end="")
sys.stderr.write("told")
leave(7)
"""


def test_a_process_that_leaves_loses_nothing_that_was_said() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("said", "told", 7)


@pytest.mark.parametrize("closed", [1, 2])
@pytest.mark.parametrize(
    ("command", "code", "said", "where"), [("recipes", 0, "rtn-w8a16", 1), ("inspect nowhere", 2, "ptq: nowhere", 2)]
)
def test_a_process_without_an_output_works_as_any(command: str, code: int, said: str, where: int, closed: int) -> None:
    """As a daemon's: what would be said there goes nowhere."""
    shell = ["/bin/sh", "-c", f"exec {sys.executable} -m ptq {command} {closed}>&-"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    heard = {1: done.stdout, 2: done.stderr}
    assert (done.returncode, said in heard[where], heard[closed]) == (code, closed != where, "")
    assert "Traceback" not in done.stderr
