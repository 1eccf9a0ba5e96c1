"""GCache against what bounds it: raw sockets, memcpy, plain O_DIRECT reads, and Redis where that is installed.

    python benchmarks/gcache.py [--quick] [--json FILE] [--check] [--rounds N] [--folder DIR]

One server process and one client process, loopback, 4 KiB to 16 MiB, one call at a time (batches where it says so).
Rows of one size take turns, a few calls each and in changing order, so that whatever else the machine does hurts all of
them; `of its bound` is the median over turns of (the bound's time / the row's time). Bounds, by row:

    view              descriptor RPC: 64 bytes over a unix socket and back
    same host         descriptor RPC and one memcpy into the caller's memory
    TCP get, TCP put  the same bytes by `recv_into` and `sendall`, a header of 64 bytes before or after them
    disk get          preadv by O_DIRECT from a file written in one go; 16 objects per call of either
    batch of 4 KiB    a pipeline of GETs to Redis by raw sockets (none without redis-server)

All bytes that are got by GCache over TCP are checked against their checksums, as always; the raw rows check nothing.
`--check` compares with `[gcache]` in `benchmarks/targets.toml`.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np

from cygnet.gcache.record import full_key
from cygnet.gcache.runtime.channel import Address
from cygnet.gcache.runtime.client import ClientOptions, GCacheClient
from cygnet.gcache.runtime.views import View
from cygnet.kv.runtime.memory import pool_memory
from cygnet.kv.store import Outcome
from provenance import environment

TARGETS = Path(__file__).parent / "targets.toml"
KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
WORKING_SET = 128 * MIB
DISK_SET = 384 * MIB
"""Three times the memory of the server that it is read from."""
DISK_BATCH = 16
"""Objects per call of the disk rows."""
CALLS = 12
"""Per row and turn."""
BATCH = 256
HEADER = 64
MEMORY = "400MiB"

Call = Callable[[int], None]


@dataclass
class Row:
    """One way to move objects of one size. Times in microseconds per call."""

    what: str
    object_bytes: int
    gb_per_s: float
    p50_us: float
    p99_us: float
    cpu_us: float
    """Of the client."""
    of_its_bound: float | None


@dataclass
class Way:
    """What is measured, and against which other row."""

    what: str
    call: Call
    bound: str = ""
    num_bytes: int = 0
    """Per call; 0: an object."""


class Turns:
    """Calls of several ways, in turn."""

    def __init__(self, size: int, ways: list[Way], calls: int) -> None:
        self.size, self.ways, self.calls = size, ways, calls
        self.times: dict[str, list[float]] = {way.what: [] for way in ways}
        self.per_turn: dict[str, list[float]] = {way.what: [] for way in ways}
        self.cpu: dict[str, float] = {way.what: 0.0 for way in ways}
        self.turn = 0
        for way in ways:  # connections are made, pages touched
            way.call(0)

    def take(self) -> None:
        self.turn += 1
        for at in range(len(self.ways)):
            way = self.ways[(at + self.turn) % len(self.ways)]
            times, cpu = [], process_time()
            for number in range(self.calls):
                began = perf_counter()
                way.call(self.turn * self.calls + number)
                times.append(perf_counter() - began)
            self.cpu[way.what] += process_time() - cpu
            self.times[way.what] += times
            self.per_turn[way.what].append(median(times))

    def rows(self) -> Iterator[Row]:
        for way in self.ways:
            times = sorted(self.times[way.what])
            p50 = times[len(times) // 2]
            bounds = self.per_turn.get(way.bound)
            fraction = bounds and median(b / t for b, t in zip(bounds, self.per_turn[way.what], strict=True))
            yield Row(
                way.what,
                self.size,
                (way.num_bytes or self.size) / p50 / 1e9,
                p50 * 1e6,
                times[len(times) * 99 // 100] * 1e6,
                self.cpu[way.what] / len(times) * 1e6,
                fraction or None,
            )


# --- the other ends


def raw_server(pipe: Connection, size: int) -> None:
    """Echoes descriptors on a unix socket; sends and takes bytes on a TCP one: one header in, as it says."""
    unix, tcp = socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))
    unix.bind("")
    unix.listen()
    data = memoryview(np.random.default_rng(0).integers(0, 256, WORKING_SET, np.uint8))
    pipe.send((unix.getsockname(), tcp.getsockname()[1]))
    near, _ = unix.accept()
    far, _ = tcp.accept()
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if os.fork() == 0:
        while message := near.recv(HEADER):
            near.sendall(message)
        os._exit(0)
    header, into, number = bytearray(HEADER), memoryview(bytearray(size)), 0
    while far.recv_into(header):
        if header[0] == ord("g"):
            at = number * size % WORKING_SET
            number += 1
            far.sendall(data[at : at + size])
        else:
            receive(far, into)
            far.sendall(header)
    os._exit(0)


def receive(sock: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += sock.recv_into(view[done:])


@contextmanager
def raw(size: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=raw_server, args=(theirs, size))
    process.start()
    name, port = ours.recv()
    with socket.socket(socket.AF_UNIX) as near, socket.create_connection(("127.0.0.1", port)) as far:
        near.connect(name)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield near, far
    process.join()


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


@contextmanager
def redis_server() -> Iterator[socket.socket | None]:
    binary = shutil.which("redis-server")
    if binary is None:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [binary, "--port", str(port), "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL
    )
    try:
        yield connect(port)
    finally:
        process.terminate()
        process.wait()


def connect(port: int) -> socket.socket:
    until = time.monotonic() + 10
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise


# --- ways


def raw_ways(near: socket.socket, far: socket.socket, source: np.ndarray, size: int) -> list[Way]:
    into = np.zeros(size, np.uint8)
    view = memoryview(into)

    def descriptor(_: int) -> None:
        near.sendall(bytes(HEADER))
        near.recv(HEADER)

    def copy(number: int) -> None:
        at = number * size % WORKING_SET
        descriptor(number)
        np.copyto(into, source[at : at + size])

    def get(_: int) -> None:
        far.sendall(b"g" * HEADER)
        receive(far, view)

    def put(number: int) -> None:
        at = number * size % WORKING_SET
        far.sendall(b"p" * HEADER)
        far.sendall(memoryview(source)[at : at + size])
        receive(far, memoryview(bytearray(HEADER)))

    return [
        Way("descriptor RPC", descriptor),
        Way("descriptor RPC + memcpy", copy),
        Way("raw TCP get", get),
        Way("raw TCP put", put),
    ]


def gcache_ways(near: GCacheClient, far: GCacheClient, source: np.ndarray, size: int) -> list[Way]:
    count = min(WORKING_SET // size, 1024)
    keys = [full_key(b"bench-%d" % size, b"%d" % number) for number in range(count)]
    into = bytearray(size)
    view = memoryview(source)

    def value(number: int) -> memoryview:
        at = number % count * size
        return view[at : at + size]

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


def redis_ways(redis: socket.socket, source: np.ndarray, size: int) -> list[Way]:
    """SET and GET as RESP over a raw socket, without a client library. Redis gets copies of one value."""
    into = memoryview(bytearray(size))
    head = b"$%d\r\n" % size
    value = memoryview(source)[:size]
    count = min(256, WORKING_SET // size)

    def put(number: int) -> None:
        key = b"%d" % (number % count)
        redis.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, size))
        redis.sendall(value)
        redis.sendall(b"\r\n")
        receive(redis, memoryview(bytearray(5)))

    def get(number: int) -> None:
        key = b"%d" % (number % count)
        redis.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key))
        receive(redis, memoryview(bytearray(len(head))))
        receive(redis, into)
        receive(redis, memoryview(bytearray(2)))

    for number in range(count):
        put(number)
    return [Way("raw Redis get", get), Way("raw Redis put", put)]


def batch_ways(near: GCacheClient, far: GCacheClient, redis: socket.socket | None, source: np.ndarray) -> list[Way]:
    """`BATCH` keys of 4 KiB per call."""
    size, total = 4 * KIB, BATCH * 4 * KIB
    keys = [full_key(b"batch", b"%d" % number) for number in range(BATCH)]
    values = [memoryview(source)[number * size : (number + 1) * size] for number in range(BATCH)]
    into = [bytearray(size) for _ in keys]

    def put(_: int) -> None:
        assert set(far.batch_put(keys, values)) == {Outcome.OK}

    def get(client: GCacheClient) -> Call:
        def call(_: int) -> None:
            assert set(client.batch_get_into(keys, into)) == {Outcome.OK}

        return call

    put(0)
    ways = [
        Way(f"GCache TCP, {BATCH} x 4 KiB", get(far), f"Redis pipeline, {BATCH} x 4 KiB", total),
        Way(f"GCache same host, {BATCH} x 4 KiB", get(near), f"Redis pipeline, {BATCH} x 4 KiB", total),
        Way(f"GCache TCP put, {BATCH} x 4 KiB", put, "", total),
        Way(f"GCache exists, {BATCH} keys", lambda _: [][far.batch_exists(keys).count(False) :], "", total),
    ]
    if redis is not None:
        for number in range(BATCH):
            redis.sendall(
                b"*3\r\n$3\r\nSET\r\n$5\r\nb%04d\r\n$%d\r\n" % (number, size) + bytes(values[number]) + b"\r\n"
            )
            receive(redis, memoryview(bytearray(5)))
        asks = b"".join(b"*2\r\n$3\r\nGET\r\n$5\r\nb%04d\r\n" % number for number in range(BATCH))
        answer = memoryview(bytearray(BATCH * (len(b"$4096\r\n") + size + 2)))

        def pipeline(_: int) -> None:
            redis.sendall(asks)
            receive(redis, answer)
            for number in range(BATCH):  # into memory of its own, as the others do
                at = number * (size + 9) + 7
                into[number][:] = answer[at : at + size]

        ways.append(Way(f"Redis pipeline, {BATCH} x 4 KiB", pipeline, "", total))
    return ways


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


def frozen_row(port: int, pid: int) -> dict[str, float]:
    """How long after its deadline a call to a frozen server ends, in milliseconds."""
    late = []
    for _ in range(5):
        with connected(port) as client:
            key = full_key(b"frozen", b"key")
            client.put(key, b"value")
            os.kill(pid, 19)
            began = perf_counter()
            client.get_into(key, bytearray(5), timeout_s=0.2)
            late.append((perf_counter() - began - 0.2) * 1e3)
            began = perf_counter()
            client.get_into(key, bytearray(5), timeout_s=0.2)
            after = (perf_counter() - began) * 1e3
            os.kill(pid, 18)
    return {"late_ms_median": median(late), "late_ms_worst": max(late), "next_call_ms": after}


def measure(folder: Path, rounds: int, *, disk: bool) -> tuple[list[Row], dict[str, float]]:
    rows: list[Row] = []
    source = np.random.default_rng(0).integers(0, 256, WORKING_SET, np.uint8)
    for size in SIZES:
        with ExitStack() as stack:
            ends = stack.enter_context(raw(size))
            port = stack.enter_context(gcache_server(folder, "--memory", MEMORY))
            redis = stack.enter_context(redis_server())
            near = stack.enter_context(connected(port))
            far = stack.enter_context(connected(port, same_host=False))
            ways = raw_ways(*ends, source, size) + gcache_ways(near, far, source, size)
            if redis is not None:
                ways += redis_ways(redis, source, size)
            sets = [Turns(size, ways, max(2, CALLS // (1 + size // MIB)))]
            if size == 4 * KIB:
                sets.append(Turns(size, batch_ways(near, far, redis, source), 4))
            for turns in sets:
                for _ in range(rounds * 10):
                    turns.take()
                rows += turns.rows()
            if redis is not None:
                redis.close()
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


def show(rows: list[Row], frozen: dict[str, float]) -> None:
    print(f"{'':34}{'size':>9}{'GB/s':>8}{'p50 us':>9}{'p99 us':>9}{'CPU us':>8}{'of its bound':>14}")
    for row in rows:
        bound = "" if row.of_its_bound is None else f"{row.of_its_bound:.2f}"
        size = f"{row.object_bytes // KIB} KiB" if row.object_bytes < MIB else f"{row.object_bytes // MIB} MiB"
        print(
            f"{row.what:34}{size:>9}{row.gb_per_s:8.2f}{row.p50_us:9.1f}{row.p99_us:9.0f}{row.cpu_us:8.0f}{bound:>14}"
        )
    print("frozen server: " + ", ".join(f"{name} {value:.2f}" for name, value in frozen.items()))


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
        elif name in ("tcp_get_of_redis", "tcp_put_of_redis"):
            kind = name.split("_")[1]
            if f"raw Redis {kind}" in at_1mib:
                value = at_1mib[f"raw Redis {kind}"].p50_us / at_1mib[f"GCache TCP {kind}"].p50_us
                found[name] = value, value >= target
        else:
            row = at_1mib.get(f"GCache {name.removesuffix('_of_bound').replace('_', ' ').replace('tcp', 'TCP')}")
            if row is not None and row.of_its_bound is not None:
                found[name] = row.of_its_bound, row.of_its_bound >= target
    for name, (value, met) in found.items():
        print(f"{'met   ' if met else 'MISSED'} {name}: {value:.2f}, target {targets[name]}")
    return 0 if all(met for _, met in found.values()) else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the turns")
    parser.add_argument("--rounds", type=int, default=0, help="ten turns each [6, with --quick 2]")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--check", action="store_true", help="fail when a target is missed")
    parser.add_argument("--folder", type=Path, help="where the disk rows write [the system's temporary folder]")
    parser.add_argument("--no-disk", action="store_true", help="leave the disk rows out")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 6)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows, frozen = measure(Path(folder), rounds, disk=not options.no_disk)
    show(rows, frozen)
    if options.json:
        report = {"rows": [asdict(row) for row in rows], "frozen": frozen, "environment": environment(rounds=rounds)}
        options.json.write_text(json.dumps(report, indent=2))
    if options.check:
        sys.exit(check(rows, frozen))


if __name__ == "__main__":
    main()
