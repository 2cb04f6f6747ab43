"""`ptq`, and `python -m ptq`: a process of its own."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import NoReturn

from ptq.cli.main import main
from ptq.cli.process import leave


def command() -> NoReturn:
    """Runs one command and ends the process."""
    if isinstance(sys.stdout, TextIOWrapper):  # names that a terminal has no letters for must not end the work
        sys.stdout.reconfigure(errors="backslashreplace")
    leave(main())


if __name__ == "__main__":
    command()
