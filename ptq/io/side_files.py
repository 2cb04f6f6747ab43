"""What lies beside the weights of a checkpoint and belongs to it: tokenizer, generation config, code, anything else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from ptq.io.foreign import MODELOPT_CONFIG
from ptq.io.output import RECORD
from ptq.models.model import Model

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".ot", ".gguf", ".npz"}
_OWN = ("config.json", MODELOPT_CONFIG, RECORD)
"""what is written anew, or says how the source was compressed"""


def carry_files(model: Model, directory: Path) -> None:
    """Files of the source that are no weights; what a source without files lacks is made from the model."""
    if model.source is not None and model.source.is_dir():
        for entry in sorted(model.source.iterdir()):
            if entry.name.startswith(".") or entry.name.endswith(".partial") or entry.name in _OWN:
                continue
            if entry.is_file() and not _is_weights(entry):
                shutil.copyfile(entry, directory / entry.name)
            elif entry.is_dir() and not _is_checkpoint(entry, directory):
                _copy_folder(entry, directory / entry.name)
    elif model.tokenizer is not None:
        model.tokenizer.save_pretrained(directory)
    generation: Any = getattr(model.module, "generation_config", None)
    if generation is not None and not (model.source and (model.source / "generation_config.json").exists()):
        generation.to_json_file(directory / "generation_config.json")


def _is_checkpoint(folder: Path, directory: Path) -> bool:
    """Whether it has weights of another checkpoint, or the one in it that is being written."""
    return directory.resolve().is_relative_to(folder.resolve()) or any(map(_is_weights, folder.rglob("*")))


def _copy_folder(source: Path, target: Path) -> None:
    """Contents only: where a folder may not be written to, its copy must still be."""
    for where, _, names in os.walk(source):  # which follows no links to folders: they may lead back
        made = target / Path(where).relative_to(source)
        made.mkdir(exist_ok=True)
        for file in (Path(where) / name for name in names):
            if file.is_file():
                shutil.copyfile(file, made / file.name)


def _is_weights(file: Path) -> bool:
    return file.suffix in _WEIGHTS or file.name.endswith(".index.json")
