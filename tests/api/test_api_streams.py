"""Long-lived requests: disconnects, failures in mid-stream, draining, slow readers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from api.harness import MODEL, Running, endless, events, fake_engine, in_loop, serving

ASK = [{"role": "user", "content": "hello"}]


async def lines(response: httpx.Response) -> AsyncIterator[Any]:
    """The events of a response as they come."""
    async for line in response.aiter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def streaming(s: Running, **fields: Any) -> Any:
    """An open stream of a completion."""
    return s.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 900, **fields})


async def refused(s: Running) -> None:
    """Return once the server takes no connections; until then it must say that it is going."""
    while True:
        try:
            response = await s.http.get("/health", headers={"connection": "close"})
        except httpx.TransportError:
            return
        assert response.status_code == 503


@in_loop
async def test_disconnect_of_a_stream_aborts() -> None:
    engine = fake_engine(endless)
    async with serving(engine) as s:
        async with streaming(s, n=2, max_tokens=4000) as response:
            assert (await anext(lines(response)))["choices"]
        await engine.wait_idle()
        assert len(engine.requests) == 2
        assert sorted(engine.aborted) == sorted(r.request_id for r in engine.requests)


@in_loop
async def test_disconnect_of_a_waiting_answer_aborts() -> None:
    engine = fake_engine(endless, manual=True)
    async with serving(engine) as s:
        asking = asyncio.create_task(s.complete(max_tokens=900))
        await engine.wait_added(1)
        asking.cancel()
        await asyncio.wait([asking])
        await engine.wait_idle()
        assert engine.aborted == [engine.requests[0].request_id]


@in_loop
async def test_openai_client_closing_a_stream_aborts() -> None:
    engine = fake_engine(endless)
    async with serving(engine) as s:
        stream = await s.openai.chat.completions.create(model=MODEL, messages=ASK, stream=True)  # type: ignore[call-overload]
        await anext(stream)
        await stream.close()
        await engine.wait_idle()
        assert len(engine.aborted) == 1


@in_loop
async def test_engine_death_in_mid_stream_is_an_error_event() -> None:
    engine = fake_engine(endless, manual=True)
    async with serving(engine) as s:
        sending = asyncio.create_task(s.complete(stream=True, max_tokens=900))
        await engine.wait_added(1)
        engine.step()
        await asyncio.sleep(0)
        engine.die()
        received = events((await sending).text)
        assert received[-1]["error"]["code"] == "engine_unavailable"
        assert "[DONE]" not in received


@in_loop
async def test_engine_death_reaches_the_official_client() -> None:
    engine = fake_engine(endless, manual=True)
    async with serving(engine) as s:
        stream_task = asyncio.create_task(
            s.openai.chat.completions.create(model=MODEL, messages=ASK, stream=True)  # type: ignore[call-overload]
        )
        await engine.wait_added(1)
        engine.step(3)
        stream = await stream_task
        await anext(stream)
        engine.die()
        with pytest.raises(openai.APIError, match="ended"):
            async for _ in stream:
                pass


@in_loop
async def test_failed_sequence() -> None:
    engine = fake_engine(endless, manual=True)
    async with serving(engine) as s:
        asking = asyncio.create_task(s.complete(n=2, max_tokens=900))
        await engine.wait_added(2)
        engine.step()
        engine.fail(engine.requests[0].request_id, "out of luck")
        response = await asking
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "out of luck"
        await engine.wait_idle()
        assert engine.requests[1].request_id in engine.aborted


@in_loop
async def test_slow_reader_gets_everything() -> None:
    engine = fake_engine(endless)
    async with serving(engine) as s:
        async with streaming(s, max_tokens=4000, prompt=[9]) as response:
            iterator = lines(response)
            first = await anext(iterator)
            await s.complete(prompt=[8], max_tokens=4000)  # meanwhile the engine is done with the slow one
            rest = [event async for event in iterator]
        assert rest[-1] == "[DONE]"
        text = "".join(e["choices"][0]["text"] for e in [first, *rest[:-1]])
        assert text == ("abcdefghij" * 400)[:4000]


@in_loop
async def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    engine = fake_engine(endless, manual=True)
    async with serving(engine) as s:
        running = asyncio.create_task(s.complete(stream=True, max_tokens=5))
        await engine.wait_added(1)
        engine.step(2)
        s.server.stop()
        await refused(s)
        assert not s.task.done()
        engine.step(3)
        assert events((await running).text)[-1] == "[DONE]"
        await asyncio.wait_for(s.task, 5)


@in_loop
async def test_drain_out_of_time_ends_with_an_error_event() -> None:
    engine = fake_engine(endless, manual=True)
    async with serving(engine, drain_s=0.0) as s:
        running = asyncio.create_task(s.complete(stream=True, max_tokens=5))
        waiting = asyncio.create_task(s.complete(max_tokens=5))
        await engine.wait_added(2)
        engine.step(2)
        await asyncio.sleep(0)
        s.server.stop()
        assert events((await running).text)[-1]["error"]["code"] == "engine_unavailable"
        assert (await waiting).status_code == 503
        await asyncio.wait_for(s.task, 5)
        assert len(engine.aborted) == 2


@in_loop
async def test_second_stop_ends_at_once() -> None:
    engine = fake_engine(endless, manual=True)
    async with serving(engine, drain_s=1000.0) as s:
        running = asyncio.create_task(s.complete(stream=True, max_tokens=5))
        await engine.wait_added(1)
        engine.step()
        s.server.stop()
        s.server.stop()
        assert "error" in (await running).text
        await asyncio.wait_for(s.task, 5)


@in_loop
async def test_state_stream_ends_with_drain() -> None:
    async with serving() as s:
        async with s.http.stream("GET", "/api/state/stream") as response:
            iterator = lines(response)
            first = await anext(iterator)
            assert first["stats"]["full"]["num_blocks"] == 100
            s.server.stop()
            rest = [event async for event in iterator]
        assert rest[-1]["healthy"] is False
        await asyncio.wait_for(s.task, 5)


def test_sigterm_drains_and_exits_cleanly() -> None:
    """A real process, a real signal: the running stream is finished, the exit status is 0."""
    script = Path(__file__).parent / "serve_fake.py"
    process = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        host, port = process.stdout.readline().split()
        assert host == "127.0.0.1"
        body = {"prompt": "x", "stream": True, "max_tokens": 20}
        with (
            httpx.Client(base_url=f"http://{host}:{port}", trust_env=False, timeout=10) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            iterator = response.iter_lines()
            next(iterator)
            os.kill(process.pid, signal.SIGTERM)
            assert process.stdout.readline().strip() == "draining"
            process.stdin.write("go\n")  # lets the engine go on
            process.stdin.flush()
            assert "data: [DONE]" in list(iterator)
        assert process.wait(10) == 0
        assert process.stdout.read().strip() == "closed"
    finally:
        process.kill()
        process.communicate()
