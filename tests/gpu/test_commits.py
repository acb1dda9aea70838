"""Weights that arrive while the GPU computes: samples have the bits of their own weight version, whatever was queued at
the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from torch import Tensor

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.running.loading import load_dummy
from trueroll.engine.running.weights import WeightStaging
from trueroll.kernels.transfer import stream_beside, wait_for_stream

from ..engine.checkpoints import stage
from ..engine.drive import bits, generate, run, tokens
from .moved import DEVICE, cut_config, sized

COMMITS = sized(12, 2)


def stage_beside(engine: Engine, tensors: Mapping[str, Tensor]) -> WeightStaging:
    """Stage on a separate thread and CUDA stream, as a worker's receiver does."""
    with stream_beside(DEVICE):
        staging = stage(engine, tensors, step=4096)
        wait_for_stream(DEVICE)
        return staging


def served(engine: Engine) -> dict[tuple[str, int], tuple[tuple[int, ...], bytes]]:
    params = dict(n=sized(2, 1), max_tokens=sized(12, 2))
    requests = [generate(f"asked {i}", tokens(sized(40, 3) + i, seed=i), **params) for i in range(sized(4, 2))]
    return {key: bits(sample) for key, sample in run(engine, requests).items() if key[0].startswith("asked")}


def test_each_version_serves_its_own_bits_whatever_was_under_way(tmp_path: Path, one_step_ahead: None) -> None:
    config = EngineConfig(
        model=str(cut_config("qwen3-0.6b", tmp_path)), device=str(DEVICE), backend="triton", max_model_len=2048
    )
    engine = Engine(config, load_dummy(config))
    first = {name: weight.to_dense().clone() for name, weight in engine.weights.tensors.items()}
    versions = first, {name: weight.flip(0).contiguous() for name, weight in first.items()}
    expected = [served(engine)]
    engine.commit_weights(stage(engine, versions[1], step=4096), 1, "recompute")
    expected.append(served(engine))
    assert expected[0] != expected[1], "premise: the weights matter"
    under_way = 0
    with ThreadPoolExecutor(1) as pool:
        for number in range(2, 2 + COMMITS):
            beside = generate(f"beside {number}", tokens(sized(300, 20), seed=number), n=sized(4, 1), max_tokens=1500)
            engine.add(beside)
            staging = pool.submit(stage_beside, engine, versions[number % 2])
            steps = count()
            while not staging.done() or next(steps) < 3:
                engine.step()
            under_way += engine._pipeline._queued is not None
            engine.commit_weights(staging.result(), number, "recompute")
            engine.step()
            engine.abort(beside.id)
            assert served(engine) == expected[number % 2], f"version {number}"
    assert under_way == COMMITS, "premise: a step was in flight at each commit"
