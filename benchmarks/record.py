"""What every benchmark writes beside its numbers: the machine, the versions and the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("ptq", "torch", "transformers", "safetensors", "optree")


def write(path: Path, **found: Any) -> None:
    """Writes a benchmark's numbers as JSON, with what one needs to judge or repeat them."""
    record = {"machine": machine(), "versions": versions(), "commit": commit(), **found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def processor() -> str:
    """The model's name where the system tells it (Linux); else what Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    return {"python": platform.python_version()} | {name: installed(name) for name in packages}


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The commit that was measured, with a `+` where files differ from it."""
    differs = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("+" if differs else "")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S607  # whichever git the reader has
