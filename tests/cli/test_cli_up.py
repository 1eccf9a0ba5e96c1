"""`cygnet up`: parts that start in order, die, come back and end in order; the whole command over a tiny model."""

import asyncio
import io
import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cygnet.base.errors import ConfigError
from cygnet.cli import fleet as fleet_module
from cygnet.cli.fleet import MAX_DELAY_S, Child, Fleet, FleetError, Part, restart_delay
from cygnet.cli.fleet_page import page, serve_status, status
from cygnet.cli.up import plan_fleet

LIMIT_S = 60

PART = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("told to end", flush=True), sys.exit(0)))
print("hello", flush=True)
pathlib.Path(sys.argv[1]).touch()
while True:
    time.sleep(0.05)
"""


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def part(folder: Path, name: str, stage: int = 0, code: str = PART, **more: Any) -> Part:
    """A process that serves once it has made its file."""
    sign = folder / name

    async def probe() -> bool:
        return sign.exists()

    return Part(name, [sys.executable, "-c", code, str(sign)], probe, stage, **more)


def states(fleet: Fleet) -> list[str]:
    return [child.state for child in fleet.children]


async def stopped(fleet: Fleet, task: "asyncio.Task[None]") -> None:
    fleet.stop()
    await asyncio.wait_for(task, LIMIT_S)
    assert all(child.pid is None for child in fleet.children)


def test_delays_double_and_are_bounded() -> None:
    delays = [restart_delay(deaths) for deaths in range(1, 12)]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays[-1] == MAX_DELAY_S


def test_stages_start_in_order_and_end_in_reverse(tmp_path: Path) -> None:
    async def run() -> None:
        log = io.StringIO()
        ready = asyncio.Event()
        fleet = Fleet([part(tmp_path, "below", 0), part(tmp_path, "above", 1)], log)
        task = asyncio.create_task(fleet.run(ready.set))
        await asyncio.wait_for(ready.wait(), LIMIT_S)
        assert states(fleet) == ["ready", "ready"]
        await stopped(fleet, task)
        said = [line.split(" ", 1)[1] for line in log.getvalue().splitlines()]
        assert said == ["below | hello", "above | hello", "above | told to end", "below | told to end"]
        assert states(fleet) == ["ended", "ended"]

    asyncio.run(run())


def test_a_dead_part_starts_again_after_longer_and_longer_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_DELAY_S", 0.01)

    async def run() -> None:
        log = io.StringIO()
        fleet = Fleet([part(tmp_path, "one"), part(tmp_path, "two")], log)
        task = asyncio.create_task(fleet.run())
        (child, other) = fleet.children
        for deaths in range(3):
            await until(lambda: states(fleet) == ["ready", "ready"])
            pid = child.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda n=deaths: child.restarts == n + 1)
        await until(lambda: child.state == "ready")
        assert other.restarts == 0
        waits = re.findall(r"one ended with status -9; it starts again in (\S+) s", log.getvalue())
        assert [float(wait) for wait in waits] == [0.01, 0.02, 0.04]
        assert status(fleet)[0]["restarts"] == 3
        await stopped(fleet, task)

    asyncio.run(run())


def test_a_part_that_waits_to_start_again_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_DELAY_S", 1000.0)
    monkeypatch.setattr(fleet_module, "MAX_DELAY_S", 1000.0)

    async def run() -> None:
        fleet = Fleet([part(tmp_path, "one")], io.StringIO())
        task = asyncio.create_task(fleet.run())
        (child,) = fleet.children
        await until(lambda: child.state == "ready")
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: child.state == "waiting")
        await stopped(fleet, task)

    asyncio.run(run())


def test_a_part_that_never_served_ends_the_fleet(tmp_path: Path) -> None:
    async def run() -> None:
        wrong = part(tmp_path, "wrong", code="print('error: no such model'); raise SystemExit(1)")
        fleet = Fleet([part(tmp_path, "right"), wrong], io.StringIO())
        with pytest.raises(FleetError, match="wrong ended with status 1 before it was ready: error: no such model"):
            await asyncio.wait_for(fleet.run(), LIMIT_S)
        assert all(child.pid is None for child in fleet.children)

    asyncio.run(run())


@pytest.mark.parametrize("twice", [False, True])
def test_what_does_not_end_is_killed(tmp_path: Path, twice: bool) -> None:
    """After its time, or at once at the second word."""
    deaf = PART.replace("signal.signal(signal.SIGTERM, lambda", "signal.signal(signal.SIGTERM, signal.SIG_IGN);(lambda")

    async def run() -> None:
        fleet = Fleet([part(tmp_path, "deaf", code=deaf, stop_s=1000.0 if twice else 0.2)], io.StringIO())
        task = asyncio.create_task(fleet.run())
        await until(lambda: states(fleet) == ["ready"])
        if twice:
            fleet.stop()
            await until(lambda: states(fleet) == ["stopping"])
        await stopped(fleet, task)

    asyncio.run(run())


def test_the_log_takes_any_bytes_and_any_length(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff' * 3 + b'x' * 30000 + b'\\nlast'); sys.exit(3)"

    async def run() -> None:
        log = io.StringIO()
        child = Child(part(tmp_path, "one", code=code), lambda name, line: print(name, line, file=log) and None)
        with pytest.raises(FleetError, match=r"status 3 .*: last"):
            await asyncio.wait_for(child.run(), LIMIT_S)
        assert log.getvalue().count("x") == 30000

    asyncio.run(run())


def test_the_page_says_what_parts_do(tmp_path: Path) -> None:
    async def run() -> None:
        fleet = Fleet([part(tmp_path, "<one>", url="http://127.0.0.1:1")], io.StringIO())
        server = await serve_status(fleet, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()

        async def get(path: str) -> tuple[str, str]:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            head, _, body = (await asyncio.wait_for(reader.read(), LIMIT_S)).decode().partition("\r\n\r\n")
            writer.close()
            return head.splitlines()[0], body

        line, body = await get("/status")
        assert line.endswith("200 OK")
        assert json.loads(body)["parts"][0] | {"for_s": 0} == {
            "name": "<one>",
            "state": "waiting",
            "for_s": 0,
            "restarts": 0,
            "pid": None,
            "url": "http://127.0.0.1:1",
            "last_line": "",
        }
        line, body = await get("/")
        assert "&lt;one&gt;" in body
        assert "<one>" not in body
        assert body == page(fleet) or "0 s" in body
        assert (await get("/else"))[0].endswith("404 Not Found")
        server.close()
        await server.wait_closed()

    asyncio.run(run())


def test_the_plan_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    settings: dict[str, Any] = {"workers": 2, "host": "127.0.0.1", "port": 1, "policy": "session", "gcache": "64MiB"}
    with pytest.raises(ConfigError, match="redis-server"):
        plan_fleet("m", **settings, redis=True, sets=[], router_sets=[])
    parts = plan_fleet("m", **settings, redis=False, sets=["a.b=1"], router_sets=["c.d=2"])
    assert [(p.name, p.stage) for p in parts] == [("gcache", 0), ("worker-1", 1), ("worker-2", 1), ("router", 2)]
    assert "a.b=1" in parts[1].command
    assert parts[0].url in parts[1].command
    assert {parts[1].url, parts[2].url, "c.d=2", "session"} <= set(parts[3].command)


@pytest.mark.slow
def test_a_whole_fleet_answers_survives_a_death_and_ends(tmp_path: Path) -> None:
    """Router and two servers of a tiny model: an answer, a server killed and back, another answer, SIGTERM."""
    from support import tiny_folder

    model = tiny_folder.write(tmp_path / "tiny")

    async def run() -> None:
        log = tmp_path / "log"
        command = fleet_module.cygnet_command("up", str(model), "--workers", "2", "--port", "0", "--status-port", "0")
        command += ["--log", str(log), "--set", "kv.memory=4MiB", "--set", "kv.host_cache=off"]
        process = await asyncio.create_subprocess_exec(*command)

        def said(pattern: str) -> "re.Match[str] | None":
            return re.search(pattern, log.read_text()) if log.exists() else None

        async def wait_for(pattern: str) -> str:
            async with asyncio.timeout(240):
                while not (found := said(pattern)):
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.1)
            return found[1]

        def read(url: str, body: Any = None) -> str:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                return str(answer.read().decode())

        def get(url: str, body: Any = None) -> Any:
            return json.loads(read(url, body))

        try:
            url = await wait_for(r"ready: (http://\S+)/v1")
            at = await wait_for(r"status page: (http://\S+)")
            name = (await asyncio.to_thread(get, f"{url}/v1/models"))["data"][0]["id"]
            ask = {"model": name, "prompt": "hello " * 40, "max_tokens": 4, "temperature": 0}
            first = await asyncio.to_thread(get, f"{url}/v1/completions", ask)
            blocks = r"cygnet:router_kv_blocks\{worker=\S+\} [1-9]"  # the router hears what the server has cached
            async with asyncio.timeout(60):
                while not re.search(blocks, await asyncio.to_thread(read, f"{url}/metrics")):
                    await asyncio.sleep(0.1)
            parts = (await asyncio.to_thread(get, f"{at}/status"))["parts"]
            assert [p["state"] for p in parts] == ["ready"] * 3
            os.kill(parts[0]["pid"], signal.SIGKILL)
            await wait_for(r"(worker-1 ended with status -9)")
            again = await asyncio.to_thread(get, f"{url}/v1/completions", ask)
            assert again["choices"][0]["text"] == first["choices"][0]["text"]
            async with asyncio.timeout(240):
                while True:
                    parts = (await asyncio.to_thread(get, f"{at}/status"))["parts"]
                    if parts[0]["state"] == "ready" and parts[0]["restarts"] == 1:
                        break
                    await asyncio.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 90) == 0
            for one in parts:
                with pytest.raises(ProcessLookupError):
                    os.kill(one["pid"], 0)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    asyncio.run(run())
