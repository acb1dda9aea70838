"""Ranks on GPUs give the bits of one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine

from ..engine.checkpoints import another_version, read_tensors, stage
from ..engine.drive import generate, run, tokens
from .moved import DEVICE, IS_REHEARSAL, sized

SIZES: dict[str, Any] = sized(
    dict(hidden_size=2048, num_attention_heads=16, num_key_value_heads=8, intermediate_size=6144, vocab_size=50_000),
    dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, intermediate_size=512, vocab_size=600),
)
PAIRS: list[tuple[int, int]] = [(2, 1), (4, 1), (1, 2), (2, 2), (8, 1), (2, 4)]


def samples(engine: Engine, count: int, length: int) -> list[tuple[Any, ...]]:
    asked = [generate(f"{i}", tokens(9 + 40 * i, seed=i), n=2, max_tokens=length) for i in range(count)]
    found = run(engine, asked)
    return sorted((*key, tuple(each.token_ids), np.array(each.logprobs).tobytes()) for key, each in found.items())


def compare(folder: Path, devices: Sequence[str], tensor: int, stages: int, exchange: str) -> None:
    """Compare ranks with one GPU, before and after a push and a sleep."""
    model = make_tiny_model("llama", folder / "0", num_hidden_layers=4, **SIZES)
    pushed = read_tensors(another_version(model, folder / "1"))
    backend = sized("triton", "reference")  # other processes cannot interpret all kernels
    settings: dict[str, Any] = dict(model=str(model), dtype="bfloat16", backend=backend, num_blocks=sized(256, 32))
    ranks: dict[str, Any] = dict(tensor_parallel_size=tensor, pipeline_parallel_size=stages, exchange=exchange)
    one = Engine(EngineConfig(device=str(DEVICE), **settings))
    several = Engine(EngineConfig(device=str(DEVICE), devices=",".join(devices), **settings, **ranks))
    try:
        count, length = sized((12, 40), (1, 2))
        expected = samples(one, count, length)
        assert samples(several, count, length) == expected
        for engine in (one, several):
            engine.commit_weights(stage(engine, pushed), 1, "drain")
            engine.sleep(1, ["weights", "kv_cache"], "drain")
            engine.wake_up(["weights", "kv_cache"])
        changed = samples(one, count, length)
        assert samples(several, count, length) == changed != expected
    finally:
        several.close()


@pytest.mark.parametrize(("tensor", "stages"), sized(PAIRS[:4], PAIRS[:1]))
def test_ranks_that_share_a_gpu(tensor: int, stages: int, tmp_path: Path) -> None:
    """The ranks exchange tensors through the memory of the host."""
    compare(tmp_path, [sized("cuda:0", "cpu")] * tensor * stages, tensor, stages, "shared")


@pytest.mark.parametrize("exchange", ["group", "symmetric"])
@pytest.mark.parametrize(("tensor", "stages"), PAIRS)
def test_ranks_with_gpus_of_their_own(tensor: int, stages: int, exchange: str, tmp_path: Path) -> None:
    if IS_REHEARSAL:
        pytest.skip("needs a GPU, which a rehearsal does without")
    if (found := torch.cuda.device_count()) < tensor * stages:
        pytest.skip(f"needs two GPUs or more: {tensor * stages} for these ranks, found {found}")
    compare(tmp_path, [f"cuda:{index}" for index in range(tensor * stages)], tensor, stages, exchange)
