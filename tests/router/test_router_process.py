"""`cygnet router` as processes: start, drain, errors; and routers that share Redis and die."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.harness import Answer, Client, chat, until
from router.mock_worker import MockWorker, hang, stream
from router.redis_process import RedisProcess

pytestmark = pytest.mark.slow


class RouterProcess:
    """A `cygnet router` that has said it is ready."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    async def ask(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Answer:
        async with Client(self.port) as client:
            return await client.ask(body, path=path)

    async def get(self, path: str) -> Any:
        async with Client(self.port) as client:
            return json.loads((await client.ask(b"", path=path, method="GET")).body)

    async def wait(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 20)


@asynccontextmanager
async def started(workers: list[MockWorker], *args: str) -> AsyncIterator[RouterProcess]:
    command = [sys.executable, "-m", "cygnet.cli.main", "router", "--port", "0", "--set", "workers.probe_s=0.2"]
    for worker in workers:
        command += ["--worker", worker.url]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CYGNET_")}
    process = await asyncio.create_subprocess_exec(
        *command, *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=clean
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.ensure_future(process.stderr.read())
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        match = re.search(r"http://[^:]+:(\d+)", line)
        assert match, line + (await errors).decode()
        router = RouterProcess(process, int(match[1]))

        async def all_up() -> bool:
            return all(worker["up"] for worker in (await router.get("/workers"))["workers"])

        while not await all_up():
            await asyncio.sleep(0.02)
        yield router
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await errors


async def test_failover_sends_every_session_to_the_same_worker(shared_redis: RedisProcess) -> None:
    """smg 1578: after a router's death the same prompts went elsewhere. 60 long prompts through one router, which is
    killed; grown, at once, through another."""
    workers = [MockWorker(name=str(number)) for number in range(4)]
    shared = ("--redis", shared_redis.url, "--set", "redis.namespace=failover")
    async with workers[0], workers[1], workers[2], workers[3]:
        async with started(workers, *shared) as one, started(workers, *shared) as two:
            texts = [f"session {number} " * 1600 for number in range(60)]
            first = [(await one.ask(chat(text))).headers["x-worker"] for text in texts]
            one.process.send_signal(signal.SIGKILL)
            again = [(await two.ask(chat(text + "and more " * 50))).headers["x-worker"] for text in texts]
            assert sum(a == b for a, b in zip(first, again, strict=True)) == 60
            assert min(first.count(worker.name) for worker in workers) >= 5


async def test_a_dead_routers_load_is_taken_back(shared_redis: RedisProcess) -> None:
    """dynamo 12315: capacity leaked when a frontend died before it could free it."""
    worker = MockWorker(behaviour=hang)
    shared = ("--redis", shared_redis.url, "--set", "redis.namespace=leak", "--set", "redis.lease_s=2")
    async with worker, started([worker], *shared) as one, started([worker], *shared) as two:
        async with Client(one.port) as client:
            await client.send(json.dumps(chat("x" * 4000)).encode())
            await until(lambda: worker.running == 1)
            one.process.send_signal(signal.SIGKILL)
            await one.wait()
        worker.behaviour = stream(1)

        async def load() -> int:
            await two.ask(chat())
            return int((await two.get("/workers"))["workers"][0]["load_tokens"])

        while await load() > 500:
            await asyncio.sleep(0.1)


async def test_workers_added_at_one_router_are_known_to_all(shared_redis: RedisProcess) -> None:
    """dynamo 4904: a restarted frontend only ever found some of the workers."""
    shared = ("--redis", shared_redis.url, "--set", "redis.namespace=added", "--set", "redis.lease_s=2")
    async with MockWorker() as worker, MockWorker() as other, started([worker], *shared) as one:
        assert (await one.ask({"url": other.url}, path="/workers")).status == 200
        async with started([], *shared) as two:
            assert len((await two.get("/workers"))["workers"]) == 2
            assert (await two.ask(chat())).status == 200


async def test_a_restart_seen_by_two_routers_counts_once(shared_redis: RedisProcess) -> None:
    shared = ("--redis", shared_redis.url, "--set", "redis.namespace=restart", "--set", "redis.lease_s=2")
    async with MockWorker() as worker, started([worker], *shared) as one, started([worker], *shared) as two:

        async def seen(router: RouterProcess) -> tuple[int, bool]:
            (shown,) = (await router.get("/workers"))["workers"]
            return shown["slot"], shown["up"]

        assert [await seen(router) for router in (one, two)] == [(0, True)] * 2
        await worker.kill()
        while any(up for _, up in [await seen(one), await seen(two)]):
            await asyncio.sleep(0.02)
        await worker.start()
        while [await seen(one), await seen(two)] != [(1, True)] * 2:
            await asyncio.sleep(0.02)
        for _ in range(20):  # several probes later
            assert [await seen(one), await seen(two)] == [(1, True)] * 2
            await asyncio.sleep(0.05)


async def test_a_drain_outlives_a_routers_restart(shared_redis: RedisProcess) -> None:
    shared = ("--redis", shared_redis.url, "--set", "redis.namespace=drain")
    async with MockWorker() as worker:
        async with started([worker], *shared) as one:
            assert (await one.ask({"url": worker.url, "draining": True}, path="/workers")).status == 200
        async with started([worker], *shared) as two:
            (shown,) = (await two.get("/workers"))["workers"]
            assert shown["draining"] is True
            assert (await two.ask(chat())).status == 503


async def test_redis_dies_freezes_and_comes_back_under_requests(own_redis: RedisProcess) -> None:
    workers = [MockWorker(name="a"), MockWorker(name="b")]
    async with workers[0], workers[1], started(workers, "--redis", own_redis.url) as router:

        async def serve(count: int) -> None:
            for turn in range(count):
                answer = await asyncio.wait_for(router.ask(chat(f"{turn} " * 2000)), 5)
                assert answer.status == 200

        await serve(10)
        own_redis.freeze()
        await serve(10)
        own_redis.thaw()
        await serve(10)
        own_redis.kill()
        await serve(10)
        own_redis.start()
        await serve(10)

        async def known() -> bytes:
            return own_redis.command("HGETALL {cygnet}:slots")

        while workers[0].url.encode() not in await known():
            await serve(1)
            await asyncio.sleep(0.05)
        own_redis.command("FLUSHALL")
        own_redis.command("SCRIPT FLUSH")
        await serve(10)


async def test_redis_need_not_be_there_at_the_start(redis_binary: str, tmp_path: Any) -> None:
    redis = RedisProcess(redis_binary, tmp_path)
    async with MockWorker() as worker, started([worker], "--redis", redis.url) as router:
        assert (await router.ask(chat())).status == 200
        with redis:
            while worker.url.encode() not in redis.command("HGETALL {cygnet}:slots"):
                assert (await router.ask(chat())).status == 200
                await asyncio.sleep(0.05)


async def listens(port: int) -> bool:
    try:
        async with Client(port):
            return True
    except OSError:
        return False


async def test_sigterm_drains_and_a_second_one_does_not_wait() -> None:
    gate = asyncio.Event()
    async with MockWorker(behaviour=stream(3, gate=gate)) as worker:
        async with started([worker]) as router, Client(router.port) as client:
            await client.send(json.dumps(chat()).encode())
            await until(lambda: worker.running == 1)
            router.process.send_signal(signal.SIGTERM)
            gate.set()
            assert (await client.answer()).whole
            assert await router.wait() == 0
        gate.clear()
        async with started([worker]) as router, Client(router.port) as client:
            await client.send(json.dumps(chat()).encode())
            await until(lambda: worker.running == 1)
            router.process.send_signal(signal.SIGTERM)
            while await listens(router.port):  # then the first one has been seen
                await asyncio.sleep(0.02)
            router.process.send_signal(signal.SIGTERM)
            assert not (await client.answer()).whole
            assert await router.wait() == 0


async def command(*args: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cygnet.cli.main", "router", *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "NO_COLOR": "1"},
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--worker", "localhost:80"), "write http://host:port"),
        (("--policy", "cash_aware"), "did you mean 'cache_aware'"),
        (("--set", "routing.bucket=1"), "did you mean 'routing.bucket"),
        (("--redis", "localhost"), "must begin with redis://"),
        (("--config", "/nowhere.toml"), "can't read config file"),
        (("--host", "203.0.113.1"), "choose another address"),
    ],
)
async def test_mistakes_are_one_clear_line(args: tuple[str, ...], said: str) -> None:
    code, _, err = await command(*args)
    assert code == 1
    assert err.startswith("error: ")
    assert said in err
    assert len(err.strip().splitlines()) == 1


async def test_tracing_that_nobody_asked_for_is_not_even_imported() -> None:
    program = (
        "import asyncio, sys\n"
        "from cygnet.router.config import RouterConfig\n"
        "from cygnet.router.runtime.service import Service, listen\n"
        "async def main():\n"
        "    service = Service(RouterConfig())\n"
        "    await service.run(listen('127.0.0.1', 0), lambda proxy: service.stop())\n"
        "asyncio.run(main())\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert (process.returncode, out.strip()) == (0, b"[]")


async def test_a_port_in_use_is_said() -> None:
    async with MockWorker() as worker:
        code, _, err = await command("--port", str(worker.port))
        assert code == 1
        assert "in use" in err


async def test_settings_are_printed_and_read_back(tmp_path: Any) -> None:
    code, out, _ = await command("--show-config", "--api-key", "secret", "--set", "routing.buckets=['s=0-64K']")
    assert code == 0
    assert "secret" not in out
    file = tmp_path / "router.toml"
    file.write_text(out)
    code, again, _ = await command("--show-config", "--config", str(file))
    assert code == 0
    assert 'buckets = ["s=0-64K"]' in again
