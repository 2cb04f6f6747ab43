"""The one place where operations are seen: a torch function mode in which handles stand in for weights.

Mechanism. A handle is a NaN-filled tensor of one element of memory, expanded to the weight's shape: right shape, dtype
and device. Operations that only rearrange or cast a handle are recorded and give a derived handle; operations that
consume a weight (`F.linear`, `addmm`, `matmul`, `F.embedding`, convolutions, ...) ask a `Reader` for the value, replay
the record on it, and run. So a model's own forward tells which weight meets which input, and weights are decoded one at
a time.

Failure. An operation that is not known here gets the value of a weight that is still uncompressed; a compressed weight
is refused by name, so that a wrong number cannot look right. What escapes the mode reads NaN, never stale numbers.

Limits. Python-level operations only: the inside of an `autograd.Function`, of scripted code or of a custom kernel is
invisible. The mode lives in the thread that enters it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ptq.errors import Refused

T: Any = torch.Tensor
VIEWS: set[Any] = {
    T.transpose, T.t, T.swapaxes, T.permute, T.view, T.reshape, T.unsqueeze, T.squeeze, T.flatten, T.unflatten,
    T.expand, T.narrow, T.select, T.__getitem__, T.to, T.float, T.bfloat16, T.half, T.type, T.type_as, T.contiguous,
    T.detach, T.T.__get__, T.mT.__get__, T.data.__get__,
    torch.transpose, torch.t, torch.permute, torch.reshape, torch.squeeze, torch.unsqueeze, torch.flatten,
}  # fmt: skip
META: set[Any] = {
    T.shape.__get__, T.dtype.__get__, T.device.__get__, T.ndim.__get__, T.layout.__get__, T.requires_grad.__get__,
    T.is_cuda.__get__, T.is_sparse.__get__, T.is_quantized.__get__, T.is_meta.__get__, T.grad_fn.__get__,
    T.is_leaf.__get__, T.size, T.dim, T.numel, T.nelement, T.element_size, T.is_floating_point, T.is_complex,
    T.is_contiguous, T.__len__, torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip


class Use(NamedTuple):
    """An operation that reads a weight."""

    name: str
    kind: Literal["linear", "table", "conv", "experts", "other"]
    x: Tensor | None = None
    """for a linear: what flows in, `[..., tokens, in]`, the very tensor of the model"""
    transposed: bool = False
    """for a linear: whether the parameter is stored (in, out)"""


class Reader(Protocol):
    """Serves weights; it may also observe what flows into them, or wait."""

    def __call__(self, use: Use) -> Tensor:
        """The value of `use.name` for this use, in the parameter's shape."""
        ...


After = Callable[[Any, Any, Any], None]
"""given a function, all its arguments and what it returned"""


class _Handle(NamedTuple):
    name: str
    replay: Callable[[Tensor], Tensor]
    transposed: bool
    keep: Tensor
    """the handle itself: its id is a key for as long as it lives"""


class _Operand(NamedTuple):
    """Where a consuming operation takes its weight and its input from."""

    kind: Literal["linear", "table", "conv", "experts", "other"]
    weight: int
    x: int
    transposed: bool = False


_grouped_mm: Any = getattr(torch, "_grouped_mm")  # noqa: B009  # what F.grouped_mm arrives as; it has no public name
_PRODUCT = (_Operand("linear", 1, 0, transposed=True), _Operand("linear", 0, 1))
_ADDED = (_Operand("linear", 2, 1, transposed=True), _Operand("linear", 1, 2))
_SITES: dict[Any, tuple[_Operand, ...]] = {
    F.linear: (_Operand("linear", 1, 0),),
    F.embedding: (_Operand("table", 1, 0),),
    torch.embedding: (_Operand("table", 0, 1),),
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, T.matmul, T.__matmul__, T.mm, T.bmm), _PRODUCT),
    T.__rmatmul__: (_Operand("linear", 0, 1, transposed=True), _Operand("linear", 1, 0)),
    **dict.fromkeys((torch.addmm, torch.baddbmm, T.addmm, T.baddbmm), _ADDED),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), (_Operand("conv", 1, 0),)),
    torch.einsum: (_Operand("other", 1, 2), _Operand("other", 2, 1)),
    _grouped_mm: (_Operand("experts", 1, 0),),
}
_NAMES = ("input", "weight", "bias")


def handle(shape: Iterable[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A stand-in for a weight: NaN everywhere, one element of memory."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(tuple(shape))


class Interpreter(TorchFunctionMode):
    """Runs operations; serves the weights that `handles` stand for through `read`.

    Args:
        handles: parameter name -> its handle, for as long as the interpreter lives.
        read: gives the value for a use; it may also observe the input, or wait.
        compressed: names that an unknown operation may not read; asked when it does.
        after: is shown every operation that ran.
    """

    def __init__(
        self,
        handles: Mapping[str, Tensor],
        read: Reader,
        compressed: Container[str] = frozenset(),
        after: After | None = None,
    ) -> None:
        super().__init__()
        self.read, self.after = read, after
        self.compressed = compressed
        self.known = {id(h): _Handle(name, lambda value: value, False, h) for name, h in handles.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in META:
            return func(*args, **kwargs)
        out = self._run(func, args, kwargs)
        if self.after is not None:
            self.after(func, (args, kwargs), out)
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = [self.known[id(a)] for a in flat((args, kwargs)) if id(a) in self.known]
        if not found:
            return func(*args, **kwargs)
        if func in VIEWS and id(args[0]) in self.known and len(found) == 1:
            return self._derived(found[0], func, args[1:], kwargs)
        if func in _SITES:
            args, kwargs = _positional(func, args, kwargs)
            for operand in _SITES[func]:
                if len(args) > operand.weight and id(args[operand.weight]) in self.known:
                    args = self._consume(operand, args)
        self._refuse(func, args, kwargs)
        return func(*self._values(args), **self._values(kwargs))

    def _refuse(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What is left in the arguments is read in a way that is not understood."""
        for h in (self.known[id(a)] for a in flat((args, kwargs)) if id(a) in self.known):
            if _writes(func) and args and args[0] is h.keep:
                raise Refused(f"{h.name}: {_called(func)} writes into this weight; a forward may only read its weights")
            if h.name in self.compressed:
                raise Refused(
                    f"{h.name}: {_called(func)} reads this compressed weight in a way that is not understood; leave "
                    "the weight out with `ignore`, or let the model call it through F.linear or matmul"
                )

    def _derived(self, h: _Handle, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Records a rearrangement or cast. A contiguous twin on meta tells the new shape, and whether it transposes."""
        twin = torch.empty(h.keep.shape, dtype=h.keep.dtype, device="meta")
        moved = twin.to(_dtype(rest, kwargs, twin.dtype)) if func is T.to else func(twin, *rest, **kwargs)
        swaps = moved.ndim >= 2 and moved.dtype == twin.dtype and moved.stride(-1) > moved.stride(-2)
        made = handle(moved.shape, moved.dtype, h.keep.device)
        replay = h.replay
        self.known[id(made)] = _Handle(
            h.name, lambda value: func(replay(value), *rest, **kwargs), h.transposed != swaps, made
        )
        return made

    def _consume(self, operand: _Operand, args: tuple[Any, ...]) -> tuple[Any, ...]:
        h = self.known[id(args[operand.weight])]
        x = args[operand.x] if operand.kind == "linear" else None
        if x is not None and operand.weight < operand.x and not operand.transposed:
            x = x.mT  # w @ x: the features of x run along its last but one dimension
        use = Use(h.name, operand.kind, x, operand.transposed != h.transposed)
        value = h.replay(self.read(use))
        return (*args[: operand.weight], value, *args[operand.weight + 1 :])

    def _values(self, tree: Any) -> Any:
        """The same arguments with values for the handles that are left in them."""
        if isinstance(tree, dict):
            return {k: self._values(v) for k, v in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._values(v) for v in tree) if type(tree) in (list, tuple) else tree
        h = self.known.get(id(tree))
        return tree if h is None else h.replay(self.read(Use(h.name, "other")))


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _dtype(rest: tuple[Any, ...], kwargs: dict[str, Any], own: torch.dtype) -> torch.dtype:
    """The dtype that `Tensor.to` is asked for; where it moves to is the value's business."""
    for wanted in (*rest, *kwargs.values()):
        if isinstance(wanted, (torch.dtype, Tensor)):
            return wanted if isinstance(wanted, torch.dtype) else wanted.dtype
    return own


def _positional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Moves `input=`, `weight=` and `bias=` to their places, so that operands are found by position."""
    rest = dict(kwargs)
    while func in (F.linear, F.embedding) and len(args) < len(_NAMES) and _NAMES[len(args)] in rest:
        args = (*args, rest.pop(_NAMES[len(args)]))
    return args, rest


def flat(tree: Any) -> Iterator[Any]:
    """Tensors anywhere in nested arguments."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from flat(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from flat(item)


def _called(func: Any) -> str:
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or repr(func)
