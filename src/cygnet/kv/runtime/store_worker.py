"""Carries out the store commands of the pure side, beside the engine's steps.

                      lookups ─────────────── thread ─┐
    submit(commands)  fetches ─────────────── thread ─┼─ results, on_result() ··· take_results()
                      puts, clears ────────── thread ─┘

Whatever a store does, it costs at most what it would have saved: what it says is checked, an object it gives must carry
the right checksum, and a call that does not return is left behind with its thread. So that such a call holds no host
block that it might still write to, objects are fetched into memory of the worker's own and copied from there. (A put
that is left behind may read its blocks when they hold something else: what it then stores has a wrong checksum.)
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cygnet.base.errors import InvariantError
from cygnet.kv.runtime.host_pool import HostPool
from cygnet.kv.runtime.pieces import prepare_copies
from cygnet.kv.runtime.store_calls import Complaints, Pending, StoreCalls, StoreHungError
from cygnet.kv.runtime.store_line import Line
from cygnet.kv.runtime.store_pieces import Landing, Piece, pieces
from cygnet.kv.store import DEFAULT_TIMEOUT_S, Namespace, ObjectKey, Outcome, Store
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

LOOKUP_KEYS = 256
"""Keys asked for at a time."""
MOST_COMMANDS = 10_000
"""Waiting in one line. What does not fit is answered as if the store had nothing and took nothing."""
GRACE_S = 5.0
"""A call into the store is given up so long after its own timeout."""

log = logging.getLogger("cygnet.kv")


@dataclass(frozen=True)
class StoreTraffic:
    """Counters since the start."""

    fetched: Mapping[Outcome, int]
    stored: Mapping[Outcome, int]
    """Objects by outcome."""
    bytes_read: int
    bytes_written: int
    """Of objects whose outcome was `OK`."""
    fetch_seconds: float
    put_seconds: float
    """Spent on fetches and puts, not waiting for their turn."""
    lookups: int
    num_lost: int
    """Threads that are lost in calls that have not returned, now."""


@dataclass(eq=False)
class _Job:
    """A command that has not been answered."""

    command: Lookup | Fetch | Put | ClearStore
    cancelled: bool = False


class StoreWorker:
    """See the module's text. `submit`, `take_results` and `close` belong to one thread, the engine's.

    Every `Lookup`, `Fetch` and `Put` is answered once, within a bounded time of its turn. `on_result` is called after
    results were queued, on threads of the worker (and in `submit`, for what finds no room in its line); it must not
    wait. A bug met on a thread of the worker is raised by `take_results`.

    Invariant (`audit`): what has been submitted and not answered is in a line, and nothing else is.
    """

    def __init__(
        self,
        store: Store,
        pool: HostPool,
        namespace: Namespace,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        on_result: Callable[[], None] = lambda: None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        grace_s: float = GRACE_S,
    ) -> None:
        """`namespace` is what `ClearStore` clears; `clock_ns` the clock of deadlines. The store is told to begin what
        it is asked for within `timeout_s`. It stays the caller's, to be closed after this."""
        self._store = store
        self._pool = pool
        self._namespace = namespace
        self._clock_ns = clock_ns
        self._on_result = on_result
        self._timeout_s = timeout_s
        self._end_s = float("inf")
        """When everything is given up, of `time.monotonic`."""
        complaints = Complaints()

        def calls(name: str) -> StoreCalls:
            return StoreCalls(name, patience_s=timeout_s + grace_s, end=lambda: self._end_s, complaints=complaints)

        self._lookup_calls, self._fetch_calls, self._write_calls = map(calls, ("kv-lookup", "kv-fetch", "kv-write"))
        self._lookups = Line[_Job]("kv-lookups", self._do, most=MOST_COMMANDS)
        self._fetches = Line[_Job]("kv-fetches", self._do, most=MOST_COMMANDS)
        self._writes = Line[_Job]("kv-writes", self._do, most=MOST_COMMANDS)
        self._landings: list[Landing] = []
        prepare_copies()
        self._closing = False
        self._lock = threading.Lock()
        self._results: list[StoreResult] = []
        self._open: set[_Job] = set()
        self._bug: InvariantError | None = None
        self._fetched: Counter[Outcome] = Counter()
        self._stored: Counter[Outcome] = Counter()
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = {"fetch": 0.0, "put": 0.0}

    def submit(self, commands: Sequence[StoreCommand]) -> None:
        """Take commands in. Never waits."""
        for command in commands:
            match command:
                case Cancel(ticket):
                    self._cancel(ticket)
                case Lookup():
                    self._put_in_line(self._lookups, command)
                case Fetch():
                    self._put_in_line(self._fetches, command)
                case Put() | ClearStore():
                    self._put_in_line(self._writes, command)

    def take_results(self) -> list[StoreResult]:
        """Results since the last time, oldest first."""
        with self._lock:
            if self._bug is not None:
                raise self._bug
            taken, self._results = self._results, []
            return taken

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Begin no more reads, write what has been put, and end: within `timeout_s`, or a few seconds more. What there
        was no time for is answered as failed. May be called twice."""
        self._closing = True
        self._end_s = min(self._end_s, time.monotonic() + timeout_s)
        lines = (self._lookups, self._fetches, self._writes)
        for line in lines:
            line.close()
        for line in lines:
            if not line.join(self._end_s + GRACE_S):
                log.warning("a thread of the store worker has not ended")
        for calls in (self._lookup_calls, self._fetch_calls, self._write_calls):
            calls.close()

    def traffic(self) -> StoreTraffic:
        """Counters."""
        with self._lock:
            return StoreTraffic(
                fetched=dict(self._fetched),
                stored=dict(self._stored),
                bytes_read=self._counts["read"],
                bytes_written=self._counts["written"],
                fetch_seconds=self._seconds["fetch"],
                put_seconds=self._seconds["put"],
                lookups=self._counts["lookups"],
                num_lost=sum(c.num_lost for c in (self._lookup_calls, self._fetch_calls, self._write_calls)),
            )

    def audit(self) -> list[str]:
        """All discrepancies; exact while nothing is submitted or done."""
        lines = (self._lookups, self._fetches, self._writes)
        waiting, known = ({job for line in lines for job in jobs(line)} for jobs in (Line.waiting, Line.jobs))
        with self._lock:
            lost, answered = self._open - known, waiting - self._open
        faults = [f"{len(lost)} commands are in no line"] if lost else []
        return faults + ([f"{len(answered)} commands wait that were answered"] if answered else [])

    def _put_in_line(self, line: "Line[_Job]", command: Lookup | Fetch | Put | ClearStore) -> None:
        job = _Job(command)
        with self._lock:
            self._open.add(job)
        if not line.put(job):
            self._answer(job, _refusal(command, Outcome.FAILED))

    def _cancel(self, ticket: int) -> None:
        for job in self._lookups.jobs() + self._fetches.jobs():
            if isinstance(job.command, Lookup | Fetch) and job.command.ticket == ticket:
                job.cancelled = True

    def _do(self, job: _Job) -> None:
        """One command, on its line's thread."""
        command, result = job.command, _refusal(job.command, Outcome.FAILED)
        try:
            match command:
                case Lookup():
                    result = self._lookup(job, command)
                case Fetch():
                    result = self._fetch(job, command)
                case Put():
                    result = self._put(command)
                case ClearStore():
                    self._advise("be cleared", lambda: self._store.clear(self._namespace))
        except Exception as error:
            self._note_bug(error)
        self._answer(job, result)

    def _note_bug(self, error: Exception) -> None:
        """What a store raises does not get here, so it is ours."""
        bug = InvariantError(f"a store command failed: {type(error).__name__}: {error}")
        bug.__cause__ = error
        self._bug = error if isinstance(error, InvariantError) else bug

    def _answer(self, job: _Job, result: StoreResult | None) -> None:
        with self._lock:
            self._open.discard(job)
            if result is not None:
                self._results.append(result)
            if isinstance(result, Fetched):
                self._fetched.update(result.outcomes)
            elif isinstance(result, Stored):
                self._stored.update(result.outcomes)
        if result is not None or self._bug is not None:
            try:
                self._on_result()
            except Exception as error:
                self._note_bug(error)

    def _refused(self, job: _Job, deadline_ns: int | None = None) -> Outcome | None:
        """Why nothing more of a read is begun, if so."""
        if self._closing:
            return Outcome.FAILED
        late = deadline_ns is not None and self._clock_ns() >= deadline_ns
        return Outcome.TIMED_OUT if late or job.cancelled else None

    # Lookups

    def _lookup(self, job: _Job, lookup: Lookup) -> Found:
        with self._lock:
            self._counts["lookups"] += 1
        try:
            return self._search(job, lookup)
        except StoreHungError as error:
            self._lookup_calls.complain("be searched", error)
            return _nothing_found(lookup)

    def _search(self, job: _Job, lookup: Lookup) -> Found:
        num_full = 0
        for first in range(0, len(lookup.full), LOOKUP_KEYS):
            there = self._exist(job, lookup.full[first : first + LOOKUP_KEYS])
            if not all(there):
                num_full += there.index(False)
                break
            num_full += len(there)
        end = lookup.first + num_full
        start = min(end, max(lookup.swa_first, end - lookup.swa_reach))
        wanted = lookup.swa[start - lookup.swa_first : end - lookup.swa_first]
        swa: list[bool] = []
        for first in range(0, len(wanted), LOOKUP_KEYS):
            swa += self._exist(job, wanted[first : first + LOOKUP_KEYS])
        swa += [False] * (end - start - len(swa))
        return Found(lookup.ticket, num_full, start, tuple(swa))

    def _exist(self, job: _Job, keys: tuple[ObjectKey, ...]) -> list[bool]:
        nothing = [False] * len(keys)
        if self._refused(job) is not None:
            return nothing
        pending = self._lookup_calls.begin(lambda: self._store.batch_exists(keys))
        return self._lookup_calls.finish(pending, "be searched", lambda there: _is_list(there, bool, keys), nothing)

    # Fetches

    def _fetch(self, job: _Job, fetch: Fetch) -> Fetched:
        """A piece is settled while the next one is read."""
        started = time.monotonic()
        outcomes: list[Outcome] = []
        torn: list[ObjectKey] = []
        rest = Outcome.FAILED
        if not self._landings:
            self._landings = [Landing(self._pool), Landing(self._pool)]
        here, other = self._landings
        before: tuple[Piece, Landing, list[Outcome]] | None = None
        try:
            for piece in pieces(fetch, self._pool):
                if (refusal := self._refused(job, fetch.deadline_ns)) is not None:
                    rest = refusal
                    break
                pending = self._begin_get(piece, here, fetch.deadline_ns)
                if before is not None:
                    outcomes += self._settle(*before, torn)
                    before = None
                before = piece, here, self._finish(self._fetch_calls, pending, piece, "be read")
                here, other = other, here
        except StoreHungError as error:
            self._fetch_calls.complain("be read", error)
            self._landings = []  # the call that hangs may still write there
        if before is not None:
            outcomes += self._settle(*before, torn)
        if torn:
            self._fetch_calls.ask(lambda: self._store.remove(torn), "remove wrong objects", _anything, 0)
        self._count("fetch", "read", fetch, outcomes, started)
        return Fetched(fetch.ticket, (*outcomes, *[rest] * (len(fetch.keys) - len(outcomes))))

    def _begin_get(self, piece: Piece, landing: Landing, deadline_ns: int | None) -> Pending[list[Outcome]]:
        views = landing.views(piece)
        left_s = self._timeout_s if deadline_ns is None else (deadline_ns - self._clock_ns()) / 1e9
        timeout_s = min(self._timeout_s, left_s)
        return self._fetch_calls.begin(lambda: self._store.batch_get_into(piece.keys, views, timeout_s=timeout_s))

    def _settle(self, piece: Piece, landing: Landing, got: list[Outcome], torn: list[ObjectKey]) -> list[Outcome]:
        settled = landing.settle(piece, got)
        torn += [key for key, outcome in zip(piece.keys, settled, strict=True) if outcome is Outcome.TORN]
        return settled

    # Puts

    def _put(self, put: Put) -> Stored:
        """A piece is sealed while the one before is written."""
        started = time.monotonic()
        outcomes: list[Outcome] = []
        before: tuple[Pending[list[Outcome]], Piece] | None = None
        try:
            for piece in pieces(put, self._pool):
                if time.monotonic() >= self._end_s:
                    break
                for key, group, block in zip(piece.keys, piece.groups, piece.blocks, strict=True):
                    self._pool.seal(key, group, block)
                if before is not None:
                    outcomes += self._finish(self._write_calls, *before, "be written")
                    before = None
                before = self._begin_put(piece), piece
            if before is not None:
                outcomes += self._finish(self._write_calls, *before, "be written")
        except StoreHungError as error:
            self._write_calls.complain("be written", error)
        self._count("put", "written", put, outcomes, started)
        return Stored(put.ticket, (*outcomes, *[Outcome.FAILED] * (len(put.keys) - len(outcomes))))

    def _begin_put(self, piece: Piece) -> Pending[list[Outcome]]:
        bodies = [self._pool.object(group, block) for group, block in zip(piece.groups, piece.blocks, strict=True)]
        return self._write_calls.begin(lambda: self._store.batch_put(piece.keys, bodies, timeout_s=self._timeout_s))

    # Both

    def _finish(self, calls: StoreCalls, pending: Pending[list[Outcome]], piece: Piece, what: str) -> list[Outcome]:
        return calls.finish(
            pending, what, lambda outcomes: _is_list(outcomes, Outcome, piece.keys), [Outcome.FAILED] * len(piece)
        )

    def _advise(self, what: str, call: Callable[[], object]) -> None:
        if time.monotonic() < self._end_s:
            self._write_calls.ask(call, what, _anything, None)

    def _count(self, what: str, moved: str, command: Fetch | Put, outcomes: list[Outcome], started: float) -> None:
        num_bytes = sum(
            self._pool.object_bytes[group]
            for group, outcome in zip(command.groups, outcomes, strict=False)
            if outcome is Outcome.OK
        )
        with self._lock:
            self._counts[moved] += num_bytes
            self._seconds[what] += time.monotonic() - started


def _refusal(command: Lookup | Fetch | Put | ClearStore, outcome: Outcome) -> StoreResult | None:
    """The answer when nothing is done."""
    match command:
        case Lookup():
            return _nothing_found(command)
        case Fetch(ticket, keys):
            return Fetched(ticket, (outcome,) * len(keys))
        case Put(ticket, keys):
            return Stored(ticket, (outcome,) * len(keys))
    return None


def _nothing_found(lookup: Lookup) -> Found:
    start = min(lookup.first, max(lookup.swa_first, lookup.first - lookup.swa_reach))
    return Found(lookup.ticket, 0, start, (False,) * (lookup.first - start))


def _is_list(answer: object, of: type, keys: Sequence[ObjectKey]) -> bool:
    return isinstance(answer, list) and len(answer) == len(keys) and all(isinstance(item, of) for item in answer)


def _anything(answer: object) -> bool:
    return True
