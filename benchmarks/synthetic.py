"""A Llama of any size with random weights, written tensor by tensor, so that large models can be tried offline.

    python benchmarks/synthetic.py DIR --gigabytes 6

The shape of a block is that of a model of a billion parameters; the number of blocks makes the size. There is no
tokenizer: give token ids as a `.jsonl` file whose rows have `input_ids`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HIDDEN, INTERMEDIATE, HEADS, VOCABULARY = 2048, 5632, 16, 32000
BYTES = 2  # of a bfloat16
STD = 0.02
Shapes = Mapping[str, tuple[int, ...]]

ENDS: Shapes = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
}
BLOCK: Shapes = {
    **{f"self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"},
    **{f"mlp.{part}_proj.weight": (INTERMEDIATE, HIDDEN) for part in ("gate", "up")},
    "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    **{f"{part}_layernorm.weight": (HIDDEN,) for part in ("input", "post_attention")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="is made")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--gigabytes", type=float, default=6.0, help="of weights, at least")
    size.add_argument("--layers", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.directory, args.layers or layers(args.gigabytes), args.seed)


def layers(gigabytes: float) -> int:
    """As many blocks as make the size."""
    return max(1, math.ceil((gigabytes * 1e9 - nbytes(ENDS)) / nbytes(BLOCK)))


def nbytes(shapes: Shapes) -> int:
    return BYTES * sum(map(math.prod, shapes.values()))


def write(directory: Path, count: int, seed: int = 0) -> None:
    """A Hugging Face directory: a shard for each block, and one for what is around them."""
    directory.mkdir(parents=True)
    blocks = ({f"model.layers.{i}.{name}": shape for name, shape in BLOCK.items()} for i in range(count))
    shards = [ENDS, *blocks]
    generator = torch.Generator().manual_seed(seed)
    index: dict[str, str] = {}
    for i, shapes in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        write_shard(directory / name, shapes, generator)
        index |= dict.fromkeys(shapes, name)
    total = {"total_size": sum(map(nbytes, shards))}
    write_json(directory / "model.safetensors.index.json", {"metadata": total, "weight_map": index})
    write_json(directory / "config.json", config(count))


def write_shard(file: Path, shapes: Shapes, generator: torch.Generator) -> None:
    """A safetensors file: the header is known before the first tensor is."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + BYTES * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            out.write(weight(shape, generator).view(torch.uint8).numpy().data)


def weight(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal numbers for a matrix, ones for a norm."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape).normal_(0, STD, generator=generator).bfloat16()


def config(count: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": count,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
