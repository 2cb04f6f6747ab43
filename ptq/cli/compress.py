"""Compress a model and write it to a directory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ptq.cli.options import add_data, add_format, add_model, add_overwrite, add_place
from ptq.cli.process import importing


def configure(parser: argparse.ArgumentParser) -> None:
    """MODEL, OUT, recipe, data, place, report."""
    add_model(parser)
    parser.add_argument("out", metavar="OUT", help="directory to write; does not exist until it is whole")
    parser.add_argument("--recipe", required=True, metavar="NAME", help="such as gptq-w4a16-g64; see ptq recipes")
    add_data(parser, "builtin", samples=128)
    parser.add_argument("--seed", type=int, default=0, help="of transforms that draw random numbers (default 0)")
    add_place(parser, "auto")
    add_overwrite(parser)
    add_format(parser, "auto")
    parser.add_argument(
        "--offload", metavar="PLACE", help="put waiting activations there: a directory, or a device such as cpu"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with what an interrupted run left; the result is the same"
    )
    parser.add_argument("--decode", action="store_true", help="take quantized weights as the floats they stand for")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done and what it takes")
    parser.add_argument("--report", metavar="FILE.json", type=Path, help="write the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Opens, calibrates, compresses, writes block by block, and shows what was done; or only what would be."""
    with importing():
        from ptq.cli.plan_tables import show_plan
        from ptq.cli.tables import show_report
        from ptq.cli.work import measures, refuse_unwritable, windows, write
        from ptq.errors import BadInput
        from ptq.io.files import expanded
        from ptq.io.hub import open_model
        from ptq.io.output import check_output
        from ptq.io.save import finished
        from ptq.io.storable import check_format
        from ptq.pipeline.estimate import estimate
        from ptq.pipeline.plan_report import plan_report
        from ptq.pipeline.run import compress
        from ptq.recipes.presets import recipe

    stages = recipe(args.recipe)
    check_format(args.format)
    check_output(args.out, args.overwrite, args.model, args.resume)
    if args.report:
        refuse_unwritable(args.report, args.out, args.model)
        if args.dry_run and not expanded(args.report).parent.is_dir():
            raise BadInput(f"report {args.report}: its directory does not exist, and a dry run makes none")
    model = open_model(args.model, args.trust_remote_code)
    model = model.decoded() if args.decode else model
    work = compress(
        model,
        [windows(model, args)] if any(map(measures, stages)) else None,
        *stages,
        seed=args.seed,
        device=args.device,
        compute_dtype=args.compute_dtype,
        batch_size=args.batch_size,
        offload=args.offload,
    )
    if args.dry_run:
        done = finished(work, args.out, args.overwrite, args.format, resume=args.resume)
        made = {**plan_report(work.plan, estimate(work.job, args.out, args.format)), "done": done}
    else:
        made = write(work, args.out, args.overwrite, args.resume, args.format)
    report: dict[str, Any] = {"model": args.model, **made}
    if args.report:
        expanded(args.report).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (show_plan if args.dry_run else show_report)(report)
    return int(args.dry_run and not report["totals"]["fits"])
