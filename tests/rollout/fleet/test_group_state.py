"""The course of one request, as tables of events: the answers of workers, the next asks to workers, and the replies
delivered to the caller.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_engine import expected_tokens

from trueroll import errors
from trueroll.engine.request import (
    ContentSpan,
    SampleDelta,
    SampleOutput,
    SamplingParams,
    WeightSpan,
    derive_seed,
    seed_of,
)
from trueroll.rollout import protocol
from trueroll.rollout.client.requests import Request
from trueroll.rollout.fleet.asks import Ask
from trueroll.rollout.fleet.group_state import GroupState
from trueroll.rollout.fleet.samples import Reply
from trueroll.rollout.fleet.setbacks import MOST_LOSSES, Setbacks
from trueroll.rollout.protocol import bytes_to_tokens

SEED, LENGTH = 5, 6
PROMPT = np.array([1, 2, 3], "<i4").tobytes()

TABLE: dict[str, str] = {
    "nothing happens": """
        ask               -> a: all
        a sample 0        -> 0 length 6
        a sample 2        -> 2 length 6
        a sample 1        -> 1 length 6
        a done            -> done length=3
        a sample 1        ->
        a over            ->
        abort             ->
    """,
    "a worker is lost before anything was delivered": """
        ask               -> a: all
        a WorkerLostError ->
        a over            ->
        ask               -> b: all
    """,
    "a worker is lost after a sample": """
        ask               -> a: all
        a sample 1        -> 1 length 6
        a WorkerLostError ->
        a over            ->
        ask               -> b: 0 from 0, 2 from 0
        b sample 2        -> 2 length 6
        b done 2          ->
        b sample 0        -> 0 length 6, done length=3
        b done 0          ->
    """,
    "a worker fails, and its reply was not read": """
        ask               -> a: all
        a UnreadError     ->
        a over            ->
        ask               -> b: all
        b WorkerFailedError ->
        b over            ->
        ask               -> c: all
    """,
    "a worker is lost between the last sample and the end": """
        ask               -> a: all
        a sample 0        -> 0 length 6
        a sample 1        -> 1 length 6
        a sample 2        -> 2 length 6
        a WorkerLostError ->
        a over            -> done length=3
    """,
    "a worker that exits cuts samples, which go on from what they have": """
        ask               -> a: all
        a sample 0        -> 0 length 6
        a cut 1 4         ->
        a cut 2 0         ->
        a over            ->
        ask               -> b: 1 from 4, 2 from 0
        b sample 2        -> 2 length 6
        b cut 1 5         ->
        b over            ->
        ask               -> c: 1 from 5
        c sample 1        -> 1 length 6, done length=3
    """,
    "a worker that stays was told by another to abort": """
        ask               -> a: all
        a abort 0 4       -> 0 abort 4
        a sample 1        -> 1 length 6
        a sample 2        -> 2 length 6
        a done            -> done abort=1 length=2
    """,
    "two workers are asked, and the first one is first": """
        ask               -> a: all
        a sample 0        -> 0 length 6
        ask               -> b: 1 from 0, 2 from 0
        b sample 1        -> 1 length 6
        b done 1          ->
        a sample 1        ->
        a sample 2        -> 2 length 6
        a done            -> done length=3
        b sample 2        ->
        b done 2          ->
        b over            ->
    """,
    "two workers are asked, and the second one is first": """
        ask               -> a: all
        ask               -> b: all
        b sample 0        -> 0 length 6
        a sample 0        ->
        b sample 1        -> 1 length 6
        a sample 2        -> 2 length 6, done length=3
        b sample 2        ->
        b done            ->
    """,
    "two workers are asked, and the first one is lost": """
        ask               -> a: all
        a sample 0        -> 0 length 6
        ask               -> b: 1 from 0, 2 from 0
        a WorkerLostError ->
        a over            ->
        b sample 1        -> 1 length 6
        b sample 2        -> 2 length 6, done length=3
    """,
    "a worker refuses the whole, and one refuses a part": """
        ask               -> a: all
        a QueueFullError  ->
        a over            ->
        ask               -> b: all
        b sample 0        -> 0 length 6
        b WorkerLostError ->
        b over            ->
        ask               -> c: 1 from 0, 2 from 0
        c UnavailableError 1 ->
        c sample 2        -> 2 length 6
        c over            ->
        ask               -> d: 1 from 0
    """,
    "an error of the request itself ends it": """
        ask               -> a: all
        a InvalidRequestError -> InvalidRequestError
        a over            ->
        a sample 0        ->
    """,
    "the caller aborts a sample, and then all": """
        ask               -> a: all
        abort 1           -> ends 1
        a abort 1 3       -> 1 abort 3
        abort 1           ->
        abort 3           ->
        abort             -> ends 0 2
        a abort 0 2       -> 0 abort 2
        a abort 2 0       -> 2 abort 0
        a done            -> done abort=3
    """,
    "a sample that was aborted is not asked for twice": """
        ask               -> a: all
        abort 1           -> ends 1
        ask               -> b: 0 from 0, 2 from 0
        b sample 0        -> 0 length 6
        a abort 1 3       -> 1 abort 3
        b sample 2        -> 2 length 6, done length=2 abort=1
    """,
    "the caller aborts while no worker is asked": """
        ask               -> a: all
        a sample 0        -> 0 length 6
        a cut 1 4         ->
        a over            ->
        abort 1           -> 1 abort 4, ends 1
        ask               -> b: 2 from 0
        b WorkerLostError ->
        abort             -> ends 2
        b over            -> 2 abort 0, done length=1 abort=2
    """,
    "a sample that was aborted is not asked for again": """
        ask               -> a: all
        abort 1           -> ends 1
        a WorkerLostError ->
        a over            -> 1 abort 0
        ask               -> b: 0 from 0, 2 from 0
    """,
    "a worker that exits ends what the caller aborted": """
        ask               -> a: all
        abort 1           -> ends 1
        a cut 1 4         -> 1 abort 4
        a cut 2 4         ->
        a over            ->
        ask               -> b: 0 from 0, 2 from 4
    """,
    "a push would mix versions": """
        ask               -> a: all
        a sample 0 v1     -> 0 length 6
        ask               -> b: 1 from 0, 2 from 0
        a sample 1 v2     ->
        a done            ->
        b sample 1 v1     ->
        a over            ->
        b over            ->
        ask               -> c: all
        c sample 0 v2     -> 0 length 6
    """,
    "a push would mix the versions of the parts of a sample": """
        ask               -> a: all
        a cut 0 3 v1      ->
        a over            ->
        ask               -> b: 0 from 3, 1 from 0, 2 from 0
        b sample 0 v2     ->
        b over            ->
        ask               -> c: all
    """,
}

SCORES: dict[str, str] = {
    "nothing happens": """
        ask               -> a: all
        a scores stop     -> scores stop
        a scores stop     ->
    """,
    "two workers are asked": """
        ask               -> a: all
        ask               -> b: all
        b scores stop     -> scores stop
        a WorkerLostError ->
    """,
    "a worker that exits ends them": """
        ask               -> a: all
        a exits           ->
        a scores abort    ->
        a over            ->
        ask               -> b: all
        b scores stop     -> scores stop
    """,
    "a worker that stays ends them": """
        ask               -> a: all
        a scores abort    -> scores abort
    """,
    "the caller aborts": """
        ask               -> a: all
        abort             -> ends 0
        a exits           ->
        a scores abort    -> scores abort
    """,
    "the caller aborts while no worker is asked": """
        abort             -> scores abort, ends 0
    """,
}

ONCE: dict[str, str] = {
    "a push mixes what was delivered": """
        ask               -> a: all
        a sample 0 v1     -> 0 length 6
        a sample 1 v2     -> StaleWeightsError
    """,
    "a push mixes what was not delivered": """
        ask               -> a: all
        a cut 0 3 v1      ->
        a over            ->
        ask               -> b: 0 from 3, 1 from 0, 2 from 0
        b sample 0 v2     ->
        b over            ->
        ask               -> c: all
    """,
}

PIECES: dict[str, str] = {
    "nothing happens": """
        ask               -> a: all
        a piece 0 0-2     -> 0 piece 0-2
        a piece 1 0-1     -> 1 piece 0-1
        a piece 0 2-6     -> 0 piece 2-6
        a sample 0        -> 0 length 6
        a piece 0 2-6     ->
        a sample 1        -> 1 piece 0-6, 1 length 6
    """,
    "a worker has a sample without a piece of it": """
        ask               -> a: all
        a sample 0        -> 0 piece 0-6, 0 length 6
    """,
    "two workers are asked: pieces of the first one are shown": """
        ask               -> a: all
        a piece 0 0-2     -> 0 piece 0-2
        ask               -> b: all
        b piece 0 0-3     ->
        a piece 0 2-4     -> 0 piece 2-4
        b sample 0        -> 0 piece 0-6, 0 length 6
        a piece 0 4-6     ->
        a piece 1 0-6     -> 1 piece 0-6
        b sample 1        -> 1 piece 0-6, 1 length 6
    """,
    "the first of two workers is lost: the next piece does not go on from its own": """
        ask               -> a: all
        a piece 0 0-2     -> 0 piece 0-2
        ask               -> b: all
        b piece 0 0-2     ->
        a WorkerLostError ->
        a over            ->
        b piece 0 2-4     ->
        b piece 1 0-2     -> 1 piece 0-2
        b sample 0        -> 0 piece 0-6, 0 length 6
    """,
    "a worker that begins anew is shown anew": """
        ask               -> a: all
        a piece 0 0-4     -> 0 piece 0-4
        a piece 0 0-2     -> 0 piece 0-2
    """,
    "a cut sample goes on": """
        ask               -> a: all
        a piece 0 0-2     -> 0 piece 0-2
        a cut 0 2         ->
        a cut 1 3         -> 1 piece 0-3
        a over            ->
        ask               -> b: 0 from 2, 1 from 3, 2 from 0
        b piece 1 3-5     -> 1 piece 3-5
        b piece 0 2-6     -> 0 piece 2-6
        b sample 0        -> 0 length 6
        b sample 1        -> 1 piece 0-6, 1 length 6
    """,
    "a cut sample without shown pieces is shown whole": """
        ask               -> a: all
        ask               -> b: all
        b cut 0 3         ->
        b over            ->
        a over            ->
        ask               -> c: 0 from 3, 1 from 0, 2 from 0
        c piece 0 3-5     ->
        c sample 0        -> 0 piece 0-6, 0 length 6
    """,
    "a sample that has no token has no piece": """
        ask               -> a: all
        a cut 0 0         ->
        a over            ->
        abort 0           -> 0 abort 0, ends 0
    """,
}


class Play:
    """A request and the events of its course. Asks have letters as names, in the order in which they are made."""

    def __init__(self, request: Request, *, may_repeat: bool = True, max_staleness: int = 0) -> None:
        self.state = GroupState(request, may_repeat=may_repeat, max_staleness=max_staleness)
        self.asks: dict[str, Ask] = {}

    def run(self, course: str) -> None:
        """Play the events of a course. Each line has an event, and the expected ask or replies."""
        for line in filter(None, map(str.strip, course.splitlines())):
            event, expected = map(str.strip, line.split("->"))
            assert self._happen(*event.split()) == expected, line

    def _happen(self, subject: str, *words: str) -> str:
        if subject == "ask":
            return self._ask()
        if subject == "abort":
            ending = self.state.abort(int(words[0]) if words else None)
            told = [*map(described, self.state.settle()), f"ends {' '.join(map(str, sorted(ending)))}" * bool(ending)]
            return ", ".join(filter(None, told))
        ask, (what, *rest) = self.asks[subject], words
        if what == "over":
            self.state.end_ask(ask, subject, 1)
            return ", ".join(map(described, self.state.settle()))
        if what == "exits":
            ask.is_lost = True
            return ""
        if what == "scores":
            return ", ".join(map(described, self.state.take(ask, None, scores(*rest))))
        index = int(rest[0]) if rest else 0
        reply = self._reply(ask, what, index, rest[1:])
        if what == "cut":
            ask.is_lost = ask.is_lost or self.state.is_cut(index, reply)
        return ", ".join(map(described, self.state.take(ask, None if None in ask.messages else index, reply)))

    def _ask(self) -> str:
        name, ask = "abcdefgh"[len(self.asks)], self.state.ask()
        self.asks[name] = ask
        return f"{name}: " + ", ".join(self._describe(index, message) for index, message in ask.messages.items())

    def _describe(self, index: int | None, message: Any) -> str:
        if index is None:
            assert message == self.state.request.model_copy(update=dict(caller=message.caller))
            return "all"
        prior = bytes_to_tokens(message.prompt_token_ids).tolist()[3:]
        assert message.id != "r" and message.params.n == 1
        assert derive_seed(message.params.seed, 0) == derive_seed(SEED, index), "another noise"
        assert prior == tokens(index, 0, len(prior)) and message.params.max_tokens == LENGTH - len(prior)
        assert message.num_prior_tokens == len(prior)
        return f"{index} from {len(prior)}"

    def _reply(self, ask: Ask, what: str, index: int, rest: list[str]) -> Reply:
        if what.endswith("Error"):
            return getattr(errors, what)("it says why")
        if what == "piece":
            start, end = map(int, rest[0].split("-"))
            own = tokens(index, start, end)
            offset = self._num_prior(ask, index)
            return SampleDelta("?", self._told(ask, index), start - offset, own, np.zeros(len(own), np.float32))
        if what == "done":
            message: Any = ask.messages.get(None) or ask.messages[index]
            reasons: dict[Any, int] = {"stop": message.params.n}  # different from an end that `GroupState` makes itself
            return protocol.Done(id=message.id, params=message.params, num_prompt_tokens=3, finish_reasons=reasons)
        if what == "sample":
            return self._sample(ask, index, "length", str(LENGTH), *rest)
        return self._sample(ask, index, "abort", *rest)

    def _sample(self, ask: Ask, index: int, reason: Any, end: str, version: str = "v0") -> protocol.FinishedSample:
        """Return a worker's sample, without its prior part."""
        own = tokens(index, self._num_prior(ask, index), int(end))
        spans = (WeightSpan(int(version[1:]), 0, len(own)),) if own else ()
        logprobs, seed = np.zeros(len(own), np.float32), derive_seed(SEED, index)
        output = SampleOutput("?", self._told(ask, index), own, logprobs, reason, seed, 0, spans)
        return protocol.sample_message("?", output)

    def _num_prior(self, ask: Ask, index: int) -> int:
        return len(ask.prior[index].token_ids) if index in ask.prior else 0

    def _told(self, ask: Ask, index: int) -> int:
        """Return the index of a sample within the worker's request. A sample that is requested alone has index 0."""
        return index if None in ask.messages else 0


def group(**settings: Any) -> protocol.Generate:
    params = SamplingParams(n=3, seed=SEED, max_tokens=LENGTH)
    return protocol.Generate(id="r", prompt_token_ids=PROMPT, params=params, **settings)


def scores(reason: Any) -> protocol.Scores:
    return protocol.Scores(id="r", logprobs=bytes(8), finish_reason=reason, weight_versions=())


def tokens(index: int, start: int, end: int) -> list[int]:
    return expected_tokens(SEED, index, LENGTH)[start:end]


def described(reply: Reply) -> str:
    """Describe a delivered reply, and check that its tokens are the tokens that a single worker would give."""
    if isinstance(reply, errors.TruerollError):
        return type(reply).__name__
    if isinstance(reply, SampleDelta):
        end = reply.start + len(reply.token_ids)
        assert reply.request_id == "r" and reply.token_ids == tokens(reply.index, reply.start, end)
        return f"{reply.index} piece {reply.start}-{end}"
    if isinstance(reply, protocol.FinishedSample):
        own = bytes_to_tokens(reply.token_ids).tolist()
        assert reply.id == "r" and own == tokens(reply.index, 0, len(own))
        assert len(reply.logprobs or b"") == 4 * len(own) and reply.seed == derive_seed(SEED, reply.index)
        return f"{reply.index} {reply.finish_reason} {len(own)}"
    if isinstance(reply, protocol.Scores):
        return f"scores {reply.finish_reason}"
    assert isinstance(reply, protocol.Done) and reply.id == "r" and reply.params.seed == SEED
    return "done " + " ".join(f"{reason}={count}" for reason, count in reply.finish_reasons.items())


@pytest.mark.parametrize("name", TABLE)
def test_course_of_a_group(name: str) -> None:
    Play(group()).run(TABLE[name])


@pytest.mark.parametrize("name", SCORES)
def test_course_of_scores(name: str) -> None:
    Play(protocol.GetScores(id="r", token_ids=PROMPT)).run(SCORES[name])


@pytest.mark.parametrize("name", ONCE)
def test_samples_of_a_stream_are_not_delivered_again(name: str) -> None:
    Play(group(), may_repeat=False).run(ONCE[name])


@pytest.mark.parametrize("name", PIECES)
def test_which_pieces_are_shown(name: str) -> None:
    Play(group(deltas=True), may_repeat=False).run(PIECES[name])


def test_versions_may_differ_by_max_staleness() -> None:
    play = Play(group(), may_repeat=False, max_staleness=1)
    play.run("""
        ask               -> a: all
        a sample 0 v2     -> 0 length 6
        a sample 1 v1     -> 1 length 6
        a sample 2 v3     -> StaleWeightsError
    """)


def test_one_version_leaves_no_staleness() -> None:
    params = SamplingParams(n=3, seed=SEED, max_tokens=LENGTH, one_version=True)
    play = Play(group().model_copy(update=dict(params=params)), may_repeat=False, max_staleness=1)
    play.run("""
        ask               -> a: all
        a sample 0 v2     -> 0 length 6
        a sample 1 v1     -> StaleWeightsError
    """)


def test_a_request_lost_with_too_many_workers_fails() -> None:
    play = Play(group())
    for name in "abcdef"[:MOST_LOSSES]:
        play.run(f"ask -> {name}: all \n {name} WorkerLostError -> \n {name} over ->")
    play.run("ask -> f: all \n f WorkerLostError -> \n f over -> WorkerLostError")


def test_repeated_asks_have_the_same_content() -> None:
    spans = (ContentSpan(1, 3, bytes(32)),)
    play = Play(group().model_copy(update=dict(spans=spans)))
    play.run("ask -> a: all \n a cut 0 3 -> \n a over ->")
    asked = play.state.ask().messages
    assert len(asked) == 3 and all(message.spans == spans for message in asked.values())


def test_without_a_seed_the_id_and_the_prompt_give_one() -> None:
    request = group().model_copy(update=dict(params=SamplingParams(n=2, max_tokens=LENGTH)))
    state = GroupState(request, may_repeat=True, max_staleness=0)
    state.abort(0)
    (sample,) = state.settle()
    missing: Any = state.ask().messages[1]
    seed = seed_of("r", PROMPT)
    assert isinstance(sample, protocol.FinishedSample) and sample.seed == derive_seed(seed, 0)
    assert derive_seed(missing.params.seed, 0) == derive_seed(seed, 1)


def test_without_a_seed_the_images_matter_too() -> None:
    seeds = []
    for content_hash in (bytes(32), b"1" * 32):
        ref = protocol.ImageRef(start=0, rows=2, columns=2, content_hash=content_hash)
        request = group().model_copy(update=dict(params=SamplingParams(n=2, max_tokens=LENGTH), images=(ref,)))
        state = GroupState(request, may_repeat=True, max_staleness=0)
        state.abort(0)
        state.settle()
        missing: Any = state.ask().messages[1]
        assert missing.images == (ref,)
        seeds.append(derive_seed(missing.params.seed, 0))
    assert seeds == [derive_seed(seed_of("r", PROMPT + each), 1) for each in (bytes(32), b"1" * 32)]
    assert seeds[0] != seeds[1]


def test_targets_of_an_abort() -> None:
    play = Play(group())
    play.run("ask -> a: all \n a sample 0 -> 0 length 6 \n ask -> b: 1 from 0, 2 from 0")
    whole, missing = play.asks["a"], play.asks["b"]
    assert whole.targets({0, 1, 2}, 3) == [("r", None)] and whole.targets({2, 1}, 3) == [("r", 1), ("r", 2)]
    assert missing.targets({0, 2}, 3) == [(missing.messages[2].id, None)]


FULL, STALE = errors.QueueFullError("full"), errors.StaleWeightsError("old")
HELD = errors.UnavailableError("held")


@pytest.mark.parametrize(
    ("refusals", "looks", "avoided", "late", "final"),
    [
        ([], dict(a=1, b=1), "", "", None),
        ([("a", FULL)], dict(a=1, b=1), "a", "a", None),
        ([("a", FULL)], dict(a=2, b=1), "", "", None),  # the worker had a health check in the meantime
        ([("a", FULL)], dict(b=1), "", "", None),  # the worker is not eligible
        ([("a", FULL), ("b", STALE)], dict(a=1, b=1), "ab", "ab", FULL),
        ([("a", FULL), ("b", STALE)], dict(a=2, b=1), "b", "b", None),
        ([("a", FULL), ("b", STALE)], dict(b=1), "b", "b", STALE),
        ([("a", HELD)], dict(a=1, b=1), "", "a", None),
        ([("a", HELD), ("b", FULL)], dict(a=1, b=1), "b", "ab", None),
        ([("a", FULL), ("b", None)], dict(a=1, b=1), "", "", None),  # a worker accepted the request
        ([("a", HELD), ("b", None)], dict(a=1, b=1), "", "", None),
    ],
)
def test_refusing_workers_are_avoided_and_a_request_fails_if_all_refuse(
    refusals: list[tuple[str, errors.TruerollError | None]],
    looks: dict[str, int],
    avoided: str,
    late: str,
    final: errors.TruerollError | None,
) -> None:
    setbacks = Setbacks()
    for worker, refusal in refusals:
        setbacks.note(worker, 1, refusal)
    assert setbacks.avoided(looks, False) == {*avoided} and setbacks.avoided(looks, True) == {*late}
    assert setbacks.final(looks) is final
    setbacks.num_losses = 1  # only a request that was never accepted gets backpressure
    assert setbacks.final(looks) is (None if final is FULL else final)
