"""The arena against a dict, and against a crash between any two of its writes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cygnet.base.errors import InvariantError
from cygnet.gcache.arena import Arena, ArenaMemory, Entry
from cygnet.gcache.record import (
    GRANULE,
    PAGE,
    SLOT_WORDS,
    arena_shape,
    checksums,
    full_key,
    pack_arena_head,
    unpack_record,
    value_is_whole,
)

SHAPE = arena_shape(1 << 20, 1 << 16)
NAMES = [full_key(b"n", bytes((65 + i,))) for i in range(6)]
Write = tuple[str, tuple[int, ...], bytes]


class Recorder(ArenaMemory):
    """Memory that remembers its changes, so that a crash after each of them can be looked at."""

    def __init__(self, data: bytearray) -> None:
        super().__init__(memoryview(data))
        self.data = data
        self.before = bytes(data)
        self.log: list[Callable[[ArenaMemory], None]] = []

    def write(self, offset: int, data: bytes) -> None:
        super().write(offset, data)
        # A copy is no atom: it may have got anywhere.
        half = len(data) // 2
        self.log.append(lambda memory: ArenaMemory.write(memory, offset, data[:half]))
        self.log.append(lambda memory: ArenaMemory.write(memory, offset, data))

    def set_word(self, slot: int, word: int, value: int) -> None:
        super().set_word(slot, word, value)
        self.log.append(lambda memory: ArenaMemory.set_word(memory, slot, word, value))

    def take(self) -> list[bytes]:
        """The memory after each change since the last call, and begin anew."""
        memory = ArenaMemory(memoryview(bytearray(self.before)))
        images = []
        for change in self.log:
            change(memory)
            images.append(bytes(memory.view))
        self.before, self.log = bytes(self.data), []
        return images


def fresh() -> bytearray:
    data = bytearray(SHAPE.file_bytes)
    head = pack_arena_head(SHAPE, b"i" * 16)
    data[: len(head)] = head
    return data


def put(arena: Arena, key: bytes, value: bytes) -> Entry | None:
    """Put an object, as the server does; returns its entry."""
    entry = arena.begin(key, len(value))
    if entry is not None:
        arena.memory.write(arena.value_offset(entry), value)
        arena.commit(entry, checksums(key, value))
    return entry


def values(arena: Arena) -> dict[bytes, bytes]:
    """All that is found, each checked against its checksums."""
    found = {}
    for entry in arena.entries():
        value = bytes(arena.value(entry))
        record = unpack_record(arena.record(entry))
        assert record is not None
        assert value_is_whole(entry.key, value, record.sums), "committed, but torn"
        assert arena.sums(entry) == record.sums
        found[entry.key] = value
    return found


@dataclass
class Reading:
    """Someone who uses a value without a copy."""

    entry: Entry
    value: bytes
    stamps: set[int] = field(default_factory=set)


class ArenaMachine(RuleBasedStateMachine):
    """The dumb model is a dict of what is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Recorder(fresh())
        self.arena = Arena(self.memory)
        self.model: dict[bytes, bytes] = {}
        self.readings: list[Reading] = []
        self.filling: list[Entry] = []
        self.counter = 0

    def crashes(self, allowed: list[dict[bytes, bytes]]) -> None:
        """Wherever it stops, what is found afterwards is one of `allowed`."""
        for image in self.memory.take():
            arena = Arena(ArenaMemory(memoryview(bytearray(image))))
            assert values(arena) in allowed
            assert arena.audit() == []

    @rule(key=st.sampled_from(NAMES), size=st.sampled_from((0, 1, 700, 40_000, 200_000, 450_000)))
    def put(self, key: bytes, size: int) -> None:
        self.counter += 1
        value = (self.counter.to_bytes(8, "little") * (size // 8 + 1))[:size]
        before = dict(self.model)
        if put(self.arena, key, value) is not None:
            self.model[key] = value
        self.crashes([before, self.model])

    @rule(key=st.sampled_from(NAMES))
    def kill(self, key: bytes) -> None:
        before = dict(self.model)
        entry = self.arena.find(key)
        if entry is not None:
            self.arena.kill(entry)
            self.arena.kill(entry)
            del self.model[key]
        self.crashes([before, self.model])

    @rule(key=st.sampled_from(NAMES), size=st.sampled_from((10, 100_000)))
    def begin(self, key: bytes, size: int) -> None:
        entry = self.arena.begin(key, size)
        if entry is not None:
            self.memory.write(self.arena.value_offset(entry), b"?" * size)
            self.filling.append(entry)

    @precondition(lambda self: self.filling)
    @rule(commit=st.booleans())
    def end(self, commit: bool) -> None:
        entry = self.filling.pop()
        before = dict(self.model)
        if commit:
            value = b"?" * entry.value_bytes
            self.arena.commit(entry, checksums(entry.key, value))
            self.model[entry.key] = value
        else:
            self.arena.abort(entry)
        self.crashes([before, self.model])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def down_and_up(self, data: st.DataObject) -> None:
        """A record that left memory comes back as it was."""
        key = data.draw(st.sampled_from(sorted(self.model)))
        entry = self.arena.find(key)
        assert entry is not None
        raw, version = bytes(self.arena.record(entry)), entry.version
        self.arena.kill(entry)
        back = self.arena.begin_record(key, len(raw))
        if back is None:  # readers keep the old one in place
            del self.model[key]
            self.memory.take()
            return
        self.memory.write(SHAPE.data_at + back.start * GRANULE, raw)
        record = unpack_record(self.arena.record(back))
        assert record is not None
        self.arena.commit_record(back, record)
        assert back.version == version
        gone = {other: value for other, value in self.model.items() if other != key}
        self.crashes([self.model, gone])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        entry = self.arena.find(key)
        assert entry is not None
        self.arena.pin(entry)
        self.readings.append(Reading(entry, self.model[key]))

    @precondition(lambda self: self.readings)
    @rule()
    def done(self) -> None:
        reading = self.readings.pop(0)
        assert bytes(self.arena.value(reading.entry)) == reading.value, "changed while it was read"
        assert self.memory.stamp(reading.entry.slot) >> 2 == reading.entry.generation
        self.arena.unpin(reading.entry)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), needed=st.sampled_from((5000, 300_000, 900_000)))
    def clear_room(self, data: st.DataObject, needed: int) -> None:
        """What `clearing` names is enough, and it names nothing that may not go."""
        entry = self.arena.find(data.draw(st.sampled_from(sorted(self.model))))
        assert entry is not None
        if entry.pins:
            return
        chosen = self.arena.clearing(entry, needed, lambda e: not e.pins)
        if chosen is None:
            return
        assert entry in chosen
        assert len(chosen) == len(set(chosen))
        for victim in chosen:
            assert not victim.pins
            self.arena.kill(victim)
            del self.model[victim.key]
        again = self.arena.begin(NAMES[0], needed - 600)
        assert again is not None
        self.arena.abort(again)
        self.memory.take()

    @rule()
    def restart(self) -> None:
        """Readers and writers of the old process are gone."""
        self.readings.clear()
        self.filling.clear()
        self.memory = Recorder(self.memory.data)
        self.arena = Arena(self.memory)
        assert self.arena.damaged == 0

    @invariant()
    def agrees(self) -> None:
        assert values(self.arena) == self.model
        assert self.arena.audit() == []
        if not self.readings and not self.filling:
            needed = sum(self.arena.find(key).num_bytes for key in self.model)  # type: ignore[union-attr]
            assert self.arena.used_bytes == needed


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestArena = ArenaMachine.TestCase


def test_a_view_tells_that_its_memory_was_reused() -> None:
    """The stamp that a reader was given is never seen again once the bytes may change."""
    memory = ArenaMemory(memoryview(fresh()))
    arena = Arena(memory)
    stamps: set[tuple[int, int]] = set()
    for i in range(50):
        entry = put(arena, NAMES[0], bytes((i,)) * 100)
        assert entry is not None
        assert memory.stamp(entry.slot) == entry.stamp
        assert (entry.slot, entry.stamp) not in stamps
        stamps.add((entry.slot, entry.stamp))
    assert entry is not None
    arena.pin(entry)
    arena.kill(entry)
    assert memory.stamp(entry.slot) >> 2 == entry.generation, "dead, but in place for its readers"
    arena.unpin(entry)
    assert memory.stamp(entry.slot) >> 2 != entry.generation, "its memory may be given to another from here on"


def test_no_room_and_no_slot_change_nothing() -> None:
    arena = Arena(ArenaMemory(memoryview(fresh())))
    assert not arena.fits(NAMES[0], 1 << 20)
    assert arena.begin(NAMES[0], 1 << 20) is None
    keys = [full_key(b"", i.to_bytes(2, "little")) for i in range(SHAPE.num_slots + 1)]
    entries = [put(arena, key, b"x") for key in keys]
    assert entries[-1] is None
    assert None not in entries[:-1]
    assert arena.audit() == []


def test_damage_costs_the_damaged_object_only() -> None:
    for where in ("slot", "record", "overlap"):
        data = fresh()
        arena = Arena(ArenaMemory(memoryview(data)))
        first, second = put(arena, NAMES[0], b"a" * 2000), put(arena, NAMES[1], b"b" * 2000)
        assert first is not None
        assert second is not None
        if where == "slot":
            data[PAGE + first.slot * 8 * SLOT_WORDS + 8] ^= 1
        elif where == "record":
            data[SHAPE.data_at + first.start * GRANULE + 5] ^= 1
        else:  # a slot that names another one's record
            slots = memoryview(data)[PAGE:].cast("Q")
            for word in range(1, 8):
                slots[first.slot * SLOT_WORDS + word] = slots[second.slot * SLOT_WORDS + word]
        again = Arena(ArenaMemory(memoryview(data)))
        assert again.damaged == 1
        assert values(again) == {NAMES[1]: b"b" * 2000}
        assert again.audit() == []


def test_memory_without_a_head_is_a_bug() -> None:
    with pytest.raises(InvariantError):
        Arena(ArenaMemory(memoryview(bytearray(SHAPE.file_bytes))))


def test_the_audit_finds_faults() -> None:
    for fault in ("stamp", "pins", "index"):
        memory = ArenaMemory(memoryview(fresh()))
        arena = Arena(memory)
        entry = put(arena, NAMES[0], b"a" * 100)
        assert entry is not None
        if fault == "stamp":
            memory.set_word(entry.slot, 0, 0)
        elif fault == "pins":
            del arena._index[entry.key]
        else:
            arena._free_slots.append(entry.slot)
        assert arena.audit()
