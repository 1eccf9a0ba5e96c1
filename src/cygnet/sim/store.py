"""A store in simulated time: what it holds, and how long its answers take.

What to look up, fetch, put and give up waiting for is decided by the engine's own tiers (`kv.store_tier`); here their
commands are carried out, as `kv.runtime.store_worker` does it with a real store.

    worker 0 ── reads, one after another ──┐
             ── writes, likewise ──────────┤    servers, each with its own memory: objects go by their key, as in GCache
    worker 1 ── ...                        ┘
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cygnet.gcache.placement import Member, Placement
from cygnet.kv.store import NAMESPACE_BYTES, ObjectKey, Outcome
from cygnet.kv.transfers import (
    Cancel,
    ClearStore,
    Fetch,
    Fetched,
    Found,
    Lookup,
    Put,
    StoreCommand,
    Stored,
    StoreResult,
)
from cygnet.sim.events import EventLoop, Priority

OnResult = Callable[[StoreResult, int], None]


class Holder(Protocol):
    """One place where objects are."""

    def holds(self, key: ObjectKey, now_ns: int) -> bool:
        """Whether the object is there. Not a use."""

    def use(self, key: ObjectKey, now_ns: int) -> bool:
        """Whether the object is there; if so, it was used now."""

    def put(self, key: ObjectKey, now_ns: int) -> bool:
        """Keep the object; False if there is no room."""

    def size(self, key: ObjectKey) -> int:
        """Bytes of an object of this key's group."""


class Servers(Protocol):
    """All places, as a worker sees them."""

    def server(self, key: ObjectKey) -> Holder:
        """The owner of `key`."""

    def holds(self, key: ObjectKey, now_ns: int) -> bool:
        """Whether the owner of `key` has it."""

    def clear(self) -> None:
        """Lose everything."""


class SimServer:
    """One server's objects: the least recently used go first, and what was not used for `ttl_ns` (0: for ever).

    Invariant (`audit`): at most `capacity_bytes`; the objects are in the order of their last use.
    """

    def __init__(self, capacity_bytes: int, ttl_ns: int, sizes: Sequence[int]) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes_used = 0
        self.evicted_total = self.expired_total = 0
        self._ttl_ns = ttl_ns
        self._sizes = sizes
        self._used_ns: OrderedDict[ObjectKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used_ns)

    def holds(self, key: ObjectKey, now_ns: int) -> bool:
        """Whether the object is there. Not a use."""
        used_ns = self._used_ns.get(key)
        return used_ns is not None and (not self._ttl_ns or now_ns - used_ns < self._ttl_ns)

    def use(self, key: ObjectKey, now_ns: int) -> bool:
        """Whether the object is there; if so, it was used now."""
        if not self.holds(key, now_ns):
            return False
        self._used_ns[key] = now_ns
        self._used_ns.move_to_end(key)
        return True

    def put(self, key: ObjectKey, now_ns: int) -> bool:
        """Keep the object, giving others up as needed; False if it has no room even alone."""
        if self.use(key, now_ns):
            return True
        size = self.size(key)
        if size > self.capacity_bytes:
            return False
        self._drop(key)
        while self.bytes_used + size > self.capacity_bytes:
            oldest = next(iter(self._used_ns))
            expired = not self.holds(oldest, now_ns)
            self.expired_total += expired
            self.evicted_total += not expired
            self._drop(oldest)
        self._used_ns[key] = now_ns
        self.bytes_used += size
        return True

    def size(self, key: ObjectKey) -> int:
        """Bytes of an object of this key's group."""
        return self._sizes[key[NAMESPACE_BYTES]]

    def clear(self) -> None:
        """Lose everything."""
        self._used_ns.clear()
        self.bytes_used = 0

    def _drop(self, key: ObjectKey) -> None:
        if self._used_ns.pop(key, None) is not None:
            self.bytes_used -= self.size(key)

    def audit(self) -> list[str]:
        """All discrepancies."""
        used = sum(map(self.size, self._used_ns))
        faults = [] if used == self.bytes_used else [f"store: counts {self.bytes_used} bytes, holds {used}"]
        if used > self.capacity_bytes:
            faults.append(f"store: holds {used} bytes, {used - self.capacity_bytes} more than it may")
        times = list(self._used_ns.values())
        return faults + (["store: objects are not in the order of their last use"] if times != sorted(times) else [])


@dataclass(frozen=True)
class StoreLink:
    """How a worker reaches the store."""

    latency_ns: int
    """Of one command, before its first byte."""
    bandwidth: float
    """Bytes per second, each way."""


class SimStore:
    """All servers, and who owns which key: GCache's placement, without fault groups."""

    def __init__(self, num_servers: int, capacity_bytes: int, ttl_ns: int, sizes: Sequence[int]) -> None:
        """`capacity_bytes` is that of all servers together; `sizes` are an object's bytes by group."""
        self.servers = {
            f"server-{index}": SimServer(capacity_bytes // num_servers, ttl_ns, sizes) for index in range(num_servers)
        }
        self._placement = Placement([Member(name) for name in self.servers])
        self._only = next(iter(self.servers.values())) if num_servers == 1 else None

    def server(self, key: ObjectKey) -> SimServer:
        """The owner of `key`."""
        return self._only or self.servers[self._placement.owner(key)]

    def holds(self, key: ObjectKey, now_ns: int) -> bool:
        return self.server(key).holds(key, now_ns)

    def clear(self) -> None:
        """Lose everything."""
        for server in self.servers.values():
            server.clear()

    @property
    def bytes_used(self) -> int:
        return sum(server.bytes_used for server in self.servers.values())

    def audit(self) -> list[str]:
        """All discrepancies."""
        faults = [fault for server in self.servers.values() for fault in server.audit()]
        strays = sum(self.server(key) is not server for server in self.servers.values() for key in server._used_ns)
        return faults + ([f"store: {strays} objects lie with another than their owner"] if strays else [])


class _Line:
    """Commands that are carried out one after another."""

    def __init__(self) -> None:
        self.waiting: deque[Fetch | Put] = deque()
        self.busy = False


class StoreWorker:
    """One worker's way to the store. Lookups are answered after the latency; fetches, and puts, take their turns.

    Every command that has an answer gets it, once. Invariant: a line is busy exactly while one of its commands is under
    way; nothing waits in a line that is not busy.
    """

    def __init__(self, store: Servers, link: StoreLink, loop: EventLoop, on_result: OnResult) -> None:
        self._store, self._link, self._loop, self._on_result = store, link, loop, on_result
        self._reads, self._writes = _Line(), _Line()
        self._cancelled: set[int] = set()
        self.bytes_read = self.bytes_written = 0
        self.outcomes: Counter[Outcome] = Counter()

    def reopened(self, on_result: OnResult) -> "StoreWorker":
        """Another one in its place, for a worker that starts anew: nobody waits for this one's answers any more."""
        self._on_result = lambda result, now_ns: None
        return StoreWorker(self._store, self._link, self._loop, on_result)

    def submit(self, commands: Iterable[StoreCommand], now_ns: int) -> None:
        """Take commands in, in their order."""
        for command in commands:
            if isinstance(command, Lookup):
                self._later(self._link.latency_ns, partial(self._look, command))
            elif isinstance(command, Fetch):
                self._enter(self._reads, command, now_ns)
            elif isinstance(command, Put):
                self._enter(self._writes, command, now_ns)
            elif isinstance(command, Cancel):
                if any(isinstance(job, Fetch) and job.ticket == command.ticket for job in self._reads.waiting):
                    self._cancelled.add(command.ticket)
            elif isinstance(command, ClearStore):
                self._store.clear()

    def _later(self, delay_ns: int, action: Callable[[int], None]) -> None:
        self._loop.at(self._loop.now_ns + delay_ns, Priority.STORE, action)

    def _look(self, lookup: Lookup, now_ns: int) -> None:
        holds = self._store.holds
        num_full = next((i for i, key in enumerate(lookup.full) if not holds(key, now_ns)), len(lookup.full))
        end = lookup.first + num_full
        start = min(end, max(lookup.swa_first, end - lookup.swa_reach))
        swa = [holds(key, now_ns) for key in lookup.swa[start - lookup.swa_first : end - lookup.swa_first]]
        swa += [False] * (end - start - len(swa))
        self._on_result(Found(lookup.ticket, num_full, start, tuple(swa)), now_ns)

    def _enter(self, line: _Line, job: Fetch | Put, now_ns: int) -> None:
        line.waiting.append(job)
        if not line.busy:
            self._next(line, now_ns)

    def _next(self, line: _Line, now_ns: int) -> None:
        """Begin the next command of a line; those that come too late are answered at once."""
        line.busy = False
        while line.waiting and not line.busy:
            job = line.waiting.popleft()
            if isinstance(job, Fetch) and self._is_void(job, now_ns):
                self._cancelled.discard(job.ticket)
                self._answer(Fetched(job.ticket, (Outcome.TIMED_OUT,) * len(job.keys)), now_ns)
                continue
            line.busy = True
            outcomes, moved = self._move(job, now_ns)
            took_ns = self._link.latency_ns + round(moved / self._link.bandwidth * 1e9)
            self._later(took_ns, partial(self._done, line, job, outcomes))

    def _is_void(self, fetch: Fetch, now_ns: int) -> bool:
        late = fetch.deadline_ns is not None and now_ns >= fetch.deadline_ns
        return late or fetch.ticket in self._cancelled

    def _move(self, job: Fetch | Put, now_ns: int) -> tuple[tuple[Outcome, ...], int]:
        """Outcomes of a command that begins now, and how many bytes it moves."""
        outcomes, moved = [], 0
        for key in job.keys:
            server = self._store.server(key)
            if isinstance(job, Fetch):
                outcomes.append(Outcome.OK if server.use(key, now_ns) else Outcome.MISS)
                new = outcomes[-1] is Outcome.OK
            else:
                new = not server.holds(key, now_ns)
                outcomes.append(Outcome.OK if server.put(key, now_ns) else Outcome.FULL)
            moved += server.size(key) if new else 0
        if isinstance(job, Fetch):
            self.bytes_read += moved
        else:
            self.bytes_written += moved
        return tuple(outcomes), moved

    def _done(self, line: _Line, job: Fetch | Put, outcomes: tuple[Outcome, ...], now_ns: int) -> None:
        self._next(line, now_ns)
        self._answer((Fetched if isinstance(job, Fetch) else Stored)(job.ticket, outcomes), now_ns)

    def _answer(self, result: Fetched | Stored, now_ns: int) -> None:
        self.outcomes.update(result.outcomes)
        self._on_result(result, now_ns)

    def audit(self) -> list[str]:
        """All discrepancies; also whatever is left when nothing is to come."""
        lines = (self._reads, self._writes)
        return ["store line: commands wait and none is under way" for line in lines if line.waiting and not line.busy]
