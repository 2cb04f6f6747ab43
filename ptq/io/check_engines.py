"""Rules of engines: modules that vLLM fuses, weights that are cut for several devices, heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ptq.io.fused import HEADS, FusedSet, cut, expert_sets, fused_sets
from ptq.io.quantization_config import Args, Quantizers
from ptq.io.survey import BOTH, NOTE, VLLM, Finding, Module, Survey, packed_words
from ptq.numerics.leaves import dense


def fused_findings(survey: Survey) -> Iterator[Finding]:
    """What vLLM makes one of has one scheme, and one divisor."""
    sets = fused_sets(survey.modules)
    for each in (*sets, *expert_sets(survey.modules)):
        yield from _one_scheme(survey, each)
    for each in sets:
        yield from _one_divisor(survey, each)
        yield from _whole_blocks(survey, each)


def _one_scheme(survey: Survey, each: FusedSet) -> Iterator[Finding]:
    members = [survey.modules[name] for name in each.shards]
    if any(m.leaf is None for m in members):
        return  # what is refused is told, and has no scheme to compare
    first = members[0]
    other = next((m for m in members if m.scheme != first.scheme), None)
    if other is None:
        return
    if None in (first.args, other.args):
        dense, packed = (first, other) if first.args is None else (other, first)
        got = f"it is not compressed and {packed.name} is"
        yield Finding(dense.name, "fused-ignore", got, f"all or none of {each.name}", VLLM)
        return
    got = f"{_said(other.scheme)}, and {first.name} {_said(first.scheme)}"
    yield Finding(other.name, "fused-scheme", got, f"one scheme for {each.name}", VLLM)


def _said(scheme: Quantizers) -> str:
    return ", activations ".join(
        f"{args.format or args.kind} {args.bits} bit {args.strategy} {args.group_size or ''}".rstrip()
        for args in scheme
        if args is not None
    )


def _one_divisor(survey: Survey, each: FusedSet) -> Iterator[Finding]:
    for part in ("weight_global_scale", "input_global_scale"):
        found = [survey.modules[name].parts.get(part) for name in each.shards]
        values: dict[str, Tensor] = {}
        for entry in (entry for entry in found if entry is not None):
            with survey.refusals(entry.name):
                values[entry.name] = dense(entry).flatten()
        first = next(iter(values), "")
        other = next((name for name, value in values.items() if not torch.equal(value, values[first])), None)
        if other is not None:
            want = f"one number for {each.name}: one target for all"
            yield Finding(other, "fused-global-scale", f"another number than {first}", want, VLLM)


def _whole_blocks(survey: Survey, each: FusedSet) -> Iterator[Finding]:
    for module in (survey.modules[name] for name in each.shards[:-1]):
        if module.args is not None and module.args.block is not None and module.shape[-2] % module.args.block[0]:
            got, rows = f"{module.shape[-2]} rows", module.args.block[0]
            yield Finding(module.name, "fused-blocks", got, f"a multiple of {rows} in {each.name}", VLLM)


def parallel_findings(survey: Survey, tp: int) -> Iterator[Finding]:
    """Heads that devices cannot share, and weights whose groups, words or zero points would straddle two shards."""
    yield from _heads(survey, tp)
    fused = {name for each in fused_sets(survey.modules) for name in each.shards}
    for module in survey.modules.values():
        if module.args is not None and len(module.shape) == 2:
            yield from _straddling(survey, module, module.args, tp, module.name in fused)


def _heads(survey: Survey, tp: int) -> Iterator[Finding]:
    """Each device has as many heads; keys and values have fewer, which may be repeated."""
    heads, fewer = survey.heads, survey.key_value_heads
    if heads is not None and heads % tp:
        yield Finding("num_attention_heads", "heads", f"{heads} heads", f"a multiple of {tp}", VLLM)
    elif fewer is not None and fewer % tp and tp % fewer:
        want = f"a multiple or a divisor of {tp}"
        yield Finding("num_key_value_heads", "heads", f"{fewer} heads", want, VLLM)


def _straddling(survey: Survey, module: Module, args: Args, tp: int, fused: bool) -> Iterator[Finding]:
    (rows, columns), side = module.shape, cut(module.name)
    devices = min(tp, survey.key_value_heads or tp) if module.name.rpartition(".")[2] in HEADS else tp
    size = rows if side == "rows" else columns
    if side and size % devices:
        yield Finding(module.name, "shards", f"{size} {side}", f"a multiple of {devices}", VLLM)
        return
    if side == "columns" and devices > 1:
        yield from _columns(module, args, columns // devices, devices)
    n = rows // devices if side == "rows" else rows
    if (fused or devices > 1) and side == "rows":
        yield from _rows(module, args, n)


def _columns(module: Module, args: Args, k: int, tp: int) -> Iterator[Finding]:
    step = args.block[1] if args.block else args.group_size or 1
    if k % step:
        name = module.tensor("weight_scale")
        yield Finding(name, "group-straddles", f"{k} columns on each of {tp}", f"a multiple of {step}", VLLM)
    elif packed_words(args) and k * args.bits % 32:
        name = module.tensor("weight_packed")
        yield Finding(name, "word-straddles", f"{k} columns on each of {tp}", "whole words of 32 bits", VLLM)


def _rows(module: Module, args: Args, n: int) -> Iterator[Finding]:
    if packed_words(args) and not args.symmetric and args.strategy != "tensor" and n * args.bits % 32:
        name = module.tensor("weight_zero_point")
        yield Finding(name, "zero-point-straddles", f"{n} rows in a shard", "whole words of 32 bits", VLLM)
    if args.block is not None and n % args.block[0] and n != module.shape[0]:
        name = module.tensor("weight_scale")
        yield Finding(name, "block-straddles", f"{n} rows in a shard", f"a multiple of {args.block[0]}", VLLM)


def head_findings(survey: Survey) -> Iterator[Finding]:
    """A head that shares its weight has none of its own."""
    head = survey.modules.get(survey.head)
    if not survey.tied or head is None:
        return
    if head.stored is not None:
        want = "a dense head, or tie_word_embeddings false"
        yield Finding(head.name, "tied-head", "codes while tie_word_embeddings is true", want, BOTH)
    else:
        want = "no tensor while tie_word_embeddings is true"
        yield Finding(head.tensor("weight"), "tied-head", "a copy", want, VLLM, NOTE)
