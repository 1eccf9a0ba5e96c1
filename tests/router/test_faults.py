"""Faults: no request lost or doubled, no stream broken that could have been saved, and nothing left behind."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from router.harness import Client, Router, ask, chat, routing, until
from router.mock_worker import MockWorker, Received, hang, plain, raw, stream, vanish

PAIR: dict[str, Any] = {"routing__policy": "round_robin"}


async def served(router: Router, count: int, **fields: Any) -> Counter[int]:
    """Statuses of `count` requests, one after the other."""
    return Counter([(await ask(router, chat(**fields))).status for _ in range(count)])


# --- workers that fail before the first byte


@pytest.mark.parametrize(
    "broken",
    [
        vanish,
        raw(b"HELLO THERE\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\n" + b"A: " + b"x" * 400_000),
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot a length\r\n"),
        stream(5, die_after=0),
        plain(502),
        plain(503),
        plain(504),
        plain(429),
    ],
    ids=[f"fault-{number}" for number in range(12)],
)
async def test_another_worker_answers(broken: Any) -> None:
    async with MockWorker(behaviour=broken) as bad, MockWorker() as good, routing([bad, good], **PAIR) as router:
        assert await served(router, 8) == {200: 8}
        assert len(good.received) == 8
        assert 0 < len(bad.received) <= 8


async def test_killed_workers_requests_go_elsewhere() -> None:
    gate = asyncio.Event()
    async with MockWorker(behaviour=stream(3, gate=gate)) as one, MockWorker() as two:
        async with routing([one, two], **PAIR) as router:
            clients = [Client(router.port) for _ in range(6)]
            for client in clients:
                await client.__aenter__()
                await client.send(json.dumps(chat()).encode())
            await until(lambda: one.running >= 3)
            await one.kill()
            answers = [await client.answer() for client in clients]
            assert [answer.status for answer in answers] == [200] * 6
            assert await served(router, 10) == {200: 10}
            for client in clients:
                await client.__aexit__()


async def test_a_hung_worker_times_out_and_another_answers() -> None:
    async with MockWorker(behaviour=hang) as bad, MockWorker() as good:
        async with routing([bad, good], workers__first_byte_s=0.2, **PAIR) as router:
            assert await served(router, 4) == {200: 4}
            assert 1 < len(bad.received) <= 4
            assert len(good.received) == 4
            await until(lambda: bad.aborted == len(bad.received))


async def test_a_lone_worker_that_hangs_is_a_504() -> None:
    async with MockWorker(behaviour=hang) as bad, routing([bad], workers__first_byte_s=0.2) as router:
        answer = await ask(router, chat())
        assert (answer.status, answer.error["code"]) == (504, "worker_failed")


async def test_attempts_are_bounded() -> None:
    workers = [MockWorker(behaviour=vanish) for _ in range(5)]
    async with workers[0], workers[1], workers[2], workers[3], workers[4], routing(workers) as router:
        assert (await ask(router, chat())).status == 502
        assert sum(len(worker.received) for worker in workers) == 3


async def test_a_refusal_passes_when_nobody_else_can() -> None:
    async with MockWorker(behaviour=plain(503, b'{"full":1}')) as bad, routing([bad]) as router:
        answer = await ask(router, chat())
        assert (answer.status, answer.body) == (503, b'{"full":1}')


async def test_a_request_that_was_not_refused_is_never_sent_twice() -> None:
    async with MockWorker(behaviour=plain(500)) as one, MockWorker(behaviour=plain(500)) as two:
        async with routing([one, two], **PAIR) as router:
            assert await served(router, 4) == {500: 4}
            assert len(one.received) + len(two.received) == 4


async def test_an_idle_connection_that_the_worker_closed_is_no_failure() -> None:
    async def once(worker: MockWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        await plain()(worker, request, writer)
        await writer.drain()
        asyncio.get_running_loop().call_later(0.02, writer.transport.abort)

    async with MockWorker(behaviour=once) as worker, routing([worker]) as router:
        for turn in range(12):
            assert (await ask(router, chat())).status == 200
            await asyncio.sleep(0.002 * turn)  # meets the close at various moments, not waiting for any
        assert router.proxy.fleet.workers[0].health.circuit == "closed"


# --- workers that fail after the first byte


async def test_a_broken_stream_is_seen_as_broken() -> None:
    async with MockWorker(behaviour=stream(10, die_after=5)) as worker, routing([worker]) as router:
        answer = await ask(router, chat())
        assert answer.status == 200
        assert not answer.whole
        assert answer.body.count(b"data:") <= 5
        assert len(worker.received) == 1, "sent again although bytes had been passed on"


@pytest.mark.parametrize(
    ("data", "body", "whole"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", b"short", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlong and more", b"long", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad", b"ok", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\nand more", b"ok", True),
    ],
)
async def test_lying_lengths(data: bytes, body: bytes, whole: bool) -> None:
    async with MockWorker(behaviour=raw(data)) as worker, routing([worker]) as router:
        answer = await ask(router, chat())
        assert answer.whole == whole
        assert answer.body in (body, b"")
        if whole:
            assert answer.body == body
        worker.behaviour = plain()
        assert (await ask(router, chat())).body == b'{"ok":true}', "the next answer is another's"


async def test_a_stream_that_stops_is_broken_off() -> None:
    hold = asyncio.Event()
    async with MockWorker(behaviour=stream(5, hold=hold)) as worker:
        async with routing([worker], workers__between_bytes_s=0.3) as router:
            answer = await ask(router, chat())
            assert not answer.whole
            await until(lambda: worker.aborted == 1)


# --- breaker and probes


async def test_the_breaker_keeps_requests_from_a_failing_worker() -> None:
    async with MockWorker(behaviour=vanish) as bad, MockWorker() as good:
        async with routing([bad, good], workers__breaker_open_s=0.2, **PAIR) as router:
            assert await served(router, 30) == {200: 30}
            assert 5 <= len(bad.received) <= 12
            bad.behaviour = plain()
            before = len(bad.received)
            state = router.proxy.fleet.workers

            async def back() -> bool:
                await ask(router, chat())
                return len(bad.received) > before + 3 and all(worker.health.circuit == "closed" for worker in state)

            for _ in range(500):
                if await back():
                    break
                await asyncio.sleep(0.005)
            assert await back()


async def test_4xx_opens_nothing() -> None:
    async with MockWorker(behaviour=plain(400)) as worker, routing([worker]) as router:
        assert await served(router, 30) == {400: 30}
        assert router.proxy.fleet.workers[0].health.circuit == "closed"


async def test_an_unhealthy_worker_gets_nothing_and_comes_back() -> None:
    async with MockWorker() as one, MockWorker() as two, routing([one, two], **PAIR) as router:
        one.healthy = False
        await until(lambda: len(router.proxy.fleet.members("m")) == 1)
        assert await served(router, 6) == {200: 6}
        assert len(two.received) == 6
        one.healthy = True
        await until(lambda: len(router.proxy.fleet.members("m")) == 2)
        await served(router, 4)
        assert len(one.received) == 2


async def test_probes_leave_loads_alone() -> None:
    """vllm router 197: a health check reset live load counters."""
    gate = asyncio.Event()
    async with MockWorker(behaviour=stream(2, gate=gate)) as worker, routing([worker]) as router:
        async with Client(router.port) as client:
            await client.send(json.dumps(chat("x" * 4000)).encode())
            await until(lambda: worker.running == 1)
            before = await router.proxy.state.loads()
            for healthy in (False, True):
                worker.healthy = healthy
                await until(lambda h=healthy: router.proxy.fleet.workers[0].health.up == h)
            assert before == await router.proxy.state.loads() != {}
            gate.set()
            assert (await client.answer()).whole


async def test_a_restarted_worker_starts_with_an_empty_cache() -> None:
    workers = [MockWorker(name="a"), MockWorker(name="b")]
    async with workers[0], workers[1], routing(workers) as router:
        text = "word " * 4000
        first = await ask(router, chat(text))
        holder = next(worker for worker in workers if worker.name == first.headers["x-worker"])
        known = next(worker for worker in router.proxy.fleet.workers if worker.url == holder.url)
        slot = known.slot
        await holder.kill()
        await until(lambda: not known.health.up)
        await holder.start()
        await until(lambda: known.health.up and known.slot != slot)
        exchange_matched = router.proxy.recorder.counters
        from cygnet.metrics.router import MATCHED_TOKENS

        before = exchange_matched(MATCHED_TOKENS).get((), 0)
        await ask(router, chat(text))
        assert exchange_matched(MATCHED_TOKENS).get((), 0) == before


# --- callers that leave or dawdle


@pytest.mark.parametrize("stage", ["head", "body", "connecting", "waiting for the first byte", "streaming", "queue"])
async def test_a_caller_who_leaves_costs_nothing_more(stage: str) -> None:
    """vllm router 215, smg PR 2136: a caller who left before the first byte was never noticed."""
    never = asyncio.Event()
    behaviour = stream(3, hold=never) if stage == "streaming" else hang
    options: dict[str, Any] = {"routing__worker_budget_tokens": 50} if stage == "queue" else {}
    async with MockWorker(behaviour=behaviour) as worker, routing([worker], **options) as router:
        body = json.dumps(chat("x" * 1000)).encode()
        async with Client(router.port) as busy:
            if stage == "queue":
                await busy.send(body)
                await until(lambda: worker.running == 1)
            async with Client(router.port) as client:
                if stage == "head":
                    client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Le")
                    await until(lambda: router.proxy.connections)
                elif stage == "body":
                    client.writer.write(b"POST /v1/x HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf")
                    await until(lambda: router.proxy._buffered)
                else:
                    await client.send(body)
                    if stage == "connecting":
                        await until(lambda: router.proxy.exchanges)
                    elif stage == "streaming":
                        await client.reader.readuntil(b"data: 0")
                    elif stage == "queue":
                        await until(lambda: router.proxy.num_waiting == 1)
                    else:
                        await until(lambda: worker.running == 1)
            await until(lambda: len(router.proxy.connections) == 1)  # the other caller's
            assert router.proxy.num_waiting == 0
        await until(lambda: worker.running == 0)
        assert not router.proxy.exchanges
        assert await router.proxy.state.loads() == {}


async def test_a_slow_reader_holds_back_the_worker_not_memory() -> None:
    async with MockWorker(behaviour=stream(4000, size=10_000)) as worker, routing([worker]) as router:
        async with Client(router.port) as client:
            await client.send(json.dumps(chat()).encode())
            sent = -1
            while sent != worker.events_sent:  # until the worker's socket is full too
                sent = worker.events_sent
                await asyncio.sleep(0.1)
            assert 0 < sent < 3500
            answer = await client.answer()
            assert answer.whole
            assert answer.body.count(b"data:") == 4001


async def test_a_reader_that_stops_for_good_is_cut() -> None:
    async with MockWorker(behaviour=stream(4000, size=10_000)) as worker:
        async with routing([worker], server__stall_s=0.3) as router:
            async with Client(router.port) as client:
                await client.send(json.dumps(chat()).encode())
                await until(lambda: worker.aborted == 1)
                await until(lambda: not router.proxy.exchanges)


async def test_slow_and_idle_connections_are_closed() -> None:
    async with MockWorker() as worker, routing([worker], server__receive_s=0.2, server__idle_s=0.4) as router:
        async with Client(router.port) as slow, Client(router.port) as idle:
            slow.writer.write(b"POST /v1/x HTTP/1.1\r\n")
            assert await asyncio.wait_for(slow.reader.read(1), 5) == b""
            assert await asyncio.wait_for(idle.reader.read(1), 5) == b""


async def test_too_many_connections_are_refused() -> None:
    async with MockWorker() as worker, routing([worker], server__max_connections=3) as router:
        clients = [Client(router.port) for _ in range(3)]
        for client in clients:
            await client.__aenter__()
        await until(lambda: len(router.proxy.connections) == 3)
        async with Client(router.port) as more:
            assert (await more.answer()).status == 503
        for client in clients:
            assert (await client.ask(chat())).status == 200
            await client.__aexit__()


async def test_thousands_of_idle_connections_cost_nothing_to_others() -> None:
    async with MockWorker() as worker, routing([worker]) as router:
        idle = [Client(router.port) for _ in range(2000)]
        for client in idle:
            await client.__aenter__()
        await until(lambda: len(router.proxy.connections) == 2000)
        assert await served(router, 20) == {200: 20}
        for client in idle:
            await client.__aexit__()
        await until(lambda: not router.proxy.connections)


# --- under load


async def test_churn_under_load_loses_and_doubles_nothing() -> None:
    """Workers die and come back, callers leave; every caller who stays gets one whole answer, and the books are in
    order.
    """

    async def echo(worker: MockWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        number = json.loads(request.body)["number"]
        await plain(body=b'{"number":%d}' % number)(worker, request, writer)

    workers = [MockWorker(name=str(i), behaviour=echo) for i in range(3)]
    async with workers[0], workers[1], workers[2], routing(workers) as router:
        done: list[int] = []
        stop = asyncio.Event()

        async def caller(seat: int) -> None:
            async with Client(router.port) as client:
                for turn in range(60):
                    number = seat * 1000 + turn
                    text = f"{seat} " * (500 * (turn % 5))
                    if turn % 13 == 12:
                        async with Client(router.port) as leaver:
                            await leaver.send(json.dumps(chat(text, number=number)).encode())
                        continue
                    answer = await client.ask(chat(text, number=number))
                    assert answer.status == 200, answer.body
                    assert json.loads(answer.body) == {"number": number}
                    done.append(number)

        async def churn() -> None:
            while not stop.is_set():
                for worker in workers:
                    await worker.kill()
                    await asyncio.sleep(0.05)
                    await worker.start()
                    known = next(w for w in router.proxy.fleet.workers if w.url == worker.url)
                    await until(lambda w=known: w.health.available(router.proxy.now()) or stop.is_set())

        churning = asyncio.ensure_future(churn())
        await asyncio.gather(*(caller(seat) for seat in range(12)))
        stop.set()
        await churning
        assert len(done) == len(set(done)) == 12 * 56


async def test_many_streams_at_once_on_reused_connections() -> None:
    async with MockWorker(behaviour=stream(20)) as one, MockWorker(behaviour=stream(20)) as two:
        async with routing([one, two]) as router:

            async def caller() -> None:
                async with Client(router.port) as client:
                    for _ in range(4):
                        answer = await client.ask(chat(stream=True))
                        assert answer.whole
                        assert answer.body.count(b"data:") == 21

            await asyncio.gather(*(caller() for _ in range(200)))


# --- the end


async def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    gate = asyncio.Event()
    async with MockWorker(behaviour=stream(3, gate=gate)) as worker, routing([worker]) as router:
        async with Client(router.port) as running, Client(router.port) as idle:
            await running.send(json.dumps(chat()).encode())
            await until(lambda: worker.running == 1)
            router.service.stop()
            assert await idle.reader.read(1) == b"", "idle connections are closed"
            with pytest.raises(OSError):
                async with Client(router.port):
                    pass
            gate.set()
            answer = await running.answer()
            assert answer.whole
            assert await running.reader.read(1) == b""


async def test_drain_is_bounded() -> None:
    async with MockWorker(behaviour=hang) as worker, routing([worker], server__drain_s=0.2) as router:
        async with Client(router.port) as client:
            await client.send(json.dumps(chat()).encode())
            await until(lambda: worker.running == 1)
            router.service.stop()
            assert not (await client.answer()).whole
            await until(lambda: worker.running == 0)
