"""How much memory there is: machine, control groups of both versions, and the process's own limit."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ptq.models.probe import Segment
from ptq.pipeline.budget import budget, cgroup_limits, memory_limit, parked_bytes, resident_bytes

CPU = torch.device("cpu")
GIB = 1 << 30


def groups(root: Path, process: str, **limits: str) -> list[int]:
    """The limits that a process with this `/proc/self/cgroup` finds; `__` in a name is a slash."""
    (root / "cgroup").write_text(process)
    for name, text in limits.items():
        path = name.replace("__", "/").replace("limit", "memory.limit_in_bytes").replace("max", "memory.max")
        file = root / "mounted" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return sorted(cgroup_limits(root, root / "mounted"))


def test_version_2_and_the_groups_above(tmp_path: Path) -> None:
    limits = {"max": "max\n", "a__max": "3000\n", "a__b__max": "5000\n", "other__max": "1\n"}
    assert groups(tmp_path, "0::/a/b\n", **limits) == [3000, 5000]


def test_version_1_has_a_hierarchy_for_memory(tmp_path: Path) -> None:
    process = "5:cpu,cpuacct:/x\n4:memory:/x\n0::/x\n"
    limits = {"memory__x__limit": "7000\n", "cpu__x__limit": "1\n", "memory__limit": "9223372036854771712\n"}
    assert groups(tmp_path, process, **limits) == [7000, 9223372036854771712]


def test_in_a_container_only_the_root_is_found(tmp_path: Path) -> None:
    assert groups(tmp_path, "0::/../../host/name\n", max="4000") == [4000]


def test_no_control_groups(tmp_path: Path) -> None:
    assert list(cgroup_limits(tmp_path / "absent", tmp_path)) == []


def test_the_least_limit_holds() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory_limit(CPU) <= physical
    assert budget(CPU) == memory_limit(CPU) // 2
    code = "import torch; from ptq.pipeline.budget import memory_limit; print(memory_limit(torch.device('cpu')))"
    limited = ["bash", "-c", 'ulimit -d 4194304 && exec "$@"', "bash", sys.executable, "-c", code]
    done = subprocess.run(limited, capture_output=True, text=True, check=True)
    assert int(done.stdout) == min(4 * GIB, memory_limit(CPU))


def test_of_a_device_what_is_free_and_what_is_held_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    assert memory_limit(torch.device("cuda")) == 5 * GIB
    assert resident_bytes(torch.device("cuda")) == 2 * GIB


def test_resident_memory_follows_what_is_held() -> None:
    """Memory of its own, since the heap may have room left."""
    before = resident_bytes(CPU)
    with mmap.mmap(-1, 1 << 26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(bytes([1]) * len(held))
        assert resident_bytes(CPU) - before == pytest.approx(len(held), rel=0.1)


def test_what_a_limit_on_private_memory_counts_is_measured() -> None:
    """What is set aside and not written to, but no pages of files."""
    code = """
import mmap, resource, sys, tempfile, torch
from ptq.pipeline.budget import limits_private, resident_bytes
device = torch.device("cpu")
resource.setrlimit(resource.RLIMIT_DATA, (1 << 32, resource.RLIM_INFINITY))
before = resident_bytes(device)
aside = mmap.mmap(-1, 1 << 26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
between = resident_bytes(device)
with tempfile.TemporaryFile() as file:
    file.truncate(1 << 26)
    shared = mmap.mmap(file.fileno(), 1 << 26, prot=mmap.PROT_READ)
    sum(shared[::4096])
print(limits_private(device), between - before, resident_bytes(device) - between)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert done[0] == "True"
    assert int(done[1]) == pytest.approx(1 << 26, rel=0.05)
    assert int(done[2]) < 1 << 22


def test_parked_bytes_are_residual_and_widest_input() -> None:
    params = {"norm": torch.ones(8), "up": torch.ones(24, 8), "down": torch.ones(8, 24)}
    segment = Segment("block", tuple(params), "block")
    assert parked_bytes(segment, 100, 8, params, 2) == 100 * (8 + 24) * 2
    assert parked_bytes(segment._replace(params=("norm",)), 100, 8, params, 2) == 100 * 8 * 2
