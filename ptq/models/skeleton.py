"""Private skeletons: a network's structure with its parameters on the meta device and its buffers real.

Two ways lead to one. A directory has a class and a config: the class is built on meta, and its buffers are computed
again. A live module is copied with a memo in which every parameter is replaced, so that edits to it are kept and no
weight is copied. In both cases nothing of the caller's is shared: not the config, not a hook table, not a buffer.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ptq.base import State
from ptq.errors import BadInput
from ptq.models.model import Model


def from_config(cls: type[nn.Module], config: Any, dtype: torch.dtype) -> nn.Module:
    """A skeleton from a transformers class and config.

    Args:
        cls: a `PreTrainedModel`.
        config: its config, which is copied.
        dtype: what the model would be loaded in; some buffers are rounded to it.

    Raises:
        BadInput: the class shares a submodule between two paths, or leaves a buffer without values.
    """
    with torch.device("meta"):
        skeleton: Any = cls._from_config(copy.deepcopy(config), dtype=dtype)  # type: ignore[attr-defined]  # of PreTrainedModel
    for parameter in skeleton.parameters():
        parameter.requires_grad_(False)
        parameter._is_hf_initialized = True  # noqa: SLF001  # transformers' own mark: no weight is drawn
    for name, buffer in list(skeleton.named_buffers()):
        _set_buffer(skeleton, name, torch.empty_like(buffer, device="cpu"))
    for module in skeleton.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    skeleton.initialize_weights()
    return _checked(skeleton)


def from_module(module: nn.Module, tokenizer: Any = None) -> Model:
    """A live module as a model: a skeleton of its own, and the module's values, which are shared and never written.

    Args:
        module: any `nn.Module` whose parameters are in memory; it stays as it is.
        tokenizer: tokenizer or processor that belongs to it.

    Raises:
        BadInput: a parameter is on the meta device (an offloaded model), or a submodule has two paths.

    >>> model = from_module(nn.Linear(2, 1))
    >>> model.module.weight.device.type, sorted(model.params)
    ('meta', ['bias', 'weight'])
    """
    meta = [name for name, p in module.named_parameters() if p.is_meta]
    if meta:
        raise BadInput(
            f"{type(module).__name__}: parameter {meta[0]} and {len(meta) - 1} others have no values (meta device); "
            "load the model without offloading, or open its directory"
        )
    skeleton = _checked(copied(module))
    tied = aliases(skeleton)
    params = {n: p.detach() for n, p in module.named_parameters(remove_duplicate=False) if n not in tied}
    return Model(skeleton, State(params), tied, getattr(skeleton, "config", None), tokenizer)


def rebuilt(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a skeleton in another dtype; whatever was edited in it stays edited.

    A buffer that is what its transformers class computes is computed again in the new dtype, so that it is not rounded
    twice. Any other one is cast, to the dtype that the class has for it.
    """
    made = copied(module, dtype)
    if hasattr(type(module), "_from_config"):
        set_buffers(made, _recomputed(module, dtype))
    return _checked(made)


def aliases(module: nn.Module) -> dict[str, str]:
    """Tied parameters, alias -> canonical name: those that are one object.

    The canonical name is what the model class declares, else the name that comes first.
    """
    declared: dict[str, str] = dict(getattr(module, "all_tied_weights_keys", None) or {})
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    found: dict[str, str] = {}
    for names in groups.values():
        canonical = next((n for n in names if n in declared.values() and n not in declared), names[0])
        found |= {n: canonical for n in names if n != canonical}
    return found


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers: some rotary embeddings write into theirs during a forward."""
    return {name: buffer.clone() for name, buffer in module.named_buffers(remove_duplicate=False)}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong in a checkpoint."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name in kept}


def set_buffers(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Gives a private skeleton other values for some of its buffers."""
    for name, value in values.items():
        _set_buffer(module, name, value)


def checkpoint_dtype(leaves: Iterable[Any]) -> torch.dtype:
    """The floating dtype, of 16 bits at least, that most values have: what a model of these leaves is loaded in.

    >>> checkpoint_dtype([torch.ones(3, dtype=torch.bfloat16), torch.ones(2)])
    torch.bfloat16
    """
    count: Counter[torch.dtype] = Counter()
    for leaf in leaves:
        if leaf.dtype.is_floating_point and leaf.dtype.itemsize > 1:
            count[leaf.dtype] += leaf.shape.numel()
    return count.most_common(1)[0][0] if count else torch.float32


def head_of(skeleton: nn.Module) -> str:
    """The name in memory of the module that gives logits."""
    made: Any = getattr(skeleton, "get_output_embeddings", lambda: None)()
    return next((path for path, module in skeleton.named_modules() if module is made), "lm_head")


def remember_conversions(skeleton: nn.Module, conversions: list[Any]) -> None:
    """Notes the conversions that a checkpoint was read with where transformers looks for them, to revert them."""
    setattr(skeleton, _CONVERSIONS, conversions)


_CONVERSIONS = "_weight_conversions"


def copied(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy without weights, in another dtype if one is given."""

    def own(t: Tensor) -> torch.dtype:
        return dtype if dtype and t.is_floating_point() else t.dtype

    memo: dict[int, Any] = {id(b): b.to(own(b), copy=True) for b in module.buffers()}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, dtype=own(p), device="meta"), requires_grad=False)
    return copy.deepcopy(module, memo)


def _checked(skeleton: nn.Module) -> nn.Module:
    meta = [name for name, buffer in skeleton.named_buffers() if buffer.is_meta]
    if meta:
        raise BadInput(f"{type(skeleton).__name__}: buffer {meta[0]} has no values (meta device)")
    paths: dict[int, str] = {}
    for path, module in skeleton.named_modules(remove_duplicate=False):
        first = paths.setdefault(id(module), path)
        if first != path and next(module.parameters(), None) is not None:
            raise BadInput(
                f"{type(skeleton).__name__}: {first} and {path} are one module; a weight needs one path, so give each "
                "its own module and tie their parameters"
            )
    return skeleton.eval()


def _set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, value)


def _recomputed(module: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The buffers that the module's class has, as they are in another dtype."""
    fresh = {d: buffers(from_config(type(module), module.config, d)) for d in {module.dtype, dtype}}
    was, new = fresh[module.dtype], fresh[dtype]
    own = {name: buffer for name, buffer in buffers(module).items() if name in new}
    return {n: new[n] if _equal(b, was[n]) else b.to(new[n].dtype) for n, b in own.items()}


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.cpu(), b)
