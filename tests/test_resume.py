"""A run that was ended, by whatever and whenever, goes on and gives the same bytes."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import random
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ptq.base import Stage, chain
from ptq.errors import BadInput
from ptq.io import job, journal, output, save as saving, shards
from ptq.io.hub import load, open_model
from ptq.io.output import JOURNAL, RECORD
from ptq.io.safetensors import OnDisk
from ptq.io.save import save
from ptq.models.model import Model
from ptq.numerics import obs
from ptq.numerics.patterns import NM
from ptq.numerics.schemes import scheme
from ptq.numerics.stats import Gram
from ptq.pipeline import identity as identities, run as running
from ptq.pipeline.run import Run, compress
from ptq.transforms.fold import fold_norms
from ptq.transforms.gptq import gptq
from ptq.transforms.rtn import rtn
from ptq.transforms.sparsegpt import sparsegpt
from ptq.transforms.wanda import wanda

W4 = scheme("W4A16", group_size=16)
RECIPES: dict[str, tuple[str, tuple[Stage, ...]]] = {
    "two stages": ("llama", (chain(sparsegpt(NM(keep=2, of=4))), chain(gptq(W4)))),
    "block at once, tied head": ("gemma3", (chain(wanda(NM(keep=2, of=4))),)),
    "reparam": ("gpt2", (chain(fold_norms(), gptq(W4)),)),
    "no data": ("llama", (chain(rtn(W4)),)),
}
MOMENTS: dict[str, tuple[Any, str]] = {
    "reading": (OnDisk, "load"),
    "statistics": (Gram, "merge"),
    "solve": (obs, "sweep"),
    "write": (shards._Shard, "append"),
    "sync": (shards._Shard, "sync"),
    "marker": (journal.Journal, "append"),
    "aside": (job, "keep"),
    "header": (shards._Shard, "close"),
    "names": (job, "rename_shards"),
    "config": (saving, "_write_config"),
    "side files": (saving, "carry_files"),
    "what made it": (saving, "write_json"),
    "rename": (output, "swap"),
}
SHARD = 60_000  # bytes: several shards


IDS = torch.randint(300, (6, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def ids() -> torch.Tensor:
    return IDS


class Recipe(NamedTuple):
    """A job, what it writes when nothing interrupts it, and how often each moment comes."""

    start: Callable[[], Run]
    whole: dict[str, bytes]
    calls: dict[str, int]


FAST = "two stages"  # it has every moment
PARAMS = [name if name == FAST else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]


@pytest.fixture(scope="module", params=PARAMS)
def recipe(
    request: pytest.FixtureRequest, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Recipe:
    family, stages = RECIPES[request.param]
    data = None if request.param == "no data" else [IDS]

    def start() -> Run:
        return compress(open_model(model_dir(family)), data, *stages, batch_size=2, seed=3)

    path = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        counters = {moment: counted(patch, moment) for moment in MOMENTS}
        save(start(), path, shard_size=SHARD)
    return Recipe(start, contents(path), {moment: counter.calls for moment, counter in counters.items()})


def counted(patch: pytest.MonkeyPatch, moment: str, counter: Counter | None = None) -> Counter:
    """Puts a counter around a moment."""
    counter, (owner, name) = counter or Counter(), MOMENTS[moment]
    patch.setattr(owner, name, counter.around(getattr(owner, name)))
    return counter


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


class Counter:
    """Counts the calls of a function, and does something at one of them."""

    def __init__(self, at: int = 0, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None):
        self.calls, self.at, self.before, self.after = 0, at, before, after

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.at and self.before:
                self.before()
            result = function(*args, **kwargs)
            if self.calls == self.at and self.after:
                self.after()
            return result

        return counted


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def forked(work: Callable[[], object]) -> int:
    """Does work in a process of its own and returns the signal that ended it, 0 if none did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads; the child starts its own
        child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


FIRST = ("reading", "statistics", "solve", "write", "marker", "rename")
SECOND = ("solve", "marker")
"""moments of every stage: the second half of them is in the second of two stages"""


def kills() -> Iterator[Any]:
    """Moment, half of its calls, and when: the full set is slow."""
    for moment, half, when in itertools.product(MOMENTS, (0, 1), ("before", "after")):
        if (moment, half) != ("reading", 1):  # how often something is read depends on what was read ahead in time
            fast = when == "after" and moment in (FIRST, SECOND)[half]
            yield pytest.param(moment, half, when, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("moment", "half", "when"), list(kills()))
def test_killed_at_any_moment(moment: str, half: int, when: str, recipe: Recipe, tmp_path: Path) -> None:
    calls, out = recipe.calls[moment], tmp_path / "out"
    if calls <= half:
        pytest.skip("this recipe has no such moment")
    draw = random.Random(f"{moment} {half} {when}")  # noqa: S311  # no secret
    at = draw.randint(1 + half * calls // 2, max(1, (1 + half) * calls // 2))
    counter = Counter(at, **{when: kill})

    def work() -> None:
        counted(pytest.MonkeyPatch(), moment, counter)
        save(recipe.start(), out, shard_size=SHARD)

    assert forked(work) == -signal.SIGKILL
    if (when, moment) == ("after", "rename"):
        assert contents(out) == recipe.whole
    else:
        assert not out.exists()
    save(recipe.start(), out, shard_size=SHARD, resume=True)
    assert contents(out) == recipe.whole
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_killed_again_and_again(recipe: Recipe, tmp_path: Path) -> None:
    """Each attempt gets one marker further."""
    out, attempts = tmp_path / "out", 0

    def work() -> None:
        begun = (tmp_path / "out.partial").exists()  # then what the job is stands there already, in two lines
        counted(pytest.MonkeyPatch(), "marker", Counter(2 if begun else 3, after=kill))
        save(recipe.start(), out, shard_size=SHARD, resume=True)

    while forked(work) and attempts < 50:
        attempts += 1
    assert contents(out) == recipe.whole
    assert attempts >= 3


WRITING = ("write", "sync", "marker", "aside", "header", "side files", "what made it")


@pytest.mark.parametrize("point", [p if p % 4 == 1 else pytest.param(p, marks=pytest.mark.slow) for p in range(10)])
def test_a_full_disk(point: int, recipe: Recipe, tmp_path: Path) -> None:
    """Everything that writes is made to fail at ten points of a run, having written a part."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    count = sum(recipe.calls[moment] for moment in WRITING)

    def full() -> None:
        tear(partial)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    failing = Counter(1 + point * (count - 1) // 9, before=full)
    with pytest.MonkeyPatch.context() as patch:
        for moment in WRITING:
            counted(patch, moment, failing)
        with pytest.raises(OSError, match="No space left on device") as caught:
            save(recipe.start(), out, shard_size=SHARD)
    assert not out.exists()
    notes = getattr(caught.value, "__notes__", [])
    assert partial.exists() == any("--resume" in note for note in notes)
    save(recipe.start(), out, shard_size=SHARD, resume=True)
    assert contents(out) == recipe.whole


def tear(partial: Path) -> None:
    """Leaves a part of what was being written: a line, a tensor."""
    shards_left = sorted(partial.glob("shard-*.partial"), key=lambda p: int(p.stem.partition("-")[2]))
    for file in (partial / JOURNAL, *shards_left[-1:]):
        if file.exists() and b'"names"' not in (partial / JOURNAL).read_bytes():
            with file.open("ab") as handle:
                handle.write(b"torn")


CHANGES: dict[str, Callable[[Path, torch.Tensor], Run]] = {
    "recipe": lambda path, ids: compress(open_model(path), [ids], gptq(W4, damp=0.02), batch_size=2),
    "data": lambda path, ids: compress(open_model(path), [ids.flip(0)], gptq(W4), batch_size=2),
    "seed": lambda path, ids: compress(open_model(path), [ids], gptq(W4), batch_size=2, seed=1),
    "compute dtype": lambda path, ids: compress(
        open_model(path), [ids], gptq(W4), batch_size=2, compute_dtype="float16"
    ),
}


@pytest.fixture
def interrupted(tiny_llama: Path, ids: torch.Tensor, tmp_path: Path) -> Path:
    """What a run leaves that was interrupted after two blocks."""
    source = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    run = compress(open_model(source), [ids], gptq(W4), batch_size=2, out=tmp_path / "out")
    next(run), next(run)
    run.close()
    return tmp_path / "out.partial"


def test_a_look_at_what_is_finished_changes_nothing(interrupted: Path, ids: torch.Tensor) -> None:
    before, out = contents(interrupted), interrupted.with_name("out")
    run = compress(open_model(interrupted.with_name("model")), [ids], gptq(W4), batch_size=2)
    assert saving.finished(run, out, resume=True) == 2
    assert saving.finished(run, out.with_name("new"), resume=True) == 0
    other = CHANGES["seed"](interrupted.with_name("model"), ids)
    with pytest.raises(BadInput, match=r"out\.partial: was begun with another seed: "):
        saving.finished(other, out, resume=True)
    assert contents(interrupted) == before
    save(run, out, resume=True)
    assert saving.finished(run, out, resume=True) == 4
    with pytest.raises(BadInput, match=r"out: was begun with another seed: "):
        saving.finished(other, out, resume=True)
    out.rename(interrupted)  # as a kill before the last step leaves it
    assert saving.finished(run, out, resume=True) == 4
    assert not out.exists()


@pytest.mark.parametrize("what", CHANGES)
def test_another_job_is_refused_by_what_changed(what: str, interrupted: Path, ids: torch.Tensor) -> None:
    before = contents(interrupted)
    with pytest.raises(BadInput, match=rf"out\.partial: was begun with another {what}: "):
        save(CHANGES[what](interrupted.with_name("model"), ids), interrupted.with_name("out"), resume=True)
    assert contents(interrupted) == before


def test_another_number_of_threads_is_refused(
    interrupted: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are cut among threads, and floats do not add up alike."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    run = compress(open_model(interrupted.with_name("model")), [ids], gptq(W4), batch_size=2)
    with pytest.raises(BadInput, match=f"another number of threads: {threads}, now {threads + 1}"):
        save(run, interrupted.with_name("out"), resume=True)


@pytest.mark.parametrize("how", ["copied", "linked", "moved", "another batch size"])
def test_the_same_source_may_lie_elsewhere(how: str, interrupted: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    source, other = interrupted.with_name("model"), tmp_path / "elsewhere" / "other"
    whole = save(compress(open_model(source), [ids], gptq(W4), batch_size=2), tmp_path / "whole").path
    other.parent.mkdir()
    {
        "copied": lambda: shutil.copytree(source, other, copy_function=shutil.copyfile),
        "linked": lambda: other.symlink_to(source),
        "moved": lambda: source.rename(other),
        "another batch size": lambda: other.symlink_to(source),
    }[how]()
    run = compress(open_model(other), [ids], gptq(W4), batch_size=3 if how == "another batch size" else 2)
    if how == "another batch size":
        with pytest.raises(BadInput, match="another data: micro-batches 3, now 2"):
            save(run, tmp_path / "out", resume=True)
    else:
        assert contents(save(run, tmp_path / "out", resume=True).path) == contents(whole)


@pytest.mark.parametrize("where", ["in place", "elsewhere"])
def test_another_source_is_refused(where: str, interrupted: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    source = interrupted.with_name("model")
    if where == "elsewhere":
        source = source.rename(tmp_path / "elsewhere")
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    run = compress(open_model(source), [ids], gptq(W4), batch_size=2)
    with pytest.raises(BadInput, match=r"another model: files model\.safetensors \d+ bytes"):
        save(run, interrupted.with_name("out"), resume=True)


def test_what_no_sample_shows_its_time_does(
    interrupted: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identities, "_sample", lambda file: "alike")
    source, out = interrupted.with_name("model"), interrupted.with_name("out")
    shutil.rmtree(interrupted)
    ended = compress(open_model(source), [ids], gptq(W4), batch_size=2, out=out)
    next(ended), next(ended)
    ended.close()
    weights = source / "model.safetensors"
    os.utime(weights, (0, 0))
    with pytest.raises(BadInput, match=f"another file: {weights} 20.*, now 1970-01-01 00:00:00"):
        save(compress(open_model(source), [ids], gptq(W4), batch_size=2), out, resume=True)


def test_a_file_in_the_way_is_told(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_text("mine")
    for resume in (False, True):
        with pytest.raises(BadInput, match=r"out\.partial: is in the way; remove it"):
            save(compress(open_model(tiny_llama), None, rtn(W4)), tmp_path / "out", resume=resume)
    assert (tmp_path / "out.partial").read_text() == "mine"


def test_another_number_of_samples_is_told(interrupted: Path) -> None:
    """Whatever it does to the micro-batches."""
    run = compress(open_model(interrupted.with_name("model")), [IDS[:5]], gptq(W4), batch_size=2)
    with pytest.raises(BadInput, match=r"another data: tensors 3 of \[2, 24\], now 2 of \[2, 24\], 1 of \[1, 24\]"):
        save(run, interrupted.with_name("out"), resume=True)


def test_what_was_left_is_refused_without_being_asked_for(interrupted: Path, ids: torch.Tensor) -> None:
    run = compress(open_model(interrupted.with_name("model")), [ids], gptq(W4), batch_size=2)
    with pytest.raises(BadInput, match=r"left by a run that was interrupted; resume it, or remove it"):
        save(run, interrupted.with_name("out"))


def test_resume_takes_up_where_it_stopped(
    interrupted: Path, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished blocks are not solved again, and their lines are in the report."""
    solved = Counter()
    monkeypatch.setattr(obs, "sweep", solved.around(obs.sweep))
    again = compress(open_model(interrupted.with_name("model")), [ids], gptq(W4), batch_size=2)
    names = [block.name for block in saving.write(again, tmp_path / "out", resume=True)]
    assert names == ["model.layers.1", "model.norm"]
    assert solved.calls == 7
    assert [b["name"] for b in again.report["blocks"]] == ["model.embed_tokens", "model.layers.0", *names]
    assert {w["name"] for b in again.report["blocks"] for w in b["weights"]} == {
        n for n in load(tmp_path / "out").params if "proj" in n
    }


def test_a_finished_job_is_done_at_once(
    tiny_llama: Path, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(scale: int = 16) -> Run:
        return compress(open_model(tiny_llama), [ids], gptq(scheme("W4A16", group_size=scale)))

    first = start()
    saved = save(first, tmp_path / "out")
    before = contents(saved.path)
    second = start()
    monkeypatch.setattr(obs, "sweep", None)  # nothing is solved
    assert save(second, tmp_path / "out", resume=True) == saved
    assert contents(saved.path) == before
    table = [[w["error"] for w in block["weights"]] for block in first.report["blocks"]]
    assert table == [[w["error"] for w in block["weights"]] for block in second.report["blocks"]]
    with pytest.raises(BadInput, match="out: was begun with another recipe"):
        save(start(32), tmp_path / "out", resume=True)
    monkeypatch.undo()
    save(start(32), tmp_path / "out", resume=True, overwrite=True)
    assert contents(saved.path) != before


def test_the_second_of_two_runs_is_refused(tiny_llama: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    first, second = (compress(open_model(tiny_llama), [ids], gptq(W4)) for _ in range(2))
    writing = saving.write(first, tmp_path / "out")
    next(writing)
    for resume in (False, True):
        with pytest.raises(BadInput, match=r"out\.partial: a run of this process is writing it; close that run"):
            save(second, tmp_path / "out", resume=resume)
    for _ in writing:
        pass
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_run_that_is_dropped_is_closed(tiny_llama: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    """As in a notebook, where the next run takes the name of one whose loop failed."""

    def start(resume: bool) -> Run:
        return compress(open_model(tiny_llama), [ids], gptq(W4), batch_size=2, out=tmp_path / "out", resume=resume)

    threads = threading.active_count()
    gc.disable()
    try:
        run = start(resume=False)
        next(run), next(run)
        assert threading.active_count() > threads
        run = start(resume=True)
        assert threading.active_count() == threads
        assert [block.name for block in run] == ["model.layers.1", "model.norm"]
    finally:
        gc.enable()


def test_a_partial_result_is_no_model(interrupted: Path) -> None:
    with pytest.raises(BadInput, match=r"no config\.json"):
        open_model(interrupted)


def test_what_ptq_did_not_leave_is_not_touched(tiny_llama: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine.txt").write_text("precious")
    with pytest.raises(BadInput, match="is not what an interrupted run leaves"):
        save(compress(open_model(tiny_llama), [ids], gptq(W4)), tmp_path / "out", resume=True)
    assert (tmp_path / "out.partial" / "mine.txt").read_text() == "precious"


def test_a_damaged_journal(interrupted: Path, ids: torch.Tensor) -> None:
    with (interrupted / JOURNAL).open("ab") as file:
        file.write(b"{}garbage\n")
    for resume in (False, True):
        run = compress(open_model(interrupted.with_name("model")), [ids], gptq(W4), batch_size=2)
        with pytest.raises(BadInput, match=r"\.job/journal: line 5 is damaged"):
            save(run, interrupted.with_name("out"), resume=resume)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight file is gone": (lambda out: (out / "model.safetensors").unlink(), "no model.safetensors"),
    "a weight file is short": (lambda out: os.truncate(out / "model.safetensors", 300_000), "model.safetensors"),
    "no config": (lambda out: (out / "config.json").unlink(), "config.json: no such file"),
    "no report": (lambda out: told(out, lambda made: made.pop("report")), "ptq.json: does not say what was made"),
    "other tensors": (lambda out: told(out, lambda made: made.update(nbytes=7)), "bytes of tensors, expected 7"),
}


def told(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    made = json.loads((out / RECORD).read_text())
    change(made)
    (out / RECORD).write_text(json.dumps(made))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_job_that_was_damaged_is_not_done(
    damage: str, tiny_llama: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    out, (spoil, match) = tmp_path / "out", DAMAGES[damage]

    def start() -> Run:
        return compress(open_model(tiny_llama), [ids], gptq(W4))

    save(start(), out)
    before = contents(out)
    spoil(out)
    with pytest.raises(BadInput, match=match):
        save(start(), out, resume=True)
    if (out / "config.json").exists():  # else it is no model to overwrite
        save(start(), out, resume=True, overwrite=True)
        assert contents(out) == before


@pytest.mark.parametrize("first", [10_000, None])
def test_a_job_that_goes_on_with_other_memory_is_the_same_job(
    first: int | None, tiny_llama: Path, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a block is measured in two forwards depends on memory, and the result on that."""

    def start(room: int | None, offload: Path | None = None) -> Run:
        if room is not None:
            monkeypatch.setattr(running, "budget", lambda device: room)
        return compress(open_model(tiny_llama), [ids], gptq(W4), batch_size=2, offload=offload)

    spill = tmp_path / "spill"
    spill.mkdir()
    save(start(first, None if first else spill), tmp_path / "whole")
    save(start(1 << 40 if first else 10_000), tmp_path / "other")
    assert contents(tmp_path / "other") != contents(tmp_path / "whole")
    for name, room, offload in (("more", 1 << 40, None), ("less", 0, None), ("offloaded", None, spill)):
        run = start(first, None if first else spill)
        writing = saving.write(run, tmp_path / name)
        next(writing), next(writing)
        writing.close()
        save(start(room, offload), tmp_path / name, resume=True)
        assert contents(tmp_path / name) == contents(tmp_path / "whole"), name


@pytest.mark.parametrize("what", ["a conversion", "a job without a finished block"])
def test_what_nobody_could_go_on_with_is_in_nobody_s_way(
    what: str, tiny_llama: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def start(damp: float = 0.01) -> Model | Run:
        model = open_model(tiny_llama)
        return model if what == "a conversion" else compress(model, [ids], gptq(W4, damp=damp))

    def work() -> None:
        moment = "header" if what == "a conversion" else "sync"
        counted(pytest.MonkeyPatch(), moment, Counter(1, before=kill))
        save(start(), out)

    for resume in (False, True):
        if what != "a conversion" or not resume:
            assert forked(work) == -signal.SIGKILL
            assert [p.name for p in tmp_path.iterdir()] == ["out.partial"]
            save(start(0.02), out, resume=resume)
            assert [p.name for p in tmp_path.iterdir()] == ["out"]
            shutil.rmtree(out)


def test_a_run_that_ends_meanwhile_is_not_replaced(tiny_llama: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    """Between the look at what is there and the lock; and between opening a directory and locking it."""
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        lock = job.locked

        def late(directory: Path) -> int:
            patch.setattr(job, "locked", lock)
            save(open_model(tiny_llama), out)
            directory.mkdir()
            return lock(directory)

        patch.setattr(job, "locked", late)
        with pytest.raises(BadInput, match="out: another run has just finished it"):
            save(compress(open_model(tiny_llama), [ids], gptq(W4)), out)
    (tmp_path / "a").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        flock = output.fcntl.flock

        def renamed(handle: int, how: int) -> None:
            (tmp_path / "a").rename(tmp_path / "b")
            flock(handle, how)

        patch.setattr(output.fcntl, "flock", renamed)
        with pytest.raises(BadInput, match="a: another run has just finished it"):
            output.locked(tmp_path / "a")


def test_a_run_with_a_directory_writes_as_it_goes(tiny_llama: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    run = compress(open_model(tiny_llama), [ids], gptq(W4), out=tmp_path / "out")
    for _ in run:
        assert not (tmp_path / "out").exists()
        with pytest.raises(BadInput, match=r"is written to .*out as its blocks are taken; load that instead"):
            save(run, tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="load that instead"):
        _ = run.model
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    saved = save(compress(open_model(tiny_llama), [ids], gptq(W4)), tmp_path / "other")
    made, other = contents(tmp_path / "out"), contents(saved.path)
    assert made == other
    report = json.loads(made[output.RECORD])["report"]
    assert [b["name"] for b in report["blocks"]] == [b["name"] for b in run.report["blocks"]]
    with pytest.raises(BadInput, match="out: exists and is not empty"):  # at once
        compress(open_model(tiny_llama), [ids], gptq(W4), out=tmp_path / "out")
    with pytest.raises(BadInput, match="resume goes on with what is beside `out`"):
        compress(open_model(tiny_llama), [ids], gptq(W4), resume=True)


def test_a_live_module_goes_on_too(tiny_llama: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    """Its values are its identity."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(tiny_llama)
    run = compress(module, [ids], gptq(W4), out=tmp_path / "out")
    next(run), next(run)
    run.close()
    save(compress(module, [ids], gptq(W4)), tmp_path / "out", resume=True)
    save(compress(module, [ids], gptq(W4)), tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    run = compress(module, [ids], gptq(W4), out=tmp_path / "third")
    next(run), next(run)
    run.close()
    with torch.no_grad():
        module.lm_head.weight[0, 0] += 1
    with pytest.raises(BadInput, match="another model"):
        save(compress(module, [ids], gptq(W4)), tmp_path / "third", resume=True)


def test_an_old_result_stays_until_the_swap(tiny_llama: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    out = tmp_path / "out"
    save(open_model(tiny_llama), out)
    before = contents(out)

    def work() -> None:
        counted(pytest.MonkeyPatch(), "marker", Counter(5, after=kill))
        save(compress(open_model(tiny_llama), [ids], gptq(W4)), out, overwrite=True)

    assert forked(work) == -signal.SIGKILL
    assert contents(out) == before
    save(compress(open_model(tiny_llama), [ids], gptq(W4)), out, overwrite=True, resume=True)
    save(compress(open_model(tiny_llama), [ids], gptq(W4)), tmp_path / "other")
    assert contents(out) == contents(tmp_path / "other")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rename", [1, 2])
def test_killed_while_the_old_result_makes_room(
    rename: int, when: str, tiny_llama: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    save(open_model(tiny_llama), out)
    save(compress(open_model(tiny_llama), [ids], gptq(W4)), tmp_path / "other")

    def work() -> None:
        counter, swap = Counter(rename, **{when: kill}), output.swap

        def counting(target: Path) -> None:
            Path.rename = counter.around(Path.rename)  # type: ignore[method-assign]
            swap(target)

        output.swap = counting
        save(compress(open_model(tiny_llama), [ids], gptq(W4)), out, overwrite=True)

    assert forked(work) == -signal.SIGKILL
    save(compress(open_model(tiny_llama), [ids], gptq(W4)), out, overwrite=True, resume=True)
    assert contents(out) == contents(tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]
