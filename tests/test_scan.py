"""The driver against a slow and obvious one, and everything that must not happen on the way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import CONFIGS, VOCABULARY, stock
from ptq._tree import tensors
from ptq.base import State, Transform, chain, leafwise, targets
from ptq.errors import BadInput
from ptq.io.hub import open_model
from ptq.models.call import merge_stats, observe
from ptq.models.model import Model
from ptq.models.probe import links, probe
from ptq.models.skeleton import from_module
from ptq.numerics.leaves import Transposed, dense
from ptq.numerics.schemes import scheme
from ptq.pipeline import run as running, scan
from ptq.pipeline.calibrate import calibrate, load_stats, save_stats
from ptq.pipeline.progress import InMemory
from ptq.pipeline.run import compress
from ptq.pipeline.spine import Spine
from ptq.transforms.fold import fold_norms
from ptq.transforms.gptq import gptq

FOLD = fold_norms()
FLOAT = {"compute_dtype": torch.float32}


def shrink(w: Tensor, gram: Any) -> Tensor:
    """A lossy method whose result depends on all that it is given: columns shrink with their energy."""
    energy = gram.sum.diagonal(dim1=-2, dim2=-1) / gram.count
    return dense(w) / (1 + 0.1 * energy / energy.mean())


SHRINK = leafwise(("gram",), shrink, name="shrink")
AT_ONCE = SHRINK._replace(scope="block")


def model_of(family: str) -> Model:
    return from_module(stock(CONFIGS[family]()))


def ragged() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCABULARY, (n,), generator=generator) for n in (24, 24, 9, 17, 24, 9, 1)]


def observed(model: Model, params: dict[str, Any], sites: list[str], data: list[Tensor]) -> dict[str, Any]:
    kinds = dict.fromkeys(sites, ("gram",))
    stats: dict[str, Any] = {}
    for ids in data:
        with torch.no_grad():
            stats = merge_stats(stats, observe(model, State(params), kinds, input_ids=ids[None])[1])
    return stats


def slow(model: Model, data: list[Tensor]) -> dict[str, Any]:
    """The same method with a whole forward for every site, on all that is finished so far."""
    trace = probe(model, input_ids=data[0][None])
    inside = {n for s in trace.segments if s.module is not None for n in s.params}
    params = dict(model.params)
    for site, weights in trace.sites.items():
        if site not in inside:
            continue
        gram = observed(model, params, [site], data)[site]["gram"]
        for name in weights:
            turned = name in trace.transposed
            w = dense(model.params[name])
            new = shrink(w.mT if turned else w, gram)
            params[name] = Transposed(new) if turned else new
    return params


def close(a: Any, b: Any) -> None:
    assert torch.allclose(dense(a), dense(b), rtol=1e-5, atol=1e-7)


def test_staged_equals_a_forward_for_every_site(family: str) -> None:
    model, data = model_of(family), ragged()
    want = slow(model, data)
    got = compress(model, data, SHRINK, batch_size=2, **FLOAT).model.params
    for name in model.params:
        close(got[name], want[name])
    changed = [n for n in model.params if not torch.equal(dense(got[n]), dense(model.params[n]))]
    assert len(changed) == sum(len(p.shape) == 2 and (".h." in n or "layers" in n) for n, p in model.params.items())


@pytest.mark.parametrize("how", [SHRINK, AT_ONCE], ids=["staged", "two-forward"])
def test_what_was_measured_is_what_the_finished_model_sees(family: str, how: Transform) -> None:
    """At the sites whose predecessors were final: all of them when staged, the first of each block otherwise."""
    model, data, seen = model_of(family), ragged(), {}

    def keep(w: Tensor, gram: Any) -> Tensor:
        return shrink(w, gram)

    solve = leafwise(("gram",), keep)._replace(scope=how.scope)
    apply = solve.apply

    def spy(state: State, stats: Any, sites: Any, **extra: Any) -> Any:
        seen.update({site: stats[site]["gram"] for site in sites})
        return apply(state, stats, sites, **extra)

    done = compress(model, data, solve._replace(apply=spy), batch_size=3, **FLOAT).model
    trace = probe(model, input_ids=data[0][None])
    firsts = [next(s for s in trace.sites if s in seg.params) for seg in trace.segments if seg.module is not None]
    sites = list(seen) if how.scope == "site" else firsts
    finished = observed(done, done.params, sites, data)
    for site in sites:
        assert torch.allclose(seen[site].sum, finished[site]["gram"].sum, rtol=1e-4, atol=1e-4)
        assert int(seen[site].count) == sum(map(len, data))


def test_how_data_is_batched_changes_nothing(family: str) -> None:
    model, data = model_of(family), ragged()
    one, three, reverse = (
        compress(model, d, SHRINK, batch_size=b, **FLOAT).model.params
        for d, b in ((data, 1), (data, 3), (data[::-1], 2))
    )
    for name in model.params:
        close(one[name], three[name])
        close(one[name], reverse[name])


def test_every_linear_runs_once_per_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spines: list[Spine] = []

    class Kept(Spine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            spines.append(self)

    monkeypatch.setattr(scan, "Spine", Kept)
    model, data = model_of(family), ragged()
    compress(model, data, SHRINK, batch_size=2, **FLOAT).model  # noqa: B018  # runs to the end
    (spine,) = spines
    trace = probe(model, input_ids=data[0][None])
    inside = {n for s in trace.segments if s.module is not None for n in s.params}
    linears = {w for ws in trace.sites.values() for w in ws if w in inside}
    assert set(spine.rows) == linears  # and the head, which nothing needs, never ran
    assert set(spine.rows.values()) == {sum(map(len, data))}


def test_sources_stay_bit_equal(family: str) -> None:
    module = stock(CONFIGS[family]())
    before = {n: (id(p), p._version, p.clone()) for n, p in module.named_parameters()}
    attributes = {path: dict(vars(m)) for path, m in module.named_modules()}
    config = module.config.to_dict()
    compress(module, ragged(), FOLD, SHRINK, **FLOAT).model  # noqa: B018
    for n, p in module.named_parameters():
        assert (id(p), p._version) == before[n][:2]
        assert torch.equal(p, before[n][2])
    for path, m in module.named_modules():
        assert vars(m).keys() == attributes[path].keys()
        assert all(vars(m)[k] is v for k, v in attributes[path].items())
        assert not m._forward_hooks
        assert not m._forward_pre_hooks
        assert "forward" not in vars(m)
    assert module.config.to_dict() == config


def test_norms_are_folded_into_their_readers_and_the_function_stays(family: str, batches: list[Tensor]) -> None:
    model = model_of(family)
    done = compress(model, batches, FOLD, **FLOAT).model
    found = links(model, probe(model, input_ids=batches[0]))
    inside = [k for k in found if ".layers." in k.source or ".h." in k.source]
    assert len(inside) == 4
    for link in inside:
        assert torch.equal(done.params[link.source], torch.full((64,), 1 - link.offset))
        assert not torch.equal(dense(done.params[link.sinks[0]]), dense(model.params[link.sinks[0]]))
    with torch.no_grad():
        got, want = done(batches[0]).logits, model(batches[0]).logits
    assert float((got - want).abs().max()) < 1e-4 * float(want.abs().max())


def test_saved_statistics_serve_transforms_by_hand(tmp_path: Path) -> None:
    model, data = model_of("llama"), ragged()
    save_stats(calibrate(model, data, compute_dtype="float32"), tmp_path / "stats")
    stats, sites = load_stats(tmp_path / "stats"), probe(model, input_ids=data[0][None]).sites
    first = {s: ws for s, ws in sites.items() if s in stats and ".layers.0." in s}
    state, _ = SHRINK.apply(model.state, stats, first)
    done = compress(model, data, targets("model.layers.0", AT_ONCE), **FLOAT).model.params
    for name in done:
        close(state.params[name], done[name])


def test_blocks_come_in_reading_order_and_make_up_the_model(family: str) -> None:
    model = model_of(family)
    run = compress(model, ragged(), SHRINK, **FLOAT)
    blocks = list(run)
    assert len(run) == len(blocks) == 4
    assert [b.name for b in blocks] == [s.name for s in run.plan.segments]
    assert sorted(n for b in blocks for n in b.state.params) == sorted(model.params)
    assert [bool(b.report["weights"]) for b in blocks] == [False, True, True, False]
    assert list(run.model.params) == list(model.params)


def test_a_streamed_run_gives_the_same_blocks_and_keeps_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Kept(scan.Weights):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(scan, "Weights", Kept)
    model, data = model_of(family), ragged()
    kept = compress(model, data, SHRINK, **FLOAT).model.params
    run = compress(model, data, SHRINK, **FLOAT)
    for block in run.stream(InMemory()):
        assert all(torch.equal(dense(leaf), dense(kept[n])) for n, leaf in block.state.params.items())
        held = {n for n, leaf in made[-1].params.items() if leaf is not model.params[n]}
        assert held <= set(block.state.params)  # no block before it
    with pytest.raises(BadInput, match="streamed"):
        run.model  # noqa: B018


def test_a_run_that_was_begun_is_streamed_from_its_start() -> None:
    model, data = model_of("llama"), ragged()
    kept = compress(model, data, SHRINK, **FLOAT).model.params
    run = compress(model, data, SHRINK, **FLOAT)
    next(run), next(run)
    streamed = {n: leaf for block in run.stream(InMemory()) for n, leaf in block.state.params.items()}
    assert streamed.keys() == kept.keys()
    assert all(torch.equal(dense(leaf), dense(kept[n])) for n, leaf in streamed.items())


def test_a_run_that_ended_early_gives_no_model() -> None:
    run = compress(model_of("llama"), ragged(), SHRINK, **FLOAT)
    next(run)
    run.close()
    with pytest.raises(BadInput, match="ended after 1 of 4 blocks"):
        run.model  # noqa: B018
    with pytest.raises(BadInput, match="ended after 1 of 4 blocks"):
        list(run.stream(InMemory()))
    with pytest.raises(BadInput, match="ended after 1 of 4 blocks"):
        next(run)  # so that a loop over it does not look complete


def test_a_block_solve_sees_the_whole_block() -> None:
    calls: list[tuple[set[str], set[str]]] = []

    def apply(state: State, stats: Any, sites: Any) -> Any:
        calls.append((set(state.params), set(sites)))
        assert set(sites) <= set(stats)
        return state, stats

    whole = Transform("solve", "block", SHRINK.init, apply, name="whole")
    run = compress(model_of("llama"), ragged(), whole, **FLOAT)
    blocks = list(run)
    assert [params for params, _ in calls] == [set(b.state.params) for b in blocks[1:3]]
    assert [len(sites) for _, sites in calls] == [4, 4]


def test_where_memory_is_short_a_block_is_measured_before_it_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = model_of("llama"), ragged()
    monkeypatch.setattr(running, "budget", lambda _: 0)
    run = compress(model, data, SHRINK, **FLOAT)
    short = run.model.params
    at_once = compress(model, data, AT_ONCE, **FLOAT).model.params
    assert all(torch.equal(dense(short[n]), dense(at_once[n])) for n in model.params)
    lines = [w for block in run.report["blocks"] for w in block["weights"]]
    assert all("still dense" in w["note"] for w in lines)


def test_the_report_has_every_weight_with_its_error() -> None:
    run = compress(model_of("llama"), ragged(), SHRINK, **FLOAT)
    lines = [w for b in run.model and run.report["blocks"] for w in b["weights"]]
    assert len(lines) == 14
    assert all(0 < w["error"] < 0.1 and w["tokens"] == 108 and w["failures"] == 0 for w in lines)
    assert run.report["totals"]["bits_per_weight"] == 32
    assert run.report["recipe"] == [["shrink"]]


def test_an_error_in_a_solver_surfaces_and_no_thread_is_left() -> None:
    def fail(w: Tensor, gram: Any) -> Tensor:
        raise ZeroDivisionError("in the solver")

    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="in the solver"):
        compress(model_of("llama"), ragged(), leafwise(("gram",), fail), **FLOAT).model  # noqa: B018
    assert threading.active_count() == threads


def test_an_error_in_a_batch_names_it_and_no_thread_is_left() -> None:
    threads = threading.active_count()
    data = [*ragged(), torch.full((24,), VOCABULARY)]
    with pytest.raises(IndexError) as error:
        compress(model_of("llama"), data, SHRINK, batch_size=1, **FLOAT).model  # noqa: B018
    assert "in micro-batch" in "".join(error.value.__notes__)
    assert threading.active_count() == threads


def test_a_run_that_is_left_early_ends_its_threads() -> None:
    threads = threading.active_count()
    with compress(model_of("llama"), ragged(), SHRINK, **FLOAT) as run:
        next(run)
        next(run)
        assert threading.active_count() > threads
    assert threading.active_count() == threads


def test_two_runs_side_by_side_do_not_see_each_other() -> None:
    models, data = [model_of("llama"), model_of("gpt2")], ragged()
    alone = [compress(m, data, SHRINK, **FLOAT).model.params for m in models]
    runs = [compress(m, data, SHRINK, **FLOAT) for m in models]
    for _ in range(4):
        for run in runs:
            next(run)
    for run, params in zip(runs, alone, strict=True):
        assert all(torch.equal(dense(run.model.params[n]), dense(leaf)) for n, leaf in params.items())


def test_masked_tokens_count_nowhere() -> None:
    model = model_of("llama")
    ids = ragged()[0]
    padded = torch.cat([ids, torch.ones(8, dtype=torch.long)])[None]
    mask = (torch.arange(32) < 24).long()[None]
    plain = compress(model, [ids], SHRINK, **FLOAT)
    masked = compress(model, [{"input_ids": padded, "attention_mask": mask}], SHRINK, **FLOAT)
    for name in model.params:
        close(plain.model.params[name], masked.model.params[name])
    assert masked.report["blocks"][1]["weights"][0]["tokens"] == 24


def test_a_head_that_is_named_is_untied_and_its_embedding_stays() -> None:
    model = model_of("gemma3")
    run = compress(model, ragged(), targets("lm_head", SHRINK), **FLOAT)
    done = run.model
    assert (dict(model.aliases), dict(done.aliases)) == ({"lm_head.weight": "model.embed_tokens.weight"}, {})
    assert torch.equal(
        dense(done.params["model.embed_tokens.weight"]), dense(model.params["model.embed_tokens.weight"])
    )
    assert not torch.equal(dense(done.params["lm_head.weight"]), dense(done.params["model.embed_tokens.weight"]))
    (line,) = [w for b in run.report["blocks"] for w in b["weights"]]
    assert "tied" in line["note"]


def test_an_embedding_takes_only_methods_without_data() -> None:
    model = model_of("llama")
    halve = leafwise((), lambda w: dense(w) / 2)
    stage = chain(targets("model.embed_tokens", halve), SHRINK)
    done = compress(model, ragged(), stage, **FLOAT).model.params
    assert torch.equal(dense(done["model.embed_tokens.weight"]), dense(model.params["model.embed_tokens.weight"]) / 2)
    with pytest.raises(BadInput, match=r"model\.embed_tokens\.weight: shrink needs to see its input"):
        compress(model, ragged(), targets("model.embed_tokens", SHRINK), **FLOAT)


def test_a_second_stage_calibrates_on_the_result_of_the_first() -> None:
    model, data = model_of("llama"), ragged()
    first = compress(model, data, SHRINK, **FLOAT).model
    twice = compress(first, data, SHRINK, **FLOAT).model.params
    both = compress(model, data, SHRINK, SHRINK, **FLOAT).model.params
    assert all(torch.equal(dense(twice[n]), dense(both[n])) for n in model.params)


def test_no_data_is_needed_where_nothing_is_measured() -> None:
    model = model_of("llama")
    halve = leafwise((), lambda w: dense(w) / 2)
    done = compress(model, None, halve).model.params
    assert torch.equal(
        dense(done["model.layers.1.mlp.up_proj.weight"]) * 2, dense(model.params["model.layers.1.mlp.up_proj.weight"])
    )
    with pytest.raises(BadInput, match="data"):
        compress(model, None, SHRINK)
    with pytest.raises(BadInput, match="one batch"):
        compress(nn.Linear(2, 2), None, halve)


def test_a_random_method_is_given_a_key_from_seed_and_name() -> None:
    def apply(state: State, stats: Any, sites: Any, *, key: int) -> Any:
        noise = {
            n: torch.rand(dense(w).shape, generator=torch.Generator().manual_seed(key)) for n, w in state.params.items()
        }
        return state._replace(params=noise), stats

    rand = Transform("solve", "site", lambda *_, **__: {}, apply, frozenset({"key"}))
    model = model_of("llama")
    a, b, c = (compress(model, None, rand, seed=s).model.params for s in (1, 1, 2))
    q = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(a[q], b[q])
    assert not torch.equal(a[q], c[q])
    assert not torch.equal(a[q], a[q.replace("layers.0", "layers.1")])


def test_bfloat16_forward_keeps_float32_statistics() -> None:
    model, data, dtypes = model_of("llama"), ragged(), set()

    def look(w: Tensor, gram: Any) -> Tensor:
        dtypes.add((gram.sum.dtype, dense(w).dtype))
        return shrink(w, gram)

    fine = compress(model, data, SHRINK, **FLOAT).model.params
    coarse = compress(model, data, leafwise(("gram",), look), compute_dtype="bfloat16").model.params
    assert dtypes == {(torch.float32, torch.float32)}
    name = "model.layers.1.mlp.down_proj.weight"
    assert 0 < float((fine[name] - coarse[name]).norm() / fine[name].norm()) < 1e-2


# What goes wrong in data and weights.


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float) -> None:
    module = stock(CONFIGS["llama"]())
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[0, 0] = value
    with pytest.raises(BadInput, match=r"layers\.1\.mlp\.up_proj\.weight: 1 of 8192 weights are NaN or infinite"):
        compress(module, ragged(), SHRINK, **FLOAT).model  # noqa: B018
    with pytest.raises(BadInput, match=r"layers\.1\.mlp\.up_proj\.weight"):
        compress(module, None, leafwise((), dense)).model  # noqa: B018


def test_activations_that_are_not_finite_are_refused_by_name() -> None:
    module = stock(CONFIGS["llama"]())
    with torch.no_grad():
        module.model.layers[1].input_layernorm.weight[3] = float("inf")
    with pytest.raises(BadInput, match=r"layers\.1\.self_attn\.q_proj\.weight: its input has NaN or infinite"):
        compress(module, ragged(), SHRINK, **FLOAT).model  # noqa: B018


def test_a_weight_that_no_token_reaches_is_refused_by_name() -> None:
    class Shy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y) if bool((y == 0).all()) else y

    with pytest.raises(BadInput, match=r"b\.weight: no calibration token reached it"):
        compress(Shy(), [torch.ones(2, 3)], SHRINK).model  # noqa: B018


# Reparams keep the function, and that is checked.


def scaled(by: float, back: float) -> Transform:
    """Scales the values of attention up and its output projection down again."""

    def apply(state: State, stats: Any, sites: Any) -> Any:
        factors = {"v_proj.weight": by, "o_proj.weight": back}
        params = {
            n: dense(w) * next((f for s, f in factors.items() if n.endswith(s)), 1.0) for n, w in state.params.items()
        }
        return State(params), stats

    return Transform("reparam", "block", lambda *_, **__: {}, apply, name="scaled")


def test_a_reparam_changes_weights_and_keeps_the_function(batches: list[Tensor]) -> None:
    model = model_of("llama")
    done = compress(model, batches, scaled(4.0, 0.25), **FLOAT).model
    v = "model.layers.0.self_attn.v_proj.weight"
    assert torch.equal(dense(done.params[v]), 4 * dense(model.params[v]))
    with torch.no_grad():
        assert torch.allclose(done(batches[0]).logits, model(batches[0]).logits, rtol=1e-4, atol=1e-4)


def test_a_reparam_that_changes_the_function_is_refused(batches: list[Tensor]) -> None:
    run = compress(model_of("llama"), batches, scaled(4.0, 0.3), **FLOAT)
    with pytest.raises(BadInput, match=r"model\.layers\.0: scaled changes the function by"):
        run.model  # noqa: B018


def test_a_transform_that_writes_into_its_input_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False))
    with pytest.raises(BadInput, match=r"0\.weight: twice changed this weight in place"):
        compress(module, [torch.ones(2, 4)], leafwise((), lambda w: w.mul_(2), name="twice")).model  # noqa: B018


@pytest.mark.parametrize(
    ("solve", "what"), [(lambda w: None, "NoneType"), (lambda w: w[:2], "Tensor"), (lambda w: w.double(), "float64")]
)
def test_what_a_transform_returns_must_fit(solve: Any, what: str) -> None:
    with pytest.raises(BadInput, match=rf"0\.weight: odd returned .*{what}"):
        compress(nn.Sequential(nn.Linear(4, 4)), [torch.ones(2, 4)], leafwise((), solve, name="odd")).model  # noqa: B018


def test_batches_that_are_all_masked_or_empty_are_refused() -> None:
    ids = ragged()[0][None]
    masked = {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}
    with pytest.raises(BadInput, match="no calibration token reached it"):
        compress(model_of("llama"), [masked], SHRINK, **FLOAT).model  # noqa: B018
    with pytest.raises(BadInput, match="no calibration token reached it"):
        compress(nn.Sequential(nn.Linear(4, 4)), [torch.ones(0, 4)], SHRINK).model  # noqa: B018


def test_inputs_that_carry_gradients_and_other_dtypes_are_taken() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    done = compress(net, [x], gptq(scheme("W4A16", group_size=-1))).model
    assert not any(t.requires_grad for leaf in done.params.values() for t in tensors(leaf))
    assert x.grad is None
    half = compress(net, [x], SHRINK, compute_dtype="bfloat16").model.params
    assert half["0.weight"].dtype == torch.float32


def test_the_thread_that_reads_ahead_is_there_before_those_of_the_micro_batches(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may take all the room that there is for threads."""
    begun: list[str] = []
    start = threading.Thread.start

    def watched(self: threading.Thread) -> None:
        begun.append(self.name)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", watched)
    run = compress(open_model(tiny_llama), [torch.randint(300, (2, 16))], gptq(scheme("W4A16", group_size=16)))
    next(run)
    run.close()
    assert begun[0].startswith("ptq-read")
