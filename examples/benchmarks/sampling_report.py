"""Measure what filters, penalties and bans cost: `python examples/benchmarks/sampling_report.py [THREADS]`.

Several engines share a small model with random weights and a vocabulary of 32,768 tokens. Each engine decodes 64
samples, and each has different sampling parameters. The engines take turns step by step, so that the load of the
machine affects all engines equally. The table shows an engine's time for a step, divided by the time for the same step
of the engine with plain sampling: the median over all steps, and the range of the middle half of all steps. Random
weights give flat distributions, of which `top_p` 0.9 keeps 20,000 tokens. A low temperature gives steep distributions,
as a trained model does: `top_p` 0.9 then keeps a few tens of tokens. THREADS: number of threads of the kernels, by
default as in a worker. Run the report on an otherwise idle machine. On a busy machine, the CPU times with one thread
are more reliable than the other times.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SamplingParams
from trueroll.engine.running.loading import load_dummy

VOCAB, HIDDEN, LAYERS = 32_768, 1024, 4
SAMPLES, GROUP, PROMPT, STEPS = 64, 8, 128, 60
STEEP = 0.2
PENALTIES = dict(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, again": {},
    "penalties": PENALTIES,
    "frequency penalty": dict(frequency_penalty=0.1),
    "300 biases": dict(logit_bias=dict.fromkeys(range(300), 1.0)),
    "bad words": dict(bad_words_token_ids=[[token, token + 1] for token in range(100)]),
    "16,384 allowed tokens": dict(allowed_token_ids=range(VOCAB // 2)),
    "top_p 0.9": dict(top_p=0.9),
    "top_k 20": dict(top_k=20),
    "min_p 0.05": dict(min_p=0.05),
    "penalties, top_p 0.9": PENALTIES | dict(top_p=0.9),
    "steep": dict(temperature=STEEP),
    "steep, top_p 0.9": dict(temperature=STEEP, top_p=0.9),
    "steep, min_p 0.05": dict(temperature=STEEP, min_p=0.05),
}


def engines(num_threads: int | None) -> Iterator[Engine]:
    """Yield an engine for each of `VARIANTS`, after its prefill. The engines have the same weights."""
    model = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        config = EngineConfig(model=folder, num_blocks=2048, max_num_seqs=SAMPLES, num_threads=num_threads)
        loaded = load_dummy(config)
        for params in VARIANTS.values():
            yield prefilled(Engine(config, loaded), params)


def prefilled(engine: Engine, params: dict[str, Any]) -> Engine:
    """Return the engine with `SAMPLES` decoding samples."""
    random = np.random.default_rng(0)
    for i in range(SAMPLES // GROUP):
        given = SamplingParams(n=GROUP, max_tokens=STEPS + 32, seed=i, ignore_eos=True, **params)
        engine.add(GenerateRequest(str(i), random.integers(1, VOCAB, PROMPT).astype(np.int32), given))
    while engine.stats().num_running < SAMPLES:
        engine.step()
    return engine


def seconds_of_step(engine: Engine) -> tuple[float, float]:
    """Return the seconds of a step, and its CPU seconds."""
    start, cpu_start = time.perf_counter(), time.process_time()
    engine.step()
    return time.perf_counter() - start, time.process_time() - cpu_start


@torch.inference_mode()
def main() -> None:
    compared = list(engines(int(sys.argv[1]) if len(sys.argv) > 1 else None))
    seconds = np.array([[seconds_of_step(engine) for engine in compared] for _ in range(STEPS)])  # [steps, engines, 2]
    assert all(engine.stats().num_running == SAMPLES for engine in compared), "all steps had all samples"
    ratios = seconds / seconds[:, :1]
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75], axis=0)
    milliseconds = 1000 * np.median(seconds, axis=0)
    info = compared[0].info
    table = Table("sampling", "ms", "time", "middle half", "CPU ms", "CPU time", title=f"{info.backend}, {info.isa}")
    for i, name in enumerate(VARIANTS):
        times = f"{milliseconds[i, 0]:.1f}", f"{median[i, 0]:.3f}", f"{low[i, 0]:.3f} to {high[i, 0]:.3f}"
        table.add_row(name, *times, f"{milliseconds[i, 1]:.1f}", f"{median[i, 1]:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
