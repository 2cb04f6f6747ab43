"""The published loops, column by column with an explicit inverse: to be compared with in float64, not to be fast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def damped(gram: Tensor, damp: float) -> Tensor:
    return gram + damp * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)


def upper(h: Tensor) -> Tensor:
    """U of `H^-1 = U'U`, by the inverse."""
    return torch.linalg.cholesky(torch.linalg.inv(h), upper=True)


def gptq(w: Tensor, gram: Tensor, column: Callable[[Tensor, int], Tensor], damp: float, order: Tensor) -> Tensor:
    """`column(values, j)` rounds column j of the weight; `order` is the order of the columns."""
    w, u, q = w[:, order].clone(), upper(damped(gram, damp)[order][:, order]), torch.zeros_like(w)
    for i in range(w.shape[1]):
        q[:, i] = column(w[:, i], int(order[i]))
        w[:, i:] -= ((w[:, i] - q[:, i]) / u[i, i])[:, None] * u[i, i:]
    return q[:, order.argsort()]


def sparsegpt(
    w: Tensor,
    gram: Tensor,
    damp: float,
    *,
    ratio: float = 0.0,
    n_of_m: tuple[int, int] | None = None,
    block: int = 128,
    column: Callable[[Tensor, int], Tensor] = lambda values, j: values,
) -> tuple[Tensor, Tensor]:
    """The pruned weight and what it keeps: exactly `int(ratio * numel)` less in each block, or n of each m."""
    w, u, q = w.clone(), upper(damped(gram, damp)), torch.zeros_like(w)
    kept = torch.ones_like(w, dtype=torch.bool)
    span = n_of_m[1] if n_of_m else block
    for i in range(w.shape[1]):
        if i % span == 0:
            stop = min(i + span, w.shape[1])
            score = w[:, i:stop] ** 2 / u.diagonal()[i:stop] ** 2
            kept[:, i:stop] = _rows_kept(score, n_of_m[0]) if n_of_m else _block_kept(score, ratio)
        q[:, i] = torch.where(kept[:, i], column(w[:, i], i), 0)
        w[:, i:] -= ((w[:, i] - q[:, i]) / u[i, i])[:, None] * u[i, i:]
    return q, kept


def _rows_kept(score: Tensor, keep: int) -> Tensor:
    kept = torch.zeros_like(score, dtype=torch.bool)
    for row, values in enumerate(score.tolist()):
        for j in sorted(range(len(values)), key=lambda j, v=values: -v[j])[:keep]:
            kept[row, j] = True
    return kept


def _block_kept(score: Tensor, ratio: float) -> Tensor:
    order = sorted(range(score.numel()), key=score.flatten().tolist().__getitem__)
    kept = torch.ones(score.numel(), dtype=torch.bool)
    kept[order[: int(score.numel() * ratio)]] = False
    return kept.view(score.shape)
