"""The clients with a worker on a thread: results, concurrency, cancellation, reconnection, and a lost worker."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import rich.progress
import zmq
from fake_engine import FAIL_IN_STEP, SLOW_STEP, FakeEngine, expected_tokens
from refusals import about
from rich.console import Console
from rich.text import Text
from serving import RawClient, WorkerOnThread, check_group, fake_process, serving, stop_after_a_step

from trueroll.engine.request import GenerateRequest, WeightSpan, derive_seed
from trueroll.errors import (
    ConfigError,
    IdConflictError,
    InvalidRequestError,
    MessageTooLargeError,
    ProtocolError,
    QueueFullError,
    RequestAbortedError,
    TruerollError,
    UnknownRequestError,
    WorkerFailedError,
    WorkerLostError,
)
from trueroll.rollout import AsyncRolloutClient, Group, RolloutClient, SamplingParams, protocol

LONG = SamplingParams(max_tokens=400)


def test_generate_returns_groups_in_order(client: RolloutClient, engine: FakeEngine) -> None:
    params = [SamplingParams(n=3, max_tokens=9, seed=2**64 - 1), SamplingParams(n=1, max_tokens=2, logprobs=None)]
    first, second = client.generate([np.array([1, 2, 3]), [4, 5]], params, request_ids=["x", "y"])
    check_group(first, 3)
    check_group(second, 1)
    assert (first.id, second.id) == ("x", "y") and (first.num_prompt_tokens, second.num_prompt_tokens) == (3, 2)
    sample = first.samples[1]
    assert isinstance(sample.token_ids, list) and sample.logprobs is not None and sample.logprobs.dtype == np.float32
    assert sample.logprobs.tobytes() == (-(np.array(sample.token_ids, np.float32) + 1) / 7).tobytes()
    assert sample.seed == derive_seed(2**64 - 1, 1) and sample.weight_versions[0].version == 3
    assert second.samples[0].logprobs is None
    prompts = {r.id: r.prompt_token_ids.tolist() for r in engine.requests if isinstance(r, GenerateRequest)}
    assert prompts == {"x": [1, 2, 3], "y": [4, 5]}


def test_results_are_acknowledged(client: RolloutClient) -> None:
    client.generate([[1], [2]], SamplingParams(max_tokens=1))
    assert client.health().requests["kept"] == 0
    stats = client.stats()
    assert stats.service["accepted"] == stats.service["finished"] == 2 and stats.engine["steps"] > 0


def test_no_prompts_give_no_groups(client: RolloutClient) -> None:
    assert client.generate([]) == [] and client.score([]) == []


def test_stream_yields_samples_as_they_finish(client: RolloutClient) -> None:
    pairs = list(client.stream([[1], [2]], SamplingParams(n=2, max_tokens=3), seed=5))
    for prompt in range(2):
        assert [sample.index for position, sample in pairs if position == prompt] == [1, 0]


def test_score(client: RolloutClient) -> None:
    first, second = client.score([[1, 2, 4], [9, 8]], temperature=2.0)
    assert first.logprobs.tolist() == [-1.0, -2.0] and second.logprobs.tolist() == [-4.0]
    assert first.logprobs.dtype == np.float32 and first.weight_versions == (WeightSpan(3, 0, 2),)


@pytest.mark.parametrize("progress", [False, True])
def test_progress_shows_a_bar_and_changes_nothing(
    client: RolloutClient, progress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(rich.progress, "get_console", lambda: terminal)
    check_group(client.generate([[1]], SamplingParams(n=4, max_tokens=4), progress=progress)[0], 4)
    assert isinstance(terminal.file, io.StringIO)
    shown = Text.from_ansi(terminal.file.getvalue()).plain
    assert bool(re.search(r"generating ━+ 100%", shown)) == progress == bool(shown)


@pytest.mark.parametrize(
    ("prompts", "keywords", "field"),
    [
        ([1, 2], {}, "prompts[0]"),
        (["text"], {}, "prompts[0]"),
        ([[0.5]], {}, "prompts[0]"),
        ([[1], [2**31]], {}, "prompts[1]"),
        ([[1]], {"params": [SamplingParams(), SamplingParams()]}, "params"),
        ([[1], [2]], {"request_ids": ["a"]}, "request_ids"),
        ([[1], [2]], {"request_ids": ["a", "a"]}, "request_ids"),
        ([[1]], {"request_ids": [""]}, "request_ids"),
        ([[1]], {"request_ids": [5]}, "request_ids"),
        ([[1]], {"request_ids": ["\ud800"]}, "id"),
        ([[[1], [2, 3]]], {}, "prompts[0]"),
        ([[1]], {"params": {"n": 1}}, "params"),
        ([[1]], {"params": []}, "params"),
        ([[]], {}, "prompts[0]"),
    ],
)
def test_wrong_arguments_raise(client: RolloutClient, prompts: list[list[int]], keywords: dict, field: str) -> None:
    with pytest.raises(InvalidRequestError, check=about(field)):
        client.generate(prompts, **keywords)


def test_wrong_arguments_of_other_calls_raise(client: RolloutClient) -> None:
    with pytest.raises(InvalidRequestError, check=about("request_id")):
        client.abort("")
    with pytest.raises(InvalidRequestError, check=about("index", value=-1, limit=0)):
        client.abort("nobody", -1)
    for salt in ("\ud800", "x" * 1025):
        with pytest.raises(InvalidRequestError, check=about("cache_salt")):
            client.score([[1, 2]], cache_salt=salt)
        with pytest.raises(InvalidRequestError, check=about("cache_salt")):
            SamplingParams(cache_salt=salt)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:port", "ipc:///" + "x" * 200])
def test_an_invalid_address_is_refused(address: str) -> None:
    with RolloutClient(address) as client, pytest.raises(ConfigError, match="address: cannot connect to"):
        client.health()


def test_one_bad_request_raises_and_the_others_are_aborted(client: RolloutClient, engine: FakeEngine) -> None:
    engine.flow.clear()
    with pytest.raises(InvalidRequestError, check=about("prompts[1]")):
        client.generate([[1], [-1], [2]], LONG)
    while client.health().requests["open"]:
        pass
    assert engine.stats().samples_finished == {"abort": 2} and client.health().requests["kept"] == 0


def test_an_oversized_message_is_refused_before_it_is_sent(client: RolloutClient) -> None:
    with pytest.raises(MessageTooLargeError, match="limit 4096, max_message_bytes"):
        client.generate([[1] * 40_000])
    assert client.health().state == "ready"


def test_abort_from_another_thread_returns_partial_samples(client: RolloutClient, engine: FakeEngine) -> None:
    groups = []
    thread = threading.Thread(target=lambda: groups.extend(client.generate([[1]], LONG, seed=1, request_ids=["a"])))
    stop_after_a_step(engine)
    thread.start()
    while not client.stats().engine.get("computed_tokens"):
        pass
    assert client.abort("a") == 1
    thread.join()
    sample = groups[0].samples[0]
    assert sample.finish_reason == "abort" and sample.token_ids == expected_tokens(
        derive_seed(1, 0), 0, len(sample.token_ids)
    )
    with pytest.raises(UnknownRequestError, match="'a'"):
        client.abort("a")


def test_a_worker_that_fails_raises_its_cause(client: RolloutClient) -> None:
    with pytest.raises(WorkerFailedError, match="broken step"):
        client.generate([[FAIL_IN_STEP]])


def test_closing_ends_calls_and_the_client(client: RolloutClient, engine: FakeEngine) -> None:
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            client.generate([[1]], LONG)
        except TruerollError as error:
            errors.append(error)

    engine.gate.clear()
    thread = threading.Thread(target=generate)
    thread.start()
    while not client.health().requests["open"]:
        pass
    client.close()
    thread.join()
    assert "closed" in str(errors[0])
    with pytest.raises(TruerollError, match="closed"):
        client.health()


def test_asynchronous_calls_run_at_the_same_time(worker: WorkerOnThread, engine: FakeEngine) -> None:
    async def run() -> None:
        async with AsyncRolloutClient(worker.address) as client:
            engine.gate.clear()
            params = SamplingParams(n=2, max_tokens=5, seed=3)
            calls = [asyncio.create_task(client.generate([[i]], params)) for i in range(20)]
            while (await client.health()).requests["open"] < 20:
                pass
            engine.gate.set()
            for groups in await asyncio.gather(*calls):
                check_group(groups[0], 2)

    asyncio.run(run())


def test_a_cancelled_call_aborts_its_requests(worker: WorkerOnThread, engine: FakeEngine) -> None:
    async def run() -> None:
        async with AsyncRolloutClient(worker.address) as client:
            engine.gate.clear()
            other = asyncio.create_task(client.generate([[2]], SamplingParams(n=2, max_tokens=300)))
            call = asyncio.create_task(client.generate([[1]], LONG))
            while (await client.health()).requests["open"] < 2:
                pass
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await client.health()  # the reply comes after the abort was received
            engine.gate.set()
            check_group((await other)[0], 2)

    asyncio.run(run())
    assert engine.stats().samples_finished == {"abort": 1, "length": 2}


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Enable keyboard interrupts, because a process that was started in the background may ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_aborts_the_call(client: RolloutClient, engine: FakeEngine, interruptible: None) -> None:
    engine.flow.clear()
    main_thread = threading.get_ident()
    assert main_thread == threading.main_thread().ident

    def interrupt() -> None:
        while client.health().requests["open"] < 2:
            pass
        signal.pthread_kill(main_thread, signal.SIGINT)

    threading.Timer(0.2, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        client.generate([[1], [2]], LONG)
    while client.health().requests["open"]:
        pass
    assert engine.stats().samples_finished == {"abort": 2}


def test_calls_of_a_closed_client_raise(worker: WorkerOnThread) -> None:
    async def run() -> None:
        client = AsyncRolloutClient(worker.address)
        assert (await client.health()).id
        await client.close()
        with pytest.raises(TruerollError, match="closed"):
            await client.health()

    asyncio.run(run())


def test_a_stream_may_outlive_its_client(worker: WorkerOnThread) -> None:
    client = RolloutClient(worker.address)
    held, used = (client.stream([[1]], SamplingParams(n=4, max_tokens=8)) for _ in range(2))
    next(held)
    next(used)
    client.close()
    held.close()  # type: ignore[attr-defined]
    with pytest.raises(TruerollError, match="closed"):
        list(used)


def test_a_stream_closed_early_aborts_the_rest(client: RolloutClient, engine: FakeEngine) -> None:
    stop_after_a_step(engine)
    stream = client.stream([[1]], SamplingParams(n=300, max_tokens=300))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    while client.health().requests["open"]:
        pass
    assert engine.stats().samples_finished["abort"] > 0


@pytest.mark.parametrize("ending", ["next(stream)", "for _ in stream: break", "for _ in stream: raise ValueError"])
def test_a_script_that_leaves_a_stream_unfinished_ends_and_gives_it_up(
    client: RolloutClient, engine: FakeEngine, ending: str
) -> None:
    stop_after_a_step(engine)
    code = f"""
import sys
from trueroll.rollout import RolloutClient, SamplingParams
client = RolloutClient(sys.argv[1])
stream = client.stream([[1], [2]], SamplingParams(n=300, max_tokens=300))
{ending}
"""
    address = client._client._connection._line.address
    script = subprocess.run([sys.executable, "-c", code, address], timeout=20, capture_output=True, text=True)
    assert script.returncode == ("raise" in ending) and "ignored" not in script.stderr, script.stderr
    while client.health().requests["open"]:
        pass
    finished = engine.stats().samples_finished
    assert sum(finished.values()) == 600 and finished["abort"] >= 598


def test_collecting_a_stream_on_the_clients_own_thread_does_not_hang(client: RolloutClient, engine: FakeEngine) -> None:
    async def collect() -> int:
        return gc.collect()

    stop_after_a_step(engine)
    gc.collect()
    gc.disable()
    try:
        cycle: list = [client.stream([[1]], SamplingParams(n=300, max_tokens=300))]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        assert client.wait(collect()) > 0
    finally:
        gc.enable()
    while client.health().requests["open"]:
        pass
    assert engine.stats().samples_finished["abort"] == 299


def test_a_client_without_references_ends_its_thread(worker: WorkerOnThread) -> None:
    client = RolloutClient(worker.address)
    client.health()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "rollout-client"]
    del client
    thread.join(timeout=20)
    assert not thread.is_alive()


def test_closing_during_calls_of_other_threads_does_not_hang(worker: WorkerOnThread) -> None:
    for _ in range(30):
        client = RolloutClient(worker.address)

        def call_until_closed(client: RolloutClient = client) -> None:
            with pytest.raises(TruerollError, match="closed"):
                while True:
                    client.health()

        threads = [threading.Thread(target=call_until_closed) for _ in range(4)]
        for thread in threads:
            thread.start()
        client.health()
        client.close()
        for thread in threads:
            thread.join(timeout=20)
            assert not thread.is_alive()


def test_an_aborted_score_raises(worker: WorkerOnThread, engine: FakeEngine) -> None:
    async def run() -> None:
        async with AsyncRolloutClient(worker.address) as client:
            engine.gate.clear()
            engine.at_gate.clear()
            blocking = asyncio.create_task(client.generate([[1]], SamplingParams(max_tokens=3)))
            assert await asyncio.to_thread(engine.at_gate.wait, 20)
            score = asyncio.create_task(client.score([[1, 2]]))
            while (await client.health()).requests["open"] < 2:
                pass
            (id,) = [id for id in worker.worker._book.ledger.open if worker.worker._book.ledger.open[id].params is None]
            abort = asyncio.create_task(client.abort(id))
            await asyncio.sleep(0)  # the abort is sent first
            await client.health()
            engine.gate.set()
            assert await abort == 1
            with pytest.raises(RequestAbortedError):
                await score
            await blocking

    asyncio.run(run())


# Lost connections and lost workers.


class Proxy:
    """Forwards one Unix socket to another.

    `cut` closes every connection. New connections are accepted until `close`.
    """

    def __init__(self, target: str) -> None:
        self._target = target.removeprefix("ipc://")
        self._folder = tempfile.TemporaryDirectory(prefix="trueroll-test-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._folder.name}/proxy.sock")
        self._listener.listen()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.address = f"ipc://{self._folder.name}/proxy.sock"
        threading.Thread(target=self._accept, daemon=True).start()

    def retarget(self, target: str) -> None:
        self._target = target.removeprefix("ipc://")

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, []
        for end in (end for pair in pairs for end in pair):
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._folder.cleanup()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target)
            self._pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass  # the connection was cut


def test_no_abort_is_kept_for_requests_that_a_lost_worker_never_had() -> None:
    """Otherwise aborts would accumulate in the client while the worker is away."""

    async def run() -> None:
        with serving(FakeEngine()) as worker:
            client = AsyncRolloutClient(worker.address)
            await client.health()
        connection = client._connection
        while connection._window.is_open:
            await asyncio.sleep(0.01)
        async with client:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.generate([[1]], LONG), 0.01)
            assert connection._window.notices == [] and len(connection.calls) == 0

    asyncio.run(run())


@contextmanager
def proxied(worker: WorkerOnThread) -> Iterator[Proxy]:
    proxy = Proxy(worker.address)
    yield proxy
    proxy.close()


def start_generating(client: RolloutClient, results: list[object]) -> threading.Thread:
    def generate() -> None:
        try:
            results.extend(client.generate([[1], [2]], SamplingParams(n=3, max_tokens=5)))
        except TruerollError as error:
            results.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    while client.health().requests["open"] < 2:
        pass
    return thread


def test_after_a_cut_the_client_reconnects_and_gets_everything_once(worker: WorkerOnThread, engine: FakeEngine) -> None:
    results: list = []
    with proxied(worker) as proxy, RolloutClient(proxy.address) as client:
        engine.gate.clear()
        thread = start_generating(client, results)
        proxy.cut()
        engine.gate.set()
        thread.join()
        for group in results:
            check_group(group, 3)
        assert len(results) == 2 and len(engine.requests) == 2
        assert client.stats().service["joined"] == 2


def test_lost_connections_leave_no_open_file(worker: WorkerOnThread) -> None:
    with proxied(worker) as proxy, RolloutClient(proxy.address) as client:
        sockets, num_open = list[object](), list[int]()
        for _ in range(5):
            assert client.health().state == "ready"
            line = client.asynchronous._connection._line
            sockets.append(line._socket)
            num_open.append(len(os.listdir("/proc/self/fd")))
            proxy.cut()
            while line._socket is sockets[-1]:
                time.sleep(0.01)
        assert len({id(each) for each in sockets}) == 5, "premise: each cut ended a connection"
        assert max(num_open[1:]) <= num_open[1], num_open


def test_the_last_replies_of_a_worker_arrive_even_if_the_client_is_busy(engine: FakeEngine) -> None:
    async def generate(running: WorkerOnThread) -> list[Group]:
        async with AsyncRolloutClient(running.address, timeout=5.0) as client:
            call = asyncio.create_task(client.generate([[i] for i in range(32)], SamplingParams(max_tokens=2)))
            while (await client.health()).requests["open"] < 32:
                await asyncio.sleep(0)
            engine.gate.set()
            running.worker.drain()
            running.join()  # blocks the event loop
            return await call

    engine.gate.clear()
    with serving(engine) as running:
        groups = asyncio.run(generate(running))
    assert [len(group.samples[0].token_ids) for group in groups] == [2] * 32


def test_a_restarted_worker_is_not_taken_for_the_old_one(worker: WorkerOnThread, engine: FakeEngine) -> None:
    results: list = []
    with serving(FakeEngine()) as successor, proxied(worker) as proxy, RolloutClient(proxy.address) as client:
        engine.gate.clear()
        thread = start_generating(client, results)
        proxy.retarget(successor.address)
        proxy.cut()
        thread.join()
        assert isinstance(results[0], WorkerLostError) and "was restarted" in str(results[0])
        check_group(client.generate([[1]], SamplingParams(max_tokens=3))[0], 1)


def test_a_worker_that_does_not_answer_within_the_timeout_is_lost(worker: WorkerOnThread, engine: FakeEngine) -> None:
    results: list = []
    with proxied(worker) as proxy, RolloutClient(proxy.address, timeout=2.0) as client:
        engine.gate.clear()
        thread = start_generating(client, results)
        proxy.close()
        thread.join()
    assert isinstance(results[0], WorkerLostError)


def test_a_retry_after_a_lost_worker_gets_whole_samples() -> None:
    ids, params = [f"step-1-{i}" for i in range(8)], SamplingParams(n=2, max_tokens=60)
    prompts = [[SLOW_STEP]] + [[i] for i in range(1, 8)]
    with fake_process() as process, RolloutClient(process.address, timeout=1.0) as client:
        lost: list[TruerollError] = []

        def generate() -> None:
            try:
                client.generate(prompts, params, request_ids=ids)
            except TruerollError as error:
                lost.append(error)

        thread = threading.Thread(target=generate)
        thread.start()
        while client.health().requests["open"] < len(ids):
            pass
        os.kill(process.pid, signal.SIGSTOP)
        thread.join()
        os.kill(process.pid, signal.SIGCONT)
        assert isinstance(lost[0], WorkerLostError)
        for group in client.generate(prompts, params, request_ids=ids):
            check_group(group, 2)
        assert client.stats().service["accepted"] == len(ids)


def test_a_retry_after_a_refusal_gets_whole_samples(engine: FakeEngine) -> None:
    groups: list[Group] = []

    def retry() -> None:
        groups.extend(client.generate([[1], [2]], LONG, request_ids=["a", "b"]))

    with (
        serving(engine, max_queued_requests=3) as worker,
        RolloutClient(worker.address) as client,
        RawClient(worker.address) as raw,
    ):
        engine.gate.clear()
        raw.generate("keeps the engine in a step")
        assert engine.at_gate.wait(timeout=20)
        with pytest.raises(QueueFullError):
            client.generate([[1], [2], [3]], LONG, request_ids=["a", "b", "c"])
        thread = threading.Thread(target=retry)
        thread.start()
        while not all(worker.worker._book.ledger.open[id].successors for id in "ab"):
            pass
        engine.gate.set()
        thread.join()
    for group in groups:
        check_group(group, 1)
    assert len(groups) == 2


def test_replies_to_an_abandoned_submission_are_not_taken_for_the_next_one(client: RolloutClient) -> None:
    for seed in range(60):
        params, ids = SamplingParams(n=4, max_tokens=6, seed=seed), [f"step {seed}"]
        for _ in client.stream([[1, 2, 3]], params, request_ids=ids):
            break
        check_group(client.generate([[1, 2, 3]], params, request_ids=ids)[0], 4)


def test_the_worker_keeps_no_result_that_arrived_in_a_closed_stream(worker: WorkerOnThread) -> None:
    """Otherwise a caller that rejects the samples of a stream, closes it and asks again would get the same samples."""

    async def run() -> None:
        async with AsyncRolloutClient(worker.address) as client:
            stream = client.stream([[1, 2, 3]], SamplingParams(n=2, max_tokens=4))
            await anext(stream)
            while (await client.health()).requests["open"]:
                pass
            assert (await client.health()).requests["kept"] == 1
            await stream.aclose()
            assert (await client.health()).requests["kept"] == 0

    asyncio.run(run())


def test_the_same_id_and_prompt_draw_the_same_samples_from_any_worker(
    client: RolloutClient, engine: FakeEngine
) -> None:
    params = SamplingParams(n=3, max_tokens=9)
    (first,) = client.generate([[1, 2]], params, request_ids=["step-1-a"])
    assert client.health().requests["kept"] == 0
    with serving(FakeEngine()) as other, RolloutClient(other.address) as elsewhere:
        for asked in (client, elsewhere):
            (again,) = asked.generate([[1, 2]], params, request_ids=["step-1-a"])
            assert again.params == first.params
            for one, two in zip(first.samples, again.samples, strict=True):
                assert np.array_equal(one.token_ids, two.token_ids)
    assert len(engine.requests) == 2
    (other_prompt,) = client.generate([[1, 3]], params, request_ids=["step-1-a"])
    (other_id,) = client.generate([[1, 2]], params, request_ids=["step-1-b"])
    (drawn,) = client.generate([[1, 2]], params)
    assert len({group.params.seed for group in (first, other_prompt, other_id, drawn)}) == 4


def test_an_error_without_an_id_ends_every_call(tmp_path: Path) -> None:
    """The worker cannot tell which call sent the unreadable message, and that call must not wait forever."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{tmp_path}/worker.sock")
        results: list[BaseException] = []

        def call() -> None:
            with pytest.raises(ProtocolError, match="unreadable") as raised:
                client.health()
            results.append(raised.value)

        with RolloutClient(f"ipc://{tmp_path}/worker.sock") as client:
            threads = [threading.Thread(target=call) for _ in range(3)]
            for thread in threads:
                thread.start()
            identity, _ = router.recv_multipart()
            while len(client._client._connection.calls) < 3:
                pass
            router.send_multipart(
                [identity, protocol.encode(protocol.error_message(None, ProtocolError("unreadable")))]
            )
            for thread in threads:
                thread.join(timeout=20)
    assert len(results) == 3


def test_an_address_without_a_worker_is_a_lost_worker() -> None:
    with RolloutClient("ipc:///nowhere/worker.sock", timeout=0.2) as client:
        with pytest.raises(WorkerLostError, match="check that a worker runs at this address"):
            client.generate([[1]])


def test_a_worker_that_computes_for_long_is_not_lost(worker: WorkerOnThread, engine: FakeEngine) -> None:
    with RolloutClient(worker.address, timeout=1.0) as client:
        engine.gate.clear()
        threading.Timer(2.5, engine.gate.set).start()
        check_group(client.generate([[1]], SamplingParams(max_tokens=3))[0], 1)


def test_a_request_with_a_known_id_is_not_computed_again(worker: WorkerOnThread, engine: FakeEngine) -> None:
    params = SamplingParams(max_tokens=4, seed=7)
    with RawClient(worker.address) as vanishing:
        vanishing.generate("a", max_tokens=4, seed=7)
        vanishing.receive_until("done")
    with RolloutClient(worker.address) as client:
        with pytest.raises(IdConflictError):
            client.generate([[1, 2, 3]], LONG, request_ids=["a"])
        check_group(client.generate([[1, 2, 3]], params, request_ids=["a"])[0], 1)
        assert client.stats().service["joined"] == 1 and client.health().requests["kept"] == 0
    assert [request.id for request in engine.requests] == ["a"]


@pytest.mark.parametrize("key", ["short", "~" * 40])
def test_an_invalid_server_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="server_public_key: must be the 40 Z85 characters"):
        RolloutClient("tcp://127.0.0.1:9", server_public_key=key, client_key="unread")


@pytest.mark.parametrize("module", ["client.client", "protocol", "client.local_worker"])
def test_importing_the_client_loads_nothing_heavy(module: str) -> None:
    code = f"import trueroll.rollout.{module}, sys; print({{'torch', 'transformers', 'rich'}} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
