"""One forward on weights that are not there: which weights a model reads, in what order, and what they share."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ptq.base import Link, Params, Sites
from ptq.errors import BadInput, PtqError
from ptq.models.call import functional, named, stand_ins
from ptq.models.flow import Flow
from ptq.models.interpret import Interpreter, Use
from ptq.models.model import Model
from ptq.models.skeleton import buffers, set_buffers
from ptq.models.zeros import Zeros


class Segment(NamedTuple):
    """A block of the plan: a member of a repeated block list, or what is read between two of them."""

    name: str
    params: tuple[str, ...]
    module: str | None
    """the path of the block's module, empty for the root; None for what lies between blocks"""


class Trace(NamedTuple):
    """What a probe saw."""

    sites: Sites
    """first reader -> all weights that read the same tensor, in the order of the first reads"""
    transposed: frozenset[str]
    """weights stored as (in, out)"""
    reads: dict[str, int]
    """how often each parameter was read in the one forward"""
    kinds: dict[str, str]
    """parameter -> how it was read first: linear, table, conv, experts, other"""
    norms: dict[str, str]
    """site -> the norm whose output it is, for sites that read a norm's"""
    choosing: frozenset[str]
    """linears whose numbers become an index: routers"""
    segments: tuple[Segment, ...]


def probe(model: Model, *args: Any, **kwargs: Any) -> Trace:
    """Runs one small batch through the model with zeros for weights; reads no weight and costs next to no memory.

    It runs on the CPU, wherever the batch and the model's buffers are: this is little work, and no device is needed.

    Args:
        model: its leaves' shapes are all that is used of the parameters.
        *args: a batch of a few tokens; what it does not reach is not in the trace's sites.
        **kwargs: likewise.

    Raises:
        BadInput: the model's forward does not take this batch.

    >>> from ptq.models.skeleton import from_module
    >>> model = from_module(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> probe(model, torch.ones(1, 2)).sites
    {'0.weight': ('0.weight',), '2.weight': ('2.weight',)}
    """
    module = copy.deepcopy(model.module)
    set_buffers(module, {name: b.cpu() for name, b in buffers(module).items()})
    args, kwargs = pytree.tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
    flow = Flow((args, kwargs))
    watch = _Watch(model.params, module, flow)
    handles = stand_ins(model.params, device="cpu")
    with torch.no_grad(), Interpreter(handles, watch, after=flow), _taking(module, args, kwargs):
        functional(module, named(handles, model.aliases), args, kwargs)
    return Trace(
        sites={weights[0]: tuple(weights) for _, weights in watch.inputs.values()},
        transposed=frozenset(watch.transposed),
        reads=dict(watch.reads),
        kinds=watch.kinds,
        norms=dict(watch.norms()),
        choosing=frozenset(flow.choosing),
        segments=tuple(_segments(model, watch.events)),
    )


def blocks(module: nn.Module) -> list[str]:
    """Paths of the members of the outermost module lists whose members all hold parameters and have children.

    A model without such a list is one block, its root, whose path is empty.
    """

    def walk(prefix: str, m: nn.Module) -> Iterator[str]:
        for name, child in m.named_children():
            path = f"{prefix}{name}"
            if isinstance(child, nn.ModuleList) and len(child) and all(_is_block(b) for b in child):
                yield from (f"{path}.{i}" for i in range(len(child)))
            else:
                yield from walk(f"{path}.", child)

    return list(walk("", module)) or [""]


def _is_block(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None and next(module.children(), None) is not None


@contextmanager
def _taking(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Generator[None]:
    """What a forward raises about a batch that it is not made for, such as a text alone for one that translates."""
    try:
        yield
    except (PtqError, MemoryError):
        raise
    except Exception as error:
        given = {**dict(enumerate(args)), **kwargs}
        shown = ", ".join(f"{key} {list(t.shape)}" for key, t in given.items() if isinstance(t, Tensor))
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise BadInput(f"{type(module).__name__} does not take a batch of {shown or sorted(kwargs)}: {said}") from error


class _Watch:
    """The probe's reader: writes down each use and serves zeros."""

    def __init__(self, params: Params, module: nn.Module, flow: Flow) -> None:
        self.params, self.flow = params, flow
        self.reads: Counter[str] = Counter()
        self.kinds: dict[str, str] = {}
        self.zeros = Zeros(leaf.shape.numel() * leaf.dtype.itemsize for leaf in params.values())
        self.transposed: set[str] = set()
        self.events: list[tuple[str, str]] = []  # ("enter", block) and ("read", parameter)
        self.inputs: dict[tuple[int, int], tuple[Tensor, list[str]]] = {}  # an input, kept alive, and its readers
        self.outputs: dict[tuple[int, int], tuple[Tensor, str]] = {}  # a norm's output, kept alive, and the norm
        for path in blocks(module):
            module.get_submodule(path).register_forward_pre_hook(self._enter(path))
        for path, child in module.named_modules():
            if _is_norm(child):
                child.register_forward_hook(self._leave(path))

    def __call__(self, use: Use) -> Tensor:
        name = use.name
        self.flow.read(use)
        if not self.reads[name]:
            self.events.append(("read", name))
            self.kinds[name] = use.kind
        self.reads[name] += 1
        if use.x is not None and self.reads[name] == 1:
            # One tensor object may hold different values in turn: residuals are added to in place.
            key = id(use.x), use.x._version  # noqa: SLF001  # torch's own count of writes
            self.inputs.setdefault(key, (use.x, []))[1].append(name)
            if use.transposed:
                self.transposed.add(name)
        return self.zeros(self.params[name].shape, self.params[name].dtype)

    def norms(self) -> Iterator[tuple[str, str]]:
        for x, weights in self.inputs.values():
            if _memory(x) in self.outputs:
                yield weights[0], self.outputs[_memory(x)][1]

    def _enter(self, path: str) -> Any:
        return lambda *_: self.events.append(("enter", path))

    def _leave(self, path: str) -> Any:
        return lambda _module, _args, out: self.outputs.update(
            {_memory(out): (out, path)} if isinstance(out, Tensor) else {}
        )


def _memory(x: Tensor) -> tuple[int, int]:
    """What a tensor and its reshaped views have in common (GPT-2 flattens before its weights)."""
    return x.untyped_storage().data_ptr(), x.numel()


def _is_norm(module: nn.Module) -> bool:
    own = list(module.parameters())
    return not list(module.children()) and bool(own) and all(p.ndim == 1 for p in own) and hasattr(module, "weight")


def links(model: Model, trace: Trace) -> tuple[Link, ...]:
    """Norms and the weights that read what they wrote, with what each norm adds to its weight."""
    found = ((path, trace.sites[site], _offset(model.module.get_submodule(path))) for site, path in trace.norms.items())
    return tuple(Link(f"{path}.weight", sinks, offset) for path, sinks, offset in found if offset is not None)


def _offset(norm: nn.Module) -> float | None:
    """The c of `(weight + c) * normalized(x)`, found by running the norm; None where it is no such function.

    With out(w) = (w + c) a, out(0) = c a and out(1) - out(0) = a, whatever the norm's class and epsilon.
    """
    own = dict(norm.named_parameters())
    features = own["weight"].shape[0]
    x = torch.linspace(-1, 2, features).square().add(0.5)[None]

    def out(w: float) -> Tensor:
        fixed = {n: torch.full(p.shape, w if n == "weight" else 0.0) for n, p in own.items()}
        return functional(norm, fixed, (x,), {})

    try:
        at0, at1, at2 = out(0.0), out(1.0), out(2.0)
    except (TypeError, RuntimeError):  # it takes more than one tensor (a gate), so it is no plain norm
        return None
    a = at1 - at0
    if not torch.allclose(at2 - at1, a, rtol=1e-3, atol=1e-5) or not bool(a.abs().max() > 0):
        return None
    return float((at0 / a)[a.abs() == a.abs().max()].round(decimals=3)[0])


def _segments(model: Model, events: Sequence[tuple[str, str]]) -> Iterator[Segment]:
    """Groups parameters by block, in the order met; what lies between blocks goes by where it was read first."""
    paths = list(dict.fromkeys(path for kind, path in events if kind == "enter"))
    owner: Mapping[str, str | None] = {
        name: next((p for p in paths if name.startswith(f"{p}." if p else "")), None) for name in model.params
    }
    pending: list[str] = []
    seen: set[str] = set()
    for kind, name in events:
        if kind == "read" and owner[name] is None:
            pending.append(name)
        if kind == "enter" and name not in seen:
            seen.add(name)
            yield from _between(pending)
            pending = []
            yield Segment(name or "model", tuple(n for n in model.params if owner[n] == name), name)
    read = {name for kind, name in events if kind == "read"}
    yield from _between(pending)
    yield from _between([n for n in model.params if owner[n] is None and n not in read])


def _between(params: list[str]) -> Iterator[Segment]:
    if params:
        yield Segment(params[0].rpartition(".")[0] or params[0], tuple(params), None)
