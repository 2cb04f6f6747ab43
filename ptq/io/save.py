"""Writing a checkpoint, block by block, while the model is still being compressed.

What is written lies in `<path>.partial` until it is whole, and is then renamed: a directory under its final name is
always a checkpoint. Compressed weights are stored in the format that serving engines read; what no loader can name is
stored dense with the quantized values, and said so.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from ptq.base import State
from ptq.errors import BadInput
from ptq.io.compressed_tensors import FORMATS
from ptq.io.quantization_config import dump
from ptq.io.safetensors import SHARD_SIZE
from ptq.io.writer import Writer
from ptq.models.model import Model
from ptq.models.skeleton import checkpoint_dtype
from ptq.numerics.leaves import Leaf, compressed

_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".ot", ".gguf", ".npz"}


class Finished(Protocol):
    """A block that no later step will change."""

    @property
    def state(self) -> State: ...


class Blocks(Protocol):
    """What a run is to the writer; closed when the writer is done with it, or has failed."""

    @property
    def start(self) -> Model:
        """The model that the run began from, ties settled."""
        ...

    def stream(self) -> Iterator[Finished]:
        """Its blocks, once, as they are finished."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Saved(NamedTuple):
    """What was written."""

    path: Path
    nbytes: int
    """of all tensors"""
    notes: dict[str, str]
    """parameter -> why it is not stored as asked; config.json -> what its readers must know"""


def save(
    run_or_model: Model | Blocks,
    path: str | Path,
    overwrite: bool = False,
    format: str = "auto",  # noqa: A002  # the field's word for it
    shard_size: int = SHARD_SIZE,
) -> Saved:
    """Writes a Hugging Face directory that transformers, serving engines and `ptq.load` read.

    Args:
        run_or_model: a `Model`; or a run, whose blocks are written and freed as they are finished.
        path: the directory to make.
        overwrite: whether a directory that is there may be replaced; it stays until the new one is whole.
        format: "auto" (what a weight came in, else pack-quantized for integers and float-quantized for float8),
            "dense", or one of the formats by name.
        shard_size: bytes of tensors in one file.

    Raises:
        BadInput: the directory is not empty, or the model is read from it; a weight cannot be stored in the format, or
            is not finite. Nothing is left behind then.
    """
    if format not in ("auto", *FORMATS):
        raise BadInput(f"format {format!r} is not written; expected auto, {', '.join(FORMATS)}")
    start = run_or_model if isinstance(run_or_model, Model) else run_or_model.start
    target = check_output(path, overwrite, start.source)
    if isinstance(run_or_model, Model):
        if format not in ("auto", "dense") and not any(compressed(leaf) for leaf in run_or_model.params.values()):
            raise BadInput(f"{run_or_model.source}: has no compressed weights to store as {format}; compress it first")
        with _partial(target) as directory:
            return _write(run_or_model, [run_or_model.params], directory, format, shard_size)._replace(path=target)
    with _partial(target) as directory, run_or_model as run:
        blocks = (block.state.params for block in run.stream())
        return _write(run.start, blocks, directory, format, shard_size)._replace(path=target)


def check_output(path: str | Path, overwrite: bool = False, source: str | Path | None = None) -> Path:
    """The directory to write to, absolute.

    Args:
        path: the directory.
        overwrite: whether a model that is there may be replaced.
        source: what the model is read from, which is never replaced.

    Raises:
        BadInput: no directory can be made there; it is not empty and may not be overwritten, is no model, or holds the
            source; or an earlier run left its partial result.
    """
    target = Path(path).expanduser().absolute()
    left = _left(target)
    broken = next((path for path in (target, *target.parents) if path.is_symlink() and not path.exists()), None)
    if broken is not None:
        raise BadInput(f"{broken}: is a link to nothing; name a directory")
    if target.exists() and not target.is_dir():
        raise BadInput(f"{target}: is a file; name a directory")
    if target.is_dir() and any(target.iterdir()):
        _check_replaceable(target, overwrite, None if source is None else Path(source).expanduser())
    if left:
        raise BadInput(f"{_beside(target)}: left by a run that was interrupted; remove it")
    return target


def _left(target: Path) -> bool:
    """Whether an earlier run left its partial result."""
    try:
        _beside(target).lstat()
    except FileNotFoundError:
        return False
    except OSError as error:  # under a file, a loop of links, a name too long
        raise BadInput(f"{target}: cannot be made: {error.strerror}; name another directory") from None
    return True


def _check_replaceable(target: Path, overwrite: bool, source: Path | None) -> None:
    if not overwrite:
        raise BadInput(f"{target}: exists and is not empty; choose another directory or overwrite it")
    # Files too, since those of a model may be links to where the bytes are.
    files = [] if source is None or not source.exists() else [source, *filter(Path.is_file, source.glob("*"))]
    if any(file.resolve().is_relative_to(target.resolve()) for file in files):
        raise BadInput(f"{target}: the model is read from it ({source}); choose another directory")
    if not (target / "config.json").is_file():
        raise BadInput(f"{target}: holds no config.json, so it is no model to overwrite; choose another directory")


def _beside(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


@contextmanager
def _partial(target: Path) -> Generator[Path]:
    """A directory that takes its final name when the block ends, and is gone when it fails."""
    partial = _beside(target)
    made = [parent for parent in partial.parents if not parent.exists()]
    partial.mkdir(parents=True)
    try:
        yield partial
        _swap(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            parent.rmdir()
        raise


def _swap(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix="ptq-old-", dir=target.parent))
    old = target.rename(aside / target.name)
    try:
        partial.rename(target)
    except BaseException:
        old.rename(target)
        aside.rmdir()
        raise
    shutil.rmtree(aside)


def _write(model: Model, blocks: Iterable[Mapping[str, Leaf]], directory: Path, form: str, shard_size: int) -> Saved:
    writer = Writer(model, directory, form, shard_size)
    try:
        for params in blocks:
            writer.add(params)
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    _write_config(model, writer, directory)
    _carry_files(model, directory)
    return Saved(directory, writer.nbytes, writer.notes)


def _write_config(model: Model, writer: Writer, directory: Path) -> None:
    quantization = dump(writer.modules, writer.ignored(), writer.by_class) if writer.modules else None
    if model.config is None:
        table = {"architectures": [type(model.module).__name__], "quantization_config": quantization}
        (directory / "config.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model.module).__name__]
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = checkpoint_dtype(model.params.values())
            part.tie_word_embeddings = writer.tied and getattr(part, "tie_word_embeddings", False)
    vars(config).pop("quantization_config", None)
    if quantization is not None:
        config.quantization_config = quantization
    config.to_json_file(directory / "config.json")


def _carry_files(model: Model, directory: Path) -> None:
    """Files of the source that are no weights; what a source without files lacks is made from the model."""
    if model.source is not None and model.source.is_dir():
        for entry in sorted(model.source.iterdir()):
            if entry.name.startswith(".") or entry in (directory, model.source / "config.json"):
                continue
            if entry.is_file() and not _is_weights(entry):
                shutil.copyfile(entry, directory / entry.name)
            # A folder with weights in it is another checkpoint, perhaps the one that is being written.
            elif entry.is_dir() and not any(map(_is_weights, entry.rglob("*"))):
                shutil.copytree(entry, directory / entry.name)
    elif model.tokenizer is not None:
        model.tokenizer.save_pretrained(directory)
    generation: Any = getattr(model.module, "generation_config", None)
    if generation is not None and not (directory / "generation_config.json").exists():
        generation.to_json_file(directory / "generation_config.json")


def _is_weights(file: Path) -> bool:
    return file.suffix in _WEIGHT_FILES or file.name.endswith(".index.json")
