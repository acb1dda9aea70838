"""OpenTelemetry spans of HTTP requests, clients and sessions: parents, attributes, secrets, and the export."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_engine import FakeEngine
from http_fronts import Front, events, front_end
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from serving import serving, stop_after_a_step

from trueroll.errors import ConfigError, InvalidRequestError
from trueroll.rollout import FleetClient, RolloutClient, SamplingParams, Session, TextModel, WorkerProcess, tracing
from trueroll.rollout.http.config import HttpConfig
from trueroll.rollout.http.tracing import _trace_headers
from trueroll.rollout.tracing import exporting

KEY = "k" * 32
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRETS = ("one two three", KEY, "unspeakable")


class Spans:
    """Collects finished spans."""

    def __init__(self) -> None:
        self._exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    def take(self, count: int) -> list[ReadableSpan]:
        """Wait until this many spans have ended since the last call. Return them in the order in which they ended, and
        check that they contain no secret. A request's span may end after its client has the answer.
        """
        deadline = time.monotonic() + 60
        while len(found := self._exporter.get_finished_spans()) < count:
            assert time.monotonic() < deadline, [span.name for span in found]
            time.sleep(0.001)
        self._exporter.clear()
        assert len(found) == count
        for span in found:
            assert not span.events and span.status.description is None
            assert not any(secret in span.to_json() for secret in SECRETS)
        return list(found)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent_of(span: ReadableSpan) -> str:
    return format_span_id(span.parent.span_id) if span.parent else ""


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return format_span_id(span.context.span_id)


@pytest.fixture(scope="module")
def spans() -> Spans:
    return Spans()


@pytest.fixture(scope="module")
def traced(worker: WorkerProcess, spans: Spans) -> Iterator[Front]:
    with front_end(worker.address, key=KEY, tracer=spans.tracer, model_name="tiny") as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_child_of_its_caller_and_has_its_generations_as_children(
    traced: Front, spans: Spans, chat_model: Path, stream: bool
) -> None:
    body = dict(prompt="one two three", max_tokens=4, n=2, temperature=0.5, seed=3, stream=stream)
    headers = dict(traceparent=f"00-{TRACE}-{CALLER}-01", tracestate="a=unspeakable" * (stream and 99))
    answer = traced.post("/v1/completions", body, **headers)
    assert answer.status_code == 200 and (not stream or events(answer)[-1] == "[DONE]")
    generation, request = spans.take(2)
    assert (generation.name, request.name) == (f"text_completion {chat_model}", "POST /v1/completions")
    assert request.context is not None and request.kind is SpanKind.SERVER
    assert format_trace_id(request.context.trace_id) == TRACE and parent_of(request) == CALLER
    assert attributes(request) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.scheme": "http",
    }
    assert parent_of(generation) == id_of(request) and generation.kind is SpanKind.CLIENT
    assert request.status.status_code is generation.status.status_code is StatusCode.UNSET
    told = attributes(generation)
    assert (told.pop("gen_ai.response.time_to_first_chunk", 0) > 0) is stream
    assert told.pop("gen_ai.request.stream", False) is stream
    assert told.pop("gen_ai.usage.cache_read.input_tokens") >= 0
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "trueroll",
        "gen_ai.request.model": str(chat_model),
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": told["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "trueroll.weight_versions": (0,),
    }


def test_requests_without_a_valid_caller_begin_traces(traced: Front, spans: Spans) -> None:
    for header in ("", f"00-{TRACE}-{CALLER}", f"00-{'0' * 32}-{CALLER}-01", "x" * 9000):
        assert traced.get("/v1/models", traceparent=header).status_code == 200
        [span] = spans.take(1)
        assert span.parent is None
    with traced.raw() as raw:
        raw.send_head("GET", "/v1/models", *[f"traceparent: 00-{TRACE}-{CALLER}-01"] * 2)
        assert raw.answer()[0] == 200
    [span] = spans.take(1)
    assert span.parent is None, "two callers"


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("a=1, v@b=x y ,,", "a=1,v@b=x y"),
        (",".join(f"k{i}=v" for i in range(32)), None),
        (",".join(f"k{i}=v" for i in range(33)), ""),
        ("a=1,A=2", ""),
        ("a=1,\x1b[31m=2", ""),
        ("a=b=c", ""),
        ("a" * 300 + "=1", ""),
        ("a=" + "b" * 500, ""),
        ("", ""),
    ],
)
def test_an_invalid_state_is_dropped_and_logs_nothing(
    state: str, kept: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise each request could write lines into the log."""
    headers = [(b"traceparent", f"00-{TRACE}-{CALLER}-00".encode()), (b"tracestate", state.encode())]
    context = TraceContextTextMapPropagator().extract(_trace_headers({"headers": headers}))
    found = get_current_span(context).get_span_context()
    assert format_trace_id(found.trace_id) == TRACE and found.is_remote and not found.trace_flags.sampled
    assert found.trace_state.to_header() == (state if kept is None else kept) and not caplog.records


def test_requests_of_a_caller_without_samples_make_no_spans(traced: Front, spans: Spans) -> None:
    for flags in ("00", "01"):
        assert traced.get("/v1/models", traceparent=f"00-{TRACE}-{CALLER}-{flags}").status_code == 200
    [span] = spans.take(1)
    assert span.context is not None and span.context.trace_flags.sampled


def test_paths_and_errors_are_not_told(traced: Front, spans: Spans) -> None:
    assert traced.get("/v1/models/unspeakable").status_code == 404
    assert traced.get("/unspeakable").status_code == 404
    assert traced.post("/v1/completions", dict(prompt="one two three", top_q="unspeakable")).status_code == 400
    found = {span.name: attributes(span)["http.response.status_code"] for span in spans.take(3)}
    assert found == {"GET /v1/models/{name:path}": 404, "GET": 404, "POST /v1/completions": 400}


def test_the_capability_of_a_session_is_not_told(traced: Front, spans: Spans, chat_model: Path) -> None:
    begun = traced.post("/sessions", {}).json()
    path = f"/sessions/{begun['session_id']}"
    call = dict(messages=[dict(role="user", content="one two three")], max_tokens=2)
    answers = [
        traced.post(f"{path}/v1/chat/completions", call),
        traced.post(f"{path}/v1/chat/completions", call | dict(stream=True)),
        traced.get(f"{path}/unspeakable"),
        httpx2.delete(traced.url + path, verify=False),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 404, 200]
    found = spans.take(9)
    assert not any(path in span.to_json() or path[10:] in span.to_json() for span in found)
    call_name, requests = "POST /sessions/{id}/v1/chat/completions", {id_of(span): span.name for span in found}
    assert sorted(requests.values())[:5] == ["DELETE /sessions/{id}", "GET", "POST /sessions", call_name, call_name]
    generations = [span for span in found if span.kind is SpanKind.CLIENT]
    calls = [span for span in found if span.name == f"chat {chat_model}"]
    assert [requests[parent_of(span)] for span in calls] == [call_name] * 2
    assert [parent_of(span) for span in generations] == [id_of(span) for span in calls]
    for told in map(attributes, calls):
        assert told["gen_ai.conversation.id"] == begun["id"] and told["gen_ai.usage.output_tokens"] == 2


def test_every_call_of_a_session_ends_its_span(spans: Spans, chat_model: Path) -> None:
    """A refused call, a cancelled stream, and a stream that ends with its session have spans with an error."""
    engine = FakeEngine()
    stop_after_a_step(engine)
    settings: dict[str, Any] = dict(tokenizer=str(chat_model), tracer=spans.tracer)
    with serving(engine) as running, front_end(running.address, **settings) as front:
        path = f"/sessions/{front.post('/sessions', {}).json()['session_id']}"
        chat: Any = dict(json=dict(messages=[dict(role="user", content="one two three")], stream=True), verify=False)
        assert front.post(f"{path}/v1/chat/completions", chat["json"] | dict(n=2)).status_code == 400
        for ends_session in (False, True):
            with httpx2.stream("POST", f"{front.url}{path}/v1/chat/completions", **chat) as stream:
                lines = stream.iter_lines()
                next(lines)
                if ends_session:
                    assert front.delete(path).status_code == 200
                    assert "closed during the call" in [*filter(None, lines)][-1]
            front.wait_for("trueroll_http_open_requests", 0)
            engine.flow.set()
    found = spans.take(10)
    failed = [attributes(span)["error.type"] for span in found if span.name == f"chat {chat_model}"]
    assert failed == ["InvalidRequestError", "cancelled", "IllegalStateError"]
    drawn = [attributes(span)["error.type"] for span in found if span.kind is SpanKind.CLIENT]
    assert drawn == ["cancelled"] * 2


def test_refused_and_polled_requests_have_no_spans(traced: Front, spans: Spans) -> None:
    assert traced.post("/v1/completions", dict(prompt="a"), Authorization="Bearer other").status_code == 401
    assert [traced.get(path).status_code for path in ("/health", "/metrics", "/ui")] == [200] * 3
    assert traced.post("/api/v1/retrieve_future", {}).status_code == 404, "premise: without the Tinker API"
    assert traced.get("/v1/models").status_code == 200
    assert [span.name for span in spans.take(1)] == ["GET /v1/models"]


@pytest.mark.parametrize("kind", [RolloutClient, FleetClient])
def test_the_requests_of_a_client_have_spans(
    worker: WorkerProcess, spans: Spans, kind: type[RolloutClient], chat_model: Path
) -> None:
    with kind(worker.address, tracer=spans.tracer) as client:
        with spans.tracer.start_as_current_span("step"):
            [whole] = client.generate([[5, 6]], SamplingParams(max_tokens=2, seed=1))[0].samples
        generation, step = spans.take(2)
        assert generation.name == f"text_completion {chat_model}" and parent_of(generation) == id_of(step)
        assert attributes(generation)["gen_ai.usage.input_tokens"] == 2
        [sample] = client.generate([[5, 6]], SamplingParams(max_tokens=1, seed=1))[0].samples
        assert client.continue_samples([[5, 6]], [sample], SamplingParams(max_tokens=2))[0].token_ids == whole.token_ids
        assert [attributes(span)["gen_ai.usage.input_tokens"] for span in spans.take(2)] == [2, 3]
        [error] = client.generate([[10**6]], errors="return")
        assert isinstance(error, InvalidRequestError)
        with pytest.raises(InvalidRequestError):
            client.generate([[10**6]])
        stream: Any = client.stream([[5, 6]], SamplingParams(max_tokens=500, ignore_eos=True), deltas=True)
        next(stream)
        stream.close()
        failed = spans.take(3)
    assert [attributes(span)["error.type"] for span in failed] == ["InvalidRequestError"] * 2 + ["cancelled"]
    assert all(span.status.status_code is StatusCode.ERROR for span in failed)


def test_the_calls_of_a_session_have_spans(worker: WorkerProcess, spans: Spans, chat_model: Path) -> None:
    with closing(TextModel(str(chat_model))) as texts, RolloutClient(worker.address, tracer=spans.tracer) as client:
        session = Session(client, texts, seed=1, sampling=SamplingParams(max_tokens=3))
        with spans.tracer.start_as_current_span("agent"):
            answer = session.chat([dict(role="user", content="one two three")])
        with pytest.raises(InvalidRequestError):
            session.chat([dict(role="user", content="one two three", tool_calls="unspeakable")])
    generation, call, agent, failed = found = spans.take(4)
    assert not any(answer.node in span.to_json() for span in found)
    assert [session.id in span.to_json() for span in found] == [False, True, False, True]
    assert attributes(failed)["error.type"] == "InvalidRequestError"
    assert call.name == failed.name == f"chat {chat_model}" and agent.name == "agent"
    assert parent_of(generation) == id_of(call) and parent_of(call) == id_of(agent)
    assert attributes(call) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "trueroll",
        "gen_ai.request.model": str(chat_model),
        "gen_ai.conversation.id": session.id,
        "gen_ai.usage.input_tokens": len(answer.prompt_token_ids),
        "gen_ai.usage.output_tokens": len(answer.sample.token_ids),
        "gen_ai.usage.cache_read.input_tokens": answer.sample.num_cached_tokens,
        "gen_ai.response.finish_reasons": (answer.finish_reason,),
        "trueroll.weight_versions": (0,),
    }


def test_spans_are_sent_to_the_named_endpoint() -> None:
    bodies: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.path.encode() + b"\n" + self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        with exporting(f"http://127.0.0.1:{server.server_port}/v1/traces") as tracer:
            assert tracer is not None
            tracer.start_span("a span").end()
        server.shutdown()
        serving.join()
    [(path, _, content)] = [body.partition(b"\n") for body in bodies]
    [sent] = ExportTraceServiceRequest.FromString(content).resource_spans
    names = {each.key: each.value.string_value for each in sent.resource.attributes}
    assert path == b"/v1/traces" and names["service.name"] == "trueroll"
    assert [span.name for span in sent.scope_spans[0].spans] == ["a span"]
    with exporting(None) as nothing:
        assert nothing is None


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_receiver_that_does_not_answer_delays_nothing(is_silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver refuses connections, or accepts them and sends nothing. The shutdown does not wait for the export,
    and the export does not keep the process.
    """
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 0.05)
    shutdown, has_begun, may_end, has_ended = TracerProvider.shutdown, *(threading.Event() for _ in range(3))

    def hang(provider: TracerProvider) -> None:
        assert threading.current_thread().daemon
        has_begun.set()
        may_end.wait(60)
        shutdown(provider)
        has_ended.set()

    monkeypatch.setattr(TracerProvider, "shutdown", hang)
    with closing(socket.create_server(("127.0.0.1", 0))) as receiver:
        port = receiver.getsockname()[1]
        if not is_silent:
            receiver.close()
        with exporting(f"http://127.0.0.1:{port}/v1/traces") as tracer:
            assert tracer is not None
            for _ in range(2100):  # more than the exporter keeps
                tracer.start_span("a span").end()
        assert has_begun.is_set() and not has_ended.is_set()
        may_end.set()
        assert has_ended.wait(60)


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://host/x", "http://user:word@host/", "http://"])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(
        ConfigError, match="otlp_traces_endpoint: must be a URL such as http://localhost:4318/v1/traces"
    ):
        HttpConfig(address="ipc:///x", otlp_traces_endpoint=endpoint)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with (
        pytest.raises(ConfigError, match=r"is not installed; run pip install 'trueroll\[otel\]'"),
        exporting("http://x"),
    ):
        pass
