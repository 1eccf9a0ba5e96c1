"""The store worker answers everything once, in bounded time, whatever the store does; wrong bytes are a miss."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from cygnet.base.errors import InvariantError
from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import BlockId, BlockKey
from cygnet.kv.runtime import store_pieces, store_worker
from cygnet.kv.runtime.host_pool import HostPool
from cygnet.kv.runtime.store_calls import MOST_LOST
from cygnet.kv.runtime.store_worker import StoreWorker
from cygnet.kv.store import Group, Namespace, ObjectKey, Outcome, object_key
from cygnet.kv.transfers import (
    Cancel,
    ClearStore,
    Fetch,
    Fetched,
    Found,
    Lookup,
    Put,
    StoreCommand,
    Stored,
    StoreResult,
)
from support.faulty_store import FaultyStore, Hold
from support.store_folder import small_store

GEOMETRY = KVGeometry(GroupGeometry(2, 3, 24, 16, 2), GroupGeometry(3, 5, 8, 16, 2, 7))
MINE, OTHERS = Namespace(b"m" * 16), Namespace(b"o" * 16)
BLOCKS = 40
IMPATIENT = 0.02


def key(index: int, group: Group = Group.FULL, namespace: Namespace = MINE) -> ObjectKey:
    return object_key(namespace, group, BlockKey(blake2b(bytes([index]), digest_size=16).digest()))


def blocks(*indices: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, indices))


class Subject:
    """A worker, its store and pool, and a clock that stands."""

    def __init__(self) -> None:
        self.store = FaultyStore()
        self.pool = HostPool(GEOMETRY, BLOCKS, BLOCKS, 4, torch.bfloat16, poison=True)
        self.now = 0
        self._told = threading.Semaphore(0)
        self.worker = StoreWorker(
            self.store,
            self.pool,
            MINE,
            clock_ns=lambda: self.now,
            on_result=self._told.release,
            timeout_s=30.0,
            grace_s=30.0,
        )

    def be_patient(self, seconds: float = 60.0) -> None:
        """Give calls so long from now on."""
        for calls in (self.worker._lookup_calls, self.worker._fetch_calls, self.worker._write_calls):
            calls._patience_s = seconds

    def submit(self, *commands: StoreCommand) -> None:
        self.worker.submit(commands)

    def results(self, count: int) -> list[StoreResult]:
        """The next `count` results; each has been announced."""
        for _ in range(count):
            assert self._told.acquire(timeout=60)
        results = self.worker.take_results()
        assert len(results) == count
        assert self.worker.audit() == []
        return results

    def ask(self, command: StoreCommand) -> StoreResult:
        self.submit(command)
        return self.results(1)[0]

    def fill(self, group: Group, *indices: int) -> list[bytes]:
        """Random KV in these blocks; the payloads."""
        payloads = []
        size = (GEOMETRY.full if group is Group.FULL else GEOMETRY.swa).block_bytes(4)
        for index in indices:
            self.pool.object(group, index)[:size] = blake2b(bytes([index, group])).digest() * (size // 64)
            payloads.append(bytes(self.pool.object(group, index)[:size]))
        return payloads

    def put(self, *indices: int, group: Group = Group.FULL) -> list[bytes]:
        """Fill blocks and store each under its own number; then the blocks hold NaN."""
        payloads = self.fill(group, *indices)
        keys = tuple(key(index, group) for index in indices)
        stored = self.ask(Put(-1, keys, (group,) * len(keys), blocks(*indices)))
        assert stored == Stored(-1, (Outcome.OK,) * len(keys))
        self.pool.poison_blocks(*((indices, ()) if group is Group.FULL else ((), indices)))
        return payloads

    def fetch(self, ticket: int, *indices: int, deadline_ns: int | None = None) -> Fetch:
        """Of full objects, each into the block of its number."""
        return Fetch(
            ticket, tuple(map(key, indices)), (Group.FULL,) * len(indices), blocks(*indices), deadline_ns=deadline_ns
        )

    def untouched(self, *indices: int) -> bool:
        """Whether these blocks hold NaN and nothing else."""
        return bool(self.pool._elements[Group.FULL][list(indices)].isnan().all())


@pytest.fixture
def subject() -> Iterator[Subject]:
    subject = Subject()
    yield subject
    subject.worker.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two objects at a time."""
    monkeypatch.setattr(store_pieces, "PIECE_OBJECTS", 2)
    monkeypatch.setattr(store_worker, "LOOKUP_KEYS", 2)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.usefixtures("small_pieces")
def test_what_is_put_comes_back(subject: Subject, count: int) -> None:
    """Of both groups, bit for bit, into other blocks; and no block beside them is touched."""
    for group in Group:
        payloads = subject.put(*range(count), group=group)
        targets = blocks(*range(30, 30 - count, -1))
        fetch = Fetch(count, tuple(key(i, group) for i in range(count)), (group,) * count, targets)
        assert subject.ask(fetch) == Fetched(count, (Outcome.OK,) * count)
        bodies = [bytes(subject.pool.object(group, block)) for block in targets]
        assert [body[: len(payload)] for body, payload in zip(bodies, payloads, strict=True)] == payloads
        assert all(subject.pool.verify(key(i, group), group, block) for i, block in enumerate(targets))
    assert subject.untouched(*(b for b in range(BLOCKS) if b not in targets))
    traffic = subject.worker.traffic()
    assert traffic.bytes_read == traffic.bytes_written == count * sum(subject.pool.object_bytes.values())
    assert traffic.fetched == traffic.stored == {Outcome.OK: 2 * count}
    assert subject.store.audit() == []


def test_through_the_disk_store(tmp_path: Path) -> None:
    """What one process has put, another one finds, bit for bit."""
    contents = []
    for _ in range(2):
        store = small_store(tmp_path, 4 << 20)
        pool = HostPool(GEOMETRY, BLOCKS, BLOCKS, 4, torch.bfloat16)
        told = threading.Semaphore(0)
        worker = StoreWorker(store, pool, MINE, on_result=told.release)
        keys = tuple(key(index, group) for group in Group for index in range(5))
        groups = tuple(group for group in Group for _ in range(5))
        if not contents:
            for group in Group:
                for tensor in (tensor for index in range(2) for tensor in pool.layer(group, index)):
                    tensor.normal_()
            worker.submit([Put(1, keys, groups, blocks(*range(5), *range(5)))])
            assert told.acquire(timeout=60)
            assert worker.take_results() == [Stored(1, (Outcome.OK,) * 10)]
            first = 0
        else:
            worker.submit([Fetch(2, (*keys, key(9)), (*groups, Group.FULL), blocks(*range(7, 12), *range(7, 12), 1))])
            assert told.acquire(timeout=60)
            assert worker.take_results() == [Fetched(2, (*(Outcome.OK,) * 10, Outcome.MISS))]
            first = 7
        contents.append([bytes(pool.object(group, first + index)) for group in Group for index in range(5)])
        worker.close()
        store.close()
    assert contents[0] == contents[1]
    assert len(set(contents[0])) == 10


def test_pieces_are_bounded_in_bytes_too(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_pieces, "PIECE_BYTES", 3 * subject.pool.object_bytes[Group.FULL])
    subject.put(*range(7))
    assert subject.ask(subject.fetch(1, *range(7))) == Fetched(1, (Outcome.OK,) * 7)
    assert subject.store.calls == ["put"] * 3 + ["get"] * 3


def lookup(ticket: int, first: int, num_full: int, swa_first: int, reach: int) -> Lookup:
    return Lookup(
        ticket,
        first,
        tuple(key(i) for i in range(first, first + num_full)),
        swa_first,
        tuple(key(i, Group.SWA) for i in range(swa_first, first + num_full)),
        reach,
    )


@pytest.mark.usefixtures("small_pieces")
def test_lookup(subject: Subject) -> None:
    subject.put(3, 4, 5, 6, 7, 9)
    subject.put(2, 5, 6, group=Group.SWA)
    assert subject.ask(lookup(1, 3, 8, 1, 4)) == Found(1, 5, 4, (False, True, True, False)), "full ends before 8"
    assert subject.ask(lookup(2, 3, 3, 1, 9)) == Found(2, 3, 1, (False, True, False, False, True))
    assert subject.ask(lookup(3, 8, 2, 5, 2)) == Found(3, 0, 6, (True, False)), "nothing of full, what is before it"
    assert subject.ask(lookup(4, 3, 4, 7, 0)) == Found(4, 4, 7, ()), "a model without SWA layers"
    assert subject.worker.traffic().lookups == 4


def test_misses_are_told_apart_from_hits(subject: Subject) -> None:
    subject.put(1, 3)
    assert subject.ask(subject.fetch(1, 1, 2, 3)) == Fetched(1, (Outcome.OK, Outcome.MISS, Outcome.OK))
    assert subject.untouched(2)


@pytest.mark.parametrize("at", [0, 500, -1], ids=["payload", "later", "checksum"])
def test_wrong_bytes_are_torn_and_removed(subject: Subject, at: int) -> None:
    subject.put(1, 2, 3)
    subject.store.corrupt(key(2), at)
    assert subject.ask(subject.fetch(1, 1, 2, 3)) == Fetched(1, (Outcome.OK, Outcome.TORN, Outcome.OK))
    assert subject.untouched(2)
    assert subject.store.batch_exists([key(1), key(2), key(3)]) == [True, False, True]
    assert subject.worker.traffic().fetched == {Outcome.OK: 2, Outcome.TORN: 1}


def test_another_objects_bytes_are_torn(subject: Subject) -> None:
    """Right in themselves, and under the wrong name."""
    subject.put(1, 2)
    subject.store._objects[key(1)] = subject.store._objects[key(2)]
    assert subject.ask(subject.fetch(1, 1)) == Fetched(1, (Outcome.TORN,))


def test_a_store_that_claims_to_have_read(subject: Subject) -> None:
    """`OK` without a byte written is no object, even where another one lay before."""
    subject.put(1)
    assert subject.ask(subject.fetch(1, 1)) == Fetched(1, (Outcome.OK,))
    subject.store.answers["get"] = [Outcome.OK]
    assert subject.ask(subject.fetch(2, 2)) == Fetched(2, (Outcome.TORN,))


NONSENSE = [None, [], [True] * 3, [Outcome.OK] * 2, "ok", 7, (Outcome.OK,) * 3]


@pytest.mark.parametrize("answer", NONSENSE, ids=repr)
def test_nonsense_is_a_failure(subject: Subject, answer: object) -> None:
    subject.store.answers = {"get": answer, "put": answer, "clear": answer, "remove": answer}
    subject.store.answers["exists"] = None if answer == [True] * 3 else answer
    assert subject.ask(subject.fetch(1, 1, 2, 3)) == Fetched(1, (Outcome.FAILED,) * 3)
    put = Put(2, (key(1), key(2), key(3)), (Group.FULL,) * 3, blocks(1, 2, 3))
    assert subject.ask(put) == Stored(2, (Outcome.FAILED,) * 3)
    subject.submit(ClearStore())
    assert subject.ask(lookup(3, 1, 3, 0, 2)) == Found(3, 0, 0, (False,))


def test_exceptions_are_failures_and_said_once(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    subject.put(1, 2)

    def fail(name: str) -> None:
        raise OSError("the medium is gone")

    subject.store.before = fail
    with caplog.at_level(logging.WARNING):
        assert subject.ask(subject.fetch(1, 1, 2)) == Fetched(1, (Outcome.FAILED,) * 2)
        assert subject.ask(lookup(2, 1, 2, 1, 2)) == Found(2, 0, 1, ())
        subject.submit(ClearStore())
        assert subject.ask(Put(3, (key(1),), (Group.FULL,), blocks(1))) == Stored(3, (Outcome.FAILED,))
    assert [record.message for record in caplog.records] == [
        "the store can't be read, so its KV is computed again: OSError: the medium is gone"
    ]
    subject.store.before = lambda name: None
    assert subject.ask(subject.fetch(4, 1, 2)) == Fetched(4, (Outcome.OK,) * 2), "and goes on when it works again"


@pytest.mark.usefixtures("small_pieces")
def test_a_fetch_that_hangs_is_a_failure_and_touches_nothing(subject: Subject) -> None:
    """The call comes back later and writes what it read; by then the blocks are somebody else's."""
    subject.put(1, 2, 3)
    hold = Hold("get")
    subject.store.before = hold
    subject.be_patient(IMPATIENT)
    assert subject.ask(subject.fetch(1, 1, 2, 3)) == Fetched(1, (Outcome.FAILED,) * 3)
    assert subject.worker.traffic().num_lost == 1
    hold.release()
    (lost,) = subject.worker._fetch_calls._lost
    assert lost.returned.wait(60)
    assert subject.worker.traffic().num_lost == 0
    subject.be_patient()
    assert subject.store.stats().gets == {Outcome.OK: 2}, "the call was done after all"
    assert subject.untouched(1, 2, 3)
    assert subject.ask(subject.fetch(2, 1, 2, 3)) == Fetched(2, (Outcome.OK,) * 3)


def test_a_call_left_behind_does_not_write_into_later_ones(subject: Subject) -> None:
    """It reads its object just when the next fetch has read another one, and not looked at it yet."""
    subject.put(1, 2)
    hold = Hold("get")
    subject.store.before = hold
    subject.be_patient(IMPATIENT)
    assert subject.ask(subject.fetch(1, 1)) == Fetched(1, (Outcome.FAILED,))
    subject.be_patient()
    (lost,) = subject.worker._fetch_calls._lost

    def let_it_read(name: str) -> None:
        subject.store.after = lambda name: None
        hold.release()
        assert lost.returned.wait(60)

    subject.store.before, subject.store.after = (lambda name: None), let_it_read
    assert subject.ask(subject.fetch(2, 2)) == Fetched(2, (Outcome.OK,))
    assert subject.worker.traffic().num_lost == 0


def test_lookups_and_puts_that_hang(subject: Subject) -> None:
    subject.put(1)
    for name, command, answer in (
        ("exists", lookup(1, 1, 1, 0, 1), Found(1, 0, 0, (False,))),
        ("put", Put(2, (key(2),), (Group.FULL,), blocks(2)), Stored(2, (Outcome.FAILED,))),
    ):
        hold = Hold(name)
        subject.store.before = hold
        subject.be_patient(IMPATIENT)
        assert subject.ask(command) == answer
        subject.be_patient()
        hold.release()


def test_few_threads_are_lost_to_a_store_that_hangs_for_good(subject: Subject) -> None:
    hold = Hold("get")
    subject.store.before = hold
    subject.be_patient(IMPATIENT)
    for ticket in range(6):
        assert subject.ask(subject.fetch(ticket, 1)) == Fetched(ticket, (Outcome.FAILED,))
    assert subject.store.calls == ["get"] * MOST_LOST
    assert subject.worker.traffic().num_lost == MOST_LOST
    hold.release()


@pytest.mark.usefixtures("small_pieces")
def test_cancel_acts_between_pieces(subject: Subject) -> None:
    subject.put(*range(6))
    hold = Hold("get")
    subject.store.before = hold
    subject.submit(subject.fetch(1, *range(6)), subject.fetch(2, 0), subject.fetch(3, 1))
    hold.wait()
    subject.submit(Cancel(1), Cancel(3), Cancel(99))
    hold.release()
    assert subject.results(3) == [
        Fetched(1, (Outcome.OK,) * 2 + (Outcome.TIMED_OUT,) * 4),
        Fetched(2, (Outcome.OK,)),
        Fetched(3, (Outcome.TIMED_OUT,)),
    ]


@pytest.mark.usefixtures("small_pieces")
def test_a_cancelled_lookup_is_answered(subject: Subject) -> None:
    subject.put(*range(6))
    hold = Hold("exists")
    subject.store.before = hold
    subject.submit(lookup(1, 0, 6, 0, 2))
    hold.wait()
    subject.submit(Cancel(1))
    hold.release()
    assert subject.results(1) == [Found(1, 2, 0, (False, False))], "what was known by then"
    assert subject.store.calls == ["put"] * 3 + ["exists"]


@pytest.mark.usefixtures("small_pieces")
def test_deadline(subject: Subject) -> None:
    """What has not begun by then is not begun."""
    subject.put(*range(6))

    def time_passes(name: str) -> None:
        subject.now += 10

    subject.store.before = time_passes
    assert subject.ask(subject.fetch(1, *range(6), deadline_ns=15)) == Fetched(
        1, (Outcome.OK,) * 4 + (Outcome.TIMED_OUT,) * 2
    )
    calls = len(subject.store.calls)
    assert subject.ask(subject.fetch(2, 1, deadline_ns=15)) == Fetched(2, (Outcome.TIMED_OUT,))
    assert len(subject.store.calls) == calls


def test_a_fetch_does_not_hold_up_lookups_or_puts(subject: Subject) -> None:
    subject.put(1)
    hold = Hold("get")
    subject.store.before = hold
    subject.submit(subject.fetch(1, 1))
    hold.wait()
    assert subject.ask(lookup(2, 1, 1, 1, 1)) == Found(2, 1, 1, (False,))
    subject.fill(Group.FULL, 5)
    assert subject.ask(Put(3, (key(5),), (Group.FULL,), blocks(5))) == Stored(3, (Outcome.OK,))
    hold.release()
    assert subject.results(1) == [Fetched(1, (Outcome.OK,))]


def test_a_clear_comes_after_earlier_puts(subject: Subject) -> None:
    subject.put(1)
    theirs = key(1, namespace=OTHERS)
    subject.store.batch_put([theirs], [bytes(100)])
    subject.fill(Group.FULL, 2)
    subject.submit(
        Put(1, (key(2),), (Group.FULL,), blocks(2)),
        ClearStore(),
        Put(2, (key(2),), (Group.FULL,), blocks(2)),
    )
    assert subject.results(2) == [Stored(1, (Outcome.OK,)), Stored(2, (Outcome.OK,))]
    assert subject.store.calls[-3:] == ["put", "clear", "put"]
    assert subject.store.batch_exists([key(1), key(2), theirs]) == [False, True, True]


def tickets(results: Sequence[StoreResult]) -> list[int]:
    return sorted(result.ticket for result in results)


@pytest.mark.usefixtures("small_pieces")
def test_close_under_load_answers_everything() -> None:
    """With calls that hang in every line."""
    subject = Subject()
    subject.put(*range(6))
    hold = Hold("get")

    def hang(name: str) -> None:
        for one in ("get", "put", "exists"):
            if name == one:
                hold("get")

    subject.store.before = hang
    for ticket in range(0, 60, 3):
        subject.submit(
            subject.fetch(ticket, *range(6)),
            lookup(ticket + 1, 0, 6, 0, 3),
            Put(ticket + 2, (key(1), key(2), key(3)), (Group.FULL,) * 3, blocks(1, 2, 3)),
        )
    for _ in range(3):
        hold.wait()
    started = time.monotonic()
    subject.worker.close(0.2)
    assert time.monotonic() - started < 5
    results = subject.worker.take_results()
    assert tickets(results) == list(range(60))
    assert not [r for r in results if isinstance(r, Fetched | Stored) and Outcome.OK in r.outcomes]
    assert subject.worker.audit() == []
    subject.submit(subject.fetch(100, 1), Put(101, (key(1),), (Group.FULL,), blocks(1)), lookup(102, 0, 1, 0, 1))
    assert tickets(subject.worker.take_results()) == [100, 101, 102], "later ones too"
    hold.release()


def test_close_writes_what_was_put() -> None:
    subject = Subject()
    hold = Hold("put")
    subject.store.before = hold
    subject.fill(Group.FULL, *range(8))
    for index in range(8):
        subject.submit(Put(index, (key(index),), (Group.FULL,), blocks(index)))
    hold.wait()
    closing = threading.Thread(target=subject.worker.close)
    closing.start()
    hold.release()
    closing.join(60)
    assert subject.results(8) == [Stored(index, (Outcome.OK,)) for index in range(8)]
    assert subject.store.batch_exists([key(index) for index in range(8)]) == [True] * 8
    subject.worker.close()


def test_a_line_is_bounded(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject.worker._fetches, "_most", 2)
    subject.put(1)
    hold = Hold("get")
    subject.store.before = hold
    subject.submit(subject.fetch(0, 1))
    hold.wait()
    subject.submit(*(subject.fetch(ticket, 1) for ticket in (1, 2, 3)))
    assert subject.results(1) == [Fetched(3, (Outcome.FAILED,))]
    hold.release()
    assert subject.results(3) == [Fetched(ticket, (Outcome.OK,)) for ticket in range(3)]


def test_a_bug_is_answered_and_raised(subject: Subject) -> None:
    """A block that is not there is no fault of the store's."""
    subject.put(1)
    subject.submit(Fetch(1, (key(1),), (Group.FULL,), blocks(BLOCKS)))
    assert subject._told.acquire(timeout=60)
    with pytest.raises(InvariantError, match=f"host block {BLOCKS}"):
        subject.worker.take_results()
