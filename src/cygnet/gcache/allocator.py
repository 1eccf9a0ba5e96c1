"""Extents of contiguous units. Pure; no memory is touched.

Free extents are kept in classes by size, eight per power of two, so that finding room and giving it back cost the same
however many extents there are. Neighbours that are free are always one extent.
"""

from collections.abc import Iterable
from functools import lru_cache

_SUB_BITS = 3
_TRIES = 4
"""Extents looked at in a request's own class, where not each is long enough."""


@lru_cache(maxsize=1 << 14)
def class_of(units: int) -> int:
    """The class that a free extent of `units` is kept in; classes are ordered by size."""
    if units < 1 << _SUB_BITS:
        return units
    top = units.bit_length() - 1
    return ((top - _SUB_BITS) << _SUB_BITS) + (units >> (top - _SUB_BITS))


class Allocator:
    """Gives out extents of `num_units` units.

    Invariants (`audit`): used and free extents cover all units and do not overlap; no two free ones are neighbours;
    each free one is in the class of its size.
    """

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self.used_units = 0
        self._used: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        """End -> start, of used and free extents."""
        self._classes: dict[int, dict[int, None]] = {}
        self._filled = 0
        """Bit c: class c is not empty."""
        if num_units:
            self._add_free(0, num_units)

    def allocate(self, units: int) -> int | None:
        """First unit of an extent of `units` >= 1; `None` when there is no such room, and nothing has changed."""
        start = self._find(units)
        if start is None:
            return None
        self._split(start, units)
        return start

    @classmethod
    def rebuilt(cls, num_units: int, extents: Iterable[tuple[int, int]]) -> "Allocator":
        """One in which exactly these (start, units) are used; they are in order, and do not overlap."""
        allocator = cls(0)
        allocator.num_units = num_units
        at = 0
        for start, units in extents:
            if start > at:
                allocator._add_free(at, start - at)
            allocator._take(start, units)
            at = start + units
        if at < num_units:
            allocator._add_free(at, num_units - at)
        return allocator

    def free(self, start: int) -> tuple[int, int]:
        """Give back the extent that begins at `start`; returns first unit and length of the free one it is now in."""
        units = self._used.pop(start)
        self.used_units -= units
        del self._by_end[start + units]
        left = self._by_end.get(start)
        if left is not None and left in self._free:
            units += start - left
            self._remove_free(left)
            start = left
        right = start + units
        if right in self._free:
            units += self._free[right]
            self._remove_free(right)
        self._add_free(start, units)
        return start, units

    def right_of(self, end: int) -> int | None:
        """Start of the extent, used or free, that begins at `end`; `None` at the end of all units."""
        return end if end in self._used or end in self._free else None

    def left_of(self, start: int) -> int | None:
        """Start of the extent, used or free, that ends at `start`; `None` at the beginning."""
        return self._by_end.get(start)

    def is_free(self, start: int) -> bool:
        """Whether a free extent begins at `start`."""
        return start in self._free

    def units_of(self, start: int) -> int:
        """Length of the extent, used or free, that begins at `start`."""
        units = self._used.get(start)
        return self._free[start] if units is None else units

    def _find(self, units: int) -> int | None:
        own = class_of(units)
        for tries, start in enumerate(self._classes.get(own, ())):
            if self._free[start] >= units:
                return start
            if tries + 1 == _TRIES:
                break
        larger = self._filled >> (own + 1)
        if larger:
            lowest = own + 1 + (larger & -larger).bit_length() - 1
            return next(iter(self._classes[lowest]))
        # Rather search the own class to its end than refuse what would fit.
        return next((start for start in self._classes.get(own, ()) if self._free[start] >= units), None)

    def _split(self, start: int, units: int) -> None:
        length = self._free[start]
        self._remove_free(start)
        if units < length:
            self._add_free(start + units, length - units)
        self._take(start, units)

    def _take(self, start: int, units: int) -> None:
        self._used[start] = units
        self._by_end[start + units] = start
        self.used_units += units

    def _add_free(self, start: int, units: int) -> None:
        self._free[start] = units
        self._by_end[start + units] = start
        number = class_of(units)
        self._classes.setdefault(number, {})[start] = None
        self._filled |= 1 << number

    def _remove_free(self, start: int) -> None:
        units = self._free.pop(start)
        del self._by_end[start + units]
        number = class_of(units)
        members = self._classes[number]
        del members[start]
        if not members:
            del self._classes[number]
            self._filled &= ~(1 << number)

    def audit(self) -> list[str]:
        """All discrepancies. O(extents log extents)."""
        faults, at, after_free, used = [], 0, False, 0
        extents = [(start, units, True) for start, units in self._used.items()]
        extents += [(start, units, False) for start, units in self._free.items()]
        for start, units, taken in sorted(extents):
            if start != at:
                faults.append(f"extent at {start}, the one before ends at {at}")
            if not taken and after_free:
                faults.append(f"two free extents meet at {start}")
            if self._by_end.get(start + units) != start:
                faults.append(f"the extent at {start} is not found by its end")
            if not taken and start not in self._classes.get(class_of(units), {}):
                faults.append(f"the free extent at {start} is not in its class")
            at, after_free, used = start + units, not taken, used + units * taken
        if at != self.num_units:
            faults.append(f"extents end at {at} of {self.num_units}")
        if used != self.used_units:
            faults.append(f"{used} units are used, {self.used_units} counted")
        if sum(map(len, self._classes.values())) != len(self._free):
            faults.append("classes and free extents differ in number")
        if self._filled != sum(1 << number for number in self._classes):
            faults.append("the bits of filled classes are wrong")
        return faults
