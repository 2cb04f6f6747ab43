"""Small members and comparisons that the laws of all kinds use."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from ptq._tree import NAMESPACE, tensors
from ptq.numerics.fits import fit, nearest
from ptq.numerics.grids import Float8, Int, Minifloat, PowersOfTwo
from ptq.numerics.indexed import Indexed
from ptq.numerics.leaves import Leaf, Sparse, Transposed
from ptq.numerics.patterns import NM
from ptq.numerics.schemes import Scheme
from ptq.numerics.stats import Statistic
from strategies import randn

W4 = Scheme(Int(4), "group", 8)
W3_ASYM = Scheme(Int(3), "channel", symmetric=False)
FP8 = Scheme(Float8(), "channel")
FP8_BLOCK = Scheme(Float8(), "block", block=(4, 6))
NVFP4 = Scheme(Minifloat(1), "group", 8, scales=Float8())
MXFP6 = Scheme(Minifloat(3), "group", 8, scales=PowersOfTwo())
OUT, IN = 6, 16


def leaf(kind: str, *experts: int) -> Leaf:
    """A leaf of each kind, `[*experts, OUT, IN]`."""
    w = randn(3, *experts, OUT, IN, dtype=torch.bfloat16)
    mask = NM(keep=2, of=4).mask(w.abs())
    four = nearest(w, W4, fit(w, W4))
    return {
        "tensor": w,
        "int4": four,
        "int3 asymmetric": nearest(w, W3_ASYM, fit(w, W3_ASYM)),
        "fp8": nearest(w, FP8, fit(w, FP8)),
        "fp8 block": nearest(w, FP8_BLOCK, fit(w, FP8_BLOCK)),
        "nvfp4": nearest(w, NVFP4, fit(w, NVFP4)),
        "mxfp6": nearest(w, MXFP6, fit(w, MXFP6)),
        "sparse": Sparse(w.masked_fill(~mask, 0), mask, NM(keep=2, of=4)),
        "sparse int4": Sparse(four, mask, None),
        "transposed int4": Transposed(four),
        "transposed": Transposed(w),
        "indexed": Indexed(four, (torch.arange(IN) * 5 % (IN // 8)).expand(*experts, IN).clone()),
    }[kind]


def bits(t: Tensor) -> Tensor:
    return t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def identical(a: Any, b: Any) -> bool:
    """The same structure with bit-equal tensors."""
    (x, s), (y, t) = (optree.tree_flatten(tree, namespace=NAMESPACE) for tree in (a, b))
    return s == t and all(p.dtype == q.dtype and torch.equal(bits(p), bits(q)) for p, q in zip(x, y, strict=True))


class untouched:  # noqa: N801  # a context manager, used like a function
    """Checks that the tensors of a tree are bit-equal with the same version after a block."""

    def __init__(self, tree: Any) -> None:
        self.tensors = tensors(tree)
        self.before = [(t.clone(), t._version) for t in self.tensors]

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None:
        for t, (copy, version) in zip(self.tensors, self.before, strict=True):
            assert t._version == version
            assert torch.equal(bits(t), bits(copy))


def close(a: Statistic, b: Statistic, tolerance: float = 1e-12) -> None:
    """Equal up to rounding: exact means 1e-12 of the largest entry in float64, 1e-6 in float32."""
    for p, q in zip(tensors(a), tensors(b), strict=True):
        finite = q.isfinite()
        size = q[finite].abs().max() if finite.any() else torch.tensor(1.0)
        assert torch.equal(p.isfinite(), finite)
        assert torch.equal(p[~finite], q[~finite])
        assert torch.allclose(p[finite], q[finite], rtol=0, atol=tolerance * max(1e-30, float(size)))
