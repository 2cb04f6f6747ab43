"""List the named recipes, one a line."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> None:
    """Prints name and summary of each."""
    from ptq.recipes.presets import PRESETS

    width = max(map(len, PRESETS))
    for name, summary in PRESETS.items():
        print(f"{name:{width}}  {summary}")
