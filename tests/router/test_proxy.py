"""The proxy: what passes through, unchanged and at once; what the router answers itself."""

import asyncio
import json
from typing import Any

import pytest

from router.harness import Client, ask, chat, routing, until
from router.mock_worker import MockWorker, Received, plain, raw, stream


async def test_bytes_pass_unchanged() -> None:
    """vllm router 161, sglang PR 8500: unknown fields were dropped by typed re-serialisation."""
    body = b'{ "model" :"m", "messages": [ {"role":"user","content":"h\\u00e9"} ],\n "unknown":{"b":1,"a":[1.0,1e3]}}'
    answer_body = b'{"z": 1.50, "a":"\\u00e9",  "x":null}'
    async with MockWorker(behaviour=plain(body=answer_body)) as worker, routing([worker]) as router:
        answer = await ask(router, body)
        assert answer.status == 200
        assert answer.body == answer_body
        assert worker.received[0].body == body


async def test_headers_end_to_end_and_hop_by_hop() -> None:
    """production-stack 201: hop-by-hop headers and Host were passed on, and the backend answered 503."""
    headers = (
        "Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\n"
        "Traceparent: 00-ab-cd-01\r\n"
        "Authorization: Bearer theirs\r\nX-Request-Id: mine-1\r\nX-Custom: a, b\r\nProxy-Authorization: x\r\n"
    )
    back = "Connection: X-Back\r\nX-Back: 1\r\nKeep-Alive: timeout=1\r\nX-Kept: yes\r\n"
    async with MockWorker(behaviour=plain(headers=back)) as worker, routing([worker]) as router:
        answer = await ask(router, chat(), headers=headers)
        got = worker.received[0]
        for gone in ("x-hop", "keep-alive", "te", "connection", "proxy-authorization"):
            assert got.header(gone) is None
        assert got.header("host") == worker.url.removeprefix("http://")
        assert got.header("traceparent") == "00-ab-cd-01"
        assert got.header("authorization") == "Bearer theirs"
        assert got.header("x-custom") == "a, b"
        assert got.header("x-request-id") == answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-kept"] == "yes"
        assert not {"x-back", "keep-alive", "connection"} & answer.headers.keys()


@pytest.mark.parametrize("given", ["", "X-Request-Id: " + "x" * 300 + "\r\n", "X-Request-Id: a\x01b\r\n"])
async def test_request_ids_are_made_when_unfit(given: str) -> None:
    async with MockWorker() as worker, routing([worker]) as router:
        answer = await ask(router, chat(), headers=given.replace("\x01", "\xe9"))
        assert 8 < len(answer.headers["x-request-id"]) < 40


async def test_streams_are_not_buffered() -> None:
    """vllm router 113: the whole stream was collected before anything was passed on."""
    hold = asyncio.Event()
    async with MockWorker(behaviour=stream(5, hold=hold)) as worker, routing([worker]) as router:
        async with Client(router.port) as client:
            await client.send(json.dumps(chat(stream=True)).encode())
            seen = b""
            while b"data: 0" not in seen:
                seen += await client.reader.read(1000)
            assert b"data: 1" not in seen
            assert b"text/event-stream" in seen
            assert b"Transfer-Encoding: chunked" in seen
            hold.set()
            while b"[DONE]" not in seen:
                seen += await client.reader.read(1000)


async def test_connections_are_reused_on_both_sides() -> None:
    async with MockWorker(behaviour=stream(3)) as worker, routing([worker]) as router:
        async with Client(router.port) as client:
            for _ in range(50):
                answer = await client.ask(chat())
                assert answer.whole
                assert answer.body.endswith(b"[DONE]\n\n")
        pool = router.proxy.fleet.workers[0].pool
        assert len(pool._open) == 1


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def echo(worker: MockWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        text = json.loads(request.body)["messages"][0]["content"]
        await plain(body=json.dumps(text).encode())(worker, request, writer)

    async with MockWorker(behaviour=echo) as worker, routing([worker]) as router, Client(router.port) as client:
        for turn in range(40):
            await client.send(json.dumps(chat(f"t{turn}")).encode())
        data = b""
        while b'"t39"' not in data:
            data += await client.reader.read(1 << 16)
        places = [data.index(b'"t%d"' % turn) for turn in range(40)]
        assert places == sorted(places)


async def test_large_bodies_pass_both_ways() -> None:
    """Infera PR 120: 26 of 27 long prompts got 413 from a default limit of 2 MiB."""
    big = "word " * 1_700_000
    async with MockWorker(behaviour=plain(body=b"y" * 9_000_000)) as worker, routing([worker]) as router:
        answer = await ask(router, chat(big))
        assert (answer.status, len(answer.body)) == (200, 9_000_000)
        assert json.loads(worker.received[0].body)["messages"][0]["content"] == big


async def test_a_long_body_and_what_follows_it() -> None:
    """A long body is received in place: in any pieces, with requests before and after it on the same connection."""
    long = json.dumps(chat("word " * 40_000)).encode()
    turns = [json.dumps(chat(f"turn {number}")).encode() for number in range(3)]
    bodies = [turns[0], long, turns[1], long, long, turns[2]]
    data = b"".join(b"POST /v1/x HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%b" % (len(b), b) for b in bodies)
    for size in (len(data), 100_000, 70_001):
        async with MockWorker() as worker, routing([worker]) as router, Client(router.port) as client:
            for start in range(0, len(data), size):
                client.writer.write(data[start : start + size])
                await client.writer.drain()
            await until(lambda worker=worker: len(worker.received) == len(bodies))
            assert [request.body for request in worker.received] == bodies


async def test_a_caller_who_leaves_within_a_long_body() -> None:
    async with MockWorker() as worker, routing([worker]) as router:
        async with Client(router.port) as client:
            client.writer.write(b"POST /v1/x HTTP/1.1\r\nHost: r\r\nContent-Length: 900000\r\n\r\n" + b"x" * 500_000)
            await client.writer.drain()
            await until(lambda: router.proxy._buffered >= 500_000)
        await until(lambda: not router.proxy.connections)
        assert worker.received == []


async def test_chunked_requests_and_expectations() -> None:
    async with MockWorker() as worker, routing([worker]) as router, Client(router.port) as client:
        body = json.dumps(chat()).encode()
        head = b"POST /v1/x HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
        client.writer.write(head)
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        for byte in range(0, len(body), 7):
            piece = body[byte : byte + 7]
            client.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.writer.write(b"0\r\n\r\n")
        assert (await client.answer()).status == 200
        assert worker.received[0].body == body
        assert worker.received[0].header("content-length") == str(len(body))


async def test_trailers_are_no_headers() -> None:
    """They are left out both ways, and any number of them takes no memory."""
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Late: 1\r\n\r\n"
    async with MockWorker(behaviour=raw(answer, close=False)) as worker, routing([worker]) as router:
        async with Client(router.port) as client:
            client.writer.write(b"POST /v1/x HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
            client.writer.write(b"".join(b"X-Trailer-%d: 1\r\n" % number for number in range(500)) + b"\r\n")
            got = await client.answer()
            assert (got.status, got.whole, got.body) == (200, True, b"{}")
            assert "x-late" not in got.headers
            assert not any(name.lower().startswith("x-trailer") for name, _ in worker.received[0].headers)
            assert (await client.ask(chat())).whole


async def test_http_1_0_callers_get_plain_bodies() -> None:
    async with MockWorker(behaviour=stream(3)) as worker, routing([worker]) as router, Client(router.port) as client:
        body = json.dumps(chat()).encode()
        client.writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        data = await client.reader.read(-1)
        assert b"chunked" not in data
        assert data.endswith(b"\r\n\r\ndata: 0 \n\ndata: 1 \n\ndata: 2 \n\ndata: [DONE]\n\n")


async def test_a_body_that_ends_with_the_connection() -> None:
    data = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end"
    async with MockWorker(behaviour=raw(data)) as worker, routing([worker]) as router:
        answer = await ask(router, chat())
        assert (answer.body, answer.whole) == (b"until the end", True)


async def test_interim_responses_are_not_the_answer() -> None:
    data = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    async with MockWorker(behaviour=raw(data)) as worker, routing([worker]) as router:
        answer = await ask(router, chat())
        assert (answer.status, answer.body) == (200, b"ok")
        assert "link" not in answer.headers


@pytest.mark.parametrize("status", [204, 304, 400, 404, 422, 500])
async def test_statuses_pass(status: int) -> None:
    body = b"" if status in (204, 304) else b'{"error":"x"}'
    async with MockWorker(behaviour=plain(status, body)) as worker, routing([worker]) as router:
        async with Client(router.port) as client:
            for _ in range(2):
                answer = await client.ask(chat())
                assert (answer.status, answer.body) == (status, body)


async def test_models_pass_their_cards_through() -> None:
    """production-stack 892: /v1/models lacked max_model_len and the like."""
    other = {"id": "n", "max_model_len": 1_000_000, "extra": {"a": 1}}
    async with MockWorker() as one, MockWorker(card=other) as two, routing([one, two]) as router:
        await until(lambda: len(router.proxy.fleet.models) == 2)
        models = json.loads((await ask(router, b"", method="GET", path="/v1/models")).body)
        assert models == {"object": "list", "data": [one.card, two.card]}
        card = await ask(router, b"", method="GET", path="/v1/models/n")
        assert json.loads(card.body) == other
        assert (await ask(router, b"", method="GET", path="/v1/models/x")).status == 404


async def test_requests_go_where_their_model_is() -> None:
    async with MockWorker() as one, MockWorker(card={"id": "n"}) as two, routing([one, two]) as router:
        for _ in range(4):
            assert (await ask(router, chat() | {"model": "n"})).status == 200
        assert (len(one.received), len(two.received)) == (0, 4)
        answer = await ask(router, chat() | {"model": "nn"})
        assert answer.status == 404
        assert "'nn'" in answer.error["message"]
        assert "m, n" in answer.error["message"]


async def test_the_same_beginning_goes_to_the_same_worker() -> None:
    workers = [MockWorker(name=str(i)) for i in range(4)]
    async with workers[0], workers[1], workers[2], workers[3], routing(workers) as router:
        for session in range(40):  # with 12 by chance one of four workers gets none in one run of eight
            text = f"session {session} " * 1500
            first = await ask(router, chat(text))
            for turn in range(1, 4 if session < 12 else 1):
                again = await ask(router, chat(text + "more " * turn * 100))
                assert again.headers["x-worker"] == first.headers["x-worker"]
        assert min(len(worker.received) for worker in workers) > 0


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"POST /v1/x HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v1/x HTTP/1.1\r\nContent-Length: abc\r\n\r\n", 400),
        (b"POST /v1/x HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 300 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 100_000, 431),
        (b"GET /" + b"x" * 100_000, 431),
        (b"POST /v1/x HTTP/1.1\r\nExpect: a miracle\r\nContent-Length: 3\r\n\r\n", 417),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        (b"PUT /v1/x HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        (b"GET /nowhere HTTP/1.1\r\n\r\n", 404),
        (b"POST /v1/x HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 400),
    ],
)
async def test_bad_requests_get_a_clear_answer(data: bytes, status: int) -> None:
    async with MockWorker() as worker, routing([worker]) as router, Client(router.port) as client:
        client.writer.write(data)
        answer = await client.answer()
        assert answer.status == status
        assert answer.error["message"]
        assert (await ask(router, chat())).status == 200


async def test_a_chunked_body_is_bounded_too() -> None:
    async with MockWorker() as worker, routing([worker], server__max_body_bytes=100_000) as router:
        async with Client(router.port) as client:
            client.writer.write(b"POST /v1/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(200):
                client.writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
            assert (await client.answer()).status == 413


async def test_bodies_held_at_once_are_bounded() -> None:
    async with MockWorker() as worker, routing([worker], server__max_buffered_bytes=100_000) as router:
        async with Client(router.port) as one, Client(router.port) as two:
            one.writer.write(b"POST /v1/x HTTP/1.1\r\nContent-Length: 90000\r\n\r\n" + b"x" * 80_000)
            await until(lambda: router.proxy._buffered == 80_000)
            assert (await two.ask(b"y" * 30_000)).status == 503
        await until(lambda: router.proxy._buffered == 0)
        assert (await ask(router, chat())).status == 200


async def test_keys_and_limits() -> None:
    hold = asyncio.Event()
    options: dict[str, Any] = {
        "auth__api_keys": ("alice", "bob"),
        "auth__admin_key": "root",
        "auth__max_in_flight": 1,
        "workers__api_key": "worker-key",
    }
    async with MockWorker(behaviour=stream(2, gate=hold)) as worker, routing([worker], **options) as router:
        assert (await ask(router, chat())).status == 401
        wrong = await ask(router, chat(), headers="Authorization: Bearer eve\r\n")
        assert (wrong.status, wrong.error["code"]) == (401, "invalid_api_key")
        async with Client(router.port) as client:
            await client.send(json.dumps(chat()).encode(), headers="Authorization: Bearer alice\r\n")
            await until(lambda: worker.running == 1)
            second = await ask(router, chat(), headers="Authorization: Bearer alice\r\n")
            assert (second.status, second.headers["retry-after"]) == (429, "1")
            hold.set()
            assert (await client.answer()).status == 200
        assert (await ask(router, chat(), headers="X-Api-Key: bob\r\n")).status == 200
        assert {r.header("authorization") for r in worker.received} == {"Bearer worker-key"}
        assert {r.header("x-api-key") for r in worker.received} == {None}
        for path, status in (
            ("/v1/models", 401),
            ("/workers", 401),
            ("/health", 200),
            ("/metrics", 200),
            ("/ready", 200),
        ):
            assert (await ask(router, b"", method="GET", path=path)).status == status
        refused = await ask(router, {"url": "http://h:1"}, path="/workers", headers="Authorization: Bearer alice\r\n")
        assert refused.status == 401
        shown = await ask(router, b"", method="GET", path="/workers", headers="Authorization: Bearer root\r\n")
        assert shown.status == 200


async def test_workers_api() -> None:
    async with MockWorker() as one, MockWorker() as two, routing([one]) as router:
        added = await ask(router, {"url": two.url}, path="/workers")
        assert added.status == 200
        await until(lambda: all(worker.health.up for worker in router.proxy.fleet.workers))
        listed = json.loads((await ask(router, b"", method="GET", path="/workers")).body)["workers"]
        assert {worker["url"]: worker["up"] for worker in listed} == {one.url: True, two.url: True}
        assert {tuple(worker["models"]) for worker in listed} == {("m",)}
        drained = await ask(router, {"url": one.url, "draining": True}, path="/workers")
        assert json.loads(drained.body)["draining"] is True
        for _ in range(6):
            await ask(router, chat())
        assert (len(one.received), len(two.received)) == (0, 6)
        left = await ask(router, b"", method="DELETE", path=f"/workers?url={one.url}")
        assert json.loads(left.body) == {"left": one.url}
        assert [worker.url for worker in router.proxy.fleet.workers] == [two.url]
        for body in (b"{", b'{"url":"x"}', b'{"url":"http://h:1","more":1}', b'{"url":"http://h:1","group":"long"}'):
            assert (await ask(router, body, path="/workers")).status == 400


async def test_metrics_say_what_happened() -> None:
    async with MockWorker() as worker, routing([worker]) as router:
        text = "word " * 2000
        for _ in range(3):
            await ask(router, chat(text))
        await ask(router, b"{")
        exposition = (await ask(router, b"", method="GET", path="/metrics")).body.decode()
        lines = dict(line.rsplit(" ", 1) for line in exposition.splitlines() if not line.startswith("#"))
        assert lines['cygnet:router_requests_total{code="200"}'] == "3.0"
        assert lines['cygnet:router_rejected_total{reason="invalid_json"}'] == "1.0"
        assert lines[f'cygnet:router_worker_up{{worker="{worker.url}"}}'] == "1.0"
        assert float(lines["cygnet:router_matched_tokens_total"]) == 2 * 4 * 512
        assert float(lines["cygnet:router_prompt_tokens_total"]) == pytest.approx(3 * 2513, rel=0.01)
        assert lines["cygnet:router_request_duration_seconds_count"] == "3.0"
        assert lines["cygnet:router_requests_in_flight"] == "0.0"


async def test_no_worker_is_a_503_with_a_hint() -> None:
    async with MockWorker(healthy=False) as worker, routing([worker], wait=False) as router:
        answer = await ask(router, chat())
        assert (answer.status, answer.headers["retry-after"]) == (503, "2")
        assert (await ask(router, b"", method="GET", path="/ready")).status == 503
        assert (await ask(router, b"", method="GET", path="/health")).status == 200
        worker.healthy = True
        await until(lambda: router.proxy.fleet.members("m"))
        assert (await ask(router, chat())).status == 200


async def test_requests_wait_at_the_budget_shortest_first() -> None:
    gate = asyncio.Event()
    options: dict[str, Any] = {"routing__worker_budget_tokens": 1000, "queue__max_waiting": 3}
    async with MockWorker(behaviour=stream(1, gate=gate)) as worker, routing([worker], **options) as router:
        clients = [Client(router.port) for _ in range(5)]
        for client in clients:
            await client.__aenter__()
        order = ["r" * 3800, "b" * 20_000, "c" * 12_000, "a" * 4_000]
        for number, (client, text) in enumerate(zip(clients, order, strict=False)):
            await client.send(json.dumps(chat(text)).encode())
            await until(lambda n=number: len(router.proxy.exchanges) == n + 1)
        assert router.proxy.num_waiting == 3
        full = await clients[4].ask(chat("z" * 4000))
        assert (full.status, full.error["code"]) == (429, "queue_full")
        gate.set()
        for client in clients[:4]:
            assert (await client.answer()).whole
        texts = [json.loads(r.body)["messages"][0]["content"][0] for r in worker.received]
        assert texts == ["r", "a", "c", "b"]
        for client in clients:
            await client.__aexit__()


async def test_waiting_ends_with_503_or_with_the_caller() -> None:
    gate = asyncio.Event()
    options: dict[str, Any] = {"routing__worker_budget_tokens": 100, "queue__max_wait_s": 0.3}
    async with MockWorker(behaviour=stream(1, gate=gate)) as worker, routing([worker], **options) as router:
        async with Client(router.port) as busy:
            await busy.send(json.dumps(chat("x" * 1000)).encode())
            await until(lambda: worker.running == 1)
            async with Client(router.port) as leaves:
                await leaves.send(json.dumps(chat("y" * 1000)).encode())
                await until(lambda: router.proxy.num_waiting == 1)
            await until(lambda: router.proxy.num_waiting == 0)
            late = await ask(router, chat("z" * 1000))
            assert (late.status, late.error["code"]) == (503, "queue_timeout")
            gate.set()
            assert (await busy.answer()).whole
        assert len(worker.received) == 1


async def test_made_up_models_are_not_remembered() -> None:
    async with MockWorker() as worker, routing([worker]) as router:
        for number in range(50):
            assert (await ask(router, chat() | {"model": f"made-up-{number}"})).status == 404
        await ask(router, chat())
        assert set(router.proxy.fleet._members) == {"m"}


async def test_an_offer_to_change_protocols_is_not_taken() -> None:
    async with MockWorker() as worker, routing([worker]) as router, Client(router.port) as client:
        for text in ("a", "b" * 200_000):
            offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
            assert (await client.ask(chat(text), headers=offer)).status == 200
            got = worker.received.pop()
            assert json.loads(got.body) == chat(text)
            assert got.header("upgrade") is got.header("http2-settings") is None
        client.writer.write(b"GET /health HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n" * 500)
        data = b""
        while data.count(b'"ok"') < 500:
            data += await client.reader.read(1 << 16)


@pytest.mark.parametrize("headers", ["Content-Encoding: gzip\r\n", ""])
async def test_bodies_that_are_no_json_pass_as_they_are(headers: str) -> None:
    async with MockWorker() as worker, routing([worker]) as router, Client(router.port) as client:
        kind = "application/json" if headers else "multipart/form-data; boundary=x"
        head = f"POST /v1/audio HTTP/1.1\r\nHost: r\r\nContent-Type: {kind}\r\n{headers}Content-Length: 4\r\n\r\n"
        client.writer.write(head.encode() + b"\x1f\x8b\x00\xff")
        assert (await client.answer()).status == 200
        assert worker.received[0].body == b"\x1f\x8b\x00\xff"


async def test_a_worker_that_left_keeps_no_connection() -> None:
    hold = asyncio.Event()
    async with MockWorker(behaviour=stream(2, hold=hold)) as one, MockWorker() as two, routing([one]) as router:
        pool = router.proxy.fleet.workers[0].pool
        async with Client(router.port) as client:
            await client.send(json.dumps(chat()).encode())
            await until(lambda: one.running)
            await ask(router, {"url": two.url}, path="/workers")
            await ask(router, b"", method="DELETE", path=f"/workers?url={one.url}")
            hold.set()
            assert (await client.answer()).whole
        await until(lambda: not pool._open)
        await until(lambda: router.proxy.fleet.members("m"))
        assert (await ask(router, chat())).headers["x-worker"] == two.name
