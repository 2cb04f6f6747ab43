"""A model as a value: a function and a parameter pytree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from ptq.base import Params, State
from ptq.numerics.lazy import Decoded
from ptq.numerics.leaves import compressed


@dataclass(frozen=True)
class Model:
    """A network as a skeleton without weights and a state that holds them.

    `model(input_ids, **kwargs)` returns what the stock model returns. Nothing here is ever changed in place:
    `dataclasses.replace(model, state=...)` is the model with other parameters.
    """

    module: nn.Module
    """private skeleton: parameters on meta, buffers real, in eval mode"""
    state: State
    """canonical parameters only; leaves of files are read when they are used"""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """tied parameters: alias -> canonical name"""
    config: Any = None
    """the transformers config, or None for a plain module"""
    tokenizer: Any = None
    """tokenizer, processor or None"""
    source: Path | None = None
    """the directory or file that this was opened from: side files are carried along from there"""

    @property
    def params(self) -> Params:
        return self.state.params

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from ptq.models.call import call  # the function is above the value

        return call(self, self.state, *args, **kwargs)

    def decoded(self) -> Model:
        """The same values as floats, each decoded when it is used: what may be compressed again.

        What was rounded away before is lost: compressing the original is better, where there is one.
        """
        params = {n: Decoded(leaf) if compressed(leaf) else leaf for n, leaf in self.params.items()}
        return replace(self, state=self.state._replace(params=params))

    def as_module(self) -> nn.Module:
        """A stock `nn.Module` of its own with the same values, dense: for generate() and evaluation harnesses."""
        from ptq.models.call import as_module

        return as_module(self)
