"""Hybrid models: a token has the same bits by decode, by prefill, by a graph, and after a restored checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.running.loading import LoadedModel, load_model

from ..engine.drive import bits, executor_of
from . import test_decode as decode
from .moved import cut_config, sized
from .test_decode import loaded as loaded  # a fixture
from .test_engine import config_of, failing_cells

THIN = dict(linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=16, linear_value_head_dim=8)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    """A delta net layer and an attention layer of Qwen3.5-0.8B."""
    changes: dict[str, Any] = dict(num_hidden_layers=2, full_attention_interval=2) | sized({}, THIN)
    return decode.config_of(cut_config("qwen3.5-0.8b", tmp_path, **changes), state_interval=16)


def test_decode_has_the_bits_of_prefill_and_of_graphs(
    config: EngineConfig, loaded: LoadedModel, one_step_ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = decode.requests()
    with_graphs = Engine(config, loaded)
    expected, sizes = decode.serve(with_graphs, asked, monkeypatch)
    assert sizes[0] == decode.ALIVE[0] and executor_of(with_graphs)._graphs is not None
    assert with_graphs.stats().checkpoints_restored > 0
    without = Engine(config.model_copy(update={"cuda_graphs": False}), loaded)
    found, _ = decode.serve(without, asked, monkeypatch)
    assert decode.differing(found, expected) == [] and executor_of(without)._graphs is None
    scores = decode.score_bits(without, asked, expected)
    assert [key for key, sample in expected.items() if bits(sample)[1] != scores[key]] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_bit_differs_in_any_cell(gpu: torch.device, tiny_qwen3_5: Path, dtype: str) -> None:
    config = config_of(tiny_qwen3_5, dtype=dtype)
    assert failing_cells(config, load_model(config)) == []
