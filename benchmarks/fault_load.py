"""Workers and callers for `router_faults.py`. A worker keeps a journal of what it was sent and what it answered; a
caller knows of each request how it ended.

python fault_load.py PORT JOURNAL    runs a worker; SIGUSR1 makes it answer garbage, SIGUSR2 break off; again: no more
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import httptools
import uvloop

ANSWER_S = 60.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CARDS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'


class Worker(asyncio.Protocol):
    """Streams what the header `x-mock` asks for: delay in ms, events, ms between them, bytes of each."""

    mode = ""

    def __init__(self, note: Callable[[bytes, bytes], None]) -> None:
        self._note = note
        self._request = b""
        self._task: asyncio.Task[None] | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._mock, self._id = b"", b"0 1 0 0", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        with suppress(httptools.HttpParserUpgrade):  # an offer that is not taken
            self._parser.feed_data(data)

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()
            self._note(b"A", self._request)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"x-mock":
                self._mock = value
            case b"x-request-id":
                self._id = value

    def on_message_complete(self) -> None:
        url, mock, self._request = self._url, self._mock, self._id
        self._begin()
        if not url.startswith(b"/v1/chat"):
            body = CARDS if url == b"/v1/models" else b"{}"
            line = b"200 OK" if url in (b"/v1/models", b"/health") else b"404 Not Found"
            head = b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (line, len(body))
            self._transport.write(head + body)
            self._transport.close()
            return
        self._note(b"R", self._request)
        if Worker.mode == "garbage":
            self._transport.write(b"\x00\xff this is not HTTP \r\n\r\n")
        elif Worker.mode == "vanish":
            self._transport.abort()
        else:
            self._task = asyncio.get_running_loop().create_task(self._stream(*map(int, mock.split())))

    async def _stream(self, delay_ms: int, events: int, gap_ms: int, size: int) -> None:
        await asyncio.sleep(delay_ms / 1000)
        head = HEAD
        for number in range(events):
            event = b"data: %d %b\n\n" % (number, b"x" * size)
            await self._can_write.wait()
            if head:
                self._note(b"F", self._request)
            self._transport.write(b"%b%x\r\n%b\r\n" % (head, len(event), event))
            head = b""
            if gap_ms:
                await asyncio.sleep(gap_ms / 1000)
        await self._can_write.wait()
        self._task = None
        self._note(b"D", self._request)
        self._transport.write(b"0\r\n\r\n")


async def run_worker(port: int, journal: str) -> None:
    file = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    loop = asyncio.get_running_loop()

    def toggle(mode: str) -> None:
        Worker.mode = "" if Worker.mode else mode

    loop.add_signal_handler(signal.SIGUSR1, toggle, "garbage")
    loop.add_signal_handler(signal.SIGUSR2, toggle, "vanish")
    server = await loop.create_server(
        lambda: Worker(lambda what, who: void(os.write(file, b"%b %b\n" % (what, who)))), "127.0.0.1", port
    )
    await server.serve_forever()


def void(_: object) -> None:
    """Nothing of it."""


@dataclass
class Outcome:
    """How a request ended: ok, broken (off within its answer), lost (not one byte of an answer), wrong (whole, and not
    what was asked for), a status, or left (by its caller, on purpose)."""

    request: str
    began: float
    ended: float = 0.0
    kind: str = "lost"


@dataclass
class Answer:
    """An answer as it comes in."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.whole = True


@dataclass(frozen=True)
class Habits:
    """What callers ask for and how they behave."""

    mock: str = "20 8 20 20"
    text: int = 6000
    """Bytes of a session's first prompt; it grows by a tenth each turn, eight times."""
    leaves: float = 0.0
    """Part of the requests that are given up, at a moment drawn from `within_s`."""
    within_s: float = 0.3
    pause_s: float = 0.0
    """Between pieces read: a slow reader."""


class Callers:
    """Keep-alive connections that ask one request after the other, at any of `ports` that takes a connection."""

    def __init__(self, ports: list[int], name: str, habits: Habits, seed: int = 0) -> None:
        import random

        self.ports, self.name, self.habits = ports, name, habits
        self.outcomes: list[Outcome] = []
        self.stopped = asyncio.Event()
        self.reconnects = 0
        self._random = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._ask_always(seat)) for seat in range(number)]

    async def stop(self) -> None:
        """No new requests; those under way end."""
        self.stopped.set()
        await asyncio.gather(*self._tasks)

    async def leave(self) -> None:
        """Break off at once, whatever is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        end = time.monotonic() + ANSWER_S
        while True:
            for port in self.ports:
                with suppress(OSError):
                    return await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            if time.monotonic() > end:
                raise SystemExit("no router takes a connection")
            await asyncio.sleep(0.05)

    def _bodies(self, seat: int) -> Iterator[bytes]:
        for session in count():
            text = f"{self.name} {seat} {session} " * (self.habits.text // 12)
            for turn in range(8):
                grown = text + "and more " * (turn * self.habits.text // 90)
                yield json.dumps(
                    {"model": "m", "stream": True, "messages": [{"role": "user", "content": grown}]}
                ).encode()

    async def _ask_always(self, seat: int) -> None:
        bodies = self._bodies(seat)
        connection = await self._connect()
        try:
            for turn in count():
                if self.stopped.is_set():
                    return
                outcome = Outcome(f"{self.name}-{seat}-{turn}", time.monotonic())
                keep = await self._ask(connection, outcome, next(bodies))
                outcome.ended = time.monotonic()
                if outcome.kind == "unsent":  # closed while idle, before a byte of the request was taken: ask anew
                    self.reconnects += 1
                else:
                    self.outcomes.append(outcome)
                if not keep:
                    connection[1].transport.abort()
                    connection = await self._connect()
                if outcome.kind not in ("ok", "unsent"):
                    await asyncio.sleep(0.02)
        finally:
            connection[1].transport.abort()

    async def _ask(
        self, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], outcome: Outcome, body: bytes
    ) -> bool:
        """Whether the connection can be used again."""
        reader, writer = connection
        if reader.at_eof() or writer.transport.is_closing():
            outcome.kind = "unsent"
            return False
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
            f"X-Request-Id: {outcome.request}\r\nX-Mock: {self.habits.mock}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = Answer()
        reading = self._read(reader, answer)
        leaves = self._random.random() < self.habits.leaves
        try:
            await asyncio.wait_for(reading, self._random.uniform(0, self.habits.within_s) if leaves else ANSWER_S)
        except TimeoutError:
            outcome.kind = "left" if leaves else "lost"
            return False
        except (ConnectionError, httptools.HttpParserError):
            pass
        outcome.kind = self._judge(answer)
        return answer.whole

    async def _read(self, reader: asyncio.StreamReader, answer: Answer) -> None:
        parser = httptools.HttpResponseParser(answer)
        while not answer.whole:
            data = await reader.read(4096 if self.habits.pause_s else 1 << 16)
            if not data:
                return
            parser.feed_data(data)
            answer.status = parser.get_status_code()
            if self.habits.pause_s:
                await asyncio.sleep(self.habits.pause_s)

    def _judge(self, answer: Answer) -> str:
        if not answer.status:
            return "lost"
        if not answer.whole:
            return "broken" if answer.body else "lost"
        if answer.status != 200:
            return str(answer.status)
        numbers = [int(event.split(b" ")[1]) for event in bytes(answer.body).split(b"\n\n") if event]
        return "ok" if numbers == list(range(int(self.habits.mock.split()[1]))) else "wrong"


async def get(port: int, path: str) -> Any:
    """JSON of a GET, or the text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n".encode())
        body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")[2]
        return body.decode() if path == "/metrics" else json.loads(body)
    finally:
        writer.transport.abort()


if __name__ == "__main__":
    uvloop.run(run_worker(int(sys.argv[1]), sys.argv[2]))
