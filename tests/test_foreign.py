"""Checkpoints of other quantizers: written here by float64 arithmetic of its own, read as the same values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import same_bits
from conftest import deepseek_config as tiny_deepseek, llama_config, stock
from ptq.base import targets
from ptq.errors import BadInput
from ptq.io.check import check
from ptq.io.compressed_tensors import Stored
from ptq.io.hub import load
from ptq.io.safetensors import OnDisk
from ptq.io.save import save
from ptq.io.survey import ERROR, EVERY
from ptq.models.model import Model
from ptq.numerics.lazy import load as load_leaf
from ptq.numerics.leaves import Quantized, compressed, dense
from ptq.numerics.maps import FakeQuant, StaticQuant
from ptq.numerics.schemes import scheme
from ptq.pipeline.evaluate import perplexity
from ptq.pipeline.run import compress
from ptq.transforms.rtn import rtn

pytestmark = pytest.mark.filterwarnings("ignore:.*only weights are computed with:UserWarning")
WEIGHTS = "model.safetensors"
UP = "model.layers.0.mlp.up_proj"
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
Written = tuple[dict[str, Tensor], Tensor]
"""Tensors of a file and the float64 value that they stand for."""


# Independent encoders


def fp8_blocks(w: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales to multiply by, values."""
    codes, values = torch.empty_like(w, dtype=torch.float8_e4m3fn), torch.empty_like(w, dtype=torch.float64)
    scales = torch.empty(-(-w.shape[0] // rows), -(-w.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = w[part].abs().max() / 448
            codes[part] = (w[part].double() / scales[i, j].double()).float().to(torch.float8_e4m3fn)
            values[part] = codes[part].double() * scales[i, j].double()
    return codes, scales, values


def fp4(t: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and values of the nearest numbers of e2m1."""
    index = (t.abs()[..., None] - MAGNITUDES).abs().argmin(-1)
    return (index + 8 * (t < 0)).to(torch.uint8), MAGNITUDES[index] * t.sign()


def nibbles(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def in_fp8_blocks(name: str, w: Tensor, block: int = 128) -> Written:
    codes, scales, values = fp8_blocks(w, block, block)
    return {name: codes, f"{name}_scale_inv": scales}, values


def in_fp8_tensor(name: str, w: Tensor, suffix: str = "_scale_inv") -> Written:
    codes, scales, values = fp8_blocks(w, *w.shape)
    return {name: codes, f"{name}{suffix}": scales.reshape(())}, values


def in_nvfp4(name: str, w: Tensor) -> Written:
    groups = w.double().unflatten(-1, (-1, 16))
    second = (w.abs().max() / (6 * 448)).float()
    scales = (groups.abs().amax(-1) / 6 / second.double()).float().to(torch.float8_e4m3fn)
    steps = scales.double() * second.double()
    codes, values = fp4(groups / steps[..., None])
    parts = {name: nibbles(codes.flatten(-2)), f"{name}_scale": scales, f"{name}_scale_2": second}
    return parts, (values * steps[..., None]).flatten(-2)


def in_mxfp4(stack: str, w: Tensor) -> Written:
    """Of a parameter `[e, in, out]`."""
    groups = w.mT.double().unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    codes, values = fp4(groups / 2 ** exponents[..., None])
    parts = {f"{stack}_blocks": nibbles(codes), f"{stack}_scales": (exponents + 127).to(torch.uint8)}
    return parts, (values * 2 ** exponents[..., None]).flatten(-2).mT


# Models


def deepseek_config() -> Any:
    """Ragged blocks of 128."""
    return tiny_deepseek(hidden_size=136, intermediate_size=264, n_routed_experts=3, moe_intermediate_size=200)


def qwen3_config() -> Any:
    from transformers import Qwen3Config

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    return Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)


def moe_config() -> Any:
    from transformers import Qwen3MoeConfig

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 3, "num_experts_per_tok": 2}
    return Qwen3MoeConfig(**sizes, **heads, moe_intermediate_size=32)


def llama4_config() -> Any:
    from transformers import Llama4TextConfig

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "interleave_moe_layer_step": 1}
    return Llama4TextConfig(**sizes, **heads, intermediate_size_mlp=64, num_experts_per_tok=1)


def gpt_oss_config() -> Any:
    from transformers import GptOssConfig

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssConfig(**sizes, **heads, sliding_window=8)


def rewritten(
    config: Any, path: Path, encode: Callable[[str, Tensor], Written | None], table: Mapping[str, Any]
) -> tuple[Path, Any]:
    """A checkpoint in another layout, and transformers' own model with the values that it stands for."""
    reference = stock(config)
    reference.save_pretrained(path / "dense")
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "dense" / WEIGHTS).items():
        made, value = encode(name, tensor) or ({name: tensor}, tensor)
        tensors |= made
        values[name] = value.float().contiguous()
    save_file(values, path / "dense" / WEIGHTS, metadata={"format": "pt"})
    raw = json.loads((path / "dense" / "config.json").read_text())
    source = path / "source"
    source.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, source / WEIGHTS, metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(raw | ({"quantization_config": dict(table)} if table else {})))
    return source, type(reference).from_pretrained(path / "dense")


def linears(encode: Callable[[str, Tensor], Written]) -> Callable[[str, Tensor], Written | None]:
    """Every matrix inside the blocks, but no router."""
    return lambda n, w: encode(n, w) if w.ndim == 2 and ".layers." in n and "gate.weight" not in n else None


def agrees(model: Model, reference: Any, atol: float = 1e-5) -> None:
    ids = torch.arange(24).view(2, 12)
    torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=1e-4, atol=atol)
    for name, parameter in reference.named_parameters():
        if name in model.params:
            torch.testing.assert_close(dense(model.params[name]), parameter.detach(), rtol=1e-6, atol=1e-8)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("config", [deepseek_config, qwen3_config])
def test_float8_in_blocks_that_are_cut_off(config: Callable[[], Any], tmp_path: Path) -> None:
    source, reference = rewritten(config(), tmp_path, linears(in_fp8_blocks), FP8)
    model = load(source)
    agrees(model, reference)
    (found,) = model.state.maps[f"{UP}.weight"]
    assert isinstance(found, FakeQuant)
    assert (found.granularity, found.group_size) == ("group", 128)


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_float8_with_one_scale(suffix: str, tmp_path: Path) -> None:
    def encode(name: str, w: Tensor) -> Written:
        parts, value = in_fp8_tensor(name, w, suffix)
        spelled = {"_scale_inv": "activation_scale", "_scale": "input_scale"}[suffix]
        return {**parts, name.removesuffix("weight") + spelled: torch.tensor(0.25)}, value

    table = {**FP8, "weight_block_size": None, "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]}
    source, reference = rewritten(qwen3_config(), tmp_path, linears(encode), table)
    model = load(source)
    agrees(model, reference)
    (found,) = model.state.maps[f"{UP}.weight"]
    assert isinstance(found, StaticQuant)
    assert found.scale.tolist() == [0.25]
    save(model, tmp_path / "out")
    agrees(load(tmp_path / "out"), reference)
    assert load_file(tmp_path / "out" / WEIGHTS)[f"{UP}.input_scale"].tolist() == [0.25]


@pytest.mark.parametrize("block", [16, None])
def test_stacks_of_experts_in_float8(block: int | None, tmp_path: Path) -> None:
    """As transformers itself writes them: one scale for each half of the rows where there are no blocks."""
    source, reference = rewritten(
        deepseek_config(), tmp_path, lambda *_: None, {**FP8, "weight_block_size": block and [block] * 2}
    )
    tensors = load_file(source / WEIGHTS)
    experts = "model.layers.1.mlp.experts"
    for stack in ("gate_up_proj", "down_proj"):
        w = reference.get_parameter(f"{experts}.{stack}")
        rows = block or (w.shape[1] // 2 if stack == "gate_up_proj" else w.shape[1])
        codes, scales, values = zip(*(fp8_blocks(e.detach(), rows, block or e.shape[1]) for e in w), strict=True)
        tensors |= {f"{experts}.{stack}": torch.stack(codes), f"{experts}.{stack}_scale_inv": torch.stack(scales)}
        w.data.copy_(torch.stack(values))
    kept = {n: t for n, t in tensors.items() if not (f"{experts}." in n and n.endswith(".weight"))}
    save_file(kept, source / WEIGHTS, metadata={"format": "pt"})
    model = load(source)
    assert isinstance(model.params[f"{experts}.down_proj"], Stored)
    agrees(model, reference)
    save(model, tmp_path / "out")
    assert load_file(tmp_path / "out" / WEIGHTS)[f"{experts}.2.up_proj.weight"].dtype == torch.float8_e4m3fn
    agrees(load(tmp_path / "out"), reference)


@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("said", [{"quant_method": "fp8"}, {"quant_method": "fp8", "activation_scheme": "dynamic"}])
def test_blocks_that_no_config_tells_are_told_by_shapes(said: dict[str, Any], block: int, tmp_path: Path) -> None:
    """Of 136 rows two scales could be halves of 68: sides are powers of two, 128 among them, transformers' own."""
    encode = linears(lambda name, w: in_fp8_blocks(name, w, block))
    source, reference = rewritten(deepseek_config(), tmp_path, encode, said)
    model = load(source)
    agrees(model, reference)
    assert {found.group_size for (found,) in model.state.maps.values()} == ({block} if len(said) > 1 else set())
    stored = [leaf for leaf in model.params.values() if isinstance(leaf, Stored)]
    assert {leaf.args.block for leaf in stored} == {(block, block)}


@pytest.mark.parametrize(("said", "block"), [({}, 96), ({}, 68), ({"weight_block_size": None}, 128)])
def test_blocks_that_shapes_leave_open_are_refused(said: dict[str, Any], block: int, tmp_path: Path) -> None:
    """264 rows are three blocks of 96, 136 columns two: no power of two gives both."""
    encode = linears(lambda name, w: in_fp8_blocks(name, w, block))
    source, _ = rewritten(deepseek_config(), tmp_path, encode, {"quant_method": "fp8", **said})
    with pytest.raises(BadInput, match=r"_scale_inv: got \(\d, \d\) for .*; set weight_block_size in config"):
        load(source)


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def stacks(name: str, w: Tensor) -> Written | None:
    return in_mxfp4(name, w) if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else None


def test_the_stacks_of_gpt_oss(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source, reference = rewritten(gpt_oss_config(), tmp_path, stacks, MXFP4)
    model, stored = load(source), load_file(source / WEIGHTS)
    agrees(model, reference)
    for stack in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{stack}"
        assert compressed(model.params[name])
        theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(dense(model.params[name]), theirs)
    assert 1 < perplexity(model, [torch.arange(24).view(2, 12)]) < 1e4


def test_what_is_packed_stays_so_while_the_rest_is_compressed(tmp_path: Path) -> None:
    source, _ = rewritten(gpt_oss_config(), tmp_path, stacks, MXFP4)
    model, recipe = load(source), rtn(scheme("W8A16", group_size=-1))
    run = compress(model, None, targets("re:.*self_attn.*_proj.*", recipe))
    name = "model.layers.1.mlp.experts.down_proj"
    assert run.model.params[name] is model.params[name]
    with pytest.raises(BadInput, match=r"experts\.down_proj.*: is quantized already"):
        compress(model, None, targets("re:.*experts.down_proj", recipe))


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


def nvfp4_with_inputs(name: str, w: Tensor) -> Written:
    parts, value = in_nvfp4(name, w)
    module = name.removesuffix(".weight")
    cache = {f"{module}.{module[-6]}_scale": torch.tensor(0.5)} if module[-6:] in ("k_proj", "v_proj") else {}
    return {**parts, **cache, f"{module}.input_scale": torch.tensor(0.25)}, value


@pytest.mark.parametrize("beside", [False, True])
def test_nvfp4_of_modelopt(beside: bool, tmp_path: Path) -> None:
    table = {} if beside else MODELOPT
    source, reference = rewritten(qwen3_config(), tmp_path, linears(nvfp4_with_inputs), table)
    if beside:
        own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
        (source / "hf_quant_config.json").write_text(
            json.dumps({"producer": {"name": "modelopt"}, "quantization": own})
        )
    model = load(source)
    agrees(model, reference)
    (found,) = model.state.maps[f"{UP}.weight"]
    assert isinstance(found, FakeQuant)
    assert found.divisor is not None
    assert found.divisor.tolist() == [4.0]
    assert model.state.maps["model.layers.0.self_attn@v"][0].scale.tolist() == [0.5]
    save(model, tmp_path / "out")
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    again = load(tmp_path / "out")
    agrees(again, reference)
    assert again.state.maps.keys() == model.state.maps.keys()


def nvfp4_experts(name: str, w: Tensor) -> Written | None:
    """Each expert with its own divisors, those of its input too."""
    return nvfp4_with_inputs(name, w) if ".experts." in name else None


def test_experts_of_modelopt_become_experts_of_compressed_tensors(tmp_path: Path) -> None:
    source, reference = rewritten(moe_config(), tmp_path, nvfp4_experts, MODELOPT)
    model = load(source)
    agrees(model, reference)
    stack = load_leaf(model.params["model.layers.1.mlp.experts.down_proj"])
    assert isinstance(stack, Quantized)
    save(model, tmp_path / "out", format="nvfp4-pack-quantized")
    before, after = (load_file(d / WEIGHTS) for d in (source, tmp_path / "out"))
    for name in (n.removesuffix("_scale_2") for n in before if n.endswith("weight_scale_2")):
        module = name.removesuffix(".weight")
        assert same_bits(after[f"{module}.weight_packed"], before[name])
        assert same_bits(after[f"{module}.weight_scale"], before[f"{name}_scale"])
        assert same_bits(after[f"{module}.weight_global_scale"], before[f"{name}_scale_2"].reciprocal()[None])
        assert after[f"{module}.input_global_scale"].tolist() == [4.0]
    agrees(load(tmp_path / "out"), reference)
    assert not [each for each in check(tmp_path / "out") if each.loaders == EVERY]


def nvfp4_stacks(down: bool, one: bool) -> Callable[[str, Tensor], Written | None]:
    """Stacks as ModelOpt leaves them, with pairs along the rows or down the columns, and one divisor or one each."""

    def encode(name: str, w: Tensor) -> Written | None:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return None
        made = [in_nvfp4("w.weight", e) for e in w.mT]
        divisors = torch.stack([parts["w.weight_scale_2"] for parts, _ in made])
        if one:
            made = [made[0]] * len(made)
        parts = {part: torch.stack([t[f"w.{part}"] for t, _ in made]) for part in ("weight", "weight_scale")}
        turned = {part: t.mT.contiguous() if down else t for part, t in parts.items()}
        beside = {f"{name}_weight_scale": turned["weight_scale"], f"{name}_input_scale": torch.tensor(0.25)}
        beside[f"{name}_weight_scale_2"] = divisors[0] if one else divisors
        return {name: turned["weight"], **beside}, torch.stack([value for _, value in made]).mT

    return encode


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("method", ["llama 4", "gpt-oss"])
def test_stacks_of_modelopt(method: str, one: bool, tmp_path: Path) -> None:
    config = {"llama 4": llama4_config, "gpt-oss": gpt_oss_config}[method]()
    source, reference = rewritten(config, tmp_path, nvfp4_stacks(method == "llama 4", one), MODELOPT)
    model = load(source)
    agrees(model, reference)
    names = [n for n in model.params if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(names) == 4
    for name in names:
        assert compressed(model.params[name])
        assert model.state.maps[name][0].divisor.tolist() == [4.0]
    saved = save(model, tmp_path / "out", format="nvfp4-pack-quantized")
    assert set(names) <= saved.notes.keys()
    assert all("keeps these experts in one tensor" in saved.notes[name] for name in names)
    agrees(load(tmp_path / "out"), reference)


@pytest.mark.parametrize("method", ["mxfp4", "modelopt"])
def test_stacks_whose_experts_have_names_are_written_one_by_one(method: str, tmp_path: Path) -> None:
    """By rows of outputs, as the model has them too; loaders know each expert by a name of its own."""
    source, reference = rewritten(moe_config(), tmp_path, lambda *_: None, MXFP4 if method == "mxfp4" else MODELOPT)
    tensors = {n: t for n, t in load_file(source / WEIGHTS).items() if ".experts." not in n}
    for name, w in reference.named_parameters():
        if ".experts." in name:
            encode = in_mxfp4 if method == "mxfp4" else nvfp4_stacks(down=False, one=False)
            parts, value = encode(name, w.detach().mT)  # type: ignore[misc]  # of a stack it is something
            tensors |= parts
            w.data.copy_(value.mT)
    save_file(tensors, source / WEIGHTS, metadata={"format": "pt"})
    form = {"mxfp4": "mxfp4-pack-quantized", "modelopt": "nvfp4-pack-quantized"}[method]
    saved = save(load(source), tmp_path / "out", format=form)
    rules = set() if method == "mxfp4" else {"experts"}  # transformers reads NVFP4 experts without their divisors
    assert {note.split(": ")[1] for note in saved.notes.values()} == rules
    packed = [n for n in load_file(tmp_path / "out" / WEIGHTS) if n.endswith("weight_packed")]
    assert len(packed) == 2 * 3 * 3
    assert all(re.search(r"experts\.\d\.(gate|up|down)_proj\.weight_packed$", n) for n in packed)
    assert {each.rule for each in check(tmp_path / "out") if each.severity == ERROR} == rules
    agrees(load(tmp_path / "out"), reference)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("_weight_scale", None, "no tensor {}_weight_scale, which torch.uint8 needs"),
        ("_weight_scale_2", None, "no tensor {}_weight_scale_2, which torch.uint8 needs"),
        ("_weight_scale_2", torch.ones(3), r"{}_weight_scale_2: got torch.float32 \(3,\), expected floating \(4,\)"),
        ("_input_scale", torch.ones(4), r"{}_input_scale: got torch.float32 \(4,\), expected one float"),
    ],
)
def test_parts_of_stacks_that_do_not_fit_are_named(part: str, change: Any, message: str, tmp_path: Path) -> None:
    name = "model.layers.0.feed_forward.experts.down_proj"
    source, _ = rewritten(llama4_config(), tmp_path, nvfp4_stacks(down=True, one=True), MODELOPT)
    tensors = {**load_file(source / WEIGHTS), f"{name}{part}": change}
    save_file({n: t for n, t in tensors.items() if t is not None}, source / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=message.format(re.escape(name))):
        load(source)


def test_float8_of_modelopt(tmp_path: Path) -> None:
    encode = linears(lambda n, w: in_fp8_tensor(n, w, "_scale"))
    source, reference = rewritten(qwen3_config(), tmp_path, encode, {**MODELOPT, "quant_algo": "FP8"})
    agrees(load(source), reference)


CASES: dict[str, tuple[Callable[[], Any], Callable[[str, Tensor], Written | None], dict[str, Any], str]] = {
    "fp8": (deepseek_config, linears(in_fp8_blocks), FP8, "float-quantized"),
    "mxfp4": (gpt_oss_config, stacks, MXFP4, "mxfp4-pack-quantized"),
    "modelopt": (qwen3_config, linears(in_nvfp4), MODELOPT, "nvfp4-pack-quantized"),
}


@pytest.mark.parametrize(
    ("method", "rules", "scale"),
    [
        ("fp8", {"fused-blocks"}, f"{UP}.weight_scale_inv"),
        ("mxfp4", set(), "model.layers.0.mlp.experts.down_proj_scales"),
        ("modelopt", {"fused-global-scale"}, f"{UP}.weight_scale_2"),
    ],
)
def test_what_is_read_is_checked_as_what_it_is(method: str, rules: set[str], scale: str, tmp_path: Path) -> None:
    """By the rules of engines, which hold for any method, and not by those of compressed-tensors' config and names."""
    config, encode, table, _ = CASES[method]
    source, _ = rewritten(config(), tmp_path, encode, table)
    found = check(source)
    assert {each.rule for each in found} == rules
    tensors = load_file(source / WEIGHTS)
    wrong = tensors[scale].flatten().clone()
    wrong[0] = 255 if wrong.dtype == torch.uint8 else 0
    save_file(tensors | {scale: wrong.view_as(tensors[scale])}, source / WEIGHTS, metadata={"format": "pt"})
    (damage,) = [each for each in check(source) if each not in found]
    assert (damage.about, damage.rule) == (scale, "unreadable")
    assert "expected numbers above 0" in damage.got


@pytest.mark.parametrize("method", CASES)
@pytest.mark.parametrize("dense_too", [False, True])
def test_converted_to_formats_that_engines_read(method: str, dense_too: bool, tmp_path: Path) -> None:
    config, encode, table, form = CASES[method]
    source, reference = rewritten(config(), tmp_path, encode, table)
    save(load(source), tmp_path / "out", format="dense" if dense_too else form)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    if dense_too or method == "mxfp4":  # loaders read no stacks, so these are dense with their values
        assert "quantization_config" not in written
    else:
        assert written["quantization_config"]["format"] == form
    agrees(load(tmp_path / "out"), reference)


@pytest.mark.parametrize("method", CASES)
def test_opening_reads_headers_only(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, encode, table, _ = CASES[method]
    source, _ = rewritten(config(), tmp_path, encode, table)
    read: list[str] = []
    stored = OnDisk.load

    def watched(leaf: OnDisk) -> Tensor:
        read.append(leaf.name.rpartition(".")[2])
        return stored(leaf)

    monkeypatch.setattr(OnDisk, "load", watched)
    load(source)
    assert set(read) <= {"e_score_correction_bias"}  # a buffer


STACK = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("fp8", {f"{UP}.weight_scale_inv": None}, rf"no tensor {UP}\.weight_scale_inv"),
        ("static fp8", {}, r"no tensor .*\.input_scale; its config asks for it"),
        ("fp8", {f"{UP}.weight": None}, rf"no tensor {UP}\.weight"),
        (
            "fp8",
            {f"{UP}.weight_scale_inv": torch.ones(2, 2)},
            rf"{UP}\.weight_scale_inv: got .* \(2, 2\), expected .*\(3, 2\)",
        ),
        ("mxfp4", {f"{STACK}_scales": None}, rf"no tensor {STACK}_scales"),
        ("mxfp4", {f"{STACK}_blocks": None}, rf"no tensor {STACK}"),
        ("mxfp4", {f"{STACK}_blocks": torch.zeros(4, 64, 16, dtype=torch.uint8)}, rf"{STACK}_blocks: got .*expected"),
        ("mxfp4", {f"{STACK}_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)}, rf"{STACK}_scales: got .*expected"),
        ("modelopt", {f"{UP}.weight_scale_2": None}, rf"no tensor {UP}\.weight_scale_2"),
        ("modelopt", {f"{UP}.weight_scale": torch.ones(96, 4)}, rf"{UP}\.weight_scale: got torch\.float32"),
    ],
)
def test_parts_that_do_not_fit_are_named(method: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config, encode, table, _ = CASES[method.removeprefix("static ")]
    changed = {"activation_scheme": "static"} if method.startswith("static ") else {}
    source, _ = rewritten(config(), tmp_path, encode, table | changed)
    tensors = {**load_file(source / WEIGHTS), **change}
    save_file({n: t for n, t in tensors.items() if t is not None}, source / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=message) as caught:
        load(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantized by 'awq', which is not read"),
        ({"quant_method": "gptq"}, "quantized by 'gptq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantized by 'bitsandbytes'"),
        ({**FP8, "activation_scheme": "sometimes"}, "activation_scheme 'sometimes' is not read"),
        ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not read"),
        ({**FP8, "weight_block_size": [0, 128]}, "expected sizes above 0"),
        ({**FP8, "weight_block_size": 128}, "quantization_config is malformed"),
    ],
)
def test_methods_that_are_not_read_are_named(table: dict[str, Any], message: str, tmp_path: Path) -> None:
    source, _ = rewritten(llama_config(), tmp_path, linears(in_fp8_blocks), table)
    with pytest.raises(BadInput, match=message) as caught:
        load(source)
    assert "\n" not in str(caught.value)


def test_a_global_scale_of_zero_is_refused(tmp_path: Path) -> None:
    source, _ = rewritten(qwen3_config(), tmp_path, linears(in_nvfp4), MODELOPT)
    tensors = {**load_file(source / WEIGHTS), f"{UP}.weight_scale_2": torch.tensor(0.0)}
    save_file(tensors, source / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=rf"{UP}\.weight_scale_2: got 0, expected numbers above 0"):
        dense(load(source).params[f"{UP}.weight"])


def test_input_scales_of_experts_stay_apart(tmp_path: Path) -> None:
    def encode(name: str, w: Tensor) -> Written:
        parts, value = in_fp8_tensor(name, w)
        return {**parts, f"{name.removesuffix('.weight')}.input_scale": torch.rand(1) + 0.1}, value

    table = {**FP8, "weight_block_size": None, "activation_scheme": "static"}
    source, reference = rewritten(deepseek_config(), tmp_path, linears(encode), table)
    model = load(source)
    assert model.state.maps["model.layers.1.mlp.experts.gate_up_proj"][0].scale.shape == (6, 1)
    save(model, tmp_path / "out")
    before, after = (load_file(d / WEIGHTS) for d in (source, tmp_path / "out"))
    scales = {name: scale for name, scale in before.items() if name.endswith("input_scale")}
    assert len(scales) > 20
    assert all(torch.equal(after[name], scale) for name, scale in scales.items())
    agrees(load(tmp_path / "out"), reference)
