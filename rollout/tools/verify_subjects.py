"""The requests of the exactness matrix: requests for each way to sample, and fillers that run beside them.

Owns the requests, but not how they are served. A variation has the prompt and seed of another request, so that a
comparison of the two shows its effect. The stop tokens and stop strings of variations are taken from the text that the
model generates without them.
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
# The parameters of GRPO.
PLAIN = SamplingParams(n=4, temperature=1.0, seed=5, ignore_eos=True)

# Returns sample 0 of a request that is served alone.
Serve = Callable[[GenerateRequest], SampleOutput]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the matrix.

    - `prompt_lengths`: each length has a greedy and a seeded request
    - `max_tokens`: new tokens of each sample
    - `longest_token_by_token`: maximum length of a prompt in the cell that computes one token in each step
    - `varied_length`: length of the prompt that all variations of sampling use
    """

    prompt_lengths: tuple[int, ...] = (530, 121, 64, 5)
    max_tokens: int = 12
    longest_token_by_token: int = 64
    varied_length: int = 64

    @property
    def num_positions(self) -> int:
        """Length of the longest prompt with its new tokens."""
        return max(self.prompt_lengths) + self.max_tokens


def make_subjects(sizes: Sizes, vocab_size: int, routes: bool = False) -> list[GenerateRequest]:
    """Return a request for each prompt with each of SAMPLINGS, and the plain group as the last request.

    Prompts are random but always the same. `routes`: request the routed experts of all tokens.
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
    """Yield two variations.

    The first is the plain group with stop tokens and `min_tokens`. The second is the seeded request of the same prompt
    with raw log-probs and, if the model in `folder` has a tokenizer, a stop string.
    """
    plain = subjects[-1]
    (seeded,) = (s for s in subjects if s.id == f"seeded {len(plain.prompt_token_ids)}")
    yield _delay(plain, serve)
    stop = () if stop_string_obstacle(folder) else (_find_text(load_vocabulary(folder), serve(seeded).token_ids),)
    # `min_tokens` keeps the request running until it has decoded in a step together with the next request.
    yield _vary(seeded, "raw", logprobs="raw", top_logprobs=4, min_tokens=2, stop=stop)


def stop_string_obstacle(folder: Path) -> str:
    """Return why stop strings cannot be used, or an empty string if they can."""
    try:
        load_vocabulary(folder)
    except InvalidRequestError as error:
        return str(error)
    return ""


def _vary(request: GenerateRequest, name: str, **update: Any) -> GenerateRequest:
    """Return a request for only the first sample, with changed parameters."""
    return dataclasses.replace(with_params(request, n=1, **update), id=f"{name} {len(request.prompt_token_ids)}")


def _delay(plain: GenerateRequest, serve: Serve) -> GenerateRequest:
    """Return the plain request with two stop tokens: `min_tokens` delays the first, and the second ends the sample.

    The first is the token with which the plain sample begins. The second is a late token of the sample. If that token
    also occurs among the first `min_tokens` tokens, it is banned there and the sample changes, so the search goes on.
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
    """Return up to two characters from the text of all but the last tokens, or a line break if there is no text."""
    whole = [part for part in vocabulary.decode(token_ids[:-3]).split("\ufffd") if part]
    return whole[-1][-2:] if whole else "\n"


def make_fillers(count: int, sizes: Sizes, vocab_size: int) -> list[GenerateRequest]:
    """Return requests that only run beside the compared requests, with prompts of 3 to 40 tokens."""
    generator = np.random.default_rng(1)
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=sizes.max_tokens)
    prompts = [generator.integers(0, vocab_size, 3 + 7 * i % 38, np.int32) for i in range(count)]
    return [GenerateRequest(f"filler {i}", prompt, params) for i, prompt in enumerate(prompts)]


def make_score(subject: GenerateRequest, sample: SampleOutput) -> ScoreRequest:
    """Return a request that scores a sample with the distribution of its log-probs."""
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
    """Return the distribution of a sample's log-probs, without the effect of `min_tokens`."""
    if params.logprobs == "raw":
        return Distribution()
    names = Distribution.model_fields if params.logprobs == "processed" else ("temperature",)
    return Distribution(**{name: getattr(params, name) for name in names})


def may_end_early(request: GenerateRequest) -> bool:
    """Return whether a stop token or a stop string may end the request's samples."""
    return bool(request.params.stop_token_ids or request.params.stop)


def with_params(request: GenerateRequest, **update: Any) -> GenerateRequest:
    """Return the request with changed parameters."""
    return dataclasses.replace(request, params=request.params.model_copy(update=update))
