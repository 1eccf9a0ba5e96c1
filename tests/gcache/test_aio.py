"""The asyncio client: what it gives, how late, and that nothing is written to memory after a call."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from cygnet.base.errors import ConfigError
from cygnet.gcache.runtime.aio import AsyncGCacheClient, _parts
from cygnet.gcache.runtime.channel import Address
from cygnet.gcache.runtime.client import ClientOptions, GCacheClient
from cygnet.kv.store import Outcome
from support.gcache import MIB, key, server, server_process


def run(port: int, test: Callable[[AsyncGCacheClient], Awaitable[None]], max_calls: int = 4) -> None:
    async def inside() -> None:
        sdk = GCacheClient(ClientOptions(servers=(Address("127.0.0.1", port),), timeout_s=20.0))
        async with AsyncGCacheClient(sdk, max_calls=max_calls) as client:
            await test(client)

    asyncio.run(inside())


def test_everything_that_the_other_client_does() -> None:
    async def test(client: AsyncGCacheClient) -> None:
        values = [os.urandom(size) for size in (0, 1, 5000, 3 * MIB + 1)]
        keys = [key(number) for number in range(4)]
        assert await client.batch_put(keys, values) == [Outcome.OK] * 4
        into = [bytearray(len(value)) for value in values]
        assert await client.batch_get_into(keys, into) == [Outcome.OK] * 4
        assert into == values
        assert await client.get(keys[3]) == values[3]
        assert await client.get(key("none")) is Outcome.MISS
        one = bytearray(1)
        assert await client.get_into(keys[1], one) is Outcome.OK
        assert one == values[1]
        assert await client.put(key("more"), b"x", ttl_ms=10**9) is Outcome.OK
        assert await client.exists(key("more"))
        assert await client.batch_exists([*keys, key("none")]) == [True] * 4 + [False]
        assert await client.remove([key("more"), key("none")]) == [True, False]
        with pytest.raises(ValueError, match="no full key"):
            await client.exists(b"")

    with server() as running:
        run(running.port, test)


def test_each_object_as_soon_as_it_is_there() -> None:
    async def test(client: AsyncGCacheClient) -> None:
        values = [os.urandom(MIB // 2 + number) for number in range(21)]
        keys = [key(number) for number in range(21)]
        stored = [found async for found in client.each_put(keys, values)]
        assert sorted(stored) == [(place, Outcome.OK) for place in range(21)]
        into = [bytearray(len(value)) for value in values]
        await client.remove([keys[7]])
        seen = set()
        async for place, outcome in client.each_get_into(keys, into):
            assert outcome is (Outcome.MISS if place == 7 else Outcome.OK)
            assert place == 7 or into[place] == values[place], "it is there when it is said to be"
            seen.add(place)
        assert seen == set(range(21))
        async for _ in client.each_get_into(keys, into):
            break  # the others end before the loop is left
        assert [found async for found in client.each_get_into([], [])] == []

    with server(64 * MIB) as running:
        run(running.port, test)


def test_parts_cover_a_batch() -> None:
    assert _parts([]) == []
    assert _parts([5]) == [slice(0, 1)]
    assert _parts([MIB, 1, MIB - 1, 1, 3 * MIB]) == [slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 5)]


def test_the_loop_goes_on_while_a_server_is_frozen() -> None:
    """Calls end by their deadlines, also those that wait for a thread; cancelled ones when nothing writes any more."""

    async def test(client: AsyncGCacheClient) -> None:
        assert await client.put(key(1), b"x" * 100) is Outcome.OK
        process.signal(signal.SIGSTOP)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        into = [bytearray(100) for _ in range(6)]
        calls = [asyncio.create_task(client.get_into(key(1), buffer, timeout_s=1.0)) for buffer in into]
        await asyncio.sleep(0.1)
        calls[0].cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert set(outcomes[1:]) <= {Outcome.TIMED_OUT, Outcome.FAILED}
        assert Outcome.TIMED_OUT in outcomes
        assert ticks, "nothing else could run meanwhile"
        ticking.cancel()
        process.signal(signal.SIGCONT)
        while await client.get_into(key(1), into[0]) is not Outcome.OK:
            await asyncio.sleep(0.05)
        assert into[1:] == [bytearray(100)] * 5, "written after the call was over"

    with server_process() as process:
        run(process.port, test, max_calls=2)


def test_at_least_one_call() -> None:
    sdk = GCacheClient(ClientOptions(servers=(Address("127.0.0.1", 1),)))
    with pytest.raises(ConfigError, match="at least 1"):
        AsyncGCacheClient(sdk, max_calls=0)
    sdk.close()
