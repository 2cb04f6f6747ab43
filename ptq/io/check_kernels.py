"""Schemes that vLLM has a kernel for: weights alone, and weights with activations."""

from __future__ import annotations

from collections.abc import Iterator

from ptq.io.quantization_config import Args
from ptq.io.survey import NOTE, TRANSFORMERS, VLLM, Finding, Module, Survey

_MARLIN = (None, -1, 32, 64, 128)
_WANTED = {
    "pack-quantized": "integers of 4 or 8 bits per token, none, or what int8 inputs and outputs or float8 tokens allow",
    "nvfp4-pack-quantized": "nvfp4 too, or none",
    "int-quantized": "int8 per token or static, for int8 per channel or tensor; or per token, for int4",
    "float-quantized": "float8, dynamic where weights are in blocks; or none",
    "naive-quantized": "those of the same kind as the weights",
}
"""format of the weights -> the activations that they are multiplied by"""


def kernel_findings(survey: Survey) -> Iterator[Finding]:
    """Schemes that an engine has no kernel for, or few devices; told once each, with a module that has it."""
    seen: set[tuple[object, ...]] = set()
    for module in survey.modules.values() if survey.table else ():
        embedding = "Embedding" in module.classes
        kind = (*module.scheme, embedding, module.piece)
        if module.args is not None and kind not in seen:
            seen.add(kind)
            yield from _kernels(module, module.args)
            yield from _pairs(module, module.args)
            if embedding:
                yield Finding(module.name, "embedding", "a compressed embedding", "a dense one", TRANSFORMERS)


def _kernels(module: Module, args: Args) -> Iterator[Finding]:
    if args.format == "pack-quantized":
        yield from _packed_kernels(module, args)
    elif args.kind == "int" and module.given.inputs is None:
        yield Finding(module.name, "kernel", f"{args.format} without activations", "pack-quantized", VLLM)
    elif args.kind == "int" and not args.symmetric:
        want = "symmetric weights where activations are integers"
        yield Finding(module.name, "kernel", "zero points", want, VLLM)
    elif args.strategy == "group" and args.format in ("float-quantized", "naive-quantized"):
        got = f"float8 in groups of {args.group_size}"
        yield Finding(module.name, "kernel", got, "one scale for the tensor, or of channels or blocks", VLLM)
    elif args.format == "mxfp6-pack-quantized":
        yield Finding(module.name, "kernel", args.format, "another format", VLLM)
    elif args.format == "mxfp8-quantized" and args.scale_dtype is None:
        yield Finding(module.name, "kernel", "no scale_dtype", "torch.uint8", VLLM)


def _packed_kernels(module: Module, args: Args) -> Iterator[Finding]:
    name = module.name
    if args.strategy == "tensor":
        yield Finding(name, "kernel", "one scale for a tensor", "scales of channels or groups", VLLM)
    if args.bits not in (4, 8) or args.group_size not in _MARLIN:
        got = f"{args.bits} bits in groups of {args.group_size}"
        yield Finding(name, "kernel", got, "4 or 8 bits, groups of 32, 64 or 128 or channels, for Marlin", VLLM, NOTE)
    if args.symmetric:
        return
    if not module.piece:
        want = "symmetric weights, int-quantized, or CompressedTensorsConfig(dequantize=True)"
        yield Finding(name, "packed-zero-points", "packed zero points", want, TRANSFORMERS)
    if args.bits != 4:
        yield Finding(name, "kernel", f"zero points of {args.bits} bits", "4 bits for Marlin", VLLM, NOTE)


def _pairs(module: Module, args: Args) -> Iterator[Finding]:
    """Activations that no kernel multiplies such weights by."""
    _, inputs, outputs = module.given
    if inputs is None and outputs is not None:
        yield Finding(module.name, "activations", "activations of outputs alone", "of inputs too, or of none", VLLM)
    elif inputs is not None and not _takes(args, inputs, outputs):
        got = f"{_words(inputs)} for {_words(args)} in {args.format}"
        yield Finding(module.name, "activations", got, _WANTED.get(str(args.format), "none"), VLLM)


def _words(args: Args) -> str:
    static = " static" if args.dynamic is False and args.format is None else ""
    return f"{args.kind}{args.bits} per {args.group_size or args.strategy}{static}"


def _takes(args: Args, inputs: Args, outputs: Args | None) -> bool:
    kind, static = (inputs.kind, inputs.bits), inputs.dynamic is False
    if args.format == "pack-quantized":
        return _packed_takes(args, inputs, outputs)
    if args.format == "nvfp4-pack-quantized":
        return kind == ("float", 4) and inputs.strategy == "tensor_group"
    if args.kind == "int":
        fits = args.strategy in ("tensor", "channel") if args.bits == 8 else args.bits == 4 and not static
        return kind == ("int", 8) and fits and (static or _by_token(inputs))
    if args.format in ("float-quantized", "naive-quantized"):
        return kind == ("float", 8) and inputs.symmetric and not (static and args.strategy == "block")
    return True  # what hardware decides


def _packed_takes(args: Args, inputs: Args, outputs: Args | None) -> bool:
    kind = (inputs.kind, inputs.bits)
    if kind == ("float", 8):
        return _by_token(inputs) and (args.bits, args.group_size, args.symmetric) == (4, 128, True)
    if inputs.dynamic is False:
        whole = outputs is not None and outputs.dynamic is False and (outputs.kind, outputs.bits) == ("int", 8)
        return kind == ("int", 8) and whole and args.bits in (2, 4, 8)
    return kind in (("int", 8), ("int", 4)) and inputs.symmetric and inputs.strategy in ("token", "group")


def _by_token(inputs: Args) -> bool:
    return inputs.dynamic is True and inputs.strategy == "token"
