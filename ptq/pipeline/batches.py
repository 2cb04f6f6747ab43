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
        batch_size: samples in a micro-batch; default: as many as make about 4,096 tokens. A mapping is cut where
            samples run along dimension 0 of all its tensors, and stays whole where these do not agree on how many
            there are (images as one list of patches); so does a tensor that is no token ids.

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
            made += [Batch((), {**part, **fixed}) for part in _cut(batch, batch_size)]
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
    size = batch_size or _default_size(len(rows[0]))
    return (torch.stack(rows[i : i + size]) for i in range(0, len(rows), size))


def _default_size(length: int) -> int:
    return max(1, _TOKENS // max(1, length))


def _cut(batch: Mapping[str, Any], batch_size: int | None) -> list[Mapping[str, Any]]:
    samples, ids = _samples(batch), batch.get("input_ids")
    if samples is None:
        return [batch]
    size = batch_size or (_default_size(ids.shape[1]) if isinstance(ids, Tensor) else samples)
    return [_part(batch, slice(i, i + size)) for i in range(0, samples, size)] if samples > size else [batch]


def _samples(batch: Mapping[str, Any]) -> int | None:
    """How many samples run along dimension 0 of all tensors; None where that cannot be told."""
    tensors = [v for v in batch.values() if isinstance(v, Tensor)]
    plain = all(v is None or isinstance(v, (Tensor, bool, int, float, str)) for v in batch.values())
    sizes = {len(t) if t.ndim >= 2 else None for t in tensors}
    return sizes.pop() if plain and len(sizes) == 1 else None


def _part(batch: Mapping[str, Any], at: Any) -> dict[str, Any]:
    return {name: v[at] if isinstance(v, Tensor) else v for name, v in batch.items()}


def _fixed(model: Model) -> dict[str, Any]:
    """No cache wherever the forward takes the word, else every micro-batch would keep its keys and values."""
    if model.config is None:
        return {}
    parameters = inspect.signature(model.module.forward).parameters
    takes = "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"use_cache": False} if takes else {}


def few_tokens(batch: Batch, tokens: int = 8) -> Batch:
    """The start of a batch: whole samples of so many tokens, one at least, where samples can be told apart.

    Of a longer one the first tokens, where there is no more than ids, and masks that hide none of these.
    """
    if _samples(batch.kwargs) is None:
        return batch
    ids = batch.kwargs.get("input_ids")
    length = ids.shape[1] if isinstance(ids, Tensor) else tokens
    first = batch._replace(kwargs=_part(batch.kwargs, slice(max(1, tokens // max(1, length)))))
    few = batch._replace(kwargs=_part(first.kwargs, (slice(None), slice(tokens))))
    shapes = {v.shape for v in first.kwargs.values() if isinstance(v, Tensor)}
    return few if "input_ids" in first.kwargs and len(shapes) == 1 and row_mask(few) is None else first


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
