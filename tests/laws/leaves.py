"""Laws of leaves: one meaning, in whatever way it is taken apart."""

from __future__ import annotations

import optree
import torch
import torch.utils._pytree as torch_pytree

from laws.shared import IN, OUT, identical, leaf, untouched
from ptq._tree import NAMESPACE, tensors
from ptq.numerics.fits import quantize
from ptq.numerics.leaves import dense, linear, nbytes, take, validate
from strategies import randn

WEIGHTS = OUT * IN
INT4 = WEIGHTS // 2 + 2 * WEIGHTS // 8  # two codes a byte, and a 16-bit scale for each group of 8
BYTES = {
    "tensor": 2 * WEIGHTS,
    "int4": INT4,
    "int3 asymmetric": -(-3 * (WEIGHTS + OUT) // 8) + 2 * OUT,  # a zero point is as wide as a code
    "fp8": WEIGHTS + 2 * OUT,
    "fp8 block": WEIGHTS + 2 * 2 * 3,  # 4 x 6 blocks, the last ones cut off
    "nvfp4": WEIGHTS // 2 + WEIGHTS // 8 + 4,  # two codes a byte, a byte for each group of 8, the divisor
    "mxfp6": 6 * WEIGHTS // 8 + WEIGHTS // 8,
    "sparse": 2 * WEIGHTS,
    "sparse int4": INT4,
    "transposed int4": INT4,
    "transposed": 2 * WEIGHTS,
    "indexed": INT4 + 4 * IN,  # an index of 32 bits for each column
}


def is_a_node_for_both_registries(kind: str) -> None:
    x = leaf(kind)
    values, spec = torch_pytree.tree_flatten(x)
    assert identical(torch_pytree.tree_unflatten(values, spec), x)
    assert identical(optree.tree_map(lambda t: t, x, namespace=NAMESPACE), x)
    assert len(values) == len(tensors(x)) == len(optree.tree_paths(x, namespace=NAMESPACE))


def decodes_to_its_shape_and_dtype(kind: str) -> None:
    x = leaf(kind)
    assert dense(x).shape == x.shape
    assert dense(x).dtype == x.dtype
    assert x.device.type == "cpu"


def decodes_under_vmap(kind: str) -> None:
    x = leaf(kind, 3)
    assert torch.equal(torch.func.vmap(dense)(x), dense(x))


def take_is_the_decoded_slice(kind: str) -> None:
    x = leaf(kind, 3)
    for i in range(3):
        assert torch.equal(dense(take(x, i)), dense(x)[i])
        assert take(x, i).shape == x.shape[1:]


def multiplies_like_its_dense_form(kind: str) -> None:
    x = leaf(kind)
    rows = randn(1, 5, x.shape[-1], dtype=torch.bfloat16)
    assert torch.equal(linear(rows, x), rows @ dense(x).mT)


def costs_what_its_bits_cost(kind: str) -> None:
    assert nbytes(leaf(kind)) == BYTES[kind]


def decoding_changes_no_input(kind: str) -> None:
    x = leaf(kind, 3)
    with untouched(x):
        dense(x)
        take(x, 0)
        nbytes(x)
        linear(randn(1, 5, x.shape[-1], dtype=torch.bfloat16), take(x, 1))


def quantized_values_quantize_to_themselves(kind: str) -> None:
    x = validate(leaf(kind, 3), kind)
    assert identical(quantize(dense(x), x.scale, x.zero, x.grid, x.tile), x)
