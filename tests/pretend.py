"""A CUDA device that is not there: values lie on the CPU, `.device` says cuda, and mixing the two raises.

`FakeTensorMode` has the same rules but no values, so it stops at the first decision that depends on one. Here
everything runs, a whole compression with its files, and must give what the CPU gives, bit for bit.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

import optree
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ptq._tree import tensors, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
CROSSING = {aten.copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Memory:
    """What the device holds: each storage once, however many tensors share it."""

    def __init__(self) -> None:
        self.used = self.peak = 0
        self._shared: Counter[int] = Counter()

    def hold(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Counts a storage for as long as the tensor lives."""
        key, size = storage._cdata, storage.nbytes()
        self.used += 0 if self._shared[key] else size
        self.peak = max(self.peak, self.used)
        self._shared[key] += 1
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._shared[key] -= 1
        self.used -= 0 if self._shared[key] else size


MEMORY = Memory()


class OnCuda(Tensor):
    """A tensor whose values only operations can reach."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Self:
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        made = Tensor._make_wrapper_subclass(cls, values.shape, device=CUDA, **layout)
        made.values = values
        MEMORY.hold(made, values.untyped_storage())
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"OnCuda({self.values})"


class PretendCuda(TorchDispatchMode):
    """While it is active, `device="cuda"` may be asked for: by factories and by `to`."""

    def __init__(self) -> None:
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # torch looks for no driver then
        self._lifted: list[bool] = []

    def __enter__(self) -> Self:
        self._lifted.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) moves where a mode can see it
        _guard()
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        torch._C._set_only_lift_cpu_tensors(self._lifted.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def fake() -> FakeTensorMode:
    """Tensors without values, on any device; the model's real ones are taken for such."""
    _guard()
    return FakeTensorMode(allow_non_fake_inputs=True)


@cache
def _guard() -> None:
    """Gives a build for the CPU what one for CUDA has where there is no device: a guard that does nothing.

    Torch makes one, but only in the place of another that sees no device, such as the one of its lazy tensors.
    """
    if not torch.backends.cuda.is_built():
        c10 = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libc10.*"))))
        guards = (ctypes.c_void_p * 18).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
        guards[1] = guards[17]  # cuda, lazy
    torch._C._ensureCUDADeviceGuardSet()


class Watch(TorchDispatchMode):
    """Counts what leaves the device: tensors that are made on the CPU, and values that Python waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        results = optree.tree_leaves(made)
        strangers = [r for r in results if not isinstance(r, Tensor) or r.device.type == "cpu"]
        if any(isinstance(r, Tensor) for r in strangers):
            self.elsewhere[str(func)] += 1
        if any(t.device.type == "cuda" for t in _tensors(args)) and (strangers or _shaped_by_values(func, args)):
            self.waits[str(func)] += 1
        return made


@contextmanager
def everywhere(*modes: TorchDispatchMode) -> Iterator[None]:
    """Modes live in the thread that enters them: enters them here, and in each thread that starts meanwhile."""
    run = threading.Thread.run

    def within(thread: threading.Thread) -> None:
        with _entered(modes):
            run(thread)

    with pytest.MonkeyPatch.context() as patch, _entered(modes):
        patch.setattr(threading.Thread, "run", within)
        yield


@contextmanager
def alone() -> Iterator[None]:
    """Refuses work that makes a tensor on another device inside."""
    with Watch() as watch:
        yield
    assert not watch.elsewhere


def on_cuda(tree: Any) -> Any:
    return tree_map(lambda t: t.to("cuda"), tree)


def there(tree: Any) -> bool:
    """Whether all tensors of a tree are on the device."""
    return {t.device.type for t in tensors(tree)} == {"cuda"}


def _entered(modes: tuple[TorchDispatchMode, ...]) -> ExitStack:
    stack = ExitStack()
    for mode in modes:
        stack.enter_context(mode)
    return stack


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the values. Its results lie where it was asked to put them, else where its inputs lie."""
    given = _tensors((args, kwargs))
    _refuse_mixed(func, args, given)
    wanted = kwargs.get("device")
    moves = wanted.type == "cuda" if wanted else any(isinstance(t, OnCuda) for t in given)
    if wanted and moves:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    own = {id(_values(t)): t for t in given}
    args, kwargs = optree.tree_map(_values, (args, kwargs))
    made = func(*args, **kwargs)

    def placed(t: Any) -> Any:
        if id(t) in own:  # what was written into is returned as it was given
            return own[id(t)]
        return OnCuda(t) if moves and isinstance(t, Tensor) else t

    return optree.tree_map(placed, made)


def _refuse_mixed(func: Any, args: Any, given: list[Tensor]) -> None:
    """The rule of a real device: numbers, copies and the indices of `x[...]` may come from the CPU."""
    if func in INDEXED and isinstance(args[0], OnCuda):
        given = [args[0], *_tensors(args[2:])]
    written = args[0] if func._schema.is_mutable else None
    devices = {str(t.device): None for t in given if t.ndim or isinstance(t, OnCuda) or t is written}
    if len(devices) > 1 and func not in CROSSING:
        names = " and ".join(devices)
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two, {names} ({func})")


def _shaped_by_values(func: Any, args: Any) -> bool:
    """Whether the shape of the result is known only when the device is done."""
    masks = func is aten.index.Tensor and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    return masks or func in (aten.nonzero.default, aten.masked_select.default)


def _values(t: Any) -> Any:
    return t.values if isinstance(t, OnCuda) else t


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in optree.tree_leaves(tree) if isinstance(t, Tensor)]
