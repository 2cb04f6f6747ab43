"""GGUF files of llama.cpp, opened as float32 models: tensors are dequantized one at a time, when they are used.

The file's architecture name is the key of the tables; one without a table is refused. What a table does not name is
refused too, since a tensor that nobody reads is a model that nobody ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ptq.base import State
from ptq.errors import BadInput
from ptq.io.hub import foreign
from ptq.io.safetensors import read_bytes
from ptq.models.model import Model
from ptq.models.skeleton import aliases, from_config
from ptq.numerics.lazy import Lazy

FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # ggml types that hold values instead of blocks


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]
    """outermost dimension first, as torch has it"""
    kind: int
    """ggml type"""
    offset: int
    nbytes: int


class Header(NamedTuple):
    """All of a file but its tensors' values; of arrays of strings only the length."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Entry]


class Architecture(NamedTuple):
    """How a GGUF architecture is a transformers model."""

    model_type: str
    config: Callable[[Header], dict[str, Any]]
    outer: Mapping[str, str]
    inner: Mapping[str, str]
    """of a block: name behind `blk.N.` -> name behind `model.layers.N.`"""
    permuted: Mapping[str, str]
    """weights whose rows llama.cpp interleaves for its rotary embedding -> what the config calls their heads"""


@dataclass(frozen=True)
class Blocks(Lazy):
    """A tensor of a GGUF file."""

    file: Path
    name: str
    entry: Entry
    heads: int | None = None
    """undo the interleaving of rows within this many heads"""
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # a field of the base class
        return torch.Size(self.entry.shape)

    def load(self) -> Tensor:
        raw = read_bytes(self.file, self.entry.offset, self.entry.nbytes, self.name)
        w = dequantized(raw, self.entry.kind).view(self.entry.shape)
        if self.heads is None:
            return w
        return w.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def dequantized(raw: Tensor, kind: int) -> Tensor:
    """Bytes of ggml type `kind` as float32 values, flat."""
    if kind in FLOATS:
        return raw.view(FLOATS[kind]).float()
    try:
        from transformers.integrations.gguf.dequant import dequantize

        return dequantize(raw, kind)
    except (ImportError, ValueError):  # older transformers, or a type that it does not know
        import gguf

    ggml = gguf.GGMLQuantizationType(kind)
    size = gguf.GGML_QUANT_SIZES[ggml][1]
    return torch.from_numpy(gguf.dequantize(raw.view(-1, size).numpy(), ggml)).flatten()


def header(file: Path) -> Header:
    """Reads and checks a file's header.

    Raises:
        BadInput: the file is no GGUF, or it is truncated.
    """
    size = file.stat().st_size
    with file.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise BadInput(f"{file}: not a GGUF file")
    try:
        found = _fast(file)
    except (ImportError, ValueError):  # older transformers, or a type that its reader does not know
        found = None
    except Exception as error:  # noqa: BLE001  # a cut header fails in the reader in as many ways as it has lines
        raise BadInput(f"{file}: truncated or corrupt ({error}); download it again") from None
    found = found or _thorough(file)
    for name, entry in found.tensors.items():
        if entry.offset + entry.nbytes > size:
            end = entry.offset + entry.nbytes
            raise BadInput(f"{file}: truncated: {name} ends at byte {end} of {size}; download it again")
    return found


def open_gguf(file: Path) -> Model:
    """A GGUF file as a model whose parameters are read when they are used.

    Raises:
        BadInput: the file is damaged, its architecture has no table, or it holds what the table does not name.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found = header(file)
    name = found.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise BadInput(f"{file}: architecture {name!r} is not read; expected one of {', '.join(ARCHITECTURES)}")
    table = ARCHITECTURES[name]
    with foreign(file, "its metadata make no model: "):
        config = AutoConfig.for_model(table.model_type, **_settings(found, table))
        cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        config.architectures = [cls.__name__]
        skeleton = from_config(cls, config, torch.float32)
    leaves = dict(_leaves(found, table, config))
    tied = aliases(skeleton)
    params = {n: _expect(file, leaves, n, p.shape) for n, p in skeleton.named_parameters() if n not in tied}
    left = [leaf.name for name, leaf in leaves.items() if name not in params]
    if left:
        raise BadInput(f"{file}: {len(left)} tensors have no place in the model, first {left[0]}")
    return Model(skeleton, State(params), tied, skeleton.config, _tokenizer(found), file)


def _settings(found: Header, table: Architecture) -> dict[str, Any]:
    try:
        return table.config(found)
    except KeyError as error:
        raise BadInput(f"{found.file}: metadata lacks {error}") from None


def _leaves(found: Header, table: Architecture, config: Any) -> Iterator[tuple[str, Blocks]]:
    file = found.file
    for name, entry in found.tensors.items():
        if name in table.outer:
            yield table.outer[name], Blocks(file, name, entry)
            continue
        _, number, inner = (*name.split(".", 2), "", "")[:3]
        if not name.startswith("blk.") or inner not in table.inner:
            raise BadInput(f"{file}: tensor {name} is not understood for architecture {table.model_type}")
        heads = getattr(config, table.permuted[inner]) if inner in table.permuted else None
        yield f"model.layers.{number}.{table.inner[inner]}", Blocks(file, name, entry, heads)


def _expect(file: Path, leaves: Mapping[str, Blocks], name: str, shape: torch.Size) -> Blocks:
    if name not in leaves:
        raise BadInput(f"{file}: no tensor for {name}; the file is not a whole model")
    if leaves[name].shape != shape:
        got = tuple(leaves[name].shape)
        raise BadInput(f"{file}: {leaves[name].name} has shape {got}, expected {tuple(shape)} for {name}")
    return leaves[name]


def _fast(file: Path) -> Header:
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(file))
    table = GgufHeader.from_file(str(file))
    tensors = {t.name: Entry(t.shape, t.ggml_type, table.data_start + t.offset, t.nbytes) for t in table.tensors}
    return Header(file, metadata, tensors)


def _thorough(file: Path) -> Header:
    import gguf

    try:
        reader = gguf.GGUFReader(str(file))
    except Exception as error:  # noqa: BLE001  # as above
        raise BadInput(f"{file}: truncated or corrupt ({error}); download it again") from None
    metadata = {
        key: len(field.data) if field.types[0] == gguf.GGUFValueType.ARRAY else field.contents()
        for key, field in reader.fields.items()
    }
    tensors = {
        t.name: Entry(tuple(int(n) for n in t.shape[::-1]), int(t.tensor_type), int(t.data_offset), int(t.n_bytes))
        for t in reader.tensors
    }
    return Header(file, metadata, tensors)


def _llama(found: Header) -> dict[str, Any]:
    def get(key: str, default: Any = None) -> Any:
        return found.metadata[f"llama.{key}"] if default is None else found.metadata.get(f"llama.{key}", default)

    scaling = get("rope.scaling.type", "none")
    if scaling != "none":
        raise BadInput(f"{found.file}: rope scaling {scaling!r} is not read; open the original checkpoint instead")
    heads = get("attention.head_count")
    ids = {f"{k}_token_id": found.metadata.get(f"tokenizer.ggml.{v}_token_id") for k, v in _SPECIAL.items()}
    return {
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", get("embedding_length") // heads),
        "max_position_embeddings": get("context_length"),
        # The file holds a float32; the shortest decimal that rounds to it is what was meant: 1e-05, not 9.9999997e-06.
        "rms_norm_eps": float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        "rope_parameters": {"rope_type": "default", "rope_theta": get("rope.freq_base", 10000.0)},
        "vocab_size": found.tensors["token_embd.weight"].shape[0],
        "attention_bias": "blk.0.attn_q.bias" in found.tensors,
        "tie_word_embeddings": "output.weight" not in found.tensors,
        **{name: value for name, value in ids.items() if value is not None},
    }


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}
ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        config=_llama,
        outer={
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight",
        },
        inner={
            "attn_norm.weight": "input_layernorm.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            **{f"attn_{x}.{p}": f"self_attn.{x}_proj.{p}" for x in "qkv" for p in ("weight", "bias")},
            **{f"attn_output.{p}": f"self_attn.o_proj.{p}" for p in ("weight", "bias")},
            **{f"ffn_{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
        },
        permuted={
            **{f"attn_q.{p}": "num_attention_heads" for p in ("weight", "bias")},
            **{f"attn_k.{p}": "num_key_value_heads" for p in ("weight", "bias")},
        },
    )
}


def _tokenizer(found: Header) -> Any:
    """The tokenizer that the file describes, or None where it describes none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if "tokenizer.ggml.model" not in found.metadata:
        return None
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer
    except ImportError:
        return AutoTokenizer.from_pretrained(found.file.parent, gguf_file=found.file.name)
    with foreign(found.file, "its tokenizer cannot be read: "):
        architecture, vocabulary, settings = get_gguf_tokenizer(str(found.file))
        backend, extra = convert_gguf_tokenizer(architecture, vocabulary)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **extra)
