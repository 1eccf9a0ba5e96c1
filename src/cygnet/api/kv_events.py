"""`GET /kv/events`: what is cached, told to routers: all of it, and from then on every change.

The answer's body is a sequence of frames, each a length (4 bytes, big endian) and that many bytes of msgpack: a
`Greeting` first, then `CacheChanged`, the first of them a whole. An empty frame says that nothing has changed for a
while. Numbers are consecutive, so that a gap shows; whoever finds one connects again.
"""

import asyncio
from collections import deque

import msgspec
from starlette.types import Receive, Scope, Send

from cygnet.api.errors import ClientDisconnectedError, http_error, to_http
from cygnet.api.lifecycle import Lifecycle, run_watched
from cygnet.api.record import record_of
from cygnet.api.sse import SEND_TIMEOUT_S, send_error
from cygnet.base.engine_client import EngineClient
from cygnet.base.errors import EngineDeadError
from cygnet.base.messages import CacheChanged
from cygnet.base.residency import FORMAT, Greeting

MAX_FOLLOWERS = 32
MAX_WAITING_BYTES = 32 << 20
"""Most that waits for one follower; one that falls further behind is cut off, and begins anew when it connects."""
QUIET_S = 5.0
"""After so long without a change a follower gets a sign of life."""

_encode = msgspec.msgpack.Encoder().encode


def frame(message: Greeting | CacheChanged) -> bytes:
    """`message` with its length."""
    data = _encode(message)
    return len(data).to_bytes(4, "big") + data


class _Follower:
    """Frames on their way to one connection."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.news = asyncio.Event()
        self.sequence: int | None = None
        """Of what it was told last; `None` before the whole."""
        self.lagging = False

    def put(self, data: bytes) -> None:
        self.waiting_bytes += len(data)
        # A whole may be larger than what may wait, but then nothing else waits.
        self.lagging = self.lagging or (self.waiting_bytes > MAX_WAITING_BYTES and len(self.frames) > 1)
        if not self.lagging:
            self.frames.append(data)
        self.news.set()

    def take(self) -> bytes:
        data = b"".join(self.frames)
        self.frames.clear()
        self.waiting_bytes = 0
        self.news.clear()
        return data


class KVEvents:
    """The endpoint, and the account of who follows. The engine is watched while somebody does.

    Invariants: nobody waits with more than `MAX_WAITING_BYTES` and one frame; `_names` holds requests that are served
    now, and only while there are followers.
    """

    def __init__(self, engine: EngineClient, lifecycle: Lifecycle) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._followers: set[_Follower] = set()
        self._names: dict[str, str] = {}

    # --- requests, under the names that their callers know

    def begin(self, job_id: str, request_id: str) -> None:
        """The job `job_id` answers the HTTP request `request_id`."""
        if self._followers:
            self._names[f"{job_id}-0"] = request_id

    def end(self, job_id: str) -> None:
        """The job is over."""
        self._names.pop(f"{job_id}-0", None)

    # --- what the engine tells

    def _told(self, message: CacheChanged) -> None:
        prompts = [(self._names[name], *rest) for name, *rest in message.prompts if name in self._names]
        data = frame(msgspec.structs.replace(message, prompts=prompts))
        for follower in self._followers:
            if message.whole and follower.sequence == message.sequence:
                continue  # told for another follower that has just come
            if message.whole or follower.sequence is not None:
                follower.sequence = message.sequence
                follower.put(data)

    # --- ASGI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._followers) >= MAX_FOLLOWERS:
            message = f"{MAX_FOLLOWERS} routers follow this server already"
            await send_error(send, http_error(503, message, kind="overloaded", code="too_many_followers"))
            return
        try:
            await run_watched(self._follow(send), receive, self._lifecycle)
        except ClientDisconnectedError:
            record_of(scope).disconnected = True
        except EngineDeadError as error:
            record_of(scope).failure = to_http(error).body.error.type

    async def _follow(self, send: Send) -> None:
        ready = self._engine.ready
        follower = _Follower()
        follower.put(frame(Greeting(FORMAT, ready.block_size, ready.geometry, ready.rebuild)))
        self._followers.add(follower)
        draining = asyncio.create_task(self._lifecycle.draining.wait())
        try:
            headers = [(b"content-type", b"application/octet-stream"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self._engine.watch_cache(self._told)
            while not follower.lagging and not draining.done() and self._engine.healthy:
                news = asyncio.create_task(follower.news.wait())
                try:
                    await asyncio.wait([news, draining], timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
                await self._send(send, follower.take() or bytes(4))
            await self._send(send, b"", more=False)
        finally:
            draining.cancel()
            self._followers.discard(follower)
            if not self._followers:
                self._names.clear()
                self._engine.watch_cache(None)

    @staticmethod
    async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientDisconnectedError from None
