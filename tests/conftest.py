"""Threads, hypothesis and tiny models for every test. `.ci/run` has shapes checked too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

collect_ignore_glob = ["golden/*.py"]  # they run in other environments

settings.register_profile(
    "ptq",
    deadline=None,
    max_examples=25,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ptq")

LINES = [
    "The cat sat on the mat, and the dog lay by the door.",
    "Errors should never pass silently, unless explicitly silenced.",
    "In the face of ambiguity, refuse the temptation to guess.",
    "def add(a, b): return a + b  # 0 1 2 3 4 5 6 7 8 9",
]
VOCABULARY = 320


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny matrices lose more to a second thread than they gain, and xdist runs a worker on each core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Each test draws the same numbers, alone or among others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A byte-level BPE of a few lines: it can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    bpe.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=special)
    )
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", chat_template=template)


def llama_config(**changes: Any) -> Any:
    """Two blocks, grouped-query attention, a head of its own."""
    from transformers import LlamaConfig

    return LlamaConfig(**{**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False, **changes})


def gemma3_config(**changes: Any) -> Any:
    """A sliding and a full layer, two rotaries, scaled embeddings, norms that store w - 1, a tied head."""
    from transformers import Gemma3TextConfig

    own = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True}
    return Gemma3TextConfig(**{**SIZES, **own, **layers, **changes})


def gpt2_config(**changes: Any) -> Any:
    """Conv1D (weights stored in, out), LayerNorm, learned positions, biases, a tied head."""
    from transformers import GPT2Config

    own = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128, "n_positions": 128, "vocab_size": VOCABULARY}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1}
    return GPT2Config(**{**own, **dropout, "bos_token_id": 0, "eos_token_id": 1, **changes})


def deepseek_config(**changes: Any) -> Any:
    """Attention through latents, routed and shared experts, a first block without any, a persistent buffer."""
    from transformers import DeepseekV3Config

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    routed = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    return DeepseekV3Config(**{**sizes, **heads, **latent, **routed, "first_k_dense_replace": 1, **changes})


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
CONFIGS: dict[str, Callable[..., Any]] = {"llama": llama_config, "gemma3": gemma3_config, "gpt2": gpt2_config}


def stock(config: Any, seed: int = 0) -> Any:
    """transformers' own model with random weights; norms and biases too, so that none of them can be forgotten."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in (p for p in model.parameters() if p.ndim == 1):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[[str], Path]:
    """`model_dir("llama")`: a Hugging Face directory with a tiny model and its tokenizer, made once. Read only."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp("models") / family
            stock(CONFIGS[family]()).save_pretrained(path)
            tokenizer.save_pretrained(path)
            made[family] = path
        return made[family]

    return get


@pytest.fixture(scope="session")
def tiny_llama(model_dir: Callable[[str], Path]) -> Path:
    return model_dir("llama")


@pytest.fixture(scope="session")
def tiny_gemma3(model_dir: Callable[[str], Path]) -> Path:
    return model_dir("gemma3")


@pytest.fixture(scope="session")
def tiny_gpt2(model_dir: Callable[[str], Path]) -> Path:
    return model_dir("gpt2")


@pytest.fixture(params=sorted(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    """The name of each family in turn."""
    return request.param


@pytest.fixture
def tiny(model_dir: Callable[[str], Path], family: str) -> Path:
    """The directory of each family's tiny model in turn."""
    return model_dir(family)


@pytest.fixture
def batches() -> list[torch.Tensor]:
    """Token ids for the tiny models: four micro-batches of two samples of 24 tokens."""
    return list(torch.randint(VOCABULARY, (4, 2, 24)))
