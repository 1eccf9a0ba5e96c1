"""A router in the test's own loop, in front of mock workers, and a client on a raw socket."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httptools

from cygnet.router.config import RouterConfig, resolve
from cygnet.router.runtime.proxy import Proxy
from cygnet.router.runtime.service import Service, listen
from cygnet.router.runtime.tracing import Tracing
from router.mock_worker import MockWorker

QUICK = {
    "server.access_log": False,
    "server.drain_s": 5.0,
    "workers.probe_s": 0.1,
    "workers.probe_timeout_s": 20.0,
    "workers.probe_failures": 2,
    "workers.connect_s": 1.0,
}


def config_for(workers: list[MockWorker], **options: Any) -> RouterConfig:
    """Settings for tests: quick probes; `options` have `__` for dots."""
    given = {name.replace("__", "."): value for name, value in options.items()}
    urls = given.pop("workers.urls", tuple(worker.url for worker in workers))
    return resolve(options={**QUICK, "workers.urls": urls, **given})[0]


@dataclass
class Router:
    """A router that runs."""

    service: Service
    port: int

    @property
    def proxy(self) -> Proxy:
        assert self.service.proxy is not None
        return self.service.proxy

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def settled(self) -> None:
        """Wait until nothing is in flight, and check that nothing is left of what was."""
        await until(lambda: not self.proxy.exchanges)
        assert await self.proxy.state.loads() == {}
        assert self.proxy.audit() == []


@asynccontextmanager
async def routing(
    workers: list[MockWorker], *, wait: bool = True, tracing: Tracing | None = None, **options: Any
) -> AsyncIterator[Router]:
    """A router in front of `workers`, which are up when the body begins, and whose books are in order when it ends."""
    config = config_for(workers, **options)
    listener = listen("127.0.0.1", 0)
    router = Router(Service(config, tracing), listener.getsockname()[1])
    task = asyncio.ensure_future(router.service.run(listener))
    try:
        await until(lambda: task.done() or router.service.proxy is not None)
        if wait:
            await until(lambda: task.done() or all(worker.health.up for worker in router.proxy.fleet.workers))
        assert not task.done(), task.result()
        yield router
        await router.settled()
    finally:
        router.service.stop()
        await asyncio.wait_for(task, 10)


async def until(condition: Callable[[], Any], limit_s: float = 30) -> None:
    """Poll until `condition()`."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.005)


@dataclass
class Answer:
    """What a client got. `whole`: it ended as HTTP says."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    pieces: list[bytes] = field(default_factory=list)
    whole: bool = False

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


class Client:
    """One keep-alive connection, strict about what comes back."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> "Client":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def send(
        self, body: bytes, path: str = "/v1/chat/completions", method: str = "POST", headers: str = ""
    ) -> None:
        head = f"{method} {path} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n{headers}"
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await self.writer.drain()

    async def answer(self) -> Answer:
        answer = Answer()

        class Events:
            def on_header(self, name: bytes, value: bytes) -> None:
                answer.headers[name.decode().lower()] = value.decode()

            def on_body(self, data: bytes) -> None:
                answer.pieces.append(data)

            def on_message_complete(self) -> None:
                answer.whole = True

        parser = httptools.HttpResponseParser(Events())
        while not answer.whole:
            try:
                data = await asyncio.wait_for(self.reader.read(1 << 16), 20)
            except ConnectionError:
                break
            if not data:
                break
            parser.feed_data(data)
        answer.status = parser.get_status_code()
        answer.body = b"".join(answer.pieces)
        return answer

    async def ask(self, body: bytes | dict[str, Any], **more: Any) -> Answer:
        await self.send(body if isinstance(body, bytes) else json.dumps(body).encode(), **more)
        return await self.answer()


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


async def ask(router: Router, body: bytes | dict[str, Any], **more: Any) -> Answer:
    """One request on a connection of its own."""
    async with Client(router.port) as client:
        return await client.ask(body, **more)
