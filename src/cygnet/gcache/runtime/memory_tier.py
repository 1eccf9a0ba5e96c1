"""The memory tier of one server: its arena, the order of what is in it, who reads it in place; behind one lock."""

import threading
import time
from collections.abc import Callable, Sequence
from heapq import nsmallest

from cygnet.gcache.arena import Arena, ArenaMemory, Entry
from cygnet.gcache.changes import Changes
from cygnet.gcache.leases import Leases
from cygnet.gcache.limits import Limits
from cygnet.gcache.namespaces import Namespaces
from cygnet.gcache.protocol import ANY, Item
from cygnet.gcache.record import value_is_whole
from cygnet.gcache.runtime.counts import Counts
from cygnet.gcache.tiering import Tiering

MANY_SLOTS, LOOK_NS = 1 << 16, 20_000_000
"""With more slots than that, it is not looked more often which of them were used."""
READ_WAIT_S = 0.02
"""Those who read without having asked don't tell when they have read: it is looked so often."""


class MemoryTier:
    """What needs no disk. Thread-safe, but for methods that say "with the lock": their callers hold `lock`.

    Objects are handed out pinned: each `acquire_now` and `find` needs a `release`.
    """

    def __init__(
        self, memory: ArenaMemory, limits: Limits, *, has_lower_tier: bool, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.arena = Arena(memory)
        """Others may ask it where a pinned entry's bytes and checksums are, and nothing else."""
        self.counts = Counts()
        self.namespaces = Namespaces(limits.namespaces)
        self.tiering = Tiering(self.arena.capacity_bytes, has_lower_tier=has_lower_tier, namespaces=self.namespaces)
        self.changes = Changes()
        self.lock = threading.Lock()
        self.wall_ns = wall_ns
        self._leases = Leases(int(limits.lease_s * 1e9), int(limits.max_leased_fraction * self.arena.capacity_bytes))
        self._changed = threading.Condition(self.lock)
        """A transition has ended, or room may have come free."""
        self._num_waiting = 0
        """Who waits for that."""
        self.got_elsewhere: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Gets that were answered without this, and their bytes."""
        self._look_at_ns = 0
        """When it is next worth looking at which slots were used: there may be many."""

    # --- reading

    def acquire_now(self, key: bytes, value_bytes: int) -> Entry | None:
        """The object of that size, pinned, if it is in memory and known to be whole; counted as got."""
        with self.lock:
            entry = self.arena.find(key)
            if entry is None or not entry.verified or value_bytes != entry.value_bytes or self.is_expired(entry):
                return None
            entry.pins += 1
            self.tiering.use(entry)
            self.counts.got(Item.OK, value_bytes)
            return entry

    def release(self, entries: Sequence[Entry]) -> None:
        """Nobody that they were handed to uses these any more."""
        with self.lock:
            for entry in entries:
                self.arena.unpin(entry)
            self.tell()

    def lease(
        self, keys: Sequence[bytes], owner: int, given_back: Sequence[int], value_bytes: int = ANY
    ) -> list[tuple[Entry, int] | None]:
        """First end leases of this connection, then lease what is in memory and known to be whole.

        `None` for what is not, or has another size, and when too much is leased.
        """
        with self.lock:
            for lease in given_back:
                ended = self._leases.release(lease, owner)
                if ended is not None:
                    self.arena.unpin(ended)
            now_ns = time.monotonic_ns()
            self.end_late_leases(now_ns)
            self.tell()
            leased = [self._lease(key, owner, value_bytes, now_ns) for key in keys]
            self.arena.memory.leave_to_readers(self._leases.free_bytes)
            return leased

    def _lease(self, key: bytes, owner: int, value_bytes: int, now_ns: int) -> tuple[Entry, int] | None:
        entry = self.arena.find(key)
        if entry is None or not entry.verified or value_bytes not in (ANY, entry.value_bytes):
            return None
        if self.is_expired(entry):
            return None
        lease = self._leases.grant(entry, owner, now_ns, self.arena.memory.read_bytes())
        if lease is None:
            return None
        entry.pins += 1
        self.tiering.use(entry)
        self.counts.got(Item.OK, 0)
        return entry, lease

    def end_leases(self, owner: int) -> None:
        """A connection has ended, and its leases with it."""
        with self.lock:
            for entry in self._leases.release_all(owner):
                self.arena.unpin(entry)
            self.tell()

    def entries_after(self, version: int, count: int) -> list[Entry]:
        """The next `count` objects of a later version that have not expired, in the order of versions. O(objects)."""
        with self.lock:
            entries = self.arena.entries()
        later = (entry for entry in entries if entry.version > version and not self.is_expired(entry))
        return nsmallest(count, later, key=lambda entry: entry.version)

    # --- with the lock

    def find(self, key: bytes) -> Entry | None:
        """With the lock: the object in memory, pinned and counted as used."""
        entry = self.arena.find(key)
        if entry is None or self.is_expired(entry):
            return None
        self.arena.pin(entry)
        self.tiering.use(entry)
        return entry

    def look_around(self) -> None:
        """With the lock: have what others read without having asked stay, and what they used count as used."""
        now_ns = time.monotonic_ns()
        self.end_late_leases(now_ns)
        self.arena.look_for_readers()
        if now_ns >= self._look_at_ns:
            self._look_at_ns = now_ns + (LOOK_NS if self.arena.shape.num_slots > MANY_SLOTS else 0)
            for entry in self.arena.used_elsewhere():
                self.tiering.use(entry)

    def is_expired(self, entry: Entry) -> bool:
        """Whether its time is over."""
        return entry.expiry_ns > 0 and entry.expiry_ns <= self.wall_ns()

    def forget(self, entry: Entry) -> None:
        """With the lock: an object is not in memory any more."""
        self.tiering.remove(entry)
        self.arena.kill(entry)
        self.tell()

    def publish(self, entry: Entry, sums: list[int]) -> None:
        """With the lock: an object whose value is in place is found from now on."""
        old = self.arena.commit(entry, sums)
        if old is not None:
            self.tiering.remove(old)
        self.tiering.add(entry)
        self.counts.bytes_put += entry.value_bytes
        if self.changes.armed:
            self.changes.note(entry.key)

    def forget_key(self, key: bytes) -> bool:
        """With the lock: `forget` what is called that, and note that nobody is to bring it; whether it was there."""
        if self.changes.armed:
            self.changes.note(key)
        entry = self.arena.find(key)
        if entry is None:
            return False
        there = not self.is_expired(entry)
        self.forget(entry)
        return there

    def end_late_leases(self, now_ns: int) -> None:
        """With the lock: what is leased for too long may move. Time is monotonic."""
        for entry in self._leases.expired(now_ns):
            self.arena.unpin(entry)

    def wait(self, timeout_s: float) -> None:
        """With the lock: until something has changed."""
        self._num_waiting += 1
        self._changed.wait(min(timeout_s, READ_WAIT_S) if self.arena.has_readers else timeout_s)
        self._num_waiting -= 1

    def tell(self) -> None:
        """With the lock: something has changed."""
        if self._num_waiting:
            self._changed.notify_all()

    # --- what moves here from other servers

    def ticket(self) -> int:
        """For objects that are held elsewhere, to be sent from now on."""
        with self.lock:
            return self.changes.ticket()

    def end_tickets(self) -> None:
        """Nothing moves any more."""
        with self.lock:
            self.changes.disarm()

    # --- the whole

    def stats(self) -> dict[str, object]:
        """Sizes and counters."""
        with self.lock:
            counts = self.counts.as_dict(*self.got_elsewhere())
            return {
                "objects": len(self.arena),
                "memory_bytes": self.arena.used_bytes,
                "memory_capacity_bytes": self.arena.capacity_bytes,
                "leases": len(self._leases),
                "leased_bytes": self._leases.leased_bytes,
                "damaged_slots": self.arena.damaged,
                **counts,
                **self.namespaces.stats(),
            }

    def is_whole(self, entry: Entry) -> bool:
        """Whether a pinned entry's value is what its checksums say; remembered if so."""
        if not value_is_whole(entry.key, self.arena.value(entry), self.arena.sums(entry)):
            return False
        with self.lock:
            self.arena.was_checked(entry)
        return True

    def audit(self) -> list[str]:
        """All discrepancies. Slow."""
        with self.lock:
            faults = self.arena.audit() + self.tiering.audit(self.arena.entries())
            return faults + self._leases.audit() + self.changes.audit()
