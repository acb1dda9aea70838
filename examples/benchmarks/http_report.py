"""Report what HTTP costs compared with the client: `python examples/benchmarks/http_report.py [MODEL]`.

The report requests the same samples from one worker alternately through `AsyncRolloutClient` and over HTTP. The report
measures groups of samples in one request, many concurrent requests for one sample each, streams, and small requests on
kept and on new connections. Every HTTP response must have the same tokens and log-prob bits as the client's result.
Then the report holds many connections open, sends many malformed requests at the same time as valid requests, and runs
many sessions of agents at once.

The report has its own HTTP client, so that no HTTP library is measured. The front end and the report share the cores
with the worker, as a trainer on the same machine would.
"""

import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from trueroll.rollout import AsyncRolloutClient, SamplingParams, launch_worker
from trueroll.rollout.tools.bench import WORKLOADS, Workload

REPEATS = 5
FIRST_TOKENS = 20
SMALL_REQUESTS = 100
GROUP = WORKLOADS["group"][0]
SINGLES = Workload("singles", 64, 0, 128, 1, 128, 1.0)
GOOD = Workload("good", 32, 0, 32, 1, 32, 1.0)
CONNECTIONS = 1000
MALFORMED = 10_000
SENDERS = 8
SESSIONS, TURNS, TURN_TOKENS = 1000, 3, 16
NUM_BLOCKS = 2048
MEBIBYTE = 2**20
READ_BYTES = 2**16
EVENT_CHUNK = re.compile(rb"[0-9a-f]+\r\ndata: (.*)\n\n\r\n")
"""Matches the data of an event. The size of a chunk is not needed: the front end writes each event as one chunk, and
the JSON of an event has no line breaks.
"""
LAST_CHUNK = b"0\r\n\r\n"
PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
Sample = tuple[list[int], bytes]
"""Token ids, and log-probs as the bytes of float32."""
Asked = tuple[list[list[int]], SamplingParams]
Ask = Callable[[list[list[int]], SamplingParams], Awaitable[list[Sample]]]


class Connection:
    """A keep-alive connection to a server, for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> "Connection":
        address = urlsplit(url)
        return cls(*await asyncio.open_connection(address.hostname, address.port, limit=2**24))

    async def ask(self, path: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON body of the response."""
        status, length = await self.send(path, body)
        assert length is not None
        return status, json.loads(await self.reader.readexactly(length))

    async def events(self, path: str, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the data of the response's server-sent events."""
        status, length = await self.send(path, body)
        assert status == 200 and length is None
        data = b""
        while data != LAST_CHUNK:
            data += await self.reader.read(READ_BYTES)
            while (event := EVENT_CHUNK.match(data)) is not None:
                data = data[event.end() :]
                if event[1] != b"[DONE]":
                    yield json.loads(event[1])

    async def send(self, path: str, body: bytes, method: bytes = b"") -> tuple[int, int | None]:
        """Send a request and read the head of the response. Return the status, and the length of the body if the head
        gives it. `method`: by default POST with a body, and GET without one.
        """
        method = method or (b"POST" if body else b"GET")
        head = b"%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (method, path.encode(), len(body))
        self.writer.write(head + body)
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        length = headers.get("content-length")
        return int(status.split()[1]), None if length is None else int(length)

    def close(self) -> None:
        self.writer.close()


class Http:
    """Requests samples from the front end over keep-alive connections."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.connections: list[Connection] = []

    async def connect(self) -> None:
        """Reopen all connections, because the front end closes idle connections after a while."""
        for connection in self.connections:
            connection.close()
        self.connections = [await Connection.open(self.url) for _ in range(SINGLES.num_prompts)]

    async def group(self, prompts: list[list[int]], params: SamplingParams) -> list[Sample]:
        """Request all samples in one request."""
        status, answer = await self.connections[0].ask(PATHS[0], body_of(prompts, params))
        assert status == 200, answer
        return [sample_of([choice]) for choice in answer["choices"]]

    async def singles(self, prompts: list[list[int]], params: SamplingParams) -> list[Sample]:
        """Send a request for each prompt, all concurrently."""
        samples = await asyncio.gather(*map(self.single, self.connections, bodies(prompts, params)))
        return list(samples)

    async def single(self, connection: Connection, body: bytes) -> Sample:
        status, answer = await connection.ask(PATHS[0], body)
        assert status == 200, answer
        return sample_of(answer["choices"])

    async def streams(self, prompts: list[list[int]], params: SamplingParams) -> list[Sample]:
        """Open a stream for each prompt, all concurrently."""
        samples = await asyncio.gather(*map(self.stream, self.connections, bodies(prompts, params, stream=True)))
        return list(samples)

    async def stream(self, connection: Connection, body: bytes) -> Sample:
        return sample_of([choice async for event in connection.events(PATHS[0], body) for choice in event["choices"]])

    async def first_token(self, prompt: list[int], params: SamplingParams) -> None:
        """Read a stream up to its first event and close its connection."""
        connection = await Connection.open(self.url)
        async with aclosing(connection.events(PATHS[0], body_of([prompt], params, stream=True))) as events:
            assert (await anext(events))["choices"][0]["token_ids"]
        connection.close()


class Client:
    """Requests samples directly from the worker, without HTTP."""

    def __init__(self, client: AsyncRolloutClient) -> None:
        self.client = client

    async def group(self, prompts: list[list[int]], params: SamplingParams) -> list[Sample]:
        groups = await self.client.generate(prompts, params, seed=0)
        return [bits_of(sample.token_ids, sample.logprobs) for group in groups for sample in group.samples]

    async def singles(self, prompts: list[list[int]], params: SamplingParams) -> list[Sample]:
        groups = await asyncio.gather(*(self.group([prompt], params) for prompt in prompts))
        return [sample for group in groups for sample in group]

    async def streams(self, prompts: list[list[int]], params: SamplingParams) -> list[Sample]:
        return list(await asyncio.gather(*(self.stream(prompt, params) for prompt in prompts)))

    async def stream(self, prompt: list[int], params: SamplingParams) -> Sample:
        pieces = [piece async for _, piece in self.client.stream([prompt], params, deltas=True, seed=0)]
        return bits_of(pieces[-1].token_ids, pieces[-1].logprobs)

    async def first_token(self, prompt: list[int], params: SamplingParams) -> None:
        async with aclosing(self.client.stream([prompt], params, deltas=True, seed=0)) as pieces:
            assert (await anext(pieces))[1].token_ids


def body_of(prompts: list[list[int]], params: SamplingParams, stream: bool = False) -> bytes:
    """Return the body of a completions request with log-probs and token ids."""
    sampling = dict(n=params.n, max_tokens=params.max_tokens, temperature=params.temperature, ignore_eos=True, seed=0)
    return json.dumps(dict(prompt=prompts, logprobs=0, return_token_ids=True, stream=stream, **sampling)).encode()


def bodies(prompts: list[list[int]], params: SamplingParams, stream: bool = False) -> list[bytes]:
    return [body_of([prompt], params, stream) for prompt in prompts]


def sample_of(choices: Sequence[dict[str, Any]]) -> Sample:
    """Return the sample of one choice, joined from the pieces that arrived."""
    token_ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    logprobs = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    return bits_of(token_ids, logprobs)


def bits_of(token_ids: list[int], logprobs: Any) -> Sample:
    return token_ids, np.asarray(logprobs, np.float32).tobytes()


@dataclass
class Bench:
    """A worker with a client and a front end."""

    console: Console
    client: Client
    http: Http
    front: psutil.Process
    worker: psutil.Process
    vocab_size: int

    async def seconds(self, action: Awaitable[Any]) -> tuple[float, Any]:
        """Run `action` with an empty prefix cache. Return the duration of `action` in seconds, and its result."""
        await self.client.client.invalidate_prefix_cache()
        start = time.perf_counter()
        result = await action
        return time.perf_counter() - start, result

    def asked(self, workload: Workload) -> Asked:
        fields = dict(n=workload.n, max_tokens=workload.max_tokens, temperature=workload.temperature)
        return workload.prompts(self.vocab_size).tolist(), SamplingParams(**fields, ignore_eos=True)

    async def report_throughput(self) -> None:
        table = Table("workload", "client: tokens/s", "HTTP: tokens/s", "ratio", "front end: CPU ms a request")
        for name, workload, by_client, by_http in (
            ("group", GROUP, self.client.group, self.http.group),
            (f"{SINGLES.num_prompts} singles", SINGLES, self.client.singles, self.http.singles),
            (f"{SINGLES.num_prompts} streams", SINGLES, self.client.streams, self.http.streams),
        ):
            asked = self.asked(workload)
            _, *runs = [
                await self.compare(asked, by_client, by_http) for _ in range(REPEATS + 1)
            ]  # warm-up: the first request is slower
            count = workload.num_samples * workload.max_tokens
            ours, theirs, cpu = zip(*runs, strict=True)
            ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
            cpu_ms = statistics.median(cpu) * 1e3 / (1 if name == "group" else workload.num_prompts)
            speeds = [spread([count / seconds for seconds in side]) for side in (ours, theirs)]
            table.add_row(name, *speeds, f"{ratio:.3f}", f"{cpu_ms:.1f}")
        self.console.print(table)

    async def compare(self, asked: Asked, by_client: Ask, by_http: Ask) -> tuple[float, float, float]:
        """Request the same samples through the client and over HTTP. Return the seconds through the client, the seconds
        over HTTP, and the front end's CPU seconds.
        """
        ours, expected = await self.seconds(by_client(*asked))
        await self.http.connect()
        before = cpu_seconds(self.front)
        theirs, samples = await self.seconds(by_http(*asked))
        assert samples == expected, "HTTP gave other tokens or bits than the client"
        return ours, theirs, cpu_seconds(self.front) - before

    async def report_first_token(self) -> None:
        [prompt, *_], params = self.asked(SINGLES)
        by_client, by_http = [], []
        for _ in range(FIRST_TOKENS):
            by_client.append((await self.seconds(self.client.first_token(prompt, params)))[0] * 1e3)
            by_http.append((await self.seconds(self.http.first_token(prompt, params)))[0] * 1e3)
        more = statistics.median(by_http) - statistics.median(by_client)
        self.console.print(
            f"first token: {spread(by_client)} ms by the client, {spread(by_http)} ms by HTTP: {more:+.1f} ms"
        )

    async def report_small(self) -> None:
        """Time requests for one token, alternately through the client, over a kept connection, and over a new
        connection.
        """
        [prompt, *_], params = self.asked(SINGLES)
        params = params.model_copy(update={"max_tokens": 1})
        body = body_of([prompt], params)
        kept = await Connection.open(self.http.url)
        times: dict[str, list[float]] = {"client": [], "kept": [], "new": []}
        for _ in range(SMALL_REQUESTS):
            times["client"].append((await self.seconds(self.client.group([prompt], params)))[0] * 1e3)
            times["kept"].append((await self.seconds(self.http.single(kept, body)))[0] * 1e3)
            times["new"].append((await self.seconds(self.on_new_connection(body)))[0] * 1e3)
        kept.close()
        more = statistics.median(one - other for one, other in zip(times["kept"], times["client"], strict=True))
        self.console.print(
            f"a small request: {spread(times['client'])} ms by the client, {spread(times['kept'])} ms on a kept "
            f"connection ({more:+.1f} ms, median of pairs), {spread(times['new'])} ms on a new one"
        )

    async def on_new_connection(self, body: bytes) -> None:
        connection = await Connection.open(self.http.url)
        await self.http.single(connection, body)
        connection.close()

    async def report_connections(self) -> None:
        """Hold many connections open. Send a request on each connection in turn, before and after other valid
        requests, and send requests on all connections concurrently.
        """
        prompts, params = self.asked(GOOD)
        expected = await self.client.singles(prompts, params)
        await self.http.connect()
        opened = await asyncio.gather(*(Connection.open(self.http.url) for _ in range(CONNECTIONS)))
        served = [await connection.ask("/v1/models", b"") for connection in opened]
        assert await self.http.singles(prompts, params) == expected
        few = params.model_copy(update={"max_tokens": 2})
        asked = [prompts[number % len(prompts)] for number in range(CONNECTIONS)]
        told = await asyncio.gather(*map(self.http.single, opened, bodies(asked, few)))
        assert [token_ids for token_ids, _ in told] == [
            expected[number % len(prompts)][0][:2] for number in range(CONNECTIONS)
        ]
        served += [await connection.ask("/v1/models", b"") for connection in opened]
        assert all(status == 200 for status, _ in served)
        for connection in opened:
            connection.close()
        self.console.print(
            f"{CONNECTIONS:,} connections held open; all answered one by one before and after good "
            "requests, then all concurrently"
        )

    async def report_malformed(self) -> None:
        """Send malformed requests at the same time as valid requests."""
        prompts, params = self.asked(GOOD)
        expected = await self.client.singles(prompts, params)
        generator = random.Random(0)
        await self.flood(generator, MALFORMED // 10)  # warm-up: at first, memory grows
        before = [rss(self.front), rss(self.worker)]
        flood = asyncio.create_task(self.flood(generator, MALFORMED))
        await self.http.connect()
        rounds = 0
        while not flood.done():
            assert await self.http.singles(prompts, params) == expected
            rounds += 1
        await flood
        await asyncio.sleep(1)
        after = [rss(self.front), rss(self.worker)]
        self.console.print(
            f"{MALFORMED:,} malformed requests, all refused; alongside, {rounds} x {len(prompts)} good requests gave "
            f"the same samples as without them; memory before and after: front end {before[0]:.1f} and {after[0]:.1f} "
            f"MiB, worker {before[1]:.1f} and {after[1]:.1f} MiB"
        )

    async def report_sessions(self) -> None:
        """Run many sessions at once, each on its own connection. The tokens of each turn begin with all tokens of the
        previous turn.
        """
        await self.http.connect()
        connections = await asyncio.gather(*(Connection.open(self.http.url) for _ in range(SESSIONS)))
        before, cpu = rss(self.front), cpu_seconds(self.front)
        start = time.perf_counter()
        begun = await asyncio.gather(*(begin_session(each, seed) for seed, each in enumerate(connections)))
        times = await asyncio.gather(*map(talk, connections, begun))
        seconds, cpu = time.perf_counter() - start, cpu_seconds(self.front) - cpu
        told = [(await each.ask(f"/sessions/{id}", b""))[1] for each, id in zip(connections, begun, strict=True)]
        assert [each["num_messages"] for each in told] == [2 * TURNS] * SESSIONS
        kibibytes, after = sum(each["num_bytes"] for each in told) / SESSIONS / 2**10, rss(self.front)
        await asyncio.gather(*(end_session(*pair) for pair in zip(connections, begun, strict=True)))
        for connection in connections:
            connection.close()
        turns = [1e3 * each for spent in times for each in spent]
        self.console.print(
            f"{SESSIONS:,} sessions of {TURNS} turns at once in {seconds:.1f} s, a turn in {spread(turns)} ms with "
            f"{1e3 * cpu / SESSIONS / TURNS:.1f} ms of CPU time in the front end; {kibibytes:.1f} KiB a session; front "
            f"end: {before:.1f} MiB before, {after:.1f} with all sessions, {rss(self.front):.1f} without them"
        )

    async def flood(self, generator: random.Random, count: int) -> None:
        """Send malformed requests on several connections. The front end must refuse each malformed request."""
        requests = iter([(PATHS[number % len(PATHS)], malformed(generator)) for number in range(count)])

        async def send() -> None:
            connection = await Connection.open(self.http.url)
            for path, body in requests:
                status, answer = await connection.ask(path, body)
                assert status == 400 and answer["error"]["message"], answer
            connection.close()

        await asyncio.gather(*(send() for _ in range(SENDERS)))


async def begin_session(connection: Connection, seed: int) -> str:
    """Begin a session, and return its id."""
    settings = dict(seed=seed, sampling_params=dict(max_tokens=TURN_TOKENS, ignore_eos=True))
    status, told = await connection.ask("/sessions", json.dumps(settings).encode())
    assert status == 200, told
    return told["session_id"]


async def talk(connection: Connection, session: str) -> list[float]:
    """Run the turns of a session. Return the seconds that each turn took."""
    path, times = f"/sessions/{session}/v1/chat/completions", []
    question, tokens = dict(role="user", content="Tell me more."), list[int]()
    history: list[dict[str, Any]] = [question]
    for _ in range(TURNS):
        start = time.perf_counter()
        status, told = await connection.ask(path, json.dumps(dict(messages=history, return_token_ids=True)).encode())
        times.append(time.perf_counter() - start)
        assert status == 200, told
        assert told["prompt_token_ids"][: len(tokens)] == tokens, "a turn does not continue the turn before"
        [choice] = told["choices"]
        tokens = told["prompt_token_ids"] + choice["token_ids"]
        history += [choice["message"], question]
    return times


async def end_session(connection: Connection, session: str) -> None:
    status, length = await connection.send(f"/sessions/{session}", b"", b"DELETE")
    assert status == 200 and length is not None
    await connection.reader.readexactly(length)


def malformed(generator: random.Random) -> bytes:
    """Return a body that every endpoint refuses: cut off, not JSON, with unknown fields, or with an invalid value."""
    body = b'{"prompt": [1, 2, 3], "max_tokens": 4, "seed": 1, "logprobs": 1}'
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: body[: generator.randrange(1, len(body))],
        lambda: generator.randbytes(generator.randrange(1, 300)) + b"\xff",
        lambda: b"[" * generator.randrange(1, 20_000),
        lambda: json.dumps({f"field{generator.randrange(10**9)}": 1}).encode(),
        lambda: b'{"prompt": "\\ud800", "messages": 3, "token_ids": "x"}',
        lambda: json.dumps(dict(prompt=[-1] * generator.randrange(1, 1000), messages=[], token_ids=[-1])).encode(),
    )
    return generator.choice(kinds)()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def rss(process: psutil.Process) -> float:
    return process.memory_info().rss / MEBIBYTE


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.1f} ({min(values):,.1f} to {max(values):,.1f})"


async def report(console: Console, address: str, worker_pid: int, url: str, front_pid: int) -> None:
    async with AsyncRolloutClient(address) as client:
        engine = (await client.health()).engine
        assert engine is not None
        http = Http(url)
        bench = Bench(
            console, Client(client), http, psutil.Process(front_pid), psutil.Process(worker_pid), engine["vocab_size"]
        )
        await bench.report_throughput()
        await bench.report_first_token()
        await bench.report_small()
        await bench.report_connections()
        await bench.report_malformed()
        await bench.report_sessions()


def main(model: str = "smollm2") -> None:
    console = Console()
    command = [sys.executable, "-P", "-c", "from trueroll.rollout.tools.program import main; main()", "http"]
    with launch_worker(model, device="cpu", num_blocks=NUM_BLOCKS) as worker:
        front = subprocess.Popen([*command, worker.address, "--port", "0"], stdout=subprocess.PIPE, text=True)
        try:
            assert front.stdout is not None
            url = front.stdout.readline().split("url=")[1].split()[0]
            console.print(f"{model}, worker at {worker.address}, front end at {url}")
            asyncio.run(report(console, worker.address, worker.pid, url, front.pid))
        finally:
            front.terminate()
            front.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
