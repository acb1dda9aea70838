"""Measure what quantization does to a model: `python examples/benchmarks/quality_report.py [MODEL] [SETTING...]`.

MODEL: by default `smollm2`. Each SETTING is a value of a worker's `quantization`, by default every format. An engine
with each setting scores the same tokens, in windows of `WINDOW` tokens: the documentation of Python's syntax, which is
part of Python (`pydoc_data.topics`). The table has the perplexity, the ratio of this perplexity to the perplexity in
the model's dtype, the mean absolute difference between a token's log-probs with and without quantization, and the bytes
of the weights. No figure depends on the load of the machine.
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import numpy as np
from rich.console import Console
from rich.table import Table

from trueroll.engine.config import EngineConfig
from trueroll.engine.engine import Engine
from trueroll.engine.models.names import resolve_model
from trueroll.engine.models.tokenizer import load_tokenizer
from trueroll.engine.request import Distribution, ScoreOutput, ScoreRequest
from trueroll.kernels.quantization import FORMATS

WINDOW, WINDOWS = 1024, 16


def log_probs(model: str, setting: str, tokens: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the log-probs of all tokens but the first of each window, and the bytes of the weights."""
    engine = Engine(EngineConfig(model=model, quantization=setting, max_model_len=WINDOW))
    for index, window in enumerate(tokens):
        engine.add(ScoreRequest(str(index), window, Distribution()))
    found: dict[int, np.ndarray] = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert isinstance(output, ScoreOutput)
            found[int(output.request_id)] = output.logprobs
    return np.concatenate([found[index] for index in range(len(tokens))]).astype(np.float64), engine.info.weight_bytes


def main(model: str = "smollm2", *settings: str) -> None:
    """Print the table."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = load_tokenizer(resolve_model(model) / "tokenizer.json").encode(text).ids
    count = min(WINDOWS, len(ids) // WINDOW)
    tokens = np.array(ids[: count * WINDOW], dtype=np.int32).reshape(count, WINDOW)
    table = Table(title=f"{model}, {tokens.size} tokens")
    for column in ("weights", "perplexity", "quotient", "mean distance of log-probs", "MB"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    plain, num_bytes = log_probs(model, "none", tokens)
    table.add_row("as stored", f"{np.exp(-plain.mean()):.3f}", "1", "0", f"{num_bytes / 1e6:.1f}")
    for setting in settings or FORMATS:
        found, num_bytes = log_probs(model, setting, tokens)
        quotient, distance = np.exp(plain.mean() - found.mean()), np.abs(found - plain).mean()
        row = f"{np.exp(-found.mean()):.3f}", f"{quotient:.4f}", f"{distance:.4f}", f"{num_bytes / 1e6:.1f}"
        table.add_row(setting, *row)
    Console().print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
