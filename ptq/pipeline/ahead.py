"""Several things at a time: work on what comes next while what is done is being used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")


def ahead(work: Callable[[A], B], items: Iterable[A], workers: int) -> Generator[B]:
    """`work` of each item, in order, several at a time.

    Threads are enough, since torch lets others run while it computes, as does Python while it reads a file. They
    inherit neither grad mode nor autocast. While one result is being used at most twice `workers` others are begun or
    wait, so that no thread is idle where one takes much longer than the next.

    An error comes out where the result would have. Closing waits for what is being worked on, and begins nothing more.

    >>> list(ahead(lambda x: x * x, range(4), workers=2))
    [0, 1, 4, 9]
    """
    with _threads(workers) as pool:
        begun: deque[Future[B]] = deque()
        try:
            for item in items:
                begun.append(pool.submit(work, item))
                if len(begun) > 2 * workers:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()


@contextmanager
def undivided() -> Generator[None]:
    """This thread's operations are not divided among the cores.

    Threads that each divide every operation among all cores wait for each other more than they compute.
    """
    before = torch.get_num_threads()  # which must come first: a thread takes over the others' number when first asked
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _threads(count: int) -> Generator[Executor]:
    """Threads whose operations are not divided; all of them have begun."""
    everyone = Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # as above
        torch.set_num_threads(1)
        everyone.wait()

    with ThreadPoolExecutor(count, "ptq-ahead") as pool:
        try:
            with undivided():  # torch's word is for threads to come, too: it is given back when all have begun
                for _ in range(count):
                    pool.submit(begin)
                everyone.wait()
        finally:
            everyone.abort()  # nobody waits for one that could not begin
        yield pool
