"""The router in simulated time: the real policy, state, queue and buckets; here is only who calls them when.

What the proxy does with connections is done with events: a request is placed when it comes, waits in the admission
queue while every worker is at its budget, costs its worker less once its first token is there, and nothing once it has
ended. Decisions take no time, and there is one instance: instances share their state, so more of them decide the same.
"""

from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from cygnet.base.errors import InvariantError
from cygnet.base.ids import BlockKey
from cygnet.router.buckets import parse_buckets
from cygnet.router.config import CacheSettings, QueueSettings, RoutingSettings
from cygnet.router.ladder import KEY_BYTES
from cygnet.router.local_state import LocalState
from cygnet.router.policies import POLICIES, Ask, Weights
from cygnet.router.queue import AdmissionQueue
from cygnet.router.state import Decision, NoRoom, RouteRequest
from cygnet.router.view import Member, WorkerRecord
from cygnet.sim.events import EventLoop, Priority

NS_PER_S = 1_000_000_000
LEASE_NS = 1 << 60
"""Leases don't expire: no router dies."""
PUMPED = 16
"""Waiting requests that are tried when there may be room."""

T = TypeVar("T")
Placed = Callable[[str, int], None]
"""(request, worker)"""
Refused = Callable[[str, str], None]
"""(request, why)"""


class Dispatch(Protocol):
    """Who decides which worker gets a request. Answers by `Placed` or `Refused`, at once or later."""

    def place(self, request_id: str, session: int, keys: Sequence[BlockKey], tokens: int) -> None:
        """Find a worker for a request that comes now."""

    def first_token(self, request_id: str) -> None:
        """The request's prefill is done."""

    def ended(self, request_id: str) -> None:
        """The request has ended, however."""

    def down(self, worker: int) -> None:
        """A worker is gone, with all it knew. That its requests have `ended` is said after."""

    def up(self, worker: int) -> None:
        """It is back, empty."""

    def audit(self) -> list[str]:
        """All discrepancies."""


class Fixed:
    """No router: requests in turn, or all requests of a session to one worker; the next one where that is down."""

    def __init__(self, num_workers: int, placed: Placed, refused: Refused, *, by_session: bool) -> None:
        self._up = [True] * num_workers
        self._placed, self._refused, self._by_session = placed, refused, by_session
        self._count = 0

    def place(self, request_id: str, session: int, keys: Sequence[BlockKey], tokens: int) -> None:
        first = session if self._by_session else self._count
        self._count += 1
        for step in range(len(self._up)):
            worker = (first + step) % len(self._up)
            if self._up[worker]:
                self._placed(request_id, worker)
                return
        self._refused(request_id, "no worker")

    def first_token(self, request_id: str) -> None:
        return

    def ended(self, request_id: str) -> None:
        return

    def down(self, worker: int) -> None:
        self._up[worker] = False

    def up(self, worker: int) -> None:
        self._up[worker] = True

    def audit(self) -> list[str]:
        return []


class SimRouter:
    """A router before workers, each of a group of `groups` (empty: all lengths).

    Invariant (`audit`): `_asked` names the requests that wait in the queue; those of the state and the queue.
    """

    def __init__(
        self,
        loop: EventLoop,
        groups: Sequence[str],
        block_size: int,
        placed: Placed,
        refused: Refused,
        *,
        routing: RoutingSettings,
        cache: CacheSettings,
        queue: QueueSettings,
        seed: int,
    ) -> None:
        self._loop, self._placed, self._refused = loop, placed, refused
        self._routing = routing
        self._policy = POLICIES.get(routing.policy)
        self._limits = parse_buckets(routing.buckets)
        self._weights = Weights(
            match_weight=routing.match_weight,
            load_floor=routing.load_floor_tokens,
            budget=routing.worker_budget_tokens,
            request_tokens=routing.request_tokens,
            by_total=routing.bucket_by == "total",
            spill=routing.spill,
        )
        self.state = LocalState(lambda: loop.now_ns, int(cache.ttl_s * NS_PER_S), LEASE_NS, cache.max_entries)
        self.queue = AdmissionQueue(
            queue.max_waiting,
            int(queue.max_wait_s * NS_PER_S),
            queue.ageing_tokens_per_s,
            queue.priority_tokens,
            int(queue.late_s * NS_PER_S),
        )
        self._ageing = queue.ageing_tokens_per_s
        # The index knows blocks of text; as many tokens are in a few blocks of KV.
        text_tokens = max(1, int(cache.block_bytes / cache.bytes_per_token))
        self._stride = max(1, text_tokens // block_size)
        self._block_tokens = self._stride * block_size
        self._random = Random(seed)
        self._turn = 0
        self._asked: dict[str, tuple[RouteRequest, bytes]] = {}
        self.num_queued = self.num_spilled = 0
        self._records = [WorkerRecord(f"http://worker-{index}:8000", group) for index, group in enumerate(groups)]
        self._members: dict[int, Member] = {}
        self._worker_of: dict[int, int] = {}
        for index in range(len(groups)):
            self.up(index)

    def place(self, request_id: str, session: int, keys: Sequence[BlockKey], tokens: int) -> None:
        chain = b"".join(key[:KEY_BYTES] for key in keys[self._stride - 1 :: self._stride])
        self._place(request_id, chain, tokens, b"%d" % session)

    def _place(self, request_id: str, chain: bytes, tokens: int, session: bytes) -> None:
        if not self._members:
            self._refused(request_id, "no worker")
            return
        behind = bool(self.queue)  # where others wait, their order decides
        request = replace(self._request(request_id, chain, tokens, session), look=behind)
        result = self._route(request)
        if isinstance(result, Decision):
            self._send(request_id, result)
        elif self.queue.add(request_id, tokens - result.matched_tokens, self._loop.now_ns) is None:
            self._refused(request_id, "router's queue full")
        else:
            self.num_queued += 1
            self._asked[request_id] = request, session
            self._loop.at(self._loop.now_ns + self.queue.max_wait_ns, Priority.TURN, self._give_up)
            if behind:
                self._pump()

    def _request(self, request_id: str, chain: bytes, tokens: int, session: bytes) -> RouteRequest:
        self._turn += 1
        ask = Ask(chain[:KEY_BYTES] or session, session, self._turn, self._random.random())
        plan = self._policy(ask, tuple(self._members.values()), self._limits, self._weights)
        return RouteRequest(request_id, chain, tokens, self._block_tokens, plan, self._random.random())

    def _route(self, request: RouteRequest) -> Decision | NoRoom:
        results: list[Decision | NoRoom] = []
        self.state.route(request, results.append)
        (result,) = results
        return result

    def _send(self, request_id: str, decision: Decision) -> None:
        self.num_spilled += decision.spilled
        self._placed(request_id, self._worker_of[decision.slot])

    def first_token(self, request_id: str) -> None:
        self.state.settle(request_id, self._routing.request_tokens)
        self._pump()

    def ended(self, request_id: str) -> None:
        self.state.release(request_id)
        self._pump()

    def _pump(self) -> None:
        """Place those who wait, in order, as far as there is room."""
        if not self._members:
            return
        now_ns = self._loop.now_ns
        for waiting in self.queue.next_ones(PUMPED, now_ns):
            asked, session = self._asked[waiting.request_id]
            request = self._request(waiting.request_id, asked.chain, asked.tokens, session)
            waited = (now_ns - waiting.arrived_ns) * self._ageing // NS_PER_S
            result = self._route(replace(request, waited=waited, late=self.queue.is_late(waiting, now_ns)))
            if isinstance(result, Decision):
                self.queue.remove(waiting.request_id)
                del self._asked[waiting.request_id]
                self._send(waiting.request_id, result)

    def _give_up(self, now_ns: int) -> None:
        for waiting in self.queue.overdue(now_ns):
            del self._asked[waiting.request_id]
            self._refused(waiting.request_id, "waited too long")

    def down(self, worker: int) -> None:
        del self._members[worker]
        _now(self.state.leave(self._records[worker].url))

    def up(self, worker: int) -> None:
        record = self._records[worker]
        slot = _now(self.state.join(record))
        if slot is None:
            raise InvariantError("the router has no slot left for a worker")
        self._members[worker] = Member(slot, record.url, record.group)
        self._worker_of[slot] = worker
        self._pump()

    def audit(self) -> list[str]:
        faults = self.state.audit() + self.queue.audit()
        if len(self._asked) != len(self.queue) or any(request_id not in self.queue for request_id in self._asked):
            faults.append(f"router: {len(self._asked)} requests are remembered, {len(self.queue)} wait")
        return faults


def _now(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise InvariantError("the router's own state waited for something")
