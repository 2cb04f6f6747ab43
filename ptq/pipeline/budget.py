"""How much memory there is, and how much of it parked activations will take and may take."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from ptq.base import Params
from ptq.models.probe import Segment
from ptq.pipeline.report import peak_bytes

_CGROUPS = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self")
_MEMORY = Path("/proc/meminfo")


def budget(device: torch.device) -> int:
    """What activations may take: half of the memory, since the other half is weights, statistics and solves."""
    return memory_limit(device) // 2


def memory_limit(device: torch.device) -> int:
    """Bytes that this process may have on a device.

    On a CPU the least of the machine's memory, the limits of its control groups, and `ulimit -d`; on a CUDA device
    what is free and what this process holds already.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return min(_private_limit(), *_shared_limits())


def limits_private(device: torch.device) -> bool:
    """Whether the least limit is one on private memory, which counts what is set aside, such as threads' stacks."""
    return device.type != "cuda" and _private_limit() < min(_shared_limits())


def _private_limit() -> int:
    private, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return sys.maxsize if private == resource.RLIM_INFINITY else private


def _shared_limits() -> tuple[int, ...]:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *cgroup_limits()


def cgroup_limits(process: Path = _PROCESS, root: Path = _CGROUPS) -> Iterator[int]:
    """Limits of the control groups that a process is in, those above them too; none where a file says `max`.

    In a container the groups' paths may be the host's, so that only the root is found: it is the container's own.

    Args:
        process: its directory under /proc.
        root: where control groups are mounted.
    """
    for line in _text(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        own = top / path.lstrip("/")
        texts = (_text(group / name).strip() for group in (own, *own.parents) if group.is_relative_to(top))
        yield from (int(text) for text in texts if text.isdecimal())


def resident_bytes(device: torch.device) -> int:
    """Bytes that this process has on a device now, of the kind that the least limit counts."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.memory_reserved(device)
    pages = _text(_PROCESS / "statm").split()
    return int(pages[5 if limits_private(device) else 1]) * os.sysconf("SC_PAGE_SIZE") if pages else peak_bytes()


def available_bytes(device: torch.device) -> int:
    """Bytes that no process uses now; as far as the system tells."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _text(_MEMORY))
    return int(found[1]) * 1024 if found and device.type != "cuda" else sys.maxsize


def parked_bytes(segment: Segment, tokens: int, hidden: int, params: Params, itemsize: int) -> int:
    """What all micro-batches hold at a block's widest site: their residual, and the input that is parked there.

    Args:
        segment: the block.
        tokens: of all micro-batches together.
        hidden: features of what enters the block.
        params: for the shapes of its weights.
        itemsize: bytes of a number.
    """
    widest = max((max(params[n].shape[-2:]) for n in segment.params if len(params[n].shape) >= 2), default=0)
    return tokens * (hidden + widest) * itemsize


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
