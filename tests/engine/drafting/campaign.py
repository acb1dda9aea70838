"""Random circumstances with drafts, compared with a worker without drafts.

A round serves random requests twice: by an engine without drafts and with plenty of memory, and by an engine with
drafts, under random limits of blocks, tokens per step and sequences, with interruptions as by commits of weights. The
drafts are right, wrong from some token on, too long, or past the end. Every bit of every sample must be the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiny import make_tiny_model
from trueroll.engine.config import EngineConfig
from trueroll.engine.drafting.drafter import FunctionDrafter
from trueroll.engine.engine import Engine
from trueroll.engine.request import GenerateRequest, Output, SampleOutput
from trueroll.engine.running.loading import LoadedModel, load_model
from trueroll.rollout.tools.verify_drafts import Adversary

from ..drive import generate, tokens
from .mtp_models import make_mtp_model
from .test_exactness import known_texts, parts


@dataclass
class Seen:
    """What happened in a round: compared tokens, accepted and rejected drafts, preemptions, and prefix hits."""

    tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    preemptions: int = 0
    hits: int = 0

    def add(self, other: Seen) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Campaign:
    """Rounds with one tiny model in `folder`. `mtp`: whether its module for multi-token prediction drafts."""

    def __init__(self, family: str, folder: Path, mtp: bool = False) -> None:
        model = make_mtp_model(family, folder) if mtp else make_tiny_model(family, folder)
        self._config: dict[str, Any] = dict(model=str(model), num_threads=1, speculative="mtp" if mtp else "ngram")
        self._mtp = mtp
        self._loaded: LoadedModel = load_model(EngineConfig(**self._config))
        self._plain = Engine(EngineConfig(**(self._config | dict(speculative="off", num_blocks=2048))), self._loaded)

    def round(self, seed: int) -> Seen:
        """Serve random requests with and without drafts. Raise AssertionError if a sample differs."""
        rng = np.random.default_rng(seed)
        asked = self._requests(rng)
        expected = {(s.request_id, s.index): s for s in serve(self._plain, asked, rng, 0.0)}
        adversary = None if self._mtp else FunctionDrafter(Adversary(known_texts(asked, expected), vocab_size=512))
        engine = Engine(self._limits(rng), self._loaded, adversary, draft_always=True)
        for _ in range(2):  # the second time with prefix hits
            found = {(s.request_id, s.index): s for s in serve(engine, asked, rng, rng.choice([0.0, 0.05]))}
            assert {key: parts(s) for key, s in found.items()} == {k: parts(s) for k, s in expected.items()}, seed
        stats, [drafts] = engine.stats(), engine.stats().drafts
        compared = 2 * sum(len(sample.token_ids) for sample in expected.values())
        return Seen(
            compared,
            drafts.num_accepted,
            drafts.num_drafted - drafts.num_accepted,
            stats.preemptions,
            stats.prefix_hits,
        )

    def _limits(self, rng: np.random.Generator) -> EngineConfig:
        block_size = int(rng.choice([2, 4, 16]))
        budget = int(rng.choice([16, 40, 512]))
        return EngineConfig(
            **self._config,
            block_size=block_size,
            num_blocks=int(rng.choice([200, 400, 2048])) // block_size,
            max_model_len=192,
            max_num_seqs=min(budget, int(rng.choice([3, 8, 16]))),
            max_num_batched_tokens=budget,
            state_interval=block_size * int(rng.choice([1, 4])),
            decode_state_interval=block_size * int(rng.choice([0, 1, 4])),
            state_budget=int(rng.choice([0, 4, 32])),
            num_speculative_tokens=int(rng.choice([1, 3, 9])),
        )

    def _requests(self, rng: np.random.Generator) -> list[GenerateRequest]:
        shared = tokens(int(rng.integers(1, 60)), seed=int(rng.integers(1000)))
        return [self._request(str(i), shared, rng) for i in range(rng.integers(2, 9))]

    def _request(self, name: str, shared: np.ndarray, rng: np.random.Generator) -> GenerateRequest:
        own = tokens(int(rng.integers(1, 30)), seed=int(rng.integers(1000)))
        params: dict[str, Any] = dict(n=int(rng.integers(1, 5)), max_tokens=int(rng.integers(1, 100)))
        params |= dict(temperature=float(rng.choice([0.0, 0.7, 1.0, 1.5])), seed=int(rng.integers(2**32)))
        if rng.random() < 0.3:
            params |= dict(top_k=20, top_p=0.9, min_p=0.02)
        if rng.random() < 0.3:
            params |= dict(top_logprobs=3)
        if rng.random() < 0.3:
            stops = rng.integers(3, 512, 60).tolist()
            params |= dict(stop_token_ids=stops, min_tokens=int(rng.integers(0, params["max_tokens"] + 1)))
        if self._plain.info.num_experts and rng.random() < 0.5:
            params |= dict(return_routed_experts=True)
        return generate(name, np.concatenate((shared, own)) if rng.random() < 0.6 else own, **params)


def serve(
    engine: Engine, requests: list[GenerateRequest], rng: np.random.Generator, interruptions: float
) -> list[SampleOutput]:
    """Serve requests. `interruptions`: how often a step is followed by an interruption, after which all running
    sequences are computed again.
    """
    outputs: list[Output] = []
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        outputs += engine.step()
        if interruptions and rng.random() < interruptions:
            outputs += engine.interrupt("recompute")
    engine.check_integrity()
    return [output for output in outputs if isinstance(output, SampleOutput)]
