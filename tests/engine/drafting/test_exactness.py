"""Drafts change no bit: samples with drafts are compared with samples without, for drafts that are right and wrong."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import make_tiny_model

from trueroll.engine.config import EngineConfig
from trueroll.engine.drafting.drafter import FunctionDrafter
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, SampleOutput
from trueroll.engine.running.loading import LoadedModel, load_model

from ..drive import bits, generate, run, tokens, top_bits

pytestmark = pytest.mark.usefixtures("steps_ahead")
Samples = dict[tuple[str, int], SampleOutput]
FAMILIES = ("llama", "gemma3", "qwen3_moe")


@dataclass
class Prophet:
    """A drafter function that knows the samples. Each draft has `most` tokens, of which the first few are right.

    `samples`: by prompt and sample so far, the tokens that follow.
    """

    known: list[array[int]]
    rng: np.random.Generator
    vocab_size: int = 512

    def __call__(self, so_far: array[int], most: int) -> Sequence[int]:
        matching = [whole for whole in self.known if whole[: len(so_far)] == so_far]
        right = matching[0][len(so_far) :][: self.rng.integers(0, most + 1)] if matching else array("i")
        wrong = self.rng.integers(0, self.vocab_size, most - len(right))
        return [*right, *wrong.tolist()]


def requests(has_experts: bool) -> list[GenerateRequest]:
    """Requests with every sampling field."""
    filters: dict[str, Any] = dict(top_k=40, top_p=0.9, min_p=0.01)
    prompt = tokens(33, seed=3)
    return [
        generate("greedy", prompt, temperature=0.0, max_tokens=40),
        generate("group", prompt, n=3, temperature=1.0, max_tokens=37),
        generate("filters", tokens(20, seed=4), n=2, temperature=0.7, max_tokens=30, **filters),
        generate("hot", tokens(17, seed=5), temperature=1.5, max_tokens=33, top_logprobs=3, logprobs="raw"),
        generate("tops", tokens(9, seed=6), temperature=0.7, max_tokens=21, top_logprobs=4, **filters),
        generate("one", tokens(40, seed=7), temperature=1.0, max_tokens=1),
        generate(
            "bans", tokens(5, seed=8), temperature=1.0, max_tokens=40, min_tokens=25, stop_token_ids=[*range(300)]
        ),
        generate("routes", tokens(21, seed=9), n=2, max_tokens=24, return_routed_experts=has_experts),
    ]


def parts(sample: SampleOutput) -> tuple[object, ...]:
    """Return everything of a sample that drafts must not change."""
    tops = top_bits(sample) if sample.top_token_ids is not None else None
    routes = None if sample.routed_experts is None else sample.routed_experts.tobytes()
    return *bits(sample), sample.finish_reason, sample.stop_reason, sample.weight_versions, tops, routes


def make(loaded: LoadedModel, config: dict[str, Any], function: Callable[..., Any] | None, **more: Any) -> Engine:
    drafter = None if function is None else FunctionDrafter(function)
    return Engine(EngineConfig(**(config | more)), loaded, drafter)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_bit(family: str, tmp_path: Path) -> None:
    config = dict(model=str(make_tiny_model(family, tmp_path / "model")), num_blocks=512, num_threads=1, max_num_seqs=8)
    loaded = load_model(EngineConfig(**config))
    plain = make(loaded, config, None)
    asked = requests(plain.info.num_experts > 0)
    expected = run(plain, asked)
    known = [array("i", [*r.prompt_token_ids, *expected[r.id, i].token_ids]) for r in asked for i in range(r.params.n)]
    for most in (1, 3, 8):
        engine = make(loaded, config, Prophet(known, np.random.default_rng(most)), num_speculative_tokens=most)
        found = run(engine, asked)
        stats = engine._pipeline._drafting.stats
        assert 0 < stats.accepted < stats.drafted
        assert {key: parts(sample) for key, sample in found.items()} == {k: parts(s) for k, s in expected.items()}
        assert engine.stats().expert_tokens == plain.stats().expert_tokens
        assert engine.stats().computed_tokens == plain.stats().computed_tokens
