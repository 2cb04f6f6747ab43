"""Sources of token ids: what they hold, in what order, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from ptq.errors import BadInput
from ptq.pipeline.data import tokens


class Letters:
    """A tokenizer without a merge: a token is a letter."""

    chat_template = None

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        assert kwargs["add_special_tokens"] is False
        return {"input_ids": [ord(letter) for letter in text]}


def whole(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_builtin_and_its_evaluation_part_share_nothing() -> None:
    from pydoc_data.topics import topics

    size = len("\n\n".join(topics.values()))
    calibration = tokens("builtin", Letters(), 1, size * 3 // 4)
    evaluation = tokens("builtin:eval", Letters(), 1, size - size * 3 // 4)
    text = "".join(map(chr, torch.cat([calibration, evaluation], 1)[0].tolist()))
    assert text == "\n\n".join(topics.values())
    with pytest.raises(BadInput):
        tokens("builtin", Letters(), 1, size * 3 // 4 + 1)


@given(samples=st.integers(1, 5), seq_len=st.integers(1, 7))
def test_windows_are_consecutive_and_the_first(tmp_path_factory: Any, samples: int, seq_len: int) -> None:
    text = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"
    path = tmp_path_factory.mktemp("data") / "a.txt"
    path.write_text(text)
    windows = tokens(str(path), Letters(), samples, seq_len)
    assert windows.shape == (samples, seq_len)
    assert windows.dtype == torch.int64
    assert "".join(map(chr, windows.flatten().tolist())) == text[: samples * seq_len]


def test_a_long_text_gives_the_ids_of_the_whole(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "long.txt"
    path.write_text(
        "".join(f"In the face of {i * i} ambiguities, refuse the temptation to guess.\n" for i in range(9000))
    )
    seen: list[int] = []

    def counted(text: str, **kwargs: Any) -> Any:
        seen.append(len(text))
        return tokenizer(text, **kwargs)

    windows = tokens(path, counted, samples=3, seq_len=100)
    assert windows.flatten().tolist() == whole(path.read_text(), tokenizer)[:300]
    assert sum(seen) < path.stat().st_size / 10


def test_rows_follow_one_another(tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "errors"}, {"role": "assistant", "content": "never pass"}]
    path = jsonl(tmp_path / "a.jsonl", {"text": "The cat sat"}, {"input_ids": [3, 4, 5]}, {"messages": messages})
    chat = tokenizer.apply_chat_template(messages, tokenize=False)
    expected = [*whole("The cat sat", tokenizer), 3, 4, 5, *whole(chat, tokenizer)]
    assert chat == "user: errors\nassistant: never pass\n"
    assert tokens(path, tokenizer, 1, len(expected))[0].tolist() == expected


def test_input_ids_need_no_tokenizer(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]})
    assert tokens(path, None, 3, 2).tolist() == [[1, 2], [3, 4], [5, 6]]


def test_rows_are_read_only_as_far_as_needed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"input_ids": [1, 2, 3]})
    path.write_text(path.read_text() + "not json\n")
    assert tokens(path, None, 1, 3).tolist() == [[1, 2, 3]]
    with pytest.raises(BadInput, match=r"a\.jsonl:2: not a line of JSON"):
        tokens(path, None, 1, 4)


def test_a_processor_is_asked_for_its_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc")
    processor = type("Processor", (), {"tokenizer": Letters()})()
    assert tokens(path, processor, 1, 3).tolist() == [[97, 98, 99]]


def test_too_little_text_says_how_many_windows_there_are(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 25)
    assert tokens(path, Letters(), 2, 10).shape == (2, 10)
    with pytest.raises(BadInput, match=r"25 tokens are 2 windows of 10, got 3 samples"):
        tokens(path, Letters(), 3, 10)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "x"}], r"a\.jsonl:1: got fields \['prompt'\], expected text, messages or input_ids"),
        ([[1, 2]], r"a\.jsonl:1: got list, expected an object"),
        ([{"input_ids": [1, -1]}], "none negative"),
        ([{"input_ids": "12"}], "must be a list of token ids"),
        ([{"input_ids": [1]}, {"input_ids": [True]}], r"a\.jsonl:2: input_ids must be a list"),
        ([{"messages": [{"role": "user", "content": "x"}]}], "no chat template"),
        ([{"text": 3}], "expected text"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        tokens(jsonl(tmp_path / "a.jsonl", *rows), Letters(), 1, 100)
    assert "\n" not in str(caught.value)


def test_messages_that_the_template_does_not_take(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(BadInput, match=r"a\.jsonl:1: the chat template does not take these messages"):
        tokens(jsonl(tmp_path / "a.jsonl", {"messages": 3}), tokenizer, 1, 4)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such.txt", "no such file"),
        ("wikitext", "expected builtin, builtin:eval, a .txt or .jsonl file"),
        ("builtin:test", "expected builtin"),
        ("hf:", "expected hf:NAME"),
        ("hf:a:b:c:d", "expected hf:NAME"),
    ],
)
def test_bad_sources_are_refused(source: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        tokens(source, Letters(), 1, 1)


def test_a_text_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good \xff bad")
    with pytest.raises(BadInput, match=r"a\.txt: not UTF-8 text .* at byte 5"):
        tokens(path, Letters(), 1, 1)


def test_text_without_a_tokenizer() -> None:
    with pytest.raises(BadInput, match="the model has no tokenizer"):
        tokens("builtin", None, 1, 1)


@pytest.mark.parametrize(("samples", "seq_len"), [(0, 4), (4, 0), (-1, 4)])
def test_counts_are_positive(samples: int, seq_len: int) -> None:
    with pytest.raises(BadInput, match="expected at least 1 of 1"):
        tokens("builtin", Letters(), samples, seq_len)


def test_data_sets_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    fake = ModuleType("datasets")

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> list[dict[str, str]]:
        asked.append((name, config, split, streaming))
        if name == "absent":
            raise FileNotFoundError("Dataset 'absent'\ndoesn't exist")
        return [{"text": "ab"}, {"text": "cd"}]

    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert tokens("hf:wiki:raw:test", Letters(), 1, 4).tolist() == [[97, 98, 99, 100]]
    assert tokens("hf:wiki", Letters(), 1, 1).tolist() == [[97]]
    assert asked == [("wiki", "raw", "test", True), ("wiki", None, "train", True)]
    with pytest.raises(BadInput, match="hf:absent: Dataset 'absent' doesn't exist"):
        tokens("hf:absent", Letters(), 1, 1)


def test_data_sets_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match="needs `datasets`, which is not installed"):
        tokens("hf:wiki", Letters(), 1, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "not a line of JSON"),
        (json.dumps({"text": "a \ud800 b"}), "surrogates not allowed at character 2"),
        (json.dumps({"input_ids": [1, 1 << 63]}), "beyond 64 bits"),
    ],
    ids=["deep", "surrogate", "int64"],
)
def test_lines_that_no_tokenizer_takes_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "ab"}) + "\n" + line + "\n")
    with pytest.raises(BadInput, match=rf"a\.jsonl:2: .*{message}") as caught:
        tokens(str(path), Letters(), 1, 3)
    assert "\n" not in str(caught.value)


def test_the_largest_id_of_64_bits_is_read(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"input_ids": [(1 << 63) - 1]})
    assert tokens(str(path), None, 1, 1).tolist() == [[(1 << 63) - 1]]


def test_more_windows_than_can_be_counted() -> None:
    with pytest.raises(BadInput, match="too little text"):
        tokens("builtin", Letters(), samples=10**20, seq_len=8)
