"""Measure the cost of sampling parameters and records: `python examples/benchmarks/sampling_report.py [THREADS]`.

Several engines share a model with random weights and a vocabulary of 32,768 tokens. The layers have the sizes of
SmolLM2-135M's layers, because the cost of sampling is only meaningful relative to a step of a model that users train.
Each engine decodes 64 samples, with sampling parameters that differ from engine to engine. The engines take turns. In
each turn, an engine makes two steps: the first one fills the caches with the engine's memory, and the second one is
measured. The load of the machine therefore affects all engines equally. The table shows the ratio of an engine's time
for a step to the time for the same step of another engine, which the column `of` names. It has the median of this ratio
over all turns, and the range of the middle half of all turns. The row "plain, again" has the same parameters as
"plain", and shows what the ratios are worth. Random weights give flat distributions, of which `top_p` 0.9 keeps 20,000
tokens. A low temperature gives steep distributions, as a trained model does: `top_p` 0.9 then keeps a few tens of
tokens. THREADS: number of threads of the kernels, by default as in a worker. Run the report on an otherwise idle
machine; it takes two to three minutes. On a busy machine, the CPU times with one thread are more reliable than the
other times.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# As in a worker. Otherwise torch's threads would spin for milliseconds after an op, on a core that the next engine
# needs.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SamplingParams
from trueroll.engine.running.loading import load_dummy

VOCAB, HIDDEN, LAYERS = 32_768, 576, 30
SAMPLES, GROUP, PROMPT, STEPS = 64, 8, 128, 60
STEEP = 0.2
PENALTIES = dict(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
ROW = dict(name=dict(type="string"), size=dict(type="integer"), kind=dict(enum=["a", "b"]))
ROWS = dict(type="array", minItems=STEPS, items=dict(type="object", properties=ROW, required=[*ROW]))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, again": {},
    "penalties": PENALTIES,
    "frequency penalty": dict(frequency_penalty=0.1),
    "300 biases": dict(logit_bias=dict.fromkeys(range(300), 1.0)),
    "bad words": dict(bad_words_token_ids=[[token, token + 1] for token in range(100)]),
    "16,384 allowed tokens": dict(allowed_token_ids=range(VOCAB // 2)),
    "JSON schema": dict(structured_outputs=dict(json=ROWS)),
    "regular expression": dict(structured_outputs=dict(regex="([A-Z][a-z]* ?){2000,}")),
    "top_p 0.9": dict(top_p=0.9),
    "top_k 20": dict(top_k=20),
    "min_p 0.05": dict(min_p=0.05),
    "penalties, top_p 0.9": PENALTIES | dict(top_p=0.9),
    "steep": dict(temperature=STEEP),
    "steep, top_p 0.9": dict(temperature=STEEP, top_p=0.9),
    "steep, min_p 0.05": dict(temperature=STEEP, min_p=0.05),
    "steep, kept ids": dict(temperature=STEEP, top_p=0.9, return_sampling_mask=True),
    "128 targets": dict(target_token_ids=range(128)),
}
BASELINES = {"steep, top_p 0.9": "steep", "steep, min_p 0.05": "steep", "steep, kept ids": "steep, top_p 0.9"}
"""The engine to compare with, if it is not "plain"."""


def engines(num_threads: int | None) -> Iterator[Engine]:
    """Yield an engine for each of `VARIANTS`, after its prefill. The engines have the same weights."""
    model = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=VOCAB,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        eos_token_id=VOCAB - 1,
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        make_tokenizer().save(str(Path(folder, "tokenizer.json")))
        config = EngineConfig(model=folder, num_blocks=2048, max_num_seqs=SAMPLES, num_threads=num_threads)
        loaded = load_dummy(config)
        for params in VARIANTS.values():
            yield prefilled(Engine(config, loaded), params)


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte, and then frequent pieces of words in Python's standard library."""
    texts = [path.read_text(errors="ignore") for path in sorted(Path(json.__file__).parents[1].glob("[a-h]*.py"))]
    words = Counter(word for text in texts for word in re.findall(r"\s?\S+", text))
    pieces = Counter[str]()
    for word, count in words.items():
        ends = ((i, j) for i in range(min(len(word), 16)) for j in range(i + 2, min(len(word), i + 9) + 1))
        pieces.update({word[i:j]: count for i, j in ends})
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = dict.fromkeys(sorted(letters.alphabet()))
    for piece, _ in pieces.most_common():
        found[letters.pre_tokenize_str(piece)[0][0]] = None
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*found][: VOCAB - 1])}, []))
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def prefilled(engine: Engine, params: dict[str, Any]) -> Engine:
    """Return the engine with `SAMPLES` decoding samples."""
    random = np.random.default_rng(0)
    for i in range(SAMPLES // GROUP):
        ignore_eos = "structured_outputs" not in params  # no text of the grammars is complete so soon
        given = SamplingParams(n=GROUP, max_tokens=2 * STEPS + 32, seed=i, ignore_eos=ignore_eos, **params)
        engine.add(GenerateRequest(str(i), random.integers(1, VOCAB, PROMPT).astype(np.int32), given))
    while engine.stats().num_running < SAMPLES:
        engine.step()
    return engine


def seconds_of_step(engine: Engine) -> tuple[float, float]:
    """Return the seconds of the engine's second step from now on, and its CPU seconds."""
    engine.step()
    start, cpu_start = time.perf_counter(), time.process_time()
    engine.step()
    return time.perf_counter() - start, time.process_time() - cpu_start


@torch.inference_mode()
def main() -> None:
    compared = list(engines(int(sys.argv[1]) if len(sys.argv) > 1 else None))
    gc.freeze()  # as in a worker
    seconds = np.array([[seconds_of_step(engine) for engine in compared] for _ in range(STEPS)])  # [steps, engines, 2]
    assert all(engine.stats().num_running == SAMPLES for engine in compared), "all steps had all samples"
    names, of = [*VARIANTS], [BASELINES.get(name, "plain") for name in VARIANTS]
    ratios = seconds / seconds[:, [names.index(name) for name in of]]
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75], axis=0)
    milliseconds = 1000 * np.median(seconds, axis=0)
    info = compared[0].info
    columns = "sampling", "ms", "of", "time", "middle half", "CPU ms", "CPU time"
    table = Table(*columns, title=f"{info.backend}, {info.isa}")
    for i, name in enumerate(VARIANTS):
        times = f"{milliseconds[i, 0]:.1f}", of[i], f"{median[i, 0]:.3f}", f"{low[i, 0]:.3f} to {high[i, 0]:.3f}"
        table.add_row(name, *times, f"{milliseconds[i, 1]:.1f}", f"{median[i, 1]:.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
