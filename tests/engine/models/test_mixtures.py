"""Families with experts: against transformers, loaded from checkpoints of each form, with random weights, and refused
settings.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from proofs import proves
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tiny import MIXTURES, make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.models import mxfp4
from trueroll.engine.models.decoder import ROUTES, Decoder
from trueroll.engine.models.loader import read_config
from trueroll.engine.running.loading import load_dummy, load_model
from trueroll.engine.running.ranks import Links, Topology
from trueroll.errors import ModelError
from trueroll.kernels import reference
from trueroll.kernels.contract import NO_SLOT
from trueroll.kernels.families import describe
from trueroll.kernels.ranks import Rank
from trueroll.kernels.shards import is_stack
from trueroll.kernels.specs import ExpertsSpec, RouterSpec

from ..drive import generate, make_engine, run, score, tokens
from .test_hybrid_families import Hybrid, check_against_transformers, prompt

FILE = "model.safetensors"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in MIXTURES},
    "normed gates": ("qwen3_moe", dict(norm_topk_prob=True)),
    "gates over all experts beside a shared one": ("qwen3_next_moe", dict(norm_topk_prob=False)),
    "every second layer": ("qwen3_moe", dict(decoder_sparse_step=2)),
    "layers without experts": ("qwen3_next_moe", dict(mlp_only_layers=[0, 3])),
    "none at all": ("qwen3_moe", dict(num_experts=0)),
    "one expert of a token": ("qwen3_moe", dict(num_experts_per_tok=1)),
    "all experts of a token": ("gpt_oss", dict(num_experts_per_tok=8)),
    "no biases of attention": ("gpt_oss", dict(attention_bias=False)),
    "full attention first": ("gpt_oss", dict(layer_types=["full_attention", "sliding_attention"])),
}


@proves("transformers", family=lambda name: VARIANTS[name][0], backend=("reference", "cpu"), dtype="float32")
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, overrides = VARIANTS[name]
    folder = make_tiny_model(family, tmp_path, **overrides)
    check_against_transformers(folder, 300 if name in MIXTURES else 100)


def test_greedy_tokens_equal_those_of_transformers(mixture_model: Path, backend: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(mixture_model, dtype=torch.float32)
    ids = prompt(50)
    model.generation_config.eos_token_id = None
    expected = model.generate(ids[None], max_new_tokens=20, do_sample=False)[0, 50:].tolist()
    request = generate("r", ids.numpy().astype(np.int32), temperature=0.0, max_tokens=20)
    found = run(make_engine(mixture_model, backend=backend), [request])["r", 0]
    assert list(found.token_ids) == expected and len({*expected}) > 5


def test_a_router_with_near_ties_chooses_as_transformers_does(tmp_path: Path) -> None:
    """The experts form pairs. The scores of a pair differ only in their last digits, for any token."""
    folder = make_tiny_model("qwen3_moe", tmp_path)
    tensors = load_file(folder / FILE)
    routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
    for name in routers:
        router = tensors[name]
        router[1::2] = router[::2] + 2e-3 * router[1::2]
    save_file(tensors, folder / FILE)
    check_against_transformers(folder, 100)
    ours, ids = Hybrid(folder), prompt(100)
    margins: list[Tensor] = []
    route = ours.model.ops.route

    def seen(logits: Tensor, spec: ExpertsSpec, **others: Any) -> tuple[Tensor, Tensor]:
        best = logits.sort(-1, descending=True).values
        margins.append(best[:, spec.top_k - 1] - best[:, spec.top_k])
        return route(logits, spec, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours.model.ops, "route", seen)
        ours.logits(ids)
    margin = torch.cat(margins)
    assert margin.median() < 0.01 and margin.min() > 2e-5, "near ties, but none as close as rounding errors"


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split the stacks of a state dict into one tensor per expert, as transformers saves them."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        prefix = name.removesuffix("gate_up_proj")
        for i, matrix in enumerate(found.pop(name)):
            found[f"{prefix}{i}.gate_proj.weight"], found[f"{prefix}{i}.up_proj.weight"] = matrix.chunk(2)
        for i, matrix in enumerate(found.pop(f"{prefix}down_proj")):
            found[f"{prefix}{i}.down_proj.weight"] = matrix
    return {name: tensor.contiguous() for name, tensor in found.items()}


def stacked(folder: Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def same_settings(folder: Path, other: Path) -> Path:
    other.mkdir(exist_ok=True)
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    return other


def dense(folder: Path, backend: str = "reference", **settings: Any) -> dict[str, Tensor]:
    loaded = load_model(EngineConfig(model=str(folder), backend=backend, **settings))
    return {name: weight.to_dense() for name, weight in loaded.weights.tensors.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_forms_of_experts_load_the_same_bits(
    mixture_model: Path, tmp_path: Path, dtype: str, backend: str
) -> None:
    own = stacked(mixture_model)
    saved = load_file(mixture_model / FILE)
    assert any(".experts.7.up_proj.weight" in name for name in saved) == (mixture_model.name != "tiny-gpt_oss")
    save_file(own, same_settings(mixture_model, tmp_path) / FILE)
    expected = dense(mixture_model, backend, dtype=dtype)
    assert_equal(dense(tmp_path, backend, dtype=dtype), expected)
    assert_equal(expected, {name: own[name].to(getattr(torch, dtype)) for name in expected})


def test_each_stack_of_a_checkpoint_may_have_its_own_form(mixture_models: dict[str, Path], tmp_path: Path) -> None:
    folder, index = mixture_models["qwen3_moe"], {}
    own, layer = stacked(folder), "model.layers.1.mlp.experts."
    parts = one_by_one(own)
    mixed = {name: tensor for name, tensor in parts.items() if not name.startswith(layer) or "down_proj" in name}
    mixed[f"{layer}gate_up_proj"] = own[f"{layer}gate_up_proj"]
    same_settings(folder, tmp_path)
    for shard in range(3):  # the parts of one expert lie in several files
        names = sorted(mixed)[shard::3]
        save_file({name: mixed[name] for name in names}, tmp_path / f"model-{shard}.safetensors")
        index |= dict.fromkeys(names, f"model-{shard}.safetensors")
    (tmp_path / f"{FILE}.index.json").write_text(json.dumps({"weight_map": index}))
    assert_equal(dense(tmp_path), dense(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part, tensors: tensors.pop(part + "3.up_proj.weight"), r"1 missing: .*\.3.up_proj.weight \(1 of 16 "),
        (
            lambda part, tensors: [tensors.pop(n) for n in [*tensors] if part in n],
            r"2 missing: .*experts.down_proj, .*",
        ),
        (
            lambda part, tensors: tensors.update({part + "8.up_proj.weight": torch.zeros(32, 64)}),
            r"1 unknown: .*experts.8.up_proj.weight;",
        ),
        (
            lambda part, tensors: tensors.update({part + "03.up_proj.weight": torch.zeros(32, 64)}),
            r"1 unknown: .*experts.03.up_proj.weight;",
        ),
        (
            lambda part, tensors: tensors.update({part + "3.up_proj.weight": torch.zeros(64, 32)}),
            r"1 of the wrong shape: .*experts.3.up_proj.weight \(expected \[32, 64\], found \[64, 32\]\)",
        ),
        (
            lambda part, tensors: tensors.update({part + "gate_up_proj": torch.zeros(8, 64, 64)}),
            r"1 there in more than one form: model.layers.0.mlp.experts.gate_up_proj;",
        ),
        (
            lambda part, tensors: (
                tensors.update({part + "down_proj": torch.zeros(8, 64, 32, dtype=torch.int8)})
                or [tensors.pop(f"{part}{i}.down_proj.weight") for i in range(8)]
            ),
            r"1 not of F64, .*experts.down_proj \(I8\)",
        ),
    ],
    ids=["missing", "none", "too many", "zeros before", "shape", "twice", "kind"],
)
def test_experts_that_do_not_fit_the_model_are_refused(
    mixture_models: dict[str, Path], tmp_path: Path, change: Any, message: str
) -> None:
    folder = mixture_models["qwen3_moe"]
    tensors = load_file(folder / FILE)
    change("model.layers.0.mlp.experts.", tensors)
    save_file(tensors, same_settings(folder, tmp_path) / FILE)
    with pytest.raises(ModelError, match=message):
        dense(tmp_path)


def test_experts_that_the_checkpoint_does_not_have_take_no_memory(
    mixture_models: dict[str, Path], tmp_path: Path
) -> None:
    """The settings imply 200 million tensor names. None of these names is built."""
    raw = read_config(mixture_models["qwen3_moe"]) | dict(num_hidden_layers=1024, num_local_experts=65536)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / FILE).write_bytes((mixture_models["qwen3_moe"] / FILE).read_bytes())
    with pytest.raises(ModelError, match=r"[0-9]+ missing: .* and [0-9]+ more; .*wrong shape: .*mlp.gate.weight") as e:
        dense(tmp_path)
    assert len(str(e.value)) < 4000


def quantized(folder: Path, other: Path) -> dict[str, Tensor]:
    """Replace the matrices of a gpt-oss checkpoint with random blocks and scales.

    The settings are copied to `other`.
    """
    raw = read_config(folder) | {"quantization_config": {"quant_method": "mxfp4"}}
    other.mkdir(exist_ok=True)
    (other / "config.json").write_text(json.dumps(raw))
    generator, tensors = torch.Generator().manual_seed(0), load_file(folder / FILE)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        shape = count, rows, columns // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 127, shape, dtype=torch.uint8, generator=generator)
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_mxfp4_checkpoint_loads_as_in_transformers(
    mixture_models: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = quantized(mixture_models["gpt_oss"], tmp_path)
    save_file(tensors, tmp_path / FILE)
    expected = {
        name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items() if tensor.is_floating_point()
    }
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        packed = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        expected[name] = convert_moe_packed_tensors(*packed, dtype=getattr(torch, dtype))
    assert_equal(dense(tmp_path, dtype=dtype), expected)


def test_mxfp4_codes_are_kept_as_they_are_stored(mixture_models: dict[str, Path], tmp_path: Path, backend: str) -> None:
    save_file(quantized(mixture_models["gpt_oss"], tmp_path), tmp_path / FILE)
    settings: dict[str, Any] = dict(dtype="bfloat16", backend=backend)
    expected = dense(tmp_path, **settings)
    assert_equal(dense(tmp_path, **settings, quantization="auto"), expected)
    loaded = load_model(EngineConfig(model=str(tmp_path), **settings, quantization="auto")).weights
    name = "model.layers.0.mlp.experts.down_proj"
    assert loaded.model.spec.quantization == "mxfp4:experts"
    assert backend != "cpu" or loaded.tensors[name].nbytes < 0.4 * expected[name].nbytes


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_loads_its_experts(mixture_models: dict[str, Path], tmp_path: Path, packed: bool) -> None:
    folder = mixture_models["gpt_oss"]
    if packed:
        save_file(quantized(folder, tmp_path), tmp_path / FILE)
        folder = tmp_path
    config = EngineConfig(model=str(folder))
    whole = load_model(config).weights.tensors
    for index in range(2):
        exchange: Any = SimpleNamespace(rank=Rank(index, 2), native=None)
        own = load_model(config, Links(Topology(2, 1), exchange, exchange)).weights.tensors
        stacks = {name: weight for name, weight in own.items() if is_stack(weight)}
        assert len(stacks) == 4 * 2, "premise: matrices and biases of two layers"
        for name, weight in stacks.items():
            assert weight.shape == whole[name].shape
            assert weight.to_dense().equal(whole[name].to_dense().chunk(2)[index]), name


def test_all_mxfp4_numbers_equal_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None].expand(1, 255, 16)
    for dtype in (torch.float32, torch.bfloat16):
        expected = convert_moe_packed_tensors(blocks.contiguous(), scales.contiguous(), dtype=dtype).transpose(1, 2)
        found = torch.stack([mxfp4.quantized(*each).values() for each in zip(blocks, scales, strict=True)]).to(dtype)
        assert found.shape == expected.shape == (1, 255, 512)
        assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_a_nan_scale_of_mxfp4_is_refused(mixture_models: dict[str, Path], tmp_path: Path) -> None:
    """The scale byte 255 means NaN. Read as an exponent, it would be 2 ** 128, which is infinite in float32."""
    tensors = quantized(mixture_models["gpt_oss"], tmp_path)
    name = next(name for name in tensors if name.endswith("_scales"))
    tensors[name][1, 2, 0] = 254
    save_file(tensors, tmp_path / FILE)
    assert dense(tmp_path)
    tensors[name][1, 2, 0] = 255
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ModelError, match=rf"{name}: expert 1: 1 of \d+ scales are NaN \(byte 255\); the checkpoint is"):
        dense(tmp_path)


def test_blocks_and_scales_may_lie_in_two_files(mixture_models: dict[str, Path], tmp_path: Path) -> None:
    whole = quantized(mixture_models["gpt_oss"], tmp_path / "whole")
    save_file(whole, tmp_path / "whole" / FILE)
    quantized(mixture_models["gpt_oss"], tmp_path)
    files = {name: f"model-{int(name.endswith('_scales'))}.safetensors" for name in whole}
    for file in {*files.values()}:
        save_file({name: tensor for name, tensor in whole.items() if files[name] == file}, tmp_path / file)
    (tmp_path / f"{FILE}.index.json").write_text(json.dumps({"weight_map": files}))
    assert_equal(dense(tmp_path), dense(tmp_path / "whole"))


GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(GATE_UP + "_scales"), "1 missing: .*gate_up_proj_scales;"),
        (lambda tensors: tensors.pop(GATE_UP + "_blocks"), "1 missing: .*gate_up_proj_blocks;"),
        (
            lambda tensors: tensors.update({GATE_UP + "_blocks": torch.zeros(7, 128, 2, 16, dtype=torch.uint8)}),
            r"1 of the wrong shape: .*_blocks \(expected \[8, 128, 2, 16\], found \[7, 128, 2, 16\]\)",
        ),
        (
            lambda tensors: tensors.update({GATE_UP + "_scales": torch.zeros(8, 128, 2)}),
            r"1 not of U8: .*_scales \(F32\)",
        ),
        (
            lambda tensors: tensors.update({GATE_UP: torch.zeros(8, 64, 128)}),
            "1 there in more than one form: .*gate_up_proj;",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.weight_blocks": torch.zeros(1)}),
            "1 unknown: .*q_proj.weight_blocks;",
        ),
    ],
    ids=["no scales", "no blocks", "shape", "kind", "twice", "of attention"],
)
def test_blocks_and_scales_that_do_not_fit_are_refused(
    mixture_models: dict[str, Path], tmp_path: Path, change: Any, message: str
) -> None:
    tensors = quantized(mixture_models["gpt_oss"], tmp_path)
    change(tensors)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ModelError, match=message):
        dense(tmp_path)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3_moe", dict(num_local_experts=2), "num_experts in .* from num_experts_per_tok = 3 to 65536 .got 2"),
        ("qwen3_next_moe", dict(num_experts=65537), "to 65536 .got 65537"),
        ("gpt_oss", dict(num_local_experts=65537), "to 65536 .got 65537"),
        ("qwen3_5_moe", dict(num_experts=-1), "to 65536 .got -1"),
        ("qwen3_moe", dict(num_experts_per_tok=0), "'num_experts_per_tok'.* must be at least 1 .* .got 0"),
        ("qwen3_moe", dict(moe_intermediate_size=2**40), "'moe_intermediate_size'.* at most 4194304 .got"),
        ("qwen3_next_moe", dict(shared_expert_intermediate_size=0), "'shared_expert_intermediate_size'.* at least 1"),
        ("qwen3_next_moe", dict(decoder_sparse_step=0), "'decoder_sparse_step'.* must be at least 1 .* .got 0"),
        ("qwen3_next_moe", dict(mlp_only_layers=["0"]), "'mlp_only_layers'"),
        ("qwen3_moe", dict(use_sliding_window=True), "use_sliding_window .* must be False"),
        ("gpt_oss", dict(swiglu_alpha=1.0), "swiglu_alpha in config.json must be 1.702 .got 1.0"),
        ("gpt_oss", dict(swiglu_limit=6), "swiglu_limit in config.json must be 7.0 .got 6"),
        ("gpt_oss", dict(hidden_act="gelu"), "hidden_act .* must be 'silu'"),
        ("gpt_oss", dict(sliding_window=None), "sliding_window is missing in config.json"),
        (
            "gpt_oss",
            dict(quantization_config=dict(quant_method="gptq")),
            "quant_method .* must be awq, compressed-tensors, fp8, modelopt or mxfp4 .got 'gptq'",
        ),
        (
            "qwen3_moe",
            dict(quantization_config=dict(quant_method="mxfp4")),
            "quant_method .* must be awq, compressed-tensors, fp8 or modelopt .got 'mxfp4'",
        ),
        ("qwen3_5_moe", dict(quantization_config=dict(quant_method="gptq")), "must be .* modelopt .got 'gptq'"),
    ],
)
def test_unsupported_settings_are_refused(
    mixture_models: dict[str, Path], family: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        describe(read_config(mixture_models[family]) | change)


# Shortened published settings. Omitted settings have the defaults of transformers.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(norm_topk_prob=True, rope_theta=1e6, intermediate_size=6144, num_key_value_heads=4),
    "qwen3_next": dict(rope_theta=1e7, partial_rotary_factor=0.25, intermediate_size=5120, mlp_only_layers=[2]),
    "qwen3_5_moe_text": dict(rope_parameters=dict(rope_theta=1e7, rope_type="default", partial_rotary_factor=0.25)),
    "gpt_oss": dict(
        rope_theta=150000,
        rope_scaling=dict(
            beta_fast=32.0,
            beta_slow=1.0,
            factor=32.0,
            original_max_position_embeddings=4096,
            rope_type="yarn",
            truncate=False,
        ),
        swiglu_limit=7.0,
        initial_context_length=4096,
        experts_per_token=4,
        attention_bias=True,
    ),
    "gpt_oss without more": {},
}
ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_are_read_as_transformers_reads_them(tmp_path: Path, name: str) -> None:
    model_type = name.split()[0]
    raw = dict(architectures=[ARCHITECTURES[model_type]], model_type=model_type, vocab_size=99, hidden_size=64)
    raw |= dict(num_hidden_layers=4, num_attention_heads=16) | PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found, config = describe(raw), AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ours = Decoder(found, reference, partial(torch.empty, device="meta"))  # type: ignore[arg-type]
    shapes = {name: tuple(weight.shape) for name, weight in ours.checkpoint_tensors().items()}
    assert shapes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with torch.device("cpu"):
        rope = type(model.model.rotary_emb)(config)
    [rotation] = found.rotations
    assert torch.equal(torch.tensor(rotation.inv_freq), rope.inv_freq) and rotation.scale == rope.attention_scaling
    for layer, theirs in zip(found.layers, model.model.layers, strict=True):
        router: Any = getattr(theirs.mlp, "gate", getattr(theirs.mlp, "router", None))
        assert isinstance(layer.mlp, ExpertsSpec) == hasattr(router, "top_k")
        if isinstance(layer.mlp, ExpertsSpec):
            score = "softmax_of_chosen" if getattr(router, "norm_topk_prob", True) else "softmax"
            assert (layer.mlp.top_k, layer.mlp.router) == (router.top_k, RouterSpec(score))
    assert found.max_position_embeddings == config.max_position_embeddings
    assert found.norm.eps == config.rms_norm_eps


def test_random_weights_use_all_experts(mixture_model: Path) -> None:
    config = EngineConfig(model=str(mixture_model / "config.json"), backend="reference", num_blocks=64)
    loaded = load_dummy(config)
    ours = Hybrid(mixture_model)
    for name, weight in ours.model.checkpoint_tensors().items():
        weight.copy_(loaded.weights.tensors[name])
    with torch.inference_mode():
        assert 0.5 < ours.logits(prompt(200)).std() < 2
    outputs = []
    forward = ours.model.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours.model, "forward", lambda tokens: outputs.append(forward(tokens)) or outputs[-1])
        ours.step(ours.memories(1), [(0, prompt(200), 0)], [NO_SLOT], [3])
    routes = outputs[0].records[ROUTES]
    assert all(len(layer.unique()) == 8 for layer in routes)
    assert np.isfinite(score(Engine(config, loaded), tokens(60))).all()
