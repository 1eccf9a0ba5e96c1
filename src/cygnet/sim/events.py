"""The event loop: what happens next, and in which order things happen at the same instant."""

import heapq
from collections.abc import Callable
from enum import IntEnum

from cygnet.base.errors import InvariantError


class Priority(IntEnum):
    """Order at one instant, which is a live engine's: a step's end is applied, then it is taken in what has come, then
    the next step is decided. Of what comes at once, new sessions are before turns of old ones, and these before answers
    of the store, and faults."""

    STEP_END = 0
    SESSION = 1
    TURN = 2
    STORE = 3
    FAULT = 4
    STEP_START = 5


Action = Callable[[int], None]
"""What to do, given the time."""


class EventLoop:
    """Events in the order of `(time, priority, seq)`; `seq` counts what was scheduled, so equal keys keep their order.

    Times are integer nanoseconds. Invariant: `now_ns` never goes back.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.num_events = 0
        self._heap: list[tuple[int, int, int, Action]] = []
        self._seq = 0

    def at(self, time_ns: int, priority: Priority, action: Action) -> None:
        """Schedule `action`. A time that has passed is an `InvariantError`."""
        if time_ns < self.now_ns:
            raise InvariantError(f"event at {time_ns} ns scheduled at {self.now_ns} ns")
        heapq.heappush(self._heap, (time_ns, priority, self._seq, action))
        self._seq += 1

    def run(self) -> None:
        """Run until nothing is left."""
        heap = self._heap
        while heap:
            self.now_ns, _, _, action = heapq.heappop(heap)
            self.num_events += 1
            action(self.now_ns)
