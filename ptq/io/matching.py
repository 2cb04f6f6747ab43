"""Which target of a config a loader takes for a module: compressed-tensors' order, and vLLM's, which is another.

Both are functions of names alone, so that what they disagree on can be told from a config and a list of modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


class Targets:
    """Targets of a config in the order of the file: names, regexes and classes, ready to be asked about many modules.

    >>> both = Targets(["re:.*self_attn.*", "re:.*layers.*"])
    >>> both.library("layers.4.self_attn.o_proj", []), both.vllm("layers.4.self_attn.o_proj", "RowParallelLinear")
    ('re:.*layers.*', 're:.*self_attn.*')
    """

    def __init__(self, targets: Iterable[str]) -> None:
        self._places = {target: i for i, target in enumerate(dict.fromkeys(targets))}
        self._regexes = {t: re.compile(t.removeprefix("re:")) for t in self._places if t.startswith("re:")}
        # A checkpoint of experts may name each of its modules; their names are no parts of a class's.
        self._words = [target for target in self._places if target.isidentifier()]

    def library(self, name: str, classes: Sequence[str]) -> str | None:
        """compressed-tensors, and so transformers: the exact name, then regexes by their text, then classes."""
        if name in self._places:
            return name
        known = (kind for kind in classes if kind in self._places)
        return min(self._matching(name), default=None) or min(known, default=None)

    def vllm(self, name: str, kind: str, shards: Sequence[str] = ()) -> str | None:
        """vLLM: the first that has the name; else that of the first shard, if all have one; else a part of its class.

        Args:
            name: the module's name in vLLM, where several may be fused.
            kind: its class in vLLM.
            shards: names in the checkpoint of what is fused in it.
        """
        own = self.naming(name)
        if own is not None:
            return own
        found = [self.naming(shard) for shard in shards]
        if found and all(found):
            return found[0]
        return next((word for word in self._words if word.lower() in kind.lower()), None)

    def vllm_ignores(self, name: str, shards: Sequence[str] = ()) -> bool | None:
        """Whether vLLM ignores a module: by names and regexes, no classes. None: some shards only, which it refuses."""
        if name in self._places or not shards:
            return self.naming(name) is not None
        each = {self.naming(shard) is not None for shard in shards}
        return each.pop() if len(each) == 1 else None

    def naming(self, name: str) -> str | None:
        """The first that is the module's name or a regex that its name begins with."""
        named = [name] if name in self._places else []
        return min((*named, *self._matching(name)), key=self._places.__getitem__, default=None)

    def _matching(self, name: str) -> list[str]:
        return [target for target, regex in self._regexes.items() if regex.match(name)]
