"""The router's core: takes requests from connections, places them, and keeps account of what is in flight."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from random import Random
from secrets import token_hex

from cygnet.base.errors import InvalidRequestError
from cygnet.metrics import router as names
from cygnet.metrics.catalogue import Labels, Metric
from cygnet.metrics.recorder import Recorder
from cygnet.router.buckets import parse_buckets
from cygnet.router.config import RouterConfig
from cygnet.router.limits import KeyLimits, key_digest
from cygnet.router.policies import POLICIES, STEADY, Ask, Weights
from cygnet.router.prompt import KeySettings, Prompt, read_prompt
from cygnet.router.queue import AdmissionQueue
from cygnet.router.runtime.admin import Admin
from cygnet.router.runtime.client import ClientConnection
from cygnet.router.runtime.descriptors import room_for_callers
from cygnet.router.runtime.exchange import Exchange
from cygnet.router.runtime.fleet import Fleet, Worker
from cygnet.router.runtime.followers import Followers
from cygnet.router.runtime.tracing import Tracing
from cygnet.router.runtime.wire import HttpRequest, error_body, own_response
from cygnet.router.scoring import Plan
from cygnet.router.state import Decision, Lease, NoRoom, Placed, RouteRequest, State
from cygnet.router.view import Member

NS = 1_000_000_000
PUMPED = 16
"""Waiting requests that are tried when room may have come: one that does not fit must not hold up all others."""
KEPT_PLANS = 64
MAX_REQUEST_ID = 128
MAX_LOG_LINES = 10_000
MAX_CALLERS = 4096


class Proxy:
    """Serves requests (`handle`), with the fleet and the state given.

    Invariants (`audit`): every exchange that is not done is in `exchanges`; those that wait are in a queue; the bytes
    accounted for are those of the bodies held; when nothing is in flight no lease is held.
    """

    def __init__(
        self, config: RouterConfig, keys: KeySettings, state: State, fleet: Fleet, tracing: Tracing | None = None
    ) -> None:
        self.config = config
        self.tracing = tracing
        self.settings = config.server
        self._most_connections = room_for_callers(config.server.max_connections)
        self.state = state
        self.fleet = fleet
        self.recorder = Recorder(names.RECORDED)
        self.admin = Admin(self)
        self.exchanges: dict[str, Exchange] = {}
        self.connections: set[ClientConnection] = set()
        self.stopping = False
        self.loads: dict[int, int] = {}
        self.log_lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self.loop = asyncio.get_running_loop()
        self._keys = keys
        self.followers = Followers(keys, fleet.authorization, self.recorder, config.cache.max_entries, state.teach)
        self._limits = KeyLimits(
            frozenset(key_digest(key) for key in config.auth.api_keys),
            config.auth.max_in_flight,
            config.auth.requests_per_minute,
        )
        self._needs_key = bool(config.auth.api_keys)
        self._callers: dict[bytes, bytes] = {}
        """Digests by `Authorization` header, of keys that are valid (and in the settings anyway)."""
        worker_key = config.workers.api_key
        self.authorization: bytes | None = (
            f"Bearer {worker_key}".encode() if worker_key else b"" if self._needs_key else None
        )
        """Of requests to workers: ours, or none where callers authenticate to the router, or the callers'."""
        self._policy = POLICIES.get(config.routing.policy)
        self._steady = config.routing.policy in STEADY
        self._limits_by_group = parse_buckets(config.routing.buckets)
        routing = config.routing
        self._weights = Weights(
            match_weight=routing.match_weight,
            load_floor=routing.load_floor_tokens,
            budget=routing.worker_budget_tokens,
            request_tokens=routing.request_tokens,
            by_total=routing.bucket_by == "total",
            spill=routing.spill,
        )
        self.groups = tuple(self._limits_by_group)
        """Names of the length buckets."""
        self._plans: dict[int, tuple[tuple[Member, ...], Plan]] = {}
        self._queues: dict[str, AdmissionQueue] = {}
        self._queued_at: dict[str, float] = {}
        self._trying: set[str] = set()
        self._arrived: list[Exchange] = []
        self._pumping = False
        self._session_header = config.routing.session_header.lower().encode()
        self._random = Random()
        self._instance = token_hex(4)
        self._count = 0
        self._turn = 0
        self._buffered = 0
        fleet.on_change = self.pump

    @staticmethod
    def now() -> int:
        """Nanoseconds that never run backwards."""
        return time.monotonic_ns()

    # --- connections (the `Gate` of `ClientConnection`)

    def admit(self, connection: ClientConnection) -> bool:
        self.connections.add(connection)
        return len(self.connections) <= self._most_connections

    def gone(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)

    def buffer(self, num_bytes: int) -> bool:
        if num_bytes > 0 and self._buffered + num_bytes > self.settings.max_buffered_bytes:
            return False
        self._buffered += num_bytes
        return True

    def refused(self, status: int) -> None:
        self.recorder.add(names.REQUESTS, (str(status),))
        self.recorder.add(names.REJECTED, ("malformed",))

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Route a request, or answer it here."""
        answer = self.admin.answer(connection, request)
        if answer:
            self.buffer(-len(request.body))
            return
        key = b""
        if self._needs_key:
            key = self.caller(request)
            if key not in self._limits:
                self.reply(connection, request, 401, "the API key is missing or wrong", "invalid_api_key")
                return
            wait_s = self._limits.begin(key, self.now())
            if wait_s:
                self.reply(connection, request, 429, "this key is at its limit", "rate_limit", retry_after_s=wait_s)
                return
        try:
            prompt = self._read(request, key)
        except InvalidRequestError as error:
            if key:
                self._limits.end(key)
            self.reply(connection, request, 400, error.message, "invalid_json")
            return
        self._count += 1
        lease_id = f"{self._instance}-{self._count:x}"
        exchange = Exchange(self, connection, request, prompt, key, lease_id, _request_id(request, lease_id))
        connection.serve(exchange)
        self.exchanges[lease_id] = exchange
        if not self._arrived:
            self.loop.call_soon(self._place_arrived)
        self._arrived.append(exchange)

    def _place_arrived(self) -> None:
        """Place what came in during one turn of the loop: the same code for all, one after the other, is quicker."""
        arrived, self._arrived = self._arrived, []
        for exchange in arrived:
            if not exchange.done:
                self.place(exchange)

    def _read(self, request: HttpRequest, key: bytes) -> Prompt:
        fields = request.fields
        kind = fields.get(b"content-type")
        if (kind and b"json" not in kind) or fields.get(b"content-encoding"):
            return Prompt(model="", chain=b"", tokens=0, prefix=b"", session=b"", priority=0)
        session = fields.get(self._session_header, b"") if self._session_header else b""
        return read_prompt(request.body, self._keys, key if self.config.auth.isolate else b"", session)

    def caller(self, request: HttpRequest) -> bytes:
        """Digest of the caller's key."""
        value = request.fields.get(b"authorization", b"")
        known = self._callers.get(value)
        if known is not None:
            return known
        text = value[7:] if value[:7].lower() == b"bearer " else request.header(b"x-api-key")
        digest = key_digest(text.strip().decode("latin-1"))
        if value[:7].lower() == b"bearer " and digest in self._limits and len(self._callers) < MAX_CALLERS:
            self._callers[value] = digest
        return digest

    def reply(
        self,
        connection: ClientConnection,
        request: HttpRequest,
        status: int,
        message: str,
        code: str,
        retry_after_s: int = 0,
    ) -> None:
        """Refuse a request that has no exchange yet."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
        headers = [("Retry-After", str(retry_after_s))] if retry_after_s else []
        body = error_body(message, kind, code)
        connection.write(own_response(status, body, keep_alive=request.keep_alive, headers=headers))
        self.recorder.add(names.REQUESTS, (str(status),))
        self.recorder.add(names.REJECTED, (code,))
        self.buffer(-len(request.body))
        connection.finish(keep_alive=request.keep_alive)

    # --- placing

    def _members(self, exchange: Exchange) -> tuple[Member, ...]:
        members = self.fleet.members(exchange.prompt.model)
        if exchange.tried:
            members = tuple(member for member in members if member.url not in exchange.tried)
        return members

    def has_other(self, exchange: Exchange) -> bool:
        """Whether there is a worker that `exchange` has not been sent to."""
        current = exchange.worker.url if exchange.worker is not None else ""
        return any(member.url != current for member in self._members(exchange))

    def _plan(self, exchange: Exchange, members: tuple[Member, ...]) -> Plan:
        if self._steady:
            kept = self._plans.get(id(members))
            if kept is not None and kept[0] is members:
                return kept[1]
        prompt = exchange.prompt
        self._turn += 1
        ask = Ask(prompt.prefix, prompt.session, self._turn, self._random.random())
        plan = self._policy(ask, members, self._limits_by_group, self._weights)
        if self._steady:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.clear()
            self._plans[id(members)] = (members, plan)
        return plan

    def _request(
        self, exchange: Exchange, members: tuple[Member, ...], *, waited_s: float = 0.0, look: bool = False
    ) -> RouteRequest:
        prompt = exchange.prompt
        plan = self._plan(exchange, members)
        known, known_blocks = self.followers.known(prompt, plan.candidates, self.fleet.urls_by_slot)
        return RouteRequest(
            exchange.lease_id,
            prompt.chain,
            prompt.tokens,
            self._keys.block_tokens,
            plan,
            self._random.random(),
            known,
            known_blocks,
            int(waited_s * self.config.queue.ageing_tokens_per_s),
            waited_s >= self.config.queue.late_s,
            look,
        )

    def place(self, exchange: Exchange) -> None:
        """Find a worker for it: now, later from the queue, or not at all."""
        members = self._members(exchange)
        if not members:
            self._refuse(exchange)
            return
        # Where others wait, their order decides, not who happens to come when there is room. A retry has had its turn.
        behind = not exchange.attempts and bool(self._queues.get(exchange.prompt.model))

        def then(result: Decision | NoRoom) -> None:
            if isinstance(result, Decision):
                exchange.placed(result)
            else:
                exchange.no_room(result)
                if behind:
                    self.pump()

        self._route(exchange, self._request(exchange, members, look=behind), then)

    def _route(self, exchange: Exchange, request: RouteRequest, then: Placed) -> None:
        """Ask the state."""
        trace = exchange.trace
        if trace is None:
            self.state.route(request, then)
            return

        def traced(result: Decision | NoRoom) -> None:
            trace.decided(result if isinstance(result, Decision) else None, exchange.prompt.tokens)
            then(result)

        trace.deciding()
        self.state.route(request, traced)

    def _refuse(self, exchange: Exchange) -> None:
        """Say why there is nobody for it."""
        model, known = exchange.prompt.model, self.fleet.models
        if exchange.tried:
            exchange.fail(502, "no worker could answer this request", "worker_failed", retry_after_s=1)
        elif known and model and model not in known:
            shown = ", ".join(sorted(known)[:8])
            exchange.fail(404, f"there is no model {model!r} here; there is: {shown}", "model_not_found")
        else:
            exchange.fail(503, "no worker is available now", "no_worker", retry_after_s=2)

    def note_placed(self, exchange: Exchange, decision: Decision) -> None:
        """Count a decision."""
        assert exchange.worker is not None
        add = self.recorder.add
        self.followers.sent(exchange.request_id, exchange.worker.url, exchange.prompt)
        add(names.PLACED, (exchange.worker.url,))
        add(names.PROMPT_TOKENS, (), exchange.prompt.tokens)
        add(names.MATCHED_TOKENS, (), decision.matched_tokens)
        if decision.spilled:
            add(names.SPILLED)
        if not decision.shared:
            add(names.ALONE)

    def worker_failed(self, worker: Worker, kind: str) -> None:
        """A request to a worker failed."""
        self.recorder.add(names.FAILURES, (worker.url, kind))
        self.fleet.failed(worker, kind)

    # --- waiting

    def enqueue(self, exchange: Exchange, uncached_tokens: int) -> None:
        """Wait in the queue of the request's model."""
        model = exchange.prompt.model
        queue = self._queues.get(model)
        if queue is None:
            settings = self.config.queue
            queue = self._queues[model] = AdmissionQueue(
                settings.max_waiting,
                int(settings.max_wait_s * NS),
                settings.ageing_tokens_per_s,
                settings.priority_tokens,
                int(settings.late_s * NS),
            )
        if exchange.lease_id in queue:
            return
        if self.num_waiting >= self.config.queue.max_waiting or not queue.add(
            exchange.lease_id, uncached_tokens, self.now(), exchange.prompt.priority
        ):
            exchange.fail(429, "all workers are busy and the queue is full", "queue_full", retry_after_s=1)
            return
        self._queued_at[exchange.lease_id] = self.loop.time()
        if exchange.trace is not None:
            exchange.trace.queued()

    @property
    def num_waiting(self) -> int:
        """Requests in queues."""
        return sum(map(len, self._queues.values()))

    def pump(self) -> None:
        """Room may have come: place who waits, in order."""
        if not self._pumping and self._queued_at:
            self._pumping = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        now = self.loop.time()
        for queue in list(self._queues.values()):
            for waiting in queue.to_try(PUMPED, self.now()):
                exchange = self.exchanges.get(waiting.request_id)
                if exchange is None or exchange.lease_id in self._trying:
                    continue
                members = self._members(exchange)
                if members:
                    self._trying.add(exchange.lease_id)
                    waited_s = now - self._queued_at[exchange.lease_id]
                    request = self._request(exchange, members, waited_s=waited_s)
                    self._route(exchange, request, partial(self._tried, exchange))

    def _tried(self, exchange: Exchange, result: Decision | NoRoom) -> None:
        """What came of trying a request that waits."""
        self._trying.discard(exchange.lease_id)
        if isinstance(result, NoRoom):
            return
        self._leave_queue(exchange)
        exchange.placed(result)
        self.pump()

    def _leave_queue(self, exchange: Exchange) -> None:
        at = self._queued_at.pop(exchange.lease_id, None)
        if at is not None:
            self._queues[exchange.prompt.model].remove(exchange.lease_id)
            self.recorder.observe(names.QUEUED, self.loop.time() - at)
            if exchange.trace is not None:
                exchange.trace.dequeued()

    # --- the end of a request

    def ended(self, exchange: Exchange, status: int, key: bytes, body_bytes: int) -> None:
        """Let go of all that an exchange holds. Called once for each."""
        del self.exchanges[exchange.lease_id]
        self._leave_queue(exchange)
        self.state.release(exchange.lease_id)
        self.buffer(-body_bytes)
        if key:
            self._limits.end(key)
        self.recorder.add(names.REQUESTS, (str(status),))
        self.recorder.observe(names.DURATION, self.loop.time() - exchange.began)
        self.pump()

    def log_access(self, exchange: Exchange, request: HttpRequest, status: int, num_bytes: int, note: str) -> None:
        """One line per request; never its text."""
        if not self.settings.access_log:
            return
        worker = exchange.worker.url if exchange.worker is not None else "-"
        took = (self.loop.time() - exchange.began) * 1000
        first = (exchange.first_byte - exchange.began) * 1000 if exchange.first_byte else 0.0
        line = (
            f"{exchange.request_id.decode('latin-1')} {request.method.decode()} "
            f"{request.target.partition(b'?')[0].decode('latin-1')} {status} {worker} {took:.1f}ms first={first:.1f}ms "
            f"tokens={exchange.prompt.tokens} matched={exchange.matched_tokens} bytes={num_bytes} "
            f"attempts={exchange.attempts}"
        )
        self.log_lines.append(f"{line} {note}\n" if note else f"{line}\n")

    # --- time

    def tick(self) -> None:
        """Look at deadlines. To be called several times a second."""
        now = self.loop.time()
        for exchange in [exchange for exchange in self.exchanges.values() if exchange.deadline <= now]:
            if not exchange.done:
                exchange.overdue()
        for queue in self._queues.values():
            for waiting in queue.overdue(self.now()):
                self._queued_at.pop(waiting.request_id, None)
                self.exchanges[waiting.request_id].fail(
                    503,
                    f"all workers were busy for {self.config.queue.max_wait_s:g} s",
                    "queue_timeout",
                    retry_after_s=5,
                )
        self.pump()

    def tidy(self) -> None:
        """Close what has been idle for too long. To be called about once a second."""
        now = self.loop.time()
        for connection in [c for c in self.connections if 0 < c.deadline <= now]:
            connection.abort()
        before = now - self.config.workers.idle_s
        for worker in self.fleet.workers:
            worker.pool.close_idle(before)
        for model in [model for model, queue in self._queues.items() if not len(queue)]:
            del self._queues[model]

    @property
    def leases(self) -> list[Lease]:
        """Of all requests in flight."""
        return [lease for exchange in self.exchanges.values() if (lease := exchange.lease) is not None]

    def gauges(self) -> Iterator[tuple[Metric, Labels, float]]:
        """Values at this moment."""
        yield names.CONNECTIONS, (), len(self.connections)
        yield names.IN_FLIGHT, (), len(self.exchanges)
        yield names.WAITING, (), self.num_waiting
        yield names.BUFFERED, (), self._buffered
        now = self.now()
        for worker in self.fleet.workers:
            yield names.WORKER_UP, (worker.url,), float(worker.health.available(now))
            yield names.WORKER_LOAD, (worker.url,), self.loads.get(worker.slot, 0)
        for url, view in self.followers.views.items():
            yield names.KV_BLOCKS, (url,), len(view)
        yield names.STATE_UP, (), float(self.state.reachable)

    def audit(self) -> list[str]:
        """Discrepancies of the account of requests; all of them when idle."""
        found = [f"exchange {name} is done and kept" for name, exchange in self.exchanges.items() if exchange.done]
        waiting = {name for queue in self._queues.values() for name in self._queued_at if name in queue}
        if waiting != self._queued_at.keys() or waiting - self.exchanges.keys():
            found.append("who waits and who is in a queue differ")
        for queue in self._queues.values():
            found += queue.audit()
        if not self.exchanges and not self.connections and self._buffered:
            found.append(f"{self._buffered} bytes are accounted for and none are held")
        for worker in self.fleet.workers:
            found += worker.health.audit()
        return found + self._limits.audit()


def _request_id(request: HttpRequest, default: str) -> bytes:
    """The caller's id for the request, if it is fit for headers and logs."""
    given = request.header(b"x-request-id")
    if given and len(given) <= MAX_REQUEST_ID and given.isascii() and given.decode().isprintable():
        return given
    return default.encode()
