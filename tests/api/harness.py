"""A real server on a free port, in the test's own event loop, over a fake engine."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec
from openai import AsyncOpenAI

from cygnet.api.app import create_app
from cygnet.api.card import ModelCard
from cygnet.api.server import Server, listen
from cygnet.base.config import ApiSettings
from cygnet.base.messages import AddRequest
from fakes.engine import FakeEngine, Reply
from fakes.tokenizer import VOCAB_SIZE, FakeTokenizer

T = TypeVar("T")

MODEL = "fake-model"
TOKENIZER = FakeTokenizer()


def reply_with(text: str) -> Reply:
    """Always the same answer."""
    return lambda request: TOKENIZER.encode(text, add_special_tokens=False)


def endless(request: AddRequest) -> list[int]:
    """An answer longer than any context."""
    return TOKENIZER.encode("abcdefghij", add_special_tokens=False) * 1000


def fake_engine(reply: Reply | str = "hello world", **settings: Any) -> FakeEngine:
    """An engine that knows `FakeTokenizer`."""
    return FakeEngine(reply_with(reply) if isinstance(reply, str) else reply, vocab_size=VOCAB_SIZE, **settings)


@dataclass
class Running:
    """A server under test and clients for it."""

    url: str
    port: int
    engine: FakeEngine
    server: Server
    task: asyncio.Task[None]
    http: httpx.AsyncClient
    openai: AsyncOpenAI

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "hello", **fields})


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None, *, chat: bool = True, api_key: str = "", **settings: Any
) -> AsyncIterator[Running]:
    """Serve `engine` until the end of the block."""
    engine = engine or fake_engine()
    merged = msgspec.convert({"port": 0, "api_key": api_key, "drain_s": 5.0, **settings}, ApiSettings)
    app = create_app(engine, FakeTokenizer(chat=chat), merged, ModelCard(id=MODEL, created=1_700_000_000))
    address: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    server = Server(app, merged, on_ready=lambda host, port: address.set_result((host, port)))
    task = asyncio.create_task(server.run_on(listen(merged.host, 0)))
    host, port = await asyncio.wait_for(address, 10)
    url = f"http://{host}:{port}"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with (
            httpx.AsyncClient(base_url=url, headers=headers, timeout=20, trust_env=False) as http,
            httpx.AsyncClient(trust_env=False, timeout=20) as inner,
            AsyncOpenAI(base_url=url + "/v1", api_key=api_key or "none", max_retries=0, http_client=inner) as client,
        ):
            yield Running(url, port, engine, server, task, http, client)
    finally:
        server.stop()
        if not task.done():
            server.stop()
        await asyncio.wait_for(task, 15)
        await engine.aclose()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test; no test takes longer than half a minute."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*args, **kwargs), 30)

        asyncio.run(bounded())

    return run


def events(text: str) -> list[Any]:
    """The JSON events of a stream's text; the end mark as the string `[DONE]`."""
    found: list[Any] = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


async def gather(*work: Awaitable[T]) -> list[T]:
    """Results in order."""
    return list(await asyncio.gather(*work))
