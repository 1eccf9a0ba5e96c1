"""Which objects leave memory: what is used stays, what passes by goes, what is cold is written down in time."""

from itertools import islice

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cygnet.gcache.arena import Entry
from cygnet.gcache.record import full_key, layout
from cygnet.gcache.tiering import Tiering

KIB = 1024


def entry(number: int, num_bytes: int = KIB) -> Entry:
    key = full_key(b"", number.to_bytes(4, "little"))
    return Entry(key, layout(len(key), num_bytes), num_bytes, 0, number, 0, 0)


class Memory:
    """As many objects as fit; what a server does with its decisions."""

    def __init__(self, num_objects: int, *, has_lower_tier: bool = False) -> None:
        self.room = num_objects
        self.tiering = Tiering(num_objects * entry(0).num_bytes, has_lower_tier=has_lower_tier)
        self.there: dict[int, Entry] = {}
        self.dropped_dirty = 0

    def use(self, number: int) -> bool:
        """Read it, or bring it in; whether it was there."""
        if number in self.there:
            self.tiering.use(self.there[number])
            return True
        if len(self.there) == self.room:
            victim = self.tiering.victim()
            assert victim is not None
            self.dropped_dirty += not victim.clean
            self.tiering.evicted(victim)
            del self.there[victim.slot]
        self.there[number] = entry(number)
        self.tiering.add(self.there[number])
        return False


def test_a_long_scan_does_not_push_out_what_is_used() -> None:
    memory = Memory(100)
    for _ in range(3):
        for hot in range(50):
            memory.use(hot)
    for cold in range(1000, 3000):
        memory.use(cold)
    assert sum(memory.use(hot) for hot in range(50)) == 50


def test_what_comes_back_soon_is_kept_the_second_time() -> None:
    """Having been let go too early, it is not treated as something that passes by."""
    memory = Memory(100)
    for number in range(220):
        memory.use(number)
    early = range(100, 110)
    assert not any(memory.use(number) for number in early)
    for cold in range(1000, 2000):
        memory.use(cold)
    assert all(memory.use(number) for number in early)


def test_what_is_no_longer_used_goes() -> None:
    """Uses count for a few rounds only."""
    memory = Memory(100)
    for _ in range(10):
        for old in range(90):
            memory.use(old)
    for _ in range(4):
        for new in range(1000, 1090):
            memory.use(new)
    assert sum(memory.use(new) for new in range(1000, 1090)) >= 85


def test_pinned_objects_are_passed_over() -> None:
    tiering = Tiering(1 << 20, has_lower_tier=False)
    entries = [entry(i) for i in range(10)]
    for one in entries:
        tiering.add(one)
        one.pins = 1
    assert tiering.victim() is None
    entries[7].pins = 0
    assert tiering.victim() is entries[7]
    assert list(tiering.victims()) == [entries[7]]


def test_clean_ones_go_before_dirty_ones() -> None:
    tiering = Tiering(1 << 20, has_lower_tier=True)
    entries = [entry(i) for i in range(10)]
    for one in entries:
        tiering.add(one)
    assert tiering.victim() is entries[0], "better a loss than no room"
    tiering.written_down(entries[4])
    assert tiering.victim() is entries[4]
    assert tiering.audit(entries) == []


def test_cold_objects_are_written_down_before_room_is_short() -> None:
    size = entry(0).num_bytes
    tiering = Tiering(100 * size, has_lower_tier=True)
    entries = [entry(i) for i in range(90)]
    for one in entries[:70]:
        tiering.add(one)
    assert tiering.to_write_down(30 * size, 1 << 30) == []
    for one in entries[70:]:
        tiering.add(one)
    chosen = tiering.to_write_down(10 * size, 1 << 30)
    assert chosen == entries[:15]
    assert tiering.to_write_down(10 * size, 3 * size) == entries[:3]
    assert tiering.to_write_down(10 * size, 1) == entries[:1]
    for one in chosen:
        tiering.written_down(one)
    assert tiering.to_write_down(10 * size, 1 << 30) == []
    assert tiering.all_dirty(1 << 30) == entries[15:]


def test_what_could_not_be_written_waits_behind_the_others() -> None:
    tiering = Tiering(1, has_lower_tier=True)
    entries = [entry(i) for i in range(3)]
    for one in entries:
        tiering.add(one)
    tiering.postpone(entries[0])
    assert tiering.all_dirty(1 << 30) == [entries[1], entries[2], entries[0]]


class Queues(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tiering = Tiering(50 * KIB, has_lower_tier=True, max_ghosts=5)
        self.there: list[Entry] = []

    @rule(number=st.integers(0, 20), size=st.integers(0, 5 * KIB), clean=st.booleans())
    def add(self, number: int, size: int, clean: bool) -> None:
        new = entry(number, size)
        if any(other.key == new.key for other in self.there):
            return
        new.clean = clean
        self.tiering.add(new)
        self.there.append(new)

    @precondition(lambda self: self.there)
    @rule(data=st.data(), what=st.sampled_from(("use", "remove", "pin", "unpin", "clean", "lose", "postpone")))
    def change(self, data: st.DataObject, what: str) -> None:
        chosen = data.draw(st.sampled_from(self.there))
        if what == "use":
            self.tiering.use(chosen)
        elif what == "remove":
            self.tiering.remove(chosen)
            self.there.remove(chosen)
        elif what == "pin":
            chosen.pins = 1
        elif what == "unpin":
            chosen.pins = 0
        elif what == "clean":
            self.tiering.written_down(chosen)
        elif what == "lose" and chosen.clean:
            self.tiering.lost_copy(chosen)
        else:
            self.tiering.postpone(chosen)

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        for victim in islice(self.tiering.victims(), count):
            assert not victim.pins
            self.tiering.evicted(victim)
            self.there.remove(victim)

    @rule()
    def all_that_may_go_is_offered(self) -> None:
        offered = list(self.tiering.victims())
        assert sorted(e.slot for e in offered) == sorted(e.slot for e in self.there if not e.pins)

    @invariant()
    def agrees(self) -> None:
        assert self.tiering.audit(self.there) == []


Queues.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestQueues = Queues.TestCase
