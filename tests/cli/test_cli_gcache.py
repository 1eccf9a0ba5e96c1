"""`cygnet gcache`: a server of its own, and the verbs that talk to it."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.gcache import ServerProcess, server_process


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with server_process("--metrics-port", "0", "--max-value", "4MiB") as process:
        yield process


def servers(running: ServerProcess) -> list[str]:
    return ["--servers", f"127.0.0.1:{running.port}"]


def test_put_get_and_stat(cygnet: Any, running: ServerProcess, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 9000)
    assert cygnet("gcache", "put", "weights", str(source), *servers(running)).returncode == 0
    assert cygnet("gcache", "get", "weights", str(target), *servers(running)).returncode == 0
    assert target.read_bytes() == source.read_bytes()
    run = cygnet("gcache", "put", "text", "-", *servers(running), "--ttl", "100", stdin="hello")
    assert run.returncode == 0
    assert cygnet("gcache", "get", "text", "-", *servers(running)).stdout == "hello"
    stats = json.loads(cygnet("gcache", "stat", *servers(running)).stdout)
    assert stats[f"127.0.0.1:{running.port}"]["objects"] == 2


def test_bench_measures_and_cleans_up(cygnet: Any, running: ServerProcess) -> None:
    before = json.loads(cygnet("gcache", "stat", *servers(running)).stdout)
    for more in ([], ["--network", "--batch", "4"]):
        run = cygnet("gcache", "bench", *servers(running), "--size", "64KiB", "--count", "10", *more)
        report = json.loads(run.stdout)
        assert report["objects"] == 10
        assert report["get"]["gb_per_s"] > 0
    after = json.loads(cygnet("gcache", "stat", *servers(running)).stdout)
    name = f"127.0.0.1:{running.port}"
    assert after[name]["objects"] == before[name]["objects"]


def test_metrics(running: ServerProcess) -> None:
    url = f"http://127.0.0.1:{running.announced['metrics_port']}/metrics"
    text = urllib.request.urlopen(url, timeout=20).read().decode()
    assert "cygnet:gcache_memory_capacity_bytes 3" in text
    assert 'cygnet:gcache_puts_total{outcome="ok"}' in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["get", "nothing", "-"], "no 'nothing' in namespace 'files': miss"),
        (["put", "a", "/no/such/file"], "can't read /no/such/file"),
        (["put", "", "/dev/null"], "a name has 1 to"),
        (["bench", "--count", "0"], "at least 1"),
        (["bench", "--size", "5MiB"], "outcome is full"),
    ],
)
def test_mistakes_are_one_line(cygnet: Any, running: ServerProcess, args: list[str], words: str) -> None:
    run = cygnet("gcache", *args, *servers(running))
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert words in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--host", "0.0.0.0"], "set CYGNET_GCACHE_TOKEN to a secret, or give --no-token"),
        (["--disk", "/data"], "names no size"),
        (["--memory", "12"], "1MiB or more"),
        (["--memory", "x"], "can't read 'x' as a size"),
        (["--max-connections", "0"], "must be at least 1"),
        (["--port", "{port}"], "choose another --port"),
        (["--port", "0", "--metrics-port", "{port}"], "choose another port"),
    ],
)
def test_a_server_that_cannot_start(
    cygnet: Any, running: ServerProcess, args: list[str], words: str, tmp_path: Path
) -> None:
    filled = [arg.replace("{port}", str(running.port)) for arg in args]
    memory = [] if "--memory" in filled else ["--memory", "1MiB"]
    run = cygnet("gcache", "serve", "--arena", str(tmp_path / "arena"), *memory, *filled)
    assert run.returncode == 1
    assert words in " ".join(run.stderr.split())


def test_nobody_answers(cygnet: Any) -> None:
    run = cygnet("gcache", "stat", "--servers", "127.0.0.1:1")
    assert run.returncode == 1
    assert "127.0.0.1:1 does not answer" in run.stderr
