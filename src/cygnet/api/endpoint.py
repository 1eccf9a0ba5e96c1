"""The way of a generation request, the same for chat and completions: read, prepare, run, answer or stream."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from cygnet.api.body import read_body
from cygnet.api.errors import ClientDisconnectedError, to_http
from cygnet.api.generation import Job, Tally
from cygnet.api.lifecycle import run_watched
from cygnet.api.output import Delta, TokenLogprobs
from cygnet.api.record import record_of
from cygnet.api.responses import CachedTokensDetails, PromptTokensDetails, Usage
from cygnet.api.service import Service
from cygnet.api.sse import EventStream, send_error, send_json
from cygnet.base.errors import CygnetError, EngineDeadError


@dataclass
class Choice:
    """One whole answer, put together from its deltas."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Append `delta`."""
        self.text.append(delta.text)
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class Renderer(Protocol):
    """Puts results into the words of one endpoint."""

    def opening(self, index: int) -> Any:
        """First event of a choice in a stream, or `None`."""

    def chunk(self, index: int, delta: Delta) -> Any:
        """Event for one delta."""

    def usage_chunk(self, usage: Usage) -> Any:
        """Last event of a stream that was asked for usage."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Any:
        """The whole response."""


@dataclass(frozen=True)
class Prepared:
    """A checked request, ready to run."""

    job: Job
    renderer: Renderer
    stream: bool
    include_usage: bool
    ignored: list[str]

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers that say what was ignored."""
        return (("x-ignored-fields", ",".join(self.ignored)),) if self.ignored else ()


Prepare = Callable[[Service, bytes], Awaitable[Prepared]]


class GenerationEndpoint:
    """An ASGI application for one route. While it works it watches the client: if it leaves, the request is aborted in
    the engine at once, whether it streams or not."""

    def __init__(self, service: Service, prepare: Prepare) -> None:
        self._service = service
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        stream = EventStream(send)
        try:
            arrival = time.monotonic_ns()
            if self._service.lifecycle.draining.is_set():
                raise EngineDeadError("the server is shutting down and takes no new requests")
            body = await read_body(scope, receive, self._service.settings.max_body_bytes)
            work = self._work(scope, body, stream, send, arrival)
            await run_watched(work, receive, self._service.lifecycle)
        except ClientDisconnectedError:
            record.disconnected = True
        except CygnetError as error:
            failure = to_http(error)
            record.failure = failure.body.error.code or failure.body.error.type
            if stream.started:
                await stream.fail(failure)
            else:
                await send_error(send, failure)

    async def _work(self, scope: Scope, body: bytes, stream: EventStream, send: Send, arrival: int) -> None:
        prepared = await self._prepare(self._service, body)
        stream.headers = prepared.headers
        tally = Tally(prepared.job)
        self._service.kv_events.begin(prepared.job.id, record_of(scope).request_id)
        try:
            if prepared.stream:
                await self._stream(prepared, tally, stream, arrival)
            else:
                await self._answer(prepared, tally, send, arrival)
        finally:
            self._service.kv_events.end(prepared.job.id)
            record = record_of(scope)
            record.prompt_tokens, record.completion_tokens = tally.prompt_tokens, tally.completion_tokens
            record.cached = _cached(tally, self._service)

    async def _answer(self, prepared: Prepared, tally: Tally, send: Send, arrival: int) -> None:
        choices = [Choice() for _ in range(len(prepared.job.prompts) * prepared.job.n)]

        async def collect(index: int, delta: Delta) -> None:
            choices[index].add(delta)

        await self._service.generator.run(tally, collect, arrival=arrival)
        await send_json(send, prepared.renderer.whole(choices, self._usage(tally)), headers=prepared.headers)

    async def _stream(self, prepared: Prepared, tally: Tally, stream: EventStream, arrival: int) -> None:
        opened: set[int] = set()

        async def emit(index: int, delta: Delta) -> None:
            if index not in opened:
                opened.add(index)
                if (opening := prepared.renderer.opening(index)) is not None:
                    await stream.event(opening)
            if delta.visible:
                await stream.event(prepared.renderer.chunk(index, delta))

        await self._service.generator.run(tally, emit, arrival=arrival)
        if prepared.include_usage:
            await stream.event(prepared.renderer.usage_chunk(self._usage(tally)))
        await stream.done()

    def _usage(self, tally: Tally) -> Usage:
        total = tally.prompt_tokens + tally.completion_tokens
        return Usage(tally.prompt_tokens, tally.completion_tokens, total, _cached(tally, self._service))


def _cached(tally: Tally, service: Service) -> PromptTokensDetails:
    total, host, store = tally.cached
    details = CachedTokensDetails(total - host - store, host, store) if service.has_lower_tiers else UNSET
    return PromptTokensDetails(total, details)
