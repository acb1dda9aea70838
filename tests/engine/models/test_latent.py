"""Families with latent attention: against transformers, served, trained and pushed. Each step that is most likely to be
wrong is done wrong, and the comparison must notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import thinned
from proofs import proves

from tiny import OF_LATENT, make_tiny_model
from trueroll.engine.models.loader import read_config
from trueroll.errors import ModelError
from trueroll.kernels.contract import LatentWeights, Layer
from trueroll.kernels.families import describe
from trueroll.kernels.specs import LatentSpec
from trueroll.kernels.training import align

from ...kernels.test_training import check_errors, three_gradients, with_joined_few
from ..drive import make_engine
from ..test_trainer_log_probs import DTYPES, count_differences, packed, padded, roll_out
from ..test_trainer_routes import recorded
from .parity import LIMIT, check_parity, error_with, load

YARN: dict[str, Any] = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
STRETCHED = dict(rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.3))
DENSE: dict[str, Any] = dict(first_k_dense_replace=2)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in OF_LATENT},
    "queries of hidden states": ("deepseek_v3", dict(q_lora_rank=None, n_group=1, topk_group=1)),
    "biases": ("deepseek_v3", DENSE | dict(attention_bias=True)),
    "pairs of halves": ("deepseek_v3", DENSE | dict(rope_interleave=False)),
    "stretched": ("deepseek_v3", DENSE | STRETCHED),
    "stretched without a scale": ("deepseek_v3", DENSE | dict(rope_parameters=YARN)),
    "stretched V2": ("deepseek_v2", DENSE | STRETCHED),
    "limited groups": ("deepseek_v2", dict(topk_method="group_limited_greedy")),
    "queries that do not grow": ("mistral4", DENSE | dict(rope_parameters=YARN | dict(llama_4_scaling_beta=0.0))),
    "no layer without experts": ("glm4_moe_lite", dict(mlp_layer_types=["sparse"] * 2)),
    "as long as those of large models": (
        "deepseek_v3",
        DENSE | dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, num_hidden_layers=1),
    ),
}


@proves("transformers", family=lambda name: VARIANTS[name][0], backend=("reference", "cpu"), dtype="float32")
@pytest.mark.parametrize("name", VARIANTS)
def test_log_probs_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    check_parity(*VARIANTS[name], tmp_path)


def of_mixer(layer: Layer, **fields: Any) -> Layer:
    assert isinstance(layer.spec.mixer, LatentSpec)
    return replace(layer, spec=replace(layer.spec, mixer=replace(layer.spec.mixer, **fields)))


def with_the_norm_of_the_layer(layer: Layer) -> Layer:
    return of_mixer(layer, norm=layer.spec.norm)


def unscaled(layer: Layer) -> Layer:
    assert isinstance(layer.spec.mixer, LatentSpec)
    return of_mixer(layer, scale=layer.spec.mixer.query_dim**-0.5)


def without_biases(layer: Layer, *names: str) -> Layer:
    assert isinstance(layer.mixer, LatentWeights) and all(getattr(layer.mixer, name) is not None for name in names)
    return replace(layer, mixer=replace(layer.mixer, **dict.fromkeys(names)))


BIASED = DENSE | dict(attention_bias=True)
SABOTAGE: dict[str, tuple[dict[str, Any], Callable[[Layer], Layer]]] = {
    "halves instead of neighbours": (DENSE, partial(of_mixer, interleaved=False)),
    "the epsilon of other norms": (DENSE, with_the_norm_of_the_layer),
    "no scale of the stretched rotation": (DENSE | STRETCHED, unscaled),
    "no bias of the query's row": (BIASED, lambda layer: without_biases(layer, "q_a_bias")),
    "no bias of the latent row": (BIASED, lambda layer: without_biases(layer, "kv_a_bias")),
    "no bias of the output": (BIASED, lambda layer: without_biases(layer, "o_bias")),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_step_done_wrong_is_noticed(tmp_path: Path, name: str) -> None:
    overrides, change = SABOTAGE[name]
    assert error_with(change, make_tiny_model("deepseek_v3", tmp_path, **overrides)) > 10 * LIMIT


@proves("company", "trainer")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", OF_LATENT)
@thinned(lambda family, dtype, backend: (dtype, backend) == ("bfloat16", "cpu") or family == "deepseek_v3")
def test_a_trainer_computes_the_bits_of_the_rollout(tmp_path: Path, family: str, dtype: str, backend: str) -> None:
    """The samples were drawn together with other samples, some after a preemption. Their prompts were partly cached.
    The trainer chooses experts itself, or takes those of the rollout.
    """
    folder = make_tiny_model(family, tmp_path, dtype)
    rollout = roll_out(folder, (80, 40, 5), routes=True, dtype=dtype, backend=backend)
    model = load(folder, dtype)
    align(model, backend)
    assert count_differences(padded(model, rollout), rollout) == 0
    assert count_differences(packed(model, rollout, recorded(rollout)), rollout) == 0


def test_the_name_of_kimi_in_published_files_is_read(tmp_path: Path) -> None:
    raw = read_config(make_tiny_model("kimi_k25", tmp_path))
    assert describe(raw | dict(architectures=["KimiK25ForConditionalGeneration"])) == describe(raw)


@proves("gradients", backend="cpu", dtype="float32")
@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_gradients_are_as_good_as_those_of_the_unaligned_model(tmp_path: Path, family: str) -> None:
    folder = make_tiny_model(family, tmp_path, attention_bias=True, **DENSE)
    batches = three_gradients(folder, torch.float32, "cpu", 0.7)
    check_errors(*(with_joined_few(gradients, 128) for gradients in batches))


def test_the_cache_holds_a_latent_row_and_a_key_for_each_token(tmp_path: Path) -> None:
    """The backend `cpu` holds the latent row twice."""
    folder = make_tiny_model("deepseek_v3", tmp_path)
    for backend, sizes in (("reference", 32 + 16), ("cpu", 32 + 16 + 32)):
        engine = make_engine(folder, backend=backend, dtype="bfloat16")
        assert engine.info.token_bytes == 2 * sizes * 2
        assert engine.info.kv_bytes == engine.info.num_blocks * engine.info.block_size * engine.info.token_bytes


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("deepseek_v3", dict(kv_lora_rank=2**17), "'kv_lora_rank'.* at most 65536"),
        ("deepseek_v3", dict(num_key_value_heads=2), "num_key_value_heads in config.json must be 4 .got 2."),
        ("deepseek_v3", dict(norm_topk_prob=None), "'norm_topk_prob' expected bool, got NoneType"),
        ("mistral4", dict(rope_interleave=None), "'rope_interleave' expected bool, got NoneType"),
        ("deepseek_v3", dict(hidden_act="gelu"), "hidden_act in config.json must be 'silu'"),
        ("deepseek_v3", dict(rope_parameters=YARN | dict(mscale_all_dim="x")), "config.json has an invalid setting"),
        ("deepseek_v3", dict(rope_parameters=YARN | dict(mscale_all_dim=-9e30)), "config.json has an invalid setting"),
        ("deepseek_v3", dict(quantization_config=dict(quant_method="gptq")), "quant_method .* serve a checkpoint in"),
        ("deepseek_v2", dict(topk_method="noaux_tc"), "topk_method in config.json must be greedy or group_limited"),
        ("mistral4", dict(rope_parameters=YARN), "llama_4_scaling_beta in config.json must be a number"),
        ("mistral4", dict(rope_parameters=5), "rope_parameters in config.json must be a map"),
        ("glm4_moe_lite", dict(mlp_layer_types=["dense"]), "mlp_layer_types in config.json must have 2 entries"),
        ("glm4_moe_lite", dict(mlp_layer_types=["dense", 5]), "mlp_layer_types in config.json must have 2 entries"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, family: str, change: dict[str, Any], message: str) -> None:
    raw = read_config(make_tiny_model(family, tmp_path))
    describe(raw)
    with pytest.raises(ModelError, match=message):
        describe(raw | change)


def test_settings_that_transformers_ignores_change_nothing(tmp_path: Path) -> None:
    raw = read_config(make_tiny_model("deepseek_v2", tmp_path))
    assert describe(raw | dict(rope_interleave=False, norm_topk_prob=True)) == describe(raw)
