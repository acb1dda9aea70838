"""What a cell of the exactness matrix claims about its circumstances, the baseline about the ways to sample, and the
evidence that it was so.

Pure functions of what was seen: the engine's counters before and after every step, and its outputs. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ...engine.request import GenerateRequest, Output, Request, SampleOutput, SamplingParams
from ...engine.stats import EngineStats

UNLIMITED = 2**20


@dataclass(frozen=True)
class Cell:
    """One set of circumstances; the defaults are the baseline's.

    `others`: requests that are served along with each one. `budget`: tokens in a step. `num_reread`: so many decoded
    tokens are read again as part of a prompt. `is_starved`: too few KV blocks for all who run. `is_score`: log-probs of
    given tokens are computed. `threads` None: as found. Of models with recurrent layers: `interval` and `checkpoints`,
    the engine's `state_interval` and `state_budget`; `states`, what has to become of checkpoints. Of models with
    experts: `routes`, what a warm cache knows of those that were chosen: nothing, or what a request has added later.
    """

    cache: Literal["cold", "warm", "off"] = "cold"
    others: int = 0
    budget: int = 512
    block_size: int = 16
    num_reread: int = 0
    is_starved: bool = False
    is_score: bool = False
    threads: int | None = None
    interval: int | None = None
    checkpoints: int | None = None
    states: Literal["", "hit", "hit shortened", "skipped", "evicted", "lost in a sleep", "lost under way"] = ""
    routes: Literal["", "unknown", "added"] = ""

    @property
    def name(self) -> str:
        """The circumstances that differ from the baseline's."""
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


@dataclass(frozen=True)
class Run:
    """What was seen while `requests` ran together: their outputs, and the engine's counters before and after each
    step.
    """

    requests: Sequence[Request]
    outputs: list[Output]
    history: list[EngineStats]

    @property
    def samples(self) -> list[SampleOutput]:
        return [output for output in self.outputs if isinstance(output, SampleOutput)]

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt, or the most that a score request computes."""
        return max(
            len(r.prompt_token_ids) if isinstance(r, GenerateRequest) else len(r.token_ids) - 1 for r in self.requests
        )

    @property
    def reused(self) -> int:
        """Prompt tokens found in the cache. A request that joined the running computation of its prompt found all of
        them, one that looked them up can never find the last."""
        lengths = {r.id: len(r.prompt_token_ids) for r in self.requests if isinstance(r, GenerateRequest)}
        return sum(s.num_cached_tokens for s in self.samples if s.num_cached_tokens < lengths[s.request_id])

    @property
    def hits(self) -> int:
        """Prompt tokens that were not computed for whatever reason."""
        return self.growth("prefix_hits")

    def growth(self, counter: str) -> int:
        """Of one of the engine's counters."""
        return getattr(self.history[-1], counter) - getattr(self.history[0], counter)

    @property
    def preemptions(self) -> int:
        return self.growth("preemptions")

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(prompt tokens, decoded tokens) computed in each step; decoded ones are as many as samples in the step."""
        prompts = [
            after.computed_prompt_tokens - before.computed_prompt_tokens for before, after in pairwise(self.history)
        ]
        tokens = [after.computed_tokens - before.computed_tokens for before, after in pairwise(self.history)]
        return [(prompt, total - prompt) for prompt, total in zip(prompts, tokens, strict=True)]

    @property
    def together(self) -> int:
        """The most samples that decoded in one step: the decoded tokens, but no more than ran before the step, as a
        preempted sample computes several anew. Score requests do not decode: as many as must have shared a step.
        """
        if not self.samples:
            return -(-len(self.requests) // len(self.steps))
        return max(min(now[1], before.num_running) for now, before in zip(self.steps, self.history, strict=False))

    @property
    def largest_group(self) -> int:
        """The most samples that one request asked for."""
        return max(r.params.n if isinstance(r, GenerateRequest) else 1 for r in self.requests)


@dataclass(frozen=True)
class Premise:
    """A circumstance, the number that was seen for it, and whether that is what the cell claims."""

    name: str
    seen: int
    holds: bool


_STATE_COUNTERS = {
    "hit": "checkpoints_restored",
    "hit shortened": "shortened_hits",
    "skipped": "checkpoints_skipped",
    "evicted": "checkpoints_evicted",
    "lost under way": "recomputed",
}


def check_premises(cell: Cell, runs: Sequence[Run], num_threads: int, cuts: bool = False) -> list[Premise]:
    """All premises of a cell whose `runs` were seen with `num_threads` threads set. `cuts`: chunks are cut at
    checkpoints too.
    """
    preemptions = sum(run.preemptions for run in runs)
    return [
        _finish_premise(runs),
        _reuse_premise(cell, runs),
        _chunk_premise(cell, runs, cuts),
        *_state_premises(cell, runs),
        _company_premise(cell, runs),
        Premise("preempted", preemptions, (preemptions > 0) == cell.is_starved),
        Premise("threads", num_threads, cell.threads in (None, num_threads)),
    ]


@dataclass(frozen=True)
class _Variation:
    """A request's first sample, and that of the request that it varies: the first of the same prompt and seed."""

    params: SamplingParams
    sample: SampleOutput
    varied: SampleOutput

    @property
    def was_ended(self) -> bool:
        """By a token or a string that it asked to be ended by."""
        return self.sample.stop_reason in (*self.params.stop_token_ids, *self.params.stop)

    @property
    def was_delayed(self) -> bool:
        """Whether `min_tokens` kept it from a token that would have ended it."""
        return not {*self.params.stop_token_ids}.isdisjoint(self.varied.token_ids[: self.params.min_tokens])

    @property
    def has_other_logprobs(self) -> bool:
        """Of the same tokens."""
        count = len(self.sample.token_ids)
        ours, theirs = self.sample.logprobs, self.varied.logprobs
        assert ours is not None and theirs is not None
        same_tokens = self.sample.token_ids == self.varied.token_ids[:count]
        return same_tokens and bool((ours != theirs[:count]).any())


def check_variations(runs: Sequence[Run]) -> list[Premise]:
    """Of the baseline, whose `runs` have one request each: that whatever a request asks for showed in its sample."""
    variations = list(_variations(runs))
    delayed = [v for v in variations if v.params.stop_token_ids]
    in_text = [v.was_ended for v in variations if v.params.stop]
    return [
        _showed("ended by a token", [v.was_ended for v in delayed]),
        _showed("held back by min_tokens", [v.was_delayed for v in delayed]),
        _showed("other log-probs", [v.has_other_logprobs for v in variations if not v.params.stop_token_ids]),
        # None asks for it where the model has no tokenizer.
        *([_showed("ended by a string", in_text)] if in_text else []),
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
    """Every sample and score arrived, none of them ended by an error."""
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
    return Premise("reused", reused, (reused > 0) == (cell.cache == "warm"))


def _state_premises(cell: Cell, runs: Sequence[Run]) -> list[Premise]:
    """What became of checkpoints of states."""
    counter = _STATE_COUNTERS.get(cell.states)
    if counter is None:
        return []
    seen = sum(run.growth(counter) for run in runs)
    return [Premise(f"checkpoint {cell.states}", seen, seen > 0)]


def _chunk_premise(cell: Cell, runs: Sequence[Run], cuts: bool) -> Premise:
    """Into how many chunks prompts were cut; exactly as the budget says where one sample runs alone.

    A sample of a group that waits its turn computes the end of its prompt anew, and a warm cache leaves little to cut.
    """
    chunks = [sum(prompt > 0 for prompt, _ in run.steps) for run in runs]
    expected = [-(-run.longest // cell.budget) for run in runs]
    holds = all(prompt + decoded <= cell.budget for run in runs for prompt, decoded in run.steps)
    if not cell.num_reread and cell.cache != "warm":
        exact = [cell.others == 0 and run.largest_group == 1 and not cuts for run in runs]
        holds &= all(
            found == least if is_exact else found >= least
            for found, least, is_exact in zip(chunks, expected, exact, strict=True)
        )
    return Premise("chunks", max(chunks), holds)


def _company_premise(cell: Cell, runs: Sequence[Run]) -> Premise:
    """How many samples, or score requests, shared a step. A starved cell claims only that several requests did."""
    together = [run.together for run in runs]
    if cell.others == 0:
        return Premise("together", max(together), all(run.together <= run.largest_group for run in runs))
    if cell.is_starved or cell.is_score:
        return Premise("together", min(together), all(run.together > run.largest_group for run in runs))
    return Premise("together", min(together), min(together) > cell.others)
