"""Quantized weights: a trainer with the same setting computes the bits of the worker."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from matrix import thinned

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig, KvCacheDtype, Quantization
from trueroll.kernels.cache_formats import AUTO, CACHE_FORMATS
from trueroll.kernels.precision import SETTINGS, keeps_values
from trueroll.kernels.quantization import FORMATS
from trueroll.kernels.training import align, aligned_with

from .drive import make_engine
from .test_trainer_log_probs import count_differences, packed, padded, roll_out, trainer_model

FAMILIES = ("llama", "qwen3_moe", "qwen3_5_moe", "deepseek_v3")
CELLS = [*product(FAMILIES, FORMATS), ("qwen3_moe", "mxfp4:experts")]


@pytest.mark.parametrize(("family", "setting"), CELLS)
@thinned(lambda family, setting: family == "llama" or setting in ("fp8", "mxfp4:experts"))
def test_a_trainer_computes_the_bits_of_a_worker_with_quantized_weights(
    family: str, setting: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(family, tmp_path)
    states: dict[str, Any] = dict(state_interval=16) if family == "qwen3_5_moe" else {}
    settings: dict[str, Any] = dict(dtype="bfloat16", quantization=setting)
    rollout = roll_out(folder, (80, 40, 5), **(settings | states))
    plain, model = (trainer_model(folder, "bfloat16") for _ in range(2))
    align(plain)
    align(model, quantization=setting)
    assert aligned_with(model)._asdict().items() <= asdict(make_engine(folder, **settings).info).items()
    assert count_differences(packed(plain, rollout), rollout) > 0, "premise: the format changes values"
    assert [count_differences(batch(model, rollout), rollout) for batch in (packed, padded)] == [0, 0]


def test_the_engine_knows_all_formats() -> None:
    """The configuration lists the formats itself, because it does not import torch."""
    assert set(get_args(Quantization)) == {"auto", *SETTINGS}
    assert set(get_args(KvCacheDtype)) == {AUTO, *CACHE_FORMATS}
    for setting in SETTINGS:
        assert EngineConfig(model="m", quantization=setting).keeps_values == keeps_values(setting)  # type: ignore[arg-type]
