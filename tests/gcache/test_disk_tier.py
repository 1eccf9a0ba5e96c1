"""Memory over disk: cold goes down, what is wanted comes up, and the two never contradict each other."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cygnet.gcache.arena import Entry
from cygnet.gcache.limits import Limits
from cygnet.gcache.protocol import Item
from cygnet.gcache.record import checksums
from cygnet.gcache.runtime.cache import Cache
from cygnet.gcache.runtime.disk_tier import DiskTier
from cygnet.gcache.runtime.server import Server
from cygnet.gcache.runtime.shared_memory import open_shared_memory
from cygnet.kv.store import Outcome
from support.gcache import MIB, client, key, server

SOON = 20.0


@contextmanager
def cache(folder: Path, memory_bytes: int = 4 * MIB) -> Iterator[Cache]:
    """A cache over a disk; what is in `folder` is found again."""
    opened = Cache(
        open_shared_memory(folder / "arena", memory_bytes, 4096), DiskTier(folder / "disk", 64 * MIB), Limits()
    )
    try:
        yield opened
    finally:
        opened.close()


def value_of(name: int | tuple[int, ...], size: int = 200_000) -> bytes:
    return np.random.default_rng([3, *(name if isinstance(name, tuple) else (name,))]).bytes(size)


def put(cached: Cache, name: bytes, value: bytes) -> Item:
    entry = cached.reserve(name, len(value), 0, time.monotonic() + SOON)
    if isinstance(entry, Item):
        return entry
    cached.arena.value(entry)[:] = value
    return cached.commit(entry, checksums(name, value), time.monotonic() + SOON)


def get(cached: Cache, name: bytes) -> bytes | Item:
    entry = cached.acquire(name, time.monotonic() + SOON)
    if isinstance(entry, Item):
        return entry
    try:
        return bytes(cached.arena.value(entry))
    finally:
        cached.memory.release([entry])


def down(cached: Cache) -> None:
    """Have everything in memory written down, and given up there."""
    while cached.write_down(everything=True):
        pass
    with cached.memory.lock:
        while (victim := cached.memory.tiering.victim()) is not None:
            assert victim.clean
            cached._give_up(victim)
    assert len(cached.arena) == 0


def test_many_times_the_memory_is_found_again(tmp_path: Path) -> None:
    with cache(tmp_path) as cached:
        names = [key(number) for number in range(150)]
        for number, name in enumerate(names):
            assert put(cached, name, value_of(number)) is Item.OK
        found = [get(cached, name) for name in names]
        assert all(value in (Item.MISS, value_of(number)) for number, value in enumerate(found))
        lost = sum(value is Item.MISS for value in found)
        assert lost == cached.counts.dropped_objects, "only what the disk was too slow for is lost"
        assert lost < 15
        assert cached.counts.disk_hits > 100
        assert cached.audit() == []


def test_a_restart_finds_both_tiers(tmp_path: Path) -> None:
    with cache(tmp_path) as cached:
        for number in range(60):
            put(cached, key(number), value_of(number))
        there = [number for number in range(60) if cached.exists(key(number), None, touch=False)]
    assert len(there) > 50
    with cache(tmp_path) as cached:
        assert [get(cached, key(number)) for number in there] == [value_of(number) for number in there]
        assert cached.audit() == []


def test_a_new_arena_keeps_the_disk(tmp_path: Path) -> None:
    """As after a reboot. Versions begin anew, so the ones on disk must not win over later ones."""
    with cache(tmp_path) as cached:
        put(cached, key(1), value_of(1))
        down(cached)
    (tmp_path / "arena" / "arena").unlink()
    with cache(tmp_path) as cached:
        assert get(cached, key(1)) == value_of(1)
        assert put(cached, key(1), value_of(2)) is Item.OK
        entry = cached.arena.find(key(1))
        assert entry is not None
        first = entry.version
        assert get(cached, key(1)) == value_of(2)
        assert first > 1


def test_overwriting_reaches_the_disk(tmp_path: Path) -> None:
    """The same size on purpose: the disk would think it has it already."""
    with cache(tmp_path) as cached:
        put(cached, key(1), value_of(1))
        down(cached)
        put(cached, key(1), value_of(2))
        down(cached)
        assert get(cached, key(1)) == value_of(2)
    with cache(tmp_path) as cached:
        assert get(cached, key(1)) == value_of(2)


def test_removing_and_clearing_reach_the_disk(tmp_path: Path) -> None:
    with cache(tmp_path) as cached:
        for number in range(4):
            put(cached, key(number), value_of(number))
        put(cached, key(9, b"other"), value_of(9))
        down(cached)
        assert cached.remove(key(1), time.monotonic() + SOON)
        assert not cached.remove(key(1), time.monotonic() + SOON)
        assert get(cached, key(0)) == value_of(0)
        assert cached.remove(key(0), time.monotonic() + SOON), "from both tiers"
        assert get(cached, key(0)) is Item.MISS
        assert cached.clear(b"test", time.monotonic() + SOON) == 2
        assert get(cached, key(2)) is Item.MISS
        assert get(cached, key(9, b"other")) == value_of(9)
        assert cached.audit() == []


def test_a_load_waits_for_cold_objects_to_be_written_and_loses_none(tmp_path: Path) -> None:
    """Memory full of objects that the disk has not got, though enough others are clean: it must not wait for ever."""
    with cache(tmp_path) as cached:
        for number in range(100, 106):
            put(cached, key(number), value_of(number))
        down(cached)
        for number in range(70):
            assert put(cached, key(number), value_of(number, 40_000)) is Item.OK
        for number in range(100, 106):  # used ones are not offered as victims before the others
            for _ in range(3):
                assert get(cached, key(number)) == value_of(number)
        assert [get(cached, key(number)) for number in range(70)] == [value_of(n, 40_000) for n in range(70)]
        assert cached.counts.dropped_objects == 0
        assert cached.audit() == []


def test_exists_asks_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cache(tmp_path) as cached:
        put(cached, key(1), value_of(1))
        down(cached)
        monkeypatch.setattr("cygnet.kv.runtime.disk_store.disk.Disk.preadv", None)
        assert cached.exists(key(1), None, touch=True)
        assert cached.exists(key(1), 200_000, touch=False)
        assert not cached.exists(key(1), 100_000, touch=False)
        assert not cached.exists(key(2), None, touch=True)


def test_another_keys_record_is_not_believed(tmp_path: Path) -> None:
    """As if two keys had one digest: the record says whose it is."""
    with cache(tmp_path) as cached:
        put(cached, key(1), value_of(1))
        down(cached)
        disk = cached._disk
        assert disk is not None
        record = bytearray(disk.record_bytes(key(1)) or 0)
        assert disk.read(key(1), memoryview(record), SOON) is Outcome.OK
        assert disk.write([key(2)], [memoryview(record)], SOON) == [Outcome.OK]
        assert get(cached, key(2)) is Item.TORN
        assert get(cached, key(2)) is Item.MISS, "asked for once, and never again"
        assert get(cached, key(1)) == value_of(1)


def test_a_damaged_segment_costs_its_object(tmp_path: Path) -> None:
    with cache(tmp_path) as cached:
        put(cached, key(1), value_of(1))
        put(cached, key(2), value_of(2))
        down(cached)
    for segment in (tmp_path / "disk").glob("*.seg"):
        data = bytearray(segment.read_bytes())
        at = data.find(value_of(1)[100:200])
        if at >= 0:
            data[at] ^= 1
            segment.write_bytes(data)
    with cache(tmp_path) as cached:
        # The arena still names nothing: both came down before.
        assert get(cached, key(1)) in (Item.TORN, Item.MISS)
        assert get(cached, key(1)) is Item.MISS
        assert get(cached, key(2)) == value_of(2)


def test_a_torn_object_of_an_earlier_process_is_not_written_down(tmp_path: Path) -> None:
    """The disk would put a new checksum on it."""
    with cache(tmp_path) as cached:
        put(cached, key(1), value_of(1))
    arena = tmp_path / "arena" / "arena"
    data = bytearray(arena.read_bytes())
    data[data.index(value_of(1)[:100])] ^= 1
    with arena.open("r+b") as file:
        file.write(data)
    with cache(tmp_path) as cached:
        while cached.write_down(everything=True):
            pass
        assert not cached.exists(key(1), None, touch=False)
        assert cached.counts.torn_objects == 1


def test_a_full_disk_does_not_hold_up_puts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cache(tmp_path) as cached:
        monkeypatch.setattr(DiskTier, "write", lambda self, keys, *rest: [Outcome.FULL] * len(keys))
        for number in range(20):
            put(cached, key(number), value_of(number))
        began = time.monotonic()
        for number in range(20, 60):
            assert put(cached, key(number), value_of(number)) is Item.OK
            assert get(cached, key(number)) == value_of(number)
        assert time.monotonic() - began < 5
        assert cached.counts.dropped_objects > 30
        assert cached.audit() == []


def test_what_the_disk_gave_up_is_written_again(tmp_path: Path) -> None:
    with cache(tmp_path) as cached:
        put(cached, key(1), value_of(1))
        while cached.write_down(everything=True):
            pass
        assert cached._disk is not None
        cached._disk.remove(key(1))
        for number in range(2, 60):
            put(cached, key(number), value_of(number))
        assert get(cached, key(1)) == value_of(1)


def test_threads_and_tiers_agree(tmp_path: Path) -> None:
    """Every value names its key and the turn it was put in: what is read is never older than what was acknowledged."""
    with cache(tmp_path, 2 * MIB) as cached:
        errors: list[BaseException] = []

        def work(worker: int) -> None:
            try:
                random = np.random.default_rng(worker)
                last: dict[int, int | None] = {}
                for turn in range(150):
                    number = int(random.integers(0, 25))
                    name = key((worker, number))
                    what = random.integers(0, 10)
                    if what < 5:
                        assert put(cached, name, value_of((worker, number, turn), 60_000)) is Item.OK
                        last[number] = turn
                    elif what < 9:
                        got = get(cached, name)
                        expected = last.get(number)
                        if got is not Item.MISS:
                            assert expected is not None, "it was removed, or never put"
                            assert got == value_of((worker, number, expected), 60_000)
                    else:
                        cached.remove(name, time.monotonic() + SOON)
                        last[number] = None
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert cached.counts.disk_hits
        until = time.monotonic() + SOON
        while (faults := cached.audit()) and time.monotonic() < until:
            continue  # something is being written down just now
        assert faults == []


class Tiers(RuleBasedStateMachine):
    """The dumb model: the last value of each key. It may be missing, never another."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(os.environ["GCACHE_TEST_FOLDER"]) / os.urandom(4).hex()
        self.folder.mkdir()
        self.context = cache(self.folder, MIB)
        self.cached = self.context.__enter__()
        self.model: dict[bytes, bytes] = {}
        self.turn = 0
        self.held: list[tuple[Entry, bytes]] = []

    @rule(number=st.integers(0, 4), size=st.sampled_from((100, 60_000, 300_000)))
    def put(self, number: int, size: int) -> None:
        self.turn += 1
        value = value_of((number, self.turn), size)
        item = put(self.cached, key(number), value)
        if item is Item.OK:
            self.model[key(number)] = value
        else:
            assert self.held, "there is always room when nothing is held"

    @rule(number=st.integers(0, 4))
    def get(self, number: int) -> None:
        got = get(self.cached, key(number))
        if isinstance(got, bytes):
            assert got == self.model.get(key(number))
        elif not self.held:
            assert got is Item.MISS
            if not self.cached.counts.dropped_objects:
                assert key(number) not in self.model, "lost without need"

    @rule(number=st.integers(0, 4))
    def remove(self, number: int) -> None:
        self.cached.remove(key(number), time.monotonic() + SOON)
        self.model.pop(key(number), None)

    @rule(number=st.integers(0, 4))
    def hold(self, number: int) -> None:
        entry = self.cached.acquire(key(number), time.monotonic() + SOON)
        if isinstance(entry, Entry):
            self.held.append((entry, self.model[key(number)]))

    @rule()
    def let_go(self) -> None:
        for entry, value in self.held:
            assert bytes(self.cached.arena.value(entry)) == value
        self.cached.memory.release([entry for entry, _ in self.held])
        self.held.clear()

    @rule()
    def write_down(self) -> None:
        self.cached.write_down(everything=True)

    @rule()
    def restart(self) -> None:
        self.held.clear()
        dropped = self.cached.counts.dropped_objects
        self.context.__exit__(None, None, None)
        self.context = cache(self.folder, MIB)
        self.cached = self.context.__enter__()
        self.cached.counts.dropped_objects = dropped

    @invariant()
    def agrees(self) -> None:
        with self.cached.memory.lock:
            assert self.cached.arena.audit() == []
            assert self.cached.memory.tiering.audit(self.cached.arena.entries()) == []

    def teardown(self) -> None:
        self.context.__exit__(None, None, None)


def test_tiers_against_a_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    monkeypatch.setenv("GCACHE_TEST_FOLDER", str(tmp_path))
    run_state_machine_as_test(
        Tiers,
        settings=settings(
            max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_over_the_network(tmp_path: Path) -> None:
    with (
        server(8 * MIB, disk=tmp_path / "disk", disk_bytes=128 * MIB) as running,
        client(running.port, same_host=False) as far,
        client(running.port) as near,
    ):
        names = [key(number) for number in range(30)]
        values = [value_of(number, MIB) for number in range(30)]
        for name, value in zip(names, values, strict=True):
            assert far.put(name, value) is Outcome.OK
        for sdk in (far, near, far):
            into = [bytearray(MIB) for _ in names]
            outcomes = sdk.batch_get_into(names, into)
            assert all(
                (outcome is Outcome.OK and got == value) or outcome is Outcome.MISS
                for outcome, got, value in zip(outcomes, into, values, strict=True)
            )
            assert outcomes.count(Outcome.OK) >= 30 - running.cache.counts.dropped_objects
        assert isinstance(running, Server)
        assert far.audit() == []
