"""Modules for which vLLM takes another scheme out of a config than compressed-tensors, transformers and this reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ptq.io.fused import FusedSet, fused_sets
from ptq.io.quantization_config import QUANTIZED, Config


class Difference(NamedTuple):
    """A module that loaders read by different schemes."""

    module: str
    fused: str
    """what vLLM makes of it and others, or itself"""
    ours: str
    """the target that the library takes"""
    theirs: str | None
    """that of vLLM"""


def differences(config: Config, modules: Mapping[str, Sequence[str]], head: str) -> Iterator[Difference]:
    """What the two orders of matching disagree on; of modules that vLLM fuses, the first speaks for all.

    What is ignored in part is left out: vLLM refuses it.

    Args:
        config: what a checkpoint says.
        modules: name of a module in the checkpoint -> its class and those that it inherits from.
        head: the one that gives logits.
    """
    sets = fused_sets(modules)
    alone = modules.keys() - {name for each in sets for name in each.shards}
    for each in (*sets, *(FusedSet(name, (name,)) for name in sorted(alone))):
        name, classes, shards = each.shards[0], modules[each.shards[0]], each.shards if len(each.shards) > 1 else ()
        ours = None if QUANTIZED.isdisjoint(classes) else config.target(name, classes)
        if ours is None or config.ignored.vllm_ignores(each.name, shards) is not False:
            continue
        theirs = config.targets.vllm(each.name, _kind(classes, head == name), shards)
        if theirs is None or config.schemes[theirs] != config.schemes[ours]:
            yield Difference(name, each.name, ours, theirs)


def _kind(classes: Sequence[str], head: bool) -> str:
    """The module's class in vLLM, as far as targets can tell classes apart."""
    if head:
        return "ParallelLMHead"
    return "VocabParallelEmbedding" if "Embedding" in classes else "ColumnParallelLinear"
