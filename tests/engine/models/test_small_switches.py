"""Families that differ from Llama by small switches: neighbouring pairs in rotations, joined matrices, biases,
multipliers, caps, growing queries, and LongRoPE.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixers import attention_of
from proofs import proves
from torch import Tensor
from transformers import AutoModelForCausalLM

from tiny import SWITCHES, make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.running.loading import load_model
from trueroll.errors import ConfigError, ModelError
from trueroll.kernels import families
from trueroll.kernels.families import describe
from trueroll.kernels.selection import select_backend
from trueroll.kernels.specs import PLAIN_HEAD, DecoderSpec, HeadSpec
from trueroll.kernels.training import align, token_log_probs, token_statistics

from ..drive import make_engine, score, tokens
from ..test_trainer_log_probs import count_differences, packed, roll_out, trainer_model
from .test_families import check_against_transformers

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in SWITCHES},
    "a window and one rotation": ("phi3", dict(sliding_window=32, rope_parameters=None)),
    "alike factors beyond the original length": (
        "phi3",
        dict(
            original_max_position_embeddings=64,
            rope_parameters=dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.5] * 8, long_factor=[1.5] * 8),
        ),
    ),
    "no caps": ("gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=None)),
    "no biases": ("glm4", dict(attention_bias=False)),
    "biases of attention alone": ("llama_biases", dict(mlp_bias=False)),
    "biases of the MLP alone": ("llama_biases", dict(attention_bias=False)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("switches")
    return {family: make_tiny_model(family, parent / family) for family in SWITCHES}


CASES = [(name, "cpu") for name in VARIANTS] + [(name, "reference") for name in SWITCHES]


@proves("transformers", family=lambda name, backend: VARIANTS[name][0], dtype="float32")
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str, backend: str) -> None:
    family, overrides = VARIANTS[name]
    check_against_transformers(make_tiny_model(family, tmp_path, **overrides), backend)


def with_mixers(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    layers: Any = spec.layers
    return replace(spec, layers=tuple(replace(each, mixer=replace(each.mixer, **changes)) for each in layers))


def with_rotation(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    return replace(spec, rotations=tuple(replace(each, **changes) for each in spec.rotations))


def long_factors(spec: DecoderSpec) -> DecoderSpec:
    factors = zip([1.0, 1.0, 1.1, 1.2, 1.4, 1.7], [1.0, 1.5, 3.0, 8.0, 16.0, 32.0], strict=True)
    pairs = zip(spec.rotations[0].inv_freq, factors, strict=True)
    return with_rotation(spec, inv_freq=tuple(each * short / long for each, (short, long) in pairs))


SABOTAGES: dict[str, tuple[str, Callable[[DecoderSpec], DecoderSpec]]] = {
    "halves instead of neighbouring pairs": ("glm4", lambda spec: with_mixers(spec, interleaved=False)),
    "no cap of the logits": ("gemma2", lambda spec: replace(spec, head=PLAIN_HEAD)),
    "no cap of the scores": ("gemma2", lambda spec: with_mixers(spec, soft_cap=None)),
    "no scale of the logits": ("granite", lambda spec: replace(spec, head=PLAIN_HEAD)),
    "the inverse scale of the logits": ("granite", lambda spec: replace(spec, head=HeadSpec(0.4))),
    "no scale of the embeddings": ("granite", lambda spec: replace(spec, embed_scale=1.0)),
    "the usual scale of the scores": ("granite", lambda spec: with_mixers(spec, scale=0.25)),
    "no scale of residuals": (
        "granite",
        lambda spec: replace(spec, layers=tuple(replace(each, residual_scale=1.0) for each in spec.layers)),
    ),
    "queries that do not grow": ("ministral3", lambda spec: with_rotation(spec, q_growth=None)),
    "long factors": ("phi3", long_factors),
    "no scale of cosines": ("phi3", lambda spec: with_rotation(spec, scale=1.0)),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_wrong_step_is_found(folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (family, change), ids = SABOTAGES[name], tokens(100)
    expected = score(make_engine(folders[family], backend="cpu"), ids)
    architecture = json.loads((folders[family] / "config.json").read_text())["architectures"][0]
    own = families.families()[architecture]
    monkeypatch.setitem(families.families(), architecture, lambda raw, name: change(own(raw, name)))
    found = score(make_engine(folders[family], backend="cpu"), ids)
    assert np.abs(found - expected).max() > 0.01


@proves("company", "trainer")
@pytest.mark.parametrize(
    ("family", "dtype", "backend"),
    [
        *((family, "bfloat16", "cpu") for family in SWITCHES),
        *((family, "float32", "reference") for family in ("gemma2", "granite", "phi3")),
    ],
)
def test_a_trainer_computes_the_bits_of_the_rollout(
    folders: dict[str, Path], family: str, dtype: str, backend: str
) -> None:
    """Some prompts were partly cached, and some samples were preempted."""
    rollout = roll_out(folders[family], (80, 40, 5), dtype=dtype, backend=backend)
    model = trainer_model(folders[family], dtype)
    align(model, backend)
    assert count_differences(packed(model, rollout), rollout) == 0
    ids = torch.from_numpy(tokens(60))[None]
    scored, statistics = token_log_probs(model, ids), token_statistics(model, ids, top_logprobs=3)
    assert torch.equal(statistics.logprobs, scored)
    expected = score(make_engine(folders[family], dtype=dtype, backend=backend), tokens(60))
    assert np.array_equal(scored[0, 1:].detach().numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize(("family", "rounds"), [("gemma2", True), ("granite", False)])
def test_embeddings_are_scaled_to_the_bit_of_transformers(tmp_path: Path, family: str, rounds: bool) -> None:
    sizes = dict(hidden_size=96, head_dim=32) if rounds else dict(embedding_multiplier=96**0.5)
    folder = make_tiny_model(family, tmp_path, dtype="bfloat16", **sizes)
    ids = torch.arange(512)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    table = model.get_input_embeddings().weight.detach()
    scales = torch.tensor(96**0.5).bfloat16().item(), 96**0.5
    rounded, plain = (table * scale for scale in scales)
    assert not torch.equal(rounded, plain), "premise"
    expected = model.get_input_embeddings()(ids) if rounds else table * model.model.embedding_multiplier
    assert torch.equal(expected, rounded if rounds else plain)
    found = load_model(EngineConfig(model=str(folder), backend="reference")).model
    assert torch.equal(found.embedded(ids), expected)
    align(model, "reference")
    assert torch.equal(model.get_input_embeddings()(ids), expected)


def gradients(model: Any, log_probs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (log_probs * torch.linspace(-1.0, 1.0, log_probs.numel())).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@proves("gradients", backend="cpu", dtype="float32")
@pytest.mark.parametrize("family", SWITCHES)
def test_gradients_and_logits_are_those_of_the_unaligned_model(folders: dict[str, Path], family: str) -> None:
    model, ids = AutoModelForCausalLM.from_pretrained(folders[family], attn_implementation="eager"), tokens(60)
    batch = torch.from_numpy(ids).long()[None]
    logits = model(batch).logits
    plain = logits[0, :-1].log_softmax(-1).gather(1, batch[0, 1:, None]).squeeze(1)
    expected = gradients(model, plain)
    align(model, "cpu")
    found = gradients(model, token_log_probs(model, batch)[0, 1:])
    of_logits = model(batch).logits
    assert (of_logits - logits).abs().max() < 1e-4 * logits.abs().max()
    through_logits = gradients(model, of_logits[0, :-1].log_softmax(-1).gather(1, batch[0, 1:, None]).squeeze(1))
    for name, gradient in expected.items():
        for ours in (found[name], through_logits[name]):
            assert (ours - gradient).norm() < 2e-4 * gradient.norm(), name


@pytest.mark.parametrize("family", ["phi3", "glm4"])
def test_weights_have_the_names_of_the_module(folders: dict[str, Path], family: str, backend: str) -> None:
    """A joined matrix is one weight, which the parts share, so pushes need no other names."""
    loaded = load_model(EngineConfig(model=str(folders[family]), backend=backend))
    model = AutoModelForCausalLM.from_pretrained(folders[family])
    state = {name: value for name, value in model.state_dict().items() if not name.endswith("inv_freq")}
    assert loaded.weights.tensors.keys() == state.keys() and any("gate_up_proj" in name for name in state)
    assert all(torch.equal(loaded.weights.tensors[name].to_dense(), value) for name, value in state.items())


def test_a_joined_matrix_of_other_sizes_needs_the_reference(tmp_path: Path) -> None:
    folder = make_tiny_model("phi3", tmp_path, intermediate_size=104)
    spec = describe(json.loads((folder / "config.json").read_text()))
    with pytest.raises(ConfigError, match="an intermediate size that is a multiple of 16 .got 104.*reference"):
        select_backend("cpu", torch.device("cpu"), torch.float32, spec)
    check_against_transformers(folder, "reference")


def test_a_model_with_two_sets_of_factors_ends_at_the_original_length(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="max_model_len must be at most 512"):
        make_engine(folders["phi3"], max_model_len=513)
    assert describe(json.loads((folders["phi3"] / "config.json").read_text())).max_position_embeddings == 512


SU = dict(type="su", short_factor=[1.0] * 8, long_factor=[2.0] * 8)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gemma2", dict(query_pre_attn_scalar=None), "'query_pre_attn_scalar' .*NoneType"),
        ("gemma2", dict(final_logit_softcapping=0), "final_logit_softcapping"),
        ("gemma2", dict(hidden_activation="gelu"), "hidden_activation .* must be 'gelu_pytorch_tanh'"),
        ("glm4", dict(attention_bias="yes"), "attention_bias .* must be True .got 'yes'"),
        ("glm4", dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=2.0)), "from 2 to 32 elements"),
        ("glm4", dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=1e20)), "of a head .got 1e.20"),
        ("granite", dict(logits_scaling=0), "logits_scaling"),
        ("granite", dict(residual_multiplier="x"), "residual_multiplier"),
        ("ministral3", dict(rope_parameters=dict(rope_type="default")), "llama_4_scaling_beta .* .got None"),
        (
            "ministral3",
            dict(rope_parameters=dict(rope_type="default", llama_4_scaling_beta=0.1)),
            "original_max_position_embeddings in config.json must be an integer from 1 to .* .got None",
        ),
        ("phi3", dict(rope_parameters=dict(rope_type="linear", factor=2.0)), "linear"),
        ("phi3", dict(rope_parameters=SU, original_max_position_embeddings="x"), "original_max_position_embeddings"),
        ("phi3", dict(rope_parameters=SU | dict(long_factor=[2.0] * 7)), "long_factor .* 8 numbers .got"),
    ],
)
def test_unsupported_settings_are_refused(
    folders: dict[str, Path], family: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        describe(json.loads((folders[family] / "config.json").read_text()) | change)


def test_the_defaults_of_older_files() -> None:
    sizes = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=99)

    def spec(architecture: str, **settings: Any) -> DecoderSpec:
        return describe(dict(architectures=[architecture], **sizes) | settings)

    (rotation,) = spec("Ministral3ForCausalLM").rotations
    assert rotation.q_growth == (0.1, 16384) and attention_of(spec("Ministral3ForCausalLM").layers[0]).head_dim == 128
    gemma2 = spec("Gemma2ForCausalLM")
    assert gemma2.head == HeadSpec(soft_cap=30.0) and gemma2.windows == (None, 4096) and gemma2.tie_word_embeddings
    glm4 = attention_of(spec("Glm4ForCausalLM").layers[0])
    assert (glm4.rotated, glm4.interleaved, glm4.qkv_bias, glm4.o_bias) == (64, True, True, False)
    assert spec("GraniteForCausalLM").head == PLAIN_HEAD
    old = spec("Phi3ForCausalLM", rope_scaling=SU, max_position_embeddings=131072)
    assert old.max_position_embeddings == 4096 and old.rotations[0].scale > 1.0
    # transformers does not read the original length from the map.
    inside = SU | dict(original_max_position_embeddings=64)
    assert spec("Phi3ForCausalLM", rope_scaling=inside, max_position_embeddings=131072) == old


def test_the_triton_kernels_compute_neighbouring_pairs_scales_and_caps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels run in the interpreter, so the tokens are few. GLM-4 gets the scales and caps of other families."""
    own = families.families()["Glm4ForCausalLM"]

    def switched(raw: dict[str, Any], architecture: str) -> DecoderSpec:
        spec = with_mixers(own(raw, architecture), soft_cap=2.0)
        spec = with_rotation(spec, q_growth=(0.5, 2))
        layers = tuple(replace(layer, residual_scale=0.6) for layer in spec.layers)
        return replace(spec, layers=layers, head=HeadSpec(0.7, soft_cap=3.0))

    monkeypatch.setitem(families.families(), "Glm4ForCausalLM", switched)
    sizes = dict(num_hidden_layers=1, vocab_size=64, num_attention_heads=2, num_key_value_heads=1)
    folder = make_tiny_model("glm4", tmp_path, dtype="bfloat16", **sizes)
    ids = tokens(9, vocab_size=64)
    found = score(make_engine(folder, backend="triton", num_blocks=16, block_size=2), ids)
    model = trainer_model(folder, "bfloat16")
    align(model, "triton")
    trained = token_log_probs(model, torch.from_numpy(ids)[None])[0, 1:]
    assert np.array_equal(trained.detach().numpy().view(np.int32), found.view(np.int32))
    trained.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    reference = score(make_engine(folder, backend="reference", dtype="bfloat16"), ids)
    assert np.abs(found - reference).max() < 0.1
