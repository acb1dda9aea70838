"""Quantized weights and activations: a trainer with the same setting computes the bits of the worker, and no bit
depends on how samples are computed.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from matrix import thinned

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig, KvCacheDtype, Quantization
from trueroll.kernels.cache_formats import AUTO, CACHE_FORMATS
from trueroll.kernels.precision import SETTINGS, keeps_values
from trueroll.kernels.quantization import FORMATS
from trueroll.kernels.training import align, aligned_with, token_log_probs

from .checkpoints import another_version, read_tensors, stage
from .drive import make_engine, score, tokens
from .test_host_tier import CASES, converse
from .test_trainer_log_probs import count_differences, packed, padded, roll_out, trainer_model

FAMILIES = ("llama", "qwen3_moe", "qwen3_5_moe", "deepseek_v3")
# The formats with quantized activations, and the formats with the same weights and plain activations.
WITH_ACTIVATIONS = {"int8_dynamic": "int8", "fp8_dynamic": "fp8_channel"}
CELLS = [*product(FAMILIES, FORMATS, ["cpu"]), ("qwen3_moe", "mxfp4:experts", "cpu")]
CELLS += product(FAMILIES, WITH_ACTIVATIONS, ["reference"])


@pytest.mark.parametrize(("family", "setting", "backend"), CELLS)
@thinned(
    lambda family, setting, backend: (
        (family == "llama" and (backend == "cpu" or setting == "fp8_dynamic")) or setting in ("fp8", "mxfp4:experts")
    )
)
def test_a_trainer_computes_the_bits_of_a_worker_with_quantized_weights(
    family: str, setting: str, backend: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(family, tmp_path)
    states: dict[str, Any] = dict(state_interval=16) if family == "qwen3_5_moe" else {}
    settings: dict[str, Any] = dict(dtype="bfloat16", quantization=setting, backend=backend)
    rollout = roll_out(folder, (80, 40, 5), **(settings | states))
    plain, model = (trainer_model(folder, "bfloat16") for _ in range(2))
    align(plain, backend)
    align(model, backend, quantization=setting)
    assert aligned_with(model)._asdict().items() <= asdict(make_engine(folder, **settings).info).items()
    assert count_differences(packed(plain, rollout), rollout) > 0, "premise: the format changes values"
    assert [count_differences(batch(model, rollout), rollout) for batch in (packed, padded)] == [0, 0]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("setting", WITH_ACTIVATIONS)
@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
@thinned(lambda family, setting, backend: (family, setting, backend) == ("qwen3_5", "fp8_dynamic", "cpu"))
def test_no_bit_depends_on_chunks_hits_or_company(family: str, setting: str, backend: str, tmp_path: Path) -> None:
    """Products with some of the columns of a row use the scale of the whole row."""
    model, states = make_tiny_model(family, tmp_path), CASES[family]
    settings: dict[str, Any] = dict(dtype="bfloat16", quantization=setting, backend=backend, block_size=8)
    settings |= dict(max_num_seqs=4, **states)
    expected = converse(make_engine(model, **settings))
    plain = make_engine(model, **settings | dict(quantization=WITH_ACTIVATIONS[setting]))
    assert expected != converse(plain), "premise: activations are rounded"
    tiered = make_engine(model, **settings, num_blocks=24, max_num_batched_tokens=32, host_cache_bytes=2**24)
    assert converse(tiered) == expected and tiered.stats().host_restored > 0
    assert converse(tiered, together=True) == expected and tiered.stats().preemptions > 0


@pytest.mark.parametrize(("family", "setting"), [("llama", "fp8"), ("qwen3_moe", "mxfp4"), ("deepseek_v3", "awq")])
@thinned(lambda family, setting: family == "llama")
def test_a_trainer_computes_the_bits_of_triton_kernels_with_codes(family: str, setting: str, tmp_path: Path) -> None:
    """The worker multiplies with codes, and the trainer with plain matrices of the values, also after a sleep and a
    push.
    """
    sizes: dict[str, Any] = dict(num_hidden_layers=1, vocab_size=64)
    if family == "deepseek_v3":
        sizes |= dict(first_k_dense_replace=1, num_attention_heads=2, num_key_value_heads=2)
    folder = make_tiny_model(family, tmp_path / "model", dtype="bfloat16", **sizes)
    pushed, ids = another_version(folder, tmp_path / "pushed"), tokens(5, vocab_size=64)
    settings: dict[str, Any] = dict(backend="triton", num_blocks=16, block_size=2)
    engine = make_engine(folder, quantization=setting, **settings)
    assert engine.weights.num_bytes < make_engine(folder, **settings).weights.num_bytes, "premise: it holds codes"

    def trained(path: Path, quantization: str) -> bytes:
        model = trainer_model(path, "bfloat16")
        align(model, "triton", quantization=quantization)
        return token_log_probs(model, torch.from_numpy(ids)[None])[0, 1:].detach().numpy().tobytes()

    assert score(engine, ids).tobytes() == trained(folder, setting) != trained(folder, "none")
    engine.commit_weights(stage(engine, read_tensors(pushed), step=4096), 1, "recompute")
    engine.sleep(1, ["weights"], "abort")
    engine.wake_up(["weights"])
    assert score(engine, ids).tobytes() == trained(pushed, setting) != trained(folder, setting)


def test_the_engine_knows_all_formats() -> None:
    """The configuration lists the formats itself, because it does not import torch."""
    assert set(WITH_ACTIVATIONS) == {name for name, format in FORMATS.items() if format.activations is not None}
    assert set(get_args(Quantization)) == {"auto", *SETTINGS}
    assert set(get_args(KvCacheDtype)) == {AUTO, *CACHE_FORMATS}
    for setting in SETTINGS:
        assert EngineConfig(model="m", quantization=setting).keeps_values == keeps_values(setting)  # type: ignore[arg-type]
