"""Mock workers and callers for `router.py`, as processes of their own; and a relay, to compare with.

python router_load.py worker PORT
python router_load.py relay PORT WORKER_PORT
python router_load.py load PORT CALLERS SECONDS BODY_BYTES "DELAY_MS EVENTS"
"""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httptools
import uvloop


class MockWorker(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.begin()

    def begin(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.head: dict[bytes, bytes] = {}
        self.url = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-mock":
            self.head[b"x-mock"] = value

    def on_message_complete(self) -> None:
        delay_ms, events = map(int, self.head.pop(b"x-mock", b"0 0").split())
        url, self.url = self.url, b""
        answer = _worker_answer(url, events)
        if delay_ms:
            asyncio.get_running_loop().call_later(delay_ms / 1000, self.transport.write, answer)
        else:
            self.transport.write(answer)


def _worker_answer(url: bytes, events: int) -> bytes:
    if url == b"/v1/models":
        return _whole(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
    if not events:
        return _whole(
            b'{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"' + b"y" * 200 + b'"}}]}'
        )
    event = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
    chunk = b"%x\r\n%b\r\n" % (len(event), event)
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunk * events
        + b"0\r\n\r\n"
    )


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def run_worker(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(MockWorker, "127.0.0.1", port)
    await server.serve_forever()


RELAY_BYTES = 1 << 20


def run_relay(port: int, worker: int) -> None:
    """Pass bytes on between callers and a worker, and look at none of them: what one more process on the way costs."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        buffer = memoryview(bytearray(RELAY_BYTES))
        try:
            while count := source.recv_into(buffer):
                sink.sendall(buffer[:count])
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()

    with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
        while True:
            caller, _ = listener.accept()
            upstream = socket.create_connection(("127.0.0.1", worker))
            for source, sink in ((caller, upstream), (upstream, caller)):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=pump, args=(source, sink), daemon=True).start()


@dataclass
class Tally:
    first_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    errors: int = 0


class Caller(asyncio.Protocol):
    """One keep-alive connection that asks again as soon as it is answered, until time is up."""

    def __init__(self, requests: list[bytes], start: int, until: float, tally: Tally, done: Callable[[], None]) -> None:
        self.requests, self.turn, self.until, self.tally, self.done = requests, start, until, tally, done

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.turn += 1
        self.began, self.first = time.perf_counter(), 0.0
        self.transport.write(self.requests[self.turn % len(self.requests)])

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if not self.first:
            self.first = time.perf_counter()

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        if self.parser.get_status_code() != 200:
            self.tally.errors += 1
        self.tally.first_ms.append(((self.first or now) - self.began) * 1000)
        self.tally.total_ms.append((now - self.began) * 1000)
        if now < self.until:
            asyncio.get_running_loop().call_soon(self.ask)
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.done()


async def run_load(port: int, callers: int, seconds: float, body_bytes: int, mock: str) -> None:
    """Print a JSON object: requests, errors, seconds, latencies."""
    sessions = 64 if body_bytes < 1 << 20 else 4
    requests = [_request(number, body_bytes, mock) for number in range(sessions)]
    tally, left = Tally(), callers
    finished = asyncio.Event()

    def done() -> None:
        nonlocal left
        left -= 1
        if not left:
            finished.set()

    loop = asyncio.get_running_loop()
    begin = time.perf_counter()
    for number in range(callers):
        make = partial(Caller, requests, number * 7, begin + seconds, tally, done)
        await loop.create_connection(make, "127.0.0.1", port)
    await finished.wait()
    took = time.perf_counter() - begin
    first, total = sorted(tally.first_ms), sorted(tally.total_ms)
    out = {"requests": len(total), "errors": tally.errors, "seconds": took}
    for name, values in (("first", first), ("total", total)):
        out |= {f"{name}_p50_ms": _quantile(values, 0.5), f"{name}_p99_ms": _quantile(values, 0.99)}
    print(json.dumps(out))


def _request(number: int, body_bytes: int, mock: str) -> bytes:
    text = f"session {number} " + "words of a prompt " * (body_bytes // 18)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], "stream": mock[-2:] != " 0"})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer key\r\nX-Mock: {mock}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


def _quantile(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def main() -> None:
    role, port, *rest = sys.argv[1:]
    if role == "worker":
        uvloop.run(run_worker(int(port)))
    elif role == "relay":
        run_relay(int(port), int(rest[0]))
    else:
        callers, seconds, body_bytes, mock = rest
        uvloop.run(run_load(int(port), int(callers), float(seconds), int(body_bytes), mock))


if __name__ == "__main__":
    main()
