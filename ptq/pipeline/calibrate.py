"""Calibration as a value: statistics of a dense model that can be saved, merged, moved and used by many transforms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ptq.base import Stats
from ptq.errors import BadInput
from ptq.io.files import expanded
from ptq.models.call import Decoder, Observer, interpreted, measured, merge_stats
from ptq.models.model import Model
from ptq.models.probe import probe
from ptq.models.skeleton import from_module
from ptq.numerics.stats import KINDS
from ptq.pipeline.batches import at, few_tokens, micro_batches, row_mask, rows
from ptq.pipeline.place import computed, resolve
from ptq.pipeline.plan import label_table
from ptq.pipeline.weights import refuse_not_finite, refuse_unmeasured


def calibrate(
    model: Model | nn.Module,
    batches: Iterable[Any],
    kinds: Sequence[str] = ("gram",),
    *,
    device: str | torch.device = "auto",
    compute_dtype: str | torch.dtype = "auto",
    batch_size: int | None = None,
) -> Stats:
    """Measures what flows into the default targets of a model, in plain forwards.

    Args:
        model: as for `compress`.
        batches: as for `compress`.
        kinds: names of statistics: "gram", "second_moment", "absmax", "absmean", "range".
        device: as for `compress`.
        compute_dtype: as for `compress`.
        batch_size: as for `compress`.

    Returns:
        Site -> kind -> statistic, each stored once for all weights that read the same tensor.

    Raises:
        BadInput: a kind is unknown, or there is no data, or all of it is masked.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> stats = calibrate(net, [torch.ones(3, 2)], ["absmax"])
    >>> stats["0.weight"]["absmax"].max
    tensor([1., 1.])
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise BadInput(f"calibrate: unknown statistic {unknown[0]!r}; known: {', '.join(KINDS)}")
    source = model if isinstance(model, Model) else from_module(model)
    made = micro_batches(source, batches, batch_size)
    place = resolve(device, compute_dtype, source)
    example = few_tokens(made[0])
    trace = probe(source, *example.args, **example.kwargs)
    table = label_table(source, trace)
    wanted = [site for site, weights in trace.sites.items() if any(table[w].default for w in weights if w in table)]
    computing = computed(source, place)
    stats: Stats = {}
    for batch in (at(b, place) for b in made):
        mask = row_mask(batch)
        decode = Decoder(source.params, place.cast)  # a weight at a time, so that a model of any size can be measured
        watch = Observer(decode, dict.fromkeys(wanted, tuple(kinds)), lambda x, mask=mask: rows(x, mask))
        with torch.no_grad(), place.alone():
            interpreted(computing, source.state, watch, batch.args, batch.kwargs, place)
        stats = merge_stats(stats, watch.stats)
    refuse_unmeasured(stats)
    refuse_not_finite(stats)
    return stats


def save_stats(stats: Stats, path: str | Path) -> None:
    """Writes statistics to a safetensors file, which appears whole or not at all; outcomes of solves are left out."""
    target = expanded(path)
    tensors = {
        f"{site}/{kind}/{f.name}": getattr(statistic, f.name).contiguous()
        for site, seen in measured(stats).items()
        for kind, statistic in seen.items()
        for f in fields(statistic)
    }
    partial = target.with_name(f"{target.name}.partial")
    save_file(tensors, partial, metadata={"format": "ptq-stats"})
    partial.replace(target)


def load_stats(path: str | Path) -> Stats:
    """Reads what `save_stats` wrote.

    Raises:
        BadInput: the file is missing, truncated, or holds something else.
    """
    try:
        tensors = load_file(expanded(path))
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path}: cannot be read as statistics: {error}") from None
    parts: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        site, kind, name = _parts(key, path)
        parts.setdefault((site, kind), {})[name] = tensor
    stats: Stats = {}
    for (site, kind), values in parts.items():
        stats.setdefault(site, {})[kind] = _made(kind, values, path)
    return stats


def _parts(key: str, path: str | Path) -> tuple[str, str, str]:
    site, _, rest = key.partition("/")
    kind, _, name = rest.partition("/")
    if kind not in KINDS or not name:
        raise BadInput(f"{path}: {key!r} is no statistic; expected site/kind/field, as save_stats writes them")
    return site, kind, name


def _made(kind: str, values: Mapping[str, torch.Tensor], path: str | Path) -> Any:
    expected = {f.name for f in fields(KINDS[kind])}  # type: ignore[arg-type]  # every statistic is a node
    if set(values) != expected:
        raise BadInput(f"{path}: {kind} has fields {sorted(values)}, expected {sorted(expected)}")
    return KINDS[kind](**values)
