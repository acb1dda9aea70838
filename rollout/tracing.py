"""OpenTelemetry spans of generations and of session calls, and the export of spans.

Owns: the attributes of spans, which follow the semantic conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/). Promises: a span contains no prompt, text, token,
key, session capability, request id or answer id. A span also contains no error text, because an error text may quote a
prompt, a key or other private data. opentelemetry is imported only if a tracer or an endpoint is given. Without a
tracer, no span is made.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from trueroll.errors import ConfigError, TruerollError

from ..engine.request import SampleDelta, SampleOutput
from . import protocol

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

PROVIDER = "trueroll"
EXPORT_SECONDS = 5.0
"""Maximum time, in seconds, for sending a batch of spans, and for sending the remaining spans at the end."""


@contextmanager
def exporting(endpoint: str | None) -> Iterator[Tracer | None]:
    """Yield a tracer that sends its spans to `endpoint`, the URL of an OTLP receiver over HTTP. Yield None if
    `endpoint` is None. When the context ends, send the remaining spans, for at most `EXPORT_SECONDS`.

    OpenTelemetry's environment variables apply, such as OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS. Raise
    ConfigError if the packages of OpenTelemetry are not installed.
    """
    if endpoint is None:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        text = f"otlp_traces_endpoint: the package {error.name} is not installed; run pip install 'trueroll[otel]'"
        raise ConfigError(text, field="otlp_traces_endpoint") from None
    name = os.environ.get("OTEL_SERVICE_NAME") or PROVIDER
    provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)))
    try:
        yield provider.get_tracer(PROVIDER)
    finally:
        closing = threading.Thread(target=provider.shutdown, daemon=True)  # the exporter may retry for up to 30 s
        closing.start()
        closing.join(EXPORT_SECONDS)


async def traced_replies(
    tracer: Tracer, model: str, requests: Mapping[int, Any], replies: AsyncGenerator[tuple[int, Any], None]
) -> AsyncGenerator[tuple[int, Any], None]:
    """Yield the replies to requests for samples, with a span for each request.

    `replies`: pairs of a request's position and a reply, see `AsyncRolloutClient.exchange`. `requests`: the message of
    each request, by the request's position. The spans are children of the
    caller's current span. A span ends when its request ends.
    """
    running = {position: _Generation(tracer, model, request) for position, request in requests.items()}
    try:
        async with aclosing(replies):
            async for position, reply in replies:
                if isinstance(reply, TruerollError | protocol.Done):
                    running.pop(position).end(reply if isinstance(reply, TruerollError) else None)
                else:
                    running[position].add(reply)
                yield position, reply
    except BaseException as error:
        for generation in running.values():
            generation.end(error)
        raise


class _Generation:
    """The span of a request for samples."""

    def __init__(self, tracer: Tracer, model: str, request: protocol.Generate) -> None:
        from opentelemetry.trace import SpanKind

        params = request.params
        attributes = _attributes("text_completion", model) | {
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids) // 4,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if params.n != 1:
            attributes["gen_ai.request.choice.count"] = params.n
        if request.deltas:
            attributes["gen_ai.request.stream"] = True
        self._begun = time.monotonic()
        self._has_begun_to_answer = False
        self._samples: dict[int, protocol.FinishedSample] = {}
        name = f"text_completion {model}"
        self._span = tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)

    def add(self, reply: SampleDelta | protocol.FinishedSample) -> None:
        """Record new tokens or a finished sample."""
        if isinstance(reply, protocol.FinishedSample):
            self._samples[reply.index] = reply
        elif not self._has_begun_to_answer:
            self._has_begun_to_answer = True
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._begun)

    def end(self, error: BaseException | None) -> None:
        """End the span."""
        samples = [self._samples[index] for index in sorted(self._samples)]
        if samples:
            note_answers(
                self._span,
                num_tokens=sum(len(sample.token_ids) for sample in samples) // 4,
                num_cached=max(sample.num_cached_tokens for sample in samples),
                finish_reasons=[sample.finish_reason for sample in samples],
                versions={version for sample in samples for version, _, _ in sample.weight_versions},
            )
        if error is not None:
            note_error(self._span, error)
        self._span.end()


class CallSpan:
    """The span of a session's call. Without a tracer, the object does nothing. The span is not made the current span,
    because a call over HTTP begins in one task and ends in another.
    """

    def __init__(self, tracer: Tracer | None, model: str, session_id: str) -> None:
        self._span: Span | None = None
        if tracer is not None:
            attributes = _attributes("chat", model) | {"gen_ai.conversation.id": session_id}
            self._span = tracer.start_span(f"chat {model}", attributes=attributes)

    def as_parent(self) -> AbstractContextManager[Any]:
        """Return a context manager in which the span is the current span. Tasks that are started in this context keep
        the span as their current span.
        """
        if self._span is None:
            return nullcontext()
        from opentelemetry.trace import use_span

        return use_span(self._span, record_exception=False, set_status_on_exception=False)

    def note_sample(self, num_prompt_tokens: int, sample: SampleOutput, finish_reason: str) -> None:
        """Add the answer to the span."""
        if self._span is not None:
            self._span.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)
            versions = {each.version for each in sample.weight_versions}
            note_answers(self._span, len(sample.token_ids), sample.num_cached_tokens, [finish_reason], versions)

    def end(self, error: BaseException | None) -> None:
        """End the span. `error`: the error with which the call failed, or None."""
        if self._span is not None:
            if error is not None:
                note_error(self._span, error)
            self._span.end()


@contextmanager
def session_call(tracer: Tracer | None, model: str, session_id: str) -> Iterator[CallSpan]:
    """Make a span for a call of a session. `session_id`: `AsyncSession.id`, which is not the session's capability."""
    span = CallSpan(tracer, model, session_id)
    try:
        yield span
    except BaseException as error:
        span.end(error)
        raise
    span.end(None)


def note_answers(
    span: Span, num_tokens: int, num_cached: int, finish_reasons: Sequence[str], versions: set[int]
) -> None:
    """Add answers to a span. `num_cached`: number of prompt tokens from the cache. `versions`: the weight versions."""
    span.set_attribute("gen_ai.usage.output_tokens", num_tokens)
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", num_cached)
    span.set_attribute("gen_ai.response.finish_reasons", finish_reasons)
    span.set_attribute("trueroll.weight_versions", sorted(versions))


def note_error(span: Span, error: BaseException) -> None:
    """Mark a span as failed. The attribute `error.type` becomes the name of the error's class, or `cancelled` if the
    caller of the generation or session call left. The text of the error is not added.
    """
    from opentelemetry.trace import StatusCode

    is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
    span.set_attribute("error.type", "cancelled" if is_cancelled else type(error).__name__)
    span.set_status(StatusCode.ERROR)


def _attributes(operation: str, model: str) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
    }
