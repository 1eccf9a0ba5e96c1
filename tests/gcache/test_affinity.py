"""Where a server and a client's threads run."""

import os
import threading
from pathlib import Path

import pytest

from cygnet.base.errors import ConfigError
from cygnet.gcache.runtime.affinity import keep_to, parse_cpus
from cygnet.gcache.runtime.client import ClientOptions, GCacheClient
from support.gcache import client, server


def test_cpus_by_number_by_node_and_by_card(tmp_path: Path) -> None:
    for path, text in (
        ("devices/system/node/node1/cpulist", "8-11,24\n"),
        ("class/net/eth0/device/local_cpulist", "0-3\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    assert parse_cpus("0-3,8") == {0, 1, 2, 3, 8}
    assert parse_cpus("node:1", tmp_path) == {8, 9, 10, 11, 24}
    assert parse_cpus("nic:eth0", tmp_path) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "wrong", ["", "3-1", "a", "1,,2", "-1", "numa:0", "node:x", "nic:..", "nic:a/b", "node:99", "nic:no"]
)
def test_what_names_no_cpus_is_refused(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CPUs"):
        parse_cpus(wrong, tmp_path)


def test_cpus_that_are_not_there_are_refused_and_change_nothing() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match="may run on"):
        keep_to("9999")
    assert os.sched_getaffinity(0) == before


def test_a_client_keeps_its_threads_and_not_its_callers() -> None:
    mine = os.sched_getaffinity(0)
    one = min(mine)
    seen: dict[str, set[int]] = {}
    together = threading.Barrier(3, timeout=60)

    def work(_: int) -> None:
        together.wait()  # so that each thread has one
        seen[threading.current_thread().name] = os.sched_getaffinity(0)

    with server() as running, client(running.port, cpus=str(one), io_threads=2) as sdk:
        sdk.lens.means.team.run([1, 2, 3], work, float("inf"))
    assert len(seen) == 3
    assert all(cpus == ({one} if name.startswith("gcache-io") else mine) for name, cpus in seen.items())
    with pytest.raises(ConfigError, match="CPUs"):
        GCacheClient(ClientOptions(servers=sdk.options.servers, cpus="nobody's"))
