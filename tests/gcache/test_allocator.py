"""Extents against a row of booleans."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cygnet.gcache.allocator import Allocator, class_of

UNITS = 200


class Extents(RuleBasedStateMachine):
    """The dumb model is a list: which unit belongs to which extent."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(UNITS)
        self.row: list[int | None] = [None] * UNITS
        self.extents: dict[int, int] = {}

    def longest(self) -> int:
        best = run = 0
        for owner in self.row:
            run = run + 1 if owner is None else 0
            best = max(best, run)
        return best

    @rule(units=st.integers(1, 60))
    def allocate(self, units: int) -> None:
        start = self.allocator.allocate(units)
        assert (start is not None) == (self.longest() >= units), "room is found if and only if it is there"
        if start is not None:
            assert self.row[start : start + units] == [None] * units
            self.row[start : start + units] = [start] * units
            self.extents[start] = units

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.extents)))
        units = self.extents.pop(start)
        self.row[start : start + units] = [None] * units
        first, length = self.allocator.free(start)
        assert first <= start < first + length
        assert self.row[first : first + length] == [None] * length

    @rule()
    def rebuild(self) -> None:
        self.allocator = Allocator.rebuilt(UNITS, sorted(self.extents.items()))

    @invariant()
    def agrees(self) -> None:
        assert self.allocator.audit() == []
        assert self.allocator.used_units == sum(self.extents.values())
        for start, units in self.extents.items():
            assert self.allocator.units_of(start) == units
            assert not self.allocator.is_free(start)
            right = self.allocator.right_of(start + units)
            assert right == (start + units if start + units < UNITS else None)
            assert (self.allocator.left_of(start) is None) == (start == 0)


TestExtents = Extents.TestCase


def test_classes_are_ordered_by_size() -> None:
    classes = [class_of(units) for units in range(1, 5000)]
    assert classes == sorted(classes)
    assert len(set(classes)) < 90


@pytest.mark.parametrize("fault", ["overlap", "class", "count"])
def test_the_audit_finds_faults(fault: str) -> None:
    allocator = Allocator(100)
    allocator.allocate(10)
    if fault == "overlap":
        allocator._used[0] = 11
    elif fault == "class":
        allocator._classes[class_of(90)].clear()
    else:
        allocator.used_units = 3
    assert allocator.audit()
