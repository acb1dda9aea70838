"""The requests of the exactness matrix: which ways to sample it compares, and the fillers that keep them company.

Owns what is asked, not how it is served. A variation has prompt and seed of another request, so that what it asks for
shows next to that one; the tokens and the string that end some are taken from what the model says without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trueroll.errors import InvalidRequestError

from ...engine.outputs.stop_strings import Vocabulary, load_vocabulary
from ...engine.request import Distribution, GenerateRequest, SampleOutput, SamplingParams, ScoreRequest

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, seed=0, ignore_eos=True),
    "seeded": SamplingParams(n=2, temperature=0.9, top_p=0.95, seed=2**63 + 11, ignore_eos=True),
}
# As GRPO samples.
PLAIN = SamplingParams(n=4, temperature=1.0, seed=5, ignore_eos=True)

# Gives sample 0 of a request that is served alone.
Serve = Callable[[GenerateRequest], SampleOutput]


@dataclass(frozen=True)
class Sizes:
    """How much is run: a greedy and a seeded request for each prompt length, with `max_tokens` new tokens each, and for
    the prompt of `varied_length` everything else about sampling.

    Prompts beyond `longest_token_by_token` are left out of the cell that feeds one token in each step.
    """

    prompt_lengths: tuple[int, ...] = (530, 121, 64, 5)
    max_tokens: int = 12
    longest_token_by_token: int = 64
    varied_length: int = 64

    @property
    def num_positions(self) -> int:
        """The longest prompt with its new tokens."""
        return max(self.prompt_lengths) + self.max_tokens


def make_subjects(sizes: Sizes, vocab_size: int, routes: bool = False) -> list[GenerateRequest]:
    """For each prompt, which is random but always the same, one request of each sampling; the plain group at last.

    `routes`: all ask for routed experts.
    """
    update = dict(max_tokens=sizes.max_tokens, return_routed_experts=routes)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, vocab_size, length, np.int32) for length in sizes.prompt_lengths]
    subjects = [
        with_params(GenerateRequest(f"{name} {len(prompt)}", prompt, params), **update)
        for name, params in SAMPLINGS.items()
        for prompt in prompts
    ]
    (varied,) = (prompt for prompt in prompts if len(prompt) == sizes.varied_length)
    plain = GenerateRequest(f"plain {len(varied)}", varied, PLAIN)
    return [*subjects, with_params(plain, **update)]


def make_variations(subjects: list[GenerateRequest], serve: Serve, folder: Path) -> Iterator[GenerateRequest]:
    """The plain group with stop tokens and `min_tokens`; the seeded request of its prompt with raw log-probs and, if
    the model in `folder` has a tokenizer, a stop string.
    """
    plain = subjects[-1]
    (seeded,) = (s for s in subjects if s.id == f"seeded {len(plain.prompt_token_ids)}")
    yield _delay(plain, serve)
    stop = () if stop_string_obstacle(folder) else (_find_text(load_vocabulary(folder), serve(seeded).token_ids),)
    # The minimum lets it decode with whoever comes next.
    yield _vary(seeded, "raw", logprobs="raw", top_logprobs=4, min_tokens=2, stop=stop)


def stop_string_obstacle(folder: Path) -> str:
    """Why no stop string can be asked for, or an empty string."""
    try:
        load_vocabulary(folder)
    except InvalidRequestError as error:
        return str(error)
    return ""


def _vary(request: GenerateRequest, name: str, **update: Any) -> GenerateRequest:
    """Its first sample alone, asked for in another way."""
    return dataclasses.replace(with_params(request, n=1, **update), id=f"{name} {len(request.prompt_token_ids)}")


def _delay(plain: GenerateRequest, serve: Serve) -> GenerateRequest:
    """The plain request with a stop token that it begins with, which `min_tokens` keeps it from, and one that ends it.

    A token that the sample ends with may be one that it began with, and is banned there: then it takes another course.
    """
    stop_tokens = set(serve(plain).token_ids[:1])
    while True:
        kinds = dict(logprobs="temperature", top_logprobs=2)
        delayed = _vary(plain, "min_tokens", min_tokens=2, stop_token_ids=tuple(sorted(stop_tokens)), **kinds)
        sample = serve(delayed)
        if sample.finish_reason != "length":
            return delayed
        stop_tokens.add(sample.token_ids[-3])


def _find_text(vocabulary: Vocabulary, token_ids: list[int]) -> str:
    """Up to two characters of the text of all but the last tokens. A line break where that has no whole ones."""
    whole = [part for part in vocabulary.decode(token_ids[:-3]).split("\ufffd") if part]
    return whole[-1][-2:] if whole else "\n"


def make_fillers(count: int, sizes: Sizes, vocab_size: int) -> list[GenerateRequest]:
    """Requests that only keep the others company, with prompts of 3 to 40 tokens."""
    generator = np.random.default_rng(1)
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=sizes.max_tokens)
    prompts = [generator.integers(0, vocab_size, 3 + 7 * i % 38, np.int32) for i in range(count)]
    return [GenerateRequest(f"filler {i}", prompt, params) for i, prompt in enumerate(prompts)]


def make_score(subject: GenerateRequest, sample: SampleOutput) -> ScoreRequest:
    """Asks for the log-probs that the sample has."""
    token_ids = np.array([*subject.prompt_token_ids, *sample.token_ids], np.int32)
    asked = _distribution_of(subject.params)
    return ScoreRequest(
        f"{subject.id}/{sample.index}",
        token_ids,
        asked,
        top_logprobs=subject.params.top_logprobs,
        return_routed_experts=subject.params.return_routed_experts,
    )


def _distribution_of(params: SamplingParams) -> Distribution:
    """Which a sample's log-probs are of, without `min_tokens`."""
    if params.logprobs == "raw":
        return Distribution()
    names = Distribution.model_fields if params.logprobs == "processed" else ("temperature",)
    return Distribution(**{name: getattr(params, name) for name in names})


def may_end_early(request: GenerateRequest) -> bool:
    """Whether a token or a string ends its samples."""
    return bool(request.params.stop_token_ids or request.params.stop)


def with_params(request: GenerateRequest, **update: Any) -> GenerateRequest:
    """The request with some parameters changed."""
    return dataclasses.replace(request, params=request.params.model_copy(update=update))
