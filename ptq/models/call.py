"""Running a model on a state: plain `functional_call` where every leaf is a tensor, the interpreter otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ptq.base import Params, State, Stats
from ptq.models.interpret import Interpreter, Reader, Use, handle
from ptq.models.model import Model
from ptq.numerics.leaves import Leaf, compressed, dense
from ptq.numerics.stats import KINDS, Statistic


def call(model: Model, state: State, *args: Any, **kwargs: Any) -> Any:
    """Runs the model's own forward on `state`.

    Where every leaf is a tensor this is `torch.func.functional_call` and nothing else, so it compiles and
    differentiates like the stock model. Other leaves are decoded when an operation reads them, one at a time.

    Args:
        model: the function: its skeleton and its table of tied parameters.
        state: the parameters; `model.state` or another of the same names.
        *args: what the stock model takes.
        **kwargs: what the stock model takes.

    Returns:
        What the stock model returns.

    Raises:
        Refused: an operation that is not understood reads a compressed weight, or one writes into a weight.

    >>> from torch import nn
    >>> from ptq.models.skeleton import from_module
    >>> model = from_module(nn.Linear(2, 1, bias=False))
    >>> call(model, State({"weight": torch.tensor([[1.0, 2.0]])}), torch.tensor([[3.0, 4.0]]))
    tensor([[11.]])
    """
    params = state.params
    if all(isinstance(leaf, Tensor) for leaf in params.values()):
        module = model.module if torch.compiler.is_compiling() else copy.deepcopy(model.module)
        return functional(module, named(params, model.aliases), args, kwargs)
    return interpreted(model, state, Decoder(params), args, kwargs)


def interpreted(
    model: Model,
    state: State,
    read: Reader,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    place: tuple[torch.device | str | None, torch.dtype | None] = (None, None),
) -> Any:
    """One forward in which `read` serves every parameter, on another device and in another dtype if these are given."""
    params, (device, dtype) = state.params, place
    handles = stand_ins(params, dtype, device)
    lossy = frozenset(name for name, leaf in params.items() if compressed(leaf))
    module = copy.deepcopy(model.module)
    with Interpreter(handles, read, lossy):
        return functional(module, named(handles, model.aliases), args, kwargs)


def functional(module: nn.Module, params: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`functional_call` that leaves nothing behind.

    Some rotary embeddings write into buffers, and torch writes back into the dict it is given, so both are fresh.
    """
    buffers = {name: b.clone() for name, b in module.named_buffers(remove_duplicate=False)}
    return functional_call(module, {**params, **buffers}, tuple(args), dict(kwargs), tie_weights=False, strict=True)


def named(params: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Parameters under every name the module has for them."""
    return {**params, **{alias: params[name] for alias, name in aliases.items()}}


def stand_ins(
    params: Params, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """A handle for every parameter: of its own dtype and device, or of those that are computed in."""
    return {
        name: handle(leaf.shape, dtype if dtype and leaf.dtype.is_floating_point else leaf.dtype, device or leaf.device)
        for name, leaf in params.items()
    }


class Decoder:
    """Serves leaves, decoded when they are read; the last one is kept, since some models read it once per expert."""

    def __init__(self, params: Params, cast: Callable[[Tensor], Tensor] = lambda value: value) -> None:
        self.params = params
        self.cast = cast
        self.last: tuple[str, Tensor] | None = None

    def __call__(self, use: Use) -> Tensor:
        if self.last is None or self.last[0] != use.name:
            self.last = (use.name, self.cast(dense(self.params[use.name])))
        return self.last[1]


def observe(
    model: Model, state: State, kinds: Mapping[str, Sequence[str]], *args: Any, **kwargs: Any
) -> tuple[Any, Stats]:
    """Runs the model and measures what flows into some weights.

    Args:
        model: as for `call`.
        state: as for `call`.
        kinds: weight -> kinds of statistic ("gram", "absmax", ...) of its input. Name one weight of a site; the
            others read the same tensor.
        *args: one batch.
        **kwargs: one batch.

    Returns:
        The model's output, and site -> kind -> statistic. Merge those of several batches with `merge_stats`.
    """
    watch = Observer(Decoder(state.params), kinds)
    return interpreted(model, state, watch, args, kwargs), watch.stats


class Observer:
    """A reader that measures inputs on their way to the weights.

    Args:
        inner: serves the values.
        kinds: weight -> kinds of statistic of its input.
        rows: flattens an input to the rows `[tokens, in]` that count, where a batch carries a mask.
        keep: puts the statistics of one weight's input where they wait for more.
    """

    def __init__(
        self,
        inner: Reader,
        kinds: Mapping[str, Sequence[str]],
        rows: Callable[[Tensor], Tensor] | None = None,
        keep: Callable[[Stats], Stats] = dict,
    ) -> None:
        self.inner = inner
        self.kinds = kinds
        self.rows = rows or flat_rows
        self.keep = keep
        self.stats: Stats = {}

    def __call__(self, use: Use) -> Tensor:
        if use.x is not None and use.name in self.kinds:
            x = self.rows(use.x)
            with torch.autocast(x.device.type, enabled=False):  # the forward's own is none of the statistics'
                seen = {kind: KINDS[kind].measure(x) for kind in self.kinds[use.name]}
            self.stats |= self.keep(merge_stats({use.name: self.stats.get(use.name, {})}, {use.name: seen}))
        return self.inner(use)


def flat_rows(x: Tensor) -> Tensor:
    """An input of a linear as `[tokens, in]`; one without a dimension of tokens is one row."""
    return torch.atleast_2d(x).flatten(end_dim=-2)


def merge_stats(a: Stats, b: Stats) -> Stats:
    """The statistics of both sets of batches; outcomes of solves, which no batches have, are left out.

    >>> from ptq.numerics.stats import AbsMax
    >>> one, two = ({"w": {"absmax": AbsMax.measure(torch.tensor([[v]]))}} for v in (1.0, -3.0))
    >>> merge_stats(one, two)["w"]["absmax"].max
    tensor([3.])
    """
    merged = measured(a)
    for site, kinds in measured(b).items():
        mine = merged.setdefault(site, {})
        mine.update({kind: mine[kind].merge(value) if kind in mine else value for kind, value in kinds.items()})
    return merged


def measured(stats: Stats) -> Stats:
    """The statistics alone, without what solves reported of their weights."""
    kept = {site: {k: v for k, v in kinds.items() if isinstance(v, Statistic)} for site, kinds in stats.items()}
    return {site: kinds for site, kinds in kept.items() if kinds}


def as_module(model: Model) -> nn.Module:
    """A stock module of its own with the same values, dense; tied parameters stay one parameter."""
    module = copy.deepcopy(model.module)
    params = model.params
    values = {name: nn.Parameter(_own(leaf), requires_grad=False) for name, leaf in params.items()}
    for name, value in named(values, model.aliases).items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_parameter(leaf, value)
    return module


def _own(leaf: Leaf) -> Tensor:
    return leaf.clone() if isinstance(leaf, Tensor) else dense(leaf)
