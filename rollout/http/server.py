"""`trueroll http`: the process of the front end for a worker or a fleet.

Owns: the listening socket, and the client of the worker or the fleet. Guarantees: the front end listens before it
reports readiness. At a shutdown, open requests get `drain_seconds` to finish. Requests that are still open after
`drain_seconds` are cut. The front end outlives the worker, and connects to a new worker that listens at the same
address. If the front end is killed, the worker ends the requests of the front end.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from trueroll.errors import ConfigError

from ..client.client import AsyncRolloutClient
from ..client.membership import membership_of
from ..fleet.client import client_for
from ..network.keys import Key
from ..text import TextModel, model_served_here, needs_tokenizer, prepare_for_conversations
from ..tracing import exporting
from .accepting import Acceptor
from .agents.registry import Registry
from .app import make_app
from .clients import Clients, clients_of
from .config import HttpConfig
from .connections import Connections
from .guard import Counters
from .images import Images
from .lifecycle import Lifecycle, prepare_for_pushes
from .model import ServedModel
from .staging import Staging
from .texts import Texts
from .tinker.promises import Promises
from .watch import Watch

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

BACKLOG = 2048
M_MMAP_THRESHOLD = -3
"""The parameter of glibc's `mallopt` that sets the minimum block size for `mmap`."""
LARGE_BLOCK = 2**18
"""Minimum size, in bytes, of the memory blocks that glibc allocates with `mmap`."""
LOOK_SECONDS = 0.2
WORKER_SECONDS = 30.0
"""Timeout in seconds. If requests are pending and the worker sends nothing for this time, the worker is considered
lost.
"""

log = logging.getLogger(__name__)


def serve(config: HttpConfig, keys: tuple[Key | None, Key | None], on_ready: Callable[[str, str], None]) -> None:
    """Run the front end until SIGTERM or SIGINT. Call this function in the main thread, because only the main thread
    gets signals.

    `keys`: `server_public_key` and `client_key` for the worker. `on_ready`: called with the front end's URL and the
    model's name. Raise ConfigError if a setting is invalid, WorkerLostError if there is no worker, ModelError if the
    model has no tokenizer, and KeyboardInterrupt once a SIGINT has ended the front end.
    """
    clients = clients_of(config)
    members = membership_of(config.address).members()
    if config.tokenizer is None and any(member.address.startswith("tcp://") for member in members):
        raise needs_tokenizer(config.address)

    def settle(url: str, name: str) -> None:
        gc.freeze()  # otherwise each garbage collection would traverse all of transformers and delay requests
        on_ready(url, name)

    _map_large_blocks()
    with listen(config) as listener, exporting(config.otlp_traces_endpoint) as tracer:
        is_interrupted = asyncio.run(run(config, clients, keys, listener, settle, tracer))
    if is_interrupted:
        raise KeyboardInterrupt


def _map_large_blocks() -> None:
    """Make glibc allocate each large block with a separate `mmap`, so that the system gets back the memory of large
    request bodies.

    By default, glibc raises the minimum block size for `mmap` whenever a block from `mmap` is freed. With glibc's
    default, the process would keep hundreds of megabytes after the request bodies are freed.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # only glibc has mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


async def run(
    config: HttpConfig,
    clients: Clients,
    keys: tuple[Key | None, Key | None],
    listener: socket.socket,
    on_ready: Callable[[str, str], None],
    tracer: Tracer | None = None,
) -> bool:
    """Answer the requests that arrive at `listener`, until SIGTERM or SIGINT. Return whether the signal was SIGINT.

    `tracer`: makes the spans of requests. Other parameters and errors: see `serve`.
    """
    counters = Counters()
    async with client_for(
        config.address, WORKER_SECONDS, keys, while_connected=True, read_only=True, tracer=tracer
    ) as client:
        watch = Watch(client)
        served = await _meet(client, watch, config)
        lifecycle = Lifecycle(client, watch, config.address, keys, counters)
        registry = Registry(config)
        staging = Staging(lifecycle)
        promises = Promises(config) if config.tinker else None
        app = make_app(served, lifecycle, watch, config, clients, counters, registry, staging, tracer, promises)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        connections = Connections(app, config)
        counters.include(connections.collect)
        with closing(served.texts), closing(served.images):
            owners = [watch, registry] if promises is None else [watch, registry, promises]
            tasks = [asyncio.create_task(owner.run()) for owner in owners]
            try:
                return await _answer(listener, connections, config, lambda: on_ready(url, served.name))
            finally:
                await staging.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(
    listener: socket.socket, connections: Connections, config: HttpConfig, on_ready: Callable[[], None]
) -> bool:
    """Serve until SIGTERM or SIGINT. Return whether there was a SIGINT.

    After the first signal, give open requests up to `drain_seconds` to finish. A further SIGINT during this time cuts
    the open requests.
    """
    told = asyncio.Event()
    is_interrupted = False

    def end(hurries: bool) -> None:
        nonlocal is_interrupted
        is_interrupted |= hurries
        if told.is_set() and hurries:
            connections.hurry()
        told.set()

    seconds = 0.0
    with _signals(end):
        try:
            with Acceptor(listener, connections):
                on_ready()
                await told.wait()
            listener.close()  # from now on, the kernel refuses new clients
            seconds = config.drain_seconds
        finally:
            await connections.end(seconds)
    return is_interrupted


@contextmanager
def _signals(end: Callable[[bool], None]) -> Iterator[None]:
    """Context manager that calls `end(False)` at SIGTERM and `end(True)` at SIGINT.

    The context manager does nothing outside the main thread, because only the main thread gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number == signal.SIGINT)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _meet(client: AsyncRolloutClient, watch: Watch, config: HttpConfig) -> ServedModel:
    """Wait until the worker has loaded its model, and return this model as a `ServedModel`."""
    while (health := await client.health()).engine is None:
        await asyncio.sleep(LOOK_SECONDS)
    engine = health.engine
    prepare_for_conversations()
    prepare_for_pushes()
    model = config.tokenizer or model_served_here(health)
    return ServedModel(
        client=client,
        watch=watch,
        texts=Texts(TextModel(model)),
        images=Images(model, engine["max_images"], engine["max_image_patches"], config),
        name=config.model_name or str(engine["model"]),
        max_model_len=engine["max_model_len"],
        max_prompts=health.limits["max_queued_requests"],
        eos_token_ids=frozenset(engine["eos_token_ids"]),
        created=int(time.time()),
        max_text_chars=config.max_text_chars,
        max_answer_bytes=config.max_answer_bytes,
        vocab_size=engine["vocab_size"],
        route_bytes=engine["route_bytes"],
    )


def listen(config: HttpConfig) -> socket.socket:
    """Return a socket that listens on `config.host` and `config.port`. Raise ConfigError if listening fails."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"host: cannot listen on {config.host}:{config.port} ({error.strerror}); give an IP of this machine and a "
            "free port"
        ) from None
    return listener
