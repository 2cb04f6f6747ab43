"""Streaming reader and writer against the safetensors library, and what a damaged file says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoints import same_bits
from ptq.errors import BadInput
from ptq.io.files import read_json
from ptq.io.safetensors import DTYPES, INDEX, WEIGHTS, OnDisk, headers
from ptq.io.shards import ShardWriter, rename_shards
from ptq.numerics.leaves import compressed, dense, nbytes

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def written(directory: Path, tensors: dict[str, torch.Tensor], shard_size: int = 1 << 30) -> list[str]:
    writer = ShardWriter(directory, shard_size)
    entries = {name: writer.write(name, tensor) for name, tensor in tensors.items()}
    names = writer.close()
    rename_shards(directory, names, entries.items())
    return names if len(names) == 1 else [*names, INDEX]


@given(st.lists(st.tuples(SHAPES, st.sampled_from(list(DTYPES.values()))), min_size=1, max_size=8))
def test_what_the_library_writes_is_read(tmp_path: Path, kinds: list[tuple[Any, torch.dtype]]) -> None:
    tensors = {f"t{i}": filled(shape, dtype) for i, (shape, dtype) in enumerate(kinds)}
    save_file(tensors, tmp_path / WEIGHTS)
    found = headers(tmp_path)
    assert found.keys() == tensors.keys()
    for name, leaf in found.items():
        assert (leaf.shape, leaf.dtype) == (tensors[name].shape, tensors[name].dtype)
        assert same_bits(dense(leaf), tensors[name])
        assert nbytes(leaf) == tensors[name].nbytes


@given(st.lists(st.tuples(SHAPES, st.sampled_from(list(DTYPES.values()))), min_size=1, max_size=8), st.integers(1, 99))
def test_the_library_reads_what_is_written(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[Any, torch.dtype]], shard_size: int
) -> None:
    directory = tmp_path_factory.mktemp("shards")
    tensors = {f"t{i}": filled(shape, dtype) for i, (shape, dtype) in enumerate(kinds)}
    files = written(directory, tensors, shard_size)
    assert sorted(p.name for p in directory.iterdir()) == sorted(files)
    shards = {name: load_file(directory / name) for name in files if name.endswith(".safetensors")}
    for shard in shards.values():
        assert len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= shard_size
    merged = {name: t for shard in shards.values() for name, t in shard.items()}
    assert merged.keys() == tensors.keys()
    assert all(same_bits(merged[name], t) for name, t in tensors.items())
    assert all(same_bits(dense(leaf), tensors[name]) for name, leaf in headers(directory).items())
    if len(shards) > 1:
        index = json.loads((directory / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        assert all(name in shards[file] for name, file in index["weight_map"].items())


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(4, 6).mT, torch.randn(1, 2).mT[:1], torch.randn(8)[::2][:1], torch.randn(3, 1).expand(3, 5)],
    ids=["transposed", "one of a column", "one of a stride", "expanded"],
)
def test_any_strides_are_written(tmp_path: Path, tensor: torch.Tensor) -> None:
    written(tmp_path, {"t": tensor})
    assert same_bits(load_file(tmp_path / WEIGHTS)["t"], tensor)


def test_the_file_says_that_it_is_for_torch(tmp_path: Path) -> None:
    written(tmp_path, {"t": torch.ones(1)})
    with safe_open(tmp_path / WEIGHTS, "pt") as handle:
        assert handle.metadata() == {"format": "pt"}


def test_a_full_header_begins_a_new_shard(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.{'x' * 200}.weight": torch.tensor([float(i)]) for i in range(1000)}
    files = written(tmp_path, tensors)
    assert len(files) > 2
    assert {n: float(dense(leaf)) for n, leaf in headers(tmp_path).items()} == {n: float(t) for n, t in tensors.items()}


def test_reading_waits_until_a_leaf_is_used(tmp_path: Path) -> None:
    save_file({"t": torch.ones(2)}, tmp_path / WEIGHTS)
    leaf = headers(tmp_path)["t"]
    assert not compressed(leaf)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError):
        dense(leaf)


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path: Path) -> None:
    file = tmp_path / WEIGHTS
    save_file({"t": torch.ones(8)}, file)
    leaf = headers(tmp_path)["t"]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(BadInput, match=r"model\.safetensors: t: file ends after 28 of 32 bytes"):
        leaf.load()


def cut(raw: bytes) -> bytes:
    return raw[:-1]


def header_of(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def damage(raw: bytes) -> bytes:
        length = int.from_bytes(raw[:8], "little")
        table = json.loads(raw[8 : 8 + length])
        text = json.dumps(change(table) or table).encode()
        return len(text).to_bytes(8, "little") + text + raw[8 + length :]

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"truncated: t ends at byte \d+ of \d+"),
        (lambda raw: raw[:5], "truncated or no safetensors file"),
        (lambda raw: b"", "truncated or no safetensors file"),
        (lambda raw: b"\xff" * 100, "truncated or no safetensors file"),
        (lambda raw: raw[:8] + b"\xff" + raw[9:], "corrupt header"),
        (header_of(lambda t: t["t"].pop("shape")), "corrupt header"),
        (header_of(lambda t: [1]), "corrupt header"),
        (header_of(lambda t: t["t"].update(dtype="F4")), "t: dtype F4 is not read"),
        (header_of(lambda t: t["t"].update(shape=[5])), r"t: 32 bytes for \(5,\) of torch.float32"),
    ],
    ids=["cut", "stub", "empty", "noise", "not json", "no shape", "no table", "dtype", "size"],
)
def test_damage_is_one_line_that_names_the_file(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    file = tmp_path / WEIGHTS
    save_file({"t": torch.ones(8)}, file)
    headers(file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BadInput, match=message) as caught:
        headers(tmp_path)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def sharded(directory: Path) -> Path:
    written(directory, {name: torch.ones(4) for name in "abc"}, shard_size=16)
    return directory


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadInput, match=r"shard model-00002-of-00003\.safetensors is missing"):
        headers(tmp_path)


def test_a_tensor_that_the_index_misplaces_is_named(tmp_path: Path) -> None:
    index = sharded(tmp_path) / INDEX
    table = json.loads(index.read_text())
    table["weight_map"]["d"] = table["weight_map"]["a"]
    index.write_text(json.dumps(table))
    with pytest.raises(BadInput, match="no tensor d"):
        headers(tmp_path)


@pytest.mark.parametrize("wrong", [None, "model-00002-of-00003.safetensors"])
def test_a_tensor_that_the_index_does_not_list_is_named(tmp_path: Path, wrong: str | None) -> None:
    index = sharded(tmp_path) / INDEX
    table = json.loads(index.read_text())
    name = "b" if wrong is None else "c"
    home = table["weight_map"].pop(name)
    (index.parent / home).replace(index.parent / "aside")
    extra = {"x": torch.ones(1), "a": torch.ones(4)} if wrong is None else {"x": torch.ones(1)}
    save_file({name: torch.ones(4), **extra}, index.parent / home)
    table["weight_map"][name] = home
    index.write_text(json.dumps(table))
    with pytest.raises(BadInput, match=rf"{home}: [ax]: .* has it in (no shard|model-00001-of-00003)"):
        headers(tmp_path)


@pytest.mark.parametrize("path", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_a_path_that_leads_elsewhere_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "model").mkdir()
    index = sharded(tmp_path / "model") / INDEX
    save_file({"a": torch.ones(4)}, tmp_path / "x.safetensors")
    table = json.loads(index.read_text())
    table["weight_map"]["a"] = path
    index.write_text(json.dumps(table))
    with pytest.raises(BadInput, match=rf"index\.json: a: got '{path}', expected the name of a file beside it"):
        headers(tmp_path / "model")


@pytest.mark.parametrize(
    ("second", "size", "message"),
    [
        ([0, 16], 16, "overlaps the tensor before it"),
        ([12, 28], 28, "overlaps the tensor before it"),
        ([20, 36], 36, "leaves bytes unused before it"),
        ([16, 32], 40, "bytes, expected .* by its header"),
    ],
)
def test_bytes_have_one_meaning(tmp_path: Path, second: list[int], size: int, message: str) -> None:
    offsets = {"a": [0, 16], "b": second}
    table = {name: {"dtype": "F32", "shape": [4], "data_offsets": range_} for name, range_ in offsets.items()}
    raw = json.dumps(table).encode()
    (tmp_path / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(size))
    with pytest.raises(BadInput, match=message):
        headers(tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"weight_map": {}}', '{"weight_map": 3}', "{", "\x00"])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (sharded(tmp_path) / INDEX).write_text(text)
    with pytest.raises(BadInput, match=r"model\.safetensors\.index\.json"):
        headers(tmp_path)


def test_two_checkpoints_in_one_directory_are_refused(tmp_path: Path) -> None:
    """transformers takes the single file first, others the index; an index may name the single file, too."""
    directory = sharded(tmp_path)
    save_file({"a": torch.ones(2)}, directory / WEIGHTS)
    with pytest.raises(BadInput, match=r"has model\.safetensors, and model\.safetensors\.index\.json that names other"):
        headers(directory)
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": WEIGHTS}}))
    assert headers(directory).keys() == {"a"}


@pytest.mark.parametrize("told", [5, [1], {"a": {"b": 1}}, {"a": 1}])
def test_metadata_that_safetensors_does_not_take(told: Any, tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": told, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(BadInput, match=r"model\.safetensors: corrupt header"):
        headers(tmp_path)


def test_no_weights_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no model\.safetensors and no model\.safetensors\.index\.json$"):
        headers(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(BadInput, match=r"it has pytorch_model\.bin, which must be converted"):
        headers(tmp_path)


def test_json_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        read_json(tmp_path / "config.json")


def test_a_leaf_is_a_value(tmp_path: Path) -> None:
    save_file({"t": torch.ones(2)}, tmp_path / WEIGHTS)
    first, second = (headers(tmp_path)["t"] for _ in range(2))
    assert isinstance(first, OnDisk)
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [-16, 0]},
        {"data_offsets": [16, 0]},
        {"data_offsets": [0.0, 16.0]},
        {"shape": [-2, -2]},
        {"shape": [1 << 40, 1 << 40]},
        {"shape": [1 << 80]},
    ],
    ids=str,
)
def test_ranges_that_are_none_are_refused_by_name(entry: dict[str, Any], tmp_path: Path) -> None:
    table = {"t": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **entry}}
    raw = json.dumps(table).encode()
    (tmp_path / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    with pytest.raises(BadInput, match=r"model\.safetensors: t: .*download or copy it again"):
        headers(tmp_path)


def test_an_index_that_names_no_file_is_refused(tmp_path: Path) -> None:
    save_file({"t": torch.ones(1)}, tmp_path / WEIGHTS)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"t": [WEIGHTS]}}))
    with pytest.raises(BadInput, match=r"index\.json: t: got .*, expected the name of a file beside it"):
        headers(tmp_path)


def test_json_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(BadInput, match="not a JSON file"):
        read_json(tmp_path / "config.json")


@given(st.data(), st.integers(1, 400))
def test_a_writer_goes_on_after_another(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shard_size: int
) -> None:
    """The same bytes as one writer's, whatever was written after the last entry that is known."""
    tensors = {f"t{i}": filled((data.draw(st.integers(0, 30)),), torch.int16) for i in range(6)}
    cut = data.draw(st.integers(0, 6))
    whole, torn = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("torn")
    written(whole, tensors, shard_size)
    first = ShardWriter(torn, shard_size)
    entries = [(name, first.write(name, tensor)) for name, tensor in tensors.items()]
    first.close()
    second = ShardWriter(torn, shard_size, entries[:cut])
    entries[cut:] = [(name, second.write(name, tensors[name])) for name, _ in entries[cut:]]
    names = second.close()
    for _ in range(2):  # and once more, as after an interruption
        rename_shards(torn, names, entries)
    assert {p.name: p.read_bytes() for p in torn.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("left", ["none", "nothing", "all but a byte"])
def test_a_shard_that_lost_its_end_is_refused(shard: int, left: str, tmp_path: Path) -> None:
    """At once, whichever it is; found when it is read, hours of work would have gone before."""
    writer = ShardWriter(tmp_path, shard_size=2000)
    entries = [(name, writer.write(name, torch.ones(500))) for name in "ab"]
    writer.close()
    file = tmp_path / f"shard-{shard}.partial"
    held = file.read_bytes()
    file.unlink()
    if left != "none":
        file.write_bytes(held[:-1] if left == "all but a byte" else b"")
    with pytest.raises(BadInput, match=rf"shard-{shard}\.partial: holds \d+ bytes, where its journal says {len(held)}"):
        ShardWriter(tmp_path, written=entries)
