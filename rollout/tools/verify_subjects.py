"""The requests of the exactness matrix: the compared requests, which have various sampling parameters, and the fillers,
which run at the same time.

Owns the requests, but does not serve the requests. A variation is a request with the prompt and seed of an original
request, but with other parameters. A comparison of the variation with the original request shows the effect of the
parameters. The stop tokens and stop strings of a variation are taken from the text that the model generates for the
original request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trueroll.errors import InvalidRequestError

from ...engine.grammars.masks import Grammars
from ...engine.grammars.source import Grammar
from ...engine.outputs.stop_strings import Vocabulary, load_vocabulary
from ...engine.request import GenerateRequest, Request, SampleOutput, SamplingParams, ScoreRequest
from ...engine.running.loading import LoadedModel

GRAMMAR = Grammar(regex="([a-z][0-9]){200}")
"""The grammar of the matrix. The texts of this grammar are longer than any sample, so that no sample ends early."""
GRAMMAR_PREFIX = "([a-z][0-9])*[a-z]?"
"""A regular expression that matches the beginnings of the grammar's texts."""
NUM_ALLOWED = 64

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

    - `prompt_lengths`: lengths of the prompts; for each length, there is a greedy request and a seeded request
    - `max_tokens`: new tokens of each sample
    - `longest_token_by_token`: maximum prompt length in the cell with one token per step
    - `varied_length`: length of the prompt that all variations of sampling use
    """

    prompt_lengths: tuple[int, ...] = (530, 121, 64, 5)
    max_tokens: int = 12
    longest_token_by_token: int = 64
    varied_length: int = 64

    @property
    def num_positions(self) -> int:
        """Length of the longest prompt plus its new tokens."""
        return max(self.prompt_lengths) + self.max_tokens


def make_subjects(sizes: Sizes, vocab_size: int, routes: bool = False) -> list[GenerateRequest]:
    """Return one request for each prompt and each entry of SAMPLINGS, then one request with the parameters PLAIN.
    Prompts are random, but every call returns the same prompts. `routes`: whether the requests ask for the routed
    experts of all tokens.
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


def make_variations(subjects: list[GenerateRequest], serve: Serve, loaded: LoadedModel) -> Iterator[GenerateRequest]:
    """Yield the variations.

    The first variation is the plain request with stop tokens and `min_tokens`. The second variation is the plain
    request with edits of logits. The third variation is the seeded request for the same prompt, with raw log-probs and,
    if the model has a tokenizer, with a stop string. The remaining variations are restricted (`is_restricted`): the
    plain request with allowed tokens and, unless there is a `grammar_obstacle`, the plain request with a grammar.
    """
    plain = subjects[-1]
    (seeded,) = (s for s in subjects if s.id == f"seeded {len(plain.prompt_token_ids)}")
    yield _delay(plain, serve)
    yield _edit(plain, serve)
    folder = loaded.folder
    stop = () if stop_string_obstacle(folder) else (_find_text(load_vocabulary(folder), serve(seeded).token_ids),)
    # `min_tokens` keeps the request running until it has decoded in a step together with the next request.
    yield _vary(seeded, "raw", logprobs="raw", top_logprobs=4, min_tokens=2, stop=stop)
    others = set(range(loaded.model.spec.vocab_size)).difference(serve(plain).token_ids)
    yield _vary(plain, "allowed", allowed_token_ids=tuple(sorted(others)[-NUM_ALLOWED:]))
    if not grammar_obstacle(loaded):
        yield _vary(plain, "grammar", structured_outputs=GRAMMAR, ignore_eos=False)


def stop_string_obstacle(folder: Path) -> str:
    """Return the reason why stop strings cannot be used; an empty string if stop strings can be used."""
    try:
        load_vocabulary(folder)
    except InvalidRequestError as error:
        return str(error)
    return ""


def grammar_obstacle(loaded: LoadedModel) -> str:
    """Return the reason why grammars cannot be used; an empty string if grammars can be used."""
    grammars = Grammars(loaded.folder, loaded.model.spec.vocab_size, loaded.eos_token_ids)
    try:
        grammars.prepare(GRAMMAR)
    except InvalidRequestError as error:
        return str(error)
    finally:
        grammars.close()
    return ""


def is_restricted(request: Request) -> bool:
    """Return whether a request has allowed tokens or a grammar."""
    params = request.params if isinstance(request, GenerateRequest) else request.distribution
    return params.allowed_token_ids is not None or params.structured_outputs is not None


def _vary(request: GenerateRequest, name: str, **update: Any) -> GenerateRequest:
    """Return a copy of a request, with changed parameters and by default only one sample."""
    return dataclasses.replace(with_params(request, **dict(n=1) | update), id=f"{name} {len(request.prompt_token_ids)}")


def _delay(plain: GenerateRequest, serve: Serve) -> GenerateRequest:
    """Return the plain request with two stop tokens: `min_tokens` delays the first stop token, and the second stop
    token ends the sample.

    The first stop token is the first token of the plain sample. The second stop token is a token near the end of the
    sample. If the second stop token also occurs among the first `min_tokens` tokens, the token is banned in these
    positions and the sample changes, so the function tries another token.
    """
    stop_tokens = set(serve(plain).token_ids[:1])
    while True:
        kinds = dict(logprobs="temperature", top_logprobs=2)
        delayed = _vary(plain, "min_tokens", min_tokens=2, stop_token_ids=tuple(sorted(stop_tokens)), **kinds)
        sample = serve(delayed)
        if sample.finish_reason != "length":
            return delayed
        stop_tokens.add(sample.token_ids[-3])


def _edit(plain: GenerateRequest, serve: Serve) -> GenerateRequest:
    """Return the plain request with penalties, biases and bad words, which change the sample from its first token."""
    first, second, third, *_ = serve(plain).token_ids
    penalties = dict(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.25)
    biases = {second: 4.0} | {first: -100.0}
    words = (third,), (second, second)
    return _vary(plain, "edits", n=2, **penalties, logit_bias=tuple(sorted(biases.items())), bad_words_token_ids=words)


def _find_text(vocabulary: Vocabulary, token_ids: list[int]) -> str:
    """Decode all tokens except the last three, and return the last one or two characters of the text. If the text is
    empty, return a line break.
    """
    whole = [part for part in vocabulary.decode(token_ids[:-3]).split("\ufffd") if part]
    return whole[-1][-2:] if whole else "\n"


def make_fillers(count: int, sizes: Sizes, vocab_size: int) -> list[GenerateRequest]:
    """Return fillers: requests that run at the same time as the compared requests, but are not compared. The prompts
    have 3 to 40 tokens.
    """
    generator = np.random.default_rng(1)
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=sizes.max_tokens)
    prompts = [generator.integers(0, vocab_size, 3 + 7 * i % 38, np.int32) for i in range(count)]
    return [GenerateRequest(f"filler {i}", prompt, params) for i, prompt in enumerate(prompts)]


def make_score(subject: GenerateRequest, sample: SampleOutput) -> ScoreRequest:
    """Return a request that scores a sample under the distribution to which the sample's log-probs refer."""
    return ScoreRequest(
        f"{subject.id}/{sample.index}",
        np.array([*subject.prompt_token_ids, *sample.token_ids], np.int32),
        subject.params.recorded,
        start=len(subject.prompt_token_ids),
        top_logprobs=subject.params.top_logprobs,
        return_routed_experts=subject.params.return_routed_experts,
        images=subject.images,
    )


def may_end_early(request: GenerateRequest) -> bool:
    """Return whether a stop token or a stop string may end the request's samples."""
    return bool(request.params.stop_token_ids or request.params.stop)


def with_params(request: GenerateRequest, **update: Any) -> GenerateRequest:
    """Return a copy of a request with changed parameters."""
    return dataclasses.replace(request, params=request.params.model_copy(update=update))
