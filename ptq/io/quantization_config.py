"""The `quantization_config` of a compressed-tensors checkpoint: which module is stored how.

Reading is lenient, since files of many writers are about; writing keeps to what every loader takes: the format at the
top and in every group, six fields per scheme, full names in `ignore`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ptq.errors import BadInput

VERSION = "0.20.1"  # the compressed-tensors whose layout is written; 0.18 changed how 3, 5, 6 and 7 bits are packed


KEYS = ("quantization_config", "compression_config")
"""where a config has it, the old name last"""


_BITS = {"int": range(1, 9), "float": (4, 6, 8)}
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


class Args(NamedTuple):
    """How the weights of some modules are stored."""

    format: str | None
    bits: int
    kind: str
    """int or float"""
    symmetric: bool
    strategy: str
    """tensor, channel, group, tensor_group (groups whose scales share a divisor) or block"""
    group_size: int | None = None
    block: tuple[int, int] | None = None
    """rows, columns"""
    scale_dtype: str | None = None
    """of scales that are no floats"""


class Group(NamedTuple):
    """Modules and their scheme."""

    targets: tuple[str, ...]
    weights: Args


class Config(NamedTuple):
    """What a reader needs to know."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    version: tuple[int, ...]
    packed: bool
    """False where weights are stored in float, with the scales they were rounded by beside them"""
    beyond: str
    """what the file asks for besides weights, in words; empty: nothing"""

    def args(self, name: str, classes: Sequence[str]) -> Args | None:
        """The scheme of a module, in the library's order: exact name, then regexes by their text, then classes.

        Args:
            name: the module's name in the checkpoint.
            classes: its class and the classes that it inherits from.
        """
        if any(_matches(pattern, name, classes) for pattern in self.ignore):
            return None
        table = {target: group.weights for group in self.groups for target in group.targets}
        ranked = sorted(table, key=lambda target: (target != name, not target.startswith("re:"), target))
        return next((table[target] for target in ranked if _matches(target, name, classes)), None)


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
        raise BadInput(f"{where}: quantized by {method!r}, which is not read; expected compressed-tensors or nothing")
    groups: dict[str, Any] = {n: g for n, g in table.get("config_groups", {}).items() if g.get("weights")}
    digits = re.findall(r"\d+", str(table.get("version", VERSION)))
    return Config(
        groups=tuple(_group(name, group, table, where) for name, group in groups.items()),
        ignore=tuple(table.get("ignore") or ()),
        version=tuple(int(d) for d in digits[:2]),
        packed=table.get("quantization_status", "compressed") == "compressed",
        beyond=", ".join(_beyond(table)),
    )


def dump(
    modules: Mapping[Args, Sequence[str]],
    ignore: Sequence[str],
    by_class: bool = True,
    sparsity: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The configuration of a checkpoint.

    Args:
        modules: scheme -> names of the modules that have it.
        ignore: names of all other linears.
        by_class: whether a class may be the target where all have one scheme; transformers and vLLM both take it for
            every linear not ignored, fused ones and experts too. Else targets are full names, which are disjoint, so
            that the two orders of matching cannot differ.
        sparsity: the `sparsity_config` of pruned weights that are not stored dense, which no loader of today takes.
    """
    formats = {str(args.format) for args in modules} or {"dense"}
    groups = {
        f"group_{i:03}" if len(modules) > 10 else f"group_{i}": {  # loaders sort these names as text
            "targets": ["Linear"] if by_class and len(modules) == 1 else list(names),
            "weights": _weights(args),
            "input_activations": None,
            "output_activations": None,
            "format": args.format,
        }
        for i, (args, names) in enumerate(modules.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "version": VERSION,
        "format": next(iter(formats)) if len(formats) == 1 else "mixed-precision",
        "quantization_status": "frozen" if formats == {"dense"} else "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "sparsity_config": dict(sparsity or {}),
        "transform_config": {},
        "global_compression_ratio": None,
    }


def _weights(args: Args) -> dict[str, Any]:
    """Six fields that every reader knows, and what the format cannot be told without."""
    fields = {
        "num_bits": args.bits,
        "type": args.kind,
        "symmetric": args.symmetric,
        "strategy": args.strategy,
        "group_size": args.group_size,
        "dynamic": False,
    }
    told = args.format in ("mxfp6-pack-quantized", "mxfp8-quantized")
    block = {"block_structure": list(args.block)} if args.block else {}
    return fields | block | ({"scale_dtype": args.scale_dtype} if told else {})


def _group(name: str, group: Mapping[str, Any], table: Mapping[str, Any], where: Path) -> Group:
    weights: dict[str, Any] = group["weights"]
    form = group.get("format") or table.get("format")
    size, block = weights.get("group_size"), weights.get("block_structure")
    if isinstance(block, str):  # "128x128" in old files
        block = block.lower().split("x")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or inferred
    if form == "marlin-24":
        raise BadInput(f"{where}: {name}: format marlin-24 is not read; start from the weights that it was made of")
    args = Args(
        format=form,
        bits=weights.get("num_bits", 8),
        kind=str(weights.get("type", "int")).lower(),
        symmetric=weights.get("symmetric", True),
        strategy=strategy,
        group_size=size if strategy in ("group", "tensor_group") else None,
        block=(int(block[0]), int(block[1])) if block and strategy == "block" else None,
        scale_dtype=weights.get("scale_dtype"),
    )
    if type(args.bits) is not int:
        raise TypeError(f"num_bits {args.bits!r}")
    grouped = strategy in ("group", "tensor_group")
    if (grouped and not _positive(size)) or (strategy == "block" and not _positive(*args.block or (None,))):
        got = f"strategy {strategy} with group_size {size} and block_structure {block}"
        raise BadInput(f"{where}: {name}: {got}; expected sizes above 0")
    if args.bits not in _BITS.get(args.kind, ()) or strategy not in _STRATEGIES:
        what = f"{args.kind} {args.bits} bit, strategy {strategy}, format {form}"
        raise BadInput(f"{where}: {name}: {what} is not read; expected int of 1 to 8 bits or float of 4, 6 or 8")
    return Group(tuple(group.get("targets") or ()), args)


def _positive(*sizes: Any) -> bool:
    return all(type(size) is int and size > 0 for size in sizes)


def _beyond(table: Mapping[str, Any]) -> list[str]:
    groups = table.get("config_groups", {}).values()
    kinds = ("input_activations", "output_activations")
    found = [kind.replace("_", " ") for kind in kinds if any(g.get(kind) for g in groups)]
    found += ["KV cache"] if table.get("kv_cache_scheme") else []
    return found + (["transforms"] if (table.get("transform_config") or {}).get("config_groups") else [])


def _matches(target: str, name: str, classes: Sequence[str]) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target == name or target in classes
