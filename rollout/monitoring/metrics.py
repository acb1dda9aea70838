"""`/metrics` for Prometheus and `/healthz`, over HTTP on loopback.

Owns: a listening socket on 127.0.0.1, and the connections and threads behind it. They are bounded in number and in
time, whatever clients do, and `close` ends them. Does not own what it tells: it asks others, whose answers must be
there at once, so that neither a long step nor a stuck one ever keeps a scrape waiting.
docs/operations.md describes every metric; a test compares the two.
"""

from __future__ import annotations

import json
import logging
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from itertools import accumulate
from socket import SHUT_RDWR, SHUT_WR, socket
from time import monotonic, sleep
from typing import Any, Protocol, TypeVar, get_args
from urllib.parse import urlsplit

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from trueroll.errors import ConfigError, TruerollError

from ...engine.request import FinishReason
from .. import protocol
from .expert_load import expert_tokens, imbalance
from .timings import BOUNDS, Histogram, Timings

HOST = "127.0.0.1"
MAX_CONNECTIONS = 16
"""How many clients are served at once. One more is served in place of the oldest."""
REQUEST_SECONDS = 10.0
"""How long a connection may last, from its first moment until its one request is answered and read."""
POLL_SECONDS = 0.1

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)

log = logging.getLogger(__name__)


class Source(Protocol):
    """What a worker tells about itself, from any thread, without waiting for anything."""

    def health(self) -> protocol.Health: ...

    def stats(self) -> protocol.Stats: ...

    def timings(self) -> Timings: ...


class Healthy(Protocol):
    """What `/healthz` asks, from any thread, without waiting for anything."""

    def health(self) -> protocol.Health: ...


class Collector(Protocol):
    """What `/metrics` asks, from any thread, without waiting for anything."""

    def collect(self) -> Iterator[Metric]: ...


def exposition(registry: CollectorRegistry, accepted: str) -> tuple[str, bytes]:
    """Prometheus' page, and its content type before it: as `accepted`, the header of the request, prefers it."""
    try:
        encode, content_type = choose_encoder(accepted)
    except (TypeError, ValueError):  # it names a version that is none
        encode, content_type = choose_encoder("")
    return content_type, encode(registry)


class MetricsServer:
    """Serves what `source` and `collector` tell on `port` of 127.0.0.1, until closed. Port 0 is any free one; `port`
    says which.

    Raises ConfigError if it cannot listen there.
    """

    def __init__(self, port: int, source: Healthy, collector: Collector) -> None:
        try:
            self._server = _Server(port, source, collector)
        except OSError as error:
            raise ConfigError(
                f"metrics_port: cannot listen on {HOST}:{port} ({error.strerror}); give each worker a port of its own"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), name="metrics", daemon=True
        )
        self._thread.start()
        log.info("metrics on http://%s:%d/metrics", HOST, self.port)

    def close(self) -> None:
        """Stop listening and cut every connection. No thread and no descriptor remains."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.TCPServer):
    """Its connections, oldest first, belong to the thread of `serve_forever`, and at last to the one that closes."""

    allow_reuse_address = True
    request_queue_size = 128  # a client that finds no place in the queue tries again only after a second

    def __init__(self, port: int, source: Healthy, collector: Collector) -> None:
        self.source = source
        self.registry = CollectorRegistry()
        self.registry.register(collector)  # type: ignore[arg-type]
        self._connections: list[_Connection] = []
        super().__init__((HOST, port), _Handler)

    def get_request(self) -> tuple[socket, Any]:
        try:
            return super().get_request()
        except OSError:
            sleep(POLL_SECONDS)  # without a free descriptor the client stays in the queue, and select returns at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        self.service_actions()
        if len(self._connections) == MAX_CONNECTIONS:
            self._connections.pop(0).end()
        self._connections.append(_Connection(request, lambda: self._answer(request, client_address)))

    def service_actions(self) -> None:
        for connection in [connection for connection in self._connections if connection.is_over]:
            self._connections.remove(connection)
            connection.end()

    def server_close(self) -> None:
        super().server_close()
        while self._connections:
            self._connections.pop().end()

    def _answer(self, request: socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except ConnectionError as error:
            log.debug("a client has gone or was cut: %s", error)
        except Exception:
            self.handle_error(request, client_address)
        with suppress(OSError):  # the client has gone
            request.shutdown(SHUT_WR)  # it sees the end now, before its connection is closed

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("a request was not answered", exc_info=True)


class _Connection:
    """A client's socket and the thread that answers on it, which never closes it."""

    def __init__(self, client: socket, answer: Callable[[], None]) -> None:
        self._client = client
        self._deadline = monotonic() + REQUEST_SECONDS
        self._thread = threading.Thread(target=answer, name="metrics-request", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it was answered, or lasts too long."""
        return not self._thread.is_alive() or monotonic() >= self._deadline

    def end(self) -> None:
        """Wake the thread, if it waits for the client, and close when it has ended."""
        with suppress(OSError):  # the client has gone
            self._client.shutdown(SHUT_RDWR)
        self._thread.join()
        self._client.close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        match urlsplit(self.path).path:
            case "/metrics":
                self._answer(200, *exposition(self.server.registry, self.headers.get("Accept", "")))
            case "/healthz":
                self._answer_health()
            case _:
                self._answer(404, "text/plain", b"expected /metrics or /healthz\n")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(405, "text/plain", b"expected GET\n", Allow="GET, HEAD")

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_POST

    def _answer_health(self) -> None:
        try:
            health = self.server.source.health()
        except TruerollError as error:
            self._answer(503, "text/plain", f"{error}\n".encode())
            return
        told = health.model_dump(include={"state", "weight_version", "seconds_since_progress", "troubles"})
        self._answer(503 if health.state == "failed" else 200, "application/json", json.dumps(told).encode())

    def _answer(self, status: int, content_type: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class SourceMetrics:
    """Asks the source at every scrape. What the worker does not know yet, as while it loads, is left out."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        yield from WorkerMetrics(self._source.health(), self._source.stats()).collect()
        yield from _duration_metrics(self._source.timings())


class WorkerMetrics:
    """What a worker has told of itself, as metrics: all but the durations."""

    def __init__(self, health: protocol.Health, stats: protocol.Stats) -> None:
        self._health, self._stats = health, stats

    def collect(self) -> Iterator[Metric]:
        """Each metric, as it was then."""
        health, stats = self._health, self._stats
        yield from _state_metrics(health)
        yield from _load_metrics(health)
        yield from _service_metrics(stats.service)
        if stats.engine:
            yield from _token_metrics(stats.engine)
            yield from _cache_metrics(stats.engine)
        if stats.engine and health.engine and health.engine["expert_layers"]:
            yield from _expert_metrics(expert_tokens(health.engine, stats.engine))


def _state_metrics(health: protocol.Health) -> Iterator[Metric]:
    states, push = get_args(protocol.State), health.push
    state = GaugeMetricFamily("trueroll_state", "1 for the state of the worker.", labels=["state"])
    yield _fill(state, {name: name == health.state for name in states})
    asleep = GaugeMetricFamily("trueroll_asleep", "1 while this memory is given back.", labels=["tag"])
    yield _fill(asleep, {tag: tag in health.sleeping for tag in protocol.ALL_TAGS})
    yield GaugeMetricFamily("trueroll_push_active", "1 while a push is under way.", value=push is not None)
    staged = push.bytes_staged if push else 0
    yield GaugeMetricFamily("trueroll_push_staged_bytes", "Staged by the push under way.", value=staged)
    if health.weight_version is not None:
        yield GaugeMetricFamily("trueroll_weight_version", "The weights that are served.", value=health.weight_version)
    if (seconds := health.seconds_since_progress) is not None:
        yield GaugeMetricFamily("trueroll_since_progress_seconds", "Since the engine last got on.", value=seconds)


def _load_metrics(health: protocol.Health) -> Iterator[Metric]:
    requests = health.requests
    yield GaugeMetricFamily("trueroll_open_requests", "Accepted and unfinished.", value=requests["open"])
    yield GaugeMetricFamily("trueroll_kept_results", "Results not acknowledged.", value=requests["kept"])
    if "running" in requests:
        sequences = GaugeMetricFamily("trueroll_sequences", "Sequences in the engine.", labels=["state"])
        yield _fill(sequences, {state: requests[state] for state in ("running", "waiting")})
    yield _fill(GaugeMetricFamily("trueroll_memory_bytes", "Memory held now.", labels=["tag"]), health.memory)


def _service_metrics(service: Mapping[str, int]) -> Iterator[Metric]:
    yield CounterMetricFamily("trueroll_requests_accepted", "Accepted.", value=service["accepted"])
    yield CounterMetricFamily("trueroll_requests_joined", "Named a request already known.", value=service["joined"])
    yield CounterMetricFamily("trueroll_requests_finished", "Ended with a result.", value=service["finished"])
    yield CounterMetricFamily("trueroll_requests_failed", "Ended with an error.", value=service["failed"])
    yield CounterMetricFamily("trueroll_results_dropped", "Kept results without room.", value=service["dropped"])


def _token_metrics(engine: Mapping[str, Any]) -> Iterator[Metric]:
    reasons = dict.fromkeys(get_args(FinishReason), 0) | engine["samples_finished"]
    yield _fill(CounterMetricFamily("trueroll_samples_finished", "By finish reason.", labels=["reason"]), reasons)
    prompt = engine["computed_prompt_tokens"]
    computed = CounterMetricFamily("trueroll_computed_tokens", "Tokens whose KV was computed.", labels=["kind"])
    yield _fill(computed, {"prompt": prompt, "decode": engine["computed_tokens"] - prompt})
    for name, key, text in _ENGINE_COUNTERS:
        yield CounterMetricFamily(f"trueroll_{name}", text, value=engine[key])


_ENGINE_COUNTERS = (
    ("generated_tokens", "generated_tokens", "Tokens of finished samples."),
    ("prefix_query_tokens", "prefix_queries", "Prompt tokens looked up."),
    ("prefix_hit_tokens", "prefix_hits", "Prompt tokens that did not have to be computed."),
    ("preemptions", "preemptions", "Sequences that gave their blocks to older ones."),
    ("recomputed_sequences", "recomputed", "Sequences computed anew after a commit or a sleep."),
    ("deferred_admissions", "deferred_admissions", "Steps waited for a prefix that another request computed."),
    ("evictions", "evictions", "Cached blocks that were reused."),
    ("shortened_hit_tokens", "shortened_hits", "Cached prompt tokens computed again for want of a checkpoint."),
    ("checkpoints_skipped", "checkpoints_skipped", "Checkpoints of states that found no place."),
    ("checkpoints_evicted", "checkpoints_evicted", "Checkpoints of states that gave their place away."),
    ("checkpoints_restored", "checkpoints_restored", "Sequences that went on from a checkpoint of states."),
)


def _cache_metrics(engine: Mapping[str, Any]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("trueroll_blocks", "Blocks of the KV cache.", labels=["state", "window"])
    for pool in engine["pools"]:
        for state in ("in_use", "cached", "empty"):
            blocks.add_metric([state, str(pool["window"] or "")], pool[state])
    yield blocks
    checkpoints = GaugeMetricFamily("trueroll_checkpoints", "Checkpoints of recurrent states.", labels=["state"])
    yield _fill(checkpoints, {state: engine[f"checkpoints_{state}"] for state in ("ready", "reserved")})


def _expert_metrics(tokens: np.ndarray) -> Iterator[Metric]:
    """`tokens`: those of `expert_tokens`. One series for each expert and one for each layer, not for both together."""
    counter = CounterMetricFamily("trueroll_expert_tokens", "Tokens given to an expert, all layers.", labels=["expert"])
    yield _fill(counter, {str(i): count for i, count in enumerate(tokens.sum(0).tolist())})
    gauge = GaugeMetricFamily("trueroll_expert_imbalance", "Of the busiest expert to the mean.", labels=["layer"])
    yield _fill(gauge, {str(i): value for i, value in enumerate(imbalance(tokens).tolist())})


def _duration_metrics(timings: Timings) -> Iterator[Metric]:
    step = HistogramMetricFamily("trueroll_step_seconds", "Steps of the engine.", labels=[])
    yield _fill_histogram(step, [([], timings.step)])
    phases = {"stage": timings.stage, "commit_pause": timings.commit_pause, "push": timings.push}
    push = HistogramMetricFamily("trueroll_push_seconds", "Parts of a push.", labels=["phase"])
    yield _fill_histogram(push, (([phase], histogram) for phase, histogram in phases.items()))
    calls = {"sleep": timings.sleep, "wake_up": timings.wake_up}
    sleep = HistogramMetricFamily("trueroll_sleep_seconds", "Calls of sleep and wake_up.", labels=["call"])
    yield _fill_histogram(sleep, (([call], histogram) for call, histogram in calls.items()))


def _fill(family: Family, values: Mapping[str, float]) -> Family:
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _fill_histogram(
    family: HistogramMetricFamily, histograms: Iterable[tuple[list[str], Histogram]]
) -> HistogramMetricFamily:
    names = [*map(str, BOUNDS), "+Inf"]
    for labels, histogram in histograms:
        durations = histogram.durations
        buckets = list(zip(names, accumulate(durations.counts), strict=True))
        family.add_metric(labels, buckets, durations.total)
    return family
