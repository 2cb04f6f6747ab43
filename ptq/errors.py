"""The errors a caller can act on. Every message is one line: what, where, got, expected, what to do."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class PtqError(Exception):
    r"""Base of all errors that ptq raises on purpose.

    A file may put anything into a name: what would break the line, or move a terminal's cursor, is shown escaped.

    >>> str(PtqError("a\nb"))
    'a\\nb'
    """

    def __init__(self, message: object = "") -> None:
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(message)))


class BadInput(PtqError, ValueError):
    """The caller's input cannot work: a file, a recipe, a shape, a pattern. The command line exits with 2."""


class Limited(PtqError):
    """The machine or a limit of the process gives less than the run needs. The command line exits with 1."""


Guard = Callable[..., AbstractContextManager[Any]]
"""What a reader enters with each part of its input, given the names of what the part is made of."""


def at_once(*about: str) -> AbstractContextManager[None]:
    """The guard of a reader that ends at its first error."""
    return nullcontext()


class Refusals:
    """The guard of a reader that is to go on: what it refuses, by name.

    What is made of something that was refused already is passed over in silence.

    >>> refusals = Refusals()
    >>> for part in ("scale", "weight"):
    ...     with refusals(part, "scale"):
    ...         raise BadInput(f"no {part}")
    >>> refusals.found
    {'scale': 'no scale'}
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    @contextmanager
    def __call__(self, *about: str) -> Generator[None]:
        try:
            yield
        except BadInput as error:
            if self.found.keys().isdisjoint(about):
                self.found[about[0]] = str(error)


class Notice(UserWarning):
    """Something to know though nothing failed: what a checkpoint asks for and does not get, a pattern without effect.

    The command line shows it with the result.
    """


class NoMatch(BadInput):
    """A target pattern matches no weight."""


class Refused(PtqError, RuntimeError):
    """An operation met a weight that it cannot read.

    A `RuntimeError`, because Python's binary operators swallow a `TypeError` and the weight's path would be lost.
    """


class NotPositiveDefinite(PtqError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage, reportUntypedBaseClass]  # public by its documentation
    """A damped Hessian stayed indefinite after every damping tried."""
