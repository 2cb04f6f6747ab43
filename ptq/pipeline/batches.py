"""From what people have to what the model is called with."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ptq.errors import BadInput
from ptq.models.call import flat_rows
from ptq.models.model import Model
from ptq.pipeline.place import Place
from ptq.pipeline.spine import Batch

_TOKENS = 4096  # of a micro-batch: enough for full GEMM speed, few enough to keep one layer's activations in memory


def micro_batches(model: Model, batches: Iterable[Any], batch_size: int | None = None) -> list[Batch]:
    """Materialises a calibration set as micro-batches; how it is cut changes results by rounding only.

    Args:
        model: its forward's signature is looked at.
        batches: token ids, `[tokens]` or `[samples, tokens]`, or mappings of keyword arguments such as a processor's
            output; or one tensor of samples. Samples of equal length are put together, so that nothing is padded.
        batch_size: samples in a micro-batch; default: as many as make about 4,096 tokens.

    Raises:
        BadInput: there is no batch, or one is neither a tensor nor a mapping.
    """
    rows: dict[int, list[Tensor]] = {}
    made: list[Batch] = []
    fixed = _fixed(model)
    if batch_size is not None and batch_size < 1:
        raise BadInput(f"batch size {batch_size}: expected at least 1 sample")
    for i, batch in enumerate(batches):
        if isinstance(batch, Mapping):
            _check_mask(i, batch)
            made.append(Batch((), {**batch, **fixed}))
        elif isinstance(batch, Tensor) and _is_ids(model, batch):
            for row in batch.reshape(-1, batch.shape[-1]):
                rows.setdefault(len(row), []).append(row)
        elif isinstance(batch, Tensor):
            made.append(Batch((batch,), fixed))
        else:
            raise BadInput(f"batch {i}: got {type(batch).__name__}, expected a tensor or a mapping of model inputs")
    made += [Batch((), {"input_ids": ids, **fixed}) for length in rows for ids in _stacked(rows[length], batch_size)]
    if not made:
        raise BadInput("calibration: got no batch; this recipe measures activations and needs data")
    return made


def _check_mask(i: int, batch: Mapping[str, Any]) -> None:
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape != ids.shape:
        raise BadInput(f"batch {i}: attention_mask is {tuple(mask.shape)}, expected input_ids' {tuple(ids.shape)}")


def _is_ids(model: Model, batch: Tensor) -> bool:
    if model.config is None or batch.is_floating_point():
        return False
    if batch.ndim not in (1, 2) or not batch.numel():
        raise BadInput(f"token ids of shape {tuple(batch.shape)}: expected [tokens] or [samples, tokens], not empty")
    return True


def _stacked(rows: list[Tensor], batch_size: int | None) -> Iterator[Tensor]:
    size = batch_size or max(1, _TOKENS // max(1, len(rows[0])))
    return (torch.stack(rows[i : i + size]) for i in range(0, len(rows), size))


def _fixed(model: Model) -> dict[str, Any]:
    """No cache wherever the forward takes the word, else every micro-batch would keep its keys and values."""
    if model.config is None:
        return {}
    parameters = inspect.signature(model.module.forward).parameters
    takes = "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"use_cache": False} if takes else {}


def few_tokens(batch: Batch) -> Batch:
    """The start of a batch of token ids, for a probe; a batch that holds more than ids is taken whole."""
    ids = batch.kwargs.get("input_ids")
    others = [v for k, v in batch.kwargs.items() if k != "input_ids" and isinstance(v, Tensor)]
    if not isinstance(ids, Tensor) or others:
        return batch
    return batch._replace(kwargs={**batch.kwargs, "input_ids": ids[:1, :8]})


def at(batch: Batch, place: Place) -> Batch:
    """The same batch where and as it is computed with: numbers in the forward's dtype, ids and masks as they are."""
    return pytree.tree_map(lambda t: place.cast(t.detach()) if isinstance(t, Tensor) else t, batch)


def row_mask(batch: Batch) -> Tensor | None:
    """The flattened attention mask, where one is given and it hides something: masked tokens count nowhere."""
    mask = batch.kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask.all()):
        return None
    return mask.flatten().bool()


def rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """An input as `[tokens, in]`, without masked tokens. Inputs of other lengths (a vision tower's) have no mask."""
    flat = flat_rows(x.detach())
    return flat[mask] if mask is not None and len(mask) == len(flat) else flat
