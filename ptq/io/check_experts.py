"""Rules of experts that transformers stacks: it decodes them by a way of its own, which reads fewer schemes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptq.io.quantization_config import Args, Group
from ptq.io.survey import TRANSFORMERS, Finding, Module, Survey

_PACKED = ("pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized")
_READ = "pack-quantized without zero points, MXFP4, MXFP6, or float8 with one scale for a tensor or channels"


def expert_findings(survey: Survey) -> Iterator[Finding]:
    """What 5.24 cannot stack, or stacks with wrong numbers; told once for each scheme, with a module that has it."""
    if not survey.table or survey.config is None:
        return
    taken, seen = _taken(survey.config.groups), set[Args | None]()
    for module in survey.modules.values():
        if module.piece and module.leaf is not None and module.args not in seen:
            seen.add(module.args)
            yield from _stacked(module, taken)


def _stacked(module: Module, taken: Args | None) -> Iterator[Finding]:
    args = module.args
    if args is None:
        if not _float8(taken):
            got = "dense experts in a compressed checkpoint"
            yield Finding(module.name, "dense-experts", got, "compressed ones: it looks for codes", TRANSFORMERS)
    elif fault := _fault(args):
        yield Finding(module.name, "experts", fault, _READ, TRANSFORMERS)
    elif taken is None or args[:3] != taken[:3]:
        got = f"{args.format} of {args.bits} bits, read by the scheme of {taken.format if taken else 'no group'}"
        want = "the experts' group to be the first with 'experts' in a regex of its targets"
        yield Finding(module.name, "experts-group", got, want, TRANSFORMERS)


def _fault(args: Args) -> str:
    if args.format == "nvfp4-pack-quantized":
        return "NVFP4, which is read without its divisors, and wrong by them"
    if not args.symmetric:
        return "zero points, which are not read there, nor with CompressedTensorsConfig(dequantize=True)"
    if _float8(args) and args.scale_dtype is None:
        return f"float8 in {args.strategy}s" if args.strategy in ("group", "block") else ""
    return "" if args.format in _PACKED else f"{args.format}, of which it makes no stack"


def _float8(args: Args | None) -> bool:
    return args is not None and (args.kind, args.bits) == ("float", 8)


def _taken(groups: Sequence[Group]) -> Args | None:
    """The scheme that it takes for all experts of a model: that of the first group whose targets look like theirs."""
    looks = (
        lambda target: target.startswith("re:") and "experts" in target,
        lambda target: not target.startswith("re:"),
        lambda target: True,
    )
    found = (group for look in looks for group in groups if any(map(look, group.targets)))
    return next((group.weights for group in found), None)
