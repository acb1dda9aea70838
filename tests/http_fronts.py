"""HTTP front ends for tests. Each front end runs on a thread of this process, in front of any worker."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
from raw_http import Raw

from trueroll.rollout.http.clients import Clients, clients_of
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.http.server import listen, run
from trueroll.rollout.network.keys import OWNER

CHAT_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{{ '\\n' }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if thinks %}<think>{% endif %}"
)


@dataclass
class Front:
    """A running front end. `url`: the front end's address. `model`: name of the served model.

    Clients read no certificates, which would take longer than a request.
    """

    url: str
    model: str
    key: str = "none"

    def openai(self, **options: Any) -> openai.OpenAI:
        options.setdefault("http_client", openai.DefaultHttpxClient(verify=False))
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, **options)

    def post(self, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        headers.setdefault("Authorization", f"Bearer {self.key}")
        return httpx2.post(self.url + path, json=body, headers=headers, timeout=60, verify=False)

    def get(self, path: str, **headers: str) -> httpx2.Response:
        headers.setdefault("Authorization", f"Bearer {self.key}")
        return httpx2.get(self.url + path, headers=headers, timeout=60, verify=False)

    def delete(self, path: str, **headers: str) -> httpx2.Response:
        headers.setdefault("Authorization", f"Bearer {self.key}")
        return httpx2.delete(self.url + path, headers=headers, timeout=60, verify=False)

    def metric(self, name: str) -> float:
        """Return the value of a metric with one line."""
        lines = self.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])

    def wait_for(self, name: str, value: float, deadline: float = 60) -> None:
        """Wait until a metric with one line has this value."""
        end = time.monotonic() + deadline
        while (found := self.metric(name)) != value:
            assert time.monotonic() < end, f"{name} is {found}, not {value}"

    def raw(self) -> Raw:
        """Open a connection for arbitrary bytes, with a parser of the answers."""
        return Raw(self.connect(), self.key)

    def connect(self) -> socket.socket:
        """Open a plain socket to the front end."""
        address = urlsplit(self.url)
        assert address.hostname is not None and address.port is not None
        return socket.create_connection((address.hostname, address.port), timeout=60)


@contextmanager
def front_end(address: str, key: str | None = None, tracer: Any = None, **settings: Any) -> Iterator[Front]:
    """Run a front end of the worker at `address` on a thread. `tracer`: makes the spans of requests."""
    config = HttpConfig(address=address, port=0, **settings)
    clients = clients_of(config) if key is None else Clients({key.encode(): OWNER})
    ready, told = threading.Event(), []

    def on_ready(url: str, model: str) -> None:
        told.extend([url, model])
        ready.set()

    async def serve() -> None:
        nonlocal task
        task = asyncio.current_task()
        with listen(config) as listener:
            await run(config, clients, (None, None), listener, on_ready, tracer)

    task: asyncio.Task[None] | None = None
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run, args=(loop, serve()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield Front(*told, key=key or "none")
    finally:
        assert task is not None
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
        assert not thread.is_alive()


def _run(loop: asyncio.AbstractEventLoop, work: Any) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            runner.run(work)
        except asyncio.CancelledError:
            pass


def events(response: httpx2.Response) -> list[Any]:
    """Return the parsed data of a response's server-sent events. The last event, `[DONE]`, stays a string."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """Return the error of an answer, in OpenAI's form."""
    error = response.json()["error"]
    assert response.json().keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and len(error["message"]) < 1500
    return error
