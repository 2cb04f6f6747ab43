"""Peak memory: a model of twice as many blocks takes no more of it, and a limit below its size is no obstacle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import VOCABULARY, llama_config, stock

WIDTH = 512
MIB = 2**20
ROOM = 136 * MIB
# The kernel keeps the record, so that no peak falls between two looks.
CHILD = r"""
import re, resource, sys, threading
from pathlib import Path
import ptq.cli.process

ptq.cli.process.one_heap = lambda: None  # which would keep what is freed in small pieces
threading.stack_size(2**20)  # the limit counts stacks as they are reserved, eight times this, and not as they are used
import ptq.io.hub, ptq.pipeline.run, transformers.models.llama.modeling_llama
from ptq.cli.main import main

def told(what):
    return int(re.search(what + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

room = told("VmData") + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (room, room))
assert main(sys.argv[2:]) == 0
print(told("VmHWM"))
"""


def llama(path: Path, blocks: int) -> None:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": blocks}
    stock(llama_config(**sizes, num_attention_heads=4, num_key_value_heads=4)).save_pretrained(path)


def peak(*args: object) -> int:
    """The most bytes that a command had resident, where it could have `ROOM` beside all programs."""
    command = [sys.executable, "-c", CHILD, ROOM, *args]
    # Freed tensors go back to the system at once, so that the peak is what was held and not how the heap was cut up.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gptq-w4a16-g64", "rtn-w4a16-g64"])
def test_peak_memory_does_not_grow_with_the_number_of_blocks(tmp_path: Path, recipe: str) -> None:
    """Of compressing, and of converting the result back."""
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"input_ids": [i * 7 % VOCABULARY for i in range(4 * 32)]}) + "\n")
    how = ("--recipe", recipe, "--data", ids, "--samples", 4, "--seq-len", 32, "--device", "cpu")
    peaks: dict[str, list[int]] = {"compress": [], "convert": []}
    for blocks in (8, 20):
        model, out, back = (tmp_path / f"{name}{blocks}" for name in ("model", "out", "back"))
        llama(model, blocks)
        peaks["compress"].append(peak("compress", model, out, *how))
        peaks["convert"].append(peak("convert", out, back, "--format", "dense"))
    # Twelve blocks are 120 MiB of weights and 30 MiB of codes; what is held of each anyway are names and empty modules.
    assert all(abs(many - few) < 5 * MIB for few, many in peaks.values()), peaks
    for large in ("model20", "back20"):
        assert sum(file.stat().st_size for file in (tmp_path / large).glob("*.safetensors")) > 1.3 * ROOM
