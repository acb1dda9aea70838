"""Families that consist of parts of other families, against transformers: loaded from files of each spelling, trained,
with defaults for missing settings, and with refused settings. Each step that is most likely to be wrong is done wrong,
and the comparison must notice.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import thinned
from mixers import with_attention
from proofs import proves
from safetensors.torch import load_file, save_file
from transformers import Mistral3Config

from tiny import FREE, make_tiny_model
from trueroll.engine.models.loader import read_config
from trueroll.errors import AlignmentError, ModelError
from trueroll.kernels.contract import AttentionWeights, ExpertsWeights, Layer, Norms
from trueroll.kernels.families import describe
from trueroll.kernels.specs import ExpertsSpec, Score
from trueroll.kernels.training import align, token_experts, token_log_probs, unalign

from ...kernels.test_training import check_errors, pad, sequences, three_gradients, with_joined_few
from ..test_trainer_log_probs import DTYPES, count_differences, padded, roll_out
from .parity import LIMIT, check_defaults, check_parity, error_with, load
from .test_hybrid_families import Hybrid, prompt

FILE = "model.safetensors"
GROWING: dict[str, Any] = dict(rope_type="yarn", rope_theta=1e6, factor=32.0, original_max_position_embeddings=32)
GROWING |= dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)
WITHOUT_WINDOWS: dict[str, Any] = dict(sliding_window=None, layer_types=["full_attention"] * 4)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FREE},
    "unrotated layers by a list": ("smollm3", dict(no_rope_layers=[0, 1, 1, 0])),
    "windows in unrotated layers": ("smollm3", dict(use_sliding_window=True, sliding_window=32)),
    "no windows": ("exaone4", WITHOUT_WINDOWS),
    "normed gates": ("olmoe", dict(norm_topk_prob=True)),
    "no biases": ("seed_oss", dict(attention_bias=False, attention_out_bias=False)),
    "dense layers": ("qwen2_moe", dict(mlp_only_layers=[0], qkv_bias=False)),
    "text of Ministral 3": ("mistral3", dict(model_type="ministral3", sliding_window=None, rope_parameters=GROWING)),
    "tied": ("mistral3", dict(tie_word_embeddings=True, sliding_window=None)),
}


@proves("transformers", family=lambda name: VARIANTS[name][0], backend=("reference", "cpu"), dtype="float32")
@pytest.mark.parametrize("name", VARIANTS)
def test_log_probs_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    check_parity(*VARIANTS[name], tmp_path)


def rotated(layer: Layer) -> Layer:
    return with_attention(layer, rotation=0)


def unrotated(layer: Layer) -> Layer:
    return with_attention(layer, rotation=1)


def normed_before(layer: Layer) -> Layer:
    before = (Norms(norms.after, None) for norms in (layer.mixer_norms, layer.mlp_norms))
    return replace(layer, **dict(zip(("mixer_norms", "mlp_norms"), before, strict=True)))


def without_biases(layer: Layer, *names: str) -> Layer:
    assert isinstance(layer.mixer, AttentionWeights) and all(getattr(layer.mixer, name) is not None for name in names)
    return replace(layer, mixer=replace(layer.mixer, **dict.fromkeys(names)))


def with_other_gates(layer: Layer) -> Layer:
    experts = layer.spec.mlp
    assert isinstance(experts, ExpertsSpec)
    score: Score = "softmax" if experts.router.score == "softmax_of_chosen" else "softmax_of_chosen"
    return replace(layer, spec=replace(layer.spec, mlp=replace(experts, router=replace(experts.router, score=score))))


def without_the_shared_expert(layer: Layer) -> Layer:
    assert isinstance(layer.mlp, ExpertsWeights)
    return replace(layer, mlp=replace(layer.mlp, shared=None))


SABOTAGE: dict[str, tuple[str, dict[str, Any], Callable[[Layer], Layer]]] = {
    "SmolLM3 rotates in all layers": ("smollm3", {}, rotated),
    "EXAONE 4 with windows rotates in all layers": ("exaone4", {}, rotated),
    "EXAONE 4 without windows rotates in none": ("exaone4", WITHOUT_WINDOWS, unrotated),
    "EXAONE 4 does not norm heads": ("exaone4", {}, partial(with_attention, qk_norm=None)),
    "Olmo 2 has its norms before": ("olmo2", {}, normed_before),
    "OLMoE does not norm q and k": ("olmoe", {}, partial(with_attention, qk_norm=None)),
    "OLMoE norms gates": ("olmoe", {}, with_other_gates),
    "Qwen2-MoE norms gates": ("qwen2_moe", {}, with_other_gates),
    "Qwen2-MoE has no shared expert": ("qwen2_moe", {}, without_the_shared_expert),
    "Qwen2-MoE has no biases": ("qwen2_moe", {}, lambda layer: without_biases(layer, "biases")),
    "Seed-OSS has no bias of its output": ("seed_oss", {}, lambda layer: without_biases(layer, "o_bias")),
    "Mixtral does not norm gates": ("mixtral", {}, with_other_gates),
    "Mixtral has no window": ("mixtral", {}, partial(with_attention, window=None)),
    "Mistral 3 has no window": ("mistral3", {}, partial(with_attention, window=None)),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_step_done_wrong_is_noticed(tmp_path: Path, name: str) -> None:
    family, overrides, change = SABOTAGE[name]
    assert error_with(change, make_tiny_model(family, tmp_path, **overrides)) > 100 * LIMIT


@pytest.mark.parametrize(
    ("family", "older", "newer"),
    [
        ("mistral3", "language_model.model.norm.weight", "model.language_model.norm.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.7.w3.weight", "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_both_spellings_of_a_file_load_the_same_bits(tmp_path: Path, family: str, older: str, newer: str) -> None:
    """transformers saves the older spelling, and its modules have the newer spelling."""
    saved = make_tiny_model(family, tmp_path / "saved")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((saved / "config.json").read_bytes())
    save_file(load(saved).state_dict(), other / FILE)
    assert older in load_file(saved / FILE) and newer in load_file(other / FILE), "premise"
    found, expected = (Hybrid(folder).model.checkpoint_tensors() for folder in (other, saved))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].to_dense(), expected[name].to_dense()) for name in found)


SIZES: dict[str, Any] = dict(vocab_size=200_000, hidden_size=128, intermediate_size=77, num_hidden_layers=5)
SIZES |= dict(num_attention_heads=4)
MINIMAL: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM3ForCausalLM": ("smollm3", {}),
    "Exaone4ForCausalLM": ("exaone4", dict(num_attention_heads=32)),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "OlmoeForCausalLM": ("olmoe", {}),
    "SeedOssForCausalLM": ("seed_oss", dict(num_attention_heads=8, attention_dropout=0.0)),
    "Qwen2MoeForCausalLM": ("qwen2_moe", dict(num_attention_heads=16)),
    "MixtralForCausalLM": ("mixtral", dict(num_attention_heads=8)),
    "FalconH1ForCausalLM": ("falcon_h1", dict(num_attention_heads=8)),
}


@pytest.mark.parametrize("architecture", MINIMAL)
def test_missing_settings_have_the_defaults_of_transformers(tmp_path: Path, architecture: str) -> None:
    model_type, settings = MINIMAL[architecture]
    raw = SIZES | dict(architectures=[architecture], model_type=model_type) | settings
    config, spec = check_defaults(raw, tmp_path)
    for experts in spec.experts:
        is_normed = getattr(config, "norm_topk_prob", True)  # Mixtral has no such setting
        assert experts.top_k == config.num_experts_per_tok
        assert (experts.router.score == "softmax_of_chosen") == is_normed


def test_a_missing_tie_of_a_wrapper_has_the_default_of_transformers(tmp_path: Path) -> None:
    raw = read_config(make_tiny_model("mistral3", tmp_path))
    del raw["tie_word_embeddings"]
    assert describe(raw).tie_word_embeddings and Mistral3Config().tie_word_embeddings
    assert not describe(raw | dict(tie_word_embeddings=False)).tie_word_embeddings


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("smollm3", dict(no_rope_layers=[1]), "no_rope_layers in config.json must have 4 numbers, .* .got .1.."),
        ("smollm3", dict(no_rope_layer_interval=0, no_rope_layers=None), "'no_rope_layer_interval'.* at least 1"),
        ("smollm3", dict(attention_bias=True), "attention_bias in config.json must be False"),
        ("exaone4", dict(sliding_window=None), "sliding_window is missing in config.json"),
        ("olmo2", dict(attention_bias=True), "attention_bias in config.json must be False"),
        ("olmoe", dict(clip_qkv=8.0), "clip_qkv in config.json must be None .got 8.0."),
        ("olmoe", dict(num_experts=2), "num_experts in config.json must be from num_experts_per_tok = 3 to"),
        ("seed_oss", dict(mlp_bias=True), "mlp_bias in config.json must be False"),
        ("qwen2_moe", dict(use_sliding_window=True), "use_sliding_window in config.json must be False"),
        (
            "mistral3",
            dict(text_config=dict(model_type="gpt2")),
            "model_type in text_config .* one of mistral, mini",
        ),
        ("mistral3", dict(text_config=5), "text_config in config.json must be a map"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, family: str, change: dict[str, Any], message: str) -> None:
    raw = read_config(make_tiny_model(family, tmp_path))
    describe(raw)
    with pytest.raises(ModelError, match=message):
        describe(raw | change)


@proves("company", "trainer")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", (*FREE, "ministral"))
@thinned(lambda family, dtype, backend: (dtype, backend) == ("bfloat16", "cpu") or family == "smollm3")
def test_a_trainer_computes_the_bits_of_the_rollout(tmp_path: Path, family: str, dtype: str, backend: str) -> None:
    """The samples were drawn together with other samples, some after a preemption. Their prompts were partly cached."""
    folder = make_tiny_model(family, tmp_path)
    states: dict[str, Any] = dict(state_interval=16) if describe(read_config(folder)).recurrent else {}
    rollout = roll_out(folder, (80, 40, 5), dtype=dtype, backend=backend, **states)
    model = load(folder, dtype)
    align(model, backend)
    assert count_differences(padded(model, rollout), rollout) == 0


@proves("gradients", backend="cpu", dtype="float32")
@pytest.mark.parametrize("family", [family for family in FREE if family != "mistral3"])
def test_gradients_are_as_good_as_those_of_the_unaligned_model(tmp_path: Path, family: str) -> None:
    """All models use the same routes. The gradients of biases and norms are joined, since each has too few elements."""
    folder, routes = make_tiny_model(family, tmp_path), None
    if describe(read_config(folder)).experts:
        model = load(folder)
        align(model, "cpu")
        routes = token_experts(model, *pad(sequences()))
    batches = three_gradients(folder, torch.float32, "cpu", 0.7, routes)
    check_errors(*(with_joined_few(gradients, 128) for gradients in batches))


def test_a_tower_that_is_not_supported_is_left_alone(tmp_path: Path) -> None:
    """The tower may have another dtype, is not changed by `align`, and gets no gradient."""
    model, ids = load(make_tiny_model("mistral3", tmp_path)), prompt(9)[None]
    model.model.vision_tower.to(torch.bfloat16)
    expected = model(ids).logits
    align(model, "cpu")
    assert (model(ids).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    pixels = dict(pixel_values=torch.zeros(1, 3, 8, 8), image_sizes=torch.tensor([[8, 8]]))
    with pytest.raises(AlignmentError, match="pixel_values: the vision tower of Mistral3For.* pass text only"):
        model(ids, **pixels)
    token_log_probs(model, ids).sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if "language_model" in name or "lm_head" in name}
    unalign(model)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize(
    ("family", "noise"),
    [("seed_oss", "attention_dropout"), ("seed_oss", "residual_dropout"), ("phi3", "resid_pdrop")],
)
def test_a_model_with_dropout_is_aligned_after_the_dropout_is_set_to_0(tmp_path: Path, family: str, noise: str) -> None:
    folder = make_tiny_model(family, tmp_path)
    config = read_config(folder)
    (folder / "config.json").write_text(json.dumps(config | {noise: 0.1}))
    with pytest.raises(AlignmentError, match=f"{noise} must be 0.0 .got 0.1., .* pass {noise}=0.0 to from_pretrained"):
        align(load(folder))
    settings: dict[str, Any] = {noise: 0.0}
    align(load(folder, **settings))
