"""The public names of ptq, `x as x`."""

from __future__ import annotations

from ptq import errors as errors
from ptq.base import (
    Link as Link,
    Outcome as Outcome,
    State as State,
    Transform as Transform,
    chain as chain,
    identity as identity,
    leafwise as leafwise,
    partition as partition,
    targets as targets,
)
from ptq.numerics.grids import Float8 as Float8, Int as Int
from ptq.numerics.leaves import (
    Quantized as Quantized,
    Sparse as Sparse,
    Transposed as Transposed,
    dense as dense,
)
from ptq.numerics.patterns import NM as NM, Unstructured as Unstructured
from ptq.numerics.stats import (
    AbsMax as AbsMax,
    AbsMean as AbsMean,
    Gram as Gram,
    Range as Range,
    SecondMoment as SecondMoment,
)
