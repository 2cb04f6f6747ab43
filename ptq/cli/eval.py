"""Measure a model's perplexity on a text."""

from __future__ import annotations

import argparse
import json

from ptq.cli.options import add_data, add_model, add_place, notices
from ptq.cli.process import importing


def configure(parser: argparse.ArgumentParser) -> None:
    """MODEL, data, place."""
    add_model(parser)
    add_data(parser, "builtin:eval", samples=32)
    add_place(parser, "float32")


def run(args: argparse.Namespace) -> None:
    """Prints one line of JSON: perplexity, and the tokens it was measured on."""
    with importing():
        from ptq.cli.work import windows
        from ptq.io.hub import open_model
        from ptq.pipeline.evaluate import perplexity

    model = open_model(args.model, args.trust_remote_code)
    ids = windows(model, args)
    value = perplexity(model, [ids], device=args.device, compute_dtype=args.compute_dtype, batch_size=args.batch_size)
    print(*notices(args), json.dumps({"perplexity": value, "tokens": ids.numel()}), sep="\n")
