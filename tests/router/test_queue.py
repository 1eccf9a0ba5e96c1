"""The admission queue: order, ageing, bounds; against a list that is sorted anew."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cygnet.router.queue import AdmissionQueue

S = 1_000_000_000


def queue(max_waiting: int = 100, max_wait_s: int = 60, ageing: int = 1000) -> AdmissionQueue:
    return AdmissionQueue(max_waiting, max_wait_s * S, ageing, priority_tokens=10_000)


def drain(waiting: AdmissionQueue) -> list[str]:
    order = []
    while first := waiting.next_ones(1):
        order.append(first[0].request_id)
        assert waiting.remove(first[0].request_id)
    return order


def test_fewest_uncached_first() -> None:
    waiting = queue()
    for name, tokens in (("long", 100_000), ("short", 100), ("middle", 5_000)):
        assert waiting.add(name, tokens, 0)
    assert drain(waiting) == ["short", "middle", "long"]


def test_ageing_makes_up_for_length() -> None:
    waiting = queue()
    waiting.add("long", 50_000, 0)
    waiting.add("soon", 100, 40 * S)
    waiting.add("late", 100, 55 * S)
    assert drain(waiting) == ["soon", "long", "late"]


def test_a_stream_of_short_work_starves_nobody() -> None:
    waiting = queue(ageing=2000)
    waiting.add("long", 100_000, 0)
    for second in range(1, 100):
        waiting.add(f"short-{second}", 1, second * S)
        (first,) = waiting.next_ones(1)
        waiting.remove(first.request_id)
        if first.request_id == "long":
            break
    assert second == 50


def test_who_is_late_goes_first_in_order_of_arrival() -> None:
    waiting = AdmissionQueue(100, 60 * S, 2000, 10_000, late_ns=30 * S)
    waiting.add("long", 900_000, 0)
    waiting.add("longer", 990_000, 0)
    waiting.add("middle", 200_000, 5 * S, priority=3)
    for second in range(40):
        waiting.add(f"short-{second}", 1, second * S)
    assert waiting.next_ones(1, 29 * S)[0].request_id == "short-0"
    first = [one.request_id for one in waiting.next_ones(4, 35 * S)]
    assert first == ["long", "longer", "short-0", "short-1"]
    for name in first:
        waiting.remove(name)
    for second in range(2, 6):
        waiting.remove(f"short-{second}")
    assert [one.request_id for one in waiting.next_ones(3, 35 * S)] == ["middle", "short-6", "short-7"]
    assert waiting.audit() == []


def test_priority_and_order_of_arrival() -> None:
    waiting = queue()
    waiting.add("b", 100, 0)
    waiting.add("c", 100, 0)
    waiting.add("urgent", 5_000, 0, priority=-1)
    assert drain(waiting) == ["urgent", "b", "c"]


def test_a_full_queue_says_so() -> None:
    waiting = queue(max_waiting=1)
    assert waiting.add("a", 1, 0)
    assert waiting.add("b", 1, 0) is None
    assert len(waiting) == 1
    with pytest.raises(ValueError, match="waits already"):
        waiting.add("a", 1, 0)


def test_who_waits_too_long_is_named() -> None:
    waiting = queue(max_wait_s=10)
    waiting.add("a", 1, 0)
    waiting.add("b", 1, 5 * S)
    assert waiting.overdue(10 * S - 1) == []
    assert [item.request_id for item in waiting.overdue(10 * S)] == ["a"]
    assert "a" not in waiting
    assert not waiting.remove("a")


class QueueMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.waiting = queue(max_waiting=12, max_wait_s=20)
        self.model: dict[str, tuple[float, int, int]] = {}  # id -> (order, number, arrival)
        self.now = 0
        self.count = 0

    @rule(tokens=st.integers(0, 10**6), priority=st.integers(-3, 3), again=st.booleans())
    def add(self, tokens: int, priority: int, again: bool) -> None:
        self.count += 1
        name = "again" if again and "again" not in self.model else f"r{self.count}"
        added = self.waiting.add(name, tokens, self.now, priority)
        assert (added is None) == (len(self.model) == 12)
        if added:
            self.model[name] = (tokens + priority * 10_000 + 1000 * self.now / S, self.count, self.now)

    @rule(by=st.integers(0, 8))
    def time_passes(self, by: int) -> None:
        self.now += by * S
        overdue = [item.request_id for item in self.waiting.overdue(self.now)]
        late = [name for name, entry in self.model.items() if self.now - entry[2] >= 20 * S]
        assert overdue == sorted(late, key=lambda name: (self.model[name][2], self.model[name][1]))
        for name in overdue:
            del self.model[name]

    @rule()
    def dispatch(self) -> None:
        first = [item.request_id for item in self.waiting.next_ones(3)]
        assert first == sorted(self.model, key=lambda name: self.model[name][:2])[:3]
        if first:
            assert self.waiting.remove(first[0])
            del self.model[first[0]]

    @rule(place=st.integers(0, 20))
    def give_up(self, place: int) -> None:
        if self.model:
            name = list(self.model)[place % len(self.model)]
            assert self.waiting.remove(name)
            del self.model[name]

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "waiting"):
            assert self.waiting.audit() == []
            assert len(self.waiting) == len(self.model)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, deadline=None)


def test_many_for_whom_there_is_no_room_hide_nobody() -> None:
    waiting = queue()
    for number in range(60):
        waiting.add(f"{number}", number, number)
    assert [one.request_id for one in waiting.to_try(60)] == [f"{number}" for number in range(60)]
    seen: set[str] = set()
    for _ in range(7):
        tried = [one.request_id for one in waiting.to_try(16)]
        assert tried[:8] == [f"{number}" for number in range(8)]
        assert len(set(tried)) == 16
        seen.update(tried)
    assert len(seen) == 60
    for name in list(seen)[:50]:
        waiting.remove(name)
    assert len(waiting.to_try(4)) == 4
    assert waiting.audit() == []


def test_heaps_stay_small_under_churn() -> None:
    waiting = queue()
    for turn in range(10_000):
        waiting.add(f"r{turn}", 10**6 + turn, 0)
        waiting.remove(f"r{turn}")
    assert len(waiting._by_order) < 200
    assert len(waiting._by_arrival) < 200
