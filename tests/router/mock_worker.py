"""A worker whose behaviour a test chooses: enough of an OpenAI server on a raw socket, and every way to go wrong."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

POLL_S = 0.005
CARD = {"id": "m", "object": "model", "owned_by": "mock", "max_model_len": 4096}


@dataclass
class Received:
    """A request as it arrived."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


Behaviour = Callable[["MockWorker", Received, asyncio.StreamWriter], Awaitable[None]]


def plain(status: int = 200, body: bytes = b'{"ok":true}', headers: str = "") -> Behaviour:
    """Answer with a body of known length."""

    async def behave(worker: "MockWorker", request: Received, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: application/json\r\nX-Worker: {worker.name}\r\n{headers}"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    return behave


def raw(data: bytes, *, close: bool = True) -> Behaviour:
    """Send exactly these bytes."""

    async def behave(worker: "MockWorker", request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if close:
            writer.close()

    return behave


def stream(
    count: int = 16,
    *,
    die_after: int | None = None,
    gate: asyncio.Event | None = None,
    size: int = 0,
    hold: asyncio.Event | None = None,
) -> Behaviour:
    """Server-sent events. `gate` is waited for after the head, `hold` after the first event."""

    async def behave(worker: "MockWorker", request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await writer.drain()
        if gate is not None:
            await gate.wait()
        for number in range(count):
            if die_after is not None and number == die_after:
                writer.transport.abort()
                return
            event = b"data: %d %s\n\n" % (number, b"x" * size)
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            worker.events_sent += 1
            if number == 0 and hold is not None:
                await hold.wait()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    return behave


async def hang(worker: "MockWorker", request: Received, writer: asyncio.StreamWriter) -> None:
    """Never answer."""
    await asyncio.Event().wait()


async def vanish(worker: "MockWorker", request: Received, writer: asyncio.StreamWriter) -> None:
    """Break off without a byte."""
    writer.transport.abort()


@dataclass
class MockWorker:
    """Serves `/health` and `/v1/models` properly and all else by `behaviour`."""

    name: str = "w"
    behaviour: Behaviour = field(default_factory=plain)
    card: dict[str, Any] = field(default_factory=lambda: dict(CARD))
    healthy: bool = True
    port: int = 0
    received: list[Received] = field(default_factory=list)
    aborted: int = 0
    """Requests whose caller closed the connection before the answer was whole."""
    running: int = 0
    events_sent: int = 0
    _server: asyncio.Server | None = None
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Die: no more connections, and those there are break off."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            with suppress(asyncio.CancelledError):
                await task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while not writer.is_closing():
                request = await self._read(reader)
                if request is None:
                    return
                if not await self._answer(request, reader, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return  # the task is its own top: nobody else waits for its cancellation but `kill`
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> Received | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, path, _ = first.split(" ")
        headers = [tuple(line.split(": ", 1)) for line in lines]
        length = next((int(value) for key, value in headers if key.lower() == "content-length"), 0)
        return Received(method, path, headers, await reader.readexactly(length))  # type: ignore[arg-type]

    async def _answer(self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on. Ends the behaviour when the caller closes."""
        if request.method == "GET":
            if request.path == "/health":
                await plain(200 if self.healthy else 503, b"")(self, request, writer)
            else:
                await plain(200, json.dumps({"object": "list", "data": [self.card]}).encode())(self, request, writer)
            await writer.drain()
            return True
        self.received.append(request)
        self.running += 1
        work = asyncio.ensure_future(self.behaviour(self, request, writer))
        try:
            while not work.done():
                if reader.at_eof():
                    self.aborted += 1
                    return False
                await asyncio.wait([work], timeout=POLL_S)
            work.result()
            await writer.drain()
        except ConnectionError:
            self.aborted += 1
            return False
        finally:
            self.running -= 1
            work.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await work
        return not writer.is_closing()
