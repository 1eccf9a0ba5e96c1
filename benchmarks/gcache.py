"""GCache against what bounds it (raw sockets, memcpy, plain O_DIRECT reads) and against its peers.

    python benchmarks/gcache.py [--quick] [--json FILE] [--check] [--rounds N] [--size KIB] [--folder DIR]

One server process and one client process, loopback, 4 KiB to 16 MiB, one call at a time (batches where it says so).
Rows of one size take turns, a few calls each and in changing order, so that whatever else the machine does hurts all of
them; `of its bound` is the median over turns of (the bound's time / the row's time). Bounds, by row:

    view              descriptor RPC: 64 bytes over a unix socket and back (GCache itself asks nobody, where it can)
    same host         descriptor RPC and one memcpy from shared memory into the caller's
    TCP get, TCP put  the same bytes by `recv_into` and `sendall` from and into shared memory of the working set's size,
                      a header of 64 bytes before or after them
    disk get          preadv by O_DIRECT from a file written in one go; 16 objects per call of either
    256 keys          a pipeline of GETs or SETs of 4 KiB by redis-py
    raw TCP, checked  raw TCP: what checksums alone cost, made while the bytes come and once they are sent. A get has
                      one, a put one at each end. It is the least that a cache can take that checks what it gets

Peers are measured where they are there: redis-server or valkey-server on the PATH, by a raw socket and by redis-py;
Mooncake Store after `python benchmarks/peers.py mooncake`, into memory that is registered with it. Everything that
GCache gets over TCP is checked against its checksums, as always; the raw rows and the peers check nothing. `--check`
compares with `[gcache]` in `benchmarks/targets.toml`. `CYGNET_GCACHE_COMPILED=0` measures without the compiled core.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from cygnet.gcache.record import full_key
from cygnet.gcache.runtime.channel import Address
from cygnet.gcache.runtime.client import ClientOptions, GCacheClient
from cygnet.gcache.runtime.compiled import WHY_NOT
from cygnet.gcache.runtime.views import View
from cygnet.kv.runtime.memory import pool_memory
from cygnet.kv.store import Outcome
from gcache_peers import (
    BATCH,
    WORKING_SET,
    mooncake_ways,
    pipeline_ways,
    raw,
    raw_ways,
    redis_like,
    redis_ways,
    shared_memory,
)
from gcache_turns import Call, Row, Turns, Way, show
from provenance import environment

TARGETS = Path(__file__).parent / "targets.toml"
KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
DISK_SET = 384 * MIB
"""Three times the memory of the server that it is read from."""
DISK_BATCH = 16
"""Objects per call of the disk rows."""
MEMORY = "400MiB"


@contextmanager
def gcache_server(folder: Path, *more: str) -> Iterator[int]:
    arena = Path(tempfile.mkdtemp(prefix="cygnet-bench-", dir="/dev/shm"))
    command = ["-m", "cygnet.cli.main", "gcache", "serve", "--json", "--port", "0", "--arena", str(arena), *more]
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["port"]
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(arena)


# --- ways


def gcache_ways(near: GCacheClient, far: GCacheClient, source: memoryview, size: int) -> list[Way]:
    count = min(WORKING_SET // size, 1024)
    keys = [full_key(b"bench-%d" % size, b"%d" % number) for number in range(count)]
    into = bytearray(size)

    def value(number: int) -> memoryview:
        at = number % count * size
        return source[at : at + size]

    assert set(far.batch_put(keys, [value(number) for number in range(count)], timeout_s=60)) == {Outcome.OK}

    def look(number: int) -> None:
        seen = near.view(keys[number % count])
        assert isinstance(seen, View)
        seen.release()
        assert seen.is_valid()

    def get(client: GCacheClient) -> Call:
        def call(number: int) -> None:
            assert client.get_into(keys[number % count], into) is Outcome.OK

        return call

    def put(number: int) -> None:
        assert far.put(keys[number % count], value(number)) is Outcome.OK

    return [
        Way("GCache view", look, "descriptor RPC"),
        Way("GCache same host", get(near), "descriptor RPC + memcpy"),
        Way("GCache TCP get", get(far), "raw TCP get"),
        Way("GCache TCP put", put, "raw TCP put"),
    ]


def batch_ways(
    near: GCacheClient, far: GCacheClient, redis: tuple[str, int] | None, source: memoryview, stack: ExitStack
) -> list[Way]:
    """`BATCH` keys of 4 KiB per call."""
    size, total = 4 * KIB, BATCH * 4 * KIB
    keys = [full_key(b"batch", b"%d" % number) for number in range(BATCH)]
    values = [source[number * size : (number + 1) * size] for number in range(BATCH)]
    into = [bytearray(size) for _ in keys]

    def put(_: int) -> None:
        assert set(far.batch_put(keys, values)) == {Outcome.OK}

    def get(client: GCacheClient) -> Call:
        def call(_: int) -> None:
            assert set(client.batch_get_into(keys, into)) == {Outcome.OK}

        return call

    def exists(_: int) -> None:
        assert all(far.batch_exists(keys))

    put(0)
    ways = [
        Way("GCache TCP, 256 keys", get(far), "redis-py pipeline of GETs", total),
        Way("GCache same host, 256 keys", get(near), "redis-py pipeline of GETs", total),
        Way("GCache TCP put, 256 keys", put, "redis-py pipeline of SETs", total),
        Way("GCache exists, 256 keys", exists, "", total),
    ]
    return ways + (pipeline_ways(*redis, values, into, stack) if redis is not None else [])


def disk_rows(folder: Path, size: int, rounds: int) -> list[Row]:
    """Gets of objects that are on the disk only, and plain reads of another file, piece by piece of 32 MiB."""
    count, per_turn = DISK_SET // size, 32 * MIB // size // DISK_BATCH
    memory = pool_memory(DISK_BATCH * size)
    plain = folder / "plain"
    noise = np.random.default_rng(1).integers(0, 256, size + count, np.uint8)
    with open(plain, "wb") as file:
        for number in range(count):
            file.write(noise[number : number + size].data)
        os.fsync(file.fileno())
    fd = os.open(plain, os.O_RDONLY | os.O_DIRECT)
    keys = [full_key(b"disk", b"%d" % number) for number in range(count)]
    with ExitStack() as stack:
        port = stack.enter_context(gcache_server(folder, "--memory", "128MiB", "--disk", f"{folder / 'disk'}:2GiB"))
        client = stack.enter_context(connected(port, same_host=False))
        for number in range(0, count, 8):
            values = [noise[at : at + size].data for at in range(number, number + 8)]
            assert set(client.batch_put(keys[number : number + 8], values, timeout_s=60)) == {Outcome.OK}

        into = [memory[at * size : (at + 1) * size] for at in range(DISK_BATCH)]

        def places(number: int) -> list[int]:
            return [(number * DISK_BATCH + at) % count for at in range(DISK_BATCH)]

        def read(number: int) -> None:
            for place, view in zip(places(number), into, strict=True):
                assert os.preadv(fd, [view], place * size) == size

        def get(number: int) -> None:
            outcomes = client.batch_get_into([keys[place] for place in places(number)], into, timeout_s=30)
            assert set(outcomes) == {Outcome.OK}, outcomes

        total = DISK_BATCH * size
        ways = [
            Way("plain O_DIRECT reads", read, "", total),
            Way("GCache disk get", get, "plain O_DIRECT reads", total),
        ]
        turns = Turns(size, ways, per_turn)
        for _ in range(rounds * DISK_SET // (32 * MIB)):
            turns.take()
        os.close(fd)
        return list(turns.rows())


@contextmanager
def connected(port: int, **options: object) -> Iterator[GCacheClient]:
    client = GCacheClient(
        ClientOptions(servers=(Address("127.0.0.1", port),), timeout_s=10.0, **options)  # type: ignore[arg-type]
    )
    try:
        yield client
    finally:
        client.close()


def freeze(pid: int) -> None:
    """Stop a process; returns when all its threads have stopped, which may answer until then."""
    os.kill(pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{pid}/task").glob("*/stat"))
    while any(thread.read_text().rpartition(")")[2].split()[0] != "T" for thread in threads):
        time.sleep(0.0001)


def frozen_row(port: int, pid: int) -> dict[str, float]:
    """How long after its deadline a call to a frozen server ends, in milliseconds.

    Over TCP: on the same machine what is in memory is read for another two seconds without asking.
    """
    late = []
    for _ in range(5):
        with connected(port, same_host=False) as client:
            key = full_key(b"frozen", b"key")
            client.put(key, b"value")
            freeze(pid)
            began = perf_counter()
            client.get_into(key, bytearray(5), timeout_s=0.2)
            late.append((perf_counter() - began - 0.2) * 1e3)
            began = perf_counter()
            client.get_into(key, bytearray(5), timeout_s=0.2)
            after = (perf_counter() - began) * 1e3
            os.kill(pid, signal.SIGCONT)
    return {"late_ms_median": median(late), "late_ms_worst": max(late), "next_call_ms": after}


def measure(folder: Path, rounds: int, sizes: Sequence[int], *, disk: bool) -> tuple[list[Row], dict[str, float]]:
    rows: list[Row] = []
    source = shared_memory(WORKING_SET)
    np.copyto(np.frombuffer(source, np.uint8), np.random.default_rng(0).integers(0, 256, WORKING_SET, np.uint8))
    for size in sizes:
        with ExitStack() as stack:
            ends = stack.enter_context(raw(size))
            port = stack.enter_context(gcache_server(folder, "--memory", MEMORY))
            redis = stack.enter_context(redis_like())
            near = stack.enter_context(connected(port))
            far = stack.enter_context(connected(port, same_host=False))
            ways = raw_ways(*ends, source, size) + gcache_ways(near, far, source, size)
            if redis is not None:
                ways += redis_ways(*redis, source, size, stack)
            ways += mooncake_ways(size, stack)
            sets = [Turns(size, ways)]
            if size == 4 * KIB:
                sets.append(Turns(size, batch_ways(near, far, redis, source, stack)))
            for turns in sets:
                for _ in range(rounds * 10):
                    turns.take()
                rows += turns.rows()
    if disk:
        rows += disk_rows(folder, MIB, max(1, rounds // 3))
    arena = Path(tempfile.mkdtemp(prefix="cygnet-bench-", dir="/dev/shm"))
    command = [
        sys.executable,
        "-m",
        "cygnet.cli.main",
        "gcache",
        "serve",
        "--json",
        "--port",
        "0",
        "--arena",
        str(arena),
    ]
    with subprocess.Popen([*command, "--memory", "16MiB"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        frozen = frozen_row(json.loads(process.stdout.readline())["port"], process.pid)
        process.terminate()
    shutil.rmtree(arena)
    return rows, frozen


PEERS = {
    (peer, kind): what
    for kind in ("get", "put")
    for peer, what in (
        ("redis", (f"raw Redis {kind}", f"raw Valkey {kind}")),
        ("mooncake", (f"Mooncake TCP {kind}",)),
    )
}
BATCHES = {
    "batch_get_of_redis_py": "GCache TCP, 256 keys",
    "batch_put_of_redis_py": "GCache TCP put, 256 keys",
}


def limit_of(name: str, at_1mib: dict[str, Row]) -> str:
    """What plain sockets would reach of a target for TCP, without and with the checksums that GCache makes."""
    ours, _, theirs = name.partition("_of_")
    kind = ours.removeprefix("tcp_")
    peer = next((row for what, row in at_1mib.items() if what in PEERS.get((theirs, kind), ())), None)
    if theirs == "bound" and ours.startswith("tcp_"):
        peer = at_1mib[f"raw TCP {kind}"]
    if peer is None:
        return ""
    plain, checked = (peer.p50_us / at_1mib[f"raw TCP {kind}{more}"].p50_us for more in ("", ", checked"))
    return f" (plain sockets alone: {plain:.2f}, with checksums {checked:.2f})"


def check(rows: list[Row], frozen: dict[str, float]) -> int:
    """0 if all targets are met."""
    targets = tomllib.loads(TARGETS.read_text())["gcache"]
    at_1mib = {row.what: row for row in rows if row.object_bytes == MIB}
    found: dict[str, tuple[float, bool]] = {}
    for name, target in targets.items():
        if name == "view_max_us":
            value = at_1mib["GCache view"].p50_us
            found[name] = value, value <= target
        elif name == "late_max_ms":
            found[name] = frozen["late_ms_worst"], frozen["late_ms_worst"] <= target
        elif name in BATCHES:
            batch = next((row for row in rows if row.what == BATCHES[name]), None)
            if batch is not None and batch.of_its_bound is not None:
                found[name] = batch.of_its_bound, batch.of_its_bound >= target
        elif "_of_redis" in name or "_of_mooncake" in name:
            ours, _, theirs = name.partition("_of_")
            kind = ours.removeprefix("tcp_")
            peer = next((row for what, row in at_1mib.items() if what in PEERS[theirs, kind]), None)
            if peer is not None:
                found[name] = (value := peer.p50_us / at_1mib[f"GCache TCP {kind}"].p50_us), value >= target
        else:
            row = at_1mib.get(f"GCache {name.removesuffix('_of_bound').replace('_', ' ').replace('tcp', 'TCP')}")
            if row is not None and row.of_its_bound is not None:
                found[name] = row.of_its_bound, row.of_its_bound >= target
    for name, (value, met) in found.items():
        print(f"{'met   ' if met else 'MISSED'} {name}: {value:.2f}, target {targets[name]}{limit_of(name, at_1mib)}")
    return 0 if all(met for _, met in found.values()) else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the turns")
    parser.add_argument("--rounds", type=int, default=0, help="ten turns each [6, with --quick 2]")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--check", action="store_true", help="fail when a target is missed")
    parser.add_argument("--folder", type=Path, help="where the disk rows write [the system's temporary folder]")
    parser.add_argument("--size", type=int, action="append", metavar="KIB", help="only objects of this size")
    parser.add_argument("--no-disk", action="store_true", help="leave the disk rows out")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 6)
    sizes = [kib * KIB for kib in options.size] if options.size else SIZES
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows, frozen = measure(Path(folder), rounds, sizes, disk=not options.no_disk)
    show(rows)
    print(f"compiled core: {WHY_NOT or 'in use'}")
    print("frozen server: " + ", ".join(f"{name} {value:.2f}" for name, value in frozen.items()))
    if options.json:
        ran = environment(rounds=rounds, compiled=not WHY_NOT)
        report = {"rows": [asdict(row) for row in rows], "frozen": frozen, "environment": ran}
        options.json.write_text(json.dumps(report, indent=2))
    if options.check:
        sys.exit(check(rows, frozen))


if __name__ == "__main__":
    main()
