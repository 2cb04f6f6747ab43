"""Options that several commands have."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number above 0.

    >>> positive("3")
    3
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")
    return int(text)


def notices(args: argparse.Namespace) -> list[str]:
    """What ptq itself warned of since the last call, each once; other libraries are no concern of a user's."""
    texts = dict.fromkeys(str(w.message) for w in args.warned if w.category.__module__.startswith("ptq."))
    args.warned.clear()
    return list(texts)


def add_model(parser: argparse.ArgumentParser) -> None:
    """What is opened."""
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face directory or hub id, a .gguf file, or demo")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python files that come with the model")


def add_data(parser: argparse.ArgumentParser, source: str, samples: int) -> None:
    """Which tokens it sees."""
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        default=source,
        help=f"builtin, builtin:eval, a .txt or .jsonl file, or hf:NAME[:CONFIG[:SPLIT]] (default {source})",
    )
    parser.add_argument("--samples", type=positive, default=samples, metavar="N", help=f"windows (default {samples})")
    parser.add_argument("--seq-len", type=positive, default=512, metavar="L", help="tokens in a window (default 512)")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="windows in a forward (default: 4096 tokens)")


def add_place(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Where and in what it is computed."""
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, ... (default auto: cuda where there is one)"
    )
    parser.add_argument(
        "--compute-dtype",
        default=dtype,
        choices=["auto", "float32", "bfloat16", "float16"],
        help=f"of the forward; auto is bfloat16 where the processor is fast at it (default {dtype})",
    )


def add_format(parser: argparse.ArgumentParser, default: str | None) -> None:
    """What a result is stored as."""
    text = "what weights are stored as: dense, pack-quantized, sparse-24-bitmask, ...; auto: what suits each"
    parser.add_argument("--format", required=default is None, default=default, metavar="F", help=text)


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Whether an old result may go."""
    parser.add_argument("--overwrite", action="store_true", help="replace OUT, which stays until the new one is whole")
