"""The command line: results on stdout, one line of stderr for bad input, exit codes, nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import GOLDEN
from conftest import llama_config, stock
from ptq.cli.main import main
from ptq.io.output import JOURNAL

SMALL = ["--samples", "4", "--seq-len", "32", "--device", "cpu"]


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs a command in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str | Path) -> Done:
        capsys.readouterr()
        try:
            code = main([str(a) for a in args])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        return Done(code, *capsys.readouterr())

    return run


def spawned(*args: str | Path, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ptq", *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # a job goes on with as many only
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **{**pipes, "env": environment, **more})


def refused(done: Done, *parts: str) -> None:
    assert done.code == 2
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert done.err.endswith("\n")
    assert all(part in done.err for part in parts), done.err


@pytest.fixture
def copied(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    return tmp_path / "results" / "out"


def nothing_left(out: Path) -> None:
    assert list(out.parent.iterdir()) == []
    assert [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon] == []


# What works


def test_help_names_every_command(cli: Callable[..., Done]) -> None:
    done = cli("--help")
    assert done.code == 0
    assert all(name in done.out for name in ("compress", "eval", "inspect", "convert", "recipes", "demo"))


def test_recipes_are_listed_one_a_line(cli: Callable[..., Done]) -> None:
    lines = cli("recipes").out.splitlines()
    assert any(line.startswith("gptq-w4a16-g64 ") for line in lines)
    assert len(lines) == len({line.split()[0] for line in lines}) > 10


def test_compress_then_eval_and_inspect(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    report = out.with_suffix(".json")
    done = cli("compress", tiny_llama, out, "--recipe", "gptq-w4a16-g64", *SMALL, "--report", report)
    assert (done.code, done.err) == (0, "")
    assert all(
        part in done.out for part in ("model.layers.0", "model.layers.1", "damping", "bits per compressed weight")
    )
    assert sorted(p.name for p in out.parent.iterdir()) == ["out", "out.json"]

    written = json.loads(report.read_text())
    weights = [w for block in written["blocks"] for w in block["weights"]]
    assert len(weights) == 14
    assert all(0 < w["error"] < 0.1 and w["damping"] == pytest.approx(0.01) and w["tokens"] == 128 for w in weights)
    assert 4 < written["totals"]["bits_per_weight"] < 5
    assert {"ptq", "torch", "transformers", "python"} <= set(written["versions"])

    dense, compressed = (json.loads(cli("eval", m, *SMALL).out.splitlines()[-1]) for m in (tiny_llama, out))
    assert dense["tokens"] == compressed["tokens"] == 128
    assert dense["perplexity"] != compressed["perplexity"]
    assert compressed["perplexity"] == pytest.approx(dense["perplexity"], rel=0.2)

    rows = {r["name"]: r for r in json.loads(cli("inspect", out, "--json").out)["tensors"]}
    assert rows["model.layers.0.mlp.up_proj.weight"]["format"] == "int4 per group 64"  # 64 inputs: one group
    assert rows["model.layers.0.mlp.down_proj.weight"]["format"] == "int4 per group 64"
    assert rows["model.layers.0.mlp.down_proj.weight"]["shape"] == [64, 128]
    assert rows["lm_head.weight"]["format"] == "float32"
    assert rows["lm_head.weight"]["bits_per_weight"] == 32


def test_what_is_stored_dense_counts_as_such(
    cli: Callable[..., Done], model_dir: Callable[[str], Path], out: Path
) -> None:
    """No loader can name GPT-2's transposed linears."""
    done = cli("compress", model_dir("gpt2"), out, "--recipe", "gptq-w4a16", *SMALL)
    assert "transformer.h.0.attn.c_attn.weight and 7 more: stored dense with its quantized values" in done.out
    assert "bits per compressed weight 32," in done.out
    rows = json.loads(cli("inspect", out, "--json").out)["tensors"]
    assert {row["bits_per_weight"] for row in rows} == {32}


def test_inspect_counts_zeros(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    assert cli("compress", tiny_llama, out, "--recipe", "magnitude-2of4").code == 0
    rows = {r["name"]: r for r in json.loads(cli("inspect", out, "--json").out)["tensors"]}
    assert rows["model.layers.1.mlp.up_proj.weight"]["sparsity"] == 0.5
    assert rows["lm_head.weight"]["sparsity"] == 0
    table = cli("inspect", out).out
    assert "model.layers.1.mlp.up_proj.weight" in table
    assert "50.0%" in table


def test_rounding_needs_no_tokenizer(cli: Callable[..., Done], copied: Path, out: Path) -> None:
    for file in copied.glob("*token*"):
        file.unlink()
    assert cli("compress", copied, out, "--recipe", "rtn-w8a16").code == 0
    other = out.with_name("other")
    refused(cli("compress", copied, other, "--recipe", "gptq-w8a16", *SMALL), "no tokenizer")
    assert not other.exists()


def test_compress_writes_the_format_that_is_asked_for(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    command = ("compress", tiny_llama, out, "--recipe", "magnitude-2of4", "--format", "sparse-24-bitmask")
    plan, report = (out.with_name(name) for name in ("plan.json", "report.json"))
    assert cli(*command, "--dry-run", "--report", plan).code == 0
    assert cli(*command, "--report", report).code == 0
    assert "model.layers.0.mlp.up_proj.bitmask" in load_file(out / "model.safetensors")
    planned, made = (json.loads(file.read_text())["totals"]["bytes"] for file in (plan, report))
    assert planned == pytest.approx(made, rel=0.01)
    refused(cli(*command[:-1], "zip"), "format 'zip' is not written; expected auto, dense, ")


def test_convert_to_dense_gives_the_same_model(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    packed, dense = out.with_name("packed"), out.with_name("dense")
    assert cli("compress", tiny_llama, packed, "--recipe", "rtn-w4a16-g64").code == 0
    done = cli("convert", packed, dense, "--format", "dense")
    assert (done.code, done.err) == (0, "")
    formats = {r["format"] for r in json.loads(cli("inspect", dense, "--json").out)["tensors"]}
    assert formats == {"float32"}
    one, two = (json.loads(cli("eval", m, *SMALL).out)["perplexity"] for m in (packed, dense))
    assert one == two


def test_overwrite_replaces_the_old_result(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    assert cli("compress", tiny_llama, out, "--recipe", "rtn-w8a16").code == 0
    (out / "mine.txt").write_text("x")
    assert cli("compress", tiny_llama, out, "--recipe", "rtn-w4a16", "--overwrite").code == 0
    assert not (out / "mine.txt").exists()
    assert [p.name for p in out.parent.iterdir()] == ["out"]


@pytest.mark.slow
def test_the_bar_shows_on_a_terminal_only(tiny_llama: Path, out: Path) -> None:
    """Without one nothing is on stderr at all: see the other tests."""
    terminal, far_end = pty.openpty()
    command = [sys.executable, "-m", "ptq", "compress", str(tiny_llama), str(out), "--recipe", "gptq-w4a16", *SMALL]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=far_end, check=True)
    os.close(far_end)
    shown = b""
    with suppress(OSError):  # how Linux says that nobody holds the other end
        while part := os.read(terminal, 1 << 16):
            shown += part
    os.close(terminal)
    assert b"4/4" in shown
    assert b"\x1b" not in done.stdout


# Bad input


@pytest.mark.parametrize(
    "args", [(), ("squeeze",), ("eval",), ("eval", "demo", "--samples", "0"), ("eval", "demo", "--kl")]
)
def test_bad_usage(cli: Callable[..., Done], args: tuple[str, ...]) -> None:
    refused(cli(*args), "--help")


def test_missing_model(cli: Callable[..., Done], tmp_path: Path, out: Path) -> None:
    for command in (("eval",), ("inspect",)):
        refused(cli(*command, tmp_path / "absent"), "absent", "no such file or directory")
    refused(cli("compress", tmp_path / "absent", out, "--recipe", "rtn-w8a16"), "no such file or directory")
    nothing_left(out)


def test_directory_without_a_model(cli: Callable[..., Done], tmp_path: Path, out: Path) -> None:
    refused(cli("compress", tmp_path, out, "--recipe", "rtn-w8a16"), str(tmp_path), "config.json")
    nothing_left(out)


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("gptq-w4a16g64", ["near: ", "gptq-w4a16-g64"]),
        ("nonsense", ["ptq recipes"]),
        ("awq-w4a16-g64", ["unknown recipe"]),
        ("rtn-w8a8", ["unknown recipe"]),
        ("sparsegpt-4of2", ["keep=4 of=2"]),
        ("recipe.yaml", ["not read by this version"]),
    ],
)
def test_unknown_recipe(cli: Callable[..., Done], tiny_llama: Path, out: Path, recipe: str, parts: list[str]) -> None:
    refused(cli("compress", tiny_llama, out, "--recipe", recipe), *parts)
    nothing_left(out)


def test_group_size_that_does_not_divide(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    done = cli("compress", tiny_llama, out, "--recipe", "gptq-w4a16-g128", *SMALL)
    narrow = [f"model.layers.0.{m}_proj.weight" for m in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")]
    refused(done, "128", "64", ", ".join(narrow), " and 8 more: ")
    assert "down_proj" not in done.err
    nothing_left(out)


def test_n_of_m_that_does_not_fit(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    refused(cli("compress", tiny_llama, out, "--recipe", "sparsegpt-2of7", *SMALL), "2 of 7", "model.layers.0")
    nothing_left(out)


def test_too_little_text(cli: Callable[..., Done], tiny_llama: Path, out: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short " * 30)
    done = cli("compress", tiny_llama, out, "--recipe", "gptq-w4a16", *SMALL, "--data", text, "--samples", "999")
    refused(done, "short.txt", "windows of 32", "999")
    nothing_left(out)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("recipe", ["gptq-w4a16", "rtn-w4a16", "magnitude-50"])
def test_weights_that_are_not_finite(
    cli: Callable[..., Done], copied: Path, out: Path, value: float, recipe: str
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(copied / "model.safetensors")
    tensors[name][3, 5] = value
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    done = cli("compress", copied, out, "--recipe", recipe, *SMALL)
    refused(done, name, "NaN or infinite", "2 finished blocks kept in")
    assert [p.name for p in out.parent.iterdir()] == ["out.partial"]


def test_activations_that_are_not_finite(cli: Callable[..., Done], copied: Path, out: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][:] = 1e38
    tensors["model.layers.1.input_layernorm.weight"][0] = 3e38
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    done = cli("compress", copied, out, "--recipe", "gptq-w4a16", *SMALL)
    refused(done, "model.layers.1.self_attn.q_proj", "activations", "2 finished blocks kept in")
    assert [p.name for p in out.parent.iterdir()] == ["out.partial"]


def test_output_that_exists(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    out.mkdir()
    (out / "precious.txt").write_text("x")
    for args in (
        ("compress", tiny_llama, out, "--recipe", "rtn-w8a16"),
        ("convert", tiny_llama, out, "--format", "dense"),
    ):
        refused(cli(*args), str(out), "overwrite")
    assert [p.name for p in out.iterdir()] == ["precious.txt"]
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_output_that_is_a_file(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    out.write_text("x")
    refused(cli("compress", tiny_llama, out, "--recipe", "rtn-w8a16"), str(out))
    assert out.read_text() == "x"


def test_report_that_cannot_be_written(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    report = out.parent / "absent" / "report.json"
    refused(cli("compress", tiny_llama, out, "--recipe", "rtn-w8a16", "--report", report), str(report))
    refused(cli("compress", tiny_llama, out, "--recipe", "rtn-w8a16", "--report", out.parent), str(out.parent))
    for name in (out, out / "config.json", out / "model.safetensors", tiny_llama / "config.json"):
        before = (tiny_llama / "config.json").read_bytes()
        refused(cli("compress", tiny_llama, out, "--recipe", "rtn-w8a16", "--report", name), f"report {name}")
        assert (tiny_llama / "config.json").read_bytes() == before
    nothing_left(out)


def test_the_model_itself_is_no_output(cli: Callable[..., Done], copied: Path, out: Path) -> None:
    before = {p: p.read_bytes() for p in copied.iterdir()}
    (out.parent / "link").symlink_to(copied)
    (copied.parent / "config.json").touch()
    for where in (copied, copied.parent, out.parent / "link"):
        refused(cli("compress", copied, where, "--recipe", "rtn-w8a16", "--overwrite"), "is read from it")
        refused(cli("convert", copied, where, "--format", "dense", "--overwrite"), "is read from it")
    assert {p: p.read_bytes() for p in copied.iterdir()} == before


def test_a_report_may_lie_in_the_result(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    assert cli("compress", tiny_llama, out, "--recipe", "rtn-w8a16", "--report", out / "report.json").code == 0
    assert json.loads((out / "report.json").read_text())["recipe"] == [["rtn(int8/channel, minmax)"]]


@pytest.mark.parametrize("cut", [0, 4, 100, 20_000])
def test_truncated_file(cli: Callable[..., Done], copied: Path, out: Path, cut: int) -> None:
    file = copied / "model.safetensors"
    os.truncate(file, cut)
    for args in (("compress", copied, out, "--recipe", "rtn-w8a16"), ("eval", copied), ("inspect", copied)):
        refused(cli(*args), "model.safetensors")
    nothing_left(out)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_corrupt_file(cli: Callable[..., Done], copied: Path, out: Path, name: str) -> None:
    (copied / name).write_bytes(b"{ not json \xff" * 9)
    refused(cli("compress", copied, out, "--recipe", "gptq-w8a16", *SMALL), str(copied))
    nothing_left(out)


def test_missing_tensor(cli: Callable[..., Done], copied: Path, out: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    del tensors[name]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    refused(cli("compress", copied, out, "--recipe", "rtn-w8a16"), name)
    nothing_left(out)


def test_tensor_of_another_shape(cli: Callable[..., Done], copied: Path, out: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :100].contiguous()
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    refused(cli("eval", copied), name, "(64, 100)", "(64, 128)")


def test_unusable_device(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    refused(cli("compress", tiny_llama, out, "--recipe", "gptq-w8a16", *SMALL, "--device", "abacus"), "abacus")
    refused(cli("eval", tiny_llama, *SMALL, "--device", "abacus"), "abacus")
    refused(cli("eval", tiny_llama, *SMALL, "--device", "meta"), "'meta' cannot be used")
    refused(cli("compress", tiny_llama, out, "--recipe", "gptq-w8a16", *SMALL, "--device", "meta"), "meta")
    nothing_left(out)


def test_token_ids_beyond_the_model(cli: Callable[..., Done], tiny_llama: Path, out: Path, tmp_path: Path) -> None:
    data = tmp_path / "ids.jsonl"
    small = ["--samples", "1", "--seq-len", "3", "--data", data]
    data.write_text(json.dumps({"input_ids": [0, 320, 1]}))
    refused(cli("eval", tiny_llama, *small), "ids.jsonl: token id 320", "320 embeddings")
    refused(cli("compress", tiny_llama, out, "--recipe", "gptq-w8a16", *small), "token id 320")
    nothing_left(out)
    data.write_text(json.dumps({"input_ids": [0, 319, 1]}))
    assert cli("eval", tiny_llama, *small).code == 0


def test_what_is_not_read_is_said_on_stdout(cli: Callable[..., Done], out: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"input_ids": [0, 1, 2]}))
    model, what = GOLDEN / "FP8_BLOCK", "also quantizes input activations; only weights are computed with"
    converted = cli("convert", model, out, "--format", "dense")
    assert (converted.code, converted.err, converted.out.count(what)) == (0, "", 1)
    told = cli("eval", model, "--data", ids, "--samples", "1", "--seq-len", "3")
    assert (told.code, told.err, told.out.count(what)) == (0, "", 1)
    assert json.loads(told.out.splitlines()[-1])["tokens"] == 3
    assert what in json.loads(cli("inspect", model, "--json").out)["notes"][0]
    assert what in cli("inspect", model).out.splitlines()[-1]
    assert what not in cli("inspect", out).out


def test_windows_longer_than_the_model(cli: Callable[..., Done], model_dir: Callable[[str], Path], out: Path) -> None:
    model = model_dir("gpt2")
    long = ["--samples", "2", "--seq-len", "200"]
    refused(cli("eval", model, *long), "200", "128 positions")
    refused(cli("compress", model, out, "--recipe", "gptq-w8a16", *long), "200", "128 positions")
    nothing_left(out)


def test_what_is_compressed_already(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    first = out.with_name("first")
    assert cli("compress", tiny_llama, first, "--recipe", "rtn-w8a16").code == 0
    again = ("compress", first, out, "--recipe", "rtn-w4a16")
    refused(cli(*again), "model.layers.0", "quantized already", "--decode")
    assert not out.exists()
    assert cli(*again, "--decode").code == 0


def test_one_line_in_a_process_of_its_own(tiny_llama: Path, out: Path) -> None:
    """Imports, library notices and a bar would all show here."""
    with spawned("compress", tiny_llama, out, "--recipe", "gptq-w4a16-g128", *SMALL) as process:
        printed = process.communicate(timeout=120)
    refused(Done(process.returncode, *printed), "128")
    nothing_left(out)


# Other failures


def short_of(memory: str) -> Exception:
    if memory == "cpu":
        with pytest.raises(RuntimeError) as caught:
            torch.empty(1 << 60)
        return caught.value
    if memory in ("onednn", "threads"):
        return RuntimeError({"onednn": "could not create a primitive", "threads": "can't start new thread"}[memory])
    told = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
    return MemoryError() if memory == "python" else torch.OutOfMemoryError(told)


@pytest.mark.parametrize(
    ("memory", "asked"),
    [
        ("cpu", r"; tried to allocate \d+ bytes"),
        ("cuda", "; Tried to allocate 2.00 GiB"),
        ("python", ""),
        ("onednn", ""),
        ("threads", ""),
    ],
)
def test_too_little_memory_is_one_line(
    memory: str, asked: str, cli: Callable[..., Done], tiny_llama: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = short_of(memory)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("ptq.pipeline.spine.Spine.__init__", fail)
    done = cli("compress", tiny_llama, out, *LONG)
    assert done.code == 1
    assert re.fullmatch(f"ptq: out of memory{asked}; fewer --samples, .*\n", done.err)
    assert list(out.parent.iterdir()) == []


def test_a_full_disk_is_exit_code_1(tiny_llama: Path, out: Path) -> None:
    """As far as a process can tell: its files may not grow beyond 200 KiB."""
    command = [sys.executable, "-m", "ptq", "compress", str(tiny_llama), str(out), "--recipe", "rtn-w8a16"]
    limited = ["bash", "-c", 'ulimit -f 200 && exec "$@"', "bash", *command]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "File too large" in done.stderr
    nothing_left(out)


@pytest.fixture
def deep(tmp_path: Path, tokenizer: Any) -> Path:
    """A model of so many blocks that there is time to interrupt its run."""
    model = tmp_path / "model"
    stock(llama_config(num_hidden_layers=40)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    return model


LONG = ["--recipe", "gptq-w4a16", "--samples", "64", "--seq-len", "64", "--device", "cpu"]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_and_it_goes_on(
    cli: Callable[..., Done], deep: Path, out: Path, number: signal.Signals, code: int
) -> None:
    journal = out.with_name("out.partial") / JOURNAL
    with spawned("compress", deep, out, *LONG) as process:
        wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 3, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.count("\n") == 1
    assert re.search(r"[1-9]\d* finished blocks? kept in", err)
    assert "out.partial; the same command with --resume goes on from there" in err
    assert not out.exists()
    refused(cli("compress", deep, out, *LONG), "out.partial: left by a run that was interrupted; resume it")
    refused(cli("compress", deep, out, *LONG, "--resume", "--seed", "1"), "was begun with another seed: 0, now 1")
    assert cli("compress", deep, out, *LONG, "--resume").code == 0
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_a_signal_before_the_first_block_leaves_nothing(deep: Path, out: Path) -> None:
    with spawned("compress", deep, out, *LONG, "--samples", "256") as process:
        wait_for(lambda: list(out.parent.iterdir()), process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "ptq: interrupted\n" or "kept in" in err
    assert ("kept in" in err) == bool(list(out.parent.iterdir()))


def test_a_dry_run_looks_at_what_there_is_to_resume(cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    def files() -> dict[str, float]:
        return {str(path): path.stat().st_mtime for path in out.parent.rglob("*")}

    command = ("compress", tiny_llama, out, "--recipe", "gptq-w4a16", *SMALL, "--resume")
    assert cli(*command).code == 0
    before = files()
    assert "4 of 4 blocks are finished already" in cli(*command, "--dry-run").out
    refused(cli(*command, "--dry-run", "--seed", "1"), "was begun with another seed: 0, now 1")
    assert files() == before


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(cli: Callable[..., Done], deep: Path, out: Path) -> None:
    journal = out.with_name("out.partial") / JOURNAL
    with spawned("compress", deep, out, *LONG) as process:
        wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 3, process)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (130, 143)  # the first one may have got there first
    assert err.count("\n") == 1
    assert "--resume" in err
    assert cli("compress", deep, out, *LONG, "--resume").code == 0


def test_a_model_that_no_text_alone_will_do_for(cli: Callable[..., Done], tmp_path: Path, out: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    translator = T5Config(vocab_size=96, d_model=32, d_ff=64, num_layers=1, num_heads=4, d_kv=8)
    filler = BertConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    T5ForConditionalGeneration(translator).save_pretrained(tmp_path / "t5")
    BertForMaskedLM(filler).save_pretrained(tmp_path / "bert")
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": list(range(96)) * 2}) + "\n")
    data = ("--data", tmp_path / "ids.jsonl", "--samples", "4", "--seq-len", "32")
    no_batch = "T5ForConditionalGeneration does not take a batch of input_ids [1, 8]: ValueError: You must"
    refused(cli("compress", tmp_path / "t5", out, "--recipe", "gptq-w4a16", *data), no_batch)
    refused(cli("eval", tmp_path / "t5", *data), "T5ForConditionalGeneration writes another text than it reads")
    refused(cli("eval", tmp_path / "bert", *data), "BertForMaskedLM does not predict what follows")
    assert cli("compress", tmp_path / "bert", out, "--recipe", "gptq-w4a16", *data).code == 0


@pytest.mark.parametrize("which", ["model", "out", "report", "data", "offload"])
def test_a_home_that_nobody_has(which: str, cli: Callable[..., Done], tiny_llama: Path, out: Path) -> None:
    nowhere = "~nobody-of-that-name/x.txt"
    model, result = (nowhere if which == name else given for name, given in (("model", tiny_llama), ("out", out)))
    more = () if which in ("model", "out") else (f"--{which}", nowhere)
    done = cli("compress", model, result, "--recipe", "gptq-w4a16", *SMALL, *more)
    refused(done, f"{nowhere}: there is no such home directory")
    nothing_left(out)


def test_a_name_that_no_terminal_can_show(copied: Path) -> None:
    file, odd = copied / "model.safetensors", "\ud800.weight"
    save_file({**load_file(file), "x.weight": torch.ones(2)}, file, {"format": "pt"})
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    renamed = json.dumps({odd if name == "x.weight" else name: entry for name, entry in header.items()}).encode()
    file.write_bytes(len(renamed).to_bytes(8, "little") + renamed + raw[8 + length :])
    with spawned("inspect", copied, "--check") as looking:
        shown, told = looking.communicate()
    assert (looking.returncode, told) == (0, "")
    assert "\\ud800.weight" in shown


TWICE = """
import os, signal, sys
from ptq.cli import main

def run(args):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGINT)

main.one_heap = lambda: None
main._COMMANDS[sys.argv[1]].run = run
main.main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", ["compress m o --recipe rtn-w4a16", "compress m o --recipe x --dry-run", "eval m"])
def test_resume_is_spoken_of_where_there_is_one(command: str) -> None:
    args = [sys.executable, "-c", TWICE, *command.split()]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr.startswith("ptq: ended at once")
    assert ("--resume" in done.stderr) == command.endswith("rtn-w4a16")


BUSY = """
import signal, sys, torch
from ptq.cli import main

def run(args):
    torch.set_num_threads(1)
    a = torch.ones(5000, 5000)
    print("busy", flush=True)
    while True:
        a = a @ a

main._COMMANDS[sys.argv[1]].run = run
main.main(sys.argv[1:])
"""


def test_a_second_signal_ends_one_long_product() -> None:
    """No handler of Python's runs inside one, so the first signal is not even seen when the second comes."""
    args = [sys.executable, "-c", BUSY, "compress", "m", "o", "--recipe", "rtn-w4a16"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "busy\n"
        for wait in (0.3, 0.1):
            time.sleep(wait)
            process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert said == "ptq: ended at once; where blocks were finished, the same command with --resume goes on from there\n"


def test_a_closed_pipe_is_no_traceback() -> None:
    with spawned("recipes") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
