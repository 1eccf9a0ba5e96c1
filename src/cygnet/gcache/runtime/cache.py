"""Both tiers of one server: what `gcache.arena` and `gcache.tiering` decide is carried out here.

No value is moved under the lock. Who fills, reads or writes down an object has it pinned. A key is in at most one
*transition* at a time (being loaded, written down, overwritten or removed while the disk has it): others that would
change where it lies wait for that. So memory and disk never hold different values of one key that can both be found.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from cygnet.gcache.arena import Entry
from cygnet.gcache.limits import Limits, expiry_of
from cygnet.gcache.protocol import Item, Put
from cygnet.gcache.record import GRANULE, layout, split_key, unpack_record, unpack_sums
from cygnet.gcache.runtime.disk_tier import DiskTier
from cygnet.gcache.runtime.memory_tier import MemoryTier
from cygnet.gcache.runtime.shared_memory import SharedMemory
from cygnet.gcache.runtime.writer import DISK_TIMEOUT_S, Writer
from cygnet.kv.runtime.disk_store.disk import copy
from cygnet.kv.store import Outcome

WRITE_DOWN_BYTES = 8 << 20
"""Most that is written down with one call, and pinned for it."""
WAIT_FOR_DISK_S = 1.0
"""How long a put waits for cold objects to be written down before it drops one."""
TRIES = 8
"""Cold objects given up one by one, before neighbours are, for room in one piece."""

Allowed = Callable[[Entry | None, bool], bool]
"""Whether what is there may be replaced: what memory has, and whether it is the disk alone that has something."""
FROM_DISK = {Outcome.MISS: Item.MISS, Outcome.TORN: Item.TORN, Outcome.TIMED_OUT: Item.TIMED_OUT}


class Cache:
    """Memory over disk. Thread-safe. Deadlines are monotonic seconds.

    Objects are handed out pinned: each `acquire` needs a `memory.release`, each `reserve` a `commit` or `abandon`.
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
        self.memory = MemoryTier(shared.memory, limits, has_lower_tier=disk is not None, wall_ns=wall_ns)
        self.arena, self.counts = self.memory.arena, self.memory.counts
        self._disk = disk
        self._in_transition: set[bytes] = set()
        self._closing = False
        self._disk_takes = True
        """Whether the disk took something when it was last given something."""
        for entry in sorted(self.arena.entries(), key=lambda entry: entry.version):
            entry.clean = disk is not None and disk.record_bytes(entry.key) == entry.num_bytes
            self.memory.tiering.add(entry)
        self._writer = None if disk is None else Writer(self, self.memory.lock)

    # --- reading

    def acquire(self, key: bytes, deadline: float) -> Entry | Item:
        """The object, pinned and known to be whole; from the disk, it is brought to memory first."""
        with self.memory.lock:
            entry = self.memory.find(key)
        found: Entry | Item
        if entry is not None:
            found = entry
        else:
            found = Item.MISS if self._disk is None else self._load(key, deadline)
        if isinstance(found, Entry) and not found.verified:
            found = self._verify(found)
        return found

    def acquire_all(self, keys: Sequence[bytes], deadline: float) -> list[Entry | Item]:
        """What `acquire` gives for each; what is in memory under one lock."""
        with self.memory.lock:
            found = [self.memory.find(key) for key in keys]
        return [
            self.acquire(key, deadline) if entry is None else entry if entry.verified else self._verify(entry)
            for key, entry in zip(keys, found, strict=True)
        ]

    def exists(self, key: bytes, value_bytes: int | None, *, touch: bool) -> bool:
        """Whether an object (of that size) is there; from memory alone.

        For an object on the disk the size is compared in granules.
        """
        with self.memory.lock:
            entry = self.arena.find(key)
            if entry is not None and not self.memory.is_expired(entry):
                if touch:
                    self.memory.tiering.use(entry)
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

    # --- writing

    def reserve(self, key: bytes, value_bytes: int, ttl_ms: int, deadline: float, root: int = 0) -> Entry | Item:
        """Room for an object, to be filled. Not found before `commit`."""
        refused = self._refused(key, value_bytes)
        if refused is not None:
            return refused
        ttl_ms = self.memory.namespaces.limits_of(key).ttl_of(ttl_ms)
        expiry_ns = expiry_of(self.memory.wall_ns(), ttl_ms)
        needed = layout(len(key), value_bytes).record_bytes
        return self._room(lambda: self.arena.begin(key, value_bytes, expiry_ns, root), needed, deadline)

    def reserve_all(self, puts: Sequence[Put], deadline: float) -> list[Entry | Item]:
        """What `reserve` gives for each; as long as there is room, under one lock."""
        now_ns, namespaces = self.memory.wall_ns(), self.memory.namespaces
        places: list[Entry | None] = []
        with self.memory.lock:
            plain = not namespaces.any and not self._closing
            largest, longest = self.limits.max_value_bytes, self.limits.max_key_bytes
            for put in puts:
                if plain:
                    fits = put.value_bytes <= largest and len(put.key) <= longest
                else:
                    fits = self._refused(put.key, put.value_bytes) is None and not self._closing
                ttl_ms = namespaces.limits_of(put.key).ttl_of(put.ttl_ms) if namespaces.any else put.ttl_ms
                expiry_ns = expiry_of(now_ns, ttl_ms)
                places.append(self.arena.begin(put.key, put.value_bytes, expiry_ns, put.root) if fits else None)
        return [
            place or self.reserve(put.key, put.value_bytes, put.ttl_ms, deadline, put.root)
            for put, place in zip(puts, places, strict=True)
        ]

    def commit_all(self, filled: Sequence[tuple[Entry, list[int]]], deadline: float) -> list[Item]:
        """What `commit` gives for each; those that the disk has not got under one lock."""
        items: list[Item | None] = []
        with self.memory.lock:
            for entry, sums in filled:
                alone = self._disk is None or self._disk.record_bytes(entry.key) is None
                if alone and entry.key not in self._in_transition:
                    items.append(self._publish(entry, sums))
                else:
                    items.append(None)
        return [self.commit(*one, deadline) if item is None else item for one, item in zip(filled, items, strict=True)]

    def commit(self, entry: Entry, sums: list[int], deadline: float, allowed: Allowed | None = None) -> Item:
        """Have it found under its key from now on, instead of what was; on failure it is given up.

        `allowed` is asked first; what has expired is not there. If it says no, nothing is done: `MISS`.
        """
        with self.memory.lock:
            on_disk = self._begin(entry.key, deadline)
            if on_disk is None:
                self.arena.abort(entry)
                return Item.TIMED_OUT
            if allowed is not None:
                found = self.arena.find(entry.key)
                valid = None if found is None or self.memory.is_expired(found) else found
                if not allowed(valid, on_disk and found is None):
                    self.arena.abort(entry)
                    self._end(entry.key)
                    return Item.MISS
            if not on_disk:
                return self._publish(entry, sums)
        try:
            self._on_disk.remove(entry.key)
        finally:
            with self.memory.lock:
                item = self._publish(entry, sums)
                self._end(entry.key)
        return item

    def set_ttl(self, key: bytes, ttl_ms: int, deadline: float) -> Item:
        """Have an object expire so long from now, 0 for never: it is copied, if nothing has replaced it meanwhile."""
        old = self.acquire(key, deadline)
        if isinstance(old, Item):
            return old
        try:
            fresh = self.reserve(key, old.value_bytes, ttl_ms, deadline, old.root)
            if isinstance(fresh, Item):
                return fresh
            if old.value_bytes:
                copy(self.arena.value(fresh), self.arena.value(old))
            sums = unpack_sums(self.arena.sums(old))
            return self.commit(fresh, sums, deadline, lambda entry, _: entry is old)
        finally:
            self.memory.release([old])

    def abandon(self, entry: Entry) -> None:
        """Give up what was reserved."""
        with self.memory.lock:
            self.arena.abort(entry)
            self.memory.tell()

    def hold(self, entry: Entry) -> None:
        """One more user of an entry that is being filled; undone by `memory.release`."""
        with self.memory.lock:
            self.arena.pin(entry)

    def remove(self, key: bytes, deadline: float) -> bool | None:
        """Give up an object in both tiers; whether it was there. `None`: it still is, others did not end in time."""
        with self.memory.lock:
            on_disk = self._begin(key, deadline)
            if not on_disk:
                return None if on_disk is None else self.memory.forget_key(key)
        try:
            there = self._on_disk.remove(key)
        finally:
            with self.memory.lock:
                in_memory = self.memory.forget_key(key)
                self._end(key)
        return there or in_memory

    # --- moving to other servers

    def begin_move(self, key: bytes, deadline: float) -> Entry | bool | None:
        """Be the only one to change where an object lies, until `end_move`: its entry, pinned; `True`: it is on disk.

        Nothing has begun with `False`, it is not there, and with `None`, others did not end in time.
        """
        with self.memory.lock:
            on_disk = self._begin(key, deadline)
            entry = self.arena.find(key)
            if on_disk is None or (entry is None and not on_disk):
                return on_disk
            self._in_transition.add(key)
            if entry is None:
                return True
            self.arena.pin(entry)
            return entry

    def end_move(self, key: bytes, entry: Entry | None, *, gone: bool) -> None:
        """Undo `begin_move`. `gone`: the object is another server's now."""
        try:
            if gone and self._disk is not None:
                self._disk.remove(key)
        finally:
            with self.memory.lock:
                if gone:
                    self.memory.forget_key(key)
                if entry is not None:
                    self.arena.unpin(entry)
                self._end(key)

    def clear(self, namespace: bytes | None, deadline: float) -> int:
        """Give up all objects of a namespace, or all; how many there were."""
        with self.memory.lock:
            self.memory.changes.note_all()
            keys = [e.key for e in self.arena.entries() if namespace in (None, split_key(e.key)[0])]
        count = sum(self.remove(key, deadline) is True for key in keys)
        return count + (self._disk.clear(namespace) if self._disk is not None else 0)

    # --- the whole

    def stats(self) -> dict[str, object]:
        """Size and counters, for people and programs."""
        disk = self._disk.stats() if self._disk is not None and not self._closing else None
        return {
            **self.memory.stats(),
            "disk_objects": disk.num_objects if disk else 0,
            "disk_bytes": disk.bytes_used if disk else 0,
            "disk_capacity_bytes": disk.capacity_bytes if disk else 0,
            "disk_evicted_objects": disk.evicted_objects if disk else 0,
        }

    def audit(self) -> list[str]:
        """All discrepancies of both tiers. Slow."""
        return self.memory.audit() + (self._disk.audit() if self._disk is not None else [])

    def close(self, *, write_down: bool = False, timeout_s: float = DISK_TIMEOUT_S) -> None:
        """Stop; what is in memory stays there. `write_down`: and has a copy on the disk, if there is time."""
        deadline = time.monotonic() + timeout_s
        with self.memory.lock:
            self._closing = True
            self.memory.tell()
        if self._writer is not None:
            self._writer.close(timeout_s)
        if self._disk is not None:
            while write_down and time.monotonic() < deadline and self.write_down(everything=True):
                pass
            self._disk.close()
        self.shared.close()

    # --- inside

    def _refused(self, key: bytes, value_bytes: int) -> Item | None:
        """Why an object is not taken, however much room there is."""
        limits, namespaces = self.limits, self.memory.namespaces
        if value_bytes > limits.max_value_bytes or len(key) > limits.max_key_bytes:
            return Item.FULL
        if not namespaces.any:
            return None
        own = namespaces.limits_of(key)
        if own.max_value_bytes and value_bytes > own.max_value_bytes:
            return Item.FULL
        over_quota = own.max_bytes and layout(len(key), value_bytes).record_bytes > own.max_bytes
        return Item.FULL if over_quota else None

    def _verify(self, entry: Entry) -> Entry | Item:
        """Check an object that an earlier process has left; a damaged one is given up."""
        if self.memory.is_whole(entry):
            return entry
        with self.memory.lock:
            self.counts.torn_objects += 1
            if self.arena.find(entry.key) is entry:
                self.memory.forget(entry)
        self.memory.release([entry])
        return Item.TORN

    def _load(self, key: bytes, deadline: float) -> Entry | Item:
        """Bring a record from the disk to memory."""
        with self.memory.lock:
            on_disk = self._begin(key, deadline)
            found = self.memory.find(key)  # another thread was faster
            if found is not None or not on_disk:
                if on_disk:
                    self._end(key)
                return found or (Item.MISS if on_disk is False else Item.TIMED_OUT)
        try:
            return self._load_alone(key, deadline)
        finally:
            with self.memory.lock:
                self._end(key)

    def _load_alone(self, key: bytes, deadline: float) -> Entry | Item:
        record_bytes = self._on_disk.record_bytes(key)
        with self.memory.lock:
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
            if 0 < record.expiry_ns <= self.memory.wall_ns():
                self.abandon(entry)
                self._on_disk.remove(key)
                return Item.MISS
            with self.memory.lock:
                self.arena.pin(entry)
                self.arena.commit_record(entry, record)
                self.memory.tiering.add(entry)
                self.counts.disk_hits += 1
            return entry
        self.abandon(entry)
        if outcome is Outcome.OK:  # no record, or another key's: it is not to be found again
            self._on_disk.remove(key)
            outcome = Outcome.TORN
        with self.memory.lock:
            self.counts.torn_objects += outcome is Outcome.TORN
        return FROM_DISK.get(outcome, Item.FAILED)

    def _room(
        self, begin: Callable[[], Entry | None], needed: int, deadline: float, *, for_load: bool = False
    ) -> Entry | Item:
        """What `begin` gives, with as many objects given up as it takes; for a load only such as the disk has."""
        patience = deadline if for_load else min(deadline, time.monotonic() + WAIT_FOR_DISK_S)
        with self.memory.lock:
            given_up = 0
            while True:
                if self._closing:
                    return Item.FAILED
                entry = begin()
                if entry is not None:
                    return entry
                if needed > self.arena.capacity_bytes:
                    return Item.FULL
                self.memory.look_around()
                victim = self.memory.tiering.victim()
                if victim is not None and self._has_lost_its_copy(victim):
                    self.memory.tiering.lost_copy(victim)
                    continue
                now = time.monotonic()
                dirty = victim is not None and self._must_be_written(victim)
                if victim is None or (dirty and (for_load or (self._disk_takes and now < patience))):
                    if now >= patience:
                        return Item.FULL if now < deadline else Item.TIMED_OUT
                    if self._writer is not None:
                        self._writer.nudge(starved=dirty)
                    self.memory.wait(patience - now)
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
        self.memory.tiering.evicted(entry)
        self.arena.kill(entry)

    def _publish(self, entry: Entry, sums: list[int]) -> Item:
        """With the lock: have it found, and its namespace's oldest objects go where that is over its quota."""
        if self.memory.namespaces.any:
            excess = self.memory.namespaces.excess(entry.key, entry.num_bytes)
            if excess is None:
                self.arena.abort(entry)
                return Item.FULL
            for old in excess:
                self._give_up(old)
            self.counts.over_quota_objects += len(excess)
        self.memory.publish(entry, sums)
        if self._writer is not None:
            self._writer.nudge()
        return Item.OK

    def _begin(self, key: bytes, deadline: float) -> bool | None:
        """With the lock: be the only one to change where `key` lies, until `_end`.

        `False`: the disk has not got it, so whatever is done before the lock is let go needs no transition. `None`:
        others did not end in time.
        """
        while key in self._in_transition:
            left = deadline - time.monotonic()
            if left <= 0 or self._closing:
                return None
            self.memory.wait(left)
        if self._disk is None or self._disk.record_bytes(key) is None:
            return False
        self._in_transition.add(key)
        return True

    def _end(self, key: bytes) -> None:
        """With the lock."""
        self._in_transition.discard(key)
        self.memory.tell()

    @property
    def _on_disk(self) -> DiskTier:
        assert self._disk is not None
        return self._disk

    # --- writing down

    def to_write_down(self, *, everything: bool) -> list[Entry]:
        """With the lock: what is to be written to the disk now."""
        free = self.arena.capacity_bytes - self.arena.used_bytes
        tiering = self.memory.tiering
        chosen = tiering.all_dirty(WRITE_DOWN_BYTES) if everything else tiering.to_write_down(free, WRITE_DOWN_BYTES)
        return [entry for entry in chosen if entry.key not in self._in_transition]

    def write_down(self, *, everything: bool) -> int:
        """Write some cold objects to the disk; how many it took."""
        with self.memory.lock:
            chosen = self.to_write_down(everything=everything)
            for entry in chosen:
                self.arena.pin(entry)
                self._in_transition.add(entry.key)
        whole = [entry for entry in chosen if entry.verified or self.memory.is_whole(entry)]
        records = [self.arena.record(entry) for entry in whole]
        outcomes = self._on_disk.write([entry.key for entry in whole], records, DISK_TIMEOUT_S)
        taken = {entry for entry, outcome in zip(whole, outcomes, strict=True) if outcome is Outcome.OK}
        with self.memory.lock:
            for entry in chosen:
                self._in_transition.discard(entry.key)
                if entry in taken:
                    self.memory.tiering.written_down(entry)
                elif self.arena.find(entry.key) is entry:
                    if entry.verified:
                        self.memory.tiering.postpone(entry)
                    else:
                        self.counts.torn_objects += 1
                        self.memory.forget(entry)
                self.arena.unpin(entry)
            self.counts.written_down_objects += len(taken)
            self._disk_takes = bool(taken) or not whole
            self.memory.tell()
        return len(taken)
