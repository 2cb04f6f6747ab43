"""Pruned weights that are stored with their zeros: `weight_sparsity` in `config.json` says whose zeros are meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptq.errors import BadInput
from ptq.io.bitmask import Masked
from ptq.io.compressed_tensors import Stored
from ptq.io.safetensors import OnDisk
from ptq.numerics.lazy import Around, load
from ptq.numerics.leaves import Leaf, Sparse, Transposed, compressed, dense, nbytes, rounded
from ptq.numerics.patterns import NM

PRUNED = "weight_sparsity"
"""Where config.json names pruned modules, by what their zeros obey. Zeros are stored, so that nobody needs it to load
the weights. It stands at the top because loaders pass over what they do not know there, while a `sparsity_config` with
targets makes vLLM refuse the model, dense or not; and one file has it all, which headers of shards do not."""


@dataclass(frozen=True)
class Zeroed(Around):
    """A weight in a file whose zeros are meant: `load` gives it as `Sparse`."""

    pattern: NM | None
    name: str
    """the file and the tensor, for errors"""
    turned: bool = False
    """whether it is stored as (in, out)"""

    def load(self) -> Sparse | Transposed:
        values = load(self.leaf)
        if self.turned:
            values = dense(values).mT.contiguous()
        found = Sparse(values, self._mask(dense(values) != 0), self.pattern)
        return Transposed(found) if self.turned else found

    def _mask(self, kept: Tensor) -> Tensor:
        """What is not 0, and of what is, as much as the pattern keeps: the first of each group."""
        if self.pattern is None:
            return kept
        mask = self.pattern.mask(kept.to(torch.int8))
        if not torch.equal(mask & kept, kept):
            what = f"got more than {self.pattern.keep} of {self.pattern.of} that are not 0"
            raise BadInput(f"{self.name}: {what}, which {PRUNED} in config.json denies; remove it there")
        return mask


@compressed.register
def _(leaf: Zeroed) -> bool:
    return True


@rounded.register
def _(leaf: Zeroed) -> bool:
    return rounded(leaf.leaf)


@nbytes.register
def _(leaf: Zeroed) -> int:
    return nbytes(leaf.leaf)


def pruned(leaves: Mapping[str, Leaf], told: Any, turned: Callable[[str], bool], where: Path) -> dict[str, Leaf]:
    """The leaves with those that are pruned as `Zeroed`; bits say by themselves what is.

    Args:
        leaves: by their names in the file.
        told: what the config says: what zeros obey -> names of modules; None: nothing.
        turned: whether a weight is stored as (in, out).
        where: the directory, for errors.

    Raises:
        BadInput: it says that in another way, or of a module that the checkpoint does not have.
    """
    found = dict(leaves)
    for module, pattern in _patterns(told, where):
        name = module if module in found else f"{module}.weight"  # a stack of experts has a name of its own
        leaf, said = found.get(name), f"{where / 'config.json'}: {PRUNED}"
        if leaf is None or len(leaf.shape) < 2:
            raise BadInput(f"{said}: there is no matrix {name}; remove it there")
        if isinstance(leaf, OnDisk | Stored) and not _masked(leaf):
            columns = leaf.shape[-2 if turned(name) else -1]
            if pattern is not None and columns % pattern.of:
                raise BadInput(
                    f"{said}: {name} has {columns} columns, which {pattern.of} do not divide; remove it there"
                )
            found[name] = Zeroed(leaf, pattern, f"{where}: {name}", turned(name))
    return found


def _masked(leaf: OnDisk | Stored) -> bool:
    return isinstance(leaf, Stored) and isinstance(leaf.parts.get("weight"), Masked)


def _patterns(told: Any, where: Path) -> Iterator[tuple[str, NM | None]]:
    try:
        for structure, modules in (told or {}).items():
            keep, _, of = structure.partition(":")
            pattern = None if structure == "unstructured" else NM(int(keep), int(of))
            yield from ((str(module), pattern) for module in [*modules])
    except (AttributeError, TypeError, ValueError) as error:
        raise BadInput(f"{where / 'config.json'}: {PRUNED} is malformed ({error}); remove it") from None
