"""Records: what was written is what is read back of it, whatever the tensors are called."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from checkpoints import quantized
from ptq.io.records import record
from ptq.io.shards import SHARD_SIZE
from ptq.io.writer import Writer
from ptq.models.skeleton import from_module
from ptq.numerics.leaves import dense, nbytes


class Named(nn.Module):
    """Parameters with the names that formats give to parts of weights."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("shape", "bitmask", "compressed", "weight_shape", "weight_scale"):
            self.register_parameter(name, nn.Parameter(torch.randn(3, 4)))
        self.weight = nn.Parameter(torch.randn(2))


def test_names_of_parts_are_names_like_others(tmp_path: Path) -> None:
    model = from_module(nn.Sequential(Named(), nn.Linear(16, 4)))
    leaf = quantized(4, 16)
    writer = Writer(model, tmp_path, "auto", SHARD_SIZE)
    writer.add({**model.params, "1.weight": leaf})
    writer.sync()
    assert writer.sparsity == {}
    for r in (record(json.loads(json.dumps(r))) for r in writer.records):
        expected = leaf if r.name == "1.weight" else model.params[r.name]
        assert torch.equal(dense(r.leaf(tmp_path)), dense(expected))
        assert r.nbytes == nbytes(expected)
    writer.abort()
