"""Families with a correction bias in the router, against transformers: loaded from files of each spelling, trained,
with defaults for missing settings, and with refused settings. A step that is likely to be wrong is done wrong, and the
comparison must notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.test_training import (
    check_errors,
    other_routes,
    pad,
    plain_log_probs,
    sequences,
    three_gradients,
    with_joined_few,
)
from matrix import thinned
from mixers import with_attention
from proofs import proves
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tiny import CORRECTED, make_tiny_model
from trueroll.engine.models.loader import read_config
from trueroll.errors import AlignmentError, ModelError
from trueroll.kernels import reference
from trueroll.kernels.contract import ExpertsWeights, Layer
from trueroll.kernels.families import describe
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import CORRECTION_ROLE, ExpertsSpec, RouterSpec
from trueroll.kernels.spellings import own_name
from trueroll.kernels.training import align, replayed, token_experts, token_log_probs, unalign

from ..test_trainer_log_probs import DTYPES, count_differences, packed, padded, roll_out
from ..test_trainer_routes import recorded
from ..test_trainer_routes import sequences as sequences_of
from .parity import LIMIT, check_defaults, check_parity, error_with, load, theirs
from .test_hybrid_families import CPU, Hybrid, prompt

FILE = "model.safetensors"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in CORRECTED},
    "no groups and gates that are not normed": ("glm4_moe", dict(n_group=1, topk_group=1, norm_topk_prob=False)),
    "no dense layer and two shared experts": ("glm4_moe", dict(first_k_dense_replace=0, n_shared_experts=2)),
    "no norms and biases, whole rotation": (
        "glm4_moe",
        dict(use_qk_norm=False, attention_bias=False, partial_rotary_factor=1.0),
    ),
    "no window": ("dots1", dict(sliding_window=None, layer_types=None)),
    "whole rotation": ("minimax_m2", dict(rotary_dim=None)),
    "embeddings that are not scaled": ("afmoe", dict(mup_enabled=False, layer_types=None, num_hidden_layers=4)),
    "a layer without experts at the end": ("ernie4_5_moe", dict(moe_layer_end_index=1, moe_num_shared_experts=0)),
    "experts in every second layer": ("ernie4_5_moe", dict(moe_layer_interval=2, tie_word_embeddings=True)),
}


def load_to_align(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the model with the correction bias in float32, for all families."""
    spec = describe(read_config(folder))
    kind = AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(folder))]  # type: ignore[attr-defined]
    kept = set(getattr(kind, "_keep_in_fp32_modules_strict", None) or ())
    leaf = spec.names[CORRECTION_ROLE].rpartition(".")[2]
    monkeypatch.setattr(kind, "_keep_in_fp32_modules_strict", kept | {leaf})
    return load(folder, dtype)


@proves("transformers", family=lambda name: VARIANTS[name][0], backend=("reference", "cpu"), dtype="float32")
@pytest.mark.parametrize("name", VARIANTS)
def test_log_probs_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    check_parity(*VARIANTS[name], tmp_path)


def routed(layer: Layer, **fields: Any) -> Layer:
    """Return a layer with another router. A layer without experts stays unchanged."""
    mlp = layer.spec.mlp
    if not isinstance(mlp, ExpertsSpec):
        return layer
    return replace(layer, spec=replace(layer.spec, mlp=replace(mlp, router=replace(mlp.router, **fields))))


def without(layer: Layer, *names: str) -> Layer:
    """Return a layer without some weights of its experts."""
    mlp = layer.mlp
    return replace(layer, mlp=replace(mlp, **dict.fromkeys(names))) if isinstance(mlp, ExpertsWeights) else layer


SABOTAGE: dict[str, tuple[str, Callable[[Layer], Layer]]] = {
    **{f"{family} has no correction": (family, lambda layer: without(layer, "correction")) for family in CORRECTED},
    "GLM has no groups": ("glm4_moe", partial(routed, groups=1)),
    "GLM ranks groups by one expert": ("glm4_moe", partial(routed, group_best=1)),
    "GLM does not norm gates": ("glm4_moe", partial(routed, normed=False)),
    "GLM does not scale gates": ("glm4_moe", partial(routed, scale=1.0)),
    "GLM has no shared expert": ("glm4_moe", lambda layer: without(layer, "shared")),
    "Solar rotates neighbouring pairs": ("solar_open", partial(with_attention, interleaved=True)),
    "dots1 has softmax scores": ("dots1", partial(routed, score="softmax")),
    "dots1 has no window": ("dots1", partial(with_attention, window=None)),
    "MiniMax norms heads": ("minimax_m2", partial(with_attention, qk_norm=None)),
    "MiniMax does not norm gates": ("minimax_m2", partial(routed, normed=False)),
    "AFMoE rotates in all layers": ("afmoe", partial(with_attention, rotation=0)),
    "AFMoE does not norm heads": ("afmoe", partial(with_attention, qk_norm=None)),
    "ERNIE has sigmoid scores": ("ernie4_5_moe", partial(routed, score="sigmoid")),
    "ERNIE does not norm gates": ("ernie4_5_moe", partial(routed, normed=False)),
    "ERNIE rotates halves": ("ernie4_5_moe", partial(with_attention, interleaved=False)),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_step_done_wrong_is_noticed(tmp_path: Path, name: str) -> None:
    family, change = SABOTAGE[name]
    assert error_with(change, make_tiny_model(family, tmp_path)) > 100 * LIMIT


def test_a_correction_that_weighs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ids, route = make_tiny_model("minimax_m2", tmp_path), prompt(100), reference.route

    def weighing(logits: Tensor, spec: ExpertsSpec, chosen: None = None, correction: Tensor | None = None) -> Any:
        experts, _ = route(logits, spec, chosen, correction)
        assert correction is not None
        gates = (logits.sigmoid() + correction).gather(1, experts.long())
        return experts, gates / gates.sum(-1, keepdim=True)

    monkeypatch.setattr(reference, "route", weighing)
    assert (Hybrid(folder).log_probs(ids) - theirs(folder, ids)).abs().max() > 100 * LIMIT


@pytest.mark.parametrize("family", ["minimax_m2", "ernie4_5_moe"])
def test_both_spellings_load_the_same_bits(tmp_path: Path, family: str) -> None:
    """transformers saves the names of published files, which differ from those of its module."""
    published, own = make_tiny_model(family, tmp_path / "published"), tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_bytes((published / "config.json").read_bytes())
    state = load(published).state_dict()
    save_file(state, own / FILE)
    assert not {*load_file(published / FILE)} & {name for name in state if "correction" in name}, "premise"
    found, expected = (Hybrid(folder).model.checkpoint_tensors() for folder in (own, published))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].to_dense(), expected[name].to_dense()) for name in found)


@pytest.mark.parametrize("family", CORRECTED)
def test_the_correction_stays_float32(tmp_path: Path, family: str) -> None:
    """Rounded to bfloat16, the correction would choose other experts."""
    folder = make_tiny_model(family, tmp_path, "bfloat16")
    ours, stored = Hybrid(folder, torch.bfloat16, "cpu").model, load_file(folder / FILE)
    names = [name for name, weight in ours.checkpoint_tensors().items() if weight.dtype == torch.float32]
    of_ernie = 2 if family == "ernie4_5_moe" else 1
    assert len(names) == of_ernie * len(ours.spec.experts)
    by_own_name = {own_name(name, ours.spec): tensor for name, tensor in stored.items()}
    for name in names:
        found = ours.checkpoint_tensors()[name].to_dense()
        assert torch.equal(found, by_own_name[name]) and not torch.equal(found, found.bfloat16().float())


@pytest.mark.parametrize("family", ["minimax_m2", "afmoe"])
def test_a_trainer_that_rounded_the_correction_is_told_how_to_load_it(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(family, tmp_path, "bfloat16")
    with pytest.raises(AlignmentError, match="bias must be torch.float32, as in a worker .got torch.bfloat16.*strict"):
        align(load(folder, "bfloat16"))
    model = load_to_align(folder, "bfloat16", monkeypatch)
    align(model)
    saved = {own_name(name, describe(read_config(folder))): x for name, x in load_file(folder / FILE).items()}
    found = {name: tensor for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    assert found and all(torch.equal(tensor, saved[name]) for name, tensor in found.items())


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    folder = make_tiny_model("glm4_moe", tmp_path)
    expected = Hybrid(folder).log_probs(prompt(9))
    save_file(load_file(folder / FILE) | {"model.layers.3.eh_proj.weight": torch.zeros(1)}, folder / FILE)
    assert torch.equal(Hybrid(folder).log_probs(prompt(9)), expected)
    save_file(load_file(folder / FILE) | {"model.layers.4.eh_proj.weight": torch.zeros(1)}, folder / FILE)
    with pytest.raises(ModelError, match="1 unknown: model.layers.4.eh_proj.weight"):
        Hybrid(folder)


SIZES: dict[str, Any] = dict(vocab_size=200_000, hidden_size=128, num_hidden_layers=5)
MINIMAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Glm4MoeForCausalLM": ("glm4_moe", dict(hidden_size=96 * 8)),
    "SolarOpenForCausalLM": ("solar_open", {}),
    "Dots1ForCausalLM": ("dots1", dict(n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1)),
    "MiniMaxM2ForCausalLM": ("minimax_m2", dict(num_attention_heads=48)),
    "AfmoeForCausalLM": ("afmoe", {}),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", dict(hidden_size=20 * 8)),
}


@pytest.mark.parametrize("architecture", MINIMAL)
def test_missing_settings_have_the_defaults_of_transformers(tmp_path: Path, architecture: str) -> None:
    model_type, settings = MINIMAL[architecture]
    raw = SIZES | dict(architectures=[architecture], model_type=model_type) | settings
    config, spec = check_defaults(raw, tmp_path)
    [experts] = set(spec.experts)
    assert experts.top_k == config.num_experts_per_tok
    scale = getattr(config, "routed_scaling_factor", getattr(config, "route_scale", 1.0))
    assert experts.router.normed == getattr(config, "norm_topk_prob", True) and experts.router.scale == scale


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "glm4_moe",
            dict(n_group=3),
            "n_group in config.json must divide 8 experts .* .got n_group = 3 and topk_group = 2.",
        ),
        ("glm4_moe", dict(topk_group=5), "n_group in config.json must .* .got n_group = 4 and topk_group = 5."),
        ("glm4_moe", dict(topk_group=1), "must have at least 3 experts .got n_group = 4 and topk_group = 1."),
        ("glm4_moe", dict(n_group=8, topk_group=8), "groups of at least two, .* .got n_group = 8 and topk_group = 8."),
        ("glm4_moe", dict(n_group=0), "'n_group'.* at least 1"),
        ("glm4_moe", dict(first_k_dense_replace=-1), "'first_k_dense_replace'.* at least 0"),
        ("glm4_moe", dict(routed_scaling_factor=0.0), "'routed_scaling_factor'"),
        (
            "glm4_moe",
            dict(n_routed_experts=2, n_group=1, topk_group=1),
            "num_experts in config.json must be from num_experts_per_tok = 3 to",
        ),
        ("minimax_m2", dict(router_jitter_noise=0.1), "router_jitter_noise in config.json must be 0.0 .got 0.1."),
        (
            "minimax_m2",
            dict(rotary_dim=99, rope_parameters=None),
            "partial_rotary_factor in config.json must rotate from 2 to 16 elements",
        ),
        ("afmoe", dict(attention_bias=True), "attention_bias in config.json must be False"),
        ("afmoe", dict(sliding_window=None), "sliding_window is missing in config.json"),
        ("minimax_m2", dict(rotary_dim="8"), "rotary_dim in config.json must be an integer .got '8'."),
        ("afmoe", dict(num_dense_layers=-1), "'num_dense_layers'.* at least 0"),
        ("dots1", dict(partial_rotary_factor=0.5), "partial_rotary_factor in config.json must be 1.0 .got 0.5."),
        ("ernie4_5_moe", dict(use_bias=True), "use_bias in config.json must be False"),
        ("ernie4_5_moe", dict(moe_k=0), "'moe_k'.* at least 1"),
        ("ernie4_5_moe", dict(num_experts_per_tok=1), "num_experts_per_tok and moe_k .* must be equal .got 1 and 3."),
        ("ernie4_5_moe", dict(moe_layer_end_index=[1]), "moe_layer_end_index .* must be an integer .got .1.."),
        ("ernie4_5_moe", dict(num_hidden_layers="many"), "config.json has an invalid setting: .* .int. and .str."),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, family: str, change: dict[str, Any], message: str) -> None:
    raw = read_config(make_tiny_model(family, tmp_path))
    describe(raw)
    with pytest.raises(ModelError, match=message):
        describe(raw | change)


def test_a_size_of_no_shared_expert_is_read(tmp_path: Path) -> None:
    """Published files of MiniMax-M2 have this setting."""
    raw = read_config(make_tiny_model("minimax_m2", tmp_path))
    assert describe(raw | dict(shared_intermediate_size=0)) == describe(raw)


def test_a_negative_last_layer_with_experts_means_none(tmp_path: Path) -> None:
    raw = read_config(make_tiny_model("ernie4_5_moe", tmp_path))
    assert describe(raw).experts and not describe(raw | dict(moe_layer_end_index=-(10**12))).experts


@proves("company", "trainer")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", CORRECTED)
@thinned(lambda family, dtype, backend: (dtype, backend) == ("bfloat16", "cpu") or family == "glm4_moe")
def test_a_trainer_computes_the_bits_and_finds_the_routes_of_the_rollout(
    tmp_path: Path, family: str, dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples were drawn together with other samples, some after a preemption. Their prompts were partly cached."""
    folder = make_tiny_model(family, tmp_path, dtype)
    rollout = roll_out(folder, (80, 40, 5), routes=True, dtype=dtype, backend=backend)
    model = load_to_align(folder, dtype, monkeypatch)
    align(model, backend)
    routes, rows = recorded(rollout), sequences_of(rollout)
    lengths = [len(row) for row in rows]
    assert count_differences(padded(model, rollout), rollout) == 0
    assert count_differences(packed(model, rollout, routes), rollout) == 0
    found = token_experts(model, torch.cat(rows), lengths=lengths)
    assert len(found.unique()) == 8, "premise: all experts are used"
    for ours, recorded_ones in zip(found.split(lengths), routes.int().split(lengths), strict=True):
        assert ours[:-1].equal(recorded_ones[:-1])


@pytest.mark.parametrize("family", (*CORRECTED, "deepseek_v2", "nemotron_h", "granite4"))
def test_a_plain_model_replays_routes(tmp_path: Path, family: str) -> None:
    """The routes are not the model's own. The gates have the scale and the norm of the family."""
    model, (ids, mask) = load(make_tiny_model(family, tmp_path)), pad(sequences(), left=3)
    align(model, "reference")
    routes = other_routes(model, token_experts(model, ids, mask))
    expected = token_log_probs(model, ids, mask, routed_experts=routes).detach()
    own = token_log_probs(model, ids, mask).detach()
    unalign(model)
    with replayed(model, routes, mask):
        found = plain_log_probs(model, ids, mask, 1.0)
    assert torch.allclose(found[:, 4:], expected[:, 4:], atol=1e-3)
    assert not torch.allclose(own[:, 4:], expected[:, 4:], atol=0.1)


@proves("gradients", backend="cpu", dtype="float32")
@pytest.mark.parametrize("family", CORRECTED)
def test_gradients_are_as_good_as_those_of_the_unaligned_model(tmp_path: Path, family: str) -> None:
    """All models use the same routes. The gradients of biases and norms are joined, since each has too few elements."""
    folder = make_tiny_model(family, tmp_path)
    model = load(folder)
    align(model, "cpu")
    routes = token_experts(model, *pad(sequences()))
    batches = three_gradients(folder, torch.float32, "cpu", 0.7, routes)
    assert any(name.endswith(("gate.weight", "router.gate.weight")) for name in batches[2]), "premise: routers too"
    check_errors(*(with_joined_few(gradients, 128) for gradients in batches))


@pytest.mark.parametrize("family", CORRECTED)
def test_trainers_push_the_names_of_the_worker(tmp_path: Path, family: str) -> None:
    folder = make_tiny_model(family, tmp_path)
    ours, state = Hybrid(folder).model, load(folder).state_dict()
    weights = ours.checkpoint_tensors()
    assert {name: tensor.shape for name, tensor in state.items()} == {name: w.shape for name, w in weights.items()}
    assert {own_name(name, ours.spec) for name in state} == weights.keys()


@pytest.mark.parametrize("family", CORRECTED)
def test_triton_serves_float32_weights_of_routers(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = describe(read_config(make_tiny_model(family, tmp_path)))
    assert spec.own_dtypes(torch.bfloat16)[CORRECTION_ROLE] == torch.float32
    assert select_backend("triton", CPU, torch.bfloat16, spec).name == "triton"
    assert select_backend("auto", CPU, torch.bfloat16, spec).name == "cpu"


def test_a_router_is_described_in_full(tmp_path: Path) -> None:
    spec = describe(read_config(make_tiny_model("glm4_moe", tmp_path)))
    expected = RouterSpec(
        "sigmoid", wide=True, correction=True, groups=4, kept_groups=2, normed=True, eps=1e-20, scale=2.5
    )
    assert [experts.router for experts in spec.experts] == [expected] * 2
