"""`ptq`, and `python -m ptq`: a process of its own."""

from __future__ import annotations

from typing import NoReturn

from ptq.cli.main import main
from ptq.cli.process import leave, speaking


def command() -> NoReturn:
    """Runs one command and ends the process."""
    speaking()
    leave(main())


if __name__ == "__main__":
    command()
