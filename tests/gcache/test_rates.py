"""What `cygnet gcache top` shows."""

import subprocess
import sys

from cygnet.gcache.rates import rates
from support.gcache import MIB, client, key, server

BEFORE = {"uptime_s": 10.0, "bytes_got": 100, "gets": {"ok": 5, "miss": 1}, "puts": {"ok": 2}, "evicted_objects": 3}
NOW = {
    "uptime_s": 12.0,
    "bytes_got": 300,
    "bytes_put": 40,
    "gets": {"ok": 11, "miss": 3, "torn": 1},
    "puts": {"ok": 4},
    "evicted_objects": 3,
    "objects": 7,
    "memory_bytes": 1,
    "memory_capacity_bytes": 4,
    "connections": 2,
}


def test_what_changed() -> None:
    found = rates(BEFORE, NOW, 2.0)
    assert (found.gets_per_s, found.hits, found.puts_per_s) == (4.5, 6 / 9, 1.0)
    assert (found.bytes_got_per_s, found.bytes_put_per_s, found.evicted_per_s) == (100.0, 20.0, 0.0)
    assert (found.objects, found.memory_used, found.disk_used, found.connections) == (7, 0.25, 0.0, 2)


def test_a_server_that_was_started_anew_counts_from_its_start() -> None:
    found = rates({**BEFORE, "uptime_s": 1000.0}, NOW, 2.0)
    assert (found.gets_per_s, found.hits) == (15 / 12, 11 / 15)
    assert rates({}, NOW, 2.0) == found
    assert rates(NOW, NOW, 1.0).hits is None


def test_the_command() -> None:
    with server() as running, client(running.port) as sdk:
        sdk.put(key(1), bytes(MIB))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "cygnet.cli.main", "gcache", "top"),
                *("--servers", f"127.0.0.1:{running.port}", "--interval", "0.05", "--count", "2"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["server", f"127.0.0.1:{running.port}"] * 2
    assert lines[1].split()[1:3] == ["0", "-"]
