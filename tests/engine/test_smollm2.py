"""The engine with a real language model, SmolLM2-135M in float32, against transformers, on each backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import thinned
from transformers import AutoModelForCausalLM, AutoTokenizer

from .drive import generate, make_engine, run, score

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "2 + 2 = 4, 3 + 3 =",
    "The three laws of thermodynamics say that",
    "Water boils at a temperature of",
    "In 1969, astronauts",
    "A recipe for bread: first,",
    "Dear Sir or Madam,",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "import numpy as np\n",
    "Q: What is the largest planet? A:",
    "The sum of the first ten integers is",
    "Monday, Tuesday, Wednesday,",
    "She opened the door and saw",
    "The French word for cat is",
    "To be or not to be,",
    "SELECT name FROM users WHERE",
    "The history of Rome begins",
]
NEW = 16
NEW_ON = {"cpu": NEW, "reference": 8}
"""Number of tokens to generate on each backend. The reference backend has slow steps. Log-probs are compared for all
tokens on both backends.
"""


@pytest.fixture(scope="module")
def sequences(smollm2: Path) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each prompt: its ids, the greedy continuation by transformers, and the log-probs of all these tokens from one
    forward pass.
    """
    tokenizer = AutoTokenizer.from_pretrained(smollm2, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    full = model.generate(**batch, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
    lengths = batch.attention_mask.sum(1).tolist()
    return [_score(model, row[-length - NEW :], length) for row, length in zip(full, lengths, strict=True)]


@torch.inference_mode()
def _score(model, ids: torch.Tensor, prompt_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    tokens = ids.numpy().astype(np.int32)
    return tokens[:prompt_len], tokens[prompt_len:], logprobs.numpy()


@thinned(lambda backend: backend == "cpu")
def test_greedy_tokens_equal_transformers(smollm2: Path, sequences, backend: str) -> None:
    engine = make_engine(smollm2, dtype="float32", num_threads=None, backend=backend)
    # transformers' min_new_tokens masks the end of text; so does min_tokens.
    new = NEW_ON[backend]
    params = dict(temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=False)
    samples = run(engine, [generate(str(i), prompt, **params) for i, (prompt, _, _) in enumerate(sequences)])
    assert len(sequences) == 20
    for i, (_, expected, _) in enumerate(sequences):
        assert samples[str(i), 0].token_ids == expected[:new].tolist(), PROMPTS[i]


@thinned(lambda backend: backend == "cpu")
def test_scores_equal_transformers(smollm2: Path, sequences, backend: str) -> None:
    engine = make_engine(smollm2, dtype="float32", num_threads=None, backend=backend)
    for prompt, continuation, expected in sequences:
        found = score(engine, np.concatenate((prompt, continuation)))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
