"""All that computes stays on one device: checked on the CPU, by tensors whose device says cuda.

Everything runs under `FakeTensorMode`, which has no values, and on a pretended device, which has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from conftest import CONFIGS, VOCABULARY, stock
from contracts import GRIDS, LEAVES, PATTERNS, PROJECTIONS, SOLVES, STATISTICS
from laws import reparams, solves
from laws.shared import IN, OUT, W4, leaf
from pretend import PretendCuda, Watch, alone, everywhere, fake, on_cuda, there
from ptq._tree import tensors, tree_map
from ptq.base import State, Transform, leafwise
from ptq.errors import BadInput, NotPositiveDefinite
from ptq.models.call import Decoder, Observer, interpreted, stand_ins
from ptq.models.interpret import Use
from ptq.models.model import Model
from ptq.models.skeleton import from_module
from ptq.numerics import obs
from ptq.numerics.fits import FITS, Fit, fit, nearest
from ptq.numerics.grids import Grid
from ptq.numerics.leaves import Transposed, dense, linear, nbytes, take, validate
from ptq.numerics.packing import pack, pack_down, unpack, unpack_down
from ptq.numerics.patterns import Pattern
from ptq.numerics.projections import Projection
from ptq.numerics.schemes import Scheme
from ptq.numerics.stats import KINDS, Statistic
from ptq.pipeline.batches import at
from ptq.pipeline.place import Place, computed, resolve
from ptq.pipeline.spine import Batch, Spine, Stop
from ptq.transforms.fold import fold_norms
from ptq.transforms.gptq import gptq
from strategies import SCHEMES, correlated, gram, randn

Mode = FakeTensorMode | PretendCuda
MODES: dict[str, Callable[[], Mode]] = {"fake": fake, "pretended": PretendCuda}
VALUES = pytest.mark.parametrize("mode", ["pretended"], indirect=True)
"""for what decides by values, which fake tensors have none of"""


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    return MODES[request.param]()


@pytest.mark.parametrize("kind", STATISTICS)
def test_statistics(mode: Mode, kind: str) -> None:
    cls: type[Statistic] = STATISTICS[kind]
    with mode:
        x, s, r = on_cuda((correlated(1, 3, 20, IN), randn(2, IN), randn(3, IN, IN)))
        with alone():
            seen = cls.zero(IN, experts=(3,), device=x.device).update(x).merge(cls.measure(x)).rescale(s)
            assert there(seen)
            with contextlib.suppress(BadInput):
                assert there(seen.rotate(r))
        assert {t.device.type for t in tensors(tree_map(Tensor.cpu, seen).merge(seen))} == {"cpu"}


@pytest.mark.parametrize("name", GRIDS)
def test_grids(mode: Mode, name: str) -> None:
    grid: Grid = GRIDS[name]
    with mode:
        w = on_cuda(randn(1, OUT, IN).float())
        with alone():
            assert there(grid.decode(grid.encode(grid.round(w))))


@pytest.mark.parametrize("per", ["row", "tensor"])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(mode: Mode, name: str, per: str) -> None:
    pattern: Pattern = PATTERNS[name]
    with mode:
        w = on_cuda(randn(1, 3, OUT, 40))
        with alone():
            assert there(pattern.mask(w.abs(), per))


@pytest.mark.parametrize("method", FITS)
@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_fits(mode: Mode, how: Scheme, method: Fit) -> None:
    with mode:
        w, importance = on_cuda((randn(1, 3, OUT, IN), randn(2, 3, IN).abs()))
        with alone():
            quantized = nearest(w, how, fit(w, how, method, importance))
            assert there((quantized, dense(quantized)))


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing(mode: Mode, bits: int) -> None:
    with mode:
        codes = on_cuda(torch.zeros(OUT, 37, dtype=torch.int8))
        with alone():
            assert there((unpack(pack(codes, bits), bits, 37), unpack_down(pack_down(codes, bits), bits, OUT)))


@pytest.mark.parametrize("kind", LEAVES)
def test_leaves(mode: Mode, kind: str) -> None:
    with mode:
        x = on_cuda(leaf(kind, 3))
        rows = on_cuda(randn(1, 5, x.shape[-1], dtype=torch.bfloat16))
        with alone():
            assert x.device.type == "cuda"
            assert there((dense(x), linear(rows, take(x, 1))))
            assert nbytes(x) > 0


@VALUES
def test_validation(mode: Mode) -> None:
    with mode:
        x = on_cuda(leaf("int4"))
        with alone():
            assert there(validate(x, "w"))


@pytest.mark.parametrize("order", [None, "activation"])
@pytest.mark.parametrize("sign", [1, -1], ids=["definite", "indefinite"])
def test_factors(mode: Mode, sign: int, order: Any) -> None:
    with mode:
        g = on_cuda(sign * gram(1, IN, experts=(3,)))
        with alone():
            assert there(obs.inverse_factor(g, order=order))


@VALUES
def test_a_failed_factorization_raises(mode: Mode) -> None:
    with mode, pytest.raises(NotPositiveDefinite):
        obs.inverse_factor(on_cuda(-gram(1, IN)), on_failure="raise")


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections(mode: Mode, name: str) -> None:
    with mode:
        projection: Projection = PROJECTIONS[name]()
        w, g = on_cuda((randn(1, OUT, IN), gram(2, IN)))
        with alone():
            factor = obs.inverse_factor(g)
            results = obs.sweep(w, factor, projection), obs.project(w, projection, factor.importance)
            assert there((results, obs.project(w, projection, torch.ones_like(factor.importance))))


@pytest.mark.parametrize("stored", ["matrix", "stacked", "transposed"])
@pytest.mark.parametrize("name", SOLVES)
def test_solves(mode: Mode, name: str, stored: str) -> None:
    transform: Transform = SOLVES[name]()
    experts = (3,) if stored == "stacked" else ()
    with mode:
        w, x = on_cuda((randn(0, *experts, OUT, IN), correlated(1, *experts, 64, IN)))
        state = State({"a.weight": Transposed(w) if stored == "transposed" else w})
        with alone():
            stats = solves.site(transform, state, x)
            assert there(transform.apply(state, stats, {"a.weight": ("a.weight",)}))


@VALUES
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_folding(mode: Mode, offset: float) -> None:
    with mode:
        state, sites, links = reparams.case(offset=offset)
        state, x = on_cuda((state, randn(1, 50, IN)))
        with alone():
            stats = {"a.weight": {kind: cls.measure(x) for kind, cls in KINDS.items()}}
            assert there(fold_norms().apply(state, stats, sites, links=links))


# What goes wrong where nobody looks: each of these runs on the CPU.
CULPRITS: dict[str, Callable[[Tensor], Tensor]] = {
    "a constant": lambda w: w + torch.linspace(0, 1, w.shape[-1], dtype=w.dtype),
    "a mask": lambda w: torch.where(torch.arange(w.shape[-1]) % 2 == 0, w, 0.0),
    "an index": lambda w: w.index_select(-1, torch.arange(w.shape[-1])),
    "a buffer": lambda w: torch.empty(w.shape, dtype=w.dtype).mul_(w),
    "a stack": lambda w: torch.stack([w[0], *torch.zeros(len(w) - 1, w.shape[1], dtype=w.dtype)]),
    "a number": lambda w: w * torch.zeros((), dtype=w.dtype).add_(w[0, 0]),
}


@pytest.mark.parametrize("culprit", CULPRITS)
def test_mixing_is_caught(mode: Mode, culprit: str) -> None:
    guilty = leafwise((), CULPRITS[culprit])
    with mode, pytest.raises(RuntimeError, match=r"same device|wrong device"):
        guilty.apply(State({"a.weight": on_cuda(randn(1, OUT, IN))}), {}, {"a.weight": ("a.weight",)})


def test_a_detour_is_caught(mode: Mode) -> None:
    with mode:
        w = on_cuda(randn(1, OUT, IN))
        with pytest.raises(AssertionError), alone():
            w.cpu().abs().to("cuda")


def float32(model: Model) -> Model:
    """With buffers of that dtype: which of them are recomputed depends on their values."""
    return computed(model, Place(torch.device("cpu"), torch.float32))


def test_a_forward_and_what_it_shows(family: str) -> None:
    model = from_module(stock(CONFIGS[family]()))
    kinds = {name: tuple(KINDS) for name, leaf in model.params.items() if len(leaf.shape) == 2}
    ids, model = torch.randint(VOCABULARY, (2, 24)), float32(model)
    with PretendCuda(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the others are kernels of a real device
        place = resolve("cuda", "float32", model)
        batch = at(Batch((), {"input_ids": ids, "use_cache": False}), place)
        computing = computed(model, place._replace(dtype=None))
        watch = Observer(Decoder(model.params, place.cast), kinds)
        out = interpreted(computing, model.state, watch, batch.args, batch.kwargs, place)
        assert there((out.logits, watch.stats))
        assert len(watch.stats) >= 8


def test_the_spine() -> None:
    model = float32(from_module(stock(CONFIGS["llama"]())))
    path = "model.layers.1"
    site = f"{path}.self_attn.q_proj.weight"
    with everywhere(PretendCuda()), sdpa_kernel(SDPBackend.MATH):
        place = resolve("cuda", "float32", model)
        batches = [at(Batch((), {"input_ids": torch.randint(VOCABULARY, (1, n))}), place) for n in (9, 24)]
        handles = stand_ins(model.params, place.dtype, place.device)

        def read(use: Use) -> Tensor:
            return place.cast(dense(model.params[use.name]))

        stops = {site: Stop(1, 1, site)}
        module = computed(model, place._replace(dtype=None)).module
        with Spine(module, handles, model.aliases, batches, read, stops, {path: Stop(1, 0, path)}) as spine:
            brought = (tensors(list(spine.waiting[stop].shapes())) for stop in spine)
            arrived = [there([x for x in each if isinstance(x, Tensor)]) for each in brought]
        assert arrived == [True, True]
        assert spine.rows[site] == 33


def test_no_column_waits_for_the_device() -> None:
    """Values that Python waits for: as many for a wide weight as for a narrow one."""

    def waits(columns: int) -> int:
        w, g = on_cuda((randn(1, OUT, columns), gram(2, columns)))
        state, stats = State({"a": w}), {"a": {"gram": KINDS["gram"](g, on_cuda(torch.tensor(9)))}}
        with Watch() as watch:
            gptq(W4).apply(state, stats, {"a": ("a",)})
        return sum(watch.waits.values())

    with PretendCuda():
        assert waits(16) == waits(256) == 5
