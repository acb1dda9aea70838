"""An HTTP server on loopback for `/metrics` (Prometheus) and `/healthz`.

Owns: a listening socket on 127.0.0.1, with its connections and threads. The number and the lifetime of connections and
threads are bounded, whatever clients do. `close` ends all connections and threads. Does not own: the values of the
metrics. The sources of the values must return without blocking, so that a long or stuck step never delays a scrape.

A test checks that docs/operations.md describes every metric.
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
"""Maximum number of simultaneous connections. A new connection replaces the oldest."""
REQUEST_SECONDS = 10.0
"""Maximum duration of a connection, from accept until the answer to its single request is read."""
POLL_SECONDS = 0.1

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)

log = logging.getLogger(__name__)


class Source(Protocol):
    """A worker's state and counters. Methods of a `Source` never block, and any thread may call them."""

    def health(self) -> protocol.Health: ...

    def stats(self) -> protocol.Stats: ...

    def timings(self) -> Timings: ...


class Healthy(Protocol):
    """The source of `/healthz`. The method `health` never blocks, and any thread may call it."""

    def health(self) -> protocol.Health: ...


class Collector(Protocol):
    """The source of `/metrics`. The method `collect` never blocks, and any thread may call it."""

    def collect(self) -> Iterator[Metric]: ...


def exposition(registry: CollectorRegistry, accepted: str) -> tuple[str, bytes]:
    """Return the content type and the body of `/metrics`. `accepted`: the Accept header, which selects the format."""
    try:
        encode, content_type = choose_encoder(accepted)
    except (TypeError, ValueError):  # the header names an invalid version
        encode, content_type = choose_encoder("")
    return content_type, encode(registry)


class MetricsServer:
    """Serves `/healthz` from `source` and `/metrics` from `collector` on a port of 127.0.0.1, until closed.

    Port 0 means any free port; the attribute `port` is the actual port. Raise ConfigError if the server cannot listen.
    """

    def __init__(self, port: int, source: Healthy, collector: Collector) -> None:
        try:
            self._server = _Server(port, source, collector)
        except OSError as error:
            raise ConfigError(
                f"metrics_port: cannot listen on {HOST}:{port} ({error.strerror}); give each worker its own port"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), name="metrics", daemon=True
        )
        self._thread.start()
        log.info("metrics on http://%s:%d/metrics", HOST, self.port)

    def close(self) -> None:
        """Stop listening and close every connection. All threads end, and all descriptors are closed."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.TCPServer):
    """The listening server and its connections, oldest first.

    While `serve_forever` runs, only its thread uses the list of connections; afterwards, only the thread that closes
    the server uses the list.
    """

    allow_reuse_address = True
    request_queue_size = 128  # if the queue is full, a client retries only after a second

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
            sleep(POLL_SECONDS)  # no descriptor is free: the client stays queued, so select would return immediately
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
            log.debug("a client disconnected, or its connection was closed: %s", error)
        except Exception:
            self.handle_error(request, client_address)
        with suppress(OSError):  # the client has disconnected
            request.shutdown(SHUT_WR)  # tells the client that the answer is complete

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("a request failed and was not answered", exc_info=True)


class _Connection:
    """A client's socket, and the thread that answers the client on this socket. The thread never closes the socket."""

    def __init__(self, client: socket, answer: Callable[[], None]) -> None:
        self._client = client
        self._deadline = monotonic() + REQUEST_SECONDS
        self._thread = threading.Thread(target=answer, name="metrics-request", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Return whether the connection can be closed: its request was answered, or its time limit was reached."""
        return not self._thread.is_alive() or monotonic() >= self._deadline

    def end(self) -> None:
        """Wake the thread if it waits for the client, join the thread, and close the socket."""
        with suppress(OSError):  # the client has disconnected
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
                self._answer(404, "text/plain", b"no such path; use /metrics or /healthz\n")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(405, "text/plain", b"method not supported; use GET or HEAD\n", Allow="GET, HEAD")

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
    """Collects a worker's metrics at every scrape. Values that are unknown while the model loads are left out."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        yield from WorkerMetrics(self._source.health(), self._source.stats()).collect()
        yield from _duration_metrics(self._source.timings())


class WorkerMetrics:
    """A worker's health and stats as metrics. The histograms of durations are not included."""

    def __init__(self, health: protocol.Health, stats: protocol.Stats) -> None:
        self._health, self._stats = health, stats

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its value in the given health and stats."""
        health, stats = self._health, self._stats
        yield from _state_metrics(health)
        yield from _load_metrics(health)
        yield from _service_metrics(stats.service)
        if stats.engine:
            yield from _token_metrics(stats.engine)
            yield from _cache_metrics(stats.engine)
            yield from _draft_metrics(stats.engine)
        if stats.engine and health.engine and health.engine["expert_layers"]:
            yield from _expert_metrics(expert_tokens(health.engine, stats.engine))


def _state_metrics(health: protocol.Health) -> Iterator[Metric]:
    states, push = get_args(protocol.State), health.push
    state = GaugeMetricFamily("trueroll_state", "1 for the worker's current state, else 0.", labels=["state"])
    yield _fill(state, {name: name == health.state for name in states})
    asleep = GaugeMetricFamily("trueroll_asleep", "1 while this memory is released.", labels=["tag"])
    yield _fill(asleep, {tag: tag in health.sleeping for tag in protocol.ALL_TAGS})
    yield GaugeMetricFamily("trueroll_push_active", "1 while a push is in progress.", value=push is not None)
    staged = push.bytes_staged if push else 0
    yield GaugeMetricFamily("trueroll_push_staged_bytes", "Bytes staged by the push in progress.", value=staged)
    if health.weight_version is not None:
        text = "Version of the served weights."
        yield GaugeMetricFamily("trueroll_weight_version", text, value=health.weight_version)
    if health.saved is not None:
        yield from _saved_metrics(health.saved)
    if (seconds := health.seconds_since_progress) is not None:
        text = "Seconds since the engine last made progress."
        yield GaugeMetricFamily("trueroll_since_progress_seconds", text, value=seconds)


def _saved_metrics(saved: protocol.SavedWeights) -> Iterator[Metric]:
    text = "Version of the saved weights; 0: none are saved."
    yield GaugeMetricFamily("trueroll_saved_version", text, value=saved.weight_version or 0)
    text = "1 if the last attempt to save weights has failed, else 0."
    yield GaugeMetricFamily("trueroll_save_failing", text, value=bool(saved.error))
    saves = CounterMetricFamily("trueroll_saves", "Attempts to save weights, by outcome.", labels=["outcome"])
    outcomes = {"saved": saved.num_saved, "interrupted": saved.num_interrupted, "failed": saved.num_failed}
    yield _fill(saves, outcomes)


def _load_metrics(health: protocol.Health) -> Iterator[Metric]:
    requests = health.requests
    text = "Requests that are accepted and unfinished."
    yield GaugeMetricFamily("trueroll_open_requests", text, value=requests["open"])
    text = "Results that no client has acknowledged."
    yield GaugeMetricFamily("trueroll_kept_results", text, value=requests["kept"])
    if "running" in requests:
        sequences = GaugeMetricFamily("trueroll_sequences", "Sequences in the engine.", labels=["state"])
        yield _fill(sequences, {state: requests[state] for state in ("running", "waiting")})
    yield _fill(GaugeMetricFamily("trueroll_memory_bytes", "Memory in use, in bytes.", labels=["tag"]), health.memory)


def _service_metrics(service: Mapping[str, int]) -> Iterator[Metric]:
    yield CounterMetricFamily("trueroll_requests_accepted", "Accepted requests.", value=service["accepted"])
    yield CounterMetricFamily("trueroll_requests_joined", "Repeated submissions of requests.", value=service["joined"])
    yield CounterMetricFamily("trueroll_requests_finished", "Requests with a result.", value=service["finished"])
    yield CounterMetricFamily("trueroll_requests_failed", "Requests that ended with an error.", value=service["failed"])
    yield CounterMetricFamily("trueroll_results_dropped", "Results dropped for lack of room.", value=service["dropped"])
    text = "Requests that failed because the replies of unfinished requests exceeded max_record_bytes."
    yield CounterMetricFamily("trueroll_reply_errors", text, value=service["reply_errors"])


def _token_metrics(engine: Mapping[str, Any]) -> Iterator[Metric]:
    reasons = dict.fromkeys(get_args(FinishReason), 0) | engine["samples_finished"]
    samples = CounterMetricFamily("trueroll_samples_finished", "Samples by finish reason.", labels=["reason"])
    yield _fill(samples, reasons)
    prompt = engine["computed_prompt_tokens"]
    computed = CounterMetricFamily("trueroll_computed_tokens", "Tokens for which KV was computed.", labels=["kind"])
    yield _fill(computed, {"prompt": prompt, "decode": engine["computed_tokens"] - prompt})
    text = "Time for which rank 0 has waited for other ranks."
    yield CounterMetricFamily("trueroll_rank_wait_seconds", text, value=engine["rank_wait_us"] / 1e6)
    for name, key, text in _ENGINE_COUNTERS:
        yield CounterMetricFamily(f"trueroll_{name}", text, value=engine[key])


_ENGINE_COUNTERS = (
    ("generated_tokens", "generated_tokens", "Tokens of finished samples."),
    ("prefix_query_tokens", "prefix_queries", "Prompt tokens of generate requests."),
    ("prefix_hit_tokens", "prefix_hits", "Prompt tokens found in the cache or shared with a running computation."),
    ("preemptions", "preemptions", "Sequences preempted to give their blocks to older sequences."),
    ("recomputed_sequences", "recomputed", "Sequences recomputed after a commit or a sleep."),
    ("deferred_admissions", "deferred_admissions", "Steps during which requests waited for a shared prefix."),
    ("evictions", "evictions", "Cached blocks that were evicted."),
    ("host_stored", "host_stored", "Blocks and checkpoints copied to the host tier."),
    ("host_restored", "host_restored", "Blocks and checkpoints copied back from the host tier."),
    ("host_evictions", "host_evictions", "Blocks and checkpoints that the host tier dropped for lack of room."),
    ("host_hit_tokens", "host_hits", "Tokens with content that was restored from the host tier."),
    ("shortened_hit_tokens", "shortened_hits", "Cached prompt tokens recomputed because a checkpoint was missing."),
    ("images_encoded", "images_encoded", "Images that the vision tower has encoded."),
    ("image_evictions", "image_evictions", "Encoded images that were evicted."),
    ("record_errors", "record_errors", "Samples and scores that ended because records exceeded max_record_bytes."),
    ("checkpoints_skipped", "checkpoints_skipped", "Checkpoints of recurrent states skipped for lack of room."),
    ("checkpoints_evicted", "checkpoints_evicted", "Checkpoints of recurrent states that were evicted."),
    ("checkpoints_restored", "checkpoints_restored", "Sequences that continued from a checkpoint of their state."),
)


def _draft_metrics(engine: Mapping[str, Any]) -> Iterator[Metric]:
    labels = ["drafter", "position"]
    drafts = CounterMetricFamily("trueroll_drafts", "Drafts of tokens for a sample.", labels=labels[:1])
    drafted = CounterMetricFamily("trueroll_drafted_tokens", "Drafted tokens by position.", labels=labels)
    accepted = CounterMetricFamily("trueroll_accepted_tokens", "Drafted tokens accepted by a sample.", labels=labels)
    for drafter in engine["drafts"]:
        drafts.add_metric([drafter["drafter"]], drafter["drafts"])
        for family, counts in ((drafted, drafter["drafted"]), (accepted, drafter["accepted"])):
            for position, count in enumerate(counts):
                family.add_metric([drafter["drafter"], str(position)], count)
    yield from (drafts, drafted, accepted)


def _cache_metrics(engine: Mapping[str, Any]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("trueroll_blocks", "Blocks of the KV cache.", labels=["state", "window"])
    for pool in engine["pools"]:
        for state in ("in_use", "cached", "empty", "on_host"):
            blocks.add_metric([state, str(pool["window"] or "")], pool[state])
    yield blocks
    checkpoints = GaugeMetricFamily("trueroll_checkpoints", "Checkpoints of recurrent states.", labels=["state"])
    yield _fill(checkpoints, {state: engine[f"checkpoints_{state}"] for state in ("ready", "reserved", "on_host")})


def _expert_metrics(tokens: np.ndarray) -> Iterator[Metric]:
    """Yield one series per expert and one series per layer, but no series per (layer, expert) pair. `tokens`: the
    result of `expert_tokens`.
    """
    text = "Tokens processed by an expert, over all layers."
    counter = CounterMetricFamily("trueroll_expert_tokens", text, labels=["expert"])
    yield _fill(counter, {str(i): count for i, count in enumerate(tokens.sum(0).tolist())})
    text = "Tokens of the layer's busiest expert divided by the mean."
    gauge = GaugeMetricFamily("trueroll_expert_imbalance", text, labels=["layer"])
    yield _fill(gauge, {str(i): value for i, value in enumerate(imbalance(tokens).tolist())})


def _duration_metrics(timings: Timings) -> Iterator[Metric]:
    step = HistogramMetricFamily("trueroll_step_seconds", "Duration of the engine's steps.", labels=[])
    yield _fill_histogram(step, [([], timings.step)])
    phases = {"stage": timings.stage, "commit_pause": timings.commit_pause, "push": timings.push}
    push = HistogramMetricFamily("trueroll_push_seconds", "Duration of a push's phases.", labels=["phase"])
    yield _fill_histogram(push, (([phase], histogram) for phase, histogram in phases.items()))
    calls = {"sleep": timings.sleep, "wake_up": timings.wake_up}
    sleep = HistogramMetricFamily("trueroll_sleep_seconds", "Duration of sleep and wake_up.", labels=["call"])
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
