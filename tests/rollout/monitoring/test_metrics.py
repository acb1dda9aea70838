"""The content of `/metrics` and `/healthz` over real HTTP. The docs and the dashboard must agree with the exported
metrics.
"""

from __future__ import annotations

import dataclasses
import errno
import http.client
import json
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import psutil
import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from serving import RawClient, serving

from trueroll.engine.request import Tag
from trueroll.engine.stats import EngineStats
from trueroll.errors import ConfigError
from trueroll.rollout import protocol
from trueroll.rollout.config import WorkerConfig
from trueroll.rollout.fleet.metrics import FleetMetrics, WorkerReport
from trueroll.rollout.monitoring import metrics
from trueroll.rollout.monitoring.metrics import (
    MAX_CONNECTIONS,
    POLL_SECONDS,
    REQUEST_SECONDS,
    MetricsServer,
    SourceMetrics,
)
from trueroll.rollout.monitoring.timings import BOUNDS, Histogram, Timings
from trueroll.rollout.worker.ledger import ServiceStats

DOCS = Path(__file__).parents[3] / "docs"
ENGINE = {
    "steps": 9,
    "num_running": 3,
    "num_waiting": 2,
    "prefix_queries": 100,
    "prefix_hits": 60,
    "computed_tokens": 75,
    "computed_prompt_tokens": 40,
    "generated_tokens": 30,
    "preemptions": 4,
    "recomputed": 6,
    "deferred_admissions": 5,
    "evictions": 7,
    "pools": [
        {"window": None, "in_use": 11, "cached": 12, "empty": 13, "on_host": 14},
        {"window": 512, "in_use": 16, "cached": 17, "empty": 18, "on_host": 19},
    ],
    "drafts": [{"drafter": "repeats", "drafts": 40, "drafted": [40, 39], "accepted": [38, 37]}],
    "host_stored": 41,
    "host_restored": 42,
    "host_evictions": 43,
    "host_hits": 44,
    "shortened_hits": 31,
    "images_encoded": 37,
    "image_evictions": 38,
    "record_errors": 39,
    "checkpoints_skipped": 32,
    "checkpoints_evicted": 33,
    "checkpoints_restored": 34,
    "checkpoints_ready": 35,
    "checkpoints_reserved": 36,
    "checkpoints_on_host": 45,
    "expert_tokens": np.array([[1, 3, 2], [6, 0, 0]], "<i8").tobytes(),
    "samples_finished": {"length": 8, "error": 1},
    "rank_wait_us": 1_500_000,
}
INFO = {"expert_layers": 2, "num_experts": 3}
NUMBERED = ("window", "expert", "layer", "position", "drafter")
MEMORY = {
    "adapters": 47,
    "host_cache": 46,
    "process": 4000,
    "images": 700,
    "replies": 800,
    "weights": 1000,
    "kv_cache": 2000,
    "records": 900,
    "staging": 500,
    "spare": 550,
    "routed_experts": 600,
}
SAVED = protocol.SavedWeights(
    weight_version=3, push_id="0" * 32, is_writing=False, num_saved=46, num_interrupted=47, num_failed=48, error="full"
)
PUSH = protocol.PushProgress(
    push_id="0" * 32,
    weight_version=5,
    transport="shared",
    phase="begun",
    in_place=False,
    bytes_staged=500,
    seconds=0.25,
)


class FakeSource:
    """A worker in the middle of a push. Every number in its report is different. Tests replace the values that they
    check.
    """

    def __init__(self) -> None:
        self.state: protocol.State = "ready"
        self.sleeping: tuple[Tag, ...] = ()
        self.push: protocol.PushProgress | None = PUSH
        self.engine: dict[str, Any] = ENGINE
        self.service = ServiceStats(accepted=21, joined=22, finished=23, failed=24, dropped=25, reply_errors=26)
        self.histograms = Timings()
        self.is_loading = False
        self.memory = MEMORY

    def health(self) -> protocol.Health:
        return protocol.Health(
            id="health",
            state=self.state,
            instance="i",
            seconds_since_progress=None if self.is_loading else 1.5,
            weight_version=None if self.is_loading else 4,
            requests={"open": 14, "kept": 15} | ({} if self.is_loading else {"running": 3, "waiting": 2}),
            memory={"process": 4000} if self.is_loading else self.memory,
            limits={},
            engine=None if self.is_loading else INFO,
            sleeping=self.sleeping,
            push=self.push,
            saved=None if self.is_loading else SAVED,
        )

    def stats(self) -> protocol.Stats:
        engine = {} if self.is_loading else self.engine
        return protocol.Stats(id="stats", engine=engine, service=dataclasses.asdict(self.service))

    def timings(self) -> Timings:
        return self.histograms


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def port(source: FakeSource) -> Iterator[int]:
    """The port that serves the metrics of `source`."""
    server = MetricsServer(0, source, SourceMetrics(source))
    yield server.port
    server.close()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read().decode()
    finally:
        connection.close()


def scrape(port: int) -> dict[str, float]:
    """Return the values by sample. Samples are written as in Prometheus: `name` or `name{label="value",...}`."""
    response, text = ask(port, "/metrics")
    assert response.status == 200 and response.headers["Content-Type"].startswith("text/plain; version=")
    return {
        sample.name + _braced(",".join(f'{label}="{value}"' for label, value in sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_every_number_arrives_under_its_name(port: int) -> None:
    told = scrape(port)
    assert told['trueroll_state{state="ready"}'] == 1 and told['trueroll_state{state="failed"}'] == 0
    assert sum(value for name, value in told.items() if name.startswith("trueroll_state{")) == 1
    expected = {
        "trueroll_weight_version": 4,
        "trueroll_since_progress_seconds": 1.5,
        "trueroll_open_requests": 14,
        "trueroll_kept_results": 15,
        'trueroll_sequences{state="running"}': 3,
        'trueroll_sequences{state="waiting"}': 2,
        "trueroll_requests_accepted_total": 21,
        "trueroll_requests_joined_total": 22,
        "trueroll_requests_finished_total": 23,
        "trueroll_requests_failed_total": 24,
        "trueroll_results_dropped_total": 25,
        "trueroll_reply_errors_total": 26,
        'trueroll_samples_finished_total{reason="length"}': 8,
        'trueroll_samples_finished_total{reason="error"}': 1,
        'trueroll_samples_finished_total{reason="stop"}': 0,
        'trueroll_computed_tokens_total{kind="prompt"}': 40,
        'trueroll_computed_tokens_total{kind="decode"}': 35,
        "trueroll_generated_tokens_total": 30,
        "trueroll_prefix_query_tokens_total": 100,
        "trueroll_prefix_hit_tokens_total": 60,
        "trueroll_preemptions_total": 4,
        "trueroll_recomputed_sequences_total": 6,
        "trueroll_deferred_admissions_total": 5,
        "trueroll_evictions_total": 7,
        'trueroll_blocks{state="in_use",window=""}': 11,
        'trueroll_blocks{state="cached",window=""}': 12,
        'trueroll_blocks{state="empty",window=""}': 13,
        'trueroll_blocks{state="on_host",window=""}': 14,
        'trueroll_blocks{state="in_use",window="512"}': 16,
        'trueroll_blocks{state="cached",window="512"}': 17,
        'trueroll_blocks{state="empty",window="512"}': 18,
        'trueroll_blocks{state="on_host",window="512"}': 19,
        'trueroll_drafts_total{drafter="repeats"}': 40,
        'trueroll_drafted_tokens_total{drafter="repeats",position="1"}': 39,
        'trueroll_accepted_tokens_total{drafter="repeats",position="0"}': 38,
        'trueroll_accepted_tokens_total{drafter="repeats",position="1"}': 37,
        "trueroll_host_stored_total": 41,
        "trueroll_host_restored_total": 42,
        "trueroll_host_evictions_total": 43,
        "trueroll_host_hit_tokens_total": 44,
        "trueroll_shortened_hit_tokens_total": 31,
        "trueroll_images_encoded_total": 37,
        "trueroll_image_evictions_total": 38,
        "trueroll_record_errors_total": 39,
        "trueroll_rank_wait_seconds_total": 1.5,
        "trueroll_checkpoints_skipped_total": 32,
        "trueroll_checkpoints_evicted_total": 33,
        "trueroll_checkpoints_restored_total": 34,
        'trueroll_checkpoints{state="ready"}': 35,
        'trueroll_checkpoints{state="reserved"}': 36,
        'trueroll_checkpoints{state="on_host"}': 45,
        'trueroll_expert_tokens_total{expert="0"}': 7,
        'trueroll_expert_tokens_total{expert="1"}': 3,
        'trueroll_expert_tokens_total{expert="2"}': 2,
        'trueroll_expert_imbalance{layer="0"}': 1.5,
        'trueroll_expert_imbalance{layer="1"}': 3,
        "trueroll_push_active": 1,
        "trueroll_push_staged_bytes": 500,
        "trueroll_saved_version": 3,
        "trueroll_save_failing": 1,
        'trueroll_saves_total{outcome="saved"}': 46,
        'trueroll_saves_total{outcome="interrupted"}': 47,
        'trueroll_saves_total{outcome="failed"}': 48,
        **{f'trueroll_memory_bytes{{tag="{tag}"}}': size for tag, size in MEMORY.items()},
    }
    assert {name: told[name] for name in expected} == expected


def test_metrics_show_sleep_and_wake_up(source: FakeSource, port: int) -> None:
    source.state, source.sleeping, source.push = "asleep", ("kv_cache",), None
    told = scrape(port)
    assert told['trueroll_asleep{tag="kv_cache"}'] == 1 and told['trueroll_asleep{tag="weights"}'] == 0
    assert told['trueroll_state{state="asleep"}'] == 1 and told["trueroll_push_active"] == 0
    source.state, source.sleeping = "ready", ()
    assert scrape(port)['trueroll_asleep{tag="kv_cache"}'] == 0


def test_unknown_values_are_left_out_while_loading(source: FakeSource, port: int) -> None:
    loaded = scrape(port)
    source.is_loading, source.state = True, "loading"
    told = scrape(port)
    missing = {name.partition("{")[0] for name in loaded.keys() - told.keys()}
    assert {"trueroll_weight_version", "trueroll_blocks", "trueroll_sequences"} <= missing
    assert told['trueroll_state{state="loading"}'] == 1 and told["trueroll_open_requests"] == 14


def test_durations_land_in_their_buckets(source: FakeSource, port: int) -> None:
    for seconds in (0.5 * BOUNDS[0], BOUNDS[0], BOUNDS[0] * 1.01, 2 * BOUNDS[-1]):
        source.histograms.step.observe(seconds)
    source.histograms.commit_pause.observe(0.25)
    samples = [
        sample for family in text_string_to_metric_families(ask(port, "/metrics")[1]) for sample in family.samples
    ]
    steps = {sample.labels["le"]: sample.value for sample in samples if sample.name == "trueroll_step_seconds_bucket"}
    counts = [2.0] + [3.0] * (len(BOUNDS) - 1) + [4.0]
    assert steps == dict(zip([*map(str, BOUNDS), "+Inf"], counts, strict=True))
    told = scrape(port)
    assert told["trueroll_step_seconds_count"] == 4
    assert told["trueroll_step_seconds_sum"] == pytest.approx(2.51 * BOUNDS[0] + 2 * BOUNDS[-1])
    assert told['trueroll_push_seconds_count{phase="commit_pause"}'] == 1
    assert told['trueroll_push_seconds_count{phase="stage"}'] == 0
    assert told['trueroll_push_seconds_sum{phase="commit_pause"}'] == 0.25


def test_a_reader_of_a_histogram_never_sees_half_an_observation() -> None:
    histogram = Histogram()
    seen = [histogram.durations]

    def read() -> None:
        while len(seen) < 5:
            if (durations := histogram.durations) is not seen[-1]:
                seen.append(durations)

    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive():
        histogram.observe(1.0)
    assert len({durations.total for durations in seen}) == 5, "the histogram was read while it was written"
    assert all(sum(durations.counts) == durations.total for durations in seen)


def test_every_counter_of_engine_and_service_is_exported(source: FakeSource, port: int) -> None:
    """Increasing any counter by one changes the page. The number of steps is exported as the count of
    `trueroll_step_seconds`.
    """
    assert ENGINE.keys() == {field.name for field in dataclasses.fields(EngineStats)}
    before = scrape(port)
    gauges = {"num_running", "num_waiting", "pools", "drafts"}
    for key in ENGINE.keys() - {"steps", "samples_finished", "expert_tokens"} - gauges:
        source.engine = {**ENGINE, key: ENGINE[key] + 1}
        assert scrape(port) != before, key
    source.engine = ENGINE
    for field in dataclasses.fields(ServiceStats):
        source.service = dataclasses.replace(FakeSource().service, **{field.name: 99})
        assert scrape(port) != before, field.name


@pytest.mark.parametrize("state", get_args(protocol.State))
def test_healthz_fails_only_when_the_worker_has_failed(state: protocol.State, source: FakeSource, port: int) -> None:
    source.state = state
    response, body = ask(port, "/healthz")
    assert response.status == (503 if state == "failed" else 200)
    assert response.headers["Content-Type"] == "application/json"
    assert json.loads(body) == {"state": state, "weight_version": 4, "seconds_since_progress": 1.5}


def test_healthz_while_loading_knows_no_version(source: FakeSource, port: int) -> None:
    source.is_loading, source.state = True, "loading"
    response, body = ask(port, "/healthz")
    assert response.status == 200
    assert json.loads(body) == {"state": "loading", "weight_version": None, "seconds_since_progress": None}


def test_other_paths_and_methods_are_refused(port: int) -> None:
    assert ask(port, "/")[0].status == 404
    response, body = ask(port, "/metrics/x")
    assert response.status == 404 and "/metrics or /healthz" in body
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        response, _ = ask(port, "/metrics", method)
        assert response.status == 405 and response.headers["Allow"] == "GET, HEAD"


def test_head_has_the_headers_and_no_body(port: int) -> None:
    response, body = ask(port, "/healthz", "HEAD")
    assert response.status == 200 and body == "" and int(response.headers["Content-Length"]) > 0
    assert ask(port, "/healthz?verbose=1")[0].status == 200


def test_prometheus_gets_the_format_it_prefers(port: int) -> None:
    response, text = ask(port, "/metrics", Accept="application/openmetrics-text;version=1.0.0")
    assert response.headers["Content-Type"].startswith("application/openmetrics-text") and text.endswith("# EOF\n")


def test_the_server_listens_on_loopback_only(port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # this bind fails if the server listens on every address


def test_a_port_in_use_is_refused_with_advice(port: int, source: FakeSource) -> None:
    with pytest.raises(ConfigError, match=rf"metrics_port: cannot listen on 127.0.0.1:{port} .*its own port"):
        MetricsServer(port, source, SourceMetrics(source))


def test_a_closed_server_frees_its_port(source: FakeSource) -> None:
    server = MetricsServer(0, source, SourceMetrics(source))
    assert ask(server.port, "/healthz")[0].status == 200
    server.close()
    with pytest.raises(ConnectionRefusedError):
        ask(server.port, "/healthz")
    MetricsServer(server.port, source, SourceMetrics(source)).close()


HALF, REST = b"GET /healthz HTTP/1.1\r\nConnection: keep-alive\r\n", b"\r\n"


@contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Yield connected clients that have not sent a request yet."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(count)]


def read_to_the_end(client: socket.socket) -> bytes:
    parts = []
    while part := client.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def open_connections(port: int) -> int:
    """Return the number of descriptors in this process for the server's end of connections to `port`."""
    found = psutil.Process().net_connections("tcp4")
    return sum(connection.laddr.port == port and bool(connection.raddr) for connection in found)


def test_idle_connections_are_bounded_and_do_not_lock_out_scrapers(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection replaces the oldest connection. The other connections stay open, get one answer each, and leak
    no descriptor.
    """
    monkeypatch.setattr("trueroll.rollout.monitoring.metrics.monotonic", lambda: 0.0)  # no connection is too old
    num_threads = threading.active_count()
    with connections(port, 3 * MAX_CONNECTIONS) as clients:
        assert ask(port, "/metrics")[0].status == 200
        assert threading.active_count() <= num_threads + MAX_CONNECTIONS
        assert open_connections(port) <= MAX_CONNECTIONS
        stay = clients[1 - MAX_CONNECTIONS :]
        for client in stay:
            client.sendall(HALF)
            client.sendall(REST)
            assert b"200 OK" in read_to_the_end(client)
        assert all(client.recv(1) == b"" for client in clients[: -len(stay)])
        wait_until(lambda: open_connections(port) == 0)


def test_a_client_that_keeps_sending_is_cut(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueroll.rollout.monitoring.metrics.REQUEST_SECONDS", 0.3)
    with connections(port, 1) as (client,):
        client.sendall(HALF)
        client.setblocking(False)

        def is_cut() -> bool:
            try:
                client.send(b"x")
                return client.recv(1) == b""
            except BlockingIOError:
                return False
            except ConnectionError:
                return True

        wait_until(is_cut)


def test_a_client_that_does_not_read_is_cut(source: FakeSource, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("trueroll.rollout.monitoring.metrics.monotonic", lambda: now)
    size = 16 << 20  # more than the kernel buffers for a client
    source.memory = {"x" * size: 1}
    num_threads = threading.active_count()
    with connections(port, 1) as (client,):
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.recv(1, socket.MSG_PEEK), "the answer has begun"
        now += REQUEST_SECONDS
        wait_until(lambda: open_connections(port) == 0 and threading.active_count() == num_threads)
        assert len(read_to_the_end(client)) < size


def test_a_closed_server_leaves_no_connection_and_no_thread(source: FakeSource) -> None:
    num_threads = threading.active_count()
    server = MetricsServer(0, source, SourceMetrics(source))
    with connections(server.port, 4) as clients:
        clients[0].sendall(HALF)
        wait_until(lambda: open_connections(server.port) == 4)
        server.close()
        assert open_connections(server.port) == 0 and threading.active_count() == num_threads


def test_a_client_that_disconnects_logs_no_warning(source: FakeSource, caplog: pytest.LogCaptureFixture) -> None:
    num_threads = threading.active_count()
    server = MetricsServer(0, source, SourceMetrics(source))
    with (
        caplog.at_level(logging.DEBUG, "trueroll.rollout.monitoring.metrics"),
        connections(server.port, 1) as (client,),
    ):
        client.sendall(HALF)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: threading.active_count() == num_threads + 2)
        client.close()  # closing with these settings resets the connection
        wait_until(lambda: threading.active_count() == num_threads + 1)
        server.close()
    assert [record.levelname for record in caplog.records if "reset" in record.message] == ["DEBUG"]


def test_a_process_without_free_descriptors_does_not_spin(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str | float] = []

    def refuse(_: socket.socket) -> None:
        calls.append("accept")
        raise OSError(errno.EMFILE, "Too many open files")

    def pause(seconds: float) -> None:
        calls.append(seconds)
        time.sleep(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", refuse)
        patch.setattr(metrics, "sleep", pause)
        with connections(port, 1):
            wait_until(lambda: calls.count("accept") >= 3)
        assert calls[:5] == ["accept", POLL_SECONDS, "accept", POLL_SECONDS, "accept"]
    assert ask(port, "/healthz")[0].status == 200


def test_a_failing_source_does_not_stop_the_server(source: FakeSource, port: int) -> None:
    source.state = "no such state"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(http.client.RemoteDisconnected):
        ask(port, "/healthz")
    source.state = "ready"
    assert ask(port, "/healthz")[0].status == 200


@pytest.mark.parametrize("port", [0, 65536, "8000"])
def test_a_metrics_port_out_of_range_is_refused(port: Any) -> None:
    with pytest.raises(ConfigError, match="metrics_port"):
        WorkerConfig(metrics_port=port)


def test_a_stuck_engine_does_not_delay_a_scrape() -> None:
    engine, port = FakeEngine(), free_port()
    with serving(engine, metrics_port=port) as running, RawClient(running.address) as client:
        client.generate("before")
        client.receive_until("done")
        engine.gate.clear()
        client.generate("stuck")
        while client.health()["requests"]["open"] != 1:
            pass
        told = scrape(port)
        assert told["trueroll_open_requests"] == 1 and told["trueroll_requests_finished_total"] == 1
        assert told["trueroll_step_seconds_count"] > 0 and told['trueroll_state{state="ready"}'] == 1
        assert told["trueroll_weight_version"] == engine.weight_version
        assert ask(port, "/healthz")[0].status == 200
        assert not client.socket.poll(0), "the request is still stuck"
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/healthz")


def documented() -> dict[str, tuple[str, dict[str, set[str]]]]:
    """Return {metric: (type, {label: values})} from the table in docs/operations.md."""
    rows = re.findall(r"^\| `(trueroll_\w+)` \| (\w+) \|([^|]*)\|", (DOCS / "operations.md").read_text(), re.M)
    table = {name: (kind, _documented_labels(cell)) for name, kind, cell in rows}
    assert len(table) == len(rows), "no metric twice"
    return table


def _documented_labels(cell: str) -> dict[str, set[str]]:
    parts = (re.findall(r"`(\w+)`", part) for part in cell.split(";"))
    return {label: set(values) for label, *values in filter(None, parts)}


def exported(port: int) -> dict[str, tuple[str, dict[str, set[str]]]]:
    """Return {metric: (type, {label: values})} from the exported page, without the values of `NUMBERED` labels."""
    found: dict[str, tuple[str, dict[str, set[str]]]] = {}
    for family in text_string_to_metric_families(ask(port, "/metrics")[1]):
        labels: dict[str, set[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le":
                    labels.setdefault(label, set()).update([] if label in NUMBERED else [value])
        found[family.name + ("_total" if family.type == "counter" else "")] = family.type, labels
    return found


def test_the_manual_lists_all_exported_metrics(port: int) -> None:
    assert documented() == exported(port)


def dashboard() -> dict[str, Any]:
    return json.loads((DOCS / "grafana.json").read_text())


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def exported_by_a_fleet() -> dict[str, tuple[str, dict[str, set[str]]]]:
    """Return the metrics that only a fleet exports, in the form of `exported`."""
    reports = {"worker-0": WorkerReport("serving", None, None, 1)}
    found: dict[str, tuple[str, dict[str, set[str]]]] = {}
    for family in FleetMetrics(lambda: reports).collect():
        labels: dict[str, set[str]] = {}
        for label, value in [pair for sample in family.samples for pair in sample.labels.items()]:
            labels.setdefault(label, set()).add(value)
        found[family.name + ("_total" if family.type == "counter" else "")] = family.type, labels
    return found


def test_the_page_on_fleets_names_their_own_metrics() -> None:
    found = exported_by_a_fleet()
    assert {*found} == {*re.findall(r"trueroll_fleet_\w+", (DOCS / "fleet.md").read_text())} and len(found) == 3
    assert found["trueroll_fleet_workers"][1] == {"standing": {"starting", "serving", "joining", "leaving"}}


def test_the_dashboard_queries_only_exported_metrics(port: int) -> None:
    table = exported(port) | exported_by_a_fleet()
    assert len(queries()) > 15
    for query in queries():
        names = re.findall(r"trueroll_\w+", query)
        assert names, query
        for name in names:
            assert _metric_of(name, table) in table, query
        for name, label, value in re.findall(r'(trueroll_\w+)\{(?:[^}]*, *)?(\w+)="(\w+)"', query):
            assert value in table[_metric_of(name, table)][1][label], query


def _metric_of(series: str, table: dict[str, Any]) -> str:
    return series if series in table else re.sub("_(bucket|sum|count)$", "", series)


def test_the_dashboard_shows_every_metric(port: int) -> None:
    text = "\n".join(queries())
    assert [
        name
        for name in [*exported(port), *exported_by_a_fleet()]
        if not re.search(rf"\b{name}(_bucket|_sum|_count)?\b", text)
    ] == []


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert board["title"] and board["id"] is None and board["schemaVersion"] >= 36
    source = board["templating"]["list"][0]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24, "no two panels overlap"
    assert all(panel["datasource"]["uid"] == f"${{{source['name']}}}" for panel in panels if "targets" in panel)
