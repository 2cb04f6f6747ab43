"""Parameters on their way into a checkpoint's shards: which name, which format, which tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial as bound
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ptq.errors import BadInput
from ptq.io import bitmask
from ptq.io.activations import arguments as arguments_of, attention_maps, named_tensors, weight_maps
from ptq.io.compressed_tensors import Stored
from ptq.io.contents import joined
from ptq.io.divisors import shared
from ptq.io.files import read_json
from ptq.io.foreign import quantization_of, translated
from ptq.io.frozen import frozen
from ptq.io.layouts import LAYOUTS, default_format, encoded
from ptq.io.pruned import Zeroed
from ptq.io.quantization_config import KEYS, Args, Quantizers
from ptq.io.records import AS_IT_IS, Record, parts
from ptq.io.safetensors import NAMES, headers
from ptq.io.shards import ShardWriter
from ptq.io.storable import plain_linear, quantized, refuse_loss, unloadable
from ptq.models.model import Model
from ptq.models.naming import in_order, joint, names_in_files, read, written
from ptq.models.skeleton import checkpoint_dtype, persistent_buffers
from ptq.numerics.indexed import Indexed
from ptq.numerics.lazy import load
from ptq.numerics.leaves import Leaf, compressed, dense, finite, validate
from ptq.numerics.maps import Map

_ZEROS = "stored dense with its zeros: it is pruned, and not quantized"
_ORDERED = "stored dense with its quantized values: no loader of today reads columns in an order of their own"
_UNCUT = "stored dense with its values: its parts cannot be cut or joined one by one to what the checkpoint has"


class Writer:
    """Sends parameters to shards as they come, under checkpoint names, and keeps account of what was stored how.

    Args:
        model: what the parameters are of; those that no block brings are taken from it.
        directory: where the shards go.
        form: a format, or "auto".
        shard_size: bytes of tensors in one file.
        records: what an earlier writer stored in the directory; this one goes on after it.
    """

    def __init__(
        self, model: Model, directory: Path, form: str, shard_size: int, records: Sequence[Record] = ()
    ) -> None:
        self.model = model
        self.records = list(records)
        self._shards = ShardWriter(directory, shard_size, parts(records))
        self._form = form
        # Loaders tie all or nothing, so once one tie is broken every parameter is written under all its names.
        declared: Any = getattr(model.module, "all_tied_weights_keys", model.aliases)
        self.tied = set(declared) == set(model.aliases)
        self._copies = {} if self.tied else dict(model.aliases)
        self._maps = {} if form == "dense" else model.state.maps
        self._seen = {r.name for r in records}
        self._head: Any = getattr(model.module, "get_output_embeddings", lambda: None)()
        shapes = {name: leaf.shape for name, leaf in model.params.items()}
        tied = {alias: shapes[name] for alias, name in model.aliases.items()}
        self._files = names_in_files(model.module, shapes | tied)
        self._groups = {name: group for group in joint(model.module, shapes) for name in group}
        self.waiting: dict[str, Leaf] = {}
        """parameters that a checkpoint keeps in one tensor with others, which have not come yet"""
        self.remarks: dict[str, str] = {}
        """which loaders fail at what was written, once it is looked at"""

    @property
    def nbytes(self) -> int:
        """Bytes of tensors written so far."""
        return sum(entry.end - entry.begin for _, entry in parts(self.records))

    @property
    def notes(self) -> dict[str, str]:
        """Parameter -> why it is not stored as asked; what was written -> which loaders fail at it."""
        return self.remarks | {r.name: r.note for r in self.records if r.note}

    @property
    def modules(self) -> dict[Quantizers, list[str]]:
        """Names in the checkpoint of the modules of which something is quantized, by how it is.

        The scheme of experts comes first: transformers takes that of the first group without regexes for them.
        """
        found: dict[Quantizers, list[str]] = {}
        for r in sorted((r for r in self.records if any(r.quantizers)), key=lambda r: not r.piece):
            found.setdefault(r.quantizers, []).append(r.module)
        return found

    @property
    def pruned(self) -> dict[str, list[str]]:
        """Names in the checkpoint of the pruned modules, by what their zeros obey."""
        found: dict[str, list[str]] = {}
        for r in (r for r in self.records if r.sparsity):
            found.setdefault(r.sparsity, []).append(r.module)
        return found

    @property
    def sparsity(self) -> dict[str, Any]:
        """The `sparsity_config` of weights stored as bits and values; empty where there are none."""
        counts = {
            r.module: (math.prod(r.parts["compressed"].shape), math.prod(r.shape))
            for r in self.records
            if "compressed" in r.parts
        }
        return bitmask.config(self._form, counts) if counts else {}

    @property
    def cache(self) -> Args | None:
        """How keys and values are rounded."""
        found = {args for r in self.records for letter, args in r.activations.items() if letter in ("k", "v")}
        if len(found) > 1:
            raise BadInput(f"a checkpoint has one scheme for all of its cache, got {len(found)}; store it as dense")
        return next(iter(found), None)

    @property
    def attention(self) -> dict[Args, list[str]]:
        """Classes of attention modules whose queries are rounded too, by how they are."""
        found: dict[Args, dict[str, None]] = {}
        for r in (r for r in self.records if "q" in r.activations):
            owner = type(self.model.module.get_submodule(r.name)).__name__
            found.setdefault(r.activations["q"], {})[owner] = None
        return {args: list(classes) for args, classes in found.items()}

    @property
    def by_class(self) -> bool:
        """Whether a class says what is compressed: all linears that are not ignored, experts too, and no head."""
        return all(r.by_class for r in self.records)

    def add(self, params: Mapping[str, Leaf]) -> None:
        """Writes parameters; those that a checkpoint keeps in one tensor wait until all of them are there."""
        whole = {self._files[name][0]: leaf for name, leaf in params.items() if len(self._files[name]) == 1}
        agreed = self._agreed(whole)  # what engines fuse is of one block, which comes at once
        for name, leaf in params.items():
            self._seen.add(name)
            self.waiting[name] = leaf
            for alias in (a for a, canonical in self._copies.items() if canonical == name):
                self._write_group({alias: leaf}, {})
            group = self._groups[name]
            if all(member in self.waiting for member in group):
                self._write_group({member: self.waiting.pop(member) for member in group}, agreed)

    def sync(self) -> None:
        """Waits until all that was written is on disk."""
        self._shards.sync()

    def finish(self) -> list[str]:
        """Writes what no block holds: other parameters, persistent buffers, and what only the source has a place for.

        Returns:
            The names that the shards will have.
        """
        self.add({name: leaf for name, leaf in self.model.params.items() if name not in self._seen})
        for file, tensor in written(self.model.module, persistent_buffers(self.model.module)).items():
            self._account(self._store(file, tensor, file))  # whatever it holds: a mask's infinities are meant
        for module, maps in attention_maps(self._maps).items():
            record = Record(_attention_name(module, self._files), module, {}, "", [])
            self._account(self._with_maps(record, maps))
        for file, leaf in _unused(self.model).items():
            if compressed(leaf):
                record = self._write_leaf(file, leaf, file, loadable=True)
            else:  # kept whatever it holds
                record = self._store(file, dense(leaf), file)
            self._account(record, _ignorable(record, None))
        return self._shards.close()

    def abort(self) -> None:
        """Closes what is open."""
        self._shards.abort()

    def ignored(self) -> list[str]:
        """Full names of what is dense and may count as linear, in the checkpoint and in memory where these differ.

        Engines have linears where this model has none: for routers, and for what its class has no place for. Only
        embeddings are known apart by all of them.
        """
        modules = self.model.module.named_modules()
        embeddings = {f"{path}.weight" for path, module in modules if isinstance(module, nn.Embedding)}
        left = {r.file for r in self.records if len(r.shape) == 2 and not any(r.quantizers)}
        tied = self.model.aliases if self.tied else ()
        known = [(file, name) for name, files in self._files.items() for file in files]
        found = [pair for pair in known if (pair[0] in left or pair[1] in tied) and pair[1] not in embeddings]
        found += [(file, file) for file in sorted(left - {file for file, _ in known})]
        weights = dict.fromkeys(name for pair in found for name in pair if name.endswith(".weight"))
        return [name.removesuffix(".weight") for name in weights]

    def _write_group(self, group: dict[str, Leaf], agreed: Mapping[str, Leaf]) -> None:
        made = written(self.model.module, group)
        name, order = next(iter(group)), in_order(made)
        stack = len(made) > len(group)  # of experts, each a linear in the checkpoint
        lost = any(map(compressed, group.values())) and not any(map(compressed, made.values()))
        made |= self._agreed(made) if stack else {file: agreed[file] for file in made if file in agreed}
        for file, leaf in made.items():
            matrix = file.endswith(".weight") and len(leaf.shape) == 2
            linear = stack or (len(group) == 1 and plain_linear(self._owner(name)))
            record = self._write_leaf(file, leaf, name, matrix and linear)
            # What was rounded by other values than these, or is no longer compressed, has no use for the old scales.
            kept = group[name] is self.model.params.get(name) and (record.args or not compressed(leaf))
            maps = weight_maps(self._maps, name, order.index(file), len(order)) if kept else {}
            note = _UNCUT if lost and self._form != "dense" else record.note
            record = self._with_maps(record._replace(note=note, piece=stack), maps)
            self._account(record, _ignorable(record, self._owner(name)))

    def _agreed(self, leaves: Mapping[str, Leaf]) -> Mapping[str, Leaf]:
        return {} if self._form == "dense" else shared(leaves)

    def _account(self, record: Record, ignorable: bool = True) -> None:
        """Notes what was written, and whether `ignore` could name it."""
        head = self._head is not None and self._owner(record.name) is self._head  # which in some engines no class is
        self.records.append(record._replace(by_class=not head if any(record.quantizers) else ignorable))

    def _owner(self, name: str) -> nn.Module | None:
        """The module that has a parameter; None: the model's class has no place for it."""
        known = name in self._files
        return self.model.module.get_submodule(name.rpartition(".")[0]) if known else None

    def _write_leaf(self, file: str, leaf: Leaf, name: str, loadable: bool) -> Record:
        """Writes the tensors of a leaf."""
        inner = leaf.leaf if isinstance(leaf, Zeroed) else leaf
        form = inner.form if isinstance(inner, Stored) and self._form == "auto" else self._form
        leaf = load(leaf) if compressed(leaf) else leaf
        refuse_loss(name, leaf, self._form, loadable)
        if form in bitmask.FORMATS:
            made = self._write_sparse(file, leaf, form, name, loadable)
        else:
            made = self._write_quantized(file, leaf, form, name, loadable)
        return made._replace(sparsity=bitmask.structure(leaf))

    def _write_sparse(self, file: str, leaf: Leaf, form: str, name: str, loadable: bool) -> Record:
        reason = bitmask.unfit(leaf, form) if loadable else "bits and values are kept for plain linears only"
        if reason:
            note = f"stored dense: {reason}" if compressed(leaf) else ""
            return self._store(file, _finite(dense(leaf), name), name, note)
        return self._write_parts(file, leaf, name, *bitmask.sparse(leaf, form, name))

    def _write_quantized(self, file: str, leaf: Leaf, form: str | None, name: str, loadable: bool) -> Record:
        inner = None if form == "dense" else quantized(leaf)
        if inner is None or isinstance(inner, Indexed):
            unasked = compressed(leaf) and self._form in LAYOUTS  # nothing is lost, but it is not what was asked for
            return self._store(file, _finite(dense(leaf), name), name, _ORDERED if inner else _ZEROS if unasked else "")
        codes = form if form is not None and form in LAYOUTS else default_format(inner)
        reason = unloadable(inner, codes, loadable)
        if reason:
            why = f"stored dense with its quantized values: {reason}"
            return self._store(file, _finite(dense(leaf), name), name, why)
        encode = frozen if form == "frozen" else bound(encoded, form=codes)
        return self._write_parts(file, inner, name, *encode(validate(inner, name), name=name))

    def _write_parts(
        self, file: str, leaf: Leaf, name: str, args: Args | None, tensors: Mapping[str, Tensor]
    ) -> Record:
        record = Record(file, name, {}, NAMES[leaf.dtype], list(leaf.shape), args)
        return self._with(record, {part: _finite(t, name) for part, t in tensors.items()})

    def _with_maps(self, record: Record, maps: Mapping[str, Map]) -> Record:
        """Writes what maps store, beside a weight or in an attention module, and accounts for it."""
        tensors = {part: t for role, given in maps.items() for part, t in named_tensors(given, role).items()}
        activations = {role: arguments_of(given) for role, given in maps.items()}
        return self._with(record, tensors)._replace(activations=activations)

    def _with(self, record: Record, tensors: Mapping[str, Tensor]) -> Record:
        """Writes tensors of a module, given by their local names."""
        entries = {part: self._shards.write(f"{record.module}.{part}", t) for part, t in tensors.items()}
        return record._replace(parts=record.parts | entries)

    def _store(self, file: str, tensor: Tensor, name: str, note: str = "") -> Record:
        """Writes a tensor as it is."""
        entry = self._shards.write(file, tensor)
        return Record(file, name, {AS_IT_IS: entry}, entry.dtype, entry.shape, note=note)


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not finite(tensor):
        raise BadInput(f"{name}: has NaN or infinite values; start from a checkpoint whose weights are finite")
    return tensor


def _ignorable(dense: Record, owner: nn.Module | None) -> bool:
    """Whether `ignore`, which names modules, keeps engines from what a class may reach; a stack is no module's."""
    matrix = len(dense.shape) == 2 and dense.file.endswith(".weight") and not dense.piece
    return matrix or len(dense.shape) < 2 or isinstance(owner, nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _unused(model: Model) -> dict[str, Leaf]:
    """Tensors of the source's files that the model's class has no place for: carried along."""
    if model.source is None or not model.source.is_dir():
        return {}
    config = read_json(model.source / "config.json")
    quantization = quantization_of([config.get(key) for key in KEYS], model.source)
    source = translated(headers(model.source), quantization, model.source)
    leaves = joined(model.module, source, checkpoint_dtype(source.entries.values()), model.source)
    return {name: leaves[name] for name in read(model.module, leaves).unused}


def _attention_name(module: str, files: Mapping[str, Sequence[str]]) -> str:
    """The name in the checkpoint of a module that has parameters of its own names, such as projections."""
    for name, (file, *_) in files.items():
        own = name.removeprefix(f"{module}.")
        if own != name and file.endswith(f".{own}"):
            return file.removesuffix(f".{own}")
    return module
