"""The `quantization_config` of a compressed-tensors checkpoint: which module is stored how.

Reading is lenient, since files of many writers are about; writing keeps to what every loader takes: the format at the
top and in every group, six fields per scheme, full names in `ignore`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ptq.errors import BadInput
from ptq.io.matching import Targets

VERSION = "0.20.1"  # the compressed-tensors whose layout is written; 0.18 changed how 3, 5, 6 and 7 bits are packed


KEYS = ("quantization_config", "compression_config")
"""where a config has it, the old name last"""


QUANTIZED = frozenset({"Linear", "Embedding"})
"""classes of the modules that schemes are for, attention aside; a target's regex may well hit others"""

_ROLES = ("weights", "input_activations", "output_activations")
_BITS = {"int": range(1, 9), "float": (4, 6, 8)}
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
_DYNAMIC = ("tensor", "token", "group", "tensor_group")
_STATIC = ("tensor", "attn_head")
_LOCAL = ("tensor_group",)
_ONLINE = {"input", "output", "q_attn", "k_cache"}
"""where transforms are computed as the model runs; elsewhere they are in the weights already"""


class Args(NamedTuple):
    """How the weights of some modules are stored, or how activations are rounded."""

    format: str | None
    bits: int
    kind: str
    """int or float"""
    symmetric: bool
    strategy: str
    """tensor, channel, group, tensor_group (groups whose scales share a divisor) or block; token, attn_head"""
    group_size: int | None = None
    block: tuple[int, int] | None = None
    """rows, columns"""
    scale_dtype: str | None = None
    """of scales that are no floats"""
    dynamic: bool | str = False
    """of activations: whether scales are found when they are used; "local": but for a divisor, which is stored"""


class Quantizers(NamedTuple):
    """All that is quantized of a module."""

    weights: Args | None
    inputs: Args | None = None
    outputs: Args | None = None


class Group(NamedTuple):
    """Modules and their scheme."""

    targets: tuple[str, ...]
    weights: Args | None
    inputs: Args | None = None
    outputs: Args | None = None

    @property
    def quantizers(self) -> Quantizers:
        return Quantizers(*self[1:])


@dataclass(frozen=True)
class Config:
    """What a reader needs to know."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    version: tuple[int, ...]
    packed: bool
    """False where weights are stored in float, with the scales they were rounded by beside them"""
    cache: Args | None
    """how keys and values are rounded"""
    beyond: str
    """what the file quantizes besides weights, in words; empty: nothing"""
    transforms: tuple[str, ...]
    """where the model has changes of variables that are computed as it runs, and not in its weights"""

    def args(self, name: str, classes: Sequence[str]) -> Args | None:
        """How the weights of a module are stored."""
        return self.quantizers(name, classes).weights

    def quantizers(self, name: str, classes: Sequence[str]) -> Quantizers:
        """The scheme of a module, in the library's order: exact name, then regexes by their text, then classes.

        Args:
            name: the module's name in the checkpoint.
            classes: its class and the classes that it inherits from.
        """
        target = self.target(name, classes)
        return Quantizers(None) if target is None else self.schemes[target]

    def target(self, name: str, classes: Sequence[str]) -> str | None:
        """The target whose scheme a module has; None: it has none, or is ignored."""
        return None if self.ignored.library(name, classes) is not None else self.targets.library(name, classes)

    @cached_property
    def schemes(self) -> dict[str, Quantizers]:
        """By target, in the order of the file."""
        return {target: group.quantizers for group in self.groups for target in group.targets}

    @cached_property
    def targets(self) -> Targets:
        """What schemes are for."""
        return Targets(self.schemes)

    @cached_property
    def ignored(self) -> Targets:
        """What no scheme is for."""
        return Targets(self.ignore)


def parse(raw: Any, where: Path) -> Config:
    """The configuration as this reader understands it.

    Raises:
        BadInput: another method than compressed-tensors, a scheme that is not read, or a value of the wrong kind.
    """
    try:
        config = _parse(raw, where)
        for target in (*config.ignore, *(t for group in config.groups for t in group.targets)):
            if target.startswith("re:"):
                re.compile(target.removeprefix("re:"))
    except BadInput:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, re.error) as error:
        raise BadInput(f"{where}: quantization_config is malformed ({error}); download or copy it again") from None
    return config


def _parse(raw: Any, where: Path) -> Config:
    raw = raw if isinstance(raw, dict) else raw.to_dict()
    table: dict[str, Any] = raw.get("quantization_config") or raw
    method = table.get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        known = "compressed-tensors, fp8, mxfp4, modelopt or nothing"
        raise BadInput(f"{where}: quantized by {method!r}, which is not read; expected {known}")
    groups = {name: group for name, group in _schemes(table, where).items() if any(map(group.get, _ROLES))}
    cache: Any = table.get("kv_cache_scheme")
    ignore: Any = table.get("ignore") or []
    if not isinstance(ignore, list | tuple) or not all(isinstance(target, str) for target in ignore):
        raise TypeError(f"ignore: got {ignore!r}, expected a list of names")
    digits = re.findall(r"\d+", str(table.get("version"))) or re.findall(r"\d+", VERSION)
    return Config(
        groups=tuple(_group(name, group, table, where) for name, group in groups.items()),
        ignore=tuple(ignore),
        version=tuple(int(d) for d in digits[:2]),
        packed=table.get("quantization_status", "compressed") == "compressed",
        cache=_activation_args("kv_cache_scheme", cache, where) if cache else None,
        beyond=", ".join(_beyond(table)),
        transforms=tuple(sorted(_places(table.get("transform_config") or {}) & _ONLINE)),
    )


def dump(
    modules: Mapping[Quantizers, Sequence[str]],
    ignore: Sequence[str],
    by_class: bool = True,
    attention: Mapping[Args, Sequence[str]] = {},
    cache: Args | None = None,
    sparsity: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The configuration of a checkpoint.

    Args:
        modules: scheme -> names of the modules that have it.
        ignore: names of all other linears.
        by_class: whether a class may be the target where all have one scheme; transformers and vLLM both take it for
            every linear not ignored, fused ones and experts too. Else targets are full names, which are disjoint, so
            that the two orders of matching cannot differ.
        attention: how queries, keys and values are rounded -> classes of attention modules.
        cache: how keys and values are rounded.
        sparsity: the `sparsity_config` of pruned weights that are not stored dense, which no loader of today takes.
    """
    formats = {str(quantizers.weights.format) for quantizers in modules if quantizers.weights}
    whole = by_class and len(modules) == 1
    listed = [_scheme(quantizers, ["Linear"] if whole else names) for quantizers, names in modules.items()]
    listed += [_scheme(Quantizers(None, args), classes) for args, classes in attention.items()]
    return {
        "quant_method": "compressed-tensors",
        "version": VERSION,
        "format": "mixed-precision" if len(formats) > 1 else next(iter(formats), "dense"),
        "quantization_status": "frozen" if formats == {"dense"} else "compressed",
        # Loaders sort these names as text.
        "config_groups": {f"group_{i:03}" if len(listed) > 10 else f"group_{i}": g for i, g in enumerate(listed)},
        "ignore": list(ignore),
        "kv_cache_scheme": _fields(cache),
        "sparsity_config": dict(sparsity or {}),
        "transform_config": {},
        "global_compression_ratio": None,
    }


def _scheme(quantizers: Quantizers, targets: Sequence[str]) -> dict[str, Any]:
    weights, inputs, outputs = quantizers
    return {
        "targets": list(targets),
        "weights": _fields(weights),
        "input_activations": _fields(inputs),
        "output_activations": _fields(outputs),
        "format": weights.format if weights else None,
    }


def _fields(args: Args | None) -> dict[str, Any] | None:
    """Six fields that every reader knows, and what the format cannot be told without."""
    if args is None:
        return None
    fields = {
        "num_bits": args.bits,
        "type": args.kind,
        "symmetric": args.symmetric,
        "strategy": args.strategy,
        "group_size": args.group_size,
        "dynamic": args.dynamic,
    }
    told = args.scale_dtype and args.format in ("mxfp6-pack-quantized", "mxfp8-quantized", None)
    block = {"block_structure": list(args.block)} if args.block else {}
    return fields | block | ({"scale_dtype": args.scale_dtype} if told else {})


def _schemes(table: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = table.get("config_groups") or {}
    for name, group in found.items():
        if isinstance(group, list):  # the library takes a preset's name so, but what a name means has changed
            what = f"config_groups.{name}: got a list of targets for a name alone, expected a scheme; write it out"
            raise BadInput(f"{where}: {what}")
    return found


def _places(transforms: Mapping[str, Any]) -> set[str]:
    schemes: Mapping[str, Any] = transforms.get("config_groups") or {}
    return {str(each.get("location")) for scheme in schemes.values() for each in scheme.get("apply") or ()}


def _group(name: str, group: Mapping[str, Any], table: Mapping[str, Any], where: Path) -> Group:
    form, targets = group.get("format") or table.get("format"), group.get("targets") or ()
    weights, *activations = (group.get(role) for role in _ROLES)
    if isinstance(targets, str) or not all(isinstance(g.get("format"), str | None) for g in (group, table)):
        raise TypeError(f"format {form!r}, targets {targets!r}")
    return Group(
        tuple(targets),
        _weight_args(name, weights, form, where) if weights else None,
        *(_activation_args(name, given, where) if given else None for given in activations),
    )


def _weight_args(name: str, raw: Any, form: str | None, where: Path) -> Args:
    if form == "marlin-24":
        raise BadInput(f"{where}: {name}: format marlin-24 is not read; start from the weights that it was made of")
    args = _args(name, raw, form, where)._replace(dynamic=False)
    if args.bits not in _BITS.get(args.kind, ()) or args.strategy not in _STRATEGIES:
        what = f"{args.kind} {args.bits} bit, strategy {args.strategy}, format {form}"
        raise BadInput(f"{where}: {name}: {what} is not read; expected int of 1 to 8 bits or float of 4, 6 or 8")
    return args


def _activation_args(name: str, raw: Any, where: Path) -> Args:
    args = _args(name, raw, None, where)
    strategies = _STATIC if args.dynamic is False else _LOCAL if args.dynamic == "local" else _DYNAMIC
    if args.bits not in _BITS.get(args.kind, ()) or args.strategy not in strategies:
        what = f"{args.kind} {args.bits} bit, strategy {args.strategy}, dynamic {args.dynamic}"
        raise BadInput(f"{where}: {name}: activations in {what} are not read; remove them from the config")
    return args


def _args(name: str, raw: Any, form: str | None, where: Path) -> Args:
    size, block = raw.get("group_size"), raw.get("block_structure")
    if isinstance(block, str):  # "128x128" in old files
        block = block.lower().split("x")
    if not all(isinstance(raw.get(key), str | bool | None) for key in ("strategy", "zp_dtype", "actorder", "observer")):
        raise TypeError(f"{name}: {dict(raw)}")
    strategy = raw.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    args = Args(
        format=form,
        bits=raw.get("num_bits", 8),
        kind=str(raw.get("type", "int")).lower(),
        symmetric=raw.get("symmetric", True),
        strategy=strategy,
        group_size=size if strategy in ("group", "tensor_group") else None,
        block=(int(block[0]), int(block[1])) if block and strategy == "block" else None,
        scale_dtype=_dtype_name(raw.get("scale_dtype")),
        dynamic=raw.get("dynamic", False),
    )
    if type(args.bits) is not int or type(args.symmetric) is not bool or args.dynamic not in (False, True, "local"):
        raise TypeError(f"num_bits {args.bits!r}, symmetric {args.symmetric!r}, dynamic {args.dynamic!r}")
    grouped = strategy in ("group", "tensor_group")
    if (grouped and not _positive(size)) or (strategy == "block" and not _positive(*args.block or (None,))):
        got = f"strategy {strategy} with group_size {size} and block_structure {block}"
        raise BadInput(f"{where}: {name}: {got}; expected sizes above 0, of 31 bits at most")
    return args


def _dtype_name(name: str | None) -> str | None:
    """With the prefix, which writers leave out now and then."""
    return None if name is None else f"torch.{name.removeprefix('torch.')}"


def _positive(*sizes: Any) -> bool:
    return all(type(size) is int and 0 < size < 1 << 31 for size in sizes)


def _beyond(table: Mapping[str, Any]) -> list[str]:
    groups = (table.get("config_groups") or {}).values()
    found = [role.replace("_", " ") for role in _ROLES[1:] if any(g.get(role) for g in groups)]
    return [*found, "KV cache"] if table.get("kv_cache_scheme") else found
