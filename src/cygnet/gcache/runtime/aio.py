"""The client SDK for asyncio: calls of the synchronous client, each on a thread of its own while it lasts."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from cygnet.base.errors import ConfigError
from cygnet.gcache.record import CHUNK_BYTES
from cygnet.gcache.runtime.client import ANYWHERE, GCacheClient, Route
from cygnet.kv.store import Outcome

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")


class AsyncGCacheClient:
    """For one event loop. Up to `max_calls` calls run at a time; others wait, and that counts as their time.

    Outcomes and errors are `GCacheClient`'s. A call that is cancelled ends first, by its deadline at most: buffers
    are not touched once it is over. `close` (or leaving it as a context manager) closes the client too.
    """

    def __init__(self, client: GCacheClient, *, max_calls: int = 16) -> None:
        if max_calls < 1:
            raise ConfigError(f"a gcache client with {max_calls} calls at a time; give it at least 1")
        self.client = client
        self._max_calls = max_calls
        self._threads = ThreadPoolExecutor(max_calls, thread_name_prefix="gcache-async")
        self._free = asyncio.Semaphore(max_calls)

    async def __aenter__(self) -> "AsyncGCacheClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- many objects: done when all of them are

    async def batch_exists(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int] | None = None,
        *,
        touch: bool = False,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> list[bool]:
        """Whether each object (of that size) is there."""
        ask = partial(self.client.batch_exists, keys, sizes, touch=touch, route=route)
        return await self._run(ask, timeout_s, [False] * len(keys))

    async def batch_get_into(
        self,
        keys: Sequence[bytes],
        buffers: "Sequence[Buffer]",
        *,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> list[Outcome]:
        """Fill each buffer with its object, of exactly that size."""
        get = partial(self.client.batch_get_into, keys, buffers, route=route)
        return await self._run(get, timeout_s, [Outcome.TIMED_OUT] * len(keys))

    async def batch_put(
        self,
        keys: Sequence[bytes],
        buffers: "Sequence[Buffer]",
        *,
        ttl_ms: int = 0,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> list[Outcome]:
        """Store each object, instead of what is there."""
        put = partial(self.client.batch_put, keys, buffers, ttl_ms=ttl_ms, route=route)
        return await self._run(put, timeout_s, [Outcome.TIMED_OUT] * len(keys))

    async def remove(
        self, keys: Sequence[bytes], *, timeout_s: float | None = None, route: Route = ANYWHERE
    ) -> list[bool]:
        """Give up these objects; whether each was there."""
        return await self._run(partial(self.client.remove, keys, route=route), timeout_s, [False] * len(keys))

    # --- many objects: each as soon as it is done

    def each_get_into(
        self,
        keys: Sequence[bytes],
        buffers: "Sequence[Buffer]",
        *,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> AsyncIterator[tuple[int, Outcome]]:
        """Place in the batch and outcome of each object, in the order in which they are there.

        Small objects come together, about 1 MiB of them. Whoever stops early leaves no buffer in use: what has not
        begun does not begin, and what has ends first.
        """

        def get(some: slice, left_s: float) -> list[Outcome]:
            return self.client.batch_get_into(keys[some], buffers[some], timeout_s=left_s, route=route)

        return self._each(buffers, get, timeout_s)

    def each_put(
        self,
        keys: Sequence[bytes],
        buffers: "Sequence[Buffer]",
        *,
        ttl_ms: int = 0,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> AsyncIterator[tuple[int, Outcome]]:
        """The same, for objects to store."""

        def put(some: slice, left_s: float) -> list[Outcome]:
            return self.client.batch_put(keys[some], buffers[some], ttl_ms=ttl_ms, timeout_s=left_s, route=route)

        return self._each(buffers, put, timeout_s)

    # --- one object

    async def exists(self, key: bytes, *, timeout_s: float | None = None, route: Route = ANYWHERE) -> bool:
        """Whether it is there."""
        return (await self.batch_exists([key], timeout_s=timeout_s, route=route))[0]

    async def get(
        self, key: bytes, *, timeout_s: float | None = None, route: Route = ANYWHERE
    ) -> "bytearray | Outcome":
        """The object, of whatever size, in memory of its own; otherwise why not."""
        late: bytearray | Outcome = Outcome.TIMED_OUT
        return await self._run(partial(self.client.get, key, route=route), timeout_s, late)

    async def get_into(
        self, key: bytes, buffer: "Buffer", *, timeout_s: float | None = None, route: Route = ANYWHERE
    ) -> Outcome:
        """Fill `buffer` with the object, of exactly that size."""
        return await self._run(partial(self.client.get_into, key, buffer, route=route), timeout_s, Outcome.TIMED_OUT)

    async def put(
        self,
        key: bytes,
        buffer: "Buffer",
        *,
        ttl_ms: int = 0,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> Outcome:
        """Store an object, instead of what is there."""
        put = partial(self.client.put, key, buffer, ttl_ms=ttl_ms, route=route)
        return await self._run(put, timeout_s, Outcome.TIMED_OUT)

    async def close(self) -> None:
        """Wait for the calls that have begun, then close the client."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self.client.close)

    # --- inside

    async def _run(self, work: Callable[..., T], timeout_s: float | None, late: T) -> T:
        """What `work(timeout_s=...)` gives, on a thread; `late` when none comes free in time."""
        timeout_s = self.client.options.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            await asyncio.wait_for(self._free.acquire(), timeout_s)
        except TimeoutError:
            return late
        try:
            left_s = max(0.0, deadline - time.monotonic())
            call = partial(work, timeout_s=left_s)
            return await _joined(asyncio.get_running_loop().run_in_executor(self._threads, call))
        finally:
            self._free.release()

    async def _each(
        self,
        buffers: "Sequence[Buffer]",
        work: Callable[[slice, float], list[Outcome]],
        timeout_s: float | None,
    ) -> AsyncIterator[tuple[int, Outcome]]:
        def some(part: slice, *, timeout_s: float) -> tuple[slice, list[Outcome]]:
            return part, work(part, timeout_s)

        left = [
            asyncio.ensure_future(
                self._run(partial(some, part), timeout_s, (part, [Outcome.TIMED_OUT] * (part.stop - part.start)))
            )
            for part in _parts([memoryview(buffer).nbytes for buffer in buffers])
        ]
        try:
            for done in asyncio.as_completed(left):
                part, outcomes = await done
                for place, outcome in zip(range(part.start, part.stop), outcomes, strict=True):
                    yield place, outcome
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


def _parts(sizes: Sequence[int]) -> list[slice]:
    """Places of objects that make about a frame together."""
    parts: list[slice] = []
    first = size = 0
    for place, own in enumerate(sizes):
        if place > first and size + own > CHUNK_BYTES:
            parts.append(slice(first, place))
            first, size = place, 0
        size += own
    return [*parts, slice(first, len(sizes))] if sizes else []


async def _joined(future: "asyncio.Future[T]") -> T:
    """The future's result. Cancelled, it is waited for all the same, and what it gives is dropped."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:
                continue
        if not future.cancelled():
            future.exception()  # it has been seen
        raise
