"""Which blocks are the model proper, and which belong to a tower that only feeds it."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

from ptq.models.probe import blocks


def towers(module: nn.Module) -> frozenset[str]:
    """Paths of the blocks of vision towers and the like.

    The model proper is the part that holds the embedding of the input ids: its blocks share more of their path with
    that than a tower's do. Both stacks of an encoder-decoder belong to it. Where there is no such embedding, nothing
    is a tower.

    >>> towers(nn.Sequential(nn.Linear(2, 1)))
    frozenset()
    """
    answers = (_answer(part, "get_input_embeddings") for part in module.modules())
    table = _path(module, next((a for a in answers if isinstance(a, nn.Embedding)), None))
    if table is None:
        return frozenset()
    near = {path: _common(path, table) for path in blocks(module)}
    stacks = [_path(module, _answer(module, name)) for name in _stacks(module)]
    proper = {path for path, n in near.items() if n == max(near.values())}
    proper |= {path for path in near for stack in stacks if stack and path.startswith(f"{stack}.")}
    return frozenset(near.keys() - proper)


def _stacks(module: Any) -> tuple[str, ...]:
    pair = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    return ("get_encoder", "get_decoder") if pair else ()


def _answer(module: Any, name: str) -> Any:
    """What a module says when it is asked in transformers' words, or None where it does not know them."""
    try:
        return getattr(module, name)()
    except (AttributeError, NotImplementedError):
        return None


def _path(module: nn.Module, part: Any) -> str | None:
    return next((path for path, m in module.named_modules() if m is part), None)


def _common(a: str, b: str) -> int:
    """How many names two paths begin with in common.

    >>> _common("model.language_model.layers.0", "model.language_model.embed_tokens")
    2
    """
    pairs = zip(a.split("."), b.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
