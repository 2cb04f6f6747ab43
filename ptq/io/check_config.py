"""Rules of a `quantization_config` by itself, and of what its targets and its `ignore` mean to different loaders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ptq.io.layouts import LAYOUTS
from ptq.io.orders import differences
from ptq.io.quantization_config import Config
from ptq.io.survey import BOTH, NOTE, TRANSFORMERS, VLLM, Finding, Survey

_SCHEME = {"targets", "weights", "input_activations", "output_activations", "format"}
_ARGS = {
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder"),
    *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
}
_MIXED = "mixed-precision"


def config_findings(survey: Survey, tp: int) -> Iterator[Finding]:
    """What is wrong with a config whatever the files hold; of one that the reader understands."""
    table, config = survey.table, survey.config
    if not table or config is None:
        return
    groups: Mapping[str, Any] = table.get("config_groups") or {}
    status = table.get("quantization_status")
    if status != "compressed" and table.get("format") != "dense":
        yield Finding("quantization_status", "status", repr(status), "'compressed'", TRANSFORMERS)
    if table.get("ignore", []) is None:
        yield Finding("ignore", "ignore-null", "null", "a list", BOTH)
    sparsity: Any = table.get("sparsity_config") or {}
    pruned = sparsity.get("targets") if isinstance(sparsity, dict) else sparsity
    if pruned:
        got = f"{len(pruned)} names or patterns" if isinstance(pruned, list) else repr(pruned)
        yield Finding("sparsity_config.targets", "sparsity", got, "nothing", VLLM)
    yield from _cache(config)
    yield from _transforms(config, tp)
    yield from _formats(table, groups)
    for name, group in groups.items():
        yield from _keys(f"config_groups.{name}", group)


def _cache(config: Config) -> Iterator[Finding]:
    args = config.cache
    if args is None:
        return
    yield Finding("kv_cache_scheme", "cache", "a scheme", "null: 5.24 does not apply it", TRANSFORMERS, NOTE)
    if (args.bits, args.kind, args.symmetric) != (8, "float", True):
        got = f"{args.kind} of {args.bits} bits{'' if args.symmetric else ' with zero points'}"
        yield Finding("kv_cache_scheme", "cache-kind", got, "symmetric float of 8 bits", VLLM)
    elif args.strategy not in ("tensor", "attn_head"):
        want = "one scale for a tensor or a head"
        yield Finding("kv_cache_scheme", "cache-kind", f"strategy {args.strategy}", want, VLLM)


def _transforms(config: Config, tp: int) -> Iterator[Finding]:
    """Changes of variables, of which transformers computes none as the model runs, and vLLM some."""
    if not config.transforms:
        return
    got, want = f"{', '.join(config.transforms)} as the model runs", "transforms that are in the weights"
    yield Finding("transform_config", "transforms", got, want, TRANSFORMERS)
    if tp > 1 or not {"input", "output"}.issuperset(config.transforms):
        want = "one device, and none but those of input and output"
        yield Finding("transform_config", "engine-transforms", got, want, VLLM)


def _formats(table: Mapping[str, Any], groups: Mapping[str, Any]) -> Iterator[Finding]:
    top, each = table.get("format"), {name: group.get("format") for name, group in groups.items()}
    if top is None and groups:
        yield Finding("format", "format", "nothing", "the format, which vLLM knows int8 and float8 by", VLLM)
    if top not in (*LAYOUTS, _MIXED, "dense", None):
        yield Finding("format", "format", repr(top), f"one of {', '.join(LAYOUTS)}", BOTH)
    used = {form or top for name, form in each.items() if groups[name].get("weights")}
    if len(used) > 1 and top != _MIXED:
        yield Finding("format", "format", repr(top), f"'{_MIXED}' for {len(used)} formats", BOTH)
    for name, form in each.items():
        about = f"config_groups.{name}.format"
        if form is None:
            severity = {} if top == _MIXED else {"severity": NOTE}
            yield Finding(about, "group-format", "nothing", "the format of each group", BOTH, **severity)
        elif form not in LAYOUTS and form != "dense":
            yield Finding(about, "group-format", repr(form), f"one of {', '.join(LAYOUTS)}", BOTH)


def _keys(about: str, group: Mapping[str, Any]) -> Iterator[Finding]:
    parts = {key: group.get(key) for key in ("weights", "input_activations", "output_activations")}
    known = {about: (group, _SCHEME)} | {f"{about}.{key}": (args, _ARGS) for key, args in parts.items() if args}
    for where, (given, keys) in known.items():
        for key in sorted(set(given) - keys):
            yield Finding(f"{where}.{key}", "unknown-key", repr(given[key]), "no such key", BOTH)
        if given.get("actorder") in (True, "group", "dynamic"):
            got, want = repr(given["actorder"]), "null: columns have no order of their own since 0.19"
            yield Finding(f"{where}.actorder", "column-order", got, want, BOTH)
    if parts["weights"] is None and not all(str(t).endswith("Attention") for t in group.get("targets") or [""]):
        yield Finding(f"{about}.weights", "no-weights", "null", "a scheme", VLLM)


def target_findings(survey: Survey) -> Iterator[Finding]:
    """Modules for which two loaders take different schemes, or none."""
    if not survey.table or survey.config is None:
        return
    classes = {name for module in survey.modules.values() for name in module.classes}
    for entry in survey.config.ignore:
        if entry in classes and entry not in survey.modules:
            yield Finding(f"ignore: {entry}", "ignore-class", "a class name", "full names of modules", VLLM)
    modules = {name: module.classes for name, module in survey.modules.items()}
    for each in differences(survey.config, modules, survey.head):
        if each.module == survey.head and each.theirs is None:
            got = f"target {each.ours!r}, a class that vLLM's head has not"
            yield Finding(each.module, "head-by-class", got, "its name or a regex as target, or in ignore", VLLM)
        else:
            got = f"targets {each.ours!r} and {each.theirs!r} for {each.fused}"
            yield Finding(each.module, "overlapping-targets", got, "one that both orders of matching choose", VLLM)


def untargeted(survey: Survey) -> Iterator[Finding]:
    """Codes that no group says how to read: their tensors do, but loaders look at the config alone."""
    for module in survey.modules.values():
        told = survey.table or survey.config is None  # a foreign config has been told in words of this one
        if told and module.stored is not None and module.given.weights is None:
            left = survey.config is not None and survey.config.ignored.naming(module.name) is not None
            got = "codes that are in ignore" if left else "codes that match no target"
            yield Finding(module.tensor("weight"), "untargeted", got, "a group of the config with its scheme", BOTH)
