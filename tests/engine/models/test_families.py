"""Each family against transformers, for every variant that the family claims to cover. A new family, made up in this
file, is also tested.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixers import attention_of
from proofs import proves
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM

from tiny import TINY, WINDOWED, make_tiny_model, save_tiny_model
from trueroll.engine.engine import Engine
from trueroll.engine.models.decoder import ModelInput
from trueroll.errors import ModelError
from trueroll.kernels import families
from trueroll.kernels.contract import AttentionBatch, Pages
from trueroll.kernels.families import describe, settings
from trueroll.kernels.specs import DecoderSpec, LayerSpec, MlpSpec, NormSpec
from trueroll.kernels.training import align, token_log_probs

from ..drive import executor_of, make_engine, score, tokens

LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "llama3": ("llama", dict(rope_parameters=LLAMA3 | dict(rope_theta=5e5))),
    "yarn": (
        "qwen3",
        dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=256)),
    ),
    "theta": ("qwen2", dict(rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "one head for all queries": ("llama", dict(num_key_value_heads=1)),
    "a key-value head for each query head": ("qwen3", dict(num_key_value_heads=4)),
    "odd sizes": (
        "llama",
        dict(hidden_size=60, num_attention_heads=3, num_key_value_heads=3, head_dim=16, intermediate_size=77),
    ),
    "an odd head size": (
        "llama",
        dict(hidden_size=60, num_attention_heads=3, num_key_value_heads=3, head_dim=20, intermediate_size=77),
    ),
    "odd vocabulary": ("qwen3", dict(vocab_size=515)),
    "tied": ("llama", dict(tie_word_embeddings=True)),
    "heads wider than the model": ("qwen3", dict(head_dim=32)),
    # Windows of 32 tokens are shorter than the prompt.
    **{family: (family, {}) for family in (*WINDOWED, "ministral", "qwen3_window")},
    "a scaled embedding that is the head too": ("gemma3", dict(tie_word_embeddings=True)),
    "a window of one token": ("mistral", dict(sliding_window=1)),
    "a window beyond the prompt": ("olmo3", dict(sliding_window=301)),
    "no window": ("mistral", dict(sliding_window=None)),
    "scaled rotation of full attention": (
        "gemma3",
        dict(
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            )
        ),
    ),
    "yarn of full attention": (
        "olmo3",
        dict(
            rope_parameters=dict(
                full_attention=dict(rope_type="yarn", rope_theta=5e5, factor=4.0, original_max_position_embeddings=256),
                sliding_attention=dict(rope_type="default", rope_theta=5e5),
            )
        ),
    ),
    "other windows": ("gemma3", dict(num_hidden_layers=6, layer_types=["full_attention", "sliding_attention"] * 3)),
    "no layer types": ("gemma3", dict(num_hidden_layers=6, layer_types=None)),
}


CASES = [(name, "reference") for name in VARIANTS]
CASES += [(name, "cpu") for name in VARIANTS if name != "an odd head size"]


@proves("transformers", family=lambda name, backend: VARIANTS[name][0], dtype="float32")
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str, backend: str) -> None:
    """Greedy tokens and scores must also be equal."""
    family, overrides = VARIANTS[name]
    check_against_transformers(make_tiny_model(family, tmp_path, **overrides), backend)


def check_against_transformers(folder: Path, backend: str) -> None:
    ids = tokens(300)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = model(torch.from_numpy(ids)[None].long()).logits[0].detach()
    engine = make_engine(folder, backend=backend)
    found = logits(engine, ids)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    logprobs = expected[:-1].log_softmax(-1).gather(1, torch.from_numpy(ids[1:, None]).long()).squeeze(1)
    np.testing.assert_allclose(score(engine, ids), logprobs.numpy(), atol=2e-4)


def logits(engine: Engine, ids: np.ndarray) -> Tensor:
    """Return the logits of every token of a prompt, computed in one step."""
    model = executor_of(engine)._runner.model
    positions = torch.arange(len(ids))
    tables = torch.arange(-(-len(ids) // 16))[None]
    mixers = [attention_of(layer) for layer in model.spec.layers]
    shapes = [(tables.numel(), 16, mixer.num_kv_heads, mixer.head_dim) for mixer in mixers]
    caches = [(torch.zeros(shape), torch.zeros(shape)) for shape in shapes]
    batch = AttentionBatch([0, len(ids)], [len(ids)], tables)
    pages = [Pages(positions, batch)] * len(caches)
    with torch.inference_mode():
        out = model.forward(ModelInput(torch.from_numpy(ids).long(), positions, caches, pages))
        return model.ops.lm_head(out.hidden, model.head, model.spec.head)


def gemma(raw: dict[str, Any], architecture: str) -> DecoderSpec:
    """Describe Gemma: Gemma 3 with one rotation, and with norms before mixer and MLP only."""
    found = settings.read_settings(lambda raw: raw, raw)
    settings.expect(found, hidden_act="gelu_pytorch_tanh")
    mlp, norm = MlpSpec(found.intermediate_size, "gelu_tanh"), NormSpec(found.rms_norm_eps, zero_centered=True)
    layers = [LayerSpec(found.attention(), mlp, norm)] * found.num_hidden_layers
    return found.decoder(architecture, layers, [found.rotation()], embed_scale=found.hidden_size**0.5)


def test_a_new_family_needs_only_a_description(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new family is served, and a trainer's aligned model has the same bits."""
    monkeypatch.setitem(families.families(), "GemmaForCausalLM", gemma)
    config = GemmaConfig(**TINY, head_dim=16, tie_word_embeddings=False)
    folder = save_tiny_model(GemmaForCausalLM(config), tmp_path)
    check_against_transformers(folder, backend)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    align(model, backend)
    ids = tokens(100)
    trained = token_log_probs(model, torch.from_numpy(ids)[None])[0, 1:].detach().numpy()
    assert np.array_equal(trained.view(np.int32), score(make_engine(folder, backend=backend), ids).view(np.int32))


@pytest.mark.parametrize(
    ("dtype", "backend"), [("bfloat16", "reference"), ("bfloat16", "cpu"), ("float16", "reference")]
)
def test_half_precision_is_as_close_to_float32_as_transformers(tmp_path: Path, dtype: str, backend: str) -> None:
    folder, ids = make_tiny_model("qwen2", tmp_path), tokens(200)
    exact = score(make_engine(folder, dtype="float32", backend=backend), ids)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    logits = model(torch.from_numpy(ids)[None].long()).logits[0, :-1].float()
    theirs = logits.log_softmax(-1).gather(1, torch.from_numpy(ids[1:, None]).long()).squeeze(1).detach().numpy()
    ours = score(make_engine(folder, dtype=dtype, backend=backend), ids)
    assert 0 < np.abs(ours - exact).mean() <= 1.2 * np.abs(theirs - exact).mean()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(hidden_act="gelu"), "hidden_act .* must be 'silu' .got 'gelu'"),
        (dict(attention_bias="yes"), "attention_bias .* must be True .got .yes"),
        (dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "rope_type .* .got .*dynamic"),
        (
            dict(rope_parameters=dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)),
            "partial_rotary_factor",
        ),
        (
            dict(rope_parameters=dict(rope_type="default", rope_theta="x")),
            "config.json has an invalid setting: TypeError",
        ),
        (dict(rope_parameters=dict(rope_type="linear", factor=None)), "config.json has an invalid setting: TypeError"),
        (
            dict(rope_parameters=dict(rope_type="default", rope_theta=-5.0)),
            "rope parameters in config.json do not give a valid rotation",
        ),
        (
            dict(rope_parameters=dict(full_attention=dict(rope_type="yarn", factor=2.0))),
            "for each type of layer",
        ),
        (dict(rms_norm_eps=float("nan")), "config.json has .*'rms_norm_eps'.* must be a finite number"),
        (dict(hidden_size=2**63), "config.json has .*'hidden_size'.* at most 1048576 .got"),
        (dict(architectures=None), "architecture must .* .got None"),
        (dict(architectures=5), "architecture must .* .got None"),
        (dict(num_attention_heads="many"), r"config.json has .*'num_attention_heads' expected int, got str"),
        (dict(num_attention_heads=0), "config.json has .*'num_attention_heads'.* must be at least 1 .* .got 0"),
        (dict(vocab_size=None), r"config.json has .*'vocab_size' expected int, got NoneType"),
        (dict(per_layer_config={"1": {"rms_norm_eps": 1e-3}}), "per_layer_config in config.json is not supported"),
        (dict(head_dim=15), "head_dim"),
        (dict(num_key_value_heads=3), "num_attention_heads % num_key_value_heads .* must be 0 .got 1"),
        (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping .* must be None"),
        (dict(final_logit_softcapping=30.0), "final_logit_softcapping .* must be None"),
        (dict(use_bidirectional_attention=True), "use_bidirectional_attention .* must be False"),
        (dict(sliding_window=0), "'sliding_window'.* must be at least 1 .* .got 0"),
    ],
)
def test_unsupported_settings_are_refused(tiny_llama: Path, tmp_path: Path, change, message) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        make_engine(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(layer_types=["full_attention"] * 5),
            "layer_types in config.json must have 2 entries|number of `layer_types` .5.",
        ),
        (dict(layer_types=["chunked_attention"] * 2), "layer_types .* each full_attention or sliding_attention"),
        (dict(sliding_window=None), "sliding_window is missing in config.json"),
        (dict(hidden_activation="gelu"), "hidden_activation .* must be 'gelu_pytorch_tanh' .got 'gelu'"),
        (dict(query_pre_attn_scalar=0), "'query_pre_attn_scalar'.* must be at least .* .got 0"),
        (dict(query_pre_attn_scalar=10**400), "'query_pre_attn_scalar'.* must be at least .* at most"),
        (dict(query_pre_attn_scalar=1e-320), "'query_pre_attn_scalar'.* must be at least .* .got 1e-320"),
        (dict(query_pre_attn_scalar=None), "'query_pre_attn_scalar' .*NoneType"),
        (dict(sliding_window_pattern=0, layer_types=None), "invalid setting: ZeroDivisionError"),
        (dict(num_hidden_layers=2**40, layer_types=None), "'num_hidden_layers'.* at most 1024"),
        (
            dict(rope_parameters=dict(full_attention=dict(rope_type="dynamic", factor=2.0))),
            "rope_type .* .got .*dynamic",
        ),
        (dict(rope_parameters=dict(sliding_attention=dict(rope_theta="x"))), "invalid setting: TypeError"),
        (
            dict(rope_parameters=dict(full_attention=dict(partial_rotary_factor=0.5))),
            "partial_rotary_factor .* must be 1.0",
        ),
        (dict(partial_rotary_factor={}), "partial_rotary_factor in config.json must be 1.0"),
    ],
)
def test_unsupported_settings_of_windowed_layers_are_refused(
    windowed_models: dict[str, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((windowed_models["gemma3"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        make_engine(tmp_path)


OLD_FILES: dict[str, dict[str, Any]] = {
    "nothing optional": {},
    "null": dict(num_key_value_heads=None, max_position_embeddings=512),
    "theta beside null": dict(rope_theta=5e5, rope_scaling=None),
    "linear": dict(rope_scaling=dict(type="linear", factor=2.0), rope_theta=1e5),
    "llama3": dict(rope_scaling=LLAMA3),
    "yarn": dict(rope_scaling=dict(type="yarn", factor=4.0)),
    "yarn of another length": dict(rope_scaling=dict(type="yarn", factor=4.0), original_max_position_embeddings=256),
    "torch_dtype": dict(torch_dtype="bfloat16", tie_word_embeddings=True, rms_norm_eps=1e-5, pad_token_id=-1),
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", OLD_FILES)
def test_files_of_older_transformers_are_read_as_transformers_reads_them(
    tmp_path: Path, family: str, name: str
) -> None:
    architecture = f"{family.capitalize()}ForCausalLM"
    raw = dict(architectures=[architecture], model_type=family, vocab_size=99, hidden_size=1024, intermediate_size=77)
    raw |= dict(num_hidden_layers=2, num_attention_heads=64, num_labels=3, use_sliding_window=False) | OLD_FILES[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found, expected = describe(raw), AutoConfig.from_pretrained(tmp_path)
    rope = AutoModelForCausalLM.from_config(expected).model.rotary_emb
    mixer, [rotation] = attention_of(found.layers[0]), found.rotations
    assert torch.equal(torch.tensor(rotation.inv_freq), rope.inv_freq) and rotation.scale == rope.attention_scaling
    assert mixer.num_kv_heads == expected.num_key_value_heads and len(found.layers) == 2
    assert mixer.head_dim == getattr(expected, "head_dim", 16) and found.dtype == (expected.dtype or torch.float32)
    mlp = found.layers[0].mlp
    assert mlp is not None and (found.norm.eps, mlp.intermediate_size) == (
        expected.rms_norm_eps,
        expected.intermediate_size,
    )
    same = ("tie_word_embeddings", "max_position_embeddings", "vocab_size")
    assert [getattr(found, key) for key in same] == [getattr(expected, key) for key in same]


LEGACY_TYPES = dict(full_attention=dict(type="linear", factor=8.0), sliding_attention=dict(type="yarn", factor=2.0))
NEW_ROPES = dict(full_attention=dict(rope_type="linear", factor=8.0), sliding_attention=None)
# Shortened versions of files published with these models, and files that mix the names of several releases.
OLD_WINDOWED_FILES: dict[str, dict[str, Any]] = {
    "gemma3": dict(rope_theta=2e6, rope_local_base_freq=2e4, rope_scaling=dict(factor=8.0, rope_type="linear")),
    "gemma3 with a pattern": dict(sliding_window_pattern=2, head_dim=32, query_pre_attn_scalar=20, sliding_window=9),
    "olmo3": dict(rope_theta=4e5, rope_scaling=dict(rope_type="yarn", factor=4.0), num_hidden_layers=5),
    "gemma3 with the old name of a type": dict(rope_parameters=LEGACY_TYPES),
    "olmo3 with the old name of a type": dict(rope_parameters=LEGACY_TYPES),
    "gemma3 with old settings beside new ones": dict(rope_parameters=NEW_ROPES, rope_scaling=dict(factor=4.0)),
    "olmo3 with old settings beside new ones": dict(rope_parameters=NEW_ROPES, rope_scaling=dict(factor=4.0)),
    "mistral": dict(rope_theta=1e6, head_dim=16),
    "mistral without a window": dict(sliding_window=None),
    "ministral": dict(rope_theta=1e8, sliding_window=9, head_dim=16),
    "qwen2": dict(use_sliding_window=True, max_window_layers=3, sliding_window=9),
    "qwen2 without a window": dict(use_sliding_window=True, max_window_layers=3, sliding_window=None),
    "qwen3 that uses none": dict(use_sliding_window=False, max_window_layers=3, sliding_window=9),
}


@pytest.mark.parametrize("name", OLD_WINDOWED_FILES)
def test_windows_and_rotations_of_older_files_equal_transformers(tmp_path: Path, name: str) -> None:
    family = name.split()[0]
    model_type = dict(gemma3="gemma3_text").get(family, family)
    raw = dict(architectures=[f"{family.capitalize()}ForCausalLM"], model_type=model_type, vocab_size=99)
    raw |= dict(hidden_size=64, intermediate_size=77, num_hidden_layers=7, num_attention_heads=4)
    raw |= dict(num_key_value_heads=2) | OLD_WINDOWED_FILES[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found, expected = describe(raw), AutoConfig.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(expected).model
    attentions = [layer.self_attn for layer in model.layers]
    theirs = [getattr(a, "sliding_window", getattr(expected, "sliding_window", None)) for a in attentions]
    assert [attention_of(layer).window for layer in found.layers] == theirs
    assert [(attention_of(layer).head_dim, attention_of(layer).scale) for layer in found.layers] == [
        (a.head_dim, a.scaling) for a in attentions
    ]
    rope = model.rotary_emb
    for layer, kind in zip(found.layers, getattr(expected, "layer_types", [""] * 7), strict=True):
        rotation, prefix = found.rotations[attention_of(layer).rotation], f"{kind}_" if len(found.rotations) > 1 else ""
        assert torch.equal(torch.tensor(rotation.inv_freq), getattr(rope, f"{prefix}inv_freq"))
        assert rotation.scale == getattr(rope, f"{prefix}attention_scaling")
    same = ("tie_word_embeddings", "max_position_embeddings")
    assert [getattr(found, key) for key in same] == [getattr(expected, key) for key in same]


LOAD = """
import sys
from trueroll.engine.config import EngineConfig
from trueroll.engine.running.loading import load_model
assert load_model(EngineConfig(model=sys.argv[1], device="cpu")).model
print(sorted({"torch._dynamo", "torch._inductor", "triton"} & sys.modules.keys()))
"""


def test_a_model_is_loaded_without_torchs_compiler(tiny_llama: Path) -> None:
    """The configuration classes of transformers would import torch's compiler, which takes 150 MB in each worker."""
    printed = subprocess.run([sys.executable, "-c", LOAD, str(tiny_llama)], check=True, capture_output=True, text=True)
    assert printed.stdout == "[]\n"
