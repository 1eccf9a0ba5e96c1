"""What every `Store` must do. Each `check_*` takes a maker of stores; the disk store and the fake run all of them.

@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_contract(check):
    check(make)
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Protocol

import numpy as np
import pytest

from cygnet.base.ids import BlockKey
from cygnet.kv.store import Group, Namespace, ObjectKey, Outcome, Store, object_key

MIB = 1 << 20
NAMESPACES = (Namespace(b"A" * 16), Namespace(b"B" * 16))


class MakeStore(Protocol):
    """Gives an empty store of about `capacity` bytes that holds objects of up to 1.5 MiB, closed at the end."""

    def __call__(self, capacity: int = 64 * MIB) -> AbstractContextManager[Store]: ...


def key(name: object, *, namespace: int = 0, group: Group = Group.FULL) -> ObjectKey:
    """The key of a made-up block."""
    block = BlockKey(blake2b(repr(name).encode(), digest_size=16).digest())
    return object_key(NAMESPACES[namespace], group, block)


def payload(of: ObjectKey, num_bytes: int = 5000) -> np.ndarray:
    """The bytes of the object called `of`: a function of its name, as in life."""
    seed = int.from_bytes(blake2b(of, digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def put(store: Store, *keys: ObjectKey, num_bytes: int = 5000) -> list[Outcome]:
    """Put these objects, as one batch."""
    return store.batch_put(keys, [payload(k, num_bytes) for k in keys])


def get(store: Store, *keys: ObjectKey, num_bytes: int = 5000) -> list[Outcome]:
    """Get these objects, as one batch; whatever is `OK` must be right."""
    buffers = [np.full(num_bytes, 0xAA, np.uint8) for _ in keys]
    outcomes = store.batch_get_into(keys, buffers)
    assert len(outcomes) == len(keys)
    for k, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
        if outcome is Outcome.OK:
            assert np.array_equal(buffer, payload(k, num_bytes)), f"wrong bytes for {k.hex()}"
    return outcomes


def check_what_is_put_is_got(make: MakeStore) -> None:
    """Objects of any length, in one batch and one by one, from aligned and unaligned memory."""
    with make() as store:
        lengths = [1, 2, 511, 512, 513, 4095, 4096, 4097, 49_152, 70_000, 245_760, MIB + 1, 3 * MIB // 2]
        keys = [key(length) for length in lengths]
        bodies = [payload(k, n) for k, n in zip(keys, lengths, strict=True)]
        assert store.batch_put(keys, bodies) == [Outcome.OK] * len(keys)
        for shift in (0, 1, 64):
            memory = [np.zeros(n + 4096 + 64, np.uint8) for n in lengths]
            buffers = []
            for array, n in zip(memory, lengths, strict=True):
                start = -array.ctypes.data % 4096 + shift
                buffers.append(array[start : start + n])
            assert store.batch_get_into(keys, buffers) == [Outcome.OK] * len(keys)
            for array, buffer, body in zip(memory, buffers, bodies, strict=True):
                assert np.array_equal(buffer, body)
                assert int(array.astype(np.int64).sum()) == int(body.astype(np.int64).sum()), "wrote beside the buffer"
        for k, n in zip(keys, lengths, strict=True):
            assert get(store, k, num_bytes=n) == [Outcome.OK]
        assert store.audit() == []


def check_any_contiguous_memory(make: MakeStore) -> None:
    """Arrays of any shape and of plain types, bytes, bytearrays, memoryviews."""
    with make() as store:
        array = np.arange(3000, dtype=np.float32).reshape(30, 100)
        keys = [key("array"), key("bytes")]
        assert store.batch_put(keys, [array, b"some bytes"]) == [Outcome.OK, Outcome.OK]
        into, plain = np.zeros((100, 30), np.int32), bytearray(10)
        assert store.batch_get_into(keys, [into, memoryview(plain)]) == [Outcome.OK, Outcome.OK]
        assert into.tobytes() == array.tobytes()
        assert plain == b"some bytes"


def check_misses(make: MakeStore) -> None:
    """What was never put is not there, whatever is put beside it; group and namespace are part of the name."""
    with make() as store:
        names = [key(1), key(2), key(1, namespace=1), key(1, group=Group.SWA)]
        assert store.batch_exists(names) == [False] * 4
        assert put(store, names[0]) == [Outcome.OK]
        assert store.batch_exists(names) == [True, False, False, False]
        assert get(store, *names) == [Outcome.OK, Outcome.MISS, Outcome.MISS, Outcome.MISS]
        assert store.batch_exists([]) == []
        assert store.batch_get_into([], []) == store.batch_put([], []) == []
        store.touch(names)


def check_twice(make: MakeStore) -> None:
    """An object that is there is not stored again; the same key twice in one batch is one object."""
    with make() as store:
        assert put(store, key(1), key(2), key(1)) == [Outcome.OK] * 3
        before = store.stats()
        assert before.num_objects == 2
        assert put(store, key(2), key(1)) == [Outcome.OK] * 2
        after = store.stats()
        assert after.bytes_used == before.bytes_used
        assert after.bytes_written == before.bytes_written == 10_000
        assert after.puts_present - before.puts_present == 2
        assert get(store, key(1), key(2), key(1)) == [Outcome.OK] * 3
        assert store.stats().bytes_read == 15_000


def check_another_length(make: MakeStore) -> None:
    """An object of another length than the buffer is a miss; putting it anew mends that."""
    with make() as store:
        put(store, key(1), num_bytes=5000)
        assert get(store, key(1), num_bytes=4999) == [Outcome.MISS]
        assert get(store, key(1), num_bytes=5001) == [Outcome.MISS]
        assert put(store, key(1), num_bytes=6000) == [Outcome.OK]
        assert get(store, key(1), num_bytes=5000) == [Outcome.MISS]
        assert get(store, key(1), num_bytes=6000) == [Outcome.OK]
        assert store.stats().num_objects == 1
        assert store.audit() == []


def check_callers_mistakes(make: MakeStore) -> None:
    """They are errors, and nothing has been done."""
    with make() as store:
        good, body = key(1), bytes(10)
        for call in (
            lambda: store.batch_put([good, key(2)], [body]),
            lambda: store.batch_put([good, ObjectKey(b"short")], [body, body]),
            lambda: store.batch_put([good, key(2)], [body, b""]),
            lambda: store.batch_put([good, key(2)], [body, np.zeros(10, np.uint8)[::2]]),
            lambda: store.batch_get_into([good], []),
            lambda: store.batch_get_into([good], [body]),
            lambda: store.batch_exists([good, ObjectKey(b"short")]),
        ):
            with pytest.raises(ValueError):
                call()
        assert store.batch_exists([good]) == [False]
        assert store.stats().num_objects == 0


def check_remove_and_clear(make: MakeStore) -> None:
    """What is removed is gone and may come back; clearing one namespace leaves the other."""
    with make() as store:
        mine = [key(i) for i in range(20)]
        other = [key(i, namespace=1) for i in range(20)]
        put(store, *mine)
        put(store, *other)
        assert store.remove([mine[3], mine[4], key("never")]) == 2
        assert store.batch_exists(mine[2:6]) == [True, False, False, True]
        assert get(store, mine[3]) == [Outcome.MISS]
        assert put(store, mine[3]) == [Outcome.OK]
        assert get(store, mine[3]) == [Outcome.OK]
        assert store.clear(NAMESPACES[0]) == 19
        assert store.batch_exists(mine + other) == [False] * 20 + [True] * 20
        assert get(store, *other) == [Outcome.OK] * 20
        assert store.clear() == 20
        assert store.clear() == 0
        assert store.stats().num_objects == 0
        assert put(store, *mine) == [Outcome.OK] * 20
        assert get(store, *mine) == [Outcome.OK] * 20
        assert store.audit() == []


def check_capacity(make: MakeStore) -> None:
    """It never takes more than its capacity: old objects go, the newest are there, and it is never refused."""
    with make(16 * MIB) as store:
        capacity = store.stats().capacity_bytes
        keys = [key(i) for i in range(160)]
        for first in range(0, len(keys), 8):
            assert put(store, *keys[first : first + 8], num_bytes=MIB // 4) == [Outcome.OK] * 8
            assert store.stats().bytes_used <= capacity
            assert store.batch_exists(keys[first : first + 8]) == [True] * 8
        found = store.batch_exists(keys)
        assert not any(found[:60]), "the oldest ought to be gone"
        assert sum(found) * MIB // 4 >= capacity // 2, "half the capacity ought to be in use"
        assert get(store, *keys, num_bytes=MIB // 4) == [Outcome.OK if there else Outcome.MISS for there in found]
        assert store.stats().evicted_objects == len(keys) - sum(found)
        assert store.audit() == []


def check_what_is_used_stays(make: MakeStore) -> None:
    """Objects that are got or touched outlive those that aren't, however much is put."""
    with make(16 * MIB) as store:
        got, touched, again = ([key((what, i)) for i in range(4)] for what in ("got", "touched", "again"))
        kept = [*got, *touched, *again]
        put(store, *kept, num_bytes=MIB // 4)
        for round_ in range(30):
            assert put(store, *(key((round_, i)) for i in range(8)), num_bytes=MIB // 4) == [Outcome.OK] * 8
            assert get(store, *got, num_bytes=MIB // 4) == [Outcome.OK] * 4
            store.touch(touched)
            assert put(store, *again, num_bytes=MIB // 4) == [Outcome.OK] * 4
        assert store.batch_exists(kept) == [True] * len(kept)
        assert store.audit() == []


def check_too_large(make: MakeStore) -> None:
    """What can never fit is `FULL` and costs nothing; its neighbours in the batch are stored."""
    with make(16 * MIB) as store:
        put(store, key("before"))
        bodies = [payload(key(1)), bytes(20 * MIB), payload(key(3))]
        assert store.batch_put([key(1), key(2), key(3)], bodies) == [Outcome.OK, Outcome.FULL, Outcome.OK]
        assert store.batch_exists([key("before"), key(1), key(2), key(3)]) == [True, True, False, True]
        assert store.stats().evicted_objects == 0


def check_no_time(make: MakeStore) -> None:
    """With no time left nothing is begun."""
    with make() as store:
        put(store, key(1))
        buffer = np.zeros(5000, np.uint8)
        there, absent = store.batch_get_into([key(1), key(2)], [buffer, buffer], timeout_s=0)
        assert there is Outcome.TIMED_OUT
        assert absent in (Outcome.MISS, Outcome.TIMED_OUT), "a store elsewhere has no time to find out"
        assert store.batch_put([key(3)], [payload(key(3))], timeout_s=0) == [Outcome.TIMED_OUT]
        assert store.batch_exists([key(1), key(3)]) == [True, False]
        assert get(store, key(1)) == [Outcome.OK]


def check_threads(make: MakeStore) -> None:
    """Threads that put, get, touch and remove at once see right bytes or none."""
    with make(16 * MIB) as store:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                random = np.random.default_rng(seed)
                for _ in range(60):
                    keys = [key(int(i)) for i in random.integers(0, 60, 6)]
                    what = random.integers(0, 8)
                    if what < 3:
                        assert set(put(store, *keys, num_bytes=200_000)) <= {Outcome.OK}
                    elif what < 6:
                        assert set(get(store, *keys, num_bytes=200_000)) <= {Outcome.OK, Outcome.MISS}
                    elif what == 6:
                        store.touch(keys)
                        store.batch_exists(keys)
                    else:
                        store.remove(keys[:1])
                    assert store.stats().bytes_used <= store.stats().capacity_bytes
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert store.audit() == []


def check_counts(make: MakeStore) -> None:
    """Statistics add up."""
    with make() as store:
        put(store, key(1), key(2))
        get(store, key(1), key(3))
        stats = store.stats()
        assert stats.puts == {Outcome.OK: 2}
        assert stats.gets == {Outcome.OK: 1, Outcome.MISS: 1}
        assert (stats.num_objects, stats.bytes_read, stats.bytes_written) == (2, 5000, 10_000)
        assert 10_000 <= stats.bytes_used <= stats.capacity_bytes


def check_closed(make: MakeStore) -> None:
    """A closed store finds nothing, takes nothing and complains about nothing."""
    with make() as store:
        put(store, key(1))
        store.close()
        store.close()
        assert store.batch_exists([key(1)]) == [False]
        assert get(store, key(1)) == [Outcome.FAILED]
        assert put(store, key(2)) == [Outcome.FAILED]
        store.touch([key(1)])
        assert store.remove([key(1)]) == store.clear() == 0
        assert store.stats().num_objects == 0
        assert store.audit() == []


Check = Callable[[MakeStore], None]

CHECKS: tuple[Check, ...] = (
    check_what_is_put_is_got,
    check_any_contiguous_memory,
    check_misses,
    check_twice,
    check_another_length,
    check_callers_mistakes,
    check_remove_and_clear,
    check_capacity,
    check_what_is_used_stays,
    check_too_large,
    check_no_time,
    check_threads,
    check_counts,
    check_closed,
)
