"""The function mode: every way a model reads a weight, and the refusal of what is not understood."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ptq.errors import Refused
from ptq.models.interpret import Interpreter, Use, handle

WEIGHT = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
TURNED = WEIGHT.T.contiguous()
X = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(2))
STACK = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(3))

# name -> (stored weight, operation, kind, transposed, the input as rows of features)
READS: dict[str, tuple[Tensor, Callable[[Tensor], Tensor], str, bool, Tensor]] = {
    "linear": (WEIGHT, lambda w: F.linear(X, w), "linear", False, X),
    "linear by keyword": (WEIGHT, lambda w: F.linear(input=X, weight=w), "linear", False, X),
    "linear of a cast": (WEIGHT, lambda w: F.linear(X.double(), w.to(torch.float64)), "linear", False, X.double()),
    "addmm, stored (in, out)": (TURNED, lambda w: torch.addmm(torch.ones(3), X[0], w), "linear", True, X[0]),
    "matmul with .T": (WEIGHT, lambda w: X @ w.T, "linear", False, X),
    "matmul with transpose": (WEIGHT, lambda w: torch.matmul(X, w.transpose(0, 1)), "linear", False, X),
    "matmul, stored (in, out)": (TURNED, lambda w: X @ w, "linear", True, X),
    "weight on the left": (WEIGHT, lambda w: w @ X[0].T, "linear", False, X[0]),
    "two transposes": (WEIGHT, lambda w: F.linear(X, w.t().mT), "linear", False, X),
    "view and back": (WEIGHT, lambda w: F.linear(X, w.view(1, 3, 4).squeeze(0)), "linear", False, X),
    "an expert of a stack": (STACK, lambda w: F.linear(X, w[1]), "linear", False, X),
    "bmm of a stack": (STACK, lambda w: torch.bmm(X, w.transpose(1, 2)), "linear", False, X),
}  # fmt: skip


@pytest.mark.parametrize("case", READS)
def test_every_read_gives_the_value_the_input_and_the_orientation(case: str) -> None:
    weight, operation, kind, transposed, rows = READS[case]
    uses: list[Use] = []

    def read(use: Use) -> Tensor:
        uses.append(use)
        return weight

    h = handle(weight.shape, weight.dtype)
    with Interpreter({"w": h}, read, frozenset({"w"})):
        out = operation(h)
    assert torch.equal(out, operation(weight))
    (use,) = uses
    assert (use.name, use.kind, use.transposed) == ("w", kind, transposed)
    assert use.x is not None
    assert torch.equal(use.x, rows)


def test_the_input_is_the_models_own_tensor() -> None:
    uses: list[Use] = []
    h = {n: handle((3, 4), torch.float32) for n in "ab"}
    with Interpreter(h, lambda use: (uses.append(use), WEIGHT)[1]):
        F.linear(X, h["a"])
        F.linear(X, h["b"])
    assert uses[0].x is uses[1].x is X


def test_tables_and_convolutions_are_told_apart() -> None:
    kinds: list[str] = []
    table, kernel = torch.randn(7, 4), torch.randn(2, 4, 3)
    values = {"table": table, "kernel": kernel}
    h = {name: handle(value.shape, value.dtype) for name, value in values.items()}

    def read(use: Use) -> Tensor:
        kinds.append(use.kind)
        return values[use.name]

    ids = torch.tensor([[1, 6]])
    with Interpreter(h, read, frozenset(values)):
        assert torch.equal(F.embedding(ids, h["table"]), table[ids])
        assert torch.equal(F.conv1d(X.mT, h["kernel"]), F.conv1d(X.mT, kernel))
    assert kinds == ["table", "conv"]


# What is not understood. `w * 2` is the trap: Python swallows a TypeError and reports unsupported operands.
STRANGE: dict[str, Callable[[Tensor], object]] = {
    "w * 2": lambda w: w * 2,
    "2 * w": lambda w: 2 * w,
    "exp": torch.exp,
    "add_": lambda w: w.add_(1),
    "cat": lambda w: torch.cat([w, w]),
    "comparison": lambda w: w > 0,
    "out=": lambda w: torch.add(WEIGHT, w, out=torch.empty(3, 4)),
    "item": lambda w: w[0, 0].item(),
    "layer_norm": lambda w: F.layer_norm(X, (4,), weight=w[0]),
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_compressed_weight_is_refused_by_name(case: str) -> None:
    h = handle((3, 4), torch.float32)
    with Interpreter({"a.b.weight": h}, lambda _: WEIGHT, frozenset({"a.b.weight"})), pytest.raises(Refused) as error:
        STRANGE[case](h)
    assert "a.b.weight" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_weight_may_be_added_to_what_is_no_weight() -> None:
    h = handle((3, 4), torch.float32)
    with Interpreter({"w": h}, lambda _: WEIGHT):
        assert torch.equal(torch.ones(3, 4).add_(h), WEIGHT + 1)


@pytest.mark.parametrize("case", [name for name in STRANGE if name != "add_"])
def test_an_uncompressed_weight_is_served_to_any_operation(case: str) -> None:
    h = handle((3, 4), torch.float32)
    with Interpreter({"w": h}, lambda _: WEIGHT):
        got = STRANGE[case](h)
    want = STRANGE[case](WEIGHT)
    assert torch.equal(got, want) if isinstance(want, Tensor) else got == want


def test_outside_the_mode_a_handle_is_nan_and_costs_one_element() -> None:
    h = handle((3, 4), torch.float32)
    assert h.untyped_storage().nbytes() == 4
    assert F.linear(X, h).isnan().all()


def test_shape_and_dtype_of_a_handle_are_the_weights() -> None:
    h = handle((3, 4), torch.bfloat16)
    with Interpreter({"w": h}, lambda _: pytest.fail("no value is needed")):
        assert (h.shape, h.dtype, h.ndim, h.numel(), h.mT.shape) == ((3, 4), torch.bfloat16, 2, 12, (4, 3))
        assert h.to(torch.float32).dtype == torch.float32
        assert h.to(device="cpu", dtype=torch.float64).dtype == torch.float64
