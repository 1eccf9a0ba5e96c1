"""Objects in one piece of memory that outlives its process: extents, slots, and the index over them. Pure.

The memory is a file that others have mapped too, so what is in it counts, not what this process knows. The order of
writes makes a crash at any point harmless:

    put        value, record's head, slot's words, then the slot's stamp: COMMITTED. Before that nothing is found.
    overwrite  the new one is committed, then the old one's stamp says DEAD; of two committed ones the later counts.
    remove     the stamp says DEAD, then it is acknowledged
    reuse      the stamp's generation rises, then the memory is given to another object
"""

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from cygnet.base.errors import InvariantError
from cygnet.gcache.allocator import Allocator
from cygnet.gcache.record import (
    GRANULE,
    PAGE,
    SLOT_BYTES,
    SLOT_WORDS,
    ArenaShape,
    Layout,
    Record,
    State,
    layout,
    num_chunks,
    pack_prefix,
    pack_sums,
    pack_words,
    slot_checksum,
    unpack_arena_head,
    unpack_record,
)

Words = tuple[int, ...]


class ArenaMemory:
    """The arena's bytes. The index changes them through `write` and `set_word` only; tests stop in between.

    Others may read them too. Those that ask the server first have what they read pinned; where they need not ask
    (`gcache.runtime.shared_index`), they are told here what can be found, and tell what they read.
    """

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._words = view[PAGE:].cast("Q")

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes, in no particular order."""
        self.view[offset : offset + len(data)] = data

    def set_word(self, slot: int, word: int, value: int) -> None:
        """Write one word of a slot, at once."""
        self._words[slot * SLOT_WORDS + word] = value

    def fill(self, spans: list[tuple[int, int, int]], data: memoryview) -> None:
        """Copy values from `data`; each span is where it goes, where it begins, and its size."""
        for offset, begin, size in spans:
            self.view[offset : offset + size] = data[begin : begin + size]

    def stamp(self, slot: int) -> int:
        """Word 0 of a slot."""
        return self._words[slot * SLOT_WORDS]

    def publish(self, entry: "Entry", sums: bytes, at: int) -> None:
        """Write the head of a record whose value is in place and whose first byte is `at`, its slot, then its stamp."""
        prefix, checksum = pack_prefix(entry.key, entry.value_bytes, sums, entry.version, entry.expiry_ns, entry.root)
        self.write(at, prefix)
        self.publish_slot(entry, checksum)

    def publish_slot(self, entry: "Entry", checksum: int) -> None:
        """The same for a record whose head is in place too."""
        words = (entry.start, entry.units, len(entry.key), entry.value_bytes, entry.version, checksum)
        self.write(PAGE + entry.slot * SLOT_BYTES + 8, pack_words(words))
        self.set_word(entry.slot, 0, entry.stamp)
        self.show(entry.slot, entry.key)

    def retire(self, entry: "Entry") -> bool:
        """Write that its slot's object is dead; whether someone reads it who did not ask."""
        self.set_word(entry.slot, 0, entry.generation << 2 | State.DEAD)
        if entry.verified:
            self.hide(entry.slot, entry.key)
        return self.is_read(entry.slot)

    # --- those who do not ask

    def show(self, slot: int, key: bytes) -> None:
        """A slot's object, committed and checked, may be found from now on."""

    def hide(self, slot: int, key: bytes) -> None:
        """It is not to be found any more."""

    def shown(self) -> list[int] | None:
        """Slots that are found; `None`: nobody finds anything without asking."""
        return None

    def is_read(self, slot: int) -> bool:
        """Whether someone reads a slot's object."""
        return False

    def read(self) -> list[int]:
        """Slots whose objects someone reads."""
        return []

    def take_used(self) -> list[int]:
        """Slots whose objects were used since the last call."""
        return []

    def read_bytes(self) -> int:
        """About how much is read in place now."""
        return 0

    def leave_to_readers(self, num_bytes: int) -> None:
        """No more than that is to be read in place."""


class Entry:
    """One object in the arena, as this process knows it. Compared by identity."""

    __slots__ = (
        "clean",
        "expiry_ns",
        "generation",
        "key",
        "num_bytes",
        "pins",
        "places",
        "root",
        "slot",
        "start",
        "state",
        "units",
        "uses",
        "value_bytes",
        "verified",
        "version",
    )

    def __init__(
        self,
        key: bytes,
        places: Layout,
        value_bytes: int,
        expiry_ns: int,
        slot: int,
        generation: int,
        start: int,
        root: int = 0,
    ) -> None:
        self.key = key
        self.places = places
        self.value_bytes = value_bytes
        self.expiry_ns = expiry_ns
        self.root = root
        """Place of its root (`placement.root_place`); 0: it has none."""
        self.slot = slot
        self.generation = generation
        self.start = start
        self.units = places.record_bytes // GRANULE
        self.num_bytes = self.units * GRANULE
        """Of the arena that it takes."""
        self.version = 0
        self.state = State.FREE
        """FREE: being filled, and not found."""
        self.pins = 0
        """Users of its bytes: they stay in place."""
        self.verified = False
        """Whether the value's checksums were checked since the arena was opened."""
        self.clean = False
        """Whether a lower tier has it too."""
        self.uses = 0
        """For the tiering policy."""

    @property
    def stamp(self) -> int:
        """The stamp that its slot has while it can be found."""
        return self.generation << 2 | State.COMMITTED


class Arena:
    """Finds, fills and gives up objects. Not thread-safe; never waits, never copies values.

    Raises `InvariantError` when the memory has no head: whoever makes the file writes that. Opening it takes in all
    that was committed, O(slots), and drops what is damaged.

    Invariants (`audit`): the index finds exactly the committed entries, one per key; what is being filled or dead but
    pinned is not found; extents of all three are what the allocator has given out; slots' words agree with entries.
    """

    def __init__(self, memory: ArenaMemory) -> None:
        head = unpack_arena_head(memory.view[:PAGE])
        if head is None:
            raise InvariantError("an arena was opened without its head")
        self.memory = memory
        self.shape: ArenaShape = head[0]
        self.incarnation: bytes = head[1]
        self._index: dict[bytes, Entry] = {}
        self._by_start: dict[int, Entry] = {}
        """All that takes room, found or not."""
        self._by_slot: dict[int, Entry] = {}
        """The same."""
        self._read: set[Entry] = set()
        """Pinned once because others read them without having asked, when that was last looked at."""
        self._generations = array("Q")
        """Of each slot."""
        self._version = 0
        self.damaged = 0
        """Slots that were dropped at opening because they or their records were damaged."""
        self._recover()

    # --- reading

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity_bytes(self) -> int:
        """Bytes for records."""
        return self.shape.num_granules * GRANULE

    @property
    def used_bytes(self) -> int:
        """Bytes of records, those being filled too."""
        return self._allocator.used_units * GRANULE

    def find(self, key: bytes) -> Entry | None:
        """The object called `key`, expired or not. O(1)."""
        return self._index.get(key)

    def entries(self) -> list[Entry]:
        """All that can be found."""
        return list(self._index.values())

    def value_offset(self, entry: Entry) -> int:
        """Where its value lies in the arena's file."""
        return self.shape.data_at + entry.start * GRANULE + entry.places.value

    def value(self, entry: Entry) -> memoryview:
        """Its value's memory. Pin the entry while it is used."""
        at = self.value_offset(entry)
        return self.memory.view[at : at + entry.value_bytes]

    def record(self, entry: Entry) -> memoryview:
        """Its whole record's memory."""
        at = self.shape.data_at + entry.start * GRANULE
        return self.memory.view[at : at + entry.num_bytes]

    def sums(self, entry: Entry, first: int = 0, count: int | None = None) -> bytes:
        """Packed checksums of `count` chunks (default: all) from `first` on."""
        packed = self.record(entry)[entry.places.sums : entry.places.value]
        last = num_chunks(entry.value_bytes) if count is None else first + count
        return bytes(packed[8 * first : 8 * last])

    # --- changes

    def fits(self, key: bytes, value_bytes: int) -> bool:
        """Whether such an object could ever be taken."""
        return layout(len(key), value_bytes).record_bytes <= self.capacity_bytes

    def begin(self, key: bytes, value_bytes: int, expiry_ns: int = 0, root: int = 0) -> Entry | None:
        """Room for an object, pinned once for its writer; `None` when there is no room or no slot."""
        return self._begin(key, layout(len(key), value_bytes), value_bytes, expiry_ns, root)

    def begin_record(self, key: bytes, record_bytes: int) -> Entry | None:
        """Room for a whole record, in granules, that a lower tier will fill in; for `commit_record`."""
        return self._begin(key, Layout(0, 0, record_bytes), 0, 0)

    def _begin(self, key: bytes, places: Layout, value_bytes: int, expiry_ns: int, root: int = 0) -> Entry | None:
        if not self._free_slots:
            return None
        start = self._allocator.allocate(places.record_bytes // GRANULE)
        if start is None:
            return None
        slot = self._free_slots.pop()
        entry = Entry(key, places, value_bytes, expiry_ns, slot, self._generations[slot], start, root)
        entry.pins = 1
        self._by_start[start] = self._by_slot[slot] = entry
        return entry

    def commit(self, entry: Entry, sums: Sequence[int]) -> Entry | None:
        """From now on `entry`, whose value is in place, is found. Returns what it replaces, already dead."""
        self._version += 1
        entry.verified = True
        entry.version, entry.state = self._version, State.COMMITTED
        self.memory.publish(entry, pack_sums(sums), self.shape.data_at + entry.start * GRANULE)
        return self._found(entry)

    def commit_record(self, entry: Entry, record: Record) -> Entry | None:
        """Like `commit`, for a whole record that a lower tier has filled in: of this key, and as long as the room."""
        entry.places, entry.value_bytes, entry.expiry_ns = record.places, record.value_bytes, record.expiry_ns
        entry.root = record.root
        self._version = max(self._version, record.version)
        entry.verified = entry.clean = True
        entry.version, entry.state = record.version, State.COMMITTED
        self.memory.publish_slot(entry, record.checksum)
        return self._found(entry)

    def abort(self, entry: Entry) -> None:
        """Give up an entry that is being filled; its writer's pin with it."""
        entry.pins -= 1
        entry.state = State.DEAD
        self._release(entry)

    def kill(self, entry: Entry) -> None:
        """`entry` is not found any more; its room is free once nobody has it pinned."""
        if entry.state is not State.COMMITTED:
            return
        if self._index.get(entry.key) is entry:
            del self._index[entry.key]
        entry.state = State.DEAD
        is_read = self.memory.retire(entry)
        if not entry.pins:
            self._free(entry, is_read=is_read)

    def was_checked(self, entry: Entry) -> None:
        """The value of an entry that an earlier process has left is whole."""
        entry.verified = True
        if entry.state is State.COMMITTED:
            self.memory.show(entry.slot, entry.key)

    def look_for_readers(self) -> None:
        """Pin what others read without having asked, and nothing else for them."""
        now = {entry for slot in self.memory.read() if (entry := self._by_slot.get(slot)) is not None}
        for entry in now - self._read:
            entry.pins += 1
        over, self._read = self._read - now, now
        for entry in over:
            self.unpin(entry)

    @property
    def has_readers(self) -> bool:
        """Whether something is pinned for them."""
        return bool(self._read)

    def used_elsewhere(self) -> list[Entry]:
        """What others have used without having asked since this was last called."""
        return [entry for slot in self.memory.take_used() if (entry := self._by_slot.get(slot)) is not None]

    def pin(self, entry: Entry) -> None:
        """Keep its bytes in place."""
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Undo one `pin`."""
        entry.pins -= 1
        if entry.state is State.DEAD:
            self._release(entry)

    def clearing(self, entry: Entry, needed: int, may_go: Callable[[Entry], bool]) -> list[Entry] | None:
        """Which entries around `entry`, itself among them, to give up for `needed` contiguous bytes.

        `None` when those that `may_go` do not leave so much room. To the right first, then to the left.
        """
        allocator, chosen = self._allocator, [entry]
        left, right, wanted = entry.start, entry.start + entry.units, -(-needed // GRANULE)
        for rightwards in (True, False):
            while right - left < wanted:
                other = allocator.right_of(right) if rightwards else allocator.left_of(left)
                if other is None:
                    break
                if not allocator.is_free(other):
                    neighbour = self._by_start[other]
                    if not may_go(neighbour):
                        break
                    chosen.append(neighbour)
                if rightwards:
                    right = other + allocator.units_of(other)
                else:
                    left = other
        return chosen if right - left >= wanted else None

    def _found(self, entry: Entry) -> Entry | None:
        old = self._index.get(entry.key)
        if old is not None:
            self.kill(old)
        self._index[entry.key] = entry
        entry.pins -= 1
        return old

    def _release(self, entry: Entry) -> None:
        if not entry.pins and entry.state is State.DEAD:
            self._free(entry, is_read=self.memory.is_read(entry.slot))

    def _free(self, entry: Entry, *, is_read: bool) -> None:
        if is_read:  # by someone who found it before it was dead
            self._read.add(entry)
            entry.pins = 1
            return
        self._forget(entry.slot, entry.generation)
        del self._by_start[entry.start], self._by_slot[entry.slot]
        self._allocator.free(entry.start)
        self._free_slots.append(entry.slot)
        entry.state = State.FREE

    def _forget(self, slot: int, generation: int) -> None:
        self._generations[slot] = generation + 1
        self.memory.set_word(slot, 0, (generation + 1) << 2 | State.FREE)

    # --- opening

    def _recover(self) -> None:
        shape = self.shape
        table = np.frombuffer(self.memory.view[PAGE : PAGE + shape.num_slots * SLOT_BYTES], "<u8")
        table = table.reshape(shape.num_slots, SLOT_WORDS)
        states = table[:, 0] & 3
        self._generations = array("Q", (table[:, 0] >> 2).tobytes())
        taken = np.flatnonzero(states == State.COMMITTED)
        taken = taken[np.argsort(table[taken, 1], kind="stable")]
        end = 0
        for slot in taken.tolist():
            words = tuple(table[slot].tolist())
            entry = self._load(slot, words) if words[1] >= end else None
            if entry is None:
                self.damaged += 1
                self._forget(slot, words[0] >> 2)
                continue
            rival = self._index.get(entry.key)
            if rival is not None and rival.version > entry.version:
                self._forget(slot, entry.generation)
                continue
            if rival is not None:
                self._forget(rival.slot, rival.generation)
                del self._by_start[rival.start], self._by_slot[rival.slot]
            self._index[entry.key] = self._by_start[entry.start] = self._by_slot[slot] = entry
            self._version = max(self._version, entry.version)
            end = entry.start + entry.units
        for slot in np.flatnonzero((states != State.COMMITTED) & (states != State.FREE)).tolist():
            self._forget(slot, int(table[slot, 0]) >> 2)
        used = {entry.slot for entry in self._index.values()}
        self._free_slots = [slot for slot in range(shape.num_slots - 1, -1, -1) if slot not in used]
        extents = sorted((entry.start, entry.units) for entry in self._index.values())
        self._allocator = Allocator.rebuilt(shape.num_granules, extents)

    def _load(self, slot: int, words: Words) -> Entry | None:
        stamp, start, units, key_bytes, value_bytes, version, checksum, own = words
        if own != slot_checksum(words[1:7]) or start + units > self.shape.num_granules:
            return None
        at = self.shape.data_at + start * GRANULE
        record = unpack_record(self.memory.view[at : at + units * GRANULE])
        if record is None or (len(record.key), record.value_bytes) != (key_bytes, value_bytes):
            return None
        if record.checksum != checksum or record.version != version:
            return None
        entry = Entry(record.key, record.places, value_bytes, record.expiry_ns, slot, stamp >> 2, start, record.root)
        entry.version, entry.state = version, State.COMMITTED
        return entry

    def audit(self) -> list[str]:
        """All discrepancies between index, extents, slots and memory. O(slots)."""
        faults = self._allocator.audit()
        shape = self.shape
        extents = {entry.start: entry.units for entry in self._by_start.values()}
        if any(start != entry.start for start, entry in self._by_start.items()):
            faults.append("an entry is kept under another extent's start")
        if sum(extents.values()) != self._allocator.used_units or any(
            self._allocator.is_free(start) or self._allocator.units_of(start) != units
            for start, units in extents.items()
        ):
            faults.append("extents of entries are not those given out")
        slots = [entry.slot for entry in self._by_start.values()] + self._free_slots
        if self._by_slot != {entry.slot: entry for entry in self._by_start.values()}:
            faults.append("entries by slot are not those by start")
        shown = self.memory.shown()
        if shown is not None and sorted(shown) != sorted(e.slot for e in self._index.values() if e.verified):
            faults.append("others find another set of objects")
        if any(not entry.pins for entry in self._read):
            faults.append("what others read is not pinned")
        if sorted(slots) != list(range(shape.num_slots)):
            faults.append("slots are lost or used twice")
        for entry in self._by_start.values():
            found = self._index.get(entry.key) is entry
            if found != (entry.state is State.COMMITTED) or (not found and not entry.pins):
                faults.append(f"slot {entry.slot} is {entry.state.name}, pinned {entry.pins}, found {found}")
            stamp = self.memory.stamp(entry.slot)
            if entry.state is not State.FREE and stamp != entry.generation << 2 | entry.state:
                faults.append(f"slot {entry.slot} has stamp {stamp}")
            if found:
                record = unpack_record(self.record(entry))
                if record is None or record.key != entry.key or record.version != entry.version:
                    faults.append(f"slot {entry.slot} has a damaged record")
        if len(self._index) != sum(entry.state is State.COMMITTED for entry in self._by_start.values()):
            faults.append("the index finds what takes no room")
        for slot in self._free_slots:
            if self.memory.stamp(slot) & 3 != State.FREE:
                faults.append(f"free slot {slot} has stamp {self.memory.stamp(slot)}")
        return faults
