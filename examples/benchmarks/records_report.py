"""Report what large records cost a front end: `python examples/benchmarks/records_report.py MODEL`.

A record lists up to 128 tokens for each position of a sample or of a prompt. Each request asks for the records of 2,000
positions. For each kind of request, the report shows the length of the answer. The report sends several requests of
each kind, and shows for each request the longest time for which the front end's event loop was blocked. The report also
shows the peak memory of the front end, as `tracemalloc` counts it: the peak during the whole request, and the peak
after the worker's reply has arrived. The second peak also includes the frame of the reply, which ZMQ allocates and
`tracemalloc` does not count. MODEL: the folder of a model with a context of at least 2,100 tokens. The front end runs
in this process; the worker and the client have processes of their own.
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from trueroll.rollout import launch_worker
from trueroll.rollout.client.connection import Connection
from trueroll.rollout.http.clients import clients_of
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.http.server import listen, run

TOKENS, K, REPEATS = 2000, 128, 3
SAMPLING: dict[str, Any] = dict(max_tokens=TOKENS, ignore_eos=True, seed=1)
CLIENT = (
    "import sys, urllib.request as u; print(len(u.urlopen(u.Request(sys.argv[1], sys.stdin.buffer.read())).read()))"
)


def asked() -> dict[str, dict[str, Any]]:
    """Return the sampling parameters of each kind of request."""
    targets = np.random.default_rng(0).integers(0, 300, (TOKENS - 1, K)).tolist()
    prompt = dict(max_tokens=1, prompt_logprob_token_ids=targets)
    return {
        "no records": SAMPLING,
        "target_token_ids": SAMPLING | dict(target_token_ids=[*range(K)]),
        "return_sampling_mask": SAMPLING | dict(top_k=K, return_sampling_mask=True),
        "prompt_logprob_token_ids": prompt,
        "prompt_logprobs": dict(max_tokens=1, prompt_logprobs=K),
    }


class Front:
    """A front end on a thread of this process. `held`: the longest time for which the front end's event loop was
    blocked, in seconds.
    """

    def __init__(self, address: str) -> None:
        self.url, self.held = "", 0.0
        self._config = HttpConfig(address=address, port=0, max_body_elements=2**20)
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._ready.wait()

    def _on_ready(self, url: str, _: str) -> None:
        self.url = url
        self._ready.set()

    async def _serve(self) -> None:
        watching = asyncio.create_task(self._watch())
        with listen(self._config) as listener:
            await run(self._config, clients_of(self._config), (None, None), listener, self._on_ready)
        watching.cancel()

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0)
            self.held = max(self.held, time.perf_counter() - before)
            await asyncio.sleep(0.0005)


def requested(front: Front, sampling: dict[str, Any]) -> int:
    """Send a request from another process, and return the length of the answer."""
    prompt = [5 + i % 200 for i in range(8 if sampling["max_tokens"] > 1 else TOKENS)]
    body = json.dumps(dict(token_ids=prompt, sampling_params=sampling)).encode()
    command = [sys.executable, "-c", CLIENT, f"{front.url}/inference/v1/generate"]
    done = subprocess.run(command, input=body, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return int(done.stdout)


class Memory:
    """Measures the memory of a request with `tracemalloc`. `total`: the most bytes during the request. `of_reply`: the
    most bytes from the arrival of the longest frame on, including this frame.
    """

    def __init__(self) -> None:
        self.total = self.of_reply = 0
        self._before = self._length = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure until the context ends."""
        heard = Connection.heard
        with patch.object(Connection, "heard", lambda connection, frame: self._hear(connection, heard, frame)):
            tracemalloc.start()
            yield
            self._note_peak(0)
            tracemalloc.stop()

    def _hear(self, connection: Connection, heard: Callable[[Connection, memoryview], None], frame: memoryview) -> None:
        if len(frame) <= self._length:
            return heard(connection, frame)
        self._note_peak(0)
        self._length, self._before, self.of_reply = len(frame), tracemalloc.get_traced_memory()[0], 0
        heard(connection, frame)
        self._note_peak(len(frame))

    def _note_peak(self, num_uncounted: int) -> None:
        peak = tracemalloc.get_traced_memory()[1]
        self.total = max(self.total, peak)
        self.of_reply = max(self.of_reply, peak - self._before + num_uncounted)
        tracemalloc.reset_peak()


def main() -> None:
    columns = "memory, bytes", "memory / answer", "of the reply, bytes", "of the reply / answer"
    table = Table("request", "answer, bytes", "loop held, ms", *columns)
    with launch_worker(sys.argv[1], num_blocks=1024, max_unread_bytes=2**30) as worker:
        front = Front(worker.address)
        for name, sampling in asked().items():
            length = requested(front, sampling)
            held = list[float]()
            for _ in range(REPEATS):
                front.held = 0.0
                requested(front, sampling)
                held.append(1000 * front.held)
            memory = Memory()
            with memory.measured():
                requested(front, sampling)
            told = ", ".join(f"{each:.1f}" for each in held)
            sizes = [text for size in (memory.total, memory.of_reply) for text in (f"{size:,}", f"{size / length:.2f}")]
            table.add_row(name, f"{length:,}", told, *sizes)
    Console().print(table)


if __name__ == "__main__":
    main()
