"""Write a model in another format."""

from __future__ import annotations

import argparse

from ptq.cli.options import add_format, add_model, add_overwrite
from ptq.cli.process import importing


def configure(parser: argparse.ArgumentParser) -> None:
    """MODEL, OUT, --format."""
    add_model(parser)
    parser.add_argument("out", metavar="OUT", help="directory to write; does not exist until it is whole")
    add_format(parser, None)
    add_overwrite(parser)


def run(args: argparse.Namespace) -> None:
    """Reads and writes one tensor at a time."""
    with importing():
        from ptq.io.hub import open_model
        from ptq.io.output import check_output
        from ptq.io.save import save

    check_output(args.out, args.overwrite, args.model)
    saved = save(open_model(args.model, args.trust_remote_code), args.out, args.overwrite, args.format)
    for name, note in saved.notes.items():
        print(f"{name}: {note}")
    print(f"{saved.path}: {saved.nbytes / 1e6:.1f} MB")
