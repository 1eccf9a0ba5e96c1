"""Spans of requests for OpenTelemetry. Needs the extra `otel`; nothing of it is imported unless a router traces.

    request                     the caller's side, from the whole request to the end of the answer
      queue                     waiting for a worker that has room
      decision                  asking the state where to go
      upstream                  one attempt at one worker; its context is what the worker gets as `traceparent`

A caller's `traceparent` is continued, and with it the caller's word on whether to record.
"""

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cygnet.base.errors import ConfigError
from cygnet.router.config import TracingSettings
from cygnet.router.runtime.wire import HttpRequest
from cygnet.router.state import Decision

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span


FLUSH_S = 5.0
"""Longest wait at the end for spans to be sent."""


class Tracing:
    """Makes a `Trace` for each request, with the provider given (which says what is recorded and where it goes)."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.api = trace
        self.propagator = TraceContextTextMapPropagator()
        self._provider = provider
        self.tracer = provider.get_tracer("cygnet.router")

    def begin(self, request: HttpRequest, request_id: bytes) -> "Trace":
        """A request is to be served."""
        return Trace(self, request, request_id)

    async def aclose(self) -> None:
        """Send what is still to be sent, for `FLUSH_S` at most: a collector that is away does not keep a router."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # nobody waits any more, and the loop is closed
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=shut_down, name="tracing-flush", daemon=True).start()
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), FLUSH_S)


class Trace:
    """Spans of one request. At most one of each kind is open; `ended` ends whatever is."""

    def __init__(self, tracing: Tracing, request: HttpRequest, request_id: bytes) -> None:
        self._tracing = tracing
        carrier = {
            name: request.fields[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in request.fields
        }
        above = tracing.propagator.extract(carrier)
        path = request.target.partition(b"?")[0].decode("latin-1")
        method = request.method.decode()
        self._request = tracing.tracer.start_span(
            f"{method} {path}",
            above,
            tracing.api.SpanKind.SERVER,
            {
                "http.request.method": method,
                "url.path": path,
                "http.request.body.size": len(request.body),
                "cygnet.request_id": request_id.decode("latin-1"),
            },
        )
        self._context = tracing.api.set_span_in_context(self._request, above)
        self._queue: Span | None = None
        self._decision: Span | None = None
        self._upstream: Span | None = None

    def _start(self, name: str) -> "Span":
        return self._tracing.tracer.start_span(name, self._context)

    def queued(self) -> None:
        """It waits for room."""
        self._queue = self._start("queue")

    def dequeued(self) -> None:
        """It waits no longer."""
        if self._queue is not None:
            self._queue.end()
            self._queue = None

    def deciding(self) -> None:
        """The state is asked where to go."""
        self._decision = self._start("decision")

    def decided(self, decision: Decision | None, tokens: int) -> None:
        """It has answered; `None`: no worker has room. A request that waits asks often: then only what ends the
        waiting is kept.
        """
        span, self._decision = self._decision, None
        if span is None or (decision is None and self._queue is not None):
            return
        span.set_attribute("cygnet.prompt_tokens", tokens)
        if decision is None:
            span.set_attribute("cygnet.no_room", True)
        else:
            span.set_attribute("cygnet.matched_tokens", decision.matched_tokens)
            span.set_attribute("cygnet.spilled", decision.spilled)
            span.set_attribute("cygnet.shared", decision.shared)
        span.end()

    def sent(self, url: str) -> bytes:
        """The request goes to a worker. Returns the header lines that tell the worker so."""
        self._close_upstream({"cygnet.stale_connection": True})
        parts = urlsplit(url)
        span = self._upstream = self._tracing.tracer.start_span(
            "upstream",
            self._context,
            self._tracing.api.SpanKind.CLIENT,
            {"server.address": parts.hostname or "", "server.port": parts.port or 80},
        )
        carrier: dict[str, str] = {}
        self._tracing.propagator.inject(carrier, self._tracing.api.set_span_in_context(span, self._context))
        return "".join(f"{name}: {value}\r\n" for name, value in carrier.items()).encode("latin-1")

    def first_byte(self) -> None:
        """The first byte of the worker's answer is here."""
        if self._upstream is not None:
            self._upstream.add_event("first byte")

    def answered(self, status: int) -> None:
        """The worker's answer is whole, or it is one that is not wanted (a refusal that another worker may spare)."""
        self._close_upstream({"http.response.status_code": status}, f"HTTP {status}" if status >= 500 else "")

    def failed(self, kind: str) -> None:
        """The attempt is over without an answer."""
        self._close_upstream({"error.type": kind}, kind)

    def ended(self, status: int, attempts: int, model: str, note: str) -> None:
        """The request is over; `status` is what the caller got, 499 when it left and 0 when it was cut off."""
        self.dequeued()
        if self._decision is not None:
            self._decision.end()
            self._decision = None
        self._close_upstream({"error.type": note or "cancelled"}, note or "cancelled")
        span = self._request
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("cygnet.attempts", attempts)
        if model:
            span.set_attribute("gen_ai.request.model", model)
        if note:
            span.set_attribute("error.type", note)
        if note or status >= 500 or status == 0:
            self._mark(span, note or f"HTTP {status}")
        span.end()

    def _close_upstream(self, attributes: dict[str, Any], error: str = "") -> None:
        span, self._upstream = self._upstream, None
        if span is not None:
            span.set_attributes(attributes)
            if error:
                self._mark(span, error)
            span.end()

    def _mark(self, span: "Span", error: str) -> None:
        span.set_status(self._tracing.api.Status(self._tracing.api.StatusCode.ERROR, error))


def start_tracing(settings: TracingSettings) -> Tracing | None:
    """What the settings ask for. Raises `ConfigError` when the extra is not installed."""
    if not settings.otlp_endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ConfigError(
            f"tracing.otlp_endpoint is set and OpenTelemetry is not installed ({error}); pip install 'cygnet[otel]'"
        ) from None
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        resource=Resource.create({"service.name": settings.service_name}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint, timeout=settings.export_timeout_s)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)
