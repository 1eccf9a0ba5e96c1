"""The router in simulated time: the real policy, state, queue and buckets; here is only who calls them when.

What the proxy does with connections is done with events: a request is placed when it comes, waits in the admission
queue while every worker is at its budget, costs its worker less once its first token is there, and nothing once it has
ended. Where some workers prefill and others decode, both are chosen when the request comes, or neither
(`router.pairing`). Decisions take no time, and there is one instance: instances share their state, so more of them
decide the same.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple, Protocol, TypeVar

from msgspec import structs

from cygnet.base.errors import ConfigError, InvariantError
from cygnet.base.ids import BlockKey
from cygnet.router.buckets import parse_buckets
from cygnet.router.config import CacheSettings, QueueSettings, RoutingSettings
from cygnet.router.ladder import KEY_BYTES
from cygnet.router.local_state import LocalState
from cygnet.router.pairing import Pool, choose_pair
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
TICK_NS = 100_000_000
"""Between such tries, where nothing happens."""

T = TypeVar("T")
Placed = Callable[[str, int, int], None]
"""(request, worker, the worker that decodes it: -1 for the same)"""
Refused = Callable[[str, str], None]
"""(request, why)"""


class Dispatch(Protocol):
    """Who decides which worker gets a request. Answers by `Placed` or `Refused`, at once or later."""

    def place(self, request_id: str, session: int, keys: Sequence[BlockKey], tokens: int) -> None:
        """Find a worker for a request that comes now."""

    def first_token(self, request_id: str) -> None:
        """The request's prefill is done."""

    def handed_over(self, request_id: str) -> None:
        """The request is now with the worker that decodes it."""

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

    def __init__(
        self, num_workers: int, placed: Placed, refused: Refused, *, by_session: bool, num_decoding: int = 0
    ) -> None:
        """`num_decoding` workers after the `num_workers` only decode."""
        self._up = [True] * num_workers
        self._num_decoding = num_decoding
        self._placed, self._refused, self._by_session = placed, refused, by_session
        self._count = 0

    def place(self, request_id: str, session: int, keys: Sequence[BlockKey], tokens: int) -> None:
        first = session if self._by_session else self._count
        self._count += 1
        for step in range(len(self._up)):
            worker = (first + step) % len(self._up)
            if self._up[worker]:
                decode = len(self._up) + first % self._num_decoding if self._num_decoding else -1
                self._placed(request_id, worker, decode)
                return
        self._refused(request_id, "no worker")

    def first_token(self, request_id: str) -> None:
        return

    def handed_over(self, request_id: str) -> None:
        return

    def ended(self, request_id: str) -> None:
        return

    def down(self, worker: int) -> None:
        self._up[worker] = False

    def up(self, worker: int) -> None:
        self._up[worker] = True

    def audit(self) -> list[str]:
        return []


class _Asked(NamedTuple):
    """A request as both sides are asked for it; `decode` is `None` where the same worker decodes."""

    prefill: RouteRequest
    decode: RouteRequest | None
    session: bytes


class SimRouter:
    """A router before workers, each of a group of `groups` (empty: all lengths), and maybe others that decode.

    What is known of workers that decode is a state of its own, in which a request counts with its whole context until
    it ends: there it is KV that fills a worker.

    Invariant (`audit`): `_asked` names the requests that wait in the queue; those of the states and the queue.
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
        num_decoding: int = 0,
        decode_policy: str = "least_loaded",
    ) -> None:
        """`num_decoding` workers after those of `groups` only decode."""
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
        self.decode_state = LocalState(lambda: loop.now_ns, int(cache.ttl_s * NS_PER_S), LEASE_NS, cache.max_entries)
        self._decode_policy = POLICIES.get(decode_policy)
        self._decode_weights = replace(self._weights, budget=0)
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
        self._asked: dict[str, _Asked] = {}
        self._ticking = False
        self.num_queued = self.num_spilled = 0
        self._records = [WorkerRecord(f"http://worker-{index}:8000", group) for index, group in enumerate(groups)]
        self._members: dict[int, Member] = {}
        self._worker_of: dict[int, int] = {}
        for index in range(len(groups)):
            self.up(index)
        self._decoders: list[Member] = []
        self._decoder_of: dict[int, int] = {}
        for index in range(len(groups), len(groups) + num_decoding):
            record = WorkerRecord(f"http://worker-{index}:8000", role="decode")
            slot = _now(self.decode_state.join(record))
            if slot is None:
                raise ConfigError(f"decode.workers = {num_decoding} are more than a router can know")
            self._decoders.append(Member(slot, record.url))
            self._decoder_of[slot] = index

    def place(self, request_id: str, session: int, keys: Sequence[BlockKey], tokens: int) -> None:
        chain = b"".join(key[:KEY_BYTES] for key in keys[self._stride - 1 :: self._stride])
        self._place(request_id, chain, tokens, b"%d" % session)

    def _place(self, request_id: str, chain: bytes, tokens: int, session: bytes) -> None:
        if not self._members:
            self._refused(request_id, "no worker")
            return
        behind = bool(self.queue)  # where others wait, their order decides
        asked = self._ask(request_id, chain, tokens, session)
        matched = self._route(asked._replace(prefill=structs.replace(asked.prefill, look=behind)))
        if matched is None:
            return
        if self.queue.add(request_id, tokens - matched, self._loop.now_ns) is None:
            self._refused(request_id, "router's queue full")
        else:
            self.num_queued += 1
            self._asked[request_id] = asked
            self._loop.at(self._loop.now_ns + self.queue.max_wait_ns, Priority.TURN, self._give_up)
            self._tick_soon()
            if behind:
                self._pump()

    def _ask(self, request_id: str, chain: bytes, tokens: int, session: bytes) -> _Asked:
        self._turn += 1
        ask = Ask(chain[:KEY_BYTES] or session, session, self._turn, self._random.random())
        plan = self._policy(ask, tuple(self._members.values()), self._limits, self._weights)
        request = RouteRequest(request_id, chain, tokens, self._block_tokens, plan, self._random.random())
        if not self._decoders:
            return _Asked(request, None, session)
        plan = self._decode_policy(ask, tuple(self._decoders), {}, self._decode_weights)
        return _Asked(request, structs.replace(request, plan=plan), session)

    def _route(self, asked: _Asked) -> int | None:
        """Place the request, or say how many of its tokens the best match has when there is no room."""
        if asked.decode is not None:
            return self._pair(asked.prefill, asked.decode)
        results: list[Decision | NoRoom] = []
        self.state.route(asked.prefill, results.append)
        (result,) = results
        if isinstance(result, NoRoom):
            return result.matched_tokens
        self._send(asked.prefill.request_id, result, -1)
        return None

    def _pair(self, prefill: RouteRequest, decode: RouteRequest) -> int | None:
        found = self.state.weigh(prefill)
        if prefill.look:
            return max(found.matched)
        free = self.decode_state.weigh(decode)
        pair = choose_pair(
            Pool(prefill.plan, found.matched, found.loads),
            Pool(decode.plan, free.matched, free.loads),
            prefill.tokens,
            prefill.chance,
            prefill.waited,
            prefill.late,
        )
        if pair is None:
            return max(found.matched)
        first = self.state.take(prefill, found, _place(prefill, pair.prefill), spilled=pair.spilled)
        second = self.decode_state.take(decode, free, _place(decode, pair.decode), whole=True)
        self._send(prefill.request_id, first, self._decoder_of[second.slot])
        return None

    def _send(self, request_id: str, decision: Decision, decode: int) -> None:
        self.num_spilled += decision.spilled
        self._placed(request_id, self._worker_of[decision.slot], decode)

    def first_token(self, request_id: str) -> None:
        self.state.settle(request_id, self._routing.request_tokens)
        self._pump()

    def handed_over(self, request_id: str) -> None:
        self.state.release(request_id)
        self._pump()

    def ended(self, request_id: str) -> None:
        self.state.release(request_id)
        if self._decoders:
            self.decode_state.release(request_id)
        self._pump()

    def _tick_soon(self) -> None:
        """Have those who wait tried again soon, whatever happens: what is worth waiting for depends on the time."""
        if not self._ticking and self.queue:
            self._ticking = True
            self._loop.at(self._loop.now_ns + TICK_NS, Priority.TURN, self._tick)

    def _tick(self, now_ns: int) -> None:
        self._ticking = False
        self._pump()
        self._tick_soon()

    def _pump(self) -> None:
        """Place those who wait, in order, as far as there is room."""
        if not self._members:
            return
        now_ns = self._loop.now_ns
        for waiting in self.queue.to_try(PUMPED, now_ns):
            before, _, session = self._asked[waiting.request_id]
            asked = self._ask(waiting.request_id, before.chain, before.tokens, session)  # members may be others now
            waited = (now_ns - waiting.arrived_ns) * self._ageing // NS_PER_S
            late = self.queue.is_late(waiting, now_ns)
            asked = asked._replace(prefill=structs.replace(asked.prefill, waited=waited, late=late))
            if self._route(asked) is None:
                self.queue.remove(waiting.request_id)
                del self._asked[waiting.request_id]

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
        faults = self.state.audit() + self.decode_state.audit() + self.queue.audit()
        if len(self._asked) != len(self.queue) or any(request_id not in self.queue for request_id in self._asked):
            faults.append(f"router: {len(self._asked)} requests are remembered, {len(self.queue)} wait")
        return faults


def _place(request: RouteRequest, slot: int) -> int:
    """Where a slot is among a plan's candidates."""
    return next(place for place, candidate in enumerate(request.plan.candidates) if candidate.slot == slot)


def _now(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise InvariantError("the router's own state waited for something")
