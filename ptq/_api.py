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
from ptq.io.hub import load as load, open_model as open_model
from ptq.io.save import save as save
from ptq.models.call import call as call, merge_stats as merge_stats, observe as observe
from ptq.models.model import Model as Model
from ptq.models.skeleton import from_module as from_module
from ptq.numerics import obs as obs
from ptq.numerics.grids import Float8 as Float8, Int as Int
from ptq.numerics.leaves import (
    Quantized as Quantized,
    Sparse as Sparse,
    Transposed as Transposed,
    dense as dense,
    linear as linear,
    nbytes as nbytes,
    take as take,
)
from ptq.numerics.patterns import NM as NM, Unstructured as Unstructured
from ptq.numerics.projections import Projection as Projection, affine as affine, prune as prune, then as then
from ptq.numerics.schemes import Scheme as Scheme, scheme as scheme
from ptq.numerics.stats import (
    AbsMax as AbsMax,
    AbsMean as AbsMean,
    Gram as Gram,
    Range as Range,
    SecondMoment as SecondMoment,
)
from ptq.pipeline.calibrate import calibrate as calibrate, load_stats as load_stats, save_stats as save_stats
from ptq.pipeline.data import tokens as tokens
from ptq.pipeline.evaluate import perplexity as perplexity
from ptq.pipeline.run import Run as Run, compress as compress
from ptq.pipeline.scan import Block as Block
from ptq.recipes.presets import recipe as recipe
from ptq.transforms.fold import fold_norms as fold_norms
from ptq.transforms.gptq import gptq as gptq
from ptq.transforms.magnitude import magnitude as magnitude
from ptq.transforms.rtn import rtn as rtn
from ptq.transforms.sparsegpt import sparsegpt as sparsegpt
from ptq.transforms.wanda import wanda as wanda
