"""A context of 131,072 tokens: a hit has the bits of a miss, and the KV cache takes the planned memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SampleOutput, SamplingParams
from trueroll.rollout.tools.plan import plan

BLOCK_SIZE, NEW = 16, 8


def config_of(tmp_path: Path, length: int) -> EngineConfig:
    sizes: dict[str, Any] = dict(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=32)
    model = make_tiny_model("llama", tmp_path / "tiny", max_position_embeddings=2 * length, **sizes)
    return EngineConfig(model=str(model), num_blocks=length // BLOCK_SIZE + 8, max_num_seqs=2, num_threads=1)


def ask(engine: Engine, name: str, prompt: np.ndarray) -> SampleOutput:
    params = SamplingParams(n=1, max_tokens=NEW, seed=3, ignore_eos=True)
    engine.add(GenerateRequest(name, prompt, params))
    found = []
    while engine.has_unfinished:
        found += engine.step()
    [sample] = found
    assert isinstance(sample, SampleOutput)
    return sample


@pytest.mark.parametrize("length", [8192, pytest.param(131_072, marks=pytest.mark.exhaustive)])
def test_a_hit_of_a_long_context_has_the_bits_of_a_miss(tmp_path: Path, length: int) -> None:
    engine = Engine(config_of(tmp_path, length))
    prompt = np.random.default_rng(0).integers(3, 500, length - NEW, np.int32)
    miss = ask(engine, "miss", prompt)
    hit = ask(engine, "hit", prompt)
    assert miss.num_cached_tokens == 0 and hit.num_cached_tokens == (length - NEW - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert miss.logprobs is not None and hit.logprobs is not None
    assert torch.equal(
        torch.from_numpy(miss.logprobs).view(torch.int32), torch.from_numpy(hit.logprobs).view(torch.int32)
    )
    assert miss.token_ids == hit.token_ids and len({*miss.token_ids}) > 1
    if length > 8192:
        return  # another miss would take a minute
    other = prompt.copy()
    other[0] ^= 1
    another = ask(engine, "other", other).logprobs
    assert another is not None and another.tobytes() != hit.logprobs.tobytes(), "the first token matters"
    engine.check_integrity()


@pytest.mark.exhaustive
def test_the_served_memory_of_a_long_context_is_the_planned_memory(tmp_path: Path) -> None:
    """The KV cache is used up to its end. Memory that was never written takes no memory."""
    length, process = 131_072, psutil.Process()
    config = config_of(tmp_path, length)
    engine = Engine(config)
    ask(engine, "warm-up", np.arange(3, 400, dtype=np.int32))  # scratch memory of the largest step but one
    before = process.memory_info().rss
    ask(engine, "long", np.random.default_rng(0).integers(3, 500, length - NEW, np.int32))
    served = process.memory_info().rss - before
    console = Console(record=True, width=120)
    plan(config, 2**34, None, console)
    planned = engine.memory()["kv_cache"]
    assert planned == (length // BLOCK_SIZE + 8) * BLOCK_SIZE * 2 * 4 * 32 * 4
    assert f"{planned / 2**20:,.0f}" in console.export_text().replace(" MiB", "")
    assert 0.95 * planned < served < 1.05 * planned, (served, planned)
