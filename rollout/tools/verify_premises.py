"""The premises of the exactness matrix: what each cell and the baseline claim about their runs, and the evidence for
these claims.

A cell claims that its circumstances occurred. The baseline claims that each variation of the sampling parameters had an
effect. The evidence is the engine's outputs, and the engine's counters before and after every step. All functions in
this module are pure; the module runs no engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from ...engine.request import GenerateRequest, Output, Request, SampleOutput, SamplingParams
from ...engine.running.ranks import Topology
from ...engine.stats import EngineStats
from .verify_subjects import GRAMMAR_PREFIX, is_restricted

UNLIMITED = 2**20

Decode: TypeAlias = Callable[[list[int]], str]


@dataclass(frozen=True)
class Cell:
    """One set of circumstances. The defaults are the circumstances of the baseline.

    - `cache`: what the cache holds before the requests run. `host`: the prompts of the requests, but only in host
      memory
    - `others`: number of requests that are served together with each request
    - `budget`: maximum number of tokens in a step
    - `num_reread`: number of generated tokens that become part of the prompt of the next request
    - `is_starved`: there are too few KV blocks for all running requests
    - `is_score`: the requests only compute log-probs of given tokens
    - `threads`: number of threads; None: unchanged
    - `interval`, `checkpoints`: for models with recurrent layers, the engine's `state_interval` and `state_budget`
    - `states`: for models with recurrent layers, what must happen to checkpoints of recurrent states
    - `routes`: for models with experts, what a warm cache stores about the experts that were chosen for each token:
      nothing (`unknown`), or the experts that a later request has added (`added`)
    - `event`: the event that happens while the requests run: an `interruption`; a `push` of equal weights; a push of
      `adapters` that change nothing; or a `sleep`. After the event, all requests are computed again
    - `is_restricted`: two more of the baseline's requests run: one with allowed tokens, and one with a grammar
    - `drafts`: how tokens are drafted: `repeats`, `mtp`, or `adversarial` (see `verify_drafts`)
    - `ranks`: number of processes among which the model is divided
    - `stages`: number of stages into which the layers are divided; all stages have the same number of ranks
    """

    cache: Literal["cold", "warm", "host", "off"] = "cold"
    others: int = 0
    budget: int = 512
    block_size: int = 16
    num_reread: int = 0
    is_starved: bool = False
    is_score: bool = False
    threads: int | None = None
    interval: int | None = None
    checkpoints: int | None = None
    states: Literal["", "hit", "hit shortened", "skipped", "evicted", "lost in a sleep"] = ""
    routes: Literal["", "unknown", "added"] = ""
    drafts: Literal["", "repeats", "adversarial", "mtp"] = ""
    event: Literal["", "interruption", "push", "adapters", "sleep"] = ""
    is_restricted: bool = False
    ranks: int = 1
    stages: int = 1

    @property
    def topology(self) -> Topology:
        """The topology of the cell's ranks and stages."""
        return Topology(self.ranks // self.stages, self.stages)

    @property
    def name(self) -> str:
        """Description of the circumstances that differ from the baseline."""
        return ", ".join(self._differences()) or "baseline: alone, cold, budget 512, block 16"

    def _differences(self) -> Iterator[str]:
        if self.is_score:
            yield "score"
        if self.num_reread:
            yield f"multi-turn, {self.num_reread} tokens reread"
        if self.cache != "cold":
            yield f"cache {self.cache}"
        if self.others:
            yield f"with {self.others} other{'s' * (self.others > 1)}"
        if self.budget != 512:
            yield {1: "token by token", UNLIMITED: "unlimited budget"}.get(self.budget, f"budget {self.budget}")
        if self.block_size != 16:
            yield f"block {self.block_size}"
        if self.is_starved:
            yield "preempted"
        if self.threads is not None:
            yield f"{self.threads} thread{'s' * (self.threads > 1)}"
        if self.states:
            yield f"checkpoint {self.states}"
        if self.routes:
            yield f"routes {self.routes}"
        if self.checkpoints == 0:
            yield "no checkpoints"
        if self.event:
            yield f"{self.event} in flight"
        if self.drafts:
            yield f"drafts {self.drafts}"
        if self.is_restricted:
            yield "restricted"
        if self.ranks > 1:
            yield self.topology.text


@dataclass(frozen=True)
class Run:
    """The record of `requests` that ran together.

    - `outputs`: the engine's outputs
    - `history`: the engine's counters before the first step and after each step
    """

    requests: Sequence[Request]
    outputs: list[Output]
    history: list[EngineStats]

    @property
    def samples(self) -> list[SampleOutput]:
        return [output for output in self.outputs if isinstance(output, SampleOutput)]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt, or the largest number of tokens that a score request computes."""
        return max(
            len(r.prompt_token_ids) if isinstance(r, GenerateRequest) else len(r.token_ids) - 1 for r in self.requests
        )

    @property
    def reused(self) -> int:
        """Number of prompt tokens found in the cache.

        Requests that shared a running computation of the same prompt are not counted. These requests are recognized
        because they report all their prompt tokens as cached, while a cache lookup never finds the last token of a
        prompt.
        """
        lengths = {r.id: len(r.prompt_token_ids) for r in self.requests if isinstance(r, GenerateRequest)}
        return sum(s.num_cached_tokens for s in self.samples if s.num_cached_tokens < lengths[s.request_id])

    @property
    def hits(self) -> int:
        """Number of prompt tokens that were not computed, either because the cache had the tokens or because a request
        shared a running computation.
        """
        return self.growth("prefix_hits")

    def growth(self, counter: str) -> int:
        """Return the increase of one of the engine's counters."""
        return getattr(self.history[-1], counter) - getattr(self.history[0], counter)

    @property
    def preemptions(self) -> int:
        return self.growth("preemptions")

    @property
    def steps(self) -> list[tuple[int, int]]:
        """For each step: the number of computed prompt tokens, and the number of decoded tokens (one for each decoding
        sample).
        """
        prompts = [
            after.computed_prompt_tokens - before.computed_prompt_tokens for before, after in pairwise(self.history)
        ]
        tokens = [after.computed_tokens - before.computed_tokens for before, after in pairwise(self.history)]
        return [(prompt, total - prompt) for prompt, total in zip(prompts, tokens, strict=True)]

    @property
    def together(self) -> int:
        """Maximum number of samples that decoded in one step.

        Each decoded token of a step counts as one sample. Since a preempted sample recomputes several tokens, the count
        is limited to the number of sequences that ran before the step. Score requests do not decode. For score
        requests, return the number of requests that must have shared a step.
        """
        if not self.samples:
            return -(-len(self.requests) // len(self.steps))
        return max(min(now[1], before.num_running) for now, before in zip(self.steps, self.history, strict=False))

    @property
    def largest_group(self) -> int:
        """Maximum number of samples in one request."""
        return max(r.params.n if isinstance(r, GenerateRequest) else 1 for r in self.requests)


@dataclass(frozen=True)
class Premise:
    """A claimed circumstance, the observed number for this circumstance, and whether the number matches the claim."""

    name: str
    seen: int
    holds: bool


_STATE_COUNTERS = {
    "hit": "checkpoints_restored",
    "hit shortened": "shortened_hits",
    "skipped": "checkpoints_skipped",
    "evicted": "checkpoints_evicted",
}


def check_premises(
    cell: Cell, runs: Sequence[Run], num_threads: int, topology: Topology, cuts: bool = False
) -> list[Premise]:
    """Check the premises of a cell against its `runs`, and return all premises.

    `num_threads`, `topology`: the number of threads and the ranks during the runs. `cuts`: whether prompts are also
    split at checkpoints of recurrent states.
    """
    preemptions = sum(run.preemptions for run in runs)
    return [
        _finish_premise(runs),
        _reuse_premise(cell, runs),
        _chunk_premise(cell, runs, cuts),
        *_state_premises(cell, runs),
        *_interruption_premises(cell, runs),
        *_draft_premises(cell, runs),
        *_restriction_premises(cell, runs),
        _company_premise(cell, runs),
        Premise("preempted", preemptions, (preemptions > 0) == cell.is_starved),
        *_host_premises(cell, runs),
        Premise("threads", num_threads, cell.threads in (None, num_threads)),
        *([Premise("ranks", topology.size, cell.topology == topology)] if cell.ranks > 1 else []),
    ]


@dataclass(frozen=True)
class _Variation:
    """A comparison of a request that has varied parameters with the original request. The original request is the first
    request with the same prompt and seed.

    `params`, `sample`: the varied parameters, and the first sample of the request with these parameters. `varied`: the
    first sample of the original request.
    """

    params: SamplingParams
    sample: SampleOutput
    varied: SampleOutput

    @property
    def was_ended(self) -> bool:
        """Return whether one of the request's stop tokens or stop strings ended the sample."""
        return self.sample.stop_reason in (*self.params.stop_token_ids, *self.params.stop)

    @property
    def was_delayed(self) -> bool:
        """Return whether `min_tokens` prevented a token that would have ended the sample."""
        return not {*self.params.stop_token_ids}.isdisjoint(self.varied.token_ids[: self.params.min_tokens])

    @property
    def was_edited(self) -> bool:
        """Return whether edits of logits changed the tokens."""
        return self.sample.token_ids != self.varied.token_ids

    @property
    def was_allowed(self) -> bool:
        """Return whether the sample consists of allowed tokens only, and differs from the original sample."""
        return self.was_edited and {*self.sample.token_ids} <= {*(self.params.allowed_token_ids or ())}

    def was_in_grammar(self, decode: Decode) -> bool:
        """Return whether the sample is the beginning of a text of the grammar, and differs from the original sample."""
        return self.was_edited and re.fullmatch(GRAMMAR_PREFIX, decode(self.sample.token_ids)) is not None

    @property
    def has_other_logprobs(self) -> bool:
        """Return whether the same tokens have different log-probs in the two samples."""
        count = len(self.sample.token_ids)
        ours, theirs = self.sample.logprobs, self.varied.logprobs
        assert ours is not None and theirs is not None
        same_tokens = self.sample.token_ids == self.varied.token_ids[:count]
        return same_tokens and bool((ours != theirs[:count]).any())


def check_variations(runs: Sequence[Run], decode: Decode) -> list[Premise]:
    """Return the premises of the baseline: each variation of sampling parameters had an effect. Each run has one
    request. `decode`: returns the text of tokens; called only for samples of a grammar.
    """
    variations = list(_variations(runs))
    delayed = [v for v in variations if v.params.stop_token_ids]
    in_grammar = [v.was_in_grammar(decode) for v in variations if v.params.structured_outputs]
    in_text = [v.was_ended for v in variations if v.params.stop]
    return [
        _showed("ended by a token", [v.was_ended for v in delayed]),
        _showed("held back by min_tokens", [v.was_delayed for v in delayed]),
        _showed("edited", [v.was_edited for v in variations if v.params.logit_bias]),
        _showed("other log-probs", [v.has_other_logprobs for v in variations if v.params.logprobs == "raw"]),
        _showed("allowed", [v.was_allowed for v in variations if v.params.allowed_token_ids]),
        # Without a tokenizer, no request has a stop string or a grammar.
        *([_showed("ended by a string", in_text)] if in_text else []),
        *([_showed("in the grammar", in_grammar)] if in_grammar else []),
    ]


def _variations(runs: Sequence[Run]) -> Iterator[_Variation]:
    first: dict[tuple[bytes, int | None], SampleOutput] = {}
    for run in runs:
        (request,) = run.requests
        assert isinstance(request, GenerateRequest)
        sample = next(sample for sample in run.samples if sample.index == 0)
        varied = first.setdefault((request.prompt_token_ids.tobytes(), request.params.seed), sample)
        if varied is not sample:
            yield _Variation(request.params, sample, varied)


def _showed(name: str, seen: list[bool]) -> Premise:
    return Premise(name, sum(seen), all(seen) and any(seen))


def _finish_premise(runs: Sequence[Run]) -> Premise:
    """Return the premise that every sample and score is complete: no output is missing, and no output ended with an
    error.
    """
    expected = sum(
        request.params.n if isinstance(request, GenerateRequest) else 1 for r in runs for request in r.requests
    )
    whole = sum(output.finish_reason in ("stop", "length") for run in runs for output in run.outputs)
    return Premise("failed", expected - whole, expected == whole)


def _reuse_premise(cell: Cell, runs: Sequence[Run]) -> Premise:
    reused = sum(run.reused for run in runs)
    if cell.states == "hit shortened":
        return Premise("reused", reused, reused > 0)
    if cell.checkpoints == 0 or cell.states == "lost in a sleep" or cell.routes == "unknown":
        return Premise("reused", reused, reused == 0)
    if cell.num_reread:
        decoded = [run.reused - (run.longest - cell.num_reread) for run in runs]
        return Premise("reread", sum(decoded), min(decoded) > 0)
    if cell.cache == "off":
        hits = sum(run.hits for run in runs)
        return Premise("reused", hits, hits == 0)
    return Premise("reused", reused, (reused > 0) == (cell.cache in ("warm", "host")))


def _host_premises(cell: Cell, runs: Sequence[Run]) -> list[Premise]:
    restored = sum(run.growth("host_restored") for run in runs)
    return [Premise("restored", restored, restored > 0)] if cell.cache == "host" else []


def _state_premises(cell: Cell, runs: Sequence[Run]) -> list[Premise]:
    """Return a list with the premise about checkpoints of recurrent states, or an empty list if the cell makes no claim
    about checkpoints.
    """
    counter = _STATE_COUNTERS.get(cell.states)
    if counter is None:
        return []
    seen = sum(run.growth(counter) for run in runs)
    return [Premise(f"checkpoint {cell.states}", seen, seen > 0)]


def _interruption_premises(cell: Cell, runs: Sequence[Run]) -> list[Premise]:
    if not cell.event:
        return []
    recomputed = sum(run.growth("recomputed") for run in runs)
    return [Premise("recomputed", recomputed, recomputed > 0)]


def _draft_premises(cell: Cell, runs: Sequence[Run]) -> list[Premise]:
    """Return two premises: some drafted tokens were accepted, and some were rejected. For a cell without drafts, the
    list is empty.
    """
    if not cell.drafts:
        return []
    ends = [(run.history[0].drafts[0], run.history[-1].drafts[0]) for run in runs]
    drafted = sum(last.num_drafted - first.num_drafted for first, last in ends)
    accepted = sum(last.num_accepted - first.num_accepted for first, last in ends)
    return [
        Premise("accepted", accepted, accepted > 0),
        Premise("rejected", drafted - accepted, drafted > accepted),
    ]


def _restriction_premises(cell: Cell, runs: Sequence[Run]) -> list[Premise]:
    if not cell.is_restricted:
        return []
    restricted = sum(is_restricted(request) for run in runs for request in run.requests)
    return [Premise("restricted", restricted, restricted > 0)]


def _chunk_premise(cell: Cell, runs: Sequence[Run], cuts: bool) -> Premise:
    """Return the premise about the number of chunks per prompt.

    If a sample runs alone and `cuts` is False, the number of chunks must be exactly the number that the budget implies.
    If samples run together, there may be more chunks than the budget implies, because a waiting sample of a group
    recomputes the end of its prompt. If `cuts` is True, there may also be more chunks than the budget implies. With a
    warm cache, or one in host memory, few prompt tokens are left to split into chunks, so there may be fewer chunks
    than the budget implies.
    """
    chunks = [sum(prompt > 0 for prompt, _ in run.steps) for run in runs]
    expected = [-(-run.longest // cell.budget) for run in runs]
    holds = all(prompt + decoded <= cell.budget for run in runs for prompt, decoded in run.steps)
    if not cell.num_reread:
        are_most = [cell.others == 0 and run.largest_group == 1 and not cuts for run in runs]
        are_least = cell.cache not in ("warm", "host")
        holds &= all(
            (found >= count or not are_least) and (found <= count or not is_most)
            for found, count, is_most in zip(chunks, expected, are_most, strict=True)
        )
    return Premise("chunks", max(chunks), holds)


def _company_premise(cell: Cell, runs: Sequence[Run]) -> Premise:
    """Return the premise about how many samples or score requests shared a step. Cells with `is_starved` or `is_score`
    claim only that several requests shared a step. With S pipeline stages, the samples are divided among S steps.
    """
    together = [run.together for run in runs]
    if cell.others == 0:
        return Premise("together", max(together), all(run.together <= run.largest_group for run in runs))
    if cell.is_starved or cell.is_score:
        shared = all(run.together * cell.stages > run.largest_group for run in runs)
        return Premise("together", min(together), shared)
    return Premise("together", min(together), min(together) * cell.stages > cell.others)
