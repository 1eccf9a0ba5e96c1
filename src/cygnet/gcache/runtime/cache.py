"""Both tiers of one server behind one lock: what `gcache.arena` and `gcache.tiering` decide is carried out here.

No value is moved under the lock. Who fills, reads or writes down an object has it pinned. A key is in at most one
*transition* at a time (being loaded, written down, overwritten or removed while the disk has it): others that would
change where it lies wait for that. So memory and disk never hold different values of one key that can both be found.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from cygnet.gcache.arena import Arena, Entry
from cygnet.gcache.leases import Leases
from cygnet.gcache.limits import Limits
from cygnet.gcache.protocol import ANY, Item
from cygnet.gcache.record import GRANULE, layout, split_key, unpack_record, value_is_whole
from cygnet.gcache.runtime.counts import Counts
from cygnet.gcache.runtime.disk_tier import DiskTier
from cygnet.gcache.runtime.shared_memory import SharedMemory
from cygnet.gcache.runtime.writer import DISK_TIMEOUT_S, Writer
from cygnet.gcache.tiering import Tiering
from cygnet.kv.store import Outcome

WRITE_DOWN_BYTES = 8 << 20
"""Most that is written down with one call, and pinned for it."""
WAIT_FOR_DISK_S = 1.0
"""How long a put waits for cold objects to be written down before it drops one."""
TRIES = 8
"""Cold objects given up one by one, before neighbours are, for room in one piece."""

FROM_DISK = {Outcome.MISS: Item.MISS, Outcome.TORN: Item.TORN, Outcome.TIMED_OUT: Item.TIMED_OUT}


class Cache:
    """Memory over disk. Thread-safe. Deadlines are monotonic seconds.

    Objects are handed out pinned: each `acquire` needs a `release`, each `reserve` a `commit` or `abandon`.
    """

    def __init__(
        self,
        shared: SharedMemory,
        disk: DiskTier | None,
        limits: Limits,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.limits = limits
        self.shared = shared
        self.counts = Counts()
        self._disk = disk
        self._wall_ns = wall_ns
        self.arena = Arena(shared.memory)
        """Others may ask it where a pinned entry's bytes and checksums are, and nothing else."""
        self._tiering = Tiering(self.arena.capacity_bytes, has_lower_tier=disk is not None)
        self._leases = Leases(int(limits.lease_s * 1e9), int(limits.max_leased_fraction * self.arena.capacity_bytes))
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """A transition has ended, or room may have come free."""
        self._num_waiting = 0
        """Who waits for that."""
        self._in_transition: set[bytes] = set()
        self._closing = False
        self._disk_takes = True
        """Whether the disk took something when it was last given something."""
        for entry in sorted(self.arena.entries(), key=lambda entry: entry.version):
            entry.clean = disk is not None and disk.record_bytes(entry.key) == entry.num_bytes
            self._tiering.add(entry)
        self._writer = None if disk is None else Writer(self, self._lock)

    # --- reading

    def acquire(self, key: bytes, deadline: float) -> Entry | Item:
        """The object, pinned and known to be whole; from the disk, it is brought to memory first."""
        with self._lock:
            entry = self._find(key)
        found: Entry | Item
        if entry is not None:
            found = entry
        else:
            found = Item.MISS if self._disk is None else self._load(key, deadline)
        if isinstance(found, Entry) and not found.verified:
            found = self._verify(found)
        return found

    def acquire_now(self, key: bytes, value_bytes: int) -> Entry | None:
        """The object of that size, pinned, if it is in memory and known to be whole; counted as got."""
        with self._lock:
            entry = self.arena.find(key)
            if entry is None or not entry.verified or value_bytes != entry.value_bytes or self._is_expired(entry):
                return None
            entry.pins += 1
            self._tiering.use(entry)
            self.counts.gets[Item.OK] += 1
            self.counts.bytes_got += value_bytes
            return entry

    def release(self, entries: list[Entry]) -> None:
        """Undo `acquire`."""
        with self._lock:
            for entry in entries:
                self.arena.unpin(entry)
            if self._num_waiting:
                self._changed.notify_all()

    def exists(self, key: bytes, value_bytes: int | None, *, touch: bool) -> bool:
        """Whether an object (of that size) is there; from memory alone.

        For an object on the disk the size is compared in granules.
        """
        with self._lock:
            entry = self.arena.find(key)
            if entry is not None and not self._is_expired(entry):
                if touch:
                    self._tiering.use(entry)
                return value_bytes in (None, entry.value_bytes)
        if self._disk is None or entry is not None:
            return False
        record_bytes = self._disk.record_bytes(key)
        if record_bytes is None:
            return False
        if value_bytes is not None and layout(len(key), value_bytes).record_bytes != record_bytes:
            return False
        if touch:
            self._disk.touch([key])
        return True

    def lease(
        self, keys: Sequence[bytes], owner: int, given_back: Sequence[int], value_bytes: int = ANY
    ) -> list[tuple[Entry, int] | None]:
        """First end leases of this connection, then lease what is in memory and known to be whole.

        `None` for what is not, or has another size, and when too much is leased.
        """
        with self._lock:
            for lease in given_back:
                ended = self._leases.release(lease, owner)
                if ended is not None:
                    self.arena.unpin(ended)
            now_ns = time.monotonic_ns()
            self._end_leases(now_ns)
            if self._num_waiting:
                self._changed.notify_all()
            return [self._lease(key, owner, value_bytes, now_ns) for key in keys]

    def _lease(self, key: bytes, owner: int, value_bytes: int, now_ns: int) -> tuple[Entry, int] | None:
        entry = self.arena.find(key)
        if entry is None or not entry.verified or value_bytes not in (ANY, entry.value_bytes):
            return None
        if self._is_expired(entry):
            return None
        lease = self._leases.grant(entry, owner, now_ns)
        if lease is None:
            return None
        entry.pins += 1
        self._tiering.use(entry)
        self.counts.gets[Item.OK] += 1
        return entry, lease

    def end_leases(self, owner: int) -> None:
        """A connection has ended, and its leases with it."""
        with self._lock:
            for entry in self._leases.release_all(owner):
                self.arena.unpin(entry)
            self._changed.notify_all()

    # --- writing

    def reserve(self, key: bytes, value_bytes: int, ttl_ms: int, deadline: float) -> Entry | Item:
        """Room for an object, to be filled. Not found before `commit`."""
        if value_bytes > self.limits.max_value_bytes or len(key) > self.limits.max_key_bytes:
            return Item.FULL
        expiry_ns = self._wall_ns() + ttl_ms * 1_000_000 if ttl_ms else 0
        return self._room(
            lambda: self.arena.begin(key, value_bytes, expiry_ns), layout(len(key), value_bytes).record_bytes, deadline
        )

    def commit(self, entry: Entry, sums: list[int], deadline: float) -> Item:
        """Have it found under its key from now on, instead of what was; on failure it is given up."""
        with self._lock:
            on_disk = self._begin(entry.key, deadline)
            if on_disk is None:
                self.arena.abort(entry)
                return Item.TIMED_OUT
            if not on_disk:
                self._publish(entry, sums)
                return Item.OK
        try:
            self._on_disk.remove(entry.key)
        finally:
            with self._lock:
                self._publish(entry, sums)
                self._end(entry.key)
        return Item.OK

    def abandon(self, entry: Entry) -> None:
        """Give up what was reserved."""
        with self._lock:
            self.arena.abort(entry)
            self._changed.notify_all()

    def hold(self, entry: Entry) -> None:
        """One more user of an entry that is being filled; undone by `release`."""
        with self._lock:
            self.arena.pin(entry)

    def remove(self, key: bytes, deadline: float) -> bool:
        """Give up an object in both tiers; whether it was there."""
        with self._lock:
            on_disk = self._begin(key, deadline)
            if not on_disk:
                return on_disk is not None and self._forget_key(key)
        try:
            there = self._on_disk.remove(key)
        finally:
            with self._lock:
                in_memory = self._forget_key(key)
                self._end(key)
        return there or in_memory

    def clear(self, namespace: bytes | None, deadline: float) -> int:
        """Give up all objects of a namespace, or all; how many there were."""
        with self._lock:
            keys = [e.key for e in self.arena.entries() if namespace in (None, split_key(e.key)[0])]
        count = sum(self.remove(key, deadline) for key in keys)
        return count + (self._disk.clear(namespace) if self._disk is not None else 0)

    # --- the whole

    def stats(self) -> dict[str, object]:
        """Size and counters, for people and programs."""
        disk = self._disk.stats() if self._disk is not None and not self._closing else None
        with self._lock:
            return {
                "objects": len(self.arena),
                "memory_bytes": self.arena.used_bytes,
                "memory_capacity_bytes": self.arena.capacity_bytes,
                "leases": len(self._leases),
                "leased_bytes": self._leases.leased_bytes,
                "damaged_slots": self.arena.damaged,
                **self.counts.as_dict(),
                "disk_objects": disk.num_objects if disk else 0,
                "disk_bytes": disk.bytes_used if disk else 0,
                "disk_capacity_bytes": disk.capacity_bytes if disk else 0,
                "disk_evicted_objects": disk.evicted_objects if disk else 0,
            }

    def audit(self) -> list[str]:
        """All discrepancies of both tiers. Slow."""
        with self._lock:
            faults = self.arena.audit() + self._tiering.audit(self.arena.entries()) + self._leases.audit()
        return faults + (self._disk.audit() if self._disk is not None else [])

    def close(self, *, write_down: bool = False, timeout_s: float = DISK_TIMEOUT_S) -> None:
        """Stop; what is in memory stays there. `write_down`: and has a copy on the disk, if there is time."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.close(timeout_s)
        if self._disk is not None:
            while write_down and time.monotonic() < deadline and self.write_down(everything=True):
                pass
            self._disk.close()
        self.shared.close()

    # --- inside

    def _find(self, key: bytes) -> Entry | None:
        """With the lock: the object in memory, pinned and counted as used."""
        entry = self.arena.find(key)
        if entry is None or self._is_expired(entry):
            return None
        self.arena.pin(entry)
        self._tiering.use(entry)
        return entry

    def _is_expired(self, entry: Entry) -> bool:
        return entry.expiry_ns > 0 and entry.expiry_ns <= self._wall_ns()

    def _forget(self, entry: Entry) -> None:
        """With the lock: an object is not in memory any more."""
        self._tiering.remove(entry)
        self.arena.kill(entry)
        self._changed.notify_all()

    def _verify(self, entry: Entry) -> Entry | Item:
        """Check an object that an earlier process has left; a damaged one is given up."""
        if value_is_whole(entry.key, self.arena.value(entry), self.arena.sums(entry)):
            entry.verified = True
            return entry
        with self._lock:
            self.counts.torn_objects += 1
            if self.arena.find(entry.key) is entry:
                self._forget(entry)
        self.release([entry])
        return Item.TORN

    def _load(self, key: bytes, deadline: float) -> Entry | Item:
        """Bring a record from the disk to memory."""
        with self._lock:
            on_disk = self._begin(key, deadline)
            found = self._find(key)  # another thread was faster
            if found is not None or not on_disk:
                if on_disk:
                    self._end(key)
                return found or (Item.MISS if on_disk is False else Item.TIMED_OUT)
        try:
            return self._load_alone(key, deadline)
        finally:
            with self._lock:
                self._end(key)

    def _load_alone(self, key: bytes, deadline: float) -> Entry | Item:
        record_bytes = self._on_disk.record_bytes(key)
        with self._lock:
            expired = self.arena.find(key) is not None
        if record_bytes is None or record_bytes % GRANULE or expired:
            return Item.MISS
        entry = self._room(lambda: self.arena.begin_record(key, record_bytes), record_bytes, deadline, for_load=True)
        if isinstance(entry, Item):
            return Item.TIMED_OUT if entry is Item.FULL else entry
        memory = self.arena.record(entry)
        outcome = self._on_disk.read(key, memory, max(0.0, deadline - time.monotonic()))
        record = unpack_record(memory) if outcome is Outcome.OK else None
        if record is not None and record.key == key and record.places.record_bytes == record_bytes:
            if 0 < record.expiry_ns <= self._wall_ns():
                self.abandon(entry)
                self._on_disk.remove(key)
                return Item.MISS
            with self._lock:
                self.arena.pin(entry)
                self.arena.commit_record(entry, record)
                self._tiering.add(entry)
                self.counts.disk_hits += 1
            return entry
        self.abandon(entry)
        if outcome is Outcome.OK:  # no record, or another key's: it is not to be found again
            self._on_disk.remove(key)
            outcome = Outcome.TORN
        with self._lock:
            self.counts.torn_objects += outcome is Outcome.TORN
        return FROM_DISK.get(outcome, Item.FAILED)

    def _room(
        self, begin: Callable[[], Entry | None], needed: int, deadline: float, *, for_load: bool = False
    ) -> Entry | Item:
        """What `begin` gives, with as many objects given up as it takes; for a load only such as the disk has."""
        patience = deadline if for_load else min(deadline, time.monotonic() + WAIT_FOR_DISK_S)
        with self._lock:
            given_up = 0
            while True:
                if self._closing:
                    return Item.FAILED
                entry = begin()
                if entry is not None:
                    return entry
                if needed > self.arena.capacity_bytes:
                    return Item.FULL
                self._end_leases(time.monotonic_ns())
                victim = self._tiering.victim()
                if victim is not None and self._has_lost_its_copy(victim):
                    self._tiering.lost_copy(victim)
                    continue
                now = time.monotonic()
                dirty = victim is not None and self._must_be_written(victim)
                if victim is None or (dirty and (for_load or (self._disk_takes and now < patience))):
                    if now >= patience:
                        return Item.FULL if now < deadline else Item.TIMED_OUT
                    if self._writer is not None:
                        self._writer.nudge(starved=dirty)
                    self._wait(patience - now)
                    continue
                victims: list[Entry] | None = [victim]
                if given_up >= TRIES:
                    sparing = for_load or (self._disk_takes and now < patience)
                    victims = self.arena.clearing(victim, needed, partial(self._may_go, sparing=sparing))
                for one in victims or [victim]:
                    self._give_up(one)
                    given_up += 1

    def _has_lost_its_copy(self, entry: Entry) -> bool:
        """Whether the disk has given up what it had of a clean entry."""
        return entry.clean and self._on_disk.record_bytes(entry.key) is None

    def _must_be_written(self, victim: Entry) -> bool:
        return self._disk is not None and not victim.clean

    def _may_go(self, entry: Entry, *, sparing: bool) -> bool:
        """Whether a neighbour may be given up for room; `sparing`: only if the disk has it."""
        if entry.pins or self.arena.find(entry.key) is not entry or self._has_lost_its_copy(entry):
            return False
        return not (sparing and self._must_be_written(entry))

    def _give_up(self, entry: Entry) -> None:
        self.counts.evicted_objects += 1
        self.counts.dropped_objects += self._must_be_written(entry)
        self._tiering.evicted(entry)
        self.arena.kill(entry)

    def _end_leases(self, now_ns: int) -> None:
        for entry in self._leases.expired(now_ns):
            self.arena.unpin(entry)

    def _publish(self, entry: Entry, sums: list[int]) -> None:
        """With the lock."""
        old = self.arena.commit(entry, sums)
        if old is not None:
            self._tiering.remove(old)
        self._tiering.add(entry)
        self.counts.bytes_put += entry.value_bytes
        if self._writer is not None:
            self._writer.nudge()

    def _forget_key(self, key: bytes) -> bool:
        """With the lock: whether there was something in memory."""
        entry = self.arena.find(key)
        if entry is None:
            return False
        there = not self._is_expired(entry)
        self._forget(entry)
        return there

    def _begin(self, key: bytes, deadline: float) -> bool | None:
        """With the lock: be the only one to change where `key` lies, until `_end`.

        `False`: the disk has not got it, so whatever is done before the lock is let go needs no transition. `None`:
        others did not end in time.
        """
        while key in self._in_transition:
            left = deadline - time.monotonic()
            if left <= 0 or self._closing:
                return None
            self._wait(left)
        if self._disk is None or self._disk.record_bytes(key) is None:
            return False
        self._in_transition.add(key)
        return True

    def _end(self, key: bytes) -> None:
        """With the lock."""
        self._in_transition.discard(key)
        self._changed.notify_all()

    def _wait(self, timeout_s: float) -> None:
        """With the lock: until something has changed."""
        self._num_waiting += 1
        self._changed.wait(timeout_s)
        self._num_waiting -= 1

    @property
    def _on_disk(self) -> DiskTier:
        assert self._disk is not None
        return self._disk

    # --- writing down

    def to_write_down(self, *, everything: bool) -> list[Entry]:
        """With the lock: what is to be written to the disk now."""
        free = self.arena.capacity_bytes - self.arena.used_bytes
        tiering = self._tiering
        chosen = tiering.all_dirty(WRITE_DOWN_BYTES) if everything else tiering.to_write_down(free, WRITE_DOWN_BYTES)
        return [entry for entry in chosen if entry.key not in self._in_transition]

    def write_down(self, *, everything: bool) -> int:
        """Write some cold objects to the disk; how many it took."""
        with self._lock:
            chosen = self.to_write_down(everything=everything)
            for entry in chosen:
                self.arena.pin(entry)
                self._in_transition.add(entry.key)
        whole = [entry for entry in chosen if entry.verified or self._is_whole(entry)]
        records = [self.arena.record(entry) for entry in whole]
        outcomes = self._on_disk.write([entry.key for entry in whole], records, DISK_TIMEOUT_S)
        taken = {entry for entry, outcome in zip(whole, outcomes, strict=True) if outcome is Outcome.OK}
        with self._lock:
            for entry in chosen:
                self._in_transition.discard(entry.key)
                if entry in taken:
                    self._tiering.written_down(entry)
                elif self.arena.find(entry.key) is entry:
                    if entry.verified:
                        self._tiering.postpone(entry)
                    else:
                        self.counts.torn_objects += 1
                        self._forget(entry)
                self.arena.unpin(entry)
            self.counts.written_down_objects += len(taken)
            self._disk_takes = bool(taken) or not whole
            self._changed.notify_all()
        return len(taken)

    def _is_whole(self, entry: Entry) -> bool:
        entry.verified = value_is_whole(entry.key, self.arena.value(entry), self.arena.sums(entry))
        return entry.verified
