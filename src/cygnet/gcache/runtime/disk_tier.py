"""Records on a disk: the embedded disk store, under digests of the full keys.

The disk store's keys have a fixed length; a record carries its full key, and whoever reads it compares. The store is
used by this process alone, so it never needs to look at what others have written.
"""

import queue
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from cygnet.base.ids import BlockKey
from cygnet.gcache.record import split_key
from cygnet.kv.hashing import KEY_BYTES
from cygnet.kv.runtime.disk_store import DiskOptions, DiskStore
from cygnet.kv.runtime.disk_store.disk import copy
from cygnet.kv.runtime.memory import pool_memory
from cygnet.kv.store import NAMESPACE_BYTES, Group, Namespace, ObjectKey, Outcome, StoreStats, object_key

STAGE_BYTES = 4 << 20


def disk_namespace(namespace: bytes) -> Namespace:
    """Under what a namespace's objects lie on the disk."""
    return Namespace(blake2b(namespace, digest_size=NAMESPACE_BYTES, person=b"cygnet.gcache").digest())


def disk_key(key: bytes) -> ObjectKey:
    """Under what an object's record lies on the disk."""
    block = BlockKey(blake2b(key, digest_size=KEY_BYTES, person=b"cygnet.gcache").digest())
    return object_key(disk_namespace(split_key(key)[0]), Group.FULL, block)


class DiskTier:
    """Whole records in, whole records out. Thread-safe; the bytes are checked by the store."""

    def __init__(self, path: Path, capacity_bytes: int, *, io_threads: int = 4) -> None:
        options = DiskOptions(io_threads=io_threads, refresh_interval_s=float("inf"))
        self._store = DiskStore(path, capacity_bytes, options)
        self._stages: queue.LifoQueue[memoryview] = queue.LifoQueue(io_threads)

    def record_bytes(self, key: bytes) -> int | None:
        """Size of the object's record, `None` when it is not there. From memory."""
        return self._store.lengths([disk_key(key)])[0]

    def read(self, key: bytes, record: memoryview, timeout_s: float) -> Outcome:
        """Fill `record`, which has the record's size.

        Small ones are read into huge pages and copied: shared memory has none, and a virtual disk may take each page of
        4 KiB as a transfer of its own.
        """
        if len(record) > STAGE_BYTES:
            return self._store.batch_get_into([disk_key(key)], [record], timeout_s=timeout_s)[0]
        try:
            stage = self._stages.get_nowait()
        except queue.Empty:
            stage = pool_memory(STAGE_BYTES)
        try:
            part = stage[: len(record)]
            outcome = self._store.batch_get_into([disk_key(key)], [part], timeout_s=timeout_s)[0]
            if outcome is Outcome.OK:
                copy(record, part)
            return outcome
        finally:
            with suppress(queue.Full):  # more readers at once than usual: theirs is let go
                self._stages.put_nowait(stage)

    def write(self, keys: Sequence[bytes], records: Sequence[memoryview], timeout_s: float) -> list[Outcome]:
        """Store records, side by side. One that is there is not written again."""
        return self._store.batch_put([disk_key(key) for key in keys], records, timeout_s=timeout_s)

    def names(self) -> list[ObjectKey]:
        """What all records are called on the disk; each tells its own key."""
        return self._store.keys()

    def name_of(self, key: bytes) -> ObjectKey:
        """What an object's record is called."""
        return disk_key(key)

    def read_named(self, name: ObjectKey, timeout_s: float) -> memoryview | Outcome:
        """The record of that name, in memory of its own; otherwise why not."""
        length = self._store.lengths([name])[0]
        if length is None:
            return Outcome.MISS
        record = memoryview(bytearray(length))
        outcome = self._store.batch_get_into([name], [record], timeout_s=timeout_s)[0]
        return record if outcome is Outcome.OK else outcome

    def touch(self, keys: Sequence[bytes]) -> None:
        """Keep these: they are in use."""
        self._store.touch([disk_key(key) for key in keys])

    def remove(self, key: bytes) -> bool:
        """Give up a record; whether it was there."""
        return self._store.remove([disk_key(key)]) > 0

    def clear(self, namespace: bytes | None) -> int:
        """Give up a namespace's records, or all; how many there were."""
        return self._store.clear(None if namespace is None else disk_namespace(namespace))

    def stats(self) -> StoreStats:
        """Size and counters."""
        return self._store.stats()

    def audit(self) -> list[str]:
        """All discrepancies."""
        return self._store.audit()

    def close(self) -> None:
        """Seal and let go."""
        self._store.close()
