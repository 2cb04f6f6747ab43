"""Parameters on their way into a checkpoint's shards: which name, which format, which tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ptq.errors import BadInput
from ptq.io.compressed_tensors import FORMATS, Stored, arguments, default_format, encoded, zeroed
from ptq.io.hub import joined
from ptq.io.quantization_config import KEYS, Args
from ptq.io.safetensors import ShardWriter, headers, read_json
from ptq.models.model import Model
from ptq.models.naming import joint, names_in_files, read, written
from ptq.models.skeleton import checkpoint_dtype, persistent_buffers
from ptq.numerics.lazy import load
from ptq.numerics.leaves import Leaf, Quantized, Sparse, Transposed, compressed, dense, validate

_PACKED_ZEROS = (
    "transformers 5.24 loads packed weights with zero points only by CompressedTensorsConfig(dequantize=True); "
    "store them as int-quantized for its default"
)


class Writer:
    """Sends parameters to shards as they come, under checkpoint names, and keeps account of what was stored how.

    Args:
        model: what the parameters are of; those that no block brings are taken from it.
        directory: where the shards go.
        form: a format, or "auto".
        shard_size: bytes of tensors in one file.
    """

    def __init__(self, model: Model, directory: Path, form: str, shard_size: int) -> None:
        self.model = model
        self._shards = ShardWriter(directory, shard_size)
        self._form = form
        # Loaders tie all or nothing, so once one tie is broken every parameter is written under all its names.
        declared: Any = getattr(model.module, "all_tied_weights_keys", model.aliases)
        self.tied = set(declared) == set(model.aliases)
        self._copies = {} if self.tied else dict(model.aliases)
        self._seen: set[str] = set()
        self.modules: dict[Args, list[str]] = {}  # names in the checkpoint, by how they are stored
        self.notes: dict[str, str] = {}
        self.by_class = True
        """whether a class says what is compressed: all linears that are not ignored, experts too, and no head"""
        self._head: Any = getattr(model.module, "get_output_embeddings", lambda: None)()
        shapes = {name: leaf.shape for name, leaf in model.params.items()}
        tied = {alias: shapes[name] for alias, name in model.aliases.items()}
        self._files = names_in_files(model.module, shapes | tied)
        self._groups = {name: group for group in joint(model.module, shapes) for name in group}
        self._waiting: dict[str, Leaf] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of tensors written so far."""
        return self._shards.total

    def add(self, params: Mapping[str, Leaf]) -> None:
        """Writes parameters; those that a checkpoint keeps in one tensor wait until all of them are there."""
        for name, leaf in params.items():
            self._seen.add(name)
            self._waiting[name] = leaf
            for alias in (a for a, canonical in self._copies.items() if canonical == name):
                self._write_group({alias: leaf})
            group = self._groups[name]
            if all(member in self._waiting for member in group):
                self._write_group({member: self._waiting.pop(member) for member in group})

    def finish(self) -> list[str]:
        """Writes what no block holds: other parameters, persistent buffers, and what only the source has a place for.

        Returns:
            The names of the files.
        """
        self.add({name: leaf for name, leaf in self.model.params.items() if name not in self._seen})
        for file, tensor in written(self.model.module, persistent_buffers(self.model.module)).items():
            self._shards.write(file, tensor)  # whatever it holds: a mask's infinities are meant
        for file, leaf in _unused(self.model).items():
            self._write_leaf(file, leaf, file, loadable=True)
        return self._shards.close()

    def abort(self) -> None:
        """Closes what is open."""
        self._shards.abort()

    def ignored(self) -> list[str]:
        """Full names of the linears that are not compressed, in the checkpoint and in memory where these differ."""
        stored = {module for modules in self.modules.values() for module in modules}
        found: dict[str, None] = {}
        for path, module in self.model.module.named_modules():
            if isinstance(module, nn.Linear):
                names = [file.removesuffix(".weight") for file in self._files.get(f"{path}.weight", ())]
                if stored.isdisjoint(names):
                    found |= dict.fromkeys((*names, path))
        return list(found)

    def _write_group(self, group: dict[str, Leaf]) -> None:
        made = written(self.model.module, group)
        name = next(iter(group))
        pieces = len(made) > len(group)  # a stack of experts, each a linear in the checkpoint
        owner = self.model.module.get_submodule(name.rpartition(".")[0])
        for file, leaf in made.items():
            loadable = file.endswith(".weight") and len(leaf.shape) == 2 and (_plain_linear(owner) or pieces)
            packed = self._write_leaf(file, leaf, name, loadable)
            # A class reaches experts that are dense here, and in some engines no head.
            self.by_class &= owner is not self._head if packed else not pieces

    def _write_leaf(self, file: str, leaf: Leaf, name: str, loadable: bool) -> bool:
        """Writes the tensors of a leaf; returns whether they are compressed."""
        form = leaf.args.format if isinstance(leaf, Stored) and self._form == "auto" else self._form
        inner = None if form == "dense" else _quantized(leaf)
        if inner is None:
            self._shards.write(file, _finite(dense(leaf), name))
            return False
        form = form if form in FORMATS else default_format(inner)
        reason = _unloadable(inner, form, loadable)
        if reason and (not loadable or self._form == "auto"):
            self.notes[name] = f"stored dense with its quantized values: {reason}"
            self._shards.write(file, _finite(dense(leaf), name))
            return False
        args, parts = encoded(validate(inner, name), form, name)
        module = file.removesuffix(".weight")
        self.modules.setdefault(args, []).append(module)
        if form == "pack-quantized" and not args.symmetric:
            self.notes["config.json"] = _PACKED_ZEROS
        for part, tensor in parts.items():
            self._shards.write(f"{module}.{part}", _finite(tensor, name))
        return True


def _finite(tensor: Tensor, name: str) -> Tensor:
    values = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # torch has no isfinite for float8
    if tensor.is_floating_point() and not bool(values.isfinite().all()):
        raise BadInput(f"{name}: has NaN or infinite values; start from a checkpoint whose weights are finite")
    return tensor


def _plain_linear(module: nn.Module) -> bool:
    """Whether a loader may put a forward of its own in the place of the module's."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _quantized(leaf: Leaf) -> Quantized | None:
    """The quantized values of a leaf that has them: those of a sparse leaf with the code of 0 where it is pruned."""
    inner = load(leaf) if compressed(leaf) else leaf
    if isinstance(inner, Transposed):  # quantized, though no loader reads it
        return _quantized(inner.leaf)
    if isinstance(inner, Sparse) and isinstance(inner.values, Quantized):
        return zeroed(inner.values, inner.mask)
    return inner if isinstance(inner, Quantized) else None


def _unloadable(leaf: Quantized, form: str, loadable: bool) -> str:
    if not loadable:
        return "loaders read compressed weights of plain linears only"
    args = arguments(leaf, form)
    return "" if args else f"{form} cannot hold scales {tuple(leaf.scale.shape)} for {tuple(leaf.shape)}"


def _unused(model: Model) -> dict[str, Leaf]:
    """Tensors of the source's files that the model's class has no place for: carried along."""
    if model.source is None or not model.source.is_dir():
        return {}
    entries = headers(model.source)
    config = read_json(model.source / "config.json")
    quantization = next(filter(None, map(config.get, KEYS)), None)
    leaves = joined(model.module, entries, quantization, checkpoint_dtype(entries.values()), model.source)
    return {name: leaves[name] for name in read(model.module, leaves).unused}
