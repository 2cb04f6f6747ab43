"""Whether loaders take a checkpoint: its headers against its config and its model, and its scales' values.

No forward is run, and one weight at a time is in memory, so that a checkpoint of any size is checked in the time of
reading it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn

from ptq.errors import BadInput
from ptq.io.bitmask import Masked
from ptq.io.check_config import config_findings, target_findings, untargeted
from ptq.io.check_engines import fused_findings, head_findings, parallel_findings
from ptq.io.check_experts import expert_findings
from ptq.io.check_kernels import kernel_findings
from ptq.io.check_replaced import replaced_findings
from ptq.io.check_tensors import part_findings, presence, value_findings
from ptq.io.hub import skeleton_of
from ptq.io.survey import BOTH, ERROR, EVERY, Finding, Survey, surveyed
from ptq.models.skeleton import copied


def check(path: Path, tp: int = 1, skeleton: nn.Module | None = None, weights: bool = True) -> list[Finding]:
    """What loaders would fail at, or compute wrong numbers of.

    What every reader fails at is what the reader of this library refuses: it is run, past whatever it refuses. The
    other rules are about what it does read.

    Args:
        path: a directory with config.json and safetensors.
        tp: over how many devices a serving engine divides each weight.
        skeleton: the model's structure; None: made from the config.
        weights: whether the values of weights are read too, and not those of scales alone.

    Raises:
        BadInput: there is no config, or transformers knows no such model.
    """
    own = skeleton_of(path) if skeleton is None else copied(skeleton)
    try:
        survey = surveyed(path, own)
    except BadInput as error:
        return [Finding(str(path), "unreadable", str(error), "", EVERY)]
    found = [*replaced_findings(survey, own), *_findings(survey, tp, weights)]
    refused = [Finding(about, "unreadable", what, "", EVERY) for about, what in survey.refusals.found.items()]
    return refused + found


def _findings(survey: Survey, tp: int, weights: bool) -> Iterator[Finding]:
    yield from config_findings(survey, tp)
    yield from presence(survey)
    yield from part_findings(survey)
    yield from untargeted(survey)
    yield from target_findings(survey)
    yield from fused_findings(survey)
    yield from parallel_findings(survey, tp)
    yield from head_findings(survey)
    yield from kernel_findings(survey)
    yield from expert_findings(survey)
    yield from value_findings(survey, weights)
    yield from _bits(survey)


def _bits(survey: Survey) -> Iterator[Finding]:
    for entry in (e for e in survey.entries.values() if isinstance(e, Masked)):
        yield Finding(entry.name, "bitmask", "bits and values", "all values: no loader of today reads these", BOTH)


def damage(findings: Iterable[Finding]) -> Finding | None:
    """The first error that every reader would meet."""
    return next((f for f in findings if f.severity == ERROR and f.loaders == EVERY), None)


def remarks(findings: Iterable[Finding]) -> dict[str, str]:
    """What some loaders fail at, a line for each rule: tensor or module -> what is wrong."""
    rules: dict[tuple[str, str], list[Finding]] = {}
    for each in (f for f in findings if f.severity == ERROR and f.loaders != EVERY):
        rules.setdefault((each.rule, each.loaders), []).append(each)
    found: dict[str, list[str]] = {}
    for first, *others in rules.values():
        more = f" (and {len(others)} more)" if others else ""
        text = f"{first.loaders}: {first.rule}: got {first.got}, expected {first.expected}{more}"
        found.setdefault(first.about, []).append(text)
    return {about: "; ".join(texts) for about, texts in found.items()}
