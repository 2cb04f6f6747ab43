"""Leaves between stages: exactly as they were."""

from __future__ import annotations

import errno
import resource
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

from checkpoints import quantized, same_bits
from ptq._tree import NAMESPACE, tensors
from ptq.errors import BadInput
from ptq.io.scratch import keep, kept
from ptq.numerics.grids import Float8, Int
from ptq.numerics.leaves import Quantized, Sparse, Transposed, compressed, dense, nbytes
from ptq.numerics.patterns import NM, Unstructured

MASK = torch.tensor([[True, False] * 8] * 4)
LEAVES: dict[str, Any] = {
    "tensor": torch.randn(4, 16).to(torch.bfloat16),
    "int4": quantized(4, 16),
    "asymmetric": quantized(4, 16, asymmetric=True, dtype=torch.bfloat16),
    "float8": quantized(4, 16, grid=Float8(), tiles="channel"),
    "sparse": Sparse(torch.randn(4, 16), MASK, NM(keep=1, of=2)),
    "sparse int8": Sparse(quantized(4, 16, grid=Int(8)), MASK, Unstructured(0.5)),
    "transposed": Transposed(quantized(4, 16)),
    "experts": quantized(3, 4, 16),
    "blocks": replace(quantized(4, 16, grid=Float8(), tiles="tensor"), scale=torch.ones(2, 2), tile=(3, 12)),
}


@pytest.mark.parametrize("what", LEAVES)
def test_comes_back(what: str, tmp_path: Path) -> None:
    leaf = LEAVES[what]
    keep({"a.weight": leaf}, tmp_path / "file")
    lazy: Any = kept(tmp_path / "file")["a.weight"]
    assert (lazy.shape, lazy.dtype) == (leaf.shape, leaf.dtype)
    assert (compressed(lazy), nbytes(lazy)) == (compressed(leaf), nbytes(leaf))
    back = lazy.load()
    assert optree.tree_structure(back, namespace=NAMESPACE) == optree.tree_structure(leaf, namespace=NAMESPACE)
    assert all(same_bits(a, b) for a, b in zip(tensors(back), tensors(leaf), strict=True))
    assert same_bits(dense(lazy), dense(leaf))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_all_of_a_block_in_one_file(tmp_path: Path) -> None:
    keep(LEAVES, tmp_path / "file")
    assert {name: same_bits(dense(leaf), dense(LEAVES[name])) for name, leaf in kept(tmp_path / "file").items()} == (
        dict.fromkeys(LEAVES, True)
    )


@dataclass(frozen=True)
class Odd:
    """A grid that a user defined."""

    levels: frozenset[int] = frozenset()


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    leaf = Quantized(torch.zeros(2, 2, dtype=torch.int8), torch.ones(1, 1), None, Odd(frozenset({1, 2})), torch.float32)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"a\.weight/grid/levels: a frozenset cannot be kept between stages"):
        keep({"a.weight": leaf}, tmp_path / "file")


def test_a_file_names_no_code_to_run(tmp_path: Path) -> None:
    keep({"a": quantized(4, 16)}, tmp_path / "file")
    lazy: Any = kept(tmp_path / "file")["a"]
    for kind in ("os:system", "antigravity:fly", "ptq.numerics.grids:torch"):
        lazy.structure["type"] = kind
        with pytest.raises(BadInput, match="is not known here"):
            lazy.load()


def test_a_full_disk_is_an_error_of_the_system_that_names_the_file(tmp_path: Path) -> None:
    """As far as a process can tell: its files may not grow beyond 4 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*stage\.partial") as caught:
            keep({"w": torch.ones(4096)}, tmp_path / "stage")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert not (tmp_path / "stage").exists()
