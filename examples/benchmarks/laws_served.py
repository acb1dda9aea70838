"""The experiments of `laws_report.py` that start other processes: a worker, a front end, or a fleet.

Costs are CPU seconds or bytes of memory of the measured process.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from fleet_simulation import Workload, simulate
from laws_engine import MODEL, Costs, cpu_seconds, prompt, write_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from trueroll.rollout import AsyncRolloutClient, FleetClient, RolloutClient, SamplingParams, launch_worker

SETTINGS: dict[str, Any] = dict(device="cpu", num_threads=1, num_blocks=4096)
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
COMMAND = (sys.executable, "-P", "-c", "from trueroll.rollout.tools.program import main; main()", "http")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
AT_ONCE = 64
"""Requests that are open at the same time, whatever the number of connections."""
Measure = Callable[[int], Costs]


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    """Write a model with random weights, a tokenizer and a chat template."""
    write_model(folder, **changes)
    logging.disable_progress_bar()
    names = [*MODEL.keys() - {"architectures", "model_type", "torch_dtype", "rope_theta"}]
    config = LlamaConfig(**{name: (MODEL | changes)[name] for name in names}, architectures=MODEL["architectures"])
    with torch.device("cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="PreTrainedTokenizerFast")))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def cpu_of(pid: int) -> float:
    """Return the CPU time of a process so far, in seconds."""
    return time.clock_gettime((~pid << 3) | 2)


def cost_in(pid: int, call: Callable[[], object]) -> float:
    """Return the CPU time that another process spends while `call` runs."""
    before = cpu_of(pid)
    call()
    return cpu_of(pid) - before


@contextmanager
def front_end(address: str, *options: str) -> Iterator[tuple[str, int]]:
    """Run a front end of the worker at `address`, and yield its URL and its process id."""
    command = [*COMMAND, address, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as front:
        assert front.stdout is not None
        try:
            ready = front.stdout.readline()
            yield ready.split("url=")[1].split()[0], front.pid
        finally:
            front.terminate()


async def post(stream: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: str, body: Any) -> Any:
    """Send a request over a kept connection and return the JSON of its answer."""
    reader, writer = stream
    content = json.dumps(body).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    )
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    length = next(line.split(":")[1] for line in lines if line.lower().startswith("content-length"))
    answer = json.loads(await reader.readexactly(int(length)))
    if not 200 <= int(status.split()[1]) < 300:
        raise RuntimeError(f"{path}: {status}: {answer}")
    return answer


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(url)
    return await asyncio.open_connection(place.hostname, place.port, limit=2**24)


async def bounded(calls: list[Callable[[], Awaitable[object]]]) -> None:
    """Make all calls, at most `AT_ONCE` at the same time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(call: Callable[[], Awaitable[object]]) -> None:
        async with room:
            await call()

    await asyncio.gather(*map(one, calls))


@contextmanager
def clients() -> Iterator[Measure]:
    """Measure a worker's CPU time for `size` clients that connect, send one request each, and disconnect."""
    with tempfile.TemporaryDirectory() as folder:
        with launch_worker(str(write_checkpoint(Path(folder))), **SETTINGS) as worker:

            async def all_clients(size: int) -> None:
                async with AsyncExitStack() as stack:
                    found = [await stack.enter_async_context(AsyncRolloutClient(worker.address)) for _ in range(size)]
                    await bounded([lambda c=c: c.generate([[1, 2, 3]], PARAMS, seed=0) for c in found])

            def measure(size: int) -> Costs:
                return {"clients: of a worker": cost_in(worker.pid, lambda: asyncio.run(all_clients(size)))}

            measure(8)
            yield measure


@contextmanager
def connections() -> Iterator[Measure]:
    """Measure a front end's CPU time for `size` open HTTP connections, with one request on each connection."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        worker = stack.enter_context(launch_worker(str(write_checkpoint(Path(folder))), **SETTINGS))
        url, pid = stack.enter_context(front_end(worker.address))
        body = dict(prompt=[1, 2, 3], max_tokens=4, seed=0, ignore_eos=True)

        async def all_connections(size: int) -> None:
            found = [await connect(url) for _ in range(size)]
            await bounded([lambda c=c: post(c, "/v1/completions", body) for c in found])
            for _, writer in found:
                writer.close()

        def measure(size: int) -> Costs:
            return {"clients: of a front end": cost_in(pid, lambda: asyncio.run(all_connections(size)))}

        measure(8)
        yield measure


@contextmanager
def sessions() -> Iterator[Measure]:
    """Measure a front end's CPU time for `size` sessions with one answer each, and then for one session with `size //
    4` answers.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = write_checkpoint(Path(folder))
        worker = stack.enter_context(launch_worker(str(model), **SETTINGS | dict(num_blocks=2**15)))
        url, pid = stack.enter_context(front_end(worker.address))
        message = dict(role="user", content="What is next?")

        async def begin(stream: Any) -> str:
            sampling = dict(max_tokens=4, ignore_eos=True)
            answer = await post(stream, "/sessions", dict(seed=0, sampling_params=sampling))
            return f"/sessions/{answer['session_id']}"

        async def turn(stream: Any, session: str, messages: list[Any]) -> Any:
            answer = await post(stream, f"{session}/v1/chat/completions", dict(messages=messages))
            return answer["choices"][0]["message"]

        async def many(size: int) -> None:
            free = [await connect(url) for _ in range(min(size, AT_ONCE))]

            async def one() -> None:
                stream = free.pop()
                await turn(stream, await begin(stream), [message])
                free.append(stream)

            await bounded([one] * size)
            for _, writer in free:
                writer.close()

        async def one_long(size: int) -> None:
            stream = await connect(url)
            session, messages = await begin(stream), [message]
            for _ in range(size):
                messages += [await turn(stream, session, messages), message]
            stream[1].close()

        def measure(size: int) -> Costs:
            several = cost_in(pid, lambda: asyncio.run(many(size)))
            turns = cost_in(pid, lambda: asyncio.run(one_long(size // 4)))
            return {"sessions: one answer each": several, "sessions: answers of one": turns}

        measure(8)
        yield measure


@contextmanager
def fleet(largest: int) -> Iterator[Measure]:
    """Measure the CPU time of a fleet client that requests 512 groups from `size` workers."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = str(write_checkpoint(Path(folder)))
        workers = [stack.enter_context(launch_worker(model, **SETTINGS)) for _ in range(largest)]

        def measure(size: int) -> Costs:
            with FleetClient([worker.address for worker in workers[:size]]) as client:
                ask = [prompt(i, 32) for i in range(512)]
                client.generate(ask[:16], PARAMS, seed=0)
                return {"fleet: 512 groups": cpu_seconds(lambda: client.generate(ask, PARAMS, seed=1))}

        yield measure


def simulated(size: int) -> Costs:
    """Measure the placement of a group on one of `size` simulated workers, with the fleet client's own code."""
    return {"fleet: a simulated placement": simulate("this placement", Workload(max(500, 4 * size), 1), size, 1).cost}


def start(size: int) -> Costs:
    """Measure the start of a worker with `size` MB of bfloat16 weights."""
    with tempfile.TemporaryDirectory() as folder:
        changes = dict(
            hidden_size=512, intermediate_size=4608, num_attention_heads=8, num_key_value_heads=8, head_dim=64
        )
        model = write_checkpoint(Path(folder), num_hidden_layers=max(1, size // 16), **changes)
        num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        with (
            launch_worker(str(model), **SETTINGS | dict(num_blocks=64)) as worker,
            RolloutClient(worker.address) as client,
        ):
            client.generate([[1, 2, 3]], PARAMS, seed=0)
            seconds, memory = cpu_of(worker.pid), psutil.Process(worker.pid).memory_info().rss
    scale = size * 2**20 / num_bytes  # the weights are not exactly `size` MB
    return {"start: time": seconds * scale, "start: memory": memory * scale}
