"""Which target of a config a loader takes for a module: compressed-tensors' order, and vLLM's, which is another.

Both are functions of names alone, so that what they disagree on can be told from a config and a list of modules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence


def library_target(targets: Collection[str], name: str, classes: Sequence[str]) -> str | None:
    """compressed-tensors, and so transformers: the exact name, then regexes by their text, then classes.

    >>> library_target(["re:.*self_attn.*", "re:.*layers.*"], "layers.4.self_attn.o_proj", ["Linear"])
    're:.*layers.*'
    """
    if name in targets:
        return name
    patterns = (target for target in targets if target.startswith("re:") and named(target, name))
    return min(patterns, default=None) or min((kind for kind in classes if kind in targets), default=None)


def library_ignores(ignore: Iterable[str], name: str, classes: Sequence[str]) -> bool:
    """Names, regexes and classes."""
    return any(named(target, name) or target in classes for target in ignore)


def vllm_target(targets: Sequence[str], name: str, kind: str, shards: Sequence[str] = ()) -> str | None:
    """vLLM: the first that has the name; else that of the first shard, if all have one; else a part of its class.

    Args:
        targets: in the order of the file.
        name: the module's name in vLLM, where several may be fused.
        kind: its class in vLLM.
        shards: names in the checkpoint of what is fused in it.

    >>> vllm_target(["re:.*self_attn.*", "re:.*layers.*"], "layers.4.self_attn.o_proj", "RowParallelLinear")
    're:.*self_attn.*'
    """
    own = _first(targets, name)
    if own is not None:
        return own
    found = [_first(targets, shard) for shard in shards]
    if found and all(found):
        return found[0]
    return next((target for target in targets if target.lower() in kind.lower()), None)


def vllm_ignores(ignore: Sequence[str], name: str, shards: Sequence[str] = ()) -> bool | None:
    """Names and regexes, no classes. None: some of the shards only, which vLLM refuses."""
    if name in ignore or not shards:
        return _first(ignore, name) is not None
    each = {_first(ignore, shard) is not None for shard in shards}
    return each.pop() if len(each) == 1 else None


def named(target: str, name: str) -> bool:
    """Whether a target is the module's name or a regex that its name begins with."""
    return re.match(target.removeprefix("re:"), name) is not None if target.startswith("re:") else target == name


def _first(targets: Iterable[str], name: str) -> str | None:
    return next((target for target in targets if named(target, name)), None)
