"""A soak test: run many kinds of work at the same time, at full load, for an hour: `make soak`. Exits with 1 if a check
fails.

A worker with drafts serves a tiny model with a vision tower, with an HTTP front end in front of it. At the same time:

- groups, streams, scores, prompts with images, and sessions of agents, over ZMQ and over HTTP; some are aborted;
- canaries: the same request, sent over ZMQ, over HTTP and through a fleet, must get the same bits under the same
  weights;
- a trainer in another process pushes two sets of weights in turn, with `recompute` and with `keep`;
- the worker sleeps and wakes up;
- a client in another process, and a second worker, are killed with SIGKILL and started again.

The soak fails if a request does not get exactly one terminal reply, or if a canary's bits differ. The soak also fails
if the memory of the worker, the front end or the trainer grows by more than 1% after the first ten minutes, or if their
threads or open files increase. The soak also fails if the 99th percentile of latency in the last sixth of the soak
exceeds 1.2 times the 99th percentile in the first sixth. If the soak is shorter than 30 minutes, memory may grow in the
first third of the soak instead of in the first ten minutes.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

from laws_served import front_end  # noqa: E402
from soak_others import Others  # noqa: E402
from soak_records import Held, Records, draw, judge, percentile  # noqa: E402
from vision_processors import make_chat_model  # noqa: E402

from trueroll.engine.drafting.repeats import DEFAULT_BUDGET, least_bytes  # noqa: E402
from trueroll.errors import TruerollError, UnknownRequestError  # noqa: E402
from trueroll.rollout import (  # noqa: E402
    AsyncFleetClient,
    AsyncRolloutClient,
    RolloutClient,
    SamplingParams,
    launch_worker,
)
from trueroll.rollout.worker.process import raise_descriptor_limit  # noqa: E402

SETTINGS: dict[str, Any] = dict(device="cpu", num_threads=1, num_blocks=512, max_num_seqs=32, max_images=2)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text if part.type == 'text' else '[<500>]' }}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
DEADLINE = 120.0
"""Time, in seconds, after which a request without a terminal reply counts as lost."""
SLEEP_SECONDS = 15.0
"""Pause between sleeps of the worker."""
HELD_SECONDS = 1.0
FILLING_TOKENS = 64
LOADS = dict(groups=4, streams=3, aborts=2, scores=1, images=1, completions=2, events=1, pictures=1, agents=2)
"""The number of requests of each kind that are open at any time."""
CANARY = dict(prompt=[7, 8, 9, 10, 11, 12] * 6, seed=5)
CANARY_PARAMS = SamplingParams(n=2, max_tokens=24, ignore_eos=True)
Bits = tuple[tuple[tuple[int, ...], bytes], ...]


def bits_of(samples: list[tuple[Any, Any]]) -> Bits:
    """Return the bits of samples, given as pairs of token ids and log-probs."""
    return tuple((tuple(tokens), np.asarray(logprobs, np.float32).tobytes()) for tokens, logprobs in samples)


class Soak:
    """Sends the requests of a soak. `address`: address of the worker. `url`: URL of the worker's front end. `second`:
    address of the second worker.
    """

    def __init__(self, records: Records, address: str, url: str, second: str) -> None:
        self.records = records
        self.address, self.url, self.second = address, url, second
        self._start = time.monotonic()
        self._random = random.Random(0)
        self._numbers = itertools.count()
        self._bits: dict[int, Bits] = {}

    @property
    def now(self) -> float:
        return time.monotonic() - self._start

    @property
    def goes_on(self) -> bool:
        return self.now < self.records.seconds

    async def run(self) -> None:
        """Send requests until the end of the soak, and wait for all replies."""
        async with AsyncExitStack() as stack:
            self.client = await stack.enter_async_context(AsyncRolloutClient(self.address))
            self.fleet = await stack.enter_async_context(AsyncFleetClient([self.address, self.second]))
            loads = [self._load(kind) for kind, count in LOADS.items() for _ in range(count)]
            await asyncio.gather(*loads, self._load("canary"), self._sleeps())

    async def _load(self, kind: str) -> None:
        call: Callable[[int], Awaitable[None]] = getattr(self, f"_{kind}")
        while self.goes_on:
            number = next(self._numbers)
            begun, start = self.now, time.monotonic()
            self.records.sent[kind] += 1
            try:
                await asyncio.wait_for(call(number), DEADLINE)
                self.records.ended[kind] += 1
                self.records.latencies.setdefault(kind, []).append((begun, time.monotonic() - start))
            except TimeoutError:
                self._fault(f"{kind} {number}: no last reply within {DEADLINE:g} seconds")
            except (AssertionError, TruerollError, OSError, asyncio.IncompleteReadError) as error:
                self._fault(f"{kind} {number}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    def _fault(self, text: str) -> None:
        self.records.faults.append(f"{self.now:.0f} s: {text:.300}")

    def _prompt(self, number: int) -> list[int]:
        """Return a prompt that shares its beginning with other prompts."""
        rng = random.Random(number)
        return [*range(10, 10 + 16 * (number % 5)), *(rng.randrange(3, 400) for _ in range(rng.randrange(4, 60)))]

    def _params(self, n: int = 1, most: int = 40) -> SamplingParams:
        return SamplingParams(n=n, max_tokens=self._random.randrange(4, most), ignore_eos=True)

    async def _groups(self, number: int) -> None:
        groups = await self.client.generate([self._prompt(number)] * 2, self._params(4), seed=number)
        assert [len(group.samples) for group in groups] == [4, 4]

    async def _streams(self, number: int) -> None:
        """Read a stream, and check that the joined deltas of a sample agree with the finished sample. Close every third
        stream early.
        """
        params, parts, ended = self._params(2), dict[int, list[int]](), list[int]()
        leaves = number % 3 == 0
        async with aclosing(self.client.stream([self._prompt(number)], params, deltas=True, seed=number)) as pieces:
            async for _, piece in pieces:
                if hasattr(piece, "start"):
                    parts[piece.index] = parts.get(piece.index, [])[: piece.start] + [*piece.token_ids]
                    if leaves:
                        return
                else:
                    ended.append(piece.index)
                    known = parts.get(piece.index, [])
                    assert known == list(piece.token_ids)[: len(known)], "the deltas are not the sample"
        assert sorted(ended) == [0, 1], f"samples {ended} ended"

    async def _aborts(self, number: int) -> None:
        name = f"abort-{number}"
        task = asyncio.ensure_future(
            self.client.generate([self._prompt(number)], self._params(3, 200), seed=number, request_ids=[name])
        )
        await asyncio.sleep(self._random.random() * 0.05)
        with suppress(UnknownRequestError):
            await self.client.abort(name)
        [group] = await task
        assert len(group.samples) == 3

    async def _scores(self, number: int) -> None:
        tokens = self._prompt(number) + [3]
        [score] = await self.client.score([tokens])
        assert len(score.logprobs) == len(tokens) - 1

    def _picture(self, number: int) -> np.ndarray:
        rows, columns = [(24, 16), (16, 40), (32, 32)][number % 3]
        return np.random.default_rng(number % 20).integers(0, 256, (rows, columns, 3), np.uint8)

    async def _images(self, number: int) -> None:
        prompt = [5, 6, 500, 7, number % 300 + 3]
        [group] = await self.client.generate([prompt], self._params(2), media=[[self._picture(number)]], seed=number)
        assert len(group.samples) == 2

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        host, port = self.url.removeprefix("http://").rstrip("/").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**24)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def _exchange(self, method: str, path: str, body: Any = None) -> bytes:
        """Send a request, and return the body of the response."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        async with self._connection() as (reader, writer):
            writer.write(head.encode() + content)
            answer = await reader.read()
        head_of, _, found = answer.partition(b"\r\n\r\n")
        assert head_of.startswith(b"HTTP/1.1 20"), answer[:300]
        return found

    async def _ask(self, path: str, body: Any) -> Any:
        return json.loads(await self._exchange("POST", path, body))

    async def _completions(self, number: int) -> None:
        body = dict(prompt=self._prompt(number), n=2, max_tokens=16, seed=number, ignore_eos=True)
        answer = await self._ask("/v1/completions", body)
        assert len(answer["choices"]) == 2

    async def _events(self, number: int) -> None:
        body = dict(prompt=self._prompt(number), max_tokens=16, seed=number, ignore_eos=True, stream=True)
        found = await self._exchange("POST", "/v1/completions", body)
        assert found.count(b"[DONE]") == 1 and found.count(b'"finish_reason":"length"') == 1, found[-300:]

    async def _pictures(self, number: int) -> None:
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(self._picture(number)).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content = [dict(type="image_url", image_url=dict(url=url)), dict(type="text", text="What is this?")]
        body = dict(messages=[dict(role="user", content=content)], max_tokens=12, seed=number, ignore_eos=True)
        answer = await self._ask("/v1/chat/completions", body)
        assert len(answer["choices"]) == 1

    async def _agents(self, number: int) -> None:
        """Run a session of three turns. Every fourth session is not deleted at the end."""
        sampling = dict(max_tokens=8, ignore_eos=True)
        session = (await self._ask("/sessions", dict(seed=number, sampling_params=sampling)))["session_id"]
        messages = list[Any]()
        for turn in range(3):
            messages.append(dict(role="user", content=f"turn {turn} of {number}"))
            answer = await self._ask(f"/sessions/{session}/v1/chat/completions", dict(messages=messages))
            messages.append(answer["choices"][0]["message"])
        samples = json.loads(await self._exchange("GET", f"/sessions/{session}/samples"))["samples"]
        assert len(samples) >= 1
        if number % 4:
            await self._exchange("DELETE", f"/sessions/{session}")

    async def _canary(self, number: int) -> None:
        prompt, seed = CANARY["prompt"], CANARY["seed"]
        way = ("worker", "http", "fleet")[number % 3]
        if way == "http":
            body = dict(prompt=prompt, seed=seed, n=2, max_tokens=24, ignore_eos=True, logprobs=0)
            choices = (await self._ask("/v1/completions", body | dict(return_token_ids=True)))["choices"]
            samples = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
            spans = [span for choice in choices for span in choice["weight_versions"]]
            versions, mixed = {int(span["version"]) for span in spans}, any(choice.get("old_kv") for choice in choices)
        else:
            client = self.client if way == "worker" else self.fleet
            [group] = await client.generate([prompt], CANARY_PARAMS, seed=seed)
            samples = [(sample.token_ids, sample.logprobs) for sample in group.samples]
            versions = {span.version for sample in group.samples for span in sample.weight_versions}
            mixed = any(sample.old_kv for sample in group.samples)
        await asyncio.sleep(0.02)
        if len(versions) > 1 or mixed:
            self.records.done["canaries under mixed weights"] += 1
            return
        [version] = versions
        which = 0 if version == 0 else 1 + version % 2
        self.records.done[f"canaries, {way}"] += 1
        assert self._bits.setdefault(which, bits_of(samples)) == bits_of(samples), f"other bits, by {way}, of {version}"

    async def _sleeps(self) -> None:
        while self.goes_on:
            await asyncio.sleep(min(SLEEP_SECONDS, max(0.0, self.records.seconds - self.now)))
            try:
                await self.client.sleep(1)
                await self.client.wake_up()
                self.records.done["sleeps"] += 1
            except TruerollError as error:  # for example during a push
                self.records.done[f"sleeps refused: {type(error).__name__}"] += 1


def held(process: psutil.Process, now: float) -> Held:
    with process.oneshot():
        return Held(now, process.memory_info().rss, process.num_fds(), process.num_threads())


async def watch(soak: Soak, others: Others, processes: dict[str, psutil.Process]) -> None:
    """Until the end of the soak, record the memory, files and threads of `processes`, and kill the client and the
    second worker when they are due.
    """
    while soak.goes_on:
        for name, process in processes.items():
            soak.records.held.setdefault(name, []).append(held(process, soak.now))
        soak.records.done.update(await asyncio.to_thread(lambda: [*others.look(soak.now)]))
        await asyncio.sleep(HELD_SECONDS)


async def soak_all(soak: Soak, others: Others, processes: dict[str, psutil.Process]) -> None:
    await asyncio.gather(soak.run(), watch(soak, others, processes))


def fill_indexes(address: str) -> None:
    """Fill the worker's indexes of repeated text up to their memory budget, so that the indexes do not grow during the
    soak.
    """
    count = DEFAULT_BUDGET // least_bytes(FILLING_TOKENS)
    prompts = [[random.randrange(7, 400) for _ in range(FILLING_TOKENS)] for _ in range(count)]
    with RolloutClient(address) as client:
        client.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True), seed=0)


def wait_until_idle(address: str, faults: list[str]) -> None:
    """Add a fault if the worker still has an unfinished request `DEADLINE` seconds after the end of the soak."""
    deadline = time.monotonic() + DEADLINE
    with RolloutClient(address) as client:
        while (stats := client.stats().engine)["num_running"] + stats["num_waiting"]:
            if time.monotonic() > deadline:
                faults.append(f"the worker still has {stats['num_running']} running and {stats['num_waiting']} waiting")
                return
            time.sleep(0.2)


def summarize(console: Console, records: Records) -> None:
    """Print the counts of requests and other events, the resources of each process, and the latencies of requests."""
    done = records.sent + records.done
    console.print(", ".join(f"{name}: {count:,}" for name, count in done.items()), highlight=False)
    table = Table("process", "MiB after the warm-up", "at the end", "open files", "at the end", "threads", "at the end")
    for name, values in records.held.items():
        first = next((each for each in values if each.seconds >= records.warm), values[-1])
        ends = first, values[-1]
        cells = [f"{each.memory / 2**20:.1f}" for each in ends]
        cells += [str(each.descriptors) for each in ends] + [str(each.threads) for each in ends]
        table.add_row(name, *cells)
    console.print(table)
    latencies = Table("request", "count", "median ms", "99% in the first sixth", "99% in the last sixth")
    part = records.seconds / 6
    for kind, each in records.latencies.items():
        first, last = [t for at, t in each if at < part], [t for at, t in each if at >= records.seconds - part]
        shown = [f"{percentile(own, 0.99) * 1e3:.0f}" if own else "" for own in (first, last)]
        latencies.add_row(kind, f"{len(each):,}", f"{percentile([t for _, t in each], 0.5) * 1e3:.0f}", *shown)
    console.print(latencies)


def main(
    seconds: Annotated[float, typer.Option(min=10, help="Duration.")] = 3600.0,
    out: Annotated[Path, typer.Option(help="Folder for soak.json and soak.png.")] = Path("build/soak"),
) -> None:
    """Run everything at the same time, and check that nothing leaks, slows down or is lost."""
    console, records = Console(width=120), Records(seconds)
    raise_descriptor_limit()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = make_chat_model("qwen3_vl", Path(folder) / "model")
        (model / "chat_template.jinja").write_text(TEMPLATE)
        second = f"ipc://{folder}/second"
        worker = stack.enter_context(launch_worker(str(model), speculative="ngram", **SETTINGS))
        fill_indexes(worker.address)
        url, front = stack.enter_context(front_end(worker.address, "--session-seconds", "60"))
        others = Others(model, worker.address, second, SETTINGS)
        stack.callback(others.close)
        processes = dict(worker=worker.pid, front=front, trainer=others.trainer.pid)
        found = {name: psutil.Process(pid) for name, pid in processes.items()}
        asyncio.run(soak_all(Soak(records, worker.address, url, second), others, found))
        records.done.update(others.look(0.0))
        wait_until_idle(worker.address, records.faults)
    records.save(out / "soak.json")
    draw(records, out / "soak.png")
    summarize(console, records)
    if reasons := judge(records):
        console.print("FAILED:\n" + "\n".join(reasons), markup=False, highlight=False)
        raise typer.Exit(1)
    console.print("Nothing leaked, slowed down or was lost.")


if __name__ == "__main__":
    typer.run(main)
