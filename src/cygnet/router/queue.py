"""Requests that wait because every worker is at its budget: fewest uncached tokens first, with ageing."""

from bisect import bisect_right
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest

NS_PER_S = 1_000_000_000
NEVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Waiting:
    """A place in the queue. `order` is static: priorities of all that wait fall at the same rate, so none is ever
    re-keyed.
    """

    request_id: str
    uncached_tokens: int
    arrived_ns: int
    order: float


class AdmissionQueue:
    """Who is dispatched next, and who has waited too long. Bounded.

    The order is `uncached tokens + priority * priority_tokens + ageing_tokens_per_s * arrival`, least first: a second
    of waiting makes up for that many tokens, so everyone is overtaken by finitely many.

    Those that have waited `late_ns` go before all others, in the order of their arrival: the wait of a long prompt is
    bounded whatever comes after it.

    Invariants (`audit`): at most `max_waiting` wait; a request is there once; every one of them is in both heaps.
    """

    def __init__(
        self,
        max_waiting: int,
        max_wait_ns: int,
        ageing_tokens_per_s: int,
        priority_tokens: int,
        late_ns: int = NEVER_NS,
    ) -> None:
        self.max_waiting = max_waiting
        self.max_wait_ns = max_wait_ns
        self.late_ns = late_ns
        self._ageing = ageing_tokens_per_s
        self._priority_tokens = priority_tokens
        self._waiting: dict[str, Waiting] = {}
        self._by_order: list[tuple[float, int, str]] = []
        self._by_arrival: list[tuple[int, int, str]] = []
        self._added: dict[str, int] = {}
        self._count = 0
        self._turn = 0
        """Number of arrival of the last request that was tried out of order."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def add(self, request_id: str, uncached_tokens: int, arrived_ns: int, priority: int = 0) -> Waiting | None:
        """Enqueue; `None` when the queue is full. A lower `priority` number goes earlier. O(log n)."""
        if request_id in self._waiting:
            raise ValueError(f"request {request_id} waits already")
        if len(self._waiting) >= self.max_waiting:
            return None
        order = uncached_tokens + priority * self._priority_tokens + self._ageing * arrived_ns / NS_PER_S
        waiting = Waiting(request_id, uncached_tokens, arrived_ns, order)
        self._waiting[request_id] = waiting
        self._count += 1
        self._added[request_id] = self._count
        heappush(self._by_order, (order, self._count, request_id))
        heappush(self._by_arrival, (arrived_ns, self._count, request_id))
        return waiting

    def _is_current(self, request_id: str, count: int) -> bool:
        return self._added.get(request_id) == count

    def is_late(self, waiting: Waiting, now: int) -> bool:
        """Whether it has waited so long that it goes first."""
        return now - waiting.arrived_ns >= self.late_ns

    def next_ones(self, limit: int, now: int = 0) -> list[Waiting]:
        """Who is next, up to `limit` of them in order; they stay in the queue. O(n)."""
        late = [] if now < self.late_ns else [w for w in self._waiting.values() if self.is_late(w, now)]
        if late:
            late = nsmallest(limit, late, key=lambda waiting: (waiting.arrived_ns, self._added[waiting.request_id]))
            limit -= len(late)
        names = {waiting.request_id for waiting in late}
        current = (e for e in self._by_order if e[2] not in names and self._is_current(e[2], e[1]))
        return late + [self._waiting[request_id] for _, _, request_id in nsmallest(limit, current)]

    def to_try(self, limit: int, now: int = 0) -> list[Waiting]:
        """Who is tried for a place, up to `limit`: for half of them those that are next, then the others in turn.

        There may be room for one and not for another (length buckets, the holder of a prefix), so many for whom there
        is none must not hide those for whom there is. O(n).
        """
        if len(self._waiting) <= limit:
            return self.next_ones(limit, now)
        head = self.next_ones(limit - limit // 2, now)
        names = {waiting.request_id for waiting in head}
        others = [request_id for request_id in self._waiting if request_id not in names]  # in order of arrival
        start = bisect_right(others, self._turn, key=self._added.__getitem__)
        some = (others[start:] + others[:start])[: limit // 2]
        if some:
            self._turn = self._added[some[-1]]
        return head + [self._waiting[request_id] for request_id in some]

    def remove(self, request_id: str) -> bool:
        """Take out: dispatched or given up. `False` if it does not wait. O(1); its heap entries go later."""
        if self._waiting.pop(request_id, None) is None:
            return False
        del self._added[request_id]
        if len(self._by_order) > 2 * len(self._waiting) + 64:
            self._by_order = [entry for entry in self._by_order if self._is_current(entry[2], entry[1])]
            heapify(self._by_order)
        if len(self._by_arrival) > 2 * len(self._waiting) + 64:
            self._by_arrival = [entry for entry in self._by_arrival if self._is_current(entry[2], entry[1])]
            heapify(self._by_arrival)
        return True

    def overdue(self, now: int) -> list[Waiting]:
        """Take out all that have waited `max_wait_ns`, oldest first."""
        found = []
        while self._by_arrival:
            arrived, count, request_id = self._by_arrival[0]
            if not self._is_current(request_id, count):
                heappop(self._by_arrival)
            elif now - arrived >= self.max_wait_ns:
                found.append(self._waiting[request_id])
                self.remove(request_id)
            else:
                break
        return found

    def audit(self) -> list[str]:
        """Discrepancies, recomputed from scratch."""
        found = []
        if len(self._waiting) > self.max_waiting:
            found.append(f"{len(self._waiting)} wait, at most {self.max_waiting}")
        for name, ids in (("order", self._by_order), ("arrival", self._by_arrival)):
            current = sorted(entry[2] for entry in ids if self._is_current(entry[2], entry[1]))
            if current != sorted(self._waiting):
                found.append(f"heap by {name} holds {current}, waiting are {sorted(self._waiting)}")
        if self._added.keys() != self._waiting.keys():
            found.append("numbers of arrival and waiting requests differ")
        return found
