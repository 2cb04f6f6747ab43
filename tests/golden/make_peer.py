"""Writes peer.safetensors: what llm-compressor computes for one small layer and one calibration sample.

Runs in an environment of its own; README.md beside this file has the commands. llm-compressor is run, not quoted.
"""

from __future__ import annotations

from pathlib import Path

import torch
from llmcompressor.core import Event, State
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning.sparsegpt import sgpt_sparsify
from llmcompressor.modifiers.pruning.wanda import wanda_sparsify
from safetensors.torch import save_file
from torch import Tensor, nn

ROWS, COLUMNS = 16, 256  # two of the blocks of columns that both sweeps work in
SEED = 10  # tried a few: here, by brute force in float64, no rounding is nearer to a tie than 3e-5 of a step
SAMPLES = {"short": 64, "long": 300}  # tokens: a Gram of rank 64, and one of full rank
SCHEMES = {
    "gptq_g64_static": ({"strategy": "group", "group_size": 64}, "static"),
    "gptq_g64_none": ({"strategy": "group", "group_size": 64}, None),
    "gptq_channel_static": ({"strategy": "channel"}, "static"),
}
STRUCTURES = {"50": (0.5, 0, 0), "2of4": (0.5, 2, 4)}  # sparsity, pruned, of


def inputs(tokens: int, generator: torch.Generator) -> Tensor:
    """One sample `[1, tokens, COLUMNS]` as a transformer makes them: correlated features, a few of them very large."""
    factors = torch.randn(tokens, COLUMNS // 4, generator=generator)
    mixed = factors @ torch.randn(COLUMNS // 4, COLUMNS, generator=generator) / 7
    noise = torch.randn(tokens, COLUMNS, generator=generator)
    size = torch.randn(COLUMNS, generator=generator).exp()
    return ((mixed + noise) * size).bfloat16().float()[None]  # rounded, so that half the bytes store it exactly


def layer(weight: Tensor) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False))
    model[0].weight.data = weight.clone()
    return model


def statistics(batches: list[Tensor], linear: nn.Module) -> tuple[Tensor, Tensor]:
    """The peer's Hessian and its Wanda row scalars, after one call for each sample."""
    hessian, scalars = sgpt_sparsify.make_empty_hessian(linear), wanda_sparsify.make_empty_row_scalars(linear)
    for seen, x in enumerate(batches):
        hessian, _ = sgpt_sparsify.accumulate_hessian(x, linear, hessian, seen)
        scalars, _ = wanda_sparsify.accumulate_row_scalars(x, linear, scalars, seen)
    return hessian, scalars


def pruned(weight: Tensor, x: Tensor) -> dict[str, Tensor]:
    linear = layer(weight)[0]
    results = {}
    for name, (sparsity, n, m) in STRUCTURES.items():
        hessian, scalars = statistics([x], linear)
        _, results[f"sparsegpt_{name}"] = sgpt_sparsify.sparsify_weight(
            linear, {linear: hessian}, sparsity, n, m, block_size=128, dampening_frac=0.01, preserve_sparsity_mask=False
        )
        results[f"wanda_{name}"] = wanda_sparsify.sparsify_weight(linear, {linear: scalars}, sparsity, n, m)
    return results | {f"{name}_mask": w != 0 for name, w in results.items()}


def quantized(weight: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Each scheme through the peer's own modifier: its observer, its hook, its solver."""
    results = {}
    for name, (granularity, order) in SCHEMES.items():
        model = layer(weight)
        weights = {"num_bits": 4, "type": "int", "symmetric": True, **granularity}
        modifier = GPTQModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, actorder=order)
        state = State(model=model)
        modifier.on_initialize(state)
        modifier.on_calibration_start(state, Event())
        model(x)
        modifier.on_sequential_epoch_end(state, Event(), [model[0]])
        modifier.on_calibration_end(state, Event())
        results[name] = model[0].weight.detach().clone()
        results[f"{name}_scale"] = model[0].weight_scale.detach().clone()
    return results


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)  # the same bits on every run
    generator = torch.Generator().manual_seed(SEED)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) / COLUMNS**0.5
    samples = {name: inputs(tokens, generator) for name, tokens in SAMPLES.items()}
    tensors = {"weight": weight}
    for name, x in samples.items():
        hessian, scalars = statistics([x], layer(weight)[0])
        found = {
            "x": x[0].bfloat16(),
            "hessian": hessian,
            "row_scalars": scalars,
            **pruned(weight, x),
            **quantized(weight, x),
        }
        tensors |= {f"{name}/{key}": value for key, value in found.items()}
    hessian, scalars = statistics(list(samples.values()), layer(weight)[0])
    tensors |= {"both/hessian_diagonal": hessian.diag(), "both/row_scalars": scalars}
    save_file({key: t.contiguous() for key, t in tensors.items()}, Path(__file__).with_name("peer.safetensors"))


if __name__ == "__main__":
    main()
