"""Work on what comes next while what is done is being used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def ahead(work: Callable[[A], B], items: Iterable[A], workers: int) -> Generator[B]:
    """`work` of each item, in order, several at a time.

    Threads are enough, since torch lets others run while it computes, as does Python while it reads a file. They
    inherit neither grad mode nor autocast. While one result is being used at most `workers` others are begun.

    An error comes out where the result would have. Closing waits for what is being worked on, and begins nothing more.

    >>> list(ahead(lambda x: x * x, range(4), workers=2))
    [0, 1, 4, 9]
    """
    with ThreadPoolExecutor(workers, "ptq-ahead") as pool:
        begun: deque[Future[B]] = deque()
        try:
            for item in items:
                begun.append(pool.submit(work, item))
                if len(begun) > workers:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()
