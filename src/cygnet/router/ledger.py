"""Who works on what: leases of requests on workers, and the loads that follow from them."""

from heapq import heapify, heappop, heappush

from msgspec import Struct


class Held(Struct, frozen=True, gc=False):
    """One request's claim on a worker: `cost` tokens of its load, until `expiry` unless renewed."""

    slot: int
    cost: int
    expiry: int


class Ledger:
    """Leases by request id. A lease ends once, however often its end is told, or expires with a router that died.

    Invariants (`audit`): the load of a slot is the sum of its leases' costs, and has no entry when there is none.
    """

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._loads: dict[int, int] = {}
        self._expiries: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._held)

    def load(self, slot: int) -> int:
        """Pending tokens of `slot`."""
        return self._loads.get(slot, 0)

    def loads(self) -> dict[int, int]:
        """Pending tokens by slot, where there are any."""
        return dict(self._loads)

    def _add(self, slot: int, cost: int) -> None:
        load = self._loads.get(slot, 0) + cost
        if load:
            self._loads[slot] = load
        else:
            del self._loads[slot]

    def hold(self, request_id: str, slot: int, cost: int, expiry: int) -> None:
        """Begin a lease, or put another in place of the request's present one; `cost` is 1 or more. O(log n)."""
        self.release(request_id)
        self._held[request_id] = Held(slot, cost, expiry)
        self._add(slot, cost)
        heappush(self._expiries, (expiry, request_id))
        if len(self._expiries) > 4 * len(self._held) + 64:
            self._expiries = [(held.expiry, name) for name, held in self._held.items()]
            heapify(self._expiries)

    def settle(self, request_id: str, cost: int) -> bool:
        """Change what a lease costs, as when its prefill is done. `False` when it has ended."""
        held = self._held.get(request_id)
        if held is None:
            return False
        self._held[request_id] = Held(held.slot, cost, held.expiry)
        self._add(held.slot, cost - held.cost)
        return True

    def release(self, request_id: str) -> bool:
        """End a lease. `False` when it has ended before."""
        held = self._held.pop(request_id, None)
        if held is None:
            return False
        self._add(held.slot, -held.cost)
        return True

    def reap(self, now: int, limit: int = 16) -> int:
        """End up to `limit` leases that have expired; returns how many."""
        ended = 0
        while self._expiries and self._expiries[0][0] <= now and ended < limit:
            _, request_id = heappop(self._expiries)
            held = self._held.get(request_id)
            if held is not None and held.expiry <= now:
                ended += self.release(request_id)
        return ended

    def drop(self, slot: int) -> None:
        """End all leases on a slot whose worker is gone. O(leases)."""
        for request_id in [name for name, held in self._held.items() if held.slot == slot]:
            self.release(request_id)

    def audit(self) -> list[str]:
        """Discrepancies, recomputed from scratch."""
        loads: dict[int, int] = {}
        for held in self._held.values():
            loads[held.slot] = loads.get(held.slot, 0) + held.cost
        found = [] if loads == self._loads else [f"loads are {self._loads}, leases say {loads}"]
        known = set(self._expiries)
        found += [f"{name} never expires" for name, held in self._held.items() if (held.expiry, name) not in known]
        return found
