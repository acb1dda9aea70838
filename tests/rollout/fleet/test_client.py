"""The clients of a fleet: each sample arrives once, with the same tokens, whatever happens to the workers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import PLACEHOLDER, FakeEngine, FakeInfo, expected_tokens
from serving import WorkerOnThread, fake_process, serving, stop_after_a_step

from trueroll.engine.request import GenerateRequest, Output, ScoreRequest
from trueroll.errors import (
    ConfigError,
    InvalidRequestError,
    QueueFullError,
    RequestAbortedError,
    StaleWeightsError,
    UnavailableError,
    UnknownRequestError,
    WorkerLostError,
)
from trueroll.rollout import (
    AsyncFleetClient,
    FleetClient,
    Group,
    RolloutClient,
    SampleDelta,
    SampleOutput,
    SamplingParams,
    WorkerProcess,
)
from trueroll.rollout.client.membership import Member, write_members
from trueroll.rollout.fleet.asks import Ask
from trueroll.rollout.fleet.group_state import GroupState
from trueroll.rollout.fleet.samples import Reply

from ..test_deltas import Steps
from ..worker.test_images import image

PARAMS = SamplingParams(n=3, max_tokens=6)
FIVE = PARAMS.model_copy(update=dict(seed=5))


@dataclass
class Running:
    """Workers on threads, each with its own engine."""

    engines: list[FakeEngine]
    workers: list[WorkerOnThread]

    @property
    def addresses(self) -> list[str]:
        return [worker.address for worker in self.workers]

    def asked(self) -> list[int]:
        """Return the number of requests that each engine has received."""
        return [len(engine.requests) for engine in self.engines]


@contextmanager
def running_with(*engines: FakeEngine, **settings: Any) -> Iterator[Running]:
    with ExitStack() as stack:
        yield Running([*engines], [stack.enter_context(serving(engine, **settings)) for engine in engines])


@pytest.fixture
def running() -> Iterator[Running]:
    with running_with(FakeEngine(), FakeEngine()) as running:
        yield running


def engine_of(version: int) -> FakeEngine:
    engine = FakeEngine()
    engine.weight_version = version
    return engine


@pytest.fixture
def client(running: Running) -> Iterator[FleetClient]:
    with (client := FleetClient(running.addresses)):
        yield client


@pytest.fixture
def processes() -> Iterator[list[WorkerProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(fake_process()) for _ in range(2)]


class Members:
    """A membership that a test changes."""

    def __init__(self, *addresses: str) -> None:
        self.now = [Member(f"worker-{i}", address) for i, address in enumerate(addresses)]

    def members(self) -> list[Member]:
        return self.now


def assert_whole(groups: list[Group], params: SamplingParams, seeds: list[int]) -> None:
    """Check that each sample is present once, in order, with the tokens that follow from the seed."""
    for group, seed in zip(groups, seeds, strict=True):
        assert [sample.index for sample in group.samples] == list(range(params.n))
        for sample in group.samples:
            assert params.max_tokens is not None and sample.logprobs is not None
            assert sample.token_ids == expected_tokens(seed, sample.index, params.max_tokens - sample.index)
            assert len(sample.logprobs) == len(sample.token_ids) and sample.request_id == group.id


def seeded(count: int) -> tuple[list[SamplingParams], list[int]]:
    seeds = list(range(100, 100 + count))
    return [PARAMS.model_copy(update=dict(seed=seed)) for seed in seeds], seeds


def nums_of(engine: FakeEngine) -> list[int]:
    """Return the number of samples of each request that the engine received. For a score request, the number is 0."""
    return [request.params.n if isinstance(request, GenerateRequest) else 0 for request in engine.requests]


def in_background(action: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    """Run `action` on a thread.

    Return the thread, and a list to which the thread appends the result or the exception.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(action())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def stop_after_a_sample(engine: FakeEngine) -> None:
    """Make the engine stop after it has finished one sample."""
    step = engine.step

    def step_once() -> list[Output]:
        outputs = step()
        if outputs:
            engine.flow.clear()
        return outputs

    engine.step = step_once


def grown(events: list[tuple[int, SampleDelta | SampleOutput]]) -> list[int]:
    """Join the pieces of one sample and return the tokens. Check that each piece begins at 0 or at the end of the
    previous piece.
    """
    tokens: list[int] = []
    for _, event in events:
        if isinstance(event, SampleDelta):
            assert event.start in (0, len(tokens))
            tokens[event.start :] = event.token_ids
        else:
            assert event.token_ids == tokens
    return tokens


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_groups_are_spread_and_stay_together(running: Running, client: FleetClient) -> None:
    params, seeds = seeded(8)
    groups = client.generate([[i, 2, 3] for i in range(8)], params)
    assert_whole(groups, PARAMS, seeds)
    assert min(running.asked()) > 0 and sum(running.asked()) == 8
    assert groups[0].num_prompt_tokens == 3 and groups[0].params == params[0]


def test_calls_give_the_results_of_one_worker(running: Running, client: FleetClient) -> None:
    one = client.generate([[1, 2, 3]], PARAMS, seed=7, request_ids=["mine"])[0]
    streamed = {sample.index: sample for _, sample in client.stream([[1, 2, 3]], PARAMS, seed=7)}
    assert [streamed[i].token_ids for i in range(3)] == [sample.token_ids for sample in one.samples]
    pieces = [item for _, item in client.stream([[1, 2, 3]], PARAMS, seed=7, deltas=True)]
    grown = {
        i: [t for p in pieces if isinstance(p, SampleDelta) and p.index == i for t in p.token_ids] for i in range(3)
    }
    assert grown == {i: sample.token_ids for i, sample in enumerate(one.samples)}
    (score,) = client.score([[1, 2, 4]], temperature=2.0, return_sampling_mask=True)
    scored = [each for engine in running.engines for each in engine.requests if isinstance(each, ScoreRequest)]
    assert [each.return_sampling_mask for each in scored] == [True]
    assert np.array_equal(score.logprobs, np.array([-1, -2], np.float32))
    short = client.generate([[1, 2, 3]], PARAMS.model_copy(update=dict(n=1, max_tokens=2)), seed=7)[0].samples[0]
    (whole,) = client.continue_samples([[1, 2, 3]], [short], PARAMS)
    assert len(whole.token_ids) == 6
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: .*found 0"):
        client.generate([[1], []], PARAMS, seed=1)
    with pytest.raises(InvalidRequestError, match="'a' is given twice"):
        client.generate([[1], [2]], PARAMS, seed=1, request_ids=["a", "a"])


def test_lifecycle_calls_and_reports_cover_all_workers(running: Running, client: FleetClient) -> None:
    assert client.pause().state == "paused" and {health.state for health in client.healths().values()} == {"paused"}
    assert client.resume().state == "ready"
    assert client.sleep().state == "asleep" and client.health().sleeping == ("weights", "kv_cache")
    assert client.wake_up().state == "ready" and client.drain().state == "paused"
    assert client.resume().state == "ready" and client.invalidate_prefix_cache().state == "ready"
    client.generate([[i] for i in range(6)], PARAMS, seed=1)
    each = client.all_stats()
    assert {*each} == {*running.addresses} and min(stats.service["accepted"] for stats in each.values()) > 0
    assert client.stats().service["accepted"] == 6 and client.stats().engine["samples_finished"] == {"length": 18}
    assert client.health().weight_version == 3 and client.health().memory["kv_cache"] == 4000


def test_requests_of_a_lost_worker_go_to_another(processes: list[WorkerProcess]) -> None:
    members = Members(*(process.address for process in processes))
    params, seeds = seeded(8)
    slow = [each.model_copy(update=dict(max_tokens=300)) for each in params]
    with (client := FleetClient(members)):
        expected = client.generate([[i, 904] for i in range(8)], params)
        assert_whole(expected, PARAMS, seeds)
        thread, found = in_background(lambda: client.generate([[i] for i in range(8)], slow))
        wait_until(lambda: all(stats.service["accepted"] > 4 for stats in client.all_stats().values()))
        processes[0].kill()
        members.now = members.now[1:]
        thread.join()
        assert isinstance(found[0], list), found
        assert_whole(found[0], slow[0], seeds)


def test_a_lost_worker_is_noticed_without_being_told(processes: list[WorkerProcess]) -> None:
    params, seeds = seeded(6)
    slow = [each.model_copy(update=dict(max_tokens=300)) for each in params]
    with (client := FleetClient([process.address for process in processes], timeout=1.0)):
        thread, found = in_background(lambda: client.generate([[i] for i in range(6)], slow))
        wait_until(lambda: all(stats.service["accepted"] > 1 for stats in client.all_stats().values()))
        processes[1].kill()
        thread.join()
        assert isinstance(found[0], list), found
        assert_whole(found[0], slow[0], seeds)


def test_only_the_missing_samples_of_a_group_are_asked_for_again(running: Running) -> None:
    members = Members(*running.addresses)
    for engine in running.engines:
        stop_after_a_sample(engine)
    with FleetClient(members, patience=20.0) as client:
        stream = client.stream([[1, 2, 3]], SamplingParams(n=3, max_tokens=3, seed=5))
        first = next(stream)[1]
        had = running.asked().index(1)
        thread, found = in_background(lambda: [first, *(sample for _, sample in stream)])
        members.now = [member for member in members.now if member.address != running.addresses[had]]
        other = running.engines[1 - had]
        wait_until(lambda: other.stats().samples_finished != {})
        other.flow.set()
        thread.join()
        assert first.index == 2 and sorted(sample.index for sample in found[0]) == [0, 1, 2]
        for sample in found[0]:  # a length depends on the index in the engine, which is 0 for missing samples
            assert sample.token_ids == expected_tokens(5, sample.index, 1 if sample.index == 2 else 3)
        assert nums_of(other) == [1, 1], "one request for each missing sample"


def test_samples_cut_by_an_exiting_worker_go_on_elsewhere(running: Running) -> None:
    with FleetClient(running.addresses) as client:
        for engine in running.engines:
            engine.flow.clear()
        thread, found = in_background(lambda: client.generate([[1, 2, 3]], PARAMS, seed=5))
        wait_until(lambda: sum(running.asked()) == 1)
        had = running.asked().index(1)
        running.workers[had].worker.drain()
        running.workers[had].worker.drain()
        running.engines[1 - had].flow.set()
        thread.join()
        assert isinstance(found[0], list), found
        for sample in found[0][0].samples:  # a length depends on the index in the engine, which is 0 here
            assert sample.token_ids == expected_tokens(found[0][0].params.seed, sample.index, 6)


def hashes_of(engine: FakeEngine) -> list[list[bytes]]:
    """Return the content hashes of the images of each request that an engine has received."""
    assert all(isinstance(request, GenerateRequest) for request in engine.requests)
    return [[each.content_hash for each in request.images] for request in engine.requests]


def test_another_worker_gets_the_images_of_missing_samples(running: Running) -> None:
    members, given = Members(*running.addresses), image(1, start=1)
    for engine in running.engines:
        stop_after_a_sample(engine)
    with FleetClient(members, patience=20.0) as client:
        stream = client.stream(
            [[1, PLACEHOLDER, PLACEHOLDER]], SamplingParams(n=3, max_tokens=3, seed=5), media=[[given]]
        )
        first = next(stream)[1]
        had = running.asked().index(1)
        thread, found = in_background(lambda: [first, *(sample for _, sample in stream)])
        members.now = [member for member in members.now if member.address != running.addresses[had]]
        other = running.engines[1 - had]
        wait_until(lambda: other.stats().samples_finished != {})
        other.flow.set()
        thread.join()
    assert sorted(sample.index for sample in found[0]) == [0, 1, 2]
    assert hashes_of(running.engines[had]) == [[given.content_hash]]
    assert hashes_of(other) == [[given.content_hash]] * 2, "one request for each missing sample"


def test_another_worker_gets_the_images_of_cut_samples(running: Running) -> None:
    given = image(1, start=1)
    with FleetClient(running.addresses) as client:
        for engine in running.engines:
            engine.flow.clear()
        call = dict(prompts=[[1, PLACEHOLDER, PLACEHOLDER]], params=FIVE, media=[[given]])
        thread, found = in_background(lambda: client.generate(**call))  # type: ignore[arg-type]
        wait_until(lambda: sum(running.asked()) == 1)
        had = running.asked().index(1)
        stop_after_a_step(running.engines[had])
        running.engines[had].flow.set()
        wait_until(lambda: not running.engines[had].flow.is_set())
        running.workers[had].worker.drain()
        running.workers[had].worker.drain()
        running.engines[1 - had].flow.set()
        thread.join()
    other = running.engines[1 - had]
    assert hashes_of(other) == [[given.content_hash]] * 3
    priors = [request.num_prior_tokens for request in other.requests if isinstance(request, GenerateRequest)]
    assert len(priors) == 3 and all(priors), "each sample is continued"
    assert found[0][0].images == (given,) and len(found[0][0].samples) == 3


def test_groups_are_placed_by_their_images_too(running: Running, client: FleetClient) -> None:
    prompt = [1, PLACEHOLDER, PLACEHOLDER]
    for _ in range(2):
        for seed in range(8):
            client.generate([prompt], PARAMS, media=[[image(seed, start=1)]])
    found = [{hash for [hash] in hashes_of(engine)} for engine in running.engines]
    assert found[0] and found[1] and sum(running.asked()) == 16, "equal placeholders, but other images"
    assert not found[0] & found[1], "the same image twice is placed on the same worker"


def test_an_abort_ends_the_named_samples(running: Running, client: FleetClient) -> None:
    for engine in running.engines:
        engine.flow.clear()
    thread, found = in_background(lambda: client.generate([[1], [2]], PARAMS, seed=1, request_ids=["a", "b"]))
    wait_until(lambda: sum(running.asked()) == 2)
    assert client.abort("a", 1) == 1
    for index in (1, 3):
        with pytest.raises(UnknownRequestError, match=f"sample {index} of request 'a' is not running"):
            client.abort("a", index)
    with pytest.raises(InvalidRequestError, match="index: .*got -1"):
        client.abort("a", -1)
    assert client.abort("a") == 2 and client.abort_all() == 3
    thread.join()
    assert [[sample.finish_reason for sample in group.samples] for group in found[0]] == [["abort"] * 3] * 2
    with pytest.raises(UnknownRequestError, match="request 'a' is not running on any worker"):
        client.abort("a")
    assert client.abort("a", missing_ok=True) == 0


def test_requests_that_wait_for_a_worker_can_be_aborted() -> None:
    members = Members()
    with (client := FleetClient(members)):
        thread, found = in_background(lambda: client.generate([[1]], PARAMS, seed=1, request_ids=["a"]))
        wait_until(lambda: "a" in client._fleet._requests.ids)
        assert client.abort("a") == 3
        thread.join()
        assert [sample.finish_reason for sample in found[0][0].samples] == ["abort"] * 3
        scoring, scored = in_background(lambda: client.score([[1, 2]]))
        wait_until(lambda: bool(client._fleet._requests.ids))
        assert client.abort_all() == 1
        scoring.join()
        assert isinstance(scored[0], RequestAbortedError)


def test_without_a_worker_a_request_waits_for_one(running: Running) -> None:
    members = Members()
    with FleetClient(members, patience=0.2) as client, pytest.raises(WorkerLostError, match="within 0.2 s: no member"):
        client.generate([[1]], PARAMS, seed=1)
    with (client := FleetClient(members)):
        thread, found = in_background(lambda: client.generate([[1]], PARAMS, seed=1))
        wait_until(lambda: bool(client._fleet._requests.ids))
        members.now = Members(*running.addresses).now
        thread.join()
        assert isinstance(found[0], list)


def test_requests_that_paused_workers_reject_wait() -> None:
    with running_with(FakeEngine(), FakeEngine(), while_unavailable="reject") as running:
        with (client := FleetClient(running.addresses)), FleetClient(running.addresses) as holding:
            params, seeds = seeded(4)
            client.generate([[i] for i in range(4)], params)
            holding.pause()  # as a push would do; the other client does not know of the change yet
            thread, found = in_background(lambda: client.generate([[i] for i in range(4)], params))
            wait_until(lambda: all(link.is_refusing for link in client._fleet._pool.links))
            wait_until(lambda: client._fleet._pool.dispatch.looks == {})
            assert found == [] and sum(running.asked()) == 4
            holding.resume()
            thread.join()
            assert isinstance(found[0], list), found
            assert_whole(found[0], PARAMS, seeds)


def test_requests_that_all_workers_reject_fail_after_patience() -> None:
    with running_with(FakeEngine(), while_unavailable="reject") as running:
        with FleetClient(running.addresses, patience=0.3) as client, FleetClient(running.addresses) as holding:
            client.health()
            holding.pause()
            with pytest.raises(WorkerLostError, match="paused, version 3, refuses requests"):
                client.generate([[1]], PARAMS, seed=1)
            refusing = UnavailableError("worker: the system refused what it needs")
            for worker in running.workers:  # although the worker's last health report allows requests
                worker.worker._book._open = _raising(refusing)  # type: ignore[method-assign]
            holding.resume()
            with pytest.raises(WorkerLostError, match=r"\(ready, version 3"):
                client.generate([[1]], PARAMS, seed=1)


def test_a_bug_in_the_client_ends_the_request_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: object) -> None:
        raise ValueError("nobody expects this")

    with running_with(FakeEngine()) as running, (client := FleetClient(running.addresses)):
        client.health()
        monkeypatch.setattr(client._fleet._pool, "place", fail)
        with pytest.raises(WorkerLostError, match="internal error in the client: ValueError: nobody expects this"):
            client.generate([[1]], PARAMS, seed=1)


def _raising(error: Exception) -> Callable[[object, object], None]:
    def refuse(user: object, message: object) -> None:
        raise error

    return refuse


@contextmanager
def full_of(running: Running, index: int) -> Iterator[threading.Event]:
    """Keep a worker's queue full until the event is set."""
    emptied = threading.Event()
    running.engines[index].flow.clear()
    with RolloutClient(running.addresses[index]) as occupying:
        thread, _ = in_background(lambda: occupying.generate([[1, 904]], PARAMS, seed=1))
        wait_until(lambda: occupying.health().requests["running"] > 0)

        def release() -> None:
            emptied.wait()
            occupying.abort_all()

        releasing, _ = in_background(release)
        yield emptied
        emptied.set()
        releasing.join()
        thread.join()


def test_a_worker_that_was_full_is_asked_again_once_it_has_room() -> None:
    with running_with(FakeEngine(), FakeEngine(), max_queued_requests=1) as running:
        members = Members(*running.addresses)
        with (client := FleetClient(members, patience=60.0)):
            client.generate([[7]], FIVE)
            full = running.asked().index(1)
            running.engines[1 - full].flow.clear()
            with full_of(running, full) as emptied:
                thread, found = in_background(lambda: client.generate([[7]], FIVE))
                wait_until(lambda: running.asked()[1 - full] == 1)
                (request,) = client._fleet._requests._requests.values()
                assert isinstance(request._state.setbacks.first_refusal, QueueFullError), "the premise"
                emptied.set()
                wait_until(lambda: client.healths()[f"worker-{full}"].requests["open"] == 0)
            running.engines[full].flow.set()
            members.now = [members.now[full]]
            thread.join()
            assert isinstance(found[0], list), found
            assert_whole(found[0], PARAMS, [5])


def test_a_request_that_was_lost_waits_for_room_at_a_full_worker() -> None:
    with running_with(FakeEngine(), FakeEngine(), max_queued_requests=1) as running:
        members = Members(*running.addresses)
        with (client := FleetClient(members, patience=60.0)):
            running.engines[0].flow.clear()
            running.engines[1].flow.clear()
            thread, found = in_background(lambda: client.generate([[7]], FIVE))
            wait_until(lambda: sum(running.asked()) == 1)
            full = running.asked().index(0)
            with full_of(running, full) as emptied:
                with pytest.raises(QueueFullError):
                    client.generate([[8]], FIVE)  # no worker accepted it, so the caller gets the error
                (request,) = client._fleet._requests._requests.values()
                members.now = [members.now[full]]
                wait_until(lambda: request._state.setbacks.num_losses == 1)
                wait_until(lambda: request._state.setbacks.first_refusal is not None)
                assert found == []
                emptied.set()
                running.engines[full].flow.set()
                thread.join()
            assert isinstance(found[0], list), found
            assert_whole(found[0], PARAMS, [5])


def test_a_straggler_is_asked_of_a_second_worker(running: Running) -> None:
    with (client := FleetClient(running.addresses, straggler_seconds=0.2)):
        client.generate([[i] for i in range(8)], PARAMS, seed=1)
        running.engines[0].flow.clear()
        groups = client.generate([[i] for i in range(8)], *_repeated(8))
        assert_whole(groups, PARAMS, list(range(100, 108)))
        assert client.num_asked_twice > 0
        wait_until(lambda: client.health().requests["open"] == 0)
        running.engines[0].flow.set()


def test_calls_with_one_prompt_count_for_the_detection_of_stragglers(running: Running) -> None:
    with (client := FleetClient(running.addresses, straggler_seconds=0.2)):
        for i in range(3):
            client.generate([[i]], PARAMS, seed=1)
            client.score([[i, 1]])
        running.engines[0].flow.clear()
        for i in range(8):
            assert len(client.generate([[i]], PARAMS, seed=1)[0].samples) == PARAMS.n
        assert min(running.asked()) > 0 and client.num_asked_twice > 0
        running.engines[0].flow.set()


def test_pieces_join_to_the_sample_whichever_worker_finishes_first(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers cases with and without pieces from the first worker, which is then lost."""
    not_shown: list[int] = []
    take = GroupState.take

    def take_and_note(state: GroupState, ask: Ask, index: int | None, reply: Reply) -> list[Reply]:
        replies = take(state, ask, index, reply)
        if isinstance(reply, SampleDelta) and not replies:
            not_shown.extend(reply.token_ids)
        return replies

    monkeypatch.setattr(GroupState, "take", take_and_note)
    members = Members(*running.addresses)
    params = SamplingParams(max_tokens=20, seed=5)
    with (client := FleetClient(members, straggler_seconds=0.2)):
        client.generate([[i] for i in range(8)], PARAMS, seed=1)
        steps = [Steps(engine) for engine in running.engines]
        for is_lost in (False, True):
            before = running.asked()
            not_shown.clear()
            thread, found = in_background(lambda: list(client.stream([[1, 2]], params, deltas=True)))
            wait_until(lambda asked=before: running.asked() != asked)
            first = running.asked()[0] == before[0]
            steps[first].take(7 * is_lost)
            wait_until(lambda asked=before: all(now > then for now, then in zip(running.asked(), asked, strict=True)))
            if is_lost:
                steps[not first].take(3)
                wait_until(lambda: len(not_shown) >= 3)
                members.now = [member for member in members.now if member.address != running.addresses[first]]
                wait_until(lambda: {*client.healths()} == {members.now[0].name})
            steps[not first].take(20 - 3 * is_lost)
            thread.join()
            assert isinstance(found[0], list), found
            assert grown(found[0]) == expected_tokens(5, 0, 20)


def _repeated(count: int) -> tuple[list[SamplingParams]]:
    return (seeded(count)[0],)


def test_workers_of_other_kinds_are_refused_unless_allowed() -> None:
    other = FakeEngine()
    other.info = replace(FakeInfo(), backend="other", llguidance="0.0.1")
    with running_with(FakeEngine(), other) as running:
        with (
            FleetClient(running.addresses) as client,
            pytest.raises(ConfigError, match="llguidance 0.0.1; the others have backend fake"),
        ):
            client.generate([[1]], PARAMS, seed=1)
        with FleetClient(running.addresses, mixed_kinds=True) as client:
            client.generate([[i] for i in range(4)], PARAMS, seed=1)
        assert min(running.asked()) > 0


def test_concurrent_first_calls_are_all_refused_if_kinds_differ() -> None:
    other = FakeEngine()
    other.info = replace(FakeInfo(), backend="other")

    async def generate(addresses: list[str]) -> list[object]:
        async with AsyncFleetClient(addresses) as client:
            calls = (client.generate([[i]], PARAMS, seed=1) for i in range(4))
            return await asyncio.gather(*calls, return_exceptions=True)

    with running_with(FakeEngine(), other) as running:
        assert [type(found) for found in asyncio.run(generate(running.addresses))] == [ConfigError] * 4


def test_a_client_that_is_closed_during_its_first_call_ends_it(tmp_path: Path) -> None:
    client = FleetClient([f"ipc://{tmp_path}/nobody"])
    thread, found = in_background(lambda: client.generate([[1]], PARAMS, seed=1))
    wait_until(lambda: bool([*client._fleet._pool.links]))
    client.close()
    thread.join()
    assert "closed; make a new one" in str(found[0])


def test_workers_with_old_weights_get_no_requests() -> None:
    with running_with(engine_of(4), engine_of(3)) as running:
        with FleetClient(running.addresses) as client:
            client.generate([[i] for i in range(4)], PARAMS, seed=1)
            assert running.asked() == [4, 0] and client.health().weight_version == 3
        with FleetClient(running.addresses, max_staleness=1) as client:
            client.generate([[i] for i in range(4)], PARAMS, seed=1)
            assert running.asked()[1] > 0
            with pytest.raises(StaleWeightsError):
                client.generate([[1]], PARAMS, seed=1, min_weight_version=5)
            groups = client.generate([[i] for i in range(4)], PARAMS, seed=1, min_weight_version=4)
            assert {span.version for g in groups for s in g.samples for span in s.weight_versions} == {4}


def test_a_group_that_a_push_would_mix_is_restarted(running: Running) -> None:
    (engine, _), address = running.engines, running.addresses[0]
    step = engine.step

    def push_after_one() -> list[Output]:
        outputs = step()
        if outputs and engine.weight_version == 3:
            engine.weight_version = 4
        return outputs

    engine.step = push_after_one
    with FleetClient([address]) as client:
        (group,) = client.generate([[1, 2]], PARAMS, seed=5)
        assert {span.version for sample in group.samples for span in sample.weight_versions} == {4}
        assert [request.id for request in engine.requests] == [group.id] * 2
    engine.weight_version = 3
    with FleetClient([address]) as client, pytest.raises(StaleWeightsError, match="max_staleness = 0"):
        list(client.stream([[1, 2]], PARAMS, seed=5))
    engine.weight_version = 3
    with FleetClient([address], max_staleness=1) as client:
        samples = [sample for _, sample in client.stream([[1, 2]], PARAMS, seed=5)]
        assert {span.version for sample in samples for span in sample.weight_versions} == {3, 4}


def test_a_lifecycle_call_skips_a_draining_worker(running: Running) -> None:
    ending, going_on = running.workers
    running.engines[0].flow.clear()
    with FleetClient(running.addresses) as client, RolloutClient(ending.address) as alone:
        thread = threading.Thread(target=lambda: alone.generate([[1]], PARAMS, seed=1))
        thread.start()
        wait_until(lambda: alone.health().requests["open"] == 1)
        ending.worker.drain()
        wait_until(lambda: alone.health().state == "draining")
        assert client.pause().state == "paused"
        running.engines[0].flow.set()
        thread.join()
    with RolloutClient(going_on.address) as other:
        assert other.health().state == "paused"


def test_a_file_names_the_members(running: Running, tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    with pytest.raises(ConfigError, match="is not a valid fleet file"):
        FleetClient(file)
    write_members(file, [Member("worker-0", running.addresses[0])])
    with (client := FleetClient(str(file))):
        client.generate([[i] for i in range(4)], PARAMS, seed=1)
        assert running.asked() == [4, 0] and {*client.healths()} == {"worker-0"}
        write_members(file, [Member("worker-1", running.addresses[1])])
        wait_until(lambda: {*client.healths()} == {"worker-1"})
        client.generate([[i] for i in range(4)], PARAMS, seed=1)
        assert running.asked() == [4, 4]


def test_the_asynchronous_client_has_the_same_calls(running: Running) -> None:
    async def generate() -> list[Group]:
        async with AsyncFleetClient(running.addresses) as client:
            calls = (client.generate([[i, 2]], PARAMS, seed=i) for i in range(6))
            return [group for groups in await asyncio.gather(*calls) for group in groups]

    groups = asyncio.run(generate())
    assert_whole(groups, PARAMS, [group.params.seed or 0 for group in groups])
    assert min(running.asked()) > 0
