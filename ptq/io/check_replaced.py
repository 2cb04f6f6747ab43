"""Modules in whose place transformers puts others where anything is compressed, told by its own table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.quantizers import base

from ptq.io.survey import TRANSFORMERS, Finding, Survey


def replaced_findings(survey: Survey, skeleton: nn.Module) -> Iterator[Finding]:
    """Experts in one tensor of which it makes a module each, for whose weights the file has no tensors."""
    table: dict[str, Any] = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
    replaced = {name for name, how in table.items() if "compressed-tensors" in how["quantization_methods"]}
    for path, module in skeleton.named_modules() if survey.table else ():
        if type(module).__name__ in replaced:
            made = table[type(module).__name__]["module_name"].__name__
            got = f"experts in one tensor, and a {made} made for them with random weights"
            yield Finding(path, "replaced", got, "nothing compressed in the checkpoint", TRANSFORMERS)
