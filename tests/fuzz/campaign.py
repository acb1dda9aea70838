"""A campaign: rounds of attack on a worker or on its front end, with good traffic at the same time and checks after
each round.

Owns: the clients and the counts. Does not own: the worker. Any process that speaks the protocol works, for example a
process with a planted fault that the harness must find.

Promises: `run` raises `Violation` in these cases:

- The worker ends, does not answer, answers twice, or sends a reply that is not owed.
- The worker serves weights that are not the operator's.
- The idle worker is larger than after the warm-up.
- A bit of a good request differs.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch
from fuzz.attack import Attacker, Deserter, Shot
from fuzz.corpus import Memory
from fuzz.front import FrontProcess
from fuzz.good import start_good_clients
from fuzz.http_attack import HttpAttacker
from fuzz.http_good import start_good_http_client
from fuzz.http_rounds import HTTP_SHARES, NUM_HTTP_ATTACKERS, HttpRounds
from fuzz.images import MAX_IMAGE_BYTES
from fuzz.operator_client import Operator
from fuzz.rounds import NUM_ATTACKERS, ROUND, Rounds
from fuzz.streams import HEALTH, LAST, OPENING, Stream
from fuzz.violation import Sent, Trace, Violation

from trueroll.rollout import WorkerProcess

CHUNK = 50
"""Number of messages between two checks of the worker."""
RSS_GROWTH_BYTES = 64 * 2**20
"""Allowed growth in bytes, for memory that the allocator keeps from the largest messages and for kept results within
their bound.
"""
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Number of threads of asyncio's pool in a front end. The pool starts threads on demand and keeps them."""


@dataclass(frozen=True)
class Plan:
    """`messages`: number of messages, in whole rounds from `first_round` on. `patience`: limit of any wait, in seconds.

    `warm_up`: number of messages after which the worker is measured. At the end the worker must be as small again.
    `http`: True to attack a front end of the worker, which is measured as well. `images`: True to send only messages
    about images.
    """

    messages: int
    seed: int = 0
    first_round: int = 0
    patience: float = 20.0
    warm_up: int = 4000
    http: bool = False
    images: bool = False

    def rounds(self) -> range:
        return range(self.first_round, self.first_round + max(1, -(-self.messages // ROUND)))


@dataclass(frozen=True)
class Size:
    """The size of an idle worker or front end."""

    threads: int
    descriptors: int
    rss: int


@dataclass
class Numbers:
    """Counts of a campaign. `sent`: messages by kind. `replies`: to clients that stay connected, by type or code.
    `images`: as in `Attacker`. `good_with_images`: good requests with images. `good_parts`: parts of images that good
    clients have sent. `good_late`: as in `GoodClient`.
    """

    sent: Counter[str] = field(default_factory=Counter)
    replies: Counter[str] = field(default_factory=Counter)
    images: Counter[str] = field(default_factory=Counter)
    streams: int = 0
    reconnects: int = 0
    good_requests: int = 0
    good_with_images: int = 0
    good_parts: int = 0
    good_late: int = 0
    good_tokens: int = 0
    good_refused: int = 0
    preemptions: int = 0
    pushes: int = 0
    longest_wait: float = 0.0
    seconds: float = 0.0
    before: Size | None = None
    after: Size | None = None
    front_before: Size | None = None
    front_after: Size | None = None

    @property
    def messages(self) -> int:
        return self.sent.total()


class Campaign:
    """Attacks `front` if it is given, otherwise `worker`. The worker serves `tensors`.

    `show`: called from time to time with the numbers so far.
    """

    def __init__(
        self,
        worker: WorkerProcess,
        tensors: Mapping[str, torch.Tensor],
        plan: Plan,
        show: Callable[[Numbers], None] = lambda numbers: None,
        front: FrontProcess | None = None,
    ) -> None:
        self.numbers = Numbers()
        self._trace = Trace()
        self._worker = worker
        self._path = worker.address.removeprefix("ipc://")
        self._process = psutil.Process(worker.pid)
        self._front = front
        self._plan = plan
        self._show = show
        self._round = plan.first_round
        self._started = time.monotonic()
        self._streams: list[Stream] = []
        with ExitStack() as ends:
            self._memory = ends.enter_context(closing(Memory(tensors)))
            self._rounds = Rounds(plan.seed, self._memory, plan.images) if front is None else HttpRounds(plan.seed)
            self._attackers = [ends.enter_context(closing(Attacker(worker.address))) for _ in range(NUM_ATTACKERS)]
            self._deserter = ends.enter_context(closing(Deserter(worker.address)))
            operator = Operator(worker.address, tensors, plan.patience, self._look)
            self._operator = ends.enter_context(closing(operator))
            self._good = start_good_clients(worker.address)
            self._doors: list[HttpAttacker] = []
            if front is not None:
                self._doors = [
                    ends.enter_context(closing(HttpAttacker(front.address, plan.patience, self._tend)))
                    for _ in range(NUM_HTTP_ATTACKERS)
                ]
                self._good.append(start_good_http_client(worker.address, front.address, plan.patience))
            for client in self._good:
                ends.callback(client.stop)
            self._operator.start_receiving()
            self._ends = ends.pop_all()

    def run(self) -> Numbers:
        """Run the attack of the plan and return the numbers."""
        with self._explained():
            for number in self._plan.rounds():
                self._round = number
                self._run_round(self._rounds.draw(number))
                if self.numbers.before is None and self.numbers.messages >= self._plan.warm_up:
                    self._measure_all()
            self._finish()
        return self.numbers

    def replay(self, trace: Iterable[Sent]) -> Numbers:
        """Send the messages of a trace again, in order, and return the numbers."""
        with self._explained():
            self._run_round(trace)
            self._finish()
        return self.numbers

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._ends.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add to a Violation how to reproduce it. If the worker process has ended, report that end instead of other
        violations.
        """
        try:
            yield
        except Violation as violation:
            time.sleep(0.5)  # a failed worker still answers for about this long
            code = self._worker.exit_code
            what = violation if code is None else f"the worker ended with exit code {code}"
            path = Path(tempfile.gettempdir()) / f"trueroll-fuzz-{self._plan.seed}-{self._round}.jsonl"
            self._trace.save(path)
            raise Violation(
                f"{what}\nseed {self._plan.seed}, round {self._round}, after {self.numbers.messages} messages; "
                f"the last messages are in {path}"
            ) from violation

    # Rounds.

    def _run_round(self, sendings: Iterable[Sent]) -> None:
        """Send the messages of a round in order, check the worker from time to time, and settle at the end."""
        self._trace.start_round()
        for count, sent in enumerate(sendings):
            self._trace.add(sent)
            self._send(sent)
            if count % CHUNK == CHUNK - 1:
                self._look()
                self._operator.tend(ends_pushes=False)
                self._show(self._count())
        self._settle()

    def _send(self, sent: Sent) -> None:
        match sent.kind:
            case "stream":
                self._streams.append(Stream(self._path, *sent.frames))
                self.numbers.streams += 1
                return
            case "break":
                self._deserter.desert(*sent.frames, linger=sent.sender)
                return
            case "silence":
                self._attackers[sent.sender].is_silent = True
                return
            case kind if kind in HTTP_SHARES and self._doors:
                self._doors[sent.sender].send(sent)
            case "deserted":
                self._deserter.send(sent.frames)
            case _:
                self._attackers[sent.sender].send(Shot(sent.frames))
                self._attackers[sent.sender].receive()
        self.numbers.sent[sent.kind] += 1

    def _look(self) -> None:
        """Receive pending replies. Raise Violation if the worker, the front end or a good client has ended."""
        if self._worker.exit_code is not None:
            raise Violation(f"the worker ended with exit code {self._worker.exit_code}")
        if self._front is not None and self._front.exit_code is not None:
            raise Violation(f"the front end ended with exit code {self._front.exit_code}")
        for client in self._good:
            if client.failure is not None:
                raise client.failure if isinstance(client.failure, Violation) else Violation(repr(client.failure))
        for attacker in self._attackers:
            attacker.receive()

    def _tend(self) -> None:
        """Check the worker and bring it back to `ready`. Called while waiting for an answer, because a pause may delay
        the answer.
        """
        self._look()
        self._operator.tend(ends_pushes=False)

    def _settle(self) -> None:
        """Wait until the worker is ready, no reply is owed, and each good client has a new result. Then check the
        worker and the good clients.
        """
        while self._streams:
            self._streams.pop().close()
        for door in self._doors:
            door.finish()
        before = [client.compared for client in self._good]
        self._await(
            lambda: (
                self._operator.tend(ends_pushes=True)
                and not any(attacker.owed.total() for attacker in self._attackers)
                and all(client.compared > count for client, count in zip(self._good, before, strict=True))
            ),
            self._what_is_missing,
        )
        self._operator.check_served()
        if self._front is None:
            self._check_stream()
        else:
            self._front.check_health(self._plan.patience)
        for attacker in self._attackers:
            attacker.start_round()

    def _await(self, condition: Callable[[], bool], what_is_missing: Callable[[], str]) -> None:
        deadline = time.monotonic() + self._plan.patience
        while not condition():
            if time.monotonic() > deadline:
                raise Violation(f"after {self._plan.patience} s {what_is_missing()}")
            time.sleep(0.002)
            self._look()

    def _what_is_missing(self) -> str:
        owed = sum((attacker.owed for attacker in self._attackers), Counter())
        health = self._operator.ask("health")
        return (
            f"{owed.total()} replies to the attack are owed (such as to {list(owed)[:5]}); the state is "
            f"{health['state']}, the push {health['push']}, the requests {health['requests']}"
        )

    def _check_stream(self) -> None:
        """Raise Violation if a complete hand-made conversation gets no answer. Without that answer, the broken
        conversations prove nothing.
        """
        stream = Stream(self._path, OPENING, LAST)
        is_answered = stream.hears(HEALTH["id"].encode(), self._plan.patience)
        stream.close()
        if not is_answered:
            raise Violation("a plain connection got no answer to a whole message")

    def _count(self) -> Numbers:
        numbers = self.numbers
        numbers.replies = sum((attacker.codes for attacker in self._attackers), Counter())
        numbers.replies += sum((door.statuses for door in self._doors), Counter())
        numbers.images = sum((attacker.images for attacker in self._attackers), Counter())
        numbers.reconnects = self._deserter.reconnects
        numbers.good_requests = sum(client.compared for client in self._good)
        numbers.good_with_images = sum(client.with_images for client in self._good)
        numbers.good_parts = sum(client.parts for client in self._good)
        numbers.good_late = sum(client.late for client in self._good)
        numbers.good_tokens = sum(client.tokens for client in self._good)
        numbers.good_refused = sum(client.refused for client in self._good)
        numbers.pushes, numbers.longest_wait = self._operator.num_pushes, self._operator.longest_wait
        numbers.seconds = time.monotonic() - self._started
        return numbers

    # The end of a campaign.

    def _finish(self) -> None:
        self._measure_all()
        self._count()
        for name, before, after in (
            ("worker", self.numbers.before, self.numbers.after),
            ("front end", _with_pool(self.numbers.front_before), self.numbers.front_after),
        ):
            if before is not None and after is not None:
                _check_size(name, before, after)

    def _measure_all(self) -> None:
        """Measure the idle worker and front end. Store the sizes as `after`, and the first time also as `before`."""
        for client in self._good:
            client.hold(self._plan.patience)
        self._check_idle()
        numbers = self.numbers
        size = self._measure(self._process, numbers.before)
        front = None
        if self._front is not None:
            self._front.check_idle(self._plan.patience)
            front = self._measure(psutil.Process(self._front.pid), _with_pool(numbers.front_before))
        if numbers.before is None and numbers.messages >= self._plan.warm_up:
            numbers.before, numbers.front_before = size, front
        numbers.after, numbers.front_after = size, front
        for client in self._good:
            client.go_on()

    def _measure(self, process: psutil.Process, before: Size | None) -> Size:
        """Return the size of a process once the size is stable and back to `before`, or once `patience` is over."""
        deadline, last, size = time.monotonic() + self._plan.patience, None, _size(process)
        while not (size == last and _is_back(size, before)) and time.monotonic() < deadline:
            time.sleep(0.5)
            last, size = size, _size(process)
        return size

    def _check_idle(self) -> None:
        """Check that the worker holds nothing of the requests except kept results and images within their bounds.

        Requests of clients that have left wait for their images first.
        """
        self._await(lambda: not self._operator.ask("health")["requests"]["open"], self._what_is_missing)
        health = self._operator.ask("health")
        requests, limits = health["requests"], health["limits"]
        if (num_bytes := health["memory"]["images"]) > MAX_IMAGE_BYTES:
            raise Violation(f"the worker keeps {num_bytes} bytes of images, more than {MAX_IMAGE_BYTES}")
        if requests["open"] or requests["running"] or requests["waiting"] or health["memory"]["staging"]:
            raise Violation(f"the idle worker holds {requests} and {health['memory']['staging']} staged bytes")
        if requests["kept"] > limits["max_kept_results"]:
            raise Violation(f"the worker keeps {requests['kept']} results, more than {limits['max_kept_results']}")
        stats = self._operator.ask("stats")["engine"]
        self.numbers.preemptions = stats["preemptions"]
        if in_use := sum(pool["in_use"] for pool in stats["pools"]):
            raise Violation(f"the idle engine has {in_use} blocks in use")


def _size(process: psutil.Process) -> Size:
    return Size(process.num_threads(), process.num_fds(), process.memory_info().rss)


def _with_pool(size: Size | None) -> Size | None:
    """Return the size of a front end after its pool has started all threads."""
    return None if size is None else replace(size, threads=size.threads + POOL_THREADS)


def _is_back(size: Size, before: Size | None) -> bool:
    return before is None or (size.threads <= before.threads and size.descriptors <= before.descriptors)


def _check_size(name: str, before: Size, after: Size) -> None:
    if not _is_back(after, before):
        raise Violation(f"the {name} did not return to its threads and descriptors: {before}, then {after}")
    if after.rss > before.rss + RSS_GROWTH_BYTES:
        raise Violation(f"the {name} grew by more than {RSS_GROWTH_BYTES} bytes: {before}, then {after}")
