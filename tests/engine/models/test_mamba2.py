"""Families with state spaces (Mamba 2): variants and wrong steps against transformers, prompts in chunks, spellings
of names, and refused settings. The decoder runs in memory that the test allocates. More tests of these families are in
`test_free_families`.
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
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tiny import make_tiny_model
from trueroll.engine.models.loader import SINGLE_FILE, read_config
from trueroll.errors import ConfigError, ModelError
from trueroll.kernels import layer, reference
from trueroll.kernels.contract import Layer
from trueroll.kernels.families import describe
from trueroll.kernels.layer import HEAD
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import AttentionSpec, DecoderSpec, HeadSpec, Mamba2Spec, MlpSpec

from .test_hybrid_families import Hybrid, prompt
from .test_hybrid_families import (
    test_chunks_batches_and_restored_states_change_no_bit as test_chunks_batches_and_restored_states_change_no_bit,
)

FAMILIES = ("bamba", "falcon_h1", "granite4", "nemotron_h")
BACKENDS = ("reference", "cpu")
NEAR = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of the tiny float32 model of each family."""
    folder = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(family, folder / family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def hybrid_model(request: pytest.FixtureRequest, models: dict[str, Path]) -> Path:
    """Each folder of `models`, in turn. The imported tests use this fixture."""
    return models[request.param]


def log_probs_of_transformers(folder: Path, ids: Tensor) -> Tensor:
    """Return the log-prob of each token except the first, from one forward pass without a cache."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


FALCON_H1_500M: dict[str, Any] = dict(
    architectures=["FalconH1ForCausalLM"],
    attention_bias=False,
    attention_in_multiplier=1.0,
    attention_out_multiplier=0.9375,
    attn_layer_indices=None,
    embedding_multiplier=5.656854249492381,
    head_dim=64,
    hidden_act="silu",
    hidden_size=1024,
    intermediate_size=2048,
    key_multiplier=0.39062499999999994,
    lm_head_multiplier=0.0390625,
    mamba_chunk_size=128,
    mamba_conv_bias=True,
    mamba_d_conv=4,
    mamba_d_head=64,
    mamba_d_ssm=1536,
    mamba_d_state=128,
    mamba_expand=2,
    mamba_n_groups=1,
    mamba_n_heads=24,
    mamba_norm_before_gate=False,
    mamba_proj_bias=False,
    mamba_rms_norm=False,
    mamba_use_mlp=True,
    max_position_embeddings=16384,
    mlp_bias=False,
    mlp_expansion_factor=8,
    mlp_multipliers=[0.8838834764831844, 0.5859375],
    model_type="falcon_h1",
    num_attention_heads=8,
    num_hidden_layers=36,
    num_key_value_heads=2,
    projectors_bias=False,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=100000000000.0,
    ssm_in_multiplier=1.25,
    ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    ssm_out_multiplier=0.23570226039551587,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    vocab_size=32784,
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts of whole rows, no groups": ("nemotron_h", dict(moe_latent_size=None, n_group=1, topk_group=1)),
    "rotated, no experts": ("granite4", dict(position_embedding_type="rope", num_local_experts=0)),
    "no experts": ("nemotron_h", dict(layers_block_type=["full_attention", "linear_attention", "mlp"])),
    "one group": ("bamba", dict(mamba_n_groups=1, time_step_limit=(0.0, float("inf")))),
    "no bias of the convolution": ("bamba", dict(mamba_conv_bias=False, mamba_d_conv=3)),
    "no norm": ("falcon_h1", dict(mamba_rms_norm=False)),
    "norm before the gate": ("falcon_h1", dict(mamba_norm_before_gate=True)),
    "biases beside factors": (
        "falcon_h1",
        dict(attention_bias=True, attention_in_multiplier=1.0, mlp_bias=True, mamba_conv_bias=False),
    ),
    "other sizes": ("bamba", dict(mamba_n_heads=6, mamba_d_head=28, hidden_size=84, head_dim=16)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_log_probs_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, overrides = VARIANTS[name]
    folder, ids = make_tiny_model(family, tmp_path, **overrides), prompt(60)
    expected = log_probs_of_transformers(folder, ids)
    for backend in BACKENDS:
        assert far(Hybrid(folder, backend=backend).log_probs(ids), expected) <= NEAR, backend


def without(role: str, ours: Hybrid, _: pytest.MonkeyPatch) -> None:
    """Set the weights of a role to 0."""
    for name, weight in ours.model.checkpoint_tensors().items():
        if name.endswith(ours.model.spec.names[role]):
            weight.copy_(torch.zeros(weight.shape))


def with_one_norm_group(ours: Hybrid, patch: pytest.MonkeyPatch) -> None:
    original = layer._mamba2

    def mamba2(ops: Any, x: Tensor, spec: Mamba2Spec, weights: Any, recur: Callable[..., Tensor]) -> Tensor:
        joined = replace(spec, num_groups=1, state_size=spec.vector_size)
        return original(ops, x, joined, weights, lambda _, *inputs: recur(spec, *inputs))

    patch.setattr(layer, "_mamba2", mamba2)


FAULTS: dict[str, Callable[[Hybrid, pytest.MonkeyPatch], None]] = {
    "no skip": partial(without, "mamba.skip"),
    "no bias of the convolution": partial(without, "mamba.convolution_bias"),
    "one norm group": with_one_norm_group,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_step_is_caught(hybrid_model: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    ids, ours = prompt(40), Hybrid(hybrid_model)
    expected = log_probs_of_transformers(hybrid_model, ids)
    assert far(ours.log_probs(ids), expected) <= NEAR, "premise"
    FAULTS[fault](ours, monkeypatch)
    assert far(ours.log_probs(ids), expected) > 1000 * NEAR


def test_missing_bounds_of_time_steps_are_caught(hybrid_model: Path) -> None:
    spec, ids = describe(read_config(hybrid_model)), prompt(40)
    expected = log_probs_of_transformers(hybrid_model, ids)
    assert far(Hybrid(hybrid_model, spec=unbounded(spec)).log_probs(ids), expected) > 1000 * NEAR


def unbounded(spec: DecoderSpec) -> DecoderSpec:
    """Return a copy of the spec without bounds of time steps."""
    return with_state_spaces(spec, time_step_limit=(0.0, float("inf")))


def with_state_spaces(spec: DecoderSpec, **fields: Any) -> DecoderSpec:
    """Return a copy of the spec with other fields in its state spaces."""

    def changed(mixer: Any) -> Any:
        return replace(mixer, **fields) if isinstance(mixer, Mamba2Spec) else mixer

    layers = [
        replace(each, mixer=changed(each.mixer), recurrent_mixer=changed(each.recurrent_mixer)) for each in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


def with_layers(spec: DecoderSpec, **fields: Any) -> DecoderSpec:
    """Return a copy of the spec with other fields in each layer's mixer with a KV cache, or in its MLP."""
    layers = [
        replace(each, **{part: replace(getattr(each, part), **changes) for part, changes in fields.items()})
        for each in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


WRONG_FACTORS: dict[str, Callable[[DecoderSpec], DecoderSpec]] = {
    "embeddings": partial(replace, embed_scale=1.0),
    "logits": partial(replace, head=HeadSpec()),
    "keys": lambda spec: with_layers(spec, mixer=dict(scale=0.25 * 0.8**2)),
    "queries": lambda spec: with_layers(spec, mixer=dict(scale=0.25 * 0.8 * 0.45)),
    "values": lambda spec: with_layers(spec, mixer=dict(out_scale=1.4)),
    "attention": lambda spec: with_layers(spec, mixer=dict(out_scale=0.8)),
    "gate": lambda spec: with_layers(spec, mlp=dict(gate_scale=1.0)),
    "mlp": lambda spec: with_layers(spec, mlp=dict(out_scale=1.0)),
    "state space": partial(with_state_spaces, out_scale=1.0),
    "input of the state space": partial(with_state_spaces, input_scales=(0.9, 0.55, 1.6, 0.5, 1.3)),
    "B and C": partial(with_state_spaces, input_scales=tuple(1.25 * x for x in (0.9, 0.55, 0.5, 1.6, 1.3))),
    "gate of the state space": partial(with_state_spaces, norm_before_gate=True),
}


@pytest.mark.parametrize("name", WRONG_FACTORS)
def test_a_wrong_factor_is_caught(models: dict[str, Path], name: str) -> None:
    folder, ids = models["falcon_h1"], prompt(40)
    wrong = Hybrid(folder, spec=WRONG_FACTORS[name](describe(read_config(folder))))
    assert far(wrong.log_probs(ids), log_probs_of_transformers(folder, ids)) > 100 * NEAR


def test_mixers_that_follow_each_other_are_caught(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The state space reads the sum of hidden states and the attention's output."""

    def mix(ops: Any, whole: Layer, x: Tensor, attend: Any, recur: Any) -> Tensor:
        spec, second = replace(whole.spec, recurrent_mixer=None), whole.spec.recurrent_mixer
        x = original(ops, replace(whole, spec=spec), x, attend, recur)
        spec, weights = replace(spec, mixer=second), whole.recurrent_mixer
        return original(ops, replace(whole, spec=spec, mixer=weights), x, attend, recur)

    original, ids = layer._mix, prompt(40)
    ours = Hybrid(models["falcon_h1"])
    monkeypatch.setattr(layer, "_mix", mix)
    assert far(ours.log_probs(ids), log_probs_of_transformers(models["falcon_h1"], ids)) > 1000 * NEAR


def test_outputs_of_two_mixers_are_added_before_the_residual(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order changes the rounding in bfloat16."""
    seen: dict[str, list[Tensor]] = {"rmsnorm": [], "project_back": []}

    def rmsnorm(x: Tensor, *others: Any) -> Tensor:
        seen["rmsnorm"].append(x)
        return norm(x, *others)

    def project_back(*inputs: Any) -> Tensor:
        seen["project_back"].append(project(*inputs))
        return seen["project_back"][-1]

    ours, norm, project = Hybrid(models["falcon_h1"], torch.bfloat16), reference.rmsnorm, reference.project_back
    monkeypatch.setattr(reference, "rmsnorm", rmsnorm)
    monkeypatch.setattr(reference, "project_back", project_back)
    ours.logits(prompt(50))
    x, _, _, after = seen["rmsnorm"][:4]  # calls 1 and 2 norm the two groups
    attended, recurred = seen["project_back"][:2]
    attended, recurred = ((each.float() * scale).bfloat16() for each, scale in ((attended, 0.8 * 1.4), (recurred, 0.7)))
    assert torch.equal(after, x + (attended + recurred))
    assert not torch.equal(after, (x + attended) + recurred), "premise"


def test_published_settings_of_falcon_h1_are_read() -> None:
    """Files of the 0.5B model state settings that transformers does not read, and old names."""
    spec = describe(FALCON_H1_500M)
    first, mlp = spec.layers[0], spec.layers[0].mlp
    assert len(spec.layers) == 36 and isinstance(first.mixer, AttentionSpec) and isinstance(mlp, MlpSpec)
    assert (first.mixer.head_dim, first.mixer.num_kv_heads, first.mixer.scale) == (64, 2, 0.125 * 0.39062499999999994)
    assert isinstance(space := first.recurrent_mixer, Mamba2Spec) and space.norm is None and space.inner_size == 1536
    assert space.input_scales == pytest.approx((0.4419417, 0.3125, 0.4419417, 0.625, 0.4419417))
    assert spec.rotations[0].inv_freq[1] == pytest.approx(1e11 ** (-2 / 64))
    others = dict(mamba_rms_norm=True, mamba_d_state=256, mamba_n_groups=2, time_step_limit=None)
    larger = describe(FALCON_H1_500M | others).layers[0].recurrent_mixer
    assert isinstance(larger, Mamba2Spec) and larger.norm == first.norm and not larger.norm_before_gate


def test_both_spellings_are_read_alike(models: dict[str, Path], tmp_path: Path) -> None:
    """The names of the module differ from the names in files in their beginnings, and in the names of experts. In old
    files, a text lists the types of the layers.
    """
    folder = models["nemotron_h"]
    raw, in_file = read_config(folder), load_file(folder / SINGLE_FILE)
    assert raw.pop("layers_block_type") == ["linear_attention", "moe", "full_attention", "mlp"]
    raw |= {"hybrid_override_pattern": "ME*-", "conv_kernel": None, "mamba_d_conv": raw["conv_kernel"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    of_module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert of_module.keys() & in_file.keys() == {HEAD} and len(of_module) < len(in_file), "premise"
    save_file(of_module | {"mtp.layers.0.norm.weight": torch.zeros(64)}, tmp_path / SINGLE_FILE)
    assert torch.equal(Hybrid(tmp_path).log_probs(prompt(30)), Hybrid(folder).log_probs(prompt(30)))


def test_published_settings_of_granite_4_are_read(models: dict[str, Path]) -> None:
    """Published files name the missing rotation, and state 0 experts per token if there are no experts."""
    raw = read_config(models["granite4"])
    assert describe(raw | dict(position_embedding_type="nope")) == describe(raw | dict(position_embedding_type=None))
    dense = dict(num_local_experts=0, num_experts_per_tok=0)
    assert describe(raw | dense) == describe(raw | dict(num_local_experts=0))


def test_triton_names_what_it_cannot_compute(models: dict[str, Path]) -> None:
    cpu, bamba = torch.device("cpu"), describe(read_config(models["bamba"]))
    with pytest.raises(ConfigError, match="need experts with gates .got experts without.; use the backend"):
        select_backend("triton", cpu, torch.bfloat16, describe(read_config(models["nemotron_h"])))
    first = bamba.layers[0]
    assert isinstance(first.mixer, Mamba2Spec)
    wide = replace(first, mixer=replace(first.mixer, state_size=257))
    with pytest.raises(ConfigError, match="need vectors B and C of a state space with up to 256 elements .got 257"):
        select_backend("triton", cpu, torch.bfloat16, replace(bamba, layers=(wide, *bamba.layers[1:])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layers_block_type=["conv", "full_attention"]), "the types linear_attention, full_attention, mlp and moe"),
        (dict(layers_block_type=["mlp", "linear_attention"]), "at least one full_attention layer"),
        (dict(layers_block_type=["full_attention"] * 1025), "a list of 1 to 1024 layer types"),
        (dict(layers_block_type=None, hybrid_override_pattern="M*X"), "got .M.X"),
        (dict(mlp_hidden_act="silu"), "mlp_hidden_act .* must be 'relu2' .got .silu"),
        (dict(time_step_min=-1.0), "'time_step_limit'.* at least 0"),
        (dict(time_step_min=10**400), "config.json has an invalid setting: .* too large"),
        (dict(use_bias=True), "use_bias .* must be False"),
        (dict(layer_norm_epsilon=float("nan")), "'layer_norm_epsilon'.* finite number"),
        (dict(n_groups=3), "mamba_num_heads .* must be a multiple of n_groups = 3 .got 8"),
        (dict(ssm_state_size=0), "'ssm_state_size'.* must be at least 1"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings .* must be False"),
    ],
)
def test_unsupported_settings_of_nemotron_are_refused(
    models: dict[str, Path], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        describe(read_config(models["nemotron_h"]) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mamba_n_groups=3), "mamba_n_heads .* must be a multiple of mamba_n_groups = 3 .got 8"),
        (dict(mamba_d_head=8), "mamba_n_heads . mamba_d_head .* must be mamba_expand . hidden_size = 128 .got 64"),
        (dict(mamba_proj_bias=True), "mamba_proj_bias .* must be False"),
        (dict(mamba_d_conv=0), "'mamba_d_conv'.* must be at least 1 .* .got 0"),
        (dict(mamba_d_state=10**9), "'mamba_d_state'.* at most 4096"),
        (dict(time_step_limit=[1.0, 0.5]), "'time_step_limit'.* in ascending order"),
        (dict(time_step_limit=[0.0, {"__float__": "NaN"}]), "'time_step_limit'.* pair of numbers"),
        (dict(time_step_limit=0.5), "'time_step_limit'.* pair of numbers .* .got 0.5"),
        (dict(attn_layer_indices=None), "attn_layer_indices .* must name at least one layer .got None"),
        (dict(attn_layer_indices=2), "attn_layer_indices .* must name at least one layer .got 2"),
        (dict(rope_scaling=2), "rope_scaling in config.json must be a map .got 2"),
        (dict(hidden_act="gelu"), "hidden_act .* must be 'silu'"),
        (dict(attention_bias=True), "attention_bias .* must be False"),
    ],
)
def test_unsupported_settings_of_bamba_are_refused(
    models: dict[str, Path], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        describe(read_config(models["bamba"]) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mamba_d_ssm=100), "mamba_n_heads . mamba_d_head .* must be mamba_d_ssm = 100 .got 96"),
        (dict(mamba_d_ssm=None), "must be mamba_d_ssm = 128 .got 96"),
        (dict(mamba_n_groups=4), "mamba_n_heads .* must be a multiple of mamba_n_groups = 4 .got 6"),
        (dict(mamba_proj_bias=True), "mamba_proj_bias .* must be False"),
        (dict(projectors_bias=True), "projectors_bias .* must be False"),
        (dict(attention_bias=True), "attention_in_multiplier .* must be 1.0 if attention_bias is set .got 0.8"),
        (dict(key_multiplier=0.0), "'key_multiplier'.* must be at least"),
        (dict(key_multiplier=None), "invalid setting"),
        (dict(mlp_multipliers=[1.0]), "'mlp_multipliers'.* a list of 2 numbers .got .1.0"),
        (dict(ssm_multipliers=[1.0, 1.0, "1", 1.0, 1.0]), "'ssm_multipliers'.* a list of 5 numbers"),
        (dict(ssm_multipliers=[1.0, 1.0, -1.0, 1.0, 1.0]), "'ssm_multipliers'.* at least .* .got -1.0"),
        (dict(hidden_act="gelu"), "hidden_act .* must be 'silu'"),
    ],
)
def test_unsupported_settings_of_falcon_h1_are_refused(
    models: dict[str, Path], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        describe(read_config(models["falcon_h1"]) | change)
