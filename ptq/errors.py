"""The errors a caller can act on. Every message is one line: what, where, got, expected, what to do."""

from __future__ import annotations

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
