"""Good requests, probes of `/health`, and the attacks of `attacks.py`, all at the same time on one front end.

A `Siege` attacks a running worker and front end. Owns:
- Good requests, which must give the tokens and log-probs that the worker gave before.
- A process with the prober, which requests `/health` 2 ms after each answer, each time on a new connection. The process
  does nothing else, so that its own work is not mistaken for a silence of the front end.
- A process with the attackers. The process runs at the lowest priority, because attackers on other machines would take
  no CPU time from this one.

Promises: all requests and both processes end with the siege.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil

from trueroll.rollout import RolloutClient, SamplingParams
from trueroll.rollout.text import LONG_CHARS

from .attacks import ATTACKS, COMPLETIONS, TOKENIZE, Target, run_attack

PROBE_PAUSE = 0.002
LOWEST_PRIORITY = 19
DEADLINE = 60.0
KEY = "key-of-the-siege"
COMMAND = (sys.executable, "-P", "-c", "from trueroll.rollout.tools.program import main; main()", "http")
Bits = tuple[list[int], bytes]
"""Token ids, and log-probs as the bytes of float32."""


@contextmanager
def front_end(address: str, log: Path, *options: str) -> Iterator[tuple[int, int]]:
    """Run a front end of the worker at `address`, with the key `KEY`, and yield its port and its process id.

    Logs to `log`. Raises AssertionError if the front end exits with an error.
    """
    with log.open("wb") as stderr:
        front = subprocess.Popen(
            [*COMMAND, address, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"TRUEROLL_HTTP_API_KEY": KEY},
        )
    with front:
        try:
            assert front.stdout is not None
            ready = front.stdout.readline()
            assert ready.startswith("ready"), log.read_text()
            yield urlsplit(ready.split("url=")[1].split()[0]).port or 0, front.pid
        finally:
            front.terminate()
            code = front.wait(DEADLINE)
    assert code == 0, f"the front end exited with {code}: {log.read_text()}"


@dataclass(frozen=True)
class Plan:
    """`seconds`: duration of each part (good requests alone, or under attack). `attackers`, `good`: number of
    connections. `pause`: seconds between two attacks of one attacker.
    """

    seconds: float
    attackers: int
    good: int = 8
    pause: float = 1.0
    max_tokens: int = 16
    seed: int = 0


@dataclass
class Seen:
    """Observations during good requests. `silences`: for each probe of `/health`, the seconds until its answer."""

    requests: int = 0
    seconds: float = 0.0
    silences: list[float] = field(default_factory=list)
    ended: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Good requests per second."""
        return self.requests / self.seconds


@dataclass(frozen=True)
class Held:
    """Resources of a front end: memory in bytes, open descriptors, child processes, open requests."""

    memory: int
    descriptors: int
    children: int
    open_requests: float

    def has_no_more_than(self, before: Held) -> bool:
        """Return whether there are at most as many descriptors and child processes as in `before`."""
        return self.children <= before.children and self.descriptors <= before.descriptors


class Siege:
    """A siege of the front end with process id `pid`, in front of the worker at `address`."""

    def __init__(self, plan: Plan, target: Target, pid: int, address: str) -> None:
        self._plan, self._target = plan, target
        self._front, self._address = psutil.Process(pid), address
        prompts = [[1 + i, 2, 3 + i] for i in range(2 * plan.good)]
        params = SamplingParams(max_tokens=plan.max_tokens, ignore_eos=True)
        with RolloutClient(address) as client:
            groups = [client.generate([prompt], params, seed=i)[0] for i, prompt in enumerate(prompts)]
        self._expected = [_bits(group.samples[0].token_ids, group.samples[0].logprobs) for group in groups]
        self._bodies = [
            json.dumps(
                dict(prompt=prompt, seed=i, max_tokens=plan.max_tokens, ignore_eos=True, logprobs=0)
                | dict(return_token_ids=True)
            ).encode()
            for i, prompt in enumerate(prompts)
        ]

    def held(self) -> Held:
        """Return the front end's current resources."""
        return Held(
            self._front.memory_info().rss,
            self._front.num_fds(),
            len(self._front.children(recursive=True)),
            self._metric("trueroll_http_open_requests"),
        )

    def settled(self) -> Held:
        """Return the front end's resources once no other connection is open and both tokenizer processes run. The two
        processes, for short and for long texts, start and stop on demand. Raise AssertionError after a minute.
        """
        deadline = time.monotonic() + DEADLINE
        while (count := self._metric("trueroll_http_connections")) > 1:
            assert time.monotonic() < deadline, f"{count} connections stay open"
            time.sleep(0.1)
        for text in ("x", "x" * (LONG_CHARS + 1)):
            answer = self._exchange(f"POST {TOKENIZE}", json.dumps(dict(prompt=text)).encode())
            assert answer.startswith("HTTP/1.1 200 "), answer
        return self.held()

    def alone(self) -> Seen:
        """Run good requests and the prober without an attack."""
        with _child(_probe_in_child, self._plan.seconds, self._target.port) as prober:
            seen = asyncio.run(self._good())
            assert prober.poll(DEADLINE), "the prober got no answer"
            seen.silences = prober.recv()
            return seen

    def attacked(self) -> Seen:
        """Run good requests under attack."""
        with _child(_attack_in_child, self._plan, self._target) as attackers:
            seen = self.alone()
            assert attackers.poll(DEADLINE + self._target.patience)
            seen.ended = attackers.recv()
            return seen

    def wait_until_idle(self, before: Held) -> Held:
        """Wait at most a minute until no request is open, and there are at most as many descriptors and child processes
        as in `before`. Return the resources.
        """
        deadline = time.monotonic() + DEADLINE
        while True:
            now = self.held()
            if now.has_no_more_than(before) and now.open_requests == 0 or time.monotonic() > deadline:
                return now
            time.sleep(0.1)

    async def _good(self) -> Seen:
        seen = Seen()
        start = time.perf_counter()
        until = start + self._plan.seconds
        await asyncio.gather(*(self._ask(seen, i, until) for i in range(self._plan.good)))
        seen.seconds = time.perf_counter() - start
        return seen

    async def _ask(self, seen: Seen, first: int, until: float) -> None:
        """Send good requests, one after the other on a kept connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target.port, limit=2**24)
        number = first
        with contextlib.closing(writer):
            while time.perf_counter() < until:
                which = number % len(self._bodies)
                status, answer = await self._post(reader, writer, self._bodies[which])
                assert status == 200, answer
                choice = answer["choices"][0]
                found = _bits(choice["token_ids"], choice["logprobs"]["token_logprobs"])
                assert found == self._expected[which], "a good request has other bits under attack"
                seen.requests += 1
                number += self._plan.good

    async def _post(self, reader: Any, writer: Any, body: bytes) -> tuple[int, Any]:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._target.key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return await _answer(reader)

    def _exchange(self, asked: str, body: bytes = b"") -> str:
        """Send one request on a new connection and return the whole answer."""
        head = (
            f"{asked} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._target.key}\r\nConnection: close\r\n"
        )
        with socket.create_connection(("127.0.0.1", self._target.port), timeout=DEADLINE) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            return b"".join(iter(lambda: connection.recv(2**16), b"")).decode()

    def _metric(self, name: str) -> float:
        text = self._exchange("GET /metrics")
        return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))


def spread(values: list[float]) -> Iterator[str]:
    """Yield median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(values)
    for value in (statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]):
        yield f"{value * 1e3:.1f}"


async def _answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    return int(status.split()[1]), json.loads(await reader.readexactly(int(headers["content-length"])))


def _bits(token_ids: Any, logprobs: Any) -> Bits:
    return list(token_ids), np.asarray(logprobs, np.float32).tobytes()


@contextmanager
def _child(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run `work(*arguments, pipe)` in a process, and yield the pipe's other end once the process is ready."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(*arguments, writer), daemon=True)
    process.start()
    writer.close()
    try:
        assert reader.recv() == "ready"
        yield reader
        process.join(DEADLINE)
    finally:
        process.kill()
        process.join()


def _attack_in_child(plan: Plan, target: Target, pipe: Connection) -> None:
    os.nice(LOWEST_PRIORITY)
    pipe.send("ready")
    pipe.send(asyncio.run(_attack(plan, target)))


def _probe_in_child(seconds: float, port: int, pipe: Connection) -> None:
    """Request `/health` repeatedly, each time on a new connection, as a load balancer does. Every request must be
    answered.
    """
    pipe.send("ready")
    silences, until = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(2**16), b""))
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        silences.append(time.perf_counter() - start)
        time.sleep(PROBE_PAUSE)
    pipe.send(silences)


async def _attack(plan: Plan, target: Target) -> dict[str, Counter[str]]:
    ended = {attack.__name__: Counter[str]() for attack in ATTACKS}
    until = time.monotonic() + plan.seconds

    async def one(number: int) -> None:
        generator = random.Random(plan.seed * 10_000 + number)
        await asyncio.sleep(generator.random() * plan.pause)
        turn = number
        while time.monotonic() < until:
            attack = ATTACKS[turn % len(ATTACKS)]
            ended[attack.__name__][await run_attack(attack, target, turn // len(ATTACKS))] += 1
            turn += 1
            await asyncio.sleep(plan.pause)

    await asyncio.gather(*map(one, range(plan.attackers)))
    return ended
