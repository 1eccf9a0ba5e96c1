"""Sending: one JSON body, or a stream of server-sent events whose headers wait for the first event."""

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.types import Send

from cygnet.api.errors import ClientDisconnectedError, HttpError

SEND_TIMEOUT_S = 60.0
"""A client that takes nothing for so long is treated as gone."""

Headers = Iterable[tuple[str, str]]


async def _send(send: Send, message: dict[str, Any]) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send(message)
    except TimeoutError:
        raise ClientDisconnectedError from None


async def _start(send: Send, status: int, headers: Headers) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await _send(send, {"type": "http.response.start", "status": status, "headers": raw})


async def send_json(send: Send, body: Any, *, status: int = 200, headers: Headers = ()) -> None:
    """Answer with `body` (anything msgspec encodes)."""
    data = msgspec.json.encode(body)
    fixed = (("content-type", "application/json"), ("content-length", str(len(data))))
    await _start(send, status, (*fixed, *headers))
    await _send(send, {"type": "http.response.body", "body": data})


async def send_error(send: Send, error: HttpError) -> None:
    """Answer with an error."""
    await send_json(send, error.body, status=error.status, headers=error.headers)


class EventStream:
    """Server-sent events. Nothing goes out before the first event, so until then a failure can still become a status.

    Several tasks may send at once: events are written one after the other. A client that doesn't keep up holds the
    sender back, which is what bounds memory here.
    """

    def __init__(self, send: Send, headers: Headers = ()) -> None:
        self._send = send
        self.headers = tuple(headers)
        """Sent with the first event."""
        self._lock = asyncio.Lock()
        self.started = False

    async def event(self, data: Any) -> None:
        """Send one event with `data` as JSON."""
        await self._write(b"data: " + msgspec.json.encode(data) + b"\n\n")

    async def done(self) -> None:
        """Send OpenAI's end mark and end the response."""
        await self._write(b"data: [DONE]\n\n")
        await self.end()

    async def fail(self, error: HttpError) -> None:
        """Report a failure as the last event and end the response (without end mark: the answer is not whole)."""
        await self._write(b"data: " + msgspec.json.encode(error.body) + b"\n\n")
        await self.end()

    async def end(self) -> None:
        """End the response."""
        await _send(self._send, {"type": "http.response.body", "body": b""})

    async def _write(self, data: bytes) -> None:
        async with self._lock:
            if not self.started:
                self.started = True
                fixed = (
                    ("content-type", "text/event-stream; charset=utf-8"),
                    ("cache-control", "no-cache"),
                    ("x-accel-buffering", "no"),
                )
                await _start(self._send, 200, (*fixed, *self.headers))
            await _send(self._send, {"type": "http.response.body", "body": data, "more_body": True})
