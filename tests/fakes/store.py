"""A store in memory, that can be told to fail."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cygnet.kv.store import (
    DEFAULT_TIMEOUT_S,
    NAMESPACE_BYTES,
    Namespace,
    ObjectKey,
    Outcome,
    StoreStats,
    check_batch,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


class MemoryStore:
    """Objects in a dict. First in, first out, with another round for what was used.

    `get_faults` and `put_faults` say what becomes of an object's next get or put instead of `OK`; what is torn or
    failed then is gone, as a `Store` promises. Invariant: the objects' lengths add up to `bytes_used`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.get_faults: dict[ObjectKey, Outcome] = {}
        self.put_faults: dict[ObjectKey, Outcome] = {}
        self._capacity_bytes = capacity_bytes
        self._objects: dict[ObjectKey, bytes] = {}
        self._used: set[ObjectKey] = set()
        self._bytes = 0
        self._closed = False
        self._lock = threading.Lock()
        self._gets: Counter[Outcome] = Counter()
        self._puts: Counter[Outcome] = Counter()
        self._counts: Counter[str] = Counter()

    @property
    def buffer_alignment(self) -> int:
        return 1

    def batch_exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        check_batch(keys)
        with self._lock:
            return [key in self._objects for key in keys]

    def batch_get_into(
        self, keys: Sequence[ObjectKey], buffers: "Sequence[Buffer]", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Outcome]:
        views = check_batch(keys, buffers, writable=True)
        with self._lock:
            outcomes = [self._get(key, view, timeout_s) for key, view in zip(keys, views, strict=True)]
            self._gets.update(outcomes)
            return outcomes

    def batch_put(
        self, keys: Sequence[ObjectKey], buffers: "Sequence[Buffer]", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Outcome]:
        views = check_batch(keys, buffers)
        with self._lock:
            outcomes = [self._put(key, view, timeout_s) for key, view in zip(keys, views, strict=True)]
            self._puts.update(outcomes)
            return outcomes

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        check_batch(keys)
        with self._lock:
            self._used.update(key for key in keys if key in self._objects)

    def remove(self, keys: Sequence[ObjectKey]) -> int:
        check_batch(keys)
        with self._lock:
            return sum(self._drop(key) for key in set(keys))

    def clear(self, namespace: Namespace | None = None) -> int:
        with self._lock:
            return sum(
                self._drop(key) for key in list(self._objects) if namespace in (None, Namespace(key[:NAMESPACE_BYTES]))
            )

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                num_objects=len(self._objects),
                bytes_used=self._bytes,
                capacity_bytes=self._capacity_bytes,
                gets=dict(self._gets),
                puts=dict(self._puts),
                puts_present=self._counts["present"],
                bytes_read=self._counts["read"],
                bytes_written=self._counts["written"],
                evicted_objects=self._counts["evicted"],
                moved_objects=self._counts["moved"],
            )

    def audit(self) -> list[str]:
        with self._lock:
            total = sum(map(len, self._objects.values()))
            return [] if total == self._bytes else [f"{total} bytes are there, {self._bytes} counted"]

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        with self._lock:
            self._closed = True
            self._objects.clear()
            self._bytes = 0

    def _get(self, key: ObjectKey, view: memoryview, timeout_s: float) -> Outcome:
        if self._closed:
            return Outcome.FAILED
        if len(self._objects.get(key, b"")) != len(view):
            return Outcome.MISS
        outcome = self.get_faults.pop(key, Outcome.OK) if timeout_s > 0 else Outcome.TIMED_OUT
        if outcome is Outcome.OK:
            view[:] = self._objects[key]
            self._used.add(key)
            self._counts["read"] += len(view)
        elif outcome is not Outcome.TIMED_OUT:
            self._drop(key)
        return outcome

    def _put(self, key: ObjectKey, view: memoryview, timeout_s: float) -> Outcome:
        if self._closed:
            return Outcome.FAILED
        if len(self._objects.get(key, b"")) == len(view):
            self._used.add(key)
            self._counts["present"] += 1
            return Outcome.OK
        outcome = self.put_faults.pop(key, Outcome.OK) if timeout_s > 0 else Outcome.TIMED_OUT
        if outcome is not Outcome.OK:
            return outcome
        if len(view) > self._capacity_bytes // 4:
            return Outcome.FULL
        self._drop(key)
        while self._bytes + len(view) > self._capacity_bytes:
            oldest = next(iter(self._objects))
            if oldest in self._used:
                self._used.remove(oldest)
                self._objects[oldest] = self._objects.pop(oldest)
                self._counts["moved"] += 1
            else:
                self._drop(oldest)
                self._counts["evicted"] += 1
        self._objects[key] = bytes(view)
        self._bytes += len(view)
        self._counts["written"] += len(view)
        return Outcome.OK

    def _drop(self, key: ObjectKey) -> bool:
        body = self._objects.pop(key, None)
        self._bytes -= len(body or b"")
        self._used.discard(key)
        return body is not None
