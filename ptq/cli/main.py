"""`ptq COMMAND ...`: arguments, signals, and how an error becomes an exit code.

Exit codes: 0; 2 for bad input, with exactly one line on stderr; 1 for other failures and for a check that finds errors;
130 for Ctrl-C, 143 for SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial as bound
from itertools import islice
from types import FrameType
from typing import NoReturn

from ptq.cli import compress, convert, demo, eval as evaluate, inspect, recipes
from ptq.cli.options import notices
from ptq.cli.process import one_heap

_COMMANDS = {
    "compress": compress,
    "eval": evaluate,
    "inspect": inspect,
    "convert": convert,
    "recipes": recipes,
    "demo": demo,
}


_NO_MEMORY = ("DefaultCPUAllocator", "could not create a primitive", "can't start new thread")
_LESS = "fewer --samples, a smaller --batch-size or, where there is one, --offload DIRECTORY take less"


_ending = threading.Lock()


class Terminated(BaseException):
    """SIGTERM arrived."""


class Parser(argparse.ArgumentParser):
    """argparse without the usage text before an error: bad input is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = _parser().parse_args(argv)
    one_heap()
    _quieten()
    try:
        with _signals_raise("resume" in args and not args.dry_run), warnings.catch_warnings(record=True) as args.warned:
            warnings.simplefilter("default")
            code: int = args.run(args) or 0
            for notice in notices(args):
                print(notice)
            sys.stdout.flush()
    except KeyboardInterrupt as error:
        return _failed("interrupted", 130, error)
    except Terminated as error:
        return _failed("terminated", 143, error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's own flush at exit complains
        return 1
    except Exception as error:
        from ptq.errors import BadInput, PtqError

        if _out_of_memory(error):
            asked = re.search(r"tried to allocate [\d.]+ \w+", str(error), re.IGNORECASE)
            return _failed("; ".join(("out of memory", *([asked[0]] if asked else []), _LESS)), 1, error)
        if not isinstance(error, PtqError | OSError):
            raise
        return _failed(str(error), 2 if isinstance(error, BadInput) else 1, error)
    return code


def _parser() -> Parser:
    parser = Parser(prog="ptq", description="Post-training compression of language models.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        summary = (command.__doc__ or "").splitlines()[0]
        own = commands.add_parser(name, help=summary, description=summary)
        command.configure(own)
        own.set_defaults(run=command.run)
    return parser


def _out_of_memory(error: Exception) -> bool:
    """Python's own, a device's, or a CPU's, which torch and Python's threads tell as an error like any other."""
    kind, said = type(error).__name__, str(error)
    return isinstance(error, MemoryError) or kind == "OutOfMemoryError" or any(words in said for words in _NO_MEMORY)


def _failed(message: str, code: int, error: BaseException) -> int:
    """One line: what happened, and what was noted on its way, such as how to go on."""
    said = "; ".join((message, *getattr(error, "__notes__", ())))
    sys.stderr.write(f"ptq: {' '.join(said.split())}\n")
    return code


def _quieten() -> None:
    """Other libraries' notices go where bad input must be one line. Only heeded if set before their import."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def _signals_raise(resumable: bool) -> Generator[None]:
    """SIGTERM and Ctrl-C as exceptions, so that threads are ended on the way out; a second one ends all at once.

    Nothing is lost by that where a command is resumable: what is finished is on disk.
    """
    before = {number: signal.signal(number, bound(_raise, resumable)) for number in (signal.SIGINT, signal.SIGTERM)}
    arrived, tells = os.pipe()
    os.set_blocking(tells, False)
    told = signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(arrived, resumable), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(told)
        os.close(tells)  # which ends the thread
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(arrived: int, resumable: bool) -> None:
    """Ends all at the second signal, also while the main thread is in one long product, where no handler runs."""
    with os.fdopen(arrived, "rb", buffering=0) as told:
        ends = (n[0] for n in iter(lambda: told.read(1), b"") if n[0] in (signal.SIGINT, signal.SIGTERM))
        for number in islice(ends, 1, None):
            _end(resumable, number)


def _raise(resumable: bool, number: int, frame: FrameType | None) -> NoReturn:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, bound(_end, resumable))
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _end(resumable: bool, number: int, frame: FrameType | None = None) -> NoReturn:
    _ending.acquire()  # for good: the handler and the thread may both come here
    on = b"; where blocks were finished, the same command with --resume goes on from there" if resumable else b""
    os.write(2, b"ptq: ended at once" + on + b"\n")
    os._exit(128 + number)
