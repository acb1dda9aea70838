"""The dense decoder against transformers, for every variant it claims to cover."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tiny import make_tiny_model
from trueroll.engine.models.dense_config import DenseConfig
from trueroll.errors import ModelError

from ..drive import make_engine, score, tokens

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
}


CASES = [(name, "reference") for name in VARIANTS]
CASES += [(name, "cpu") for name in VARIANTS if name != "an odd head size"]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_scores_equal_transformers(tmp_path: Path, name: str, backend: str) -> None:
    family, overrides = VARIANTS[name]
    folder = make_tiny_model(family, tmp_path, **overrides)
    ids = tokens(300)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.from_numpy(ids)[None].long())
    logprobs = expected.logits[0, :-1].log_softmax(-1).gather(1, torch.from_numpy(ids[1:, None]).long()).squeeze(1)
    np.testing.assert_allclose(score(make_engine(folder, backend=backend), ids), logprobs.detach().numpy(), atol=2e-4)


@pytest.mark.parametrize(
    ("dtype", "backend"), [("bfloat16", "reference"), ("bfloat16", "cpu"), ("float16", "reference")]
)
def test_half_precision_is_as_near_to_float32_as_transformers(tmp_path: Path, dtype: str, backend: str) -> None:
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
        (dict(hidden_act="gelu"), "hidden_act = 'silu'.*found 'gelu'"),
        (dict(attention_bias=True), "attention_bias"),
        (dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "found .*dynamic"),
        (
            dict(rope_parameters=dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)),
            "partial_rotary_factor",
        ),
        (dict(rope_parameters=dict(rope_type="default", rope_theta="x")), "config.json: .* found a fault: TypeError"),
        (dict(rope_parameters=dict(rope_type="linear", factor=None)), "config.json: .* found a fault: TypeError"),
        (dict(rope_parameters=dict(rope_type="default", rope_theta=-5.0)), "rope parameters that rotate"),
        (dict(rope_parameters=dict(full_attention=dict(rope_type="yarn", factor=2.0))), "for all layers"),
        (dict(rms_norm_eps=float("nan")), "config.json: .*'rms_norm_eps'.* expected a finite number"),
        (dict(hidden_size=2**63), "config.json: .*'hidden_size'.* at most 1048576, found"),
        (dict(architectures=None), "found None"),
        (dict(architectures=5), "found None"),
        (dict(num_attention_heads="many"), r"config.json: .*'num_attention_heads' expected int, got str"),
        (dict(num_attention_heads=0), "config.json: .*'num_attention_heads'.* expected at least 1 .* found 0"),
        (dict(vocab_size=None), r"config.json: .*'vocab_size' expected int, got NoneType"),
        (dict(per_layer_config={"1": {"rms_norm_eps": 1e-3}}), "expected per_layer_config = None"),
        (dict(head_dim=15), "head_dim"),
        (dict(num_key_value_heads=3), "num_attention_heads % num_key_value_heads = 0 .*found 1"),
    ],
)
def test_what_it_does_not_compute_is_refused(tiny_llama: Path, tmp_path: Path, change, message) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
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
def test_files_of_older_transformers_are_read_as_it_reads_them(tmp_path: Path, family: str, name: str) -> None:
    architecture = f"{family.capitalize()}ForCausalLM"
    raw = dict(architectures=[architecture], model_type=family, vocab_size=99, hidden_size=1024, intermediate_size=77)
    raw |= dict(num_hidden_layers=2, num_attention_heads=64, num_labels=3, use_sliding_window=False) | OLD_FILES[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = DenseConfig.from_json(raw, tmp_path)
    expected = AutoConfig.from_pretrained(tmp_path)
    rope = AutoModelForCausalLM.from_config(expected).model.rotary_emb
    assert torch.equal(found.inv_freq, rope.inv_freq) and found.rope_scale == rope.attention_scaling
    assert found.num_kv_heads == expected.num_key_value_heads
    assert found.head_dim == getattr(expected, "head_dim", 16) and found.dtype == (expected.dtype or torch.float32)
    same = ("rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "vocab_size", "intermediate_size")
    assert [getattr(found, key) for key in same] == [getattr(expected, key) for key in same]


LOAD = """
import sys
from trueroll.engine.config import EngineConfig
from trueroll.engine.running.loading import load_model
assert load_model(EngineConfig(model=sys.argv[1], device="cpu")).model
print(sorted({"torch._dynamo", "torch._inductor", "triton"} & sys.modules.keys()))
"""


def test_a_model_is_loaded_without_torchs_compiler(tiny_llama: Path) -> None:
    """transformers' configuration classes would import it: 150 MB in each worker."""
    printed = subprocess.run([sys.executable, "-c", LOAD, str(tiny_llama)], check=True, capture_output=True, text=True)
    assert printed.stdout == "[]\n"
