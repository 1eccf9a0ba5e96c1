"""What was removed or replaced while objects move, so that a copy of it that lands late is told from one in time. Pure.

An object that moves is sent by its old owner, and anything may happen to it on the way: the new owner may be frozen, or
the network hold the bytes back, until the old one has given the push up and somebody has deleted the object, or put a
newer one that was evicted since. Landing then, the push would bring back what is gone. So a mover asks for a *ticket*
first, while it holds the object, and the push carries it. Whoever deletes or replaces does so with the old owner first,
hence after the ticket was given; the new owner notes it under a higher number, and the push is turned away.

Only so much is noted. A ticket older than what has been forgotten is turned away too, whatever it is for: the mover
asks for another and tries again.
"""

import os
from collections import OrderedDict

from xxhash import xxh3_64_intdigest

MOST_NOTED = 1 << 16


class Changes:
    """Notes of one server. With its lock.

    Invariants (`audit`): notes are of numbers above `_floor` and up to `_now`, each another, the oldest first; there
    are at most `most`, and none while no ticket is valid.
    """

    def __init__(self, most: int = MOST_NOTED) -> None:
        self._most = most
        # Another process's tickets are not this one's.
        self._now = self._floor = int.from_bytes(os.urandom(7), "little") | 1
        self._noted: OrderedDict[int, int] = OrderedDict()
        """Hash of a key -> number of its last change. A hash that two keys share costs a push one more try."""
        self.armed = False
        """Whether a ticket may be valid; otherwise nothing need be noted."""

    def ticket(self) -> int:
        """Leave to land what nobody changes from now on."""
        if not self.armed:
            self.armed = True
            self._now += 1
            self._floor = self._now
        return self._now

    def note(self, key: bytes) -> None:
        """An object was put or removed. O(1)."""
        if not self.armed:
            return
        self._now += 1
        name = xxh3_64_intdigest(key)
        self._noted[name] = self._now
        self._noted.move_to_end(name)
        if len(self._noted) > self._most:
            _, self._floor = self._noted.popitem(last=False)

    def note_all(self) -> None:
        """All objects were removed, or those of a namespace: every ticket given so far is void."""
        if self.armed:
            self._now += 1
            self._floor = self._now
            self._noted.clear()

    def disarm(self) -> None:
        """Nothing moves any more: every ticket is void, and nothing is noted until the next is given."""
        self.armed = False
        self._noted.clear()

    def allows(self, key: bytes, ticket: int) -> bool:
        """Whether what was sent with that ticket may land."""
        if not self.armed or not self._floor <= ticket <= self._now:
            return False
        return self._noted.get(xxh3_64_intdigest(key), 0) <= ticket

    def audit(self) -> list[str]:
        """All discrepancies."""
        faults = []
        numbers = list(self._noted.values())
        if numbers != sorted(set(numbers)):
            faults.append("changes are noted out of order")
        if numbers and not self._floor < numbers[0] <= numbers[-1] <= self._now:
            faults.append(f"changes {numbers[0]} to {numbers[-1]} are noted, beyond {self._floor} to {self._now}")
        if len(numbers) > self._most or (numbers and not self.armed):
            faults.append(f"{len(numbers)} changes are noted, at most {self._most if self.armed else 0}")
        return faults
