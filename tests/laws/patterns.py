"""Laws of masks: exact counts, the largest stay, stacks are masked one by one."""

from __future__ import annotations

import torch

from laws.shared import untouched
from ptq.numerics.patterns import NM, Pattern
from strategies import randn


def has_exact_counts(pattern: Pattern) -> None:
    for score in (randn(1, 3, 7, 40), torch.zeros(3, 7, 40), randn(1, 3, 7, 40).round()):
        if isinstance(pattern, NM):
            assert (pattern.mask(score).unflatten(-1, (-1, pattern.of)).sum(-1) == pattern.keep).all()
        else:
            pruned = [(~pattern.mask(score)).sum((-1, -2)), (~pattern.mask(score, per="row")).sum(-1)]
            assert (pruned[0] == int(280 * pattern.ratio)).all()
            assert (pruned[1] == int(40 * pattern.ratio)).all()


def keeps_the_largest(pattern: Pattern) -> None:
    score = randn(1, 7, 40).round(decimals=1)
    groups = score.unflatten(-1, (-1, pattern.of)) if isinstance(pattern, NM) else score
    mask = pattern.mask(score, per="row").view(groups.shape)
    for values, kept in zip(groups.flatten(0, -2).tolist(), mask.flatten(0, -2).tolist(), strict=True):
        ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
        assert {i for i, k in enumerate(kept) if k} == set(ranked[: sum(kept)])


def treats_stacks_one_by_one(pattern: Pattern) -> None:
    score = randn(1, 3, 7, 40).round(decimals=1)
    alone = torch.stack([pattern.mask(s) for s in score])
    with untouched(score):
        assert torch.equal(pattern.mask(score), alone)
        assert torch.equal(torch.func.vmap(pattern.mask)(score), alone)
