"""Towers: told from the model proper by the structure of the module tree, on architectures of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from ptq.base import leafwise, targets
from ptq.errors import NoMatch
from ptq.models.model import Model
from ptq.models.probe import blocks
from ptq.models.skeleton import from_module
from ptq.models.towers import towers
from ptq.numerics.leaves import dense
from ptq.pipeline.batches import micro_batches
from ptq.pipeline.plan import make_plan

TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
HALVE = leafwise((), lambda w: dense(w) / 2, name="halve")


def llava() -> Any:
    text, image = hf.LlamaConfig(**TEXT, **ENDS, num_key_value_heads=2), hf.CLIPVisionConfig(**IMAGE)
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(text_config=text, vision_config=image, image_token_index=90, image_seq_length=4)
    )


def qwen() -> Any:
    image = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = {**TEXT, **ENDS, "num_key_value_heads": 2, "rope_parameters": rope}
    return hf.Qwen2_5_VLForConditionalGeneration(hf.Qwen2_5_VLConfig(text_config=text, vision_config=image))


def gemma() -> Any:
    text = hf.Gemma3TextConfig(**TEXT, **ENDS, num_key_value_heads=2, head_dim=8)
    image = hf.SiglipVisionConfig(**IMAGE)
    return hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(text_config=text, vision_config=image, mm_tokens_per_image=4)
    )


def clip() -> Any:
    return hf.CLIPModel(hf.CLIPConfig(text_config={**TEXT, **ENDS}, vision_config=dict(IMAGE), projection_dim=16))


def whisper() -> Any:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 96, "num_mel_bins": 8}
    ends = {**ENDS, "decoder_start_token_id": 0, "suppress_tokens": None, "begin_suppress_tokens": None}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **heads, **ends))


def bart() -> Any:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 96}
    return hf.BartForConditionalGeneration(hf.BartConfig(**sizes, **heads))


def t5() -> Any:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=96, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8)
    )


# model -> the block lists of its towers
KINDS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "llava": (llava, {"model.vision_tower.encoder.layers"}),
    "qwen2.5-vl": (qwen, {"model.visual.blocks"}),
    "gemma3": (gemma, {"model.vision_tower.encoder.layers"}),
    "clip": (clip, {"vision_model.encoder.layers"}),
    "vit": (lambda: hf.ViTModel(hf.ViTConfig(**IMAGE)), set()),
    "t5": (t5, set()),
    "bart": (bart, set()),
    "whisper": (whisper, set()),
    "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)), set()),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **ENDS)), set()),
    "plain": (lambda: nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])), set()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_proper_holds_the_embedding_of_its_ids(kind: str) -> None:
    make, expected = KINDS[kind]
    with torch.device("meta"):
        module = make()
    assert {path.rpartition(".")[0] for path in towers(module)} == expected
    assert towers(module) < set(blocks(module))


@pytest.fixture(scope="module")
def model() -> Model:
    return from_module(llava().eval())


def taken(model: Model, stage: Any) -> set[str]:
    ids = torch.tensor([[5, *[90] * 4, 7]])
    (batch,) = micro_batches(model, [{"input_ids": ids, "pixel_values": torch.randn(1, 3, 8, 8)}])
    ((member,),) = make_plan(model, [stage], batch).stages
    return {w for weights in member.sites.values() for w in weights}


def test_a_tower_is_taken_only_when_it_is_named(model: Model) -> None:
    language = {n for n, p in model.params.items() if ".language_model.layers." in n and p.ndim == 2}
    vision = {n for n, p in model.params.items() if ".vision_tower.encoder.layers." in n and p.ndim == 2}
    assert len(vision) == 12
    assert taken(model, (HALVE,)) == language
    assert taken(model, targets("model.language_model", HALVE)) == language
    assert taken(model, targets("Linear", HALVE)) == language
    assert taken(model, targets("re:.*vision_tower.encoder.*", HALVE)) == vision
    one = "model.vision_tower.encoder.layers.0.mlp.fc1"
    assert taken(model, targets(one, HALVE)) == {f"{one}.weight"}
    with pytest.raises(NoMatch):
        taken(model, targets("model.vision_tower", HALVE))
