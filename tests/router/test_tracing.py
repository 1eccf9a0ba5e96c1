"""Spans: which there are, how they hang together, and that nothing of it is there when nobody asked."""

import asyncio
import sys
from typing import Any

import pytest

from cygnet.base.errors import ConfigError
from cygnet.router.config import TracingSettings, resolve
from cygnet.router.runtime.tracing import Tracing, start_tracing
from router.harness import Client, ask, routing, until
from router.mock_worker import Behaviour, MockWorker, hang, plain, vanish

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra otel")
from opentelemetry.sdk.trace import ReadableSpan  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello " * 1000}]}


class Recorded:
    """Tracing whose spans a test can look at."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = sdk.TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    async def requests(self, count: int) -> list[ReadableSpan]:
        """The spans of `count` requests, once they are over."""
        await until(lambda: len(self.spans("POST /v1/chat/completions")) == count)
        return self.spans("POST /v1/chat/completions")


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def attribute(span: ReadableSpan, name: str) -> Any:
    assert span.attributes is not None
    return span.attributes[name]


async def test_a_callers_trace_goes_on_to_the_worker() -> None:
    recorded = Recorded()
    async with MockWorker() as worker, routing([worker], tracing=recorded.tracing) as router:
        headers = f"traceparent: 00-{TRACE}-{CALLER}-01\r\ntracestate: vendor=7\r\n"
        assert (await ask(router, BODY, headers=headers)).status == 200
        (request,) = await recorded.requests(1)
        (decision,), (upstream,) = recorded.spans("decision"), recorded.spans("upstream")
        assert f"{request.context.trace_id:032x}" == TRACE
        assert parent_of(request) == int(CALLER, 16)
        assert parent_of(decision) == parent_of(upstream) == request.context.span_id
        got = worker.received[-1]
        assert [name.lower() for name, _ in got.headers].count("traceparent") == 1
        assert got.header("traceparent") == f"00-{TRACE}-{upstream.context.span_id:016x}-01"
        assert got.header("tracestate") == "vendor=7"
        assert attribute(request, "http.response.status_code") == 200
        assert attribute(request, "gen_ai.request.model") == "m"
        assert attribute(decision, "cygnet.prompt_tokens") > 1000
        assert attribute(upstream, "server.port") == worker.port
        assert [event.name for event in upstream.events] == ["first byte"]


async def test_a_caller_who_does_not_record_is_heeded() -> None:
    recorded = Recorded()
    async with MockWorker() as worker, routing([worker], tracing=recorded.tracing) as router:
        await ask(router, BODY, headers=f"traceparent: 00-{TRACE}-{CALLER}-00\r\n")
        given = worker.received[-1].header("traceparent")
        assert given is not None
        assert given.startswith(f"00-{TRACE}-")
        assert given.endswith("-00")
        await ask(router, BODY, headers="traceparent: nonsense\r\ntracestate: vendor=7\r\n")
        (request,) = await recorded.requests(1)
        assert request.parent is None
        assert f"{request.context.trace_id:032x}" in (worker.received[-1].header("traceparent") or "")
        assert worker.received[-1].header("tracestate") is None


async def test_each_attempt_is_a_span() -> None:
    recorded = Recorded()
    async with MockWorker("a", vanish) as bad, MockWorker("b") as good:
        async with routing([bad, good], tracing=recorded.tracing, routing__policy="round_robin") as router:
            tried: dict[object, ReadableSpan] = {}
            for count in range(1, 21):  # some begin with the worker that breaks off, until it is left alone
                assert (await ask(router, BODY)).status == 200
                requests = await recorded.requests(count)
                tried = {attribute(request, "cygnet.attempts"): request for request in requests}
                if len(tried) == 2:
                    break
            assert set(tried) == {1, 2}
            attempts = [s for s in recorded.spans("upstream") if parent_of(s) == tried[2].context.span_id]
            assert [attribute(span, "server.port") for span in attempts] == [bad.port, good.port]
            assert attribute(attempts[0], "error.type") == "reset"
            assert [span.status.is_ok for span in attempts] == [False, True]
            assert all(span.status.is_ok for span in requests)


async def test_waiting_is_a_span() -> None:
    recorded = Recorded()
    gate = asyncio.Event()
    async with MockWorker("a", held(gate)) as worker:
        options: dict[str, Any] = {"routing__worker_budget_tokens": 2000, "routing__request_tokens": 2000}
        async with routing([worker], tracing=recorded.tracing, **options) as router:
            asked = [asyncio.ensure_future(ask(router, BODY)) for _ in range(2)]
            await until(lambda: router.proxy.num_waiting == 1)
            gate.set()
            assert [answer.status for answer in await asyncio.gather(*asked)] == [200, 200]
            requests = await recorded.requests(2)
            (queue,) = recorded.spans("queue")
            decisions = [s for s in recorded.spans("decision") if parent_of(s) == parent_of(queue)]
            assert [(s.attributes or {}).get("cygnet.no_room", False) for s in decisions] == [True, False]
            assert parent_of(queue) in {request.context.span_id for request in requests}


async def test_a_caller_who_leaves_ends_all_spans() -> None:
    recorded = Recorded()
    async with MockWorker("a", hang) as worker, routing([worker], tracing=recorded.tracing) as router:
        async with Client(router.port) as client:
            await client.send(b'{"model": "m", "prompt": "x"}', path="/v1/chat/completions")
            await until(lambda: worker.running)
        (request,) = await recorded.requests(1)
        assert attribute(request, "http.response.status_code") == 499
        assert attribute(recorded.spans("upstream")[0], "error.type") == "cancelled"


def held(gate: asyncio.Event) -> Behaviour:
    async def behave(*call: Any) -> None:
        await gate.wait()
        await plain()(*call)

    return behave


async def test_spans_reach_a_collector() -> None:
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    async with MockWorker("collector", plain(200, b"")) as collector, MockWorker() as worker:
        endpoint = f"{collector.url}/v1/traces"
        async with routing([worker], tracing__otlp_endpoint=endpoint, tracing__service_name="front") as router:
            await ask(router, BODY)
        # closing the router has sent them
        (sent,) = [request for request in collector.received if request.path == "/v1/traces"]
        told = messages.ExportTraceServiceRequest.FromString(sent.body).resource_spans[0]
        assert "front" in [attribute.value.string_value for attribute in told.resource.attributes]
        assert {span.name for scope in told.scope_spans for span in scope.spans} == {
            "POST /v1/chat/completions", "decision", "upstream",
        }  # fmt: skip


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="user or password"):
        resolve(sets=["tracing.otlp_endpoint=http://user:secret@127.0.0.1:1/v1/traces"])
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"cygnet\[otel\]"):
        start_tracing(TracingSettings(otlp_endpoint="http://127.0.0.1:1/v1/traces"))
    with pytest.raises(ConfigError, match=r"tracing\.otlp_endpoint"):
        resolve(sets=["tracing.otlp_endpoint=127.0.0.1:4318"])
