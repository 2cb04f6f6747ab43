"""Where token ids come from: calibration and evaluation texts as windows of equal length."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from ptq.errors import BadInput
from ptq.io.files import expanded

_MARGIN = 256  # tokens at the end of a cut text, which may not be those of the whole text
_SOURCES = "builtin, builtin:eval, a .txt or .jsonl file, or hf:NAME[:CONFIG[:SPLIT]]"


def tokens(source: str | Path, tokenizer: Any, samples: int, seq_len: int) -> Int[Tensor, "samples seq_len"]:
    """The first windows of a text.

    Text is tokenised whole, without special tokens, and cut into consecutive windows; the rows of a file or data set
    follow one another as they are.

    Args:
        source: `builtin` (the first three quarters of Python's own `pydoc_data.topics`), `builtin:eval` (the rest), a
            `.txt` file, a `.jsonl` file whose rows have `text`, `messages` (put through the chat template) or
            `input_ids`, or `hf:NAME[:CONFIG[:SPLIT]]`, rows of a data set read with `datasets`.
        tokenizer: of transformers, or a processor that has one; None will do for `input_ids`.
        samples: number of windows.
        seq_len: tokens in a window.

    Returns:
        Token ids, int64.

    Raises:
        BadInput: the source cannot be read, or is too short; says how many windows there are.

    >>> class Letters:
    ...     def __call__(self, text, **kwargs):
    ...         return {"input_ids": [ord(letter) for letter in text]}
    >>> tokens("builtin", Letters(), samples=2, seq_len=3).shape
    torch.Size([2, 3])
    """
    if samples < 1 or seq_len < 1:
        raise BadInput(f"{source}: got {samples} samples of {seq_len} tokens, expected at least 1 of 1")
    need = samples * seq_len
    ids = list(islice(_ids(str(source), getattr(tokenizer, "tokenizer", tokenizer), need), min(need, sys.maxsize)))
    if len(ids) < need:
        raise BadInput(
            f"{source}: too little text: {len(ids)} tokens are {len(ids) // seq_len} windows of {seq_len}, got "
            f"{samples} samples; ask for fewer or shorter samples, or give more text"
        )
    return torch.tensor(ids, dtype=torch.int64).view(samples, seq_len)


def _ids(source: str, tokenizer: Any, need: int) -> Iterator[int]:
    if source in _BUILTIN:
        return iter(_encoded(_BUILTIN[source](), tokenizer, need))
    if source.startswith("hf:"):
        return _of_rows(_dataset(source), tokenizer)
    path = expanded(source)
    if path.suffix not in (".txt", ".jsonl"):
        raise BadInput(f"data source {source!r}: expected {_SOURCES}")
    if not path.is_file():
        raise BadInput(f"data source {source}: no such file")
    if path.suffix == ".jsonl":
        return _of_rows(_json_rows(path), tokenizer)
    return iter(_encoded(_text(path), tokenizer, need))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def _topics() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def _calibration() -> str:
    text = _topics()
    return text[: len(text) * 3 // 4]


def _evaluation() -> str:
    text = _topics()
    return text[len(text) * 3 // 4 :]


_BUILTIN: Mapping[str, Callable[[], str]] = {"builtin": _calibration, "builtin:eval": _evaluation}


def _encoded(text: str, tokenizer: Any, need: int) -> list[int]:
    """The first `need` ids of a text, or all that there are.

    Long texts are read from the front only. What stands behind a cut cannot change ids that lie well before it, so the
    answer is that of the whole text.
    """
    size = 8 * need + 4096
    while size < len(text):
        ids = _encode(text[:size], tokenizer)
        if len(ids) >= need + _MARGIN:
            return ids
        size *= 4
    return _encode(text, tokenizer)


def _encode(text: str, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise BadInput("the model has no tokenizer; give a .jsonl file with input_ids")
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


Row = tuple[str, Mapping[str, Any]]  # where it stands, and its fields


def _of_rows(rows: Iterable[Row], tokenizer: Any) -> Iterator[int]:
    return chain.from_iterable(_row_ids(where, row, tokenizer) for where, row in rows)


def _row_ids(where: str, row: Mapping[str, Any], tokenizer: Any) -> list[int]:
    if "input_ids" in row:
        return _checked_ids(where, row["input_ids"])
    if isinstance(row.get("text"), str):
        return _encode(_checked_text(where, row["text"]), tokenizer)
    if "messages" in row:
        return _encode(_checked_text(where, _chat(where, row["messages"], tokenizer)), tokenizer)
    raise BadInput(f"{where}: got fields {sorted(row)}, expected text, messages or input_ids")


def _checked_ids(where: str, ids: Any) -> list[int]:
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 63 for i in cast("list[Any]", ids)):
        raise BadInput(f"{where}: input_ids must be a list of token ids, none negative or beyond 64 bits")
    return cast("list[int]", ids)


def _checked_text(where: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a pair; no tokenizer takes it
        raise BadInput(f"{where}: not text that UTF-8 can hold: {error.reason} at character {error.start}") from None
    return text


def _chat(where: str, messages: Any, tokenizer: Any) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise BadInput(f"{where}: the tokenizer has no chat template for `messages`; give `text` instead")
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise BadInput(f"{where}: the chat template does not take these messages: {error}") from None


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            if line.strip():
                yield where, _json_row(where, line)


def _json_row(where: str, line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not a line of JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadInput(f"{where}: got {type(row).__name__}, expected an object with text, messages or input_ids")
    return cast("dict[str, Any]", row)


def _dataset(source: str) -> Iterator[Row]:
    name, config, split, *rest = [*source.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise BadInput(f"data source {source!r}: expected hf:NAME[:CONFIG[:SPLIT]]")
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise BadInput(
            f"data source {source}: needs `datasets`, which is not installed: pip install datasets"
        ) from None
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        yield from ((f"{source} row {i}", row) for i, row in enumerate(rows))
    except (OSError, ValueError) as error:
        raise BadInput(f"data source {source}: {' '.join(str(error).split())}") from None
