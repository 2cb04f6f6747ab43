"""Named recipes: `<algorithm>-<what>[-g<group>]`, such as `gptq-w4a16-g64` and `sparsegpt-2of4`.

    rtn | gptq                      - FORMAT
    magnitude | wanda | sparsegpt   - NofM | P [- FORMAT]

FORMAT is `w2a16` to `w8a16` or `fp8a16`, with `-gN` for groups of N inputs, `-bN` for blocks of N x N, and without them
one scale per output channel; or `nvfp4a16`, `mxfp4a16`, `mxfp6a16`, `mxfp8a16`, whose groups are fixed. After a pruner
`fp8` is enough. `NofM` keeps N of each M inputs, `P` prunes P percent. A pruner that is followed by a number format
quantizes what is left: sparsegpt in the same sweep, the others by rounding to nearest.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from ptq.base import Stage, chain
from ptq.errors import BadInput
from ptq.numerics.patterns import NM, Pattern, Unstructured
from ptq.numerics.schemes import Scheme, scheme as make_scheme
from ptq.transforms.gptq import gptq
from ptq.transforms.magnitude import magnitude
from ptq.transforms.rtn import rtn
from ptq.transforms.sparsegpt import sparsegpt
from ptq.transforms.wanda import wanda

PRESETS: Mapping[str, str] = {
    "rtn-w8a16": "round to nearest, 8-bit weights, a scale per output channel; needs no data",
    "rtn-w4a16-g64": "round to nearest, 4-bit weights in groups of 64; needs no data",
    "rtn-fp8a16": "round to nearest, float8 e4m3 weights, a scale per output channel; needs no data",
    "rtn-nvfp4a16": "round to nearest, e2m1 weights in groups of 16 with float8 scales; needs no data",
    "rtn-mxfp4a16": "round to nearest, e2m1 weights in groups of 32 with power-of-two scales; needs no data",
    "gptq-nvfp4a16": "GPTQ, e2m1 weights in groups of 16 with float8 scales",
    "gptq-mxfp4a16": "GPTQ, e2m1 weights in groups of 32 with power-of-two scales",
    "gptq-w8a16": "GPTQ, 8-bit weights, a scale per output channel",
    "gptq-w4a16": "GPTQ, 4-bit weights, a scale per output channel",
    "gptq-w4a16-g128": "GPTQ, 4-bit weights in groups of 128",
    "gptq-w4a16-g64": "GPTQ, 4-bit weights in groups of 64",
    "gptq-w3a16-g64": "GPTQ, 3-bit weights in groups of 64",
    "magnitude-50": "the smaller half of each weight pruned; needs no data",
    "magnitude-2of4": "the 2 larger of each 4 weights kept; needs no data",
    "wanda-50": "Wanda, half of each row pruned",
    "wanda-2of4": "Wanda, 2 of each 4 weights kept",
    "wanda-2of4-fp8": "Wanda, 2 of each 4 weights kept, those in float8 e4m3",
    "sparsegpt-50": "SparseGPT, half of the weights pruned",
    "sparsegpt-2of4": "SparseGPT, 2 of each 4 weights kept",
    "sparsegpt-2of4-fp8": "SparseGPT, 2 of each 4 weights kept, those in float8 e4m3, in one sweep",
    "sparsegpt-2of4-w4a16-g64": "SparseGPT, 2 of each 4 weights kept, those in 4 bits in groups of 64, in one sweep",
}
"""the recipes that `ptq recipes` lists; the grammar has more"""

_FORMAT = r"(?P<format>w[2-8]a16|fp8(?:a16)?|nvfp4a16|mxfp[468]a16)(?:-g(?P<group>\d+)|-b(?P<block>\d+))?"
_QUANTIZE = re.compile(rf"(?P<algorithm>rtn|gptq)-{_FORMAT}")
_PRUNE = re.compile(
    rf"(?P<algorithm>magnitude|wanda|sparsegpt)-(?:(?P<keep>\d+)of(?P<of>\d+)|(?P<percent>\d+))(?:-{_FORMAT})?"
)
_KNOWN = "`ptq recipes` lists the named ones"


def recipe(name: str) -> tuple[Stage, ...]:
    """The stages that a name stands for: what `compress(model, batches, *stages)` takes.

    Args:
        name: by the grammar above, in any case.

    Raises:
        BadInput: no such recipe; names those that come near.

    >>> [len(stage) for stage in recipe("wanda-2of4-fp8")]
    [2]
    """
    if match := _QUANTIZE.fullmatch(name.lower()):
        return (_quantized(match["algorithm"], _scheme(match)),)
    if match := _PRUNE.fullmatch(name.lower()):
        return (_pruned(match["algorithm"], _pattern(match), _scheme(match) if match["format"] else None),)
    if name.endswith((".yaml", ".yml")):
        raise BadInput(f"recipe {name}: recipe files are not read by this version; {_KNOWN}")
    near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
    raise BadInput(f"unknown recipe {name!r}; {'near: ' + ', '.join(near) if near else _KNOWN}")


def _quantized(algorithm: str, scheme: Scheme) -> Stage:
    return chain(gptq(scheme) if algorithm == "gptq" else rtn(scheme))


def _pruned(algorithm: str, pattern: Pattern, scheme: Scheme | None) -> Stage:
    if algorithm == "sparsegpt":
        return chain(sparsegpt(pattern, scheme))
    pruned = magnitude(pattern) if algorithm == "magnitude" else wanda(pattern)
    return chain(pruned, rtn(scheme)) if scheme else chain(pruned)


def _pattern(match: re.Match[str]) -> Pattern:
    if match["percent"]:
        return Unstructured(int(match["percent"]) / 100)
    return NM(keep=int(match["keep"]), of=int(match["of"]))


def _scheme(match: re.Match[str]) -> Scheme:
    name = "FP8A16" if match["format"].startswith("fp8") else match["format"]
    if match["block"]:
        size = int(match["block"])
        return make_scheme(name, block=(size, size))
    fixed = name.startswith(("nvfp4", "mxfp")) and not match["group"]
    return make_scheme(name, group_size=None if fixed else int(match["group"] or -1))
