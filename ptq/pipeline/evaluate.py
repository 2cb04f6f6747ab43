"""How well a model predicts a text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ptq.errors import BadInput
from ptq.models.call import Decoder, interpreted
from ptq.models.model import Model
from ptq.pipeline.batches import at, micro_batches
from ptq.pipeline.place import Place, computed, resolve
from ptq.pipeline.spine import Batch

_CHUNK = 1 << 24  # logits in float32 at a time: 64 MiB


def perplexity(
    model: Model,
    batches: Iterable[Any],
    *,
    device: str | torch.device = "auto",
    compute_dtype: str | torch.dtype = "float32",
    batch_size: int | None = None,
) -> float:
    """The perplexity of a language model: `exp(mean(-log p(token | tokens before it in its window)))`.

    A window of L tokens has L - 1 such positions; all count alike. Weights are decoded one at a time, so a model that
    does not fit into memory can be evaluated.

    Args:
        model: one whose output has `logits`.
        batches: token ids `[tokens]` or `[samples, tokens]`, or mappings of model inputs with `input_ids`; masked
            positions do not count.
        device: where it runs; "auto": the first CUDA device, else the CPU.
        compute_dtype: of the forward, as in `compress`; the loss is computed in float32 in any case.
        batch_size: samples in a forward; default: about 4,096 tokens.

    Raises:
        BadInput: there is nothing to predict; the model does not predict the next token, has no logits, or they are
            not finite or enormous.
    """
    _refuse_other_tasks(model)
    place = resolve(device, compute_dtype, model)
    computing = computed(model, place)
    loss, count = 0.0, 0
    for batch in (at(b, place) for b in micro_batches(model, batches, batch_size)):
        labels = _labels(batch)
        logits = _logits(computing, batch, place)[:, :-1]
        loss += _loss(logits, labels.to(logits.device))
        count += int((labels >= 0).sum())
    if not count:
        raise BadInput("perplexity: no position to predict; give windows of at least 2 tokens")
    if not math.isfinite(loss):
        raise BadInput(f"{type(model.module).__name__}: its logits are NaN or infinite; look at its weights")
    try:
        return math.exp(loss / count)
    except OverflowError:
        where = f"{type(model.module).__name__}: a mean loss of {loss / count:.0f}"
        raise BadInput(f"{where} is beyond what a perplexity can say; look at its weights") from None


def _refuse_other_tasks(model: Model) -> None:
    """Those of transformers that fill gaps, or write something else than what they read."""
    module: Any = model.module
    translates = bool(getattr(model.config, "is_encoder_decoder", False))
    if translates or not getattr(module, "can_generate", lambda: True)():
        what = "writes another text than it reads" if translates else "does not predict what follows"
        raise BadInput(f"{type(module).__name__} {what}; perplexity is of causal language models")


def _logits(model: Model, batch: Batch, place: Place) -> Tensor:
    with torch.no_grad(), place.alone():
        decode = Decoder(model.params, place.cast)
        out = interpreted(model, model.state, decode, batch.args, batch.kwargs, place)
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor):
        raise BadInput(f"{type(model.module).__name__}: its output has no logits; perplexity needs a language model")
    return logits


def _labels(batch: Batch) -> Tensor:
    """What each position but the last should predict, `[samples, tokens - 1]`; -100 where it does not count."""
    if "input_ids" not in batch.kwargs:
        raise BadInput(f"perplexity: got a batch of {sorted(batch.kwargs)}, expected input_ids")
    ids, mask = batch.kwargs["input_ids"], batch.kwargs.get("attention_mask")
    counts = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    return ids[:, 1:].masked_fill(~(counts[:, 1:] & counts[:, :-1]), -100)


def _loss(logits: Tensor, labels: Tensor) -> float:
    """The summed cross entropy, without a float32 copy of all logits `[samples, tokens, vocabulary]`."""
    step = max(1, _CHUNK // logits.shape[-1])
    pairs = (
        (a[i : i + step], b[i : i + step]) for a, b in zip(logits, labels, strict=True) for i in range(0, len(a), step)
    )
    return math.fsum(F.cross_entropy(a.float(), b, reduction="sum").item() for a, b in pairs)
