"""State that any number of routers share, in Redis: one script call per request, and a way on without Redis.

Keys, all with the prefix `{namespace}:` (the braces keep them in one slot of a Redis Cluster):

    b:<8 bytes>   string   bitmap of the slots that hold this prefix (bit s is SETBIT s); expires
    load          hash     slot -> pending tokens
    held          hash     request id -> slot|cost
    lease         zset     request id by expiry (ms)
    workers slots ends     hashes: url -> record (JSON), slot, end of registration (ms)
    learned       stream   what routers have learned of texts: by whom, and text key -> key of a cached block; expires
    live          string   bitmap of slots in use;  freed: zset of slots in quarantine;  meta: hash of counters

Only block keys and `learned` carry a TTL, so with `maxmemory-policy volatile-lru` they alone are evicted. Nothing needs
to be persisted.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha1
from importlib.resources import files
from itertools import islice
from secrets import token_bytes
from typing import Any

import hiredis
import msgspec

from cygnet.router.ladder import KEY_BYTES, MAX_BLOCKS, TAIL
from cygnet.router.ledger import Ledger
from cygnet.router.rendezvous import ranked
from cygnet.router.runtime.resp import RedisPipe, Reply
from cygnet.router.scoring import Plan, choose
from cygnet.router.slots import MAX_SLOTS
from cygnet.router.state import Decision, Lease, NoRoom, Placed, RouteRequest
from cygnet.router.view import Roster, WorkerRecord

_pack = msgspec.msgpack.Encoder().encode
_json = msgspec.json.Encoder(order="deterministic").encode
_read_lesson = msgspec.msgpack.Decoder(dict[bytes, bytes]).decode
_read_record = msgspec.json.Decoder(WorkerRecord).decode

KNOWN_S = 5.0
"""How long the loads that Redis told last are gone by while it is away."""
MAX_UNDELIVERED = 100_000
"""Releases kept for a Redis that is away, and entries learned. What exceeds it is left to the leases' expiry, or
stays with this router.
"""

BATCH = 512
"""Leases per renewal call, so that no call holds Redis up."""

KEPT_PLANS = 64

KEPT_LESSONS = 20_000
"""Prompts of which routers that start anew are told what was learned; some 250 bytes for each turn of a session."""

LESSONS = 64
"""Prompts per look at what others have learned."""


class _Script:
    """A Lua script: called by its hash, sent whole when Redis does not know it (restarted, or its scripts flushed)."""

    def __init__(self, name: str) -> None:
        self.source = files("cygnet.router.runtime").joinpath("lua", f"{name}.lua").read_bytes()
        self._sha = sha1(self.source, usedforsecurity=False).hexdigest().encode()

    def call(self, pipe: RedisPipe, args: tuple[bytes | int | str, ...], then: Reply) -> None:
        def on_reply(reply: Any) -> None:
            if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT"):
                pipe.call((b"EVAL", self.source, 0, *args), then)
            else:
                then(reply)

        pipe.call((b"EVALSHA", self._sha, 0, *args), on_reply)


class RedisState:
    """`State` in Redis. While Redis can't be reached, requests are placed by rendezvous hash of their first block and
    by the loads last known, and are entered into Redis by the next `renew` once it is back.
    """

    def __init__(self, url: str, namespace: str, timeout_s: float, ttl_ms: int, lease_ms: int) -> None:
        self._prefix = b"{%s}:" % namespace.encode()
        self._ttl_ms = ttl_ms
        self._lease_ms = lease_ms
        self._route, self._lease, self._workers = _Script("route"), _Script("lease"), _Script("workers")
        scripts = (self._route, self._lease, self._workers)
        self.pipe = RedisPipe(url, timeout_s, [(b"SCRIPT", b"LOAD", script.source) for script in scripts])
        self._plans: dict[int, tuple[Plan, bytes]] = {}
        self._loop = asyncio.get_running_loop()
        self._to_release: list[str] = []
        self._to_settle: list[tuple[str, int]] = []
        self._flushing = False
        self._undelivered: dict[str, None] = {}
        self._known_loads: dict[int, int] = {}
        self._heard_at = 0.0
        self._own = Ledger()  # requests that were placed without Redis
        self._name = token_bytes(8)
        self._last_lesson: bytes = b"0"
        self._untold: dict[bytes, bytes] = {}

    @property
    def reachable(self) -> bool:
        return self.pipe.ready

    # --- placing

    def route(self, request: RouteRequest, then: Placed) -> None:
        if not self.pipe.ready or any(candidate.slot < 0 for candidate in request.plan.candidates):
            then(self._place_alone(request))
            return
        self._flush()
        numbers = _pack(
            (
                request.tokens,
                request.block_tokens,
                request.chance,
                self._ttl_ms,
                self._lease_ms,
                MAX_BLOCKS,
                TAIL,
                request.known,
                request.known_blocks,
                request.waited,
                request.late,
                request.look,
            )
        )
        args = (self._prefix, request.request_id, request.chain, self._packed(request.plan), numbers)

        def on_reply(reply: Any) -> None:
            if isinstance(reply, Exception):
                then(self._place_alone(request))
                return
            place, matched, cost, tier = reply
            if place == 0:
                then(NoRoom(matched))
            else:
                then(Decision(request.plan.candidates[place - 1].slot, matched, cost, tier == 1))

        self._route.call(self.pipe, args, on_reply)

    def _packed(self, plan: Plan) -> bytes:
        """The plan for the script. Steady plans are the same object again and again."""
        known = self._plans.get(id(plan))
        if known is not None and known[0] is plan:
            return known[1]
        candidates = plan.candidates
        packed = _pack(
            (
                [candidate.slot for candidate in candidates],
                [candidate.bonus for candidate in candidates],
                [candidate.min_tokens for candidate in candidates],
                [candidate.max_tokens for candidate in candidates],
                plan.match_weight,
                plan.load_weight,
                plan.load_floor,
                plan.budget,
                plan.request_tokens,
                plan.by_total,
                plan.spill,
            )
        )
        if len(self._plans) >= KEPT_PLANS:
            self._plans.clear()
        self._plans[id(plan)] = (plan, packed)  # holds the plan, so that its id is not given to another
        return packed

    def _place_alone(self, request: RouteRequest) -> Decision | NoRoom:
        if request.look:
            return NoRoom(0)
        plan = request.plan
        key = request.chain[:KEY_BYTES] or request.request_id.encode()
        order = {name: rank for rank, name in enumerate(ranked(key, (str(c.slot) for c in plan.candidates)))}
        candidates = tuple(replace(c, bonus=1.0 / (1 << min(order[str(c.slot)], 30))) for c in plan.candidates)
        # Loads that nobody lowers any more would keep requests from workers that have long been idle.
        known = self._known_loads if self._loop.time() - self._heard_at < KNOWN_S else {}
        loads = [known.get(c.slot, 0) + self._own.load(c.slot) for c in candidates]
        alone = replace(plan, candidates=candidates, match_weight=0.0)
        nothing = [0] * len(loads)
        choice = choose(alone, request.tokens, nothing, loads, request.chance, request.waited, request.late)
        if choice is None:
            return NoRoom(0)
        cost = request.tokens + plan.request_tokens
        slot = candidates[choice.place].slot
        self._own.hold(request.request_id, slot, cost, 0)
        return Decision(slot, 0, cost, choice.spilled, shared=False)

    # --- leases

    def settle(self, request_id: str, cost: int) -> None:
        if not self._own.settle(request_id, cost):
            self._to_settle.append((request_id, cost))
            self._flush_soon()

    def release(self, request_id: str) -> None:
        self._own.release(request_id)
        self._to_release.append(request_id)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """All ends of one turn of the loop go in one call."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what has ended, in order before what is asked next."""
        if not self._flushing:
            return
        self._flushing = False
        released, self._to_release = self._to_release, []
        settled, self._to_settle = self._to_settle, []

        def on_reply(reply: Any) -> None:
            if isinstance(reply, Exception):
                self._undelivered.update(dict.fromkeys(released))
                while len(self._undelivered) > MAX_UNDELIVERED:
                    del self._undelivered[next(iter(self._undelivered))]

        self._lease.call(self.pipe, (self._prefix, _pack((released, settled, (), 0))), on_reply)

    def renew(self, leases: Sequence[Lease]) -> None:
        self._flush()
        if not self.pipe.ready:
            return
        for start in range(0, len(leases), BATCH):
            batch = leases[start : start + BATCH]
            entered = [(lease.request_id, lease.slot, lease.cost) for lease in batch if lease.slot >= 0]
            self._lease.call(self.pipe, (self._prefix, _pack(((), (), entered, self._lease_ms))), lambda reply: None)
            for lease in batch:
                self._own.release(lease.request_id)  # Redis counts it from now on
        untold, self._untold = iter(self._untold.items()), {}
        while part := dict(islice(untold, BATCH)):
            self.teach(part)
        late = list(islice(self._undelivered, BATCH))
        if late:

            def on_reply(reply: Any) -> None:
                if not isinstance(reply, Exception):
                    for request_id in late:
                        self._undelivered.pop(request_id, None)

            self._lease.call(self.pipe, (self._prefix, _pack((late, (), (), 0))), on_reply)

    # --- what is learned

    def teach(self, learned: Mapping[bytes, bytes]) -> None:
        if not learned:
            return

        def on_reply(reply: Any) -> None:
            if isinstance(reply, Exception) and len(self._untold) < MAX_UNDELIVERED:
                self._untold.update(learned)

        key = self._prefix + b"learned"
        entry = (b"XADD", key, b"MAXLEN", b"~", KEPT_LESSONS, b"*", b"by", self._name, b"of", _pack(learned))
        self.pipe.call(entry, on_reply)
        self.pipe.call((b"PEXPIRE", key, self._ttl_ms), lambda reply: None)

    async def taught(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        while not found:  # what is our own says nothing new
            ask = (b"XREAD", b"COUNT", LESSONS, b"STREAMS", self._prefix + b"learned", self._last_lesson)
            reply = await self.pipe.ask(ask)
            if not reply:
                break
            for name, fields in reply[0][1]:
                self._last_lesson = name
                with suppress(ValueError, msgspec.DecodeError):  # a router of another version
                    _, by, _, learned = fields
                    if by != self._name:
                        found.update(_read_lesson(learned))
        return found

    # --- workers

    async def _run(self, *args: bytes | int | str) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()

        def on_reply(reply: Any) -> None:
            if not future.done():
                future.set_result(reply)

        self._workers.call(self.pipe, (self._prefix, *args), on_reply)
        reply = await future
        return self.pipe.checked(reply)

    async def join(self, record: WorkerRecord, ttl_s: float = 0) -> int | None:
        stored = _json(msgspec.structs.replace(record, expires_at=0))
        slot = await self._run("join", record.url, stored, int(ttl_s * 1000), self._ttl_ms, MAX_SLOTS)
        return None if slot < 0 else slot

    async def leave(self, url: str) -> None:
        await self._run("leave", url)

    async def restart(self, url: str, slot: int) -> int | None:
        new = await self._run("restart", url, slot, self._ttl_ms, MAX_SLOTS)
        return None if new < 0 else new

    async def roster(self) -> Roster:
        epoch, version, *rest = await self._run("roster", "")
        workers = {}
        for slot, record, ends in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            workers[slot] = msgspec.structs.replace(_read_record(record), expires_at=int(ends))
        return Roster(epoch, version, workers)

    async def loads(self) -> dict[int, int]:
        self._flush()
        self._lease.call(self.pipe, (self._prefix, _pack(((), (), (), self._lease_ms))), lambda reply: None)
        reply = await self.pipe.ask((b"HGETALL", self._prefix + b"load"))
        if isinstance(reply, list):
            reply = dict(zip(reply[::2], reply[1::2], strict=True))
        self._known_loads = {int(slot): int(load) for slot, load in reply.items()}
        self._heard_at = self._loop.time()
        return dict(self._known_loads)

    async def aclose(self) -> None:
        self._flush()
        await self.pipe.aclose()
