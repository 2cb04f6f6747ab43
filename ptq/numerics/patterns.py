"""What a pruned weight's mask obeys: exact counts, in any comparison group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ptq.errors import BadInput


@dataclass(frozen=True)
class Unstructured:
    """Prunes exactly `int(numel * ratio)` entries of a comparison group, those of lowest score.

    >>> import torch
    >>> Unstructured(0.5).mask(torch.tensor([[4.0, 1.0, 3.0, 2.0]]))
    tensor([[ True, False,  True, False]])
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise BadInput(f"Unstructured: got ratio {self.ratio}, expected 0 <= ratio < 1")

    def check(self, columns: int) -> None:
        """Any width will do."""

    def mask(self, score: Tensor, per: str = "tensor") -> Tensor:
        """The mask of what stays, for scores `[*e, out, in]`; `per` is the comparison group, "row" or "tensor".

        Ties go by position, so that the counts are exact: the published code's threshold prunes one entry more.
        """
        if per not in ("row", "tensor"):
            raise BadInput(f"mask: got per={per!r}, expected 'row' or 'tensor'")
        groups = score if per == "row" else score.flatten(-2)
        return _keep_largest(groups, groups.shape[-1] - int(groups.shape[-1] * self.ratio)).view(score.shape)


@dataclass(frozen=True)
class NM:
    """Keeps exactly `keep` of each `of` consecutive inputs: NM(keep=2, of=4) is what sparse tensor cores run.

    >>> import torch
    >>> NM(keep=2, of=4).mask(torch.tensor([[4.0, 1.0, 3.0, 2.0]]))
    tensor([[ True, False,  True, False]])
    """

    keep: int
    of: int

    def __post_init__(self) -> None:
        if not 0 < self.keep <= self.of:
            raise BadInput(f"NM: got keep={self.keep} of={self.of}, expected 0 < keep <= of")

    def check(self, columns: int) -> None:
        """Refuses a width that the groups do not divide."""
        if columns % self.of:
            raise BadInput(
                f"{self.keep} of {self.of}: does not divide {columns} inputs; choose a group that does, or leave it out"
            )

    def mask(self, score: Tensor, per: str = "row") -> Tensor:
        """The mask of what stays, for scores `[*e, out, in]`; groups never cross rows, so `per` changes nothing."""
        self.check(score.shape[-1])
        return _keep_largest(score.unflatten(-1, (-1, self.of)), self.keep).flatten(-2)


Pattern = Unstructured | NM


def _keep_largest(score: Tensor, count: int) -> Tensor:
    """True at the `count` largest of the last dimension; among equals the first. A selection is faster than a sort."""
    threshold = score.kthvalue(score.shape[-1] - count + 1, dim=-1, keepdim=True).values
    larger, equal = score > threshold, score == threshold
    return larger | (equal & (equal.cumsum(-1) <= count - larger.sum(-1, keepdim=True)))
