"""Writing a checkpoint, block by block, while the model is still being compressed.

Compressed weights are stored in the format that serving engines read; what no loader can name is stored dense with the
quantized values, and said so.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial as bound
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from ptq.base import Params, State
from ptq.errors import BadInput
from ptq.io.bitmask import FORMATS as BITMASKS
from ptq.io.check import check, damage, remarks
from ptq.io.files import naming, read_json, sync, write_json
from ptq.io.job import FILES, Past, Report, Store, opened, refuse_changed
from ptq.io.output import JOURNAL, RECORD, begun, check_output, conclude, locked, partial, tidy, valuable
from ptq.io.pruned import PRUNED
from ptq.io.quantization_config import dump
from ptq.io.safetensors import headers
from ptq.io.shards import SHARD_SIZE
from ptq.io.side_files import carry_files
from ptq.io.storable import check_format, refuse_unstorable
from ptq.io.writer import Writer
from ptq.models.model import Model
from ptq.models.skeleton import checkpoint_dtype
from ptq.numerics.leaves import compressed, rounded

_TIMES = ("seconds", "peak_bytes")
"""what differs between two runs of one job, and so has no place in its result"""


class Finished(Protocol):
    """A block that no later step will change."""

    @property
    def state(self) -> State: ...


F_co = TypeVar("F_co", bound=Finished, covariant=True)


class Blocks(Protocol[F_co]):
    """What a run is to the writer."""

    @property
    def start(self) -> Model:
        """The model that the run began from, ties settled."""
        ...

    @property
    def stages(self) -> int:
        """How many passes there are over the model."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """What must be the same for an interrupted run to go on."""
        ...

    @property
    def foreseen(self) -> Params:
        """What will become of parameters, as far as it is known from shapes, on the meta device."""
        ...

    @property
    def report(self) -> dict[str, Any]:
        """What was done so far."""
        ...

    def stream(self, store: Store) -> Iterator[F_co]:
        """Its blocks, once, each after `store` has taken it."""
        ...

    def end(self) -> None:
        """Ends its work; called when the writer is done with it, or has failed."""
        ...


class Saved(NamedTuple):
    """What was written."""

    path: Path
    nbytes: int
    """of all tensors"""
    notes: dict[str, str]
    """parameter -> why it is not stored as asked; tensor, module or key of the config -> which loaders fail at it"""


def save(
    run_or_model: Model | Blocks[Finished],
    path: str | Path,
    overwrite: bool = False,
    format: str = "auto",  # noqa: A002  # the field's word for it
    shard_size: int = SHARD_SIZE,
    resume: bool = False,
) -> Saved:
    """Writes a Hugging Face directory that transformers, serving engines and `ptq.load` read.

    Args:
        run_or_model: a `Model`; or a run, whose blocks are written and freed as they are finished.
        path: the directory to make.
        overwrite: whether a directory that is there may be replaced; it stays until the new one is whole.
        format: "auto" (what a weight came in, else pack-quantized for integers and float-quantized for float8),
            "dense", "frozen" (dense, with scales and zero points beside the weights), or one of the formats by name.
            Pruned weights have their zeros stored, unless this is sparse-bitmask or sparse-24-bitmask: these are
            smaller, and no loader of today but `ptq.load` reads them. A format by name is for all that is compressed: a
            weight that would lose its codes or its bits in it is refused, and so is a model of which it holds nothing.
            Stored dense and noted is what is only pruned, in a format of codes, and what no format holds, such as the
            weight of no plain linear.
        shard_size: bytes of tensors in one file.
        resume: whether to go on with what an interrupted run of the same job left; the result is the same, bit for
            bit, as that of a run that was not interrupted.

    Raises:
        BadInput: the directory is not empty, or the model is read from it; a weight cannot be stored in the format, or
            is not finite; what was left to be resumed is another job. Where no block was finished, nothing is left
            behind.
    """
    if not isinstance(run_or_model, Model):
        writing = write(run_or_model, path, overwrite, format, shard_size, resume)
        while True:
            try:
                next(writing)
            except StopIteration as end:
                return end.value
    model, target = run_or_model, _checked(run_or_model, path, overwrite, format, resume=False)
    what, needed = ("pruned", compressed) if format in BITMASKS else ("quantized", rounded)
    if format not in ("auto", "dense") and not any(needed(leaf) for leaf in model.params.values()):
        raise BadInput(f"{model.source}: has no {what} weights to store as {format}; compress it first")
    with opened(target, model, 1, None, bound(_writer, model, format, shard_size), overwrite) as job:
        job.put(0, model.params, {"weights": []})
        job.finish(bound(_complete, model, None))
        return Saved(target, job.writer.nbytes, job.writer.notes)


def write(
    run: Blocks[F_co],
    path: str | Path,
    overwrite: bool = False,
    format: str = "auto",  # noqa: A002  # as above
    shard_size: int = SHARD_SIZE,
    resume: bool = False,
) -> Generator[F_co, None, Saved]:
    """`save` for a run, one block at a time: each comes out when it is safe on disk."""
    target = _checked_run(run, path, overwrite, format, resume)
    identity = _identity(run, format, shard_size)
    whole = _whole(target, identity, overwrite) if resume else None
    if whole is not None:
        yield from run.stream(whole)
        return whole.saved(target)
    writer = bound(_writer, run.start, format, shard_size)
    with opened(target, run.start, run.stages, identity, writer, overwrite) as job:
        blocks = run.stream(job)  # a run that refuses is not ended
        try:
            yield from blocks
        finally:
            run.end()
        lasting = {part: what for part, what in identity.items() if part != FILES}  # a result is that of any copy
        made = {"identity": lasting, "report": _lasting(run.report)}
        job.finish(bound(_complete, run.start, made))
        return Saved(target, job.writer.nbytes, job.writer.notes)


def finished(
    run: Blocks[Finished],
    path: str | Path,
    overwrite: bool = False,
    format: str = "auto",  # noqa: A002  # as above
    shard_size: int = SHARD_SIZE,
    resume: bool = False,
) -> int:
    """How many blocks, over all stages, `write` would find finished. It looks, and changes nothing.

    Raises:
        BadInput: as `write` does before it begins.
    """
    target = _checked_run(run, path, overwrite, format, resume)
    directory, identity = partial(target), _identity(run, format, shard_size) if resume else {}
    if not resume or not directory.exists():
        made = _made(target, identity, overwrite) if resume else None
        return run.stages * len(made["report"]["blocks"]) if made else 0
    handle = locked(directory)
    try:
        if not valuable(directory):
            return 0
        old, count = begun(directory)
        if not (directory / JOURNAL).exists():  # it only lacks its name
            made = read_json(directory / RECORD)
            old, count = made.get("identity"), run.stages * len(made["report"]["blocks"])
        refuse_changed(old, identity, directory)
        return count
    finally:
        os.close(handle)


def _identity(run: Blocks[Finished], form: str, shard_size: int) -> dict[str, Any]:
    return {**run.identity, "format": form, "shard size": shard_size}


class _Whole(NamedTuple):
    """A result that is there already: all of its blocks are past."""

    made: dict[str, Any]

    def past(self, stage: int) -> Past:
        return Past(self.made["report"]["blocks"])

    def settle(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        return facts

    def put(self, stage: int, params: Params, report: Report) -> tuple[Params, Report]:
        raise RuntimeError(f"{report['name']} of stage {stage} is finished")

    def saved(self, target: Path) -> Saved:
        return Saved(target, self.made["nbytes"], self.made["notes"])


def _whole(target: Path, identity: Mapping[str, Any], overwrite: bool) -> _Whole | None:
    """The result of the same job, if it is whole; one that only lacks its final name is given it."""
    directory = partial(target)
    if (directory / RECORD).is_file() and not (directory / JOURNAL).exists():
        handle = locked(directory)
        try:
            refuse_changed(read_json(directory / RECORD).get("identity"), identity, directory)
            conclude(target)
        finally:
            os.close(handle)
    elif directory.exists():
        return None
    made = _made(target, identity, overwrite)
    if made is None:
        return None
    tidy(target)
    return _Whole(made)


def _made(target: Path, identity: Mapping[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """What a finished directory says of the same job."""
    if not (target / RECORD).is_file():
        return None
    made = read_json(target / RECORD)
    try:
        refuse_changed(made.get("identity"), identity, target)
        _refuse_damaged(target, made)
    except BadInput:
        if overwrite:
            return None
        raise
    return made


def _refuse_damaged(target: Path, made: Mapping[str, Any]) -> None:
    """Refuses to take for finished what is no longer there as it was written."""
    again = "pass --overwrite to make it again"
    if not {"report", "nbytes", "notes"} <= made.keys():
        raise BadInput(f"{target / RECORD}: does not say what was made; {again}")
    read_json(target / "config.json")
    found = sum(leaf.shape.numel() * leaf.dtype.itemsize for leaf in headers(target).values())
    if found != made["nbytes"]:
        raise BadInput(f"{target}: holds {found} bytes of tensors, expected {made['nbytes']}; {again}")


def _checked(start: Model, path: str | Path, overwrite: bool, form: str, resume: bool) -> Path:
    check_format(form)
    return check_output(path, overwrite, start.source, resume)


def _checked_run(run: Blocks[Finished], path: str | Path, overwrite: bool, form: str, resume: bool) -> Path:
    target = _checked(run.start, path, overwrite, form, resume)
    if form not in ("auto", "dense"):  # which take anything
        refuse_unstorable(run.start, run.foreseen, form)
    return target


def _writer(model: Model, form: str, shard_size: int, directory: Path, records: Sequence[Any]) -> Writer:
    return Writer(model, directory, form, shard_size, records)


def _complete(model: Model, made: dict[str, Any] | None, directory: Path, writer: Writer) -> None:
    """All files but the shards; the one that says what made them comes last."""
    with naming(directory):
        carry_files(model, directory)
        _write_config(model, writer, directory)
    _check(model, writer, directory)
    for file in directory.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":  # those are on disk already
            sync(file)
    if made is not None:
        write_json(directory / RECORD, {**made, "nbytes": writer.nbytes, "notes": writer.notes})


def _check(model: Model, writer: Writer, directory: Path) -> None:
    """Refuses what no reader takes, which the caller never sees, and notes what some do not."""
    found = check(directory, skeleton=model.module, weights=False)  # what was written was looked at on its way
    broken = damage(found)
    if broken is not None:
        raise BadInput(f"{directory}: {broken}; it was not given its name")
    writer.remarks = remarks(found)


def _lasting(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report without what differs between two runs of one job."""
    nothing = dict.fromkeys(_TIMES)
    blocks = [{**block, **nothing} for block in report["blocks"]]
    return {**report, "blocks": blocks, "totals": {**report["totals"], "seconds": None}}


def _write_config(model: Model, writer: Writer, directory: Path) -> None:
    quantization = _quantization(writer)
    if model.config is None:
        table = {"architectures": [type(model.module).__name__], "quantization_config": quantization}
        write_json(directory / "config.json", table | ({PRUNED: writer.pruned} if writer.pruned else {}))
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model.module).__name__]
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = checkpoint_dtype(model.params.values())
            part.tie_word_embeddings = writer.tied and getattr(part, "tie_word_embeddings", False)
    told = {"quantization_config": quantization, PRUNED: writer.pruned}
    for key in told:
        vars(config).pop(key, None)
    config.update({key: value for key, value in told.items() if value})
    unfinished = directory / "config.json.partial"
    config.to_json_file(unfinished)
    unfinished.replace(directory / "config.json")


def _quantization(writer: Writer) -> dict[str, Any] | None:
    modules, attention, cache = writer.modules, writer.attention, writer.cache
    if not (modules or attention or cache or writer.sparsity):
        return None
    ignored = writer.ignored() if modules or writer.sparsity else []
    return dump(modules, ignored, writer.by_class, attention, cache, writer.sparsity)
