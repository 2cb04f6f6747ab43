"""Names for the shapes that signatures speak of. Dimensions are always `out`, `in`, `groups`, `tokens` and `*e`."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int8
from torch import Tensor

Weight = Float[Tensor, "*e out in"]
Scale = Float[Tensor, "*e rows groups"]
Codes = Int8[Tensor, "*e out in"]
Mask = Bool[Tensor, "*e out in"]
Rows = Float[Tensor, "*e tokens in"]
GramMatrix = Float[Tensor, "*e in in"]
Diagonal = Float[Tensor, "*e in"]
