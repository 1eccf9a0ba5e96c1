"""The scheduler: one token budget per step; decodes first, then prefill chunks, then new requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from cygnet.base.ids import BlockId, RequestId
from cygnet.engine.plan import NewRequest, ScheduledRequest
from cygnet.engine.queue import WaitingQueue
from cygnet.engine.request import Request
from cygnet.kv.hashing import common_blocks
from cygnet.kv.manager import KVManager
from cygnet.kv.reuse import CachedTokens, ReusePlan


@dataclass(frozen=True)
class SchedulerPolicy:
    """Limits and choices; see `EngineSettings` for their meaning."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    ageing_tokens_per_s: int = 1000
    share_in_flight: bool = True
    growth_tokens: int = 32
    """Tokens that every running request can still grow by where another one is admitted beside it. Without them a full
    pool admits what it preempts a few tokens later, and computes much of it twice."""


@dataclass(slots=True)
class AdmissionStats:
    """Counters of what admissions found in the cache (each request once, at its first admission)."""

    query_tokens: int = 0
    full_hit_tokens: int = 0
    window_safe_hit_tokens: int = 0
    effective_hit_tokens: int = 0
    rebuilt_tokens: int = 0
    host_hit_tokens: int = 0
    store_hit_tokens: int = 0
    preemptions: int = 0


class Batch:
    """Tokens chosen so far for one step, within the token budget."""

    def __init__(self, budget: int) -> None:
        self.left = budget
        self.counts: dict[RequestId, int] = {}

    def put(self, request_id: RequestId, count: int) -> None:
        self.counts[request_id] = count
        self.left -= count

    def drop(self, request_id: RequestId) -> None:
        self.left += self.counts.pop(request_id, 0)


class Scheduler:
    """Chooses the tokens of the next step.

    Progress: running requests are served oldest first, and one that finds no room preempts younger ones. The oldest can
    thus always end up alone, and alone it fits: its length was checked on arrival, its chunk shrinks to what the SWA
    pool leaves, and the pools are never smaller than one window + one block (`plan_pools`).

    Invariants: a request is waiting or running, never both; running requests hold KV, waiting ones hold none; `_gone`
    names what has stopped running since the last step; `_by_age`, where it is not `None`, is `running`, oldest first.
    """

    def __init__(self, kv: KVManager, policy: SchedulerPolicy) -> None:
        self._kv = kv
        self._policy = policy
        self.waiting = WaitingQueue(policy.ageing_tokens_per_s)
        self.running: dict[RequestId, Request] = {}
        self.stats = AdmissionStats()
        self._gone: list[RequestId] = []
        self._by_age: list[Request] | None = None
        self._num_passed_over = 0

    @property
    def gone(self) -> Sequence[RequestId]:
        """Rows that the next step tells the runner to forget."""
        return self._gone

    def add(self, request: Request, now_ns: int) -> None:
        """Put a request in the queue."""
        self.requeue(request)
        self._kv.want(request.kv, request.num_tokens, now_ns)

    def requeue(self, request: Request) -> None:
        """Give a waiting request the place that what is cached now entitles it to."""
        self.waiting.push(request, self._plan(request).num_uncached_tokens)

    def remove(self, request: Request, now_ns: int) -> None:
        """Take a request out, waiting or running; its KV goes to the tree."""
        if request.running:
            self._stop(request, now_ns)
        else:
            self.waiting.remove(request.request_id)
            self._kv.forget(request.kv)

    def schedule(self, now_ns: int) -> tuple[list[NewRequest], list[ScheduledRequest], list[RequestId]]:
        """New rows, what to run, and rows to forget. Blocks are allocated for all that is returned."""
        batch = Batch(self._policy.max_num_batched_tokens)
        before, size = self.stats.preemptions, self._kv.block_size
        prefills = []
        for request in self._oldest_first():
            if len(request.token_ids) - request.kv.num_computed > 1:
                prefills.append(request)
            elif request.running:
                if batch.left > 0 and request.kv.num_computed % size:
                    batch.put(request.request_id, 1)  # as `_grow` does within a block, which is most decodes
                else:
                    self._grow(request, batch, now_ns)
        for request in prefills:
            if request.running:
                self._grow(request, batch, now_ns)
        preempted = self.stats.preemptions > before
        admitted = [] if preempted else self._admit(batch, now_ns)
        self._num_passed_over += preempted  # next time it may be otherwise
        new = [self._describe(request) for request in admitted]
        scheduled = [self.dispatch(self.running[rid], count) for rid, count in batch.counts.items()]
        gone, self._gone = self._gone, []
        return new, scheduled, gone

    # ------------------------------------------------------ running requests

    def _oldest_first(self) -> list[Request]:
        if self._by_age is None:
            self._by_age = sorted(self.running.values(), key=lambda r: r.priority)
        return self._by_age

    def _grow(self, request: Request, batch: Batch, now_ns: int) -> None:
        """Give `request` as many of its remaining tokens as budget and pools allow, preempting younger ones for one."""
        if batch.left <= 0:
            return
        computed = request.kv.num_computed
        count = min(len(request.token_ids) - computed, batch.left)
        if not self._kv.allocate(request.kv, computed + count, now_ns):
            count = min(count, self._make_room(request, batch, now_ns))
            if count <= 0 or not self._kv.allocate(request.kv, computed + count, now_ns):
                return
        batch.put(request.request_id, count)

    def _make_room(self, request: Request, batch: Batch, now_ns: int) -> int:
        """How many more tokens `request` has room for. As long as that is none, the youngest is preempted; if that is
        `request` itself, it waits for the others to end."""
        while (room := self._kv.extent(request.kv) - request.kv.num_computed) <= 0:
            victim = self._oldest_first()[-1]
            if victim is request:
                return 0
            self._preempt(victim, now_ns)
            batch.drop(victim.request_id)
        return room

    def _preempt(self, victim: Request, now_ns: int) -> None:
        """Back to the queue. What it computed stays in the tree for as long as there is room."""
        self._stop(victim, now_ns)
        self.stats.preemptions += 1
        self.requeue(victim)

    def _stop(self, request: Request, now_ns: int) -> None:
        del self.running[request.request_id]
        self._by_age = None
        request.running = False
        self._kv.free(request.kv, now_ns)
        self._gone.append(request.request_id)

    # --------------------------------------------------------------- admission

    def _plan(self, request: Request) -> ReusePlan:
        return self._kv.plan(request.kv, request.num_tokens)

    def _admit(self, batch: Batch, now_ns: int) -> list[Request]:
        """Admit waiting requests in the queue's order while budget, seats and both pools last.

        The first that does not fit ends it: letting smaller ones overtake would starve it.
        """
        admitted: list[Request] = []
        deferred: list[Request] = []
        if len(self.waiting) > 0:
            self.waiting.refresh(self._kv.version, lambda request: self._plan(request).num_uncached_tokens)
        while (
            len(self.running) < self._policy.max_num_seqs
            and batch.left > 0
            and (request := self.waiting.peek()) is not None
        ):
            plan = self._plan(request)
            if not self._kv.ready(request.kv, now_ns) or self._shares_with_running(request, plan):
                deferred.append(request)
                self.waiting.remove(request.request_id)
                continue
            if not self._start(request, plan, now_ns):
                break
            self.waiting.remove(request.request_id)
            admitted.append(request)
            self._grow(request, batch, now_ns)
        for request in deferred:
            self.requeue(request)
        self._num_passed_over = len(deferred)
        return admitted

    def admits_as_before(self) -> bool:
        """Whether the next `schedule` admits nobody, if the last one didn't and only decodes go on within their blocks.

        Who found no room finds none then: what is cached is the same, and running requests lay claim to more. So it is
        enough that the order is the same, and that nobody was put off for another reason than room.
        """
        return not self._num_passed_over and (not len(self.waiting) or self.waiting.is_current(self._kv.version))

    def _shares_with_running(self, request: Request, plan: ReusePlan) -> bool:
        """Whether a running request is computing blocks that `request` needs next, so that waiting saves their compute.

        If so, the running one is asked to keep its window where the two part.
        """
        if not self._policy.share_in_flight or not self._kv.policy.prefix_cache:
            return False
        limit, keys = (request.num_tokens - 1) // self._kv.block_size, request.kv.keys
        for other in self.running.values():
            if keys[:1] != other.kv.keys[:1]:
                continue  # nearly always: another first block, so nothing is shared
            shared = min(limit, common_blocks(keys, other.kv.keys))
            ahead = shared * self._kv.block_size
            if ahead > max(plan.start, other.num_computed_tokens) and shared > plan.num_full_blocks:
                self._kv.want_checkpoint(other.kv, shared)
                return True
        return False

    def _start(self, request: Request, plan: ReusePlan, now_ns: int) -> bool:
        """Lock the request's prefix if its whole prompt will find room beside those already running."""
        full_room, swa_room = self._room_for(plan)
        if not self._kv.admit(request.kv, plan, full_room=full_room, swa_room=swa_room, now_ns=now_ns):
            return False
        request.running = True
        request.num_sent_full, request.num_sent_swa = 0, request.kv.live_from
        self.running[request.request_id] = request
        self._by_age = None
        self._kv.forget(request.kv)
        if request.admitted_ns is None:
            request.admitted_ns = now_ns
            request.cached = self._kv.cached_by_tier(request.kv, plan)
            self._count_hit(plan, request.cached)
        return True

    def _room_for(self, plan: ReusePlan) -> tuple[int, int]:
        """Blocks to have free or evictable before admitting: its own needs and what running ones have yet to take."""
        size, window = self._kv.block_size, self._kv.tree.window_blocks
        blocks = ceil(plan.num_tokens / size)
        full = blocks - plan.num_device_blocks
        start = plan.start // size
        swa = min(blocks - start, 2 if plan.kind == "resume" else window + 2) + plan.num_swa_loads
        for other in self.running.values():
            kv = other.kv
            needed = -(-(len(other.token_ids) + self._policy.growth_tokens) // size)
            full += max(0, needed - len(kv.full_blocks))
            # In blocks from `live_from` on: at most a window and two, of which it holds some.
            swa += max(0, min(needed, kv.live_from + window + 2) - len(kv.swa_blocks))
        return full, swa if self._kv.geometry.has_swa else 0

    def _count_hit(self, plan: ReusePlan, cached: CachedTokens) -> None:
        size = self._kv.block_size
        self.stats.host_hit_tokens += cached.host
        self.stats.store_hit_tokens += cached.store
        self.stats.query_tokens += plan.num_tokens
        self.stats.full_hit_tokens += (plan.num_full_blocks + plan.num_unused_blocks) * size
        self.stats.window_safe_hit_tokens += plan.num_safe_blocks * size
        self.stats.effective_hit_tokens += plan.start
        self.stats.rebuilt_tokens += plan.rebuilt_tokens(size)

    # ---------------------------------------------------------------- dispatch

    def _describe(self, request: Request) -> NewRequest:
        return NewRequest(
            request.request_id,
            request.token_ids[:],
            request.num_prompt_tokens,
            request.sampling,
            write_full_from=request.kv.num_hit_blocks * self._kv.block_size,
            key_floor=request.kv.key_floor,
            exact_from=request.kv.exact_from,
        )

    def dispatch(self, request: Request, count: int) -> ScheduledRequest:
        """What the runner is told to run: the request's next `count` tokens, with the blocks it does not know."""
        kv = request.kv
        start, sent_full, sent_swa = kv.num_computed, request.num_sent_full, request.num_sent_swa
        num_full, num_swa = len(kv.full_blocks), len(kv.swa_blocks)
        new_full: tuple[BlockId, ...] = ()
        new_swa: tuple[BlockId, ...] = ()
        if sent_full < num_full:
            new_full, request.num_sent_full = tuple(kv.full_blocks[sent_full:]), num_full
        if sent_swa < num_swa:
            new_swa, request.num_sent_swa = tuple(kv.swa_blocks[sent_swa:]), num_swa
        sample = start + count == len(request.token_ids)
        return ScheduledRequest(request.request_id, start, count, sent_full, new_full, sent_swa, new_swa, sample)

    def audit(self) -> list[str]:
        """All discrepancies between the queue, the running requests and their KV."""
        faults = self.waiting.audit()
        faults += [f"{rid} waits and runs" for rid in self.running if rid in self.waiting]
        faults += [f"{r.request_id} waits but holds KV" for r in self.waiting if r.kv.full_blocks or r.running]
        faults += [f"{rid} runs but is not marked so" for rid, r in self.running.items() if not r.running]
        if self._by_age is not None and self._by_age != sorted(self.running.values(), key=lambda r: r.priority):
            faults.append("the order by age is not that of the running requests")
        return faults
