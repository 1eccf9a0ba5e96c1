"""The disk store against plain reads and writes of the same disk: GB/s, latencies, index rebuild, lookups.

    python benchmarks/disk_store.py [--quick] [--json FILE] [--check] [--folder DIR] [--rounds N]

Throughput: plain calls and the store take turns, piece by piece of 64 MiB and in changing order, so that whatever else
uses the disk hurts both; `of plain` is the median over pieces of (plain time / store time). Plain reads and writes are
sequential calls of 1 MiB from one thread, into and out of the memory that the store gets too: aligned, in huge pages.
(`unaligned` and `small pages` are gets into other memory.) The store is given batches of 16 MiB; it reads with its
default threads. All is done with O_DIRECT, as the store does by default, and through the page cache. The latter's files
are dropped from the cache before the first reads; what is written to it is not flushed, and need not reach the disk.

`--check` fails when gets of 1 MiB objects into aligned memory are below `[disk_store] min_read_fraction_1mib` in
`benchmarks/targets.toml`, as a fraction of plain O_DIRECT reads.
"""

import argparse
import json
import mmap
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time

import numpy as np

from cygnet.base.ids import BlockKey
from cygnet.kv.runtime.disk_store import DiskOptions, DiskStore
from cygnet.kv.runtime.memory import pool_memory
from cygnet.kv.store import Group, Namespace, ObjectKey, Outcome, object_key
from provenance import environment

TARGETS = Path(__file__).parent / "targets.toml"
MIB = 1 << 20
PIECE, BATCH = 64 * MIB, 16 * MIB
SIZES = (48 << 10, 256 << 10, MIB)
CHECKED = MIB
OPTIONS = DiskOptions(min_free_bytes=0)
DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass
class Throughput:
    """One way to move objects of one size."""

    what: str
    object_bytes: int
    gb_per_s: float
    cpu_us_per_mib: float
    of_plain: float
    """Median over pieces of the time that plain calls took for as much, by the time that this took."""


@dataclass
class Latency:
    """Calls with one object, in microseconds."""

    what: str
    object_bytes: int
    p50_us: float
    p99_us: float


def memory(num_bytes: int, shift: int = 0) -> memoryview:
    """Memory that begins `shift` bytes after a page does."""
    return pool_memory(num_bytes + 4096)[shift : shift + num_bytes]


def drop_cache(folder: Path) -> None:
    """Have the folder's files read from the disk next time."""
    for file in folder.iterdir():
        if not file.is_file():
            continue
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def keys_of(count: int, salt: int) -> list[ObjectKey]:
    namespace = Namespace(salt.to_bytes(16, "little"))
    return [object_key(namespace, Group.FULL, BlockKey(i.to_bytes(16, "little"))) for i in range(count)]


class Plain:
    """A file that is read and written in calls of 1 MiB."""

    def __init__(self, path: Path, buffer: memoryview, *, direct: bool) -> None:
        self.path = path
        self.flags = DIRECT if direct else 0
        self.parts = [buffer[i : i + MIB] for i in range(0, len(buffer), MIB)]

    def run(self, call: Callable[[int, list[memoryview], int], int], flags: int, piece: int, size: int) -> None:
        fd = os.open(self.path, self.flags | flags, 0o600)
        for i in range(size // MIB):
            assert call(fd, [self.parts[i % len(self.parts)]], piece * size + i * MIB) == MIB
        os.close(fd)

    def write(self, piece: int, size: int = PIECE) -> None:
        """Piece number `piece` of `size` bytes each, a multiple of 1 MiB."""
        self.run(os.pwritev, os.O_WRONLY | os.O_CREAT, piece, size)

    def read(self, piece: int, size: int = PIECE) -> None:
        """See `write`."""
        self.run(os.preadv, os.O_RDONLY, piece, size)


class Turns:
    """Times of several ways to do the same piece of work, in turn."""

    def __init__(self) -> None:
        self.wall: dict[str, dict[int, float]] = {}
        self.cpu: dict[str, float] = {}
        self.turn = 0

    def take(self, ways: Mapping[str, Callable[[], None]]) -> None:
        """Do one piece of work in every way, in another order each time."""
        self.turn += 1
        names = list(ways)
        for i in range(len(names)):
            name = names[(i + self.turn) % len(names)]
            wall, cpu = perf_counter(), process_time()
            ways[name]()
            self.wall.setdefault(name, {})[self.turn] = perf_counter() - wall
            self.cpu[name] = self.cpu.get(name, 0.0) + process_time() - cpu

    def results(self, object_bytes: int) -> list[Throughput]:
        found = []
        for what, times in self.wall.items():
            plain = next(self.wall[other] for other in self.wall if other.startswith("plain"))
            mib = len(times) * PIECE / MIB
            rate = len(times) * PIECE / sum(times.values()) / 1e9
            of_plain = median(plain[turn] / time for turn, time in times.items())
            found.append(Throughput(what, object_bytes, rate, self.cpu[what] / mib * 1e6, of_plain))
        return found


def throughput(folder: Path, size: int, pieces: int, rounds: int, *, direct: bool) -> list[Throughput]:
    """Puts and gets of `pieces` x 64 MiB, `rounds` times. Every other get goes to memory of another kind."""
    per_batch = BATCH // size
    per_piece = PIECE // BATCH * per_batch
    whole = [memory(BATCH), memory(BATCH, 64), memoryview(mmap.mmap(-1, BATCH))]
    for into in whole:
        into[:] = np.random.default_rng(0).integers(0, 256, BATCH, np.uint8).data
    buffers = [[into[i * size : (i + 1) * size] for i in range(per_batch)] for into in whole]
    plain = Plain(folder / "plain", whole[0], direct=direct)
    mode = "O_DIRECT" if direct else "page cache"
    turns = [Turns(), Turns(), Turns()]
    for round_ in range(rounds):
        keys = keys_of(pieces * per_piece, round_)
        options = DiskOptions(min_free_bytes=0, direct=direct)
        store = DiskStore(folder / "store", 4 * pieces * PIECE + (1 << 30), options)

        def batches(piece: int, keys: list[ObjectKey] = keys) -> list[list[ObjectKey]]:
            first = piece * per_piece
            return [keys[i : i + per_batch] for i in range(first, first + per_piece, per_batch)]

        def put(piece: int, store: DiskStore = store) -> None:
            for batch in batches(piece):
                assert set(store.batch_put(batch, buffers[0])) == {Outcome.OK}

        def get(piece: int, kind: int, store: DiskStore = store) -> None:
            for batch in batches(piece):
                assert set(store.batch_get_into(batch, buffers[kind])) == {Outcome.OK}

        for piece in range(pieces):
            turns[0].take({f"plain write, {mode}": partial(plain.write, piece), f"put, {mode}": partial(put, piece)})
        for name in ("store", "."):
            drop_cache(folder / name)
        for piece in range(pieces):
            kind = (0, 1, 0, 2)[piece % 4]
            what = f"get, {mode}{('', ', unaligned', ', small pages')[kind]}"
            turns[1].take({f"plain read, {mode}": partial(plain.read, piece), what: partial(get, piece, kind)})
            if not direct:
                again = {"plain read, again": partial(plain.read, piece), "get, again": partial(get, piece, kind)}
                turns[2].take(again)
        assert store.audit() == []
        store.close()
        shutil.rmtree(folder / "store")
        plain.path.unlink()
    return [result for turn in turns for result in turn.results(size)]


def latencies(folder: Path, size: int, count: int) -> list[Latency]:
    """Single objects: put, then got in turn with plain O_DIRECT reads of the same size, in random order."""
    store = DiskStore(folder / "store", 2 * count * (size + 8192) + (256 << 20), OPTIONS)
    keys, body, into = keys_of(count, 0), memory(BATCH)[:size], memory(BATCH)[:size]
    body[:] = os.urandom(size)

    def timed(call: Callable[[], object]) -> float:
        started = perf_counter()
        call()
        return 1e6 * (perf_counter() - started)

    puts = [timed(partial(store.batch_put, [key], [body])) for key in keys]
    order = np.random.default_rng(1).permutation(count).tolist()
    drop_cache(folder / "store")
    plain_path = folder / "plain"
    plain_path.write_bytes(bytes(size) * count)
    drop_cache(folder)
    fd = os.open(plain_path, os.O_RDONLY | DIRECT)
    cold, plain = [], []
    for i in order:
        cold.append(timed(partial(store.batch_get_into, [keys[i]], [into])))
        plain.append(timed(partial(os.preadv, fd, [into], i * size)))
    os.close(fd)
    assert store.stats().gets == {Outcome.OK: count}
    store.close()
    shutil.rmtree(folder / "store")
    plain_path.unlink()

    def result(what: str, times: list[float]) -> Latency:
        return Latency(what, size, median(times), quantiles(times, n=100)[98])

    return [
        result("put", puts),
        result("get", cold),
        result("plain O_DIRECT read", plain),
    ]


def index(folder: Path, count: int) -> dict[str, float]:
    """Opening a store of `count` objects, with and without its sealed indexes, and looking up what is in it."""
    options = DiskOptions(min_free_bytes=0, segment_bytes=32 * MIB)
    store = DiskStore(folder / "store", 4 << 30, options)
    keys, body = keys_of(count, 0), bytes(64)
    for i in range(0, count, 64):
        store.batch_put(keys[i : i + 64], [body] * len(keys[i : i + 64]))
    started = perf_counter()
    lookups = 0
    while (elapsed := perf_counter() - started) < 1.0:
        for i in range(0, count - 128, 128):
            assert all(store.batch_exists(keys[i : i + 128]))
            lookups += 128
            if perf_counter() - started > 1.0:
                break
    store.close()
    times = {}
    for what in ("sealed", "scanned"):
        if what == "scanned":
            for file in (folder / "store").glob("*.idx"):
                file.write_bytes(b"damaged")
        drop_cache(folder / "store")
        before = perf_counter()
        store = DiskStore(folder / "store", 4 << 30, options)
        times[what] = perf_counter() - before
        assert store.stats().num_objects == count
        store.close()
    shutil.rmtree(folder / "store")
    return {
        "objects": count,
        "open_s_per_100k": times["sealed"] * 100_000 / count,
        "open_without_indexes_s_per_100k": times["scanned"] * 100_000 / count,
        "exists_per_s": lookups / elapsed,
    }


def check(results: list[Throughput]) -> int:
    """Exit status: whether the target is met; says so."""
    target = float(tomllib.loads(TARGETS.read_text())["disk_store"]["min_read_fraction_1mib"])
    measured = next(r.of_plain for r in results if r.what == "get, O_DIRECT" and r.object_bytes == CHECKED)
    good = measured >= target
    print(f"{'ok' if good else 'TOO SLOW'}: gets of 1 MiB at {measured:.2f} of plain O_DIRECT reads, target {target}")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="The disk store against plain reads and writes.")
    parser.add_argument("--quick", action="store_true", help="less data, half a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--check", action="store_true", help="fail when the target is missed")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--rounds", type=int, default=0, help="how often all is written and read (2; quick: 1)")
    options = parser.parse_args()
    pieces, rounds = (6, options.rounds or 1) if options.quick else (12, options.rounds or 2)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="disk-store-"))
    try:
        results: list[Throughput] = []
        print(f"{'object':>8} {'what':<32} {'GB/s':>6} {'CPU us/MiB':>11} {'of plain':>9}")
        for size in SIZES:
            for result in (
                *throughput(folder, size, pieces, rounds, direct=True),
                *throughput(folder, size, pieces, rounds, direct=False),
            ):
                results.append(result)
                figures = f"{result.gb_per_s:>6.2f} {result.cpu_us_per_mib:>11.0f} {result.of_plain:>9.2f}"
                print(f"{size >> 10:>4} KiB {result.what:<32} {figures}")
        print(f"\n{'object':>8} {'single calls':<32} {'p50 us':>8} {'p99 us':>8}")
        singles: list[Latency] = []
        for size in SIZES:
            for latency in latencies(folder, size, 300 if options.quick else 1000):
                singles.append(latency)
                print(f"{size >> 10:>4} KiB {latency.what:<32} {latency.p50_us:>8.0f} {latency.p99_us:>8.0f}")
        lookups = index(folder, 20_000 if options.quick else 100_000)
        print("\n" + "\n".join(f"{name:<32} {value:>12,.3f}" for name, value in lookups.items()))
    finally:
        shutil.rmtree(folder)
    if options.json:
        report = {
            "config": {"quick": options.quick, "pieces": pieces, "piece_bytes": PIECE, "rounds": rounds},
            "environment": environment(),
            "throughput": [asdict(result) for result in results],
            "latency": [asdict(latency) for latency in singles],
            "index": lookups,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return check(results) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
