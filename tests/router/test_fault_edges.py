"""Faults at the edges: what is neither the worker's nor the caller's doing, and what comes where nobody expects it."""

import asyncio
import json
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from cygnet.router.runtime.descriptors import SPARE, room_for_callers
from router.harness import Client, ask, chat, routing, until
from router.mock_worker import MockWorker, Received, hang, plain, raw, stream, vanish
from router.redis_process import RedisProcess

PAIR: dict[str, Any] = {"routing__policy": "round_robin"}
CHUNKED = b"POST /v1/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


# --- trailers


async def test_trailers_are_not_headers() -> None:
    """Merged into the headers they would let a caller set what a proxy before this one had checked."""
    async with MockWorker() as worker, routing([worker]) as router, Client(router.port) as client:
        client.writer.write(CHUNKED + b"2\r\n{}\r\n0\r\nX-Sneaked: in\r\nAuthorization: Bearer other\r\n\r\n")
        assert (await client.answer()).status == 200
        (received,) = worker.received
        assert received.header("x-sneaked") is None
        assert received.header("authorization") is None
        assert (await client.ask(chat())).status == 200


async def test_a_flood_of_trailers_is_refused() -> None:
    async with MockWorker() as worker, routing([worker]) as router, Client(router.port) as client:
        client.writer.write(CHUNKED + b"2\r\n{}\r\n0\r\n")
        for number in range(3000):
            client.writer.write(b"T%d: %s\r\n" % (number, b"x" * 100))
        assert (await client.answer()).status == 431
        assert not worker.received


@pytest.mark.parametrize("beside", [b"0\r\nX: ", b"2;x="], ids=["trailer", "extension"])
async def test_what_never_ends_beside_a_body_is_refused(beside: bytes) -> None:
    """The parser tells of a trailer once it is whole, and keeps it until then."""
    async with MockWorker() as worker, routing([worker]) as router, Client(router.port) as client:
        client.writer.write(CHUNKED + b"2\r\n{}\r\n" + beside)
        for _ in range(100):
            client.writer.write(b"x" * 4096)
        assert (await client.answer()).status == 431
        assert not worker.received


async def test_a_worker_whose_trailer_never_ends_is_let_go() -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX: " + b"x" * (1 << 20)
    async with MockWorker(behaviour=raw(answer, close=False)) as worker, routing([worker]) as router:
        assert not (await ask(router, chat())).whole


async def test_a_workers_trailers_are_dropped() -> None:
    trailers = b"".join(b"T%d: %s\r\n" % (number, b"x" * 100) for number in range(5000))
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n" + trailers + b"\r\n"
    async with MockWorker(behaviour=raw(answer, close=False)) as worker, routing([worker]) as router:
        for _ in range(2):
            got = await ask(router, chat())
            assert (got.status, got.body, got.whole) == (200, b"ok", True)
            assert not any(name.startswith("t1") for name in got.headers)


# --- workers


@pytest.mark.parametrize(
    "rest", [b"what is this\r\n", b"-5\r\nab", b"ffffffffffffffffff\r\n", b"2\r\nabX\r\n0\r\n\r\n"], ids=list("abcd")
)
async def test_garbage_within_an_answer_breaks_it_off(rest: bytes) -> None:
    async def behave(worker: MockWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ngood\r\n")
        await writer.drain()
        await asyncio.wait_for(passed.wait(), 20)
        writer.write(rest)
        await writer.drain()

    async with MockWorker(behaviour=behave) as one, MockWorker(behaviour=behave) as two:
        async with routing([one, two]) as router, Client(router.port) as client:
            passed = asyncio.Event()
            await client.send(json.dumps(chat()).encode())
            await client.reader.readuntil(b"good")
            passed.set()
            with suppress(ConnectionError):
                rest_seen = await asyncio.wait_for(client.reader.read(), 20)
                assert b"0\r\n\r\n" not in rest_seen, "a broken answer was ended as a whole one"
            assert len(one.received) + len(two.received) == 1, "sent again although bytes had been passed on"
            await until(lambda: not router.proxy.exchanges)


async def test_a_worker_that_takes_no_connection_is_left_after_connect_s() -> None:
    """Its host is gone or its backlog is full: nobody refuses, nobody answers."""
    async with MockWorker() as good, MockWorker() as dead:
        options: dict[str, Any] = {"workers__connect_s": 0.3, "workers__probe_s": 30.0, **PAIR}
        async with routing([dead, good], **options) as router:
            port = dead.port
            await dead.kill()
            with socket.create_server(("127.0.0.1", port), backlog=0) as full:
                fillers = [socket.socket() for _ in range(4)]
                for filler in fillers:
                    filler.setblocking(False)
                    filler.connect_ex(full.getsockname())
                assert [(await ask(router, chat())).status for _ in range(4)] == [200] * 4
                for filler in fillers:
                    filler.close()
            assert len(good.received) == 4


# --- this machine


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Nothing can be opened in this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_lack_of_descriptors_is_not_the_workers_fault() -> None:
    """It opened every worker's breaker, and made probes mark them down."""
    async with MockWorker() as one, MockWorker() as two, routing([one, two], workers__probe_s=0.05) as router:
        clients = [Client(router.port) for _ in range(12)]
        for client in clients:
            await client.__aenter__()
        await until(lambda: len(router.proxy.connections) == 12)
        with no_more_descriptors():
            for client in clients:
                await client.send(json.dumps(chat()).encode())
            answers = [await client.answer() for client in clients]
            assert [answer.status for answer in answers] == [503] * 12
            assert answers[0].error["code"] == "overloaded"
            assert "retry-after" in answers[0].headers
            await asyncio.sleep(0.5)  # ten probes
        assert [worker.health.circuit for worker in router.proxy.fleet.workers] == ["closed"] * 2
        assert all(worker.health.up for worker in router.proxy.fleet.workers)
        for client in clients:
            assert (await client.ask(chat())).status == 200
            await client.__aexit__()


def test_descriptors_are_asked_for_and_callers_bounded_by_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1 << 20))
    assert room_for_callers(20_000) == 20_000
    assert set_to == [(40_000 + SPARE, 1 << 20)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 3000 + SPARE))
    assert room_for_callers(20_000) == 2000
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert room_for_callers(20_000) == 20_000
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert room_for_callers(20_000) == 1


# --- callers


async def test_a_caller_who_leaves_while_its_place_is_decided(own_redis: RedisProcess) -> None:
    """The decision comes after the caller has gone: what it holds is let go."""
    async with MockWorker() as worker, routing([worker], redis__url=own_redis.url, redis__timeout_ms=2000) as router:
        await until(lambda: len(router.proxy.fleet.members("m")) == 1)
        assert (await ask(router, chat())).status == 200
        own_redis.freeze()
        async with Client(router.port) as client:
            await client.send(json.dumps(chat("x" * 4000)).encode())
            await until(lambda: router.proxy.exchanges)
        await until(lambda: not router.proxy.exchanges)
        own_redis.thaw()
        await until(lambda: router.proxy.state.reachable)
        async with asyncio.timeout(20):
            while await router.proxy.state.loads():
                await asyncio.sleep(0.02)
        assert len(worker.received) == 1


async def test_a_caller_who_leaves_while_another_worker_is_tried() -> None:
    async with MockWorker(behaviour=vanish) as bad, MockWorker(behaviour=hang) as slow:
        async with routing([bad, slow], **PAIR) as router:
            for _ in range(4):
                async with Client(router.port) as client:
                    await client.send(json.dumps(chat("x" * 4000)).encode())
                    await until(lambda: slow.running == 1)
                await until(lambda: slow.running == 0)
            assert len(slow.received) == 4
            assert len(bad.received) >= 1


async def test_a_caller_who_leaves_with_its_answer_unread() -> None:
    async with MockWorker(behaviour=stream(4000, size=10_000)) as worker, routing([worker]) as router:
        async with Client(router.port) as client:
            await client.send(json.dumps(chat()).encode())
            sent = -1
            while sent != worker.events_sent:
                sent = worker.events_sent
                await asyncio.sleep(0.1)
        await until(lambda: worker.aborted == 1)
        await until(lambda: not router.proxy.connections)


async def test_a_caller_who_promises_more_than_it_sends_is_cut() -> None:
    """Its connection is closed after `receive_s`, and no worker hears of it."""
    async with MockWorker() as worker, routing([worker], server__receive_s=0.3) as router:
        for length in (100, 1_000_000):  # parsed, and received in place
            async with Client(router.port) as client:
                client.writer.write(b"POST /v1/x HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % length + b"x" * 90)
                assert await asyncio.wait_for(client.reader.read(), 20) == b""
        await until(lambda: not router.proxy._buffered)
        assert not worker.received


async def test_a_caller_who_sends_more_than_it_promised_gets_its_answer_first() -> None:
    body = json.dumps(chat()).encode()
    async with MockWorker() as worker, routing([worker]) as router, Client(router.port) as client:
        head = b"POST /v1/x HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.writer.write(head + body + b"and more\r\n\r\n")
        first, _, second = (await asyncio.wait_for(client.reader.read(), 20)).partition(b'{"ok":true}')
        assert first.startswith(b"HTTP/1.1 200 ")
        assert second.startswith(b"HTTP/1.1 400 ")
        assert len(worker.received) == 1


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 2\r\nContent-Length: 3\r\n",
        b"Content-Length: +2\r\n",
        b"Content-Length: 1_0\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
    ],
)
async def test_lengths_that_two_servers_could_read_differently_are_refused(lines: bytes) -> None:
    """Request smuggling begins with them."""
    async with MockWorker() as worker, routing([worker]) as router, Client(router.port) as client:
        client.writer.write(b"POST /v1/x HTTP/1.1\r\nHost: a\r\n" + lines + b"\r\n{}")
        answer = await client.answer()
        assert answer.status in (400, 413)
        assert not worker.received


# --- Redis, under load


async def test_redis_fails_in_every_way_under_load(own_redis: RedisProcess) -> None:
    """Twelve callers ask on while Redis is frozen, thawed, killed, restarted and emptied, and loses its scripts: every
    request is answered once, and sent to one worker only.
    """

    async def echo(worker: MockWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        number = json.loads(request.body)["number"]
        await plain(body=b'{"number":%d}' % number)(worker, request, writer)

    workers = [MockWorker(name=str(i), behaviour=echo) for i in range(3)]
    async with workers[0], workers[1], workers[2]:
        async with routing(workers, redis__url=own_redis.url) as router:
            await until(lambda: len(router.proxy.fleet.members("m")) == 3)
            done: list[int] = []
            stop = asyncio.Event()

            async def caller(seat: int) -> None:
                async with Client(router.port) as client:
                    number = seat * 100_000
                    while not stop.is_set():
                        text = f"{seat} " * (500 * (number % 5))
                        answer = await client.ask(chat(text, number=number))
                        assert (answer.status, json.loads(answer.body)) == (200, {"number": number})
                        done.append(number)
                        number += 1

            async def more(count: int = 60) -> None:
                have = len(done)
                await until(lambda: len(done) >= have + count or calling.done())

            calling = asyncio.gather(*(caller(seat) for seat in range(12)))
            await more()
            own_redis.freeze()
            await more()
            own_redis.thaw()
            await until(lambda: router.proxy.state.reachable)
            await more()
            await asyncio.to_thread(own_redis.kill)
            await more()
            await asyncio.to_thread(own_redis.start)
            await until(lambda: router.proxy.state.reachable)
            await more()
            for command in ("SCRIPT FLUSH", "FLUSHALL", "SCRIPT FLUSH"):
                await asyncio.to_thread(own_redis.command, command)
                await more()
            stop.set()
            await calling
            sent = Counter(json.loads(one.body)["number"] for worker in workers for one in worker.received)
            assert sorted(sent) == sorted(done)
            assert set(sent.values()) == {1}
            async with asyncio.timeout(20):  # the workers are entered again, and then all is let go
                while await router.proxy.state.loads():
                    await asyncio.sleep(0.05)


# --- the end


async def test_a_drain_places_what_waits() -> None:
    """Requests in the queue at SIGTERM are served within `drain_s` as those that run are."""
    gate = asyncio.Event()
    async with MockWorker(behaviour=stream(3, gate=gate)) as worker:
        async with routing([worker], routing__worker_budget_tokens=50) as router:
            clients = [Client(router.port) for _ in range(5)]
            for client in clients:
                await client.__aenter__()
                await client.send(json.dumps(chat("x" * 1000)).encode())
            await until(lambda: router.proxy.num_waiting == 4)
            router.service.stop()
            await until(lambda: router.proxy.stopping)
            gate.set()
            for client in clients:
                answer = await client.answer()
                assert (answer.status, answer.whole) == (200, True)
                await client.__aexit__()
            assert len(worker.received) == 5
