"""Objects that are found, held and copied without asking their server; which takes the compiled core."""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cygnet.gcache.arena import Arena, Entry
from cygnet.gcache.limits import Limits
from cygnet.gcache.protocol import Op, Want, pack_request, pack_wants
from cygnet.gcache.record import PAGE, checksums
from cygnet.gcache.runtime import channel
from cygnet.gcache.runtime.attached import Attached, attach
from cygnet.gcache.runtime.client import GCacheClient
from cygnet.gcache.runtime.compiled import compiled_core
from cygnet.gcache.runtime.node import ClusterOptions
from cygnet.gcache.runtime.registry import LocalRegistry
from cygnet.gcache.runtime.server import Server
from cygnet.gcache.runtime.shared_index import NO_EPOCH, IndexHead, SharedIndex, attach_index
from cygnet.gcache.runtime.shared_memory import SharedMemory, open_shared_memory
from cygnet.gcache.runtime.views import StaleViewError, View
from cygnet.kv.store import Outcome
from support.gcache import MIB, answer, client, key, raw, server, server_process, wait_until

pytestmark = pytest.mark.skipif(compiled_core() is None, reason="the compiled core is not built")


def attached(sdk: GCacheClient) -> Attached:
    peer = next(iter(sdk.lens.peers.values()))
    deadline = time.monotonic() + 20
    while (found := peer.attached(deadline)) is None:  # it is not tried all the time
        assert time.monotonic() < deadline
    return found


def requests_of(running: Server) -> int:
    """Objects that the server itself was asked for, by whatever request."""
    return sum(running.cache.counts.gets.values())


def test_nothing_is_asked_for_what_is_in_memory() -> None:
    with server() as running, client(running.port) as sdk:
        values = {key(number): bytes([number]) * (number * 5000) for number in range(1, 60)}
        assert set(sdk.batch_put(list(values), list(values.values()))) == {Outcome.OK}
        into = [bytearray(len(value)) for value in values.values()]
        assert set(sdk.batch_get_into(list(values), into)) == {Outcome.OK}
        assert into == list(values.values())
        for name, value in values.items():
            with sdk.view(name) as view:  # type: ignore[union-attr]
                assert view.data == value
        assert requests_of(running) == 0
        gets = running.stats()["gets"]
        assert gets == {"ok": 2 * len(values)}
        assert running.stats()["bytes_got"] == sum(map(len, values.values())), "views move none"
        assert sdk.get_into(key(99), bytearray(5)) is Outcome.MISS
        assert sdk.get_into(key(1), bytearray(5)) is Outcome.MISS, "of another size"
        assert running.cache.audit() == []
    with server() as running, client(running.port) as sdk, client(running.port) as other:
        sdk.put(key(1), b"first")
        assert other.get(key(1)) == b"first"
        sdk.put(key(1), b"again")
        into_ = bytearray(5)
        assert other.get_into(key(1), into_) is Outcome.OK
        assert into_ == b"again", "as soon as it is acknowledged"
        sdk.remove([key(1)])
        assert other.get_into(key(1), into_) is Outcome.MISS


def test_what_is_held_stays_until_it_is_released_or_its_lease_is_over() -> None:
    for lease_s in (60.0, 0.05):
        with server(4 * MIB, limits=Limits(lease_s=lease_s)) as running, client(running.port) as sdk:
            sdk.put(key(0), b"a" * 400_000)
            view = sdk.view(key(0))
            assert isinstance(view, View)
            assert requests_of(running) == 0
            for number in range(1, 40):  # ten times what there is room for
                assert sdk.put(key(number), bytes([number]) * 400_000) is Outcome.OK
            if lease_s > 1:
                assert view.data == b"a" * 400_000
                assert view.is_valid()
                sdk.put(key(0), b"b" * 400_000)
                assert view.data == b"a" * 400_000
                assert view.is_valid(), "replaced, but in place"
                view.release()
                for number in range(40):
                    assert sdk.put(key(number), bytes([number]) * 400_000) is Outcome.OK
            else:
                deadline = time.monotonic() + 60
                while view.is_valid():
                    assert time.monotonic() < deadline, "kept for ever"
                    sdk.put(key(random.randrange(40)), bytes(400_000))
                with pytest.raises(StaleViewError), view:
                    pass
            assert running.cache.audit() == []


def test_no_more_is_held_than_may_be_and_the_rest_is_asked_for() -> None:
    with server(16 * MIB) as running, client(running.port) as sdk:
        for number in range(14):
            sdk.put(key(number), bytes(MIB - 4096))
        views = [view for number in range(14) if isinstance(view := sdk.view(key(number)), View)]
        assert 7 <= len(views) <= 8, "half of the memory"
        assert 0 < running.stats()["leases"] < len(views)  # type: ignore[operator]
        assert sdk.get_into(key(13), bytearray(MIB - 4096)) is Outcome.OK, "copies hold nothing"
        for view in views:
            view.release()
        small = [key(100 + number) for number in range(300)]
        sdk.batch_put(small, [b"v"] * 300)
        many = [sdk.view(name) for name in small]
        assert all(isinstance(view, View) and view.data == b"v" for view in many), "more than a block has holds"


def test_a_use_without_asking_counts_as_one() -> None:
    with server(8 * MIB) as running, client(running.port) as sdk:
        hot = [key(f"hot {number}") for number in range(4)]
        for name in hot:
            sdk.put(name, bytes(200_000))
        for number in range(200):
            sdk.put(key(number), bytes(200_000))
            for name in hot:
                sdk.get_into(name, bytearray(200_000))
        assert sdk.batch_exists(hot) == [True] * 4
        assert running.cache.audit() == []


def test_time_to_live() -> None:
    with server() as running, client(running.port) as sdk:
        sdk.put(key(1), b"short", ttl_ms=1)
        sdk.put(key(2), b"long!", ttl_ms=3_600_000)
        deadline = time.monotonic() + 20
        while sdk.get_into(key(1), bytearray(5)) is Outcome.OK:
            assert time.monotonic() < deadline
        assert sdk.get_into(key(2), bytearray(5)) is Outcome.OK
        assert requests_of(running) >= 1


def test_it_goes_on_with_a_server_that_was_killed_and_started_anew() -> None:
    with server_process() as process, client(process.port) as sdk:
        for number in range(20):
            sdk.put(key(number), b"%d" % number * 100)
        into = bytearray(100)
        assert sdk.get_into(key(1), into) is Outcome.OK
        first = attached(sdk)
        view = sdk.view(key(2))
        assert isinstance(view, View)
        process.signal(signal.SIGKILL)
        process.start()
        deadline = time.monotonic() + 60
        while sdk.get_into(key(1), into) is not Outcome.OK:
            assert time.monotonic() < deadline
        assert into == b"1" * 100
        assert attached(sdk) is not first
        view.release()
        assert sdk.put(key(1), b"x" * 100) is Outcome.OK
        assert sdk.get_into(key(1), into) is Outcome.OK
        assert into == b"x" * 100


def test_attaching_to_a_server_started_anew_lets_puts_through_too() -> None:
    """The attach may be the probe of the breaker; what is read without asking tells it nothing later."""
    with server_process() as process, client(process.port) as sdk:
        assert sdk.put(key(1), b"value") is Outcome.OK
        assert sdk.get_into(key(1), bytearray(5)) is Outcome.OK
        peer = next(iter(sdk.lens.peers.values()))
        first = attached(sdk)
        process.signal(signal.SIGKILL)
        assert sdk.get_into(key(1), bytearray(5)) is Outcome.FAILED
        assert peer.is_failing
        process.start()
        time.sleep(1.1)  # longer than the breaker's first pause, and than attaching waits to be tried again
        assert attached(sdk) is not first
        assert not peer.is_failing
        assert sdk.get_into(key(1), bytearray(5)) is Outcome.OK
        assert sdk.put(key(2), b"other") is Outcome.OK


def test_nobody_waits_for_one_who_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*arguments: object) -> Attached | None:
        begun.set()
        assert go_on.wait(60)
        return attach(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(channel, "attach", slowly)
    with server() as running, client(running.port) as sdk, ThreadPoolExecutor(1) as threads:
        sdk.put(key(1), b"value")
        peer = next(iter(sdk.lens.peers.values()))
        slow = threads.submit(sdk.get_into, key(1), bytearray(5))
        assert begun.wait(60)
        assert peer.attached(time.monotonic() + 60) is None
        assert sdk.get_into(key(1), bytearray(5)) is Outcome.OK, "by asking"
        peer.close()  # nor does closing, and what is attached afterwards is closed then
        go_on.set()
        slow.result()
        assert peer.attached(time.monotonic()) is None


def test_what_is_closed_holds_and_lets_go_of_nothing() -> None:
    """Its block may be another connection's by then."""
    with server() as running, client(running.port) as sdk, client(running.port) as other:
        sdk.put(key(1), b"value")
        index = running.service.index
        assert index is not None
        mine = attached(sdk)
        view = mine.view(key(1), 0)
        assert view is not None
        next(iter(sdk.lens.peers.values())).detach(mine)
        deadline = time.monotonic() + 60
        while index.table.held():
            assert time.monotonic() < deadline
        blocks = [index.take_block() for _ in range(4)]  # what was its own is among them
        theirs = other.view(key(1))
        assert isinstance(theirs, View)
        before = index.table.held()
        view.release()
        assert mine.view(key(1), 0) is None
        assert mine.copy_all([key(1)], [memoryview(bytearray(5))], 0) == bytes(1)
        assert index.table.held() == before
        for block in blocks:
            assert block is not None
            index.give_back(block)


def test_a_forked_child_leaves_its_parents_holds_alone() -> None:
    with server_process() as process, client(process.port) as sdk:
        sdk.put(key(1), b"value")
        mine = attached(sdk)
        view = mine.view(key(1), 0)
        assert view is not None
        child = os.fork()
        if child == 0:
            found = mine.view(key(1), 0) is None and mine.copy_all([key(1)], [memoryview(bytearray(5))], 0) == b"\0"
            view.release()
            os._exit(0 if found else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert mine._table.is_held(view._slot)
        view.release()
        assert not mine._table.is_held(view._slot)
        assert mine.copy_all([key(1)], [memoryview(bytearray(5))], 0) == b"\1"


def test_views_that_are_never_released_keep_others_from_none_for_longer_than_their_lease() -> None:
    with server(16 * MIB, limits=Limits(lease_s=0.5)) as running:
        index = running.service.index
        assert index is not None
        with client(running.port) as greedy, client(running.port) as sdk:
            for number in range(8):
                sdk.put(key(number), bytes(MIB - 4096))
            mine = attached(greedy)
            hoard = [view for number in range(8) if (view := mine.view(key(number), 0)) is not None]
            assert hoard
            deadline = time.monotonic() + 60
            while index.table.totals()[2]:
                assert time.monotonic() < deadline, "counted for ever"
                time.sleep(0.05)
            ours = attached(sdk)
            views = [view for number in range(4) if (view := ours.view(key(number), 0)) is not None]
            assert views
            for view in [*hoard, *views]:
                view.release()
            assert index.table.totals()[2] == 0


def test_a_client_holds_nothing_for_longer_than_its_lease_whatever_it_writes(tmp_path: Path) -> None:
    shared = open_shared_memory(tmp_path / "arena", MIB, 32 << 10)
    with small_index(shared) as index:
        arena = Arena(index.memory)
        entry = arena.begin(key(1), 5)
        assert entry is not None
        arena.value(entry)[:] = b"value"
        arena.commit(entry, checksums(key(1), b"value"))
        block = index.take_block()
        assert block is not None
        now_ns = time.monotonic_ns()
        lease_ns = int(Limits().lease_s * 1e9)
        with index.path.open("r+b") as mapped:
            # A block's page: how many holds there are, seven words, and a hold's slot and end.
            for until_ns, holds in (
                (now_ns + lease_ns, True),
                (now_ns + 100 * lease_ns, False),
                ((1 << 64) - 1, False),
            ):
                mapped.seek(PAGE + block * PAGE)
                mapped.write(Struct("<10Q").pack(1, 0, 0, 0, 0, 0, 0, 0, entry.slot + 1, until_ns))
                mapped.flush()
                assert index.table.is_held(entry.slot) == holds
                assert index.table.held() == [entry.slot] * holds
                assert (index.table.totals()[2] > 0) == holds
    shared.close()


def test_what_is_being_sent_stays_in_place_for_as_long_as_that_takes() -> None:
    value = os.urandom(12 * MIB)
    with server(limits=Limits(lease_s=0.05)) as running, client(running.port) as sdk, raw(running) as sock:
        index = running.service.index
        assert index is not None
        assert sdk.put(key(1), value) is Outcome.OK
        sock.sendall(pack_request(Op.GET, 7, pack_wants([Want(key(1), len(value))]), count=1))
        wait_until(lambda: index.table.held() != [], "the answer begins")
        for number in range(20, 60):
            sdk.put(key(number), bytes(MIB))
        time.sleep(0.1)  # longer than a lease
        assert len(index.table.held()) == 1
        assert index.table.totals()[2] == 0, "that is no view"
        assert answer(sock)[2] == value
        wait_until(lambda: index.table.held() == [], "the answer ends")
        assert running.cache.audit() == []


def test_an_index_without_an_empty_bucket_is_given_up(tmp_path: Path) -> None:
    """Another process may have written there; the server must not look for the end of a run for ever."""
    shared = open_shared_memory(tmp_path / "arena", MIB, 32 << 10)
    with small_index(shared) as index:
        index.answer_all()
        arena = Arena(index.memory)
        entry = arena.begin(key(1), 5)
        assert entry is not None
        arena.value(entry)[:] = b"value"
        arena.commit(entry, checksums(key(1), b"value"))
        mapped = index.path.open("r+b")
        buckets = 1 << (2 * arena.shape.num_slots).bit_length()
        mapped.seek(-8 * buckets, os.SEEK_END)
        mapped.write(b"\xee" * (8 * buckets))
        mapped.close()
        arena.kill(entry)
        again = arena.begin(key(2), 0)
        assert again is not None
        arena.commit(again, [])
        answered = IndexHead.unpack_from(index.path.read_bytes())[7]
        assert answered == NO_EPOCH
        index.answer_epoch(3)
        assert IndexHead.unpack_from(index.path.read_bytes())[7] == NO_EPOCH, "for good"
        assert arena.find(key(2)) is again, "found by asking"
    shared.close()


def test_a_frozen_server_is_asked_soon_and_so_found_out() -> None:
    with server_process() as process, client(process.port, timeout_s=0.3) as sdk:
        assert sdk.put(key(1), b"value", timeout_s=20) is Outcome.OK
        assert sdk.get_into(key(1), bytearray(5), timeout_s=20) is Outcome.OK
        attached(sdk)
        process.signal(signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while sdk.get_into(key(1), bytearray(5)) is Outcome.OK:
            assert time.monotonic() < deadline, "it may have been given up by its cluster long since"
        process.signal(signal.SIGCONT)
        while sdk.get_into(key(1), bytearray(5)) is not Outcome.OK:
            assert time.monotonic() < deadline + 60


def test_what_a_connection_held_ends_with_it() -> None:
    with server() as running:
        index = running.service.index
        assert index is not None
        with client(running.port) as sdk:
            sdk.put(key(1), bytes(100))
            view = sdk.view(key(1))
            assert isinstance(view, View)
            assert len(index.table.held()) == 1
            # ends with the client, though the view is never released
        deadline = time.monotonic() + 20
        while index.table.held():
            assert time.monotonic() < deadline
        view.release()
        assert index.table.totals()[2] == 0
        assert running.stats()["gets"] == {"ok": 1}, "what ended connections counted is kept"


def test_readers_and_writers_at_once_see_whole_values() -> None:
    """Small memory, so that what is read is given up and its place reused all the time."""
    with server(3 * MIB, limits=Limits(lease_s=0.2)) as running, client(running.port) as sdk:
        sizes = [1000, 50_000, 300_000]
        stop = threading.Event()

        def value(number: int, turn: int) -> bytes:
            return bytes([number, turn % 256]) * (sizes[number % 3] // 2)

        def write(seed: int) -> None:
            chance = random.Random(seed)
            with client(running.port, same_host=False) as own:
                for turn in range(250):
                    number = chance.randrange(30)
                    own.put(key(number), value(number, turn))
            stop.set()

        def read(seed: int) -> int:
            chance, hits = random.Random(seed), 0
            while not stop.is_set():
                number = chance.randrange(30)
                into = bytearray(sizes[number % 3])
                if chance.random() < 0.5:
                    if sdk.get_into(key(number), into) is not Outcome.OK:
                        continue
                    data = bytes(into)
                else:
                    view = sdk.view(key(number))
                    if not isinstance(view, View):
                        continue
                    data, valid = bytes(view.data), view.is_valid()
                    view.release()
                    if not valid:
                        continue
                hits += 1
                assert data[0] == number
                assert data == data[:2] * (len(data) // 2), "of two values"
            return hits

        with ThreadPoolExecutor(4) as threads:
            writers = [threads.submit(write, seed) for seed in range(2)]
            readers = [threads.submit(read, seed) for seed in range(2)]
            for writer in writers:
                writer.result()
            assert all(reader.result() > 0 for reader in readers)
        assert running.cache.audit() == []


@pytest.mark.parametrize("fenced", [False, True])
def test_a_fenced_server_shares_no_index(fenced: bool) -> None:
    """Who reads it asks nobody whether the server may still answer."""
    own = ClusterOptions(LocalRegistry(), "test", grace_s=30.0, ttl_s=2, fenced=fenced)
    with server(cluster=own) as running:
        assert (running.service.index is None) == fenced
        assert (running.service.info.index == "") == fenced


def test_an_index_that_does_not_fit_is_not_used() -> None:
    core = compiled_core()
    assert core is not None
    with server() as running, client(running.port) as sdk:
        sdk.put(key(1), b"value")
        index = running.service.index
        assert index is not None
        arena = running.cache.shared.memory.view
        good = index.path.read_bytes()
        for damaged in (
            b"",
            good[:100],
            good[:PAGE],
            bytes(8) + good[8:],
            good[:24] + b"\xff" * 8 + good[32:],
            good[:-PAGE],
        ):
            index.path.unlink()
            index.path.write_bytes(damaged)
            assert attach_index(index.path, core, arena) is None
        assert sdk.get_into(key(1), bytearray(5)) is Outcome.OK, "by asking"


@contextmanager
def small_index(memory: SharedMemory) -> Iterator[SharedIndex]:
    core = compiled_core()
    assert core is not None
    index = SharedIndex(core, memory, Limits(max_connections=4))
    try:
        yield index
    finally:
        index.close()


class IndexMachine(RuleBasedStateMachine):
    """The table against a dictionary, in an arena whose few slots are all used, so that runs of buckets are long."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory(prefix="cygnet-test-", dir="/dev/shm")
        self.shared = open_shared_memory(Path(self.folder.name), MIB, 32 << 10)
        self.context = small_index(self.shared)
        self.index = self.context.__enter__()
        self.arena = Arena(self.index.memory)
        self.block = self.index.take_block()
        self.index.answer_all()
        self.entries: dict[bytes, Entry] = {}
        self.ours, self.theirs = socket.socketpair()  # the server's end is open, so it lives

    @rule(number=st.integers(0, 60), size=st.integers(0, 3000))
    def put(self, number: int, size: int) -> None:
        name = key(number)
        entry = self.arena.begin(name, size)
        if entry is None:
            return
        value = bytes([number]) * size
        if size:
            self.arena.value(entry)[:] = value
        self.arena.commit(entry, checksums(name, value))
        self.entries[name] = entry

    @rule(number=st.integers(0, 60))
    def remove(self, number: int) -> None:
        entry = self.entries.pop(key(number), None)
        if entry is not None:
            self.arena.kill(entry)

    @invariant()
    def the_same_is_found(self) -> None:
        names = [key(number) for number in range(61)]
        into = [bytearray(self.entries[name].value_bytes if name in self.entries else 1) for name in names]
        assert self.block is not None
        found = self.index.table.copy_all(self.ours.fileno(), self.block, 0, names, list(map(memoryview, into)))
        assert [bool(one) for one in found] == [name in self.entries for name in names]  # type: ignore[union-attr]
        for number, (name, value) in enumerate(zip(names, into, strict=True)):
            assert name not in self.entries or value == bytes([number]) * len(value)
        assert sorted(self.index.table.shown()) == sorted(entry.slot for entry in self.entries.values())
        assert self.arena.audit() == []

    def teardown(self) -> None:
        self.ours.close()
        self.theirs.close()
        self.context.__exit__(None, None, None)
        self.shared.close()
        self.folder.cleanup()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
