"""The engine in its own process, with a tiny model: the client's contract, and what goes wrong at start."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, cast

import msgspec
import psutil
import pytest
import zmq

from contracts.engine_client import CHECKS, Subject, collect, request, until
from cygnet.base.config import Config, resolve
from cygnet.base.errors import ConfigError, EngineDeadError, InvalidRequestError, QueueFullError
from cygnet.base.messages import AbortRequests, AddRequest, EngineInput, RequestOutput, Shutdown, StepOutputs
from cygnet.base.sampling import SamplingParams
from cygnet.engine.runtime.client import SOCKET_NAME, EngineProcess, _listen
from model import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-mimo")
    tiny.mimo().save_pretrained(path)
    return path


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An own folder for temporary files, with a name short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def config_for(folder: Path, *sets: str) -> Config:
    settings = ("kv.memory=8MiB", "kv.block_size=4", "kv.poison=true", "engine.audit=step", "engine.num_threads=1")
    # dtype is given: a tiny random model in bf16 is all ties, and equal text would prove nothing.
    return resolve(sets=[*settings, *sets], options={"model.model": str(folder), "model.dtype": "float32"}).config


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: object, folder: Path) -> None:
    @asynccontextmanager
    async def make(*, max_running: int = 8, max_waiting: int = 64) -> AsyncIterator[Subject]:
        sets = (f"engine.max_num_seqs={max_running}", f"engine.max_waiting={max_waiting}")
        client = await EngineProcess.start(config_for(folder, *sets))
        try:
            yield Subject(client, kill=lambda: os.kill(client.pid, signal.SIGKILL))
        finally:
            await client.aclose()

    asyncio.run(check(make))  # type: ignore[operator]


def test_start_reports_progress_and_itself(folder: Path) -> None:
    async def main() -> None:
        seen: list[tuple[str, int, int]] = []
        client = await EngineProcess.start(config_for(folder), on_progress=lambda *what: seen.append(what))
        try:
            assert ("finding the model", 0, 0) in seen
            assert seen[-1][1] == seen[-1][2] > 0
            assert client.ready.vocab_size == tiny.VOCAB
            assert client.ready.geometry.window == 12
            assert client.ready.max_model_len == 512
            assert client.stats.full.num_blocks > 0
        finally:
            await client.aclose()
        assert not psutil.pid_exists(client.pid)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["kv.memory=4096"], r"minimum of .* bytes"),
        (["model.max_model_len=400", "kv.memory=90000"], "--max-model-len"),
        (["kv.eviction=nope"], "unknown eviction policy 'nope'; known: lru, value"),
        (["kv.retention=['prompt_ned']"], "did you mean 'prompt_end'"),
        (["model.device=cuda:77"], "sees no GPU|--device cpu"),
        (["model.device=abacus"], "no torch device"),
    ],
)
def test_impossible_settings_are_refused_at_start(folder: Path, sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asyncio.run(EngineProcess.start(config_for(folder, *sets)))


def test_an_engine_error_reaches_the_caller(folder: Path) -> None:
    async def main() -> None:
        client = await EngineProcess.start(config_for(folder))
        try:
            with pytest.raises(InvalidRequestError, match="between 0 and 159"):
                await collect(client, AddRequest("bad", [1, 100_000], SamplingParams()))
            assert len((await collect(client, request("good", max_tokens=2)))[-1].token_ids) >= 1
            await until(lambda: client.stats.num_running == 0 and client.stats.generation_tokens_total == 2)
        finally:
            await client.aclose()

    asyncio.run(main())


def test_sending_loses_no_wake_up() -> None:
    """Aborts go out while an output comes in: the output is read when it is there, not when the next one comes."""
    socket, folder = _listen()
    client = EngineProcess(cast(Any, None), socket, folder, 8)
    answerer = threading.Thread(target=_answer_at_random_times, args=(f"ipc://{folder}/{SOCKET_NAME}",), daemon=True)
    answerer.start()
    rnd = Random(1)

    async def main() -> None:
        await socket.poll(flags=zmq.POLLOUT)
        reader = asyncio.create_task(client._receive())
        for index in range(1500):
            waiting = asyncio.create_task(collect(client, request(f"r{index}", max_tokens=1)))
            await asyncio.sleep(0)
            for _ in range(rnd.randrange(1, 40)):
                client._send(AbortRequests(["another"]))
            await asyncio.wait_for(waiting, 5.0)
        client._send(Shutdown())
        reader.cancel()
        await asyncio.wait({reader})

    try:
        asyncio.run(main())
        answerer.join(timeout=5)
        assert not answerer.is_alive()
    finally:
        socket.close()
        shutil.rmtree(folder)


def _answer_at_random_times(address: str) -> None:
    """The engine's end of the socket: a token for every request, within a fraction of a millisecond."""
    decoder, rnd = msgspec.msgpack.Decoder(EngineInput), Random(2)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        while not isinstance(message := decoder.decode(socket.recv()), Shutdown):
            if isinstance(message, AddRequest):
                due = perf_counter() + rnd.random() * 200e-6
                while perf_counter() < due:
                    pass
                socket.send(
                    msgspec.msgpack.encode(StepOutputs([RequestOutput(message.request_id, [1], None, "length")]))
                )


def test_a_request_to_an_engine_just_killed_fails(folder: Path) -> None:
    """The connection is gone before the death was noticed: nothing may wait for it to come back."""

    async def main() -> None:
        client = await EngineProcess.start(config_for(folder))
        try:
            os.kill(client.pid, signal.SIGKILL)
            while int(client._socket.get(zmq.EVENTS)) & zmq.POLLOUT:  # without giving the event loop a turn
                pass
            with pytest.raises(EngineDeadError):
                await collect(client, request("late", max_tokens=1))
            assert not client.healthy
        finally:
            await client.aclose()

    asyncio.run(main())


def test_an_unreadable_message_fails_all_who_wait(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        client = await EngineProcess.start(config_for(folder))
        try:
            client._decoder = msgspec.msgpack.Decoder(cast(Any, int))
            with pytest.raises(EngineDeadError, match="can't be read"):
                await collect(client, request("a", max_tokens=1))
            assert not client.healthy
        finally:
            await client.aclose()

    asyncio.run(main())
    assert "reading from the engine process failed" in caplog.text


def test_a_failing_engine_has_the_last_word(folder: Path) -> None:
    """Its own words reach those who wait, not just its exit status."""

    async def main() -> None:
        client = await EngineProcess.start(config_for(folder))
        try:
            waiting = asyncio.create_task(collect(client, request("a", max_tokens=400)))
            await until(lambda: client.num_in_flight == 1)
            client._socket.send(b"\xc1").result()
            with pytest.raises(EngineDeadError, match="the engine failed: DecodeError"):
                await waiting
        finally:
            await client.aclose()

    asyncio.run(main())


def test_a_cancelled_start_leaves_nothing(folder: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the process, which listens to nobody while it loads, nor the socket's folder; and without delay."""
    monkeypatch.setattr("cygnet.engine.runtime.client.STOP_TIMEOUT_S", 600.0)

    async def main() -> None:
        starting = asyncio.create_task(EngineProcess.start(config_for(folder)))
        await until(lambda: bool(psutil.Process().children()))
        assert list(short_tmp.iterdir())
        starting.cancel()
        await asyncio.wait({starting}, timeout=20)
        assert starting.cancelled()

    asyncio.run(main())
    assert psutil.Process().children() == []
    assert list(short_tmp.iterdir()) == []


def test_a_cancelled_drain_leaves_nothing(folder: Path, short_tmp: Path) -> None:
    async def main() -> psutil.Process:
        client = await EngineProcess.start(config_for(folder))
        engine = psutil.Process(client.pid)
        reading = asyncio.create_task(collect(client, request("a", max_tokens=400)))
        await until(lambda: client.num_in_flight == 1)
        closing = asyncio.create_task(client.aclose(drain_s=600))
        await until(lambda: not client.healthy)
        closing.cancel()
        await asyncio.wait({closing, reading})
        assert isinstance(reading.exception(), EngineDeadError)
        return engine

    asyncio.run(main()).wait(timeout=20)
    assert list(short_tmp.iterdir()) == []


def test_a_launched_process_that_is_not_needed(short_tmp: Path) -> None:
    """It may still be importing, or wait for what to load: either way it is gone at once, with its socket."""

    async def main() -> None:
        client = await EngineProcess.launch()
        await client.aclose()
        assert not psutil.pid_exists(client.pid)
        waiting = await EngineProcess.launch()
        assert waiting._process.stdin is not None
        waiting._process.stdin.close()
        assert await asyncio.wait_for(waiting._process.wait(), 60) == 0
        await waiting.aclose()

    asyncio.run(main())
    assert list(short_tmp.iterdir()) == []


def test_no_room_for_the_sockets_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        asyncio.run(EngineProcess.start(config_for(folder)))
    assert list(deep.iterdir()) == []


def test_slow_readers_keep_nobody_out(folder: Path) -> None:
    """Answers that are done but not read take no place in the queue."""

    async def main() -> None:
        client = await EngineProcess.start(config_for(folder, "engine.max_num_seqs=1", "engine.max_waiting=1"))
        try:
            async with AsyncExitStack() as stack:
                for name in ("a", "b"):
                    outputs = await stack.enter_async_context(aclosing(client.generate(request(name, max_tokens=9))))
                    assert (await anext(outputs)).finish_reason is None
                with contextlib.suppress(QueueFullError):
                    await collect(client, request("early", max_tokens=1))
                await until(lambda: client.stats.generation_tokens_total >= 18 and client.stats.num_running == 0)
                assert client.num_in_flight == 2
                assert await collect(client, request("late", max_tokens=1))
        finally:
            await client.aclose()

    asyncio.run(main())


def test_engine_ends_when_its_parent_is_killed(folder: Path) -> None:
    """No orphan keeps the memory: the engine notices the closed pipe."""
    program = f"""
import asyncio, msgspec
from cygnet.base.config import Config
from cygnet.engine.runtime.client import EngineProcess
async def main():
    client = await EngineProcess.start(msgspec.json.decode({_json(config_for(folder))!r}, type=Config))
    print(client.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        engine.wait(timeout=20)


def _json(config: Config) -> bytes:
    return msgspec.json.encode(config)
