"""Damaged checkpoints: each loads with only those values changed whose bytes were, or ends in one clear line."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ptq
from conftest import llama_config, stock
from ptq.errors import BadInput
from ptq.io.safetensors import OnDisk, headers
from ptq.numerics.leaves import dense
from ptq.numerics.schemes import Scheme, scheme

KINDS: dict[str, Scheme] = {
    "packed": scheme("W4A16", 16),
    "packed with zero points": scheme("W3A16_ASYM", 16),
    "float8 blocks": scheme("FP8A16", block=(24, 16)),
    "nvfp4": scheme("NVFP4A16"),
    "mxfp8": scheme("MXFP8A16"),
}


class Whole(NamedTuple):
    """An undamaged checkpoint."""

    path: Path
    values: dict[str, Tensor]
    entries: dict[str, OnDisk]


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    path = tmp_path_factory.mktemp("whole") / "out"
    source = stock(llama_config(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=32))
    ptq.save(ptq.compress(source.to(torch.bfloat16), None, ptq.rtn(KINDS[request.param])), path)
    values = {name: dense(leaf) for name, leaf in ptq.load(path).params.items()}
    return Whole(path, values, headers(path))


def flipped(rng: random.Random, data: bytes) -> tuple[bytes, list[int]]:
    """One to three bytes changed, each in some of its bits; and where."""
    made, places = bytearray(data), sorted({rng.randrange(len(data)) for _ in range(rng.randint(1, 3))})
    for place in places:
        made[place] ^= rng.randrange(1, 256)
    return bytes(made), places


def touched(entries: dict[str, OnDisk], place: int) -> tuple[str, int] | None:
    """The tensor that a byte of the file belongs to, and the byte's place in it; None: the header."""
    for name, entry in entries.items():
        if 0 <= place - entry.offset < entry.shape.numel() * entry.dtype.itemsize:
            return name, place - entry.offset
    return None


def reach(entry: OnDisk, byte: int, weight: Tensor) -> Tensor:
    """The elements of a weight that a byte of one of its tensors may have a say in."""
    part, mask = entry.name.rpartition(".")[2], torch.zeros(weight.shape, dtype=torch.bool)
    if part == "weight_global_scale" or weight.ndim < 2:
        return ~mask
    rows, columns = weight.shape
    if part == "weight_zero_point":  # a stream down the outputs: some outputs of one group
        group = byte // 4 % entry.shape[1]
        return mask.index_fill(
            1, torch.arange(columns)[torch.arange(columns) * entry.shape[1] // columns == group], True
        )
    a, b = entry.shape
    item = byte // entry.dtype.itemsize
    high, wide = -(-rows // a), -(-columns // b)
    if part == "weight_scale":
        high, wide = (24, 16) if (a, b) == (-(-rows // 24), -(-columns // 16)) and a < rows else (high, wide)
        mask[item // b * high : (item // b + 1) * high, item % b * wide : (item % b + 1) * wide] = True
        return mask
    bits = 8 * byte % (8 * entry.dtype.itemsize * b)  # in the row
    each = 8 * entry.dtype.itemsize * b / columns
    mask[item // b, max(int(bits / each) - 1, 0) : int((bits + 8) / each) + 1] = True
    return mask


def compare(whole: Whole, places: list[int], loaded: dict[str, Tensor]) -> None:
    allowed = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in whole.values.items()}
    for place in places:
        found = touched(whole.entries, place)
        if found is not None:
            name, byte = found
            owner, _, part = name.rpartition(".")
            weight = f"{owner}.weight" if part.startswith("weight") else name
            allowed[weight] |= reach(whole.entries[name], byte, whole.values[weight])
    assert loaded.keys() == whole.values.keys()
    for name, value in whole.values.items():
        same = (loaded[name] == value) | (loaded[name].isnan() & value.isnan())
        assert (same | allowed[name]).all(), (name, places)


def test_a_change_elsewhere_would_be_noticed(whole: Whole) -> None:
    name = next(n for n in whole.values if n.endswith("q_proj.weight"))
    changed = {**whole.values, name: whole.values[name].clone()}
    changed[name][0, 0] += 1
    with pytest.raises(AssertionError, match="q_proj"):
        compare(whole, [], changed)


def attempt(path: Path) -> dict[str, Tensor] | None:
    """All weights, or None where loading ended in one clear line that says where: the file, or the tensor."""
    try:
        return {name: dense(leaf) for name, leaf in ptq.load(path).params.items()}
    except BadInput as error:
        line = str(error)
    assert str(path) in line or ".weight" in line, line
    assert "\n" not in line
    return None


@pytest.fixture
def trials(whole: Whole, tmp_path: Path) -> Callable[[int, int], Iterator[tuple[Path, random.Random]]]:
    """Copies of the checkpoint, each with a generator of its own."""
    copy = tmp_path / "copy"
    shutil.copytree(whole.path, copy)

    def made(seed: int, count: int) -> Iterator[tuple[Path, random.Random]]:
        for trial in range(count):
            yield copy, random.Random(f"{seed} {trial}")  # noqa: S311  # no secret

    return made


def weights_are_damaged(whole: Whole, trials: Any, seed: int, count: int) -> int:
    """How many of the damaged files loaded."""
    loaded, file = 0, whole.path / "model.safetensors"
    data = file.read_bytes()
    start = min(entry.offset for entry in whole.entries.values())
    room = data.rfind(b"}", 0, start) + 1  # behind the header there are only spaces
    for copy, rng in trials(seed, count):
        if rng.random() < 0.1:
            (copy / file.name).write_bytes(data[: rng.randrange(len(data))])
            assert attempt(copy) is None
            continue
        body = rng.random() < 0.7
        part, places = flipped(rng, data[start:] if body else data[:room])
        (copy / file.name).write_bytes(data[:start] + part if body else part + data[room:])
        found = attempt(copy)
        if found is not None:
            loaded += 1
            compare(whole, [place + start for place in places] if body else [], found)
    return loaded


def configs_are_damaged(whole: Whole, trials: Any, seed: int, count: int) -> None:
    data = (whole.path / "config.json").read_bytes()
    for copy, rng in trials(seed, count):
        how = rng.random()
        cut = data[: rng.randrange(len(data))]
        made = flipped(rng, data)[0] if how < 0.4 else cut if how < 0.5 else retold(rng, data)
        (copy / "config.json").write_bytes(made)
        found = attempt(copy)
        if found is not None:
            changed = list(differences(json.loads(data), json.loads(made)))
            assert found.keys() <= whole.values.keys()
            assert found.keys() == whole.values.keys() or any("num_hidden_layers" in path for path in changed)
            apart = {name for name, value in found.items() if not torch.equal(value, whole.values[name])}
            # Blocks of 25 rows may have as many scales as blocks of 24, and only the config tells them apart.
            assert not apart or any("block_structure" in path for path in changed), (apart, changed)


def retold(rng: random.Random, data: bytes) -> bytes:
    """One value of a config, at any depth, left out or another."""
    table = json.loads(data)
    places = [(table, key) for key in table]
    for owner, key in places:  # grows
        places += [(owner[key], inner) for inner in owner[key]] if isinstance(owner[key], dict) else []
    owner, key = rng.choice([place for place in places if place[0] is not table or rng.random() < 0.3])
    value = owner.pop(key)
    if rng.random() < 0.7:
        owner[key] = rng.choice([None, not value, 0, 1, 2, 4, 5, 8, 16, 24, 32, "group", "channel", "int", "x", [], {}])
    return json.dumps(table).encode()


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Where two tables differ: paths of values, and of keys that only one of them has."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from differences(a.get(key), b.get(key), f"{path}/{key}")
    elif a != b:
        yield path


def test_damaged_weights(whole: Whole, trials: Any) -> None:
    assert 5 < weights_are_damaged(whole, trials, 0, 40) < 40


def test_damaged_configs(whole: Whole, trials: Any) -> None:
    configs_are_damaged(whole, trials, 1, 10)


@pytest.mark.slow
def test_damaged_weights_many_times(whole: Whole, trials: Any) -> None:
    assert 100 < weights_are_damaged(whole, trials, 2, 400) < 400


@pytest.mark.slow
def test_damaged_configs_many_times(whole: Whole, trials: Any) -> None:
    configs_are_damaged(whole, trials, 3, 100)
