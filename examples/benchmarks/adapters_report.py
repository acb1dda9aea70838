"""Measure named adapters: `python examples/benchmarks/adapters_report.py [MODEL]`.

The report loads eight LoRA adapters of rank 16 and serves the same requests in three setups: all requests use a single
adapter; the requests are divided among all adapters, with memory for the merged weights of every adapter; the requests
are divided among all adapters, with memory for two sets of merged weights. The three setups take turns for several
rounds. The table shows each setup's speed relative to the setup with a single adapter (median and range over the
rounds), and the memory that the adapters use in addition to the base weights. Every sample must have the same bits as
on an engine that has only the sample's adapter, merged into the weights. Run the report on an otherwise idle machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SampleOutput, SamplingParams
from trueroll.engine.running.loading import load_model

COUNT, RANK, SCALE = 8, 16, 0.5
ROUNDS, REQUESTS, PROMPT, NEW_TOKENS = 3, 32, 64, 32
NAMES = [f"adapter-{i}" for i in range(COUNT)]


def fill(staging: Any, engine: Engine, seed: int) -> Any:
    """Return the staging with random A and B for every matrix of the layers."""
    shapes = {name: shape for name, shape in engine.weights.shapes.items() if "_proj." in name and len(shape) == 2}
    staging.adapt({name: (f"{name}.a", f"{name}.b", RANK, SCALE) for name in shapes}, alone=True)
    generator = torch.Generator().manual_seed(seed)
    for name, (rows, columns) in shapes.items():
        for part, shape in ((f"{name}.a", (RANK, columns)), (f"{name}.b", (rows, RANK))):
            staging.rows(part, 0, shape[0]).copy_(torch.empty(*shape).normal_(generator=generator) * 0.02)
    assert all(staging.merge(name) for name in staging.to_merge())
    return staging


def requests(adapters: list[str], vocab_size: int, run: int) -> list[GenerateRequest]:
    """Return the requests of a run. Successive requests use successive adapters of `adapters`, starting over at the
    end.
    """
    rng = np.random.default_rng(0)
    found = []
    for i in range(REQUESTS):
        prompt = rng.integers(3, vocab_size, PROMPT).astype(np.int32)
        params = SamplingParams(seed=i, max_tokens=NEW_TOKENS, ignore_eos=True, cache_salt=str(run))
        found.append(GenerateRequest(f"{i}", prompt, params, adapter=adapters[i % len(adapters)]))
    return found


def served(engine: Engine, batch: list[GenerateRequest]) -> tuple[float, dict[str, tuple[Any, ...]]]:
    """Serve a batch. Return the duration in seconds, and the bits of each sample."""
    started, outputs = time.perf_counter(), []
    for request in batch:
        engine.add(request)
    while engine.has_unfinished:
        outputs += engine.step()
    seconds, bits = time.perf_counter() - started, dict[str, tuple[Any, ...]]()
    for output in outputs:
        assert isinstance(output, SampleOutput) and output.logprobs is not None
        bits[output.request_id] = *output.token_ids, output.logprobs.tobytes()
    return seconds, bits


def alone(config: EngineConfig, vocab_size: int) -> dict[str, tuple[Any, ...]]:
    """Return the bits of each sample of a mixed batch on an engine that has only the sample's adapter."""
    found: dict[str, tuple[Any, ...]] = {}
    for seed, name in enumerate(NAMES):
        engine = Engine(config)
        engine.commit_weights(fill(engine.weights.new_staging(in_place=False), engine, seed), 1, "recompute")
        own = [each for each in requests(NAMES, vocab_size, 0) if each.adapter == name]
        found |= served(engine, [GenerateRequest(each.id, each.prompt_token_ids, each.params) for each in own])[1]
    return found


def main(model: str) -> None:
    base = EngineConfig(model=model, max_num_seqs=REQUESTS, kv_memory=2**28)
    loaded = load_model(base)
    whole, vocab_size = loaded.weights.num_bytes, loaded.model.spec.vocab_size
    budgets = {"one adapter": 9 * whole, "8 adapters, all merged": 9 * whole, "8 adapters, 2 merged": int(2.7 * whole)}
    engines = {
        case: Engine(base.model_copy(update={"adapter_bytes": budget}), loaded) for case, budget in budgets.items()
    }
    for engine in engines.values():
        assert engine.adapters is not None
        for seed, name in enumerate(NAMES):
            engine.commit_adapter(fill(engine.adapters.new_staging(name), engine, seed), name, 1, "recompute")
    expected = alone(base, vocab_size)
    seconds: dict[str, list[float]] = {case: [] for case in engines}
    for run in range(ROUNDS + 1):
        for case, engine in engines.items():
            names = NAMES[:1] if case == "one adapter" else NAMES
            took, bits = served(engine, requests(names, vocab_size, run))
            same = {id: value for id, value in bits.items() if len(names) > 1 or int(id) % COUNT == 0}
            assert same == {id: expected[id] for id in same}, f"{case}: other bits than alone"
            seconds[case] += [took] * bool(run)  # the first round is slower, because it merges weights
    table = Table("batch", "speed", "range", "adapters, MB", "budget, MB")
    for case, engine in engines.items():
        shares = [one / own for one, own in zip(seconds["one adapter"], seconds[case], strict=True)]
        held = f"{engine.memory()['adapters'] / 1e6:.0f}", f"{budgets[case] / 1e6:.0f}"
        table.add_row(case, f"{statistics.median(shares):.2f}", f"{min(shares):.2f} to {max(shares):.2f}", *held)
    console = Console()
    console.print(f"{model}: base weights of {whole / 1e6:.0f} MB, {REQUESTS} requests, rank {RANK}; all bits as alone")
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
