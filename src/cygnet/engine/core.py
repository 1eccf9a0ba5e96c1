"""EngineCore: requests in, step plans out, results in, events out. Pure: no clock, no device, no I/O."""

from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass

from cygnet.base.cache_report import CacheReport, FlushReport
from cygnet.base.errors import ContextLengthError, InvalidRequestError, InvariantError, QueueFullError, RequestError
from cygnet.base.ids import RequestId
from cygnet.base.messages import AddRequest, EngineStats, RequestOutput
from cygnet.engine.plan import SampledToken, StepPlan, StepResult
from cygnet.engine.request import Request
from cygnet.engine.scheduler import Scheduler, SchedulerPolicy
from cygnet.engine.tier_stats import with_lower_tiers
from cygnet.kv.hashing import root_key
from cygnet.kv.inspect import inspect_cache
from cygnet.kv.manager import KVManager
from cygnet.kv.request_kv import RequestKV
from cygnet.kv.transfers import StoreCommand, StoreResult


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that was checked and whose prompt was hashed, ready to be queued."""

    message: AddRequest
    kv: RequestKV
    token_ids: MutableSequence[int]
    """The prompt's tokens, the core's own from `add_prepared` on: it appends what is generated. Of blocks that `kv` has
    keys of only the number counts."""


class EngineCore:
    """One replica's engine, as a state machine.

        prepare       at any time: looks at nothing that changes
        add / abort   at any time between `apply` and the next `schedule`
        schedule(now) → StepPlan, or None when nothing can run
        apply(result, now) → outputs; must follow each plan before the next `schedule`

    Times are integer nanoseconds of any monotonic clock. `fingerprint` names what KV depends on besides tokens
    (model, dtype);
    `eos_token_ids` end a sequence unless it ignores them. Beyond `max_requests` running and waiting, new ones are
    refused.
    """

    def __init__(
        self,
        kv: KVManager,
        policy: SchedulerPolicy,
        *,
        fingerprint: str,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int,
        max_requests: int = 576,
    ) -> None:
        self.kv = kv
        self._scheduler = Scheduler(kv, policy)
        self._fingerprint = fingerprint
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self.max_requests = max_requests
        self._requests: dict[RequestId, Request] = {}
        self._plan: StepPlan | None = None
        self._known_repeats = 0
        """What `num_repeats` said last, as long as nothing has changed since; else 0."""
        self.num_added = 0
        """Requests ever added."""
        self._steps = 0
        self._computed_tokens = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    @property
    def running(self) -> Mapping[RequestId, Request]:
        """Requests that hold KV. Between `apply` and `schedule` the runner has a row for each of them and of `gone`."""
        return self._scheduler.running

    @property
    def gone(self) -> Sequence[RequestId]:
        """Requests whose rows the next plan tells the runner to forget."""
        return self._scheduler.gone

    @property
    def num_requests(self) -> int:
        """Requests waiting or running."""
        return len(self._requests)

    # --------------------------------------------------------------- requests

    def add(self, message: AddRequest, now_ns: int) -> None:
        """Queue a request. Raises a `RequestError` if it can't be served, now or ever."""
        self.add_prepared(self.prepare(message), now_ns)

    def prepare(self, message: AddRequest) -> PreparedRequest:
        """The part of `add` that takes long and depends on the message alone: checks, and the keys of the prompt's
        blocks. Changes nothing. Raises a `RequestError` if the request can never be served."""
        self._check(message)
        root = root_key(self._fingerprint, message.cache_salt)
        kv = self.kv.new(RequestId(message.request_id), root, message.prompt_token_ids, message.message_starts)
        return PreparedRequest(message, kv, list(message.prompt_token_ids))

    def add_prepared(self, prepared: PreparedRequest, now_ns: int) -> None:
        """The rest of `add`. Raises a `RequestError` if the request can't be served now. A prepared request is added
        once."""
        message, request_id = prepared.message, prepared.kv.request_id
        if request_id in self._requests:
            raise InvalidRequestError(f"request id {request_id!r} is in use", request_id=request_id)
        if len(self._requests) >= self.max_requests:
            raise QueueFullError(f"{self.max_requests} requests are running or waiting", request_id=request_id)
        sampling = message.sampling
        request = Request(
            request_id,
            prepared.token_ids,
            len(prepared.token_ids),
            sampling,
            max_tokens=min(sampling.max_tokens, self.kv.sizes.max_model_len - len(prepared.token_ids)),
            # From another clock it could be last in line for ever.
            arrival_ns=min(message.arrival_ns or now_ns, now_ns),
            sequence=self.num_added,
            kv=prepared.kv,
            stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos),
        )
        self.num_added += 1
        self._known_repeats = 0
        self._requests[request_id] = request
        self._scheduler.add(request, now_ns)

    def _check(self, message: AddRequest) -> None:
        request_id, tokens = message.request_id, message.prompt_token_ids
        if not tokens:
            raise InvalidRequestError("the prompt is empty", param="prompt", request_id=request_id)
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise InvalidRequestError(
                f"prompt token ids must be between 0 and {self._vocab_size - 1}", param="prompt", request_id=request_id
            )
        try:
            message.sampling.validate()
        except RequestError as error:
            error.request_id = request_id
            raise
        for param, ids in (
            ("stop_token_ids", message.sampling.stop_token_ids),
            ("logit_bias", message.sampling.logit_bias),
        ):
            if any(not 0 <= token < self._vocab_size for token in ids):
                raise InvalidRequestError(
                    f"{param}: token ids must be between 0 and {self._vocab_size - 1}",
                    param=param,
                    request_id=request_id,
                )
        if len(tokens) >= self.kv.sizes.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens; with at least one answer token this server holds "
                f"{self.kv.sizes.max_model_len}",
                param="prompt",
                request_id=request_id,
            )

    def abort(self, request_ids: Iterable[str], now_ns: int) -> list[RequestOutput]:
        """End requests; their blocks are free (or cached) at once. Ids not known are ignored."""
        self._known_repeats = 0
        return [
            self._finish(request, "abort", now_ns)
            for request_id in request_ids
            if (request := self._requests.get(RequestId(request_id))) is not None
        ]

    def flush_cache(self, *, store: bool = False) -> FlushReport:
        """Drop all cached blocks of device and host that no running request holds, and with `store` what the store has
        of this model."""
        return self.kv.flush(store=store)

    def inspect_cache(self, limit: int, now_ns: int) -> CacheReport:
        """What is cached where, with the `limit` sequences used last; at any time. See `cygnet.kv.inspect`."""
        return inspect_cache(self.kv, limit, now_ns)

    # ------------------------------------------------------------------- steps

    def schedule(self, now_ns: int) -> StepPlan | None:
        """Decide the next step. `None` when there is nothing to do now: no request is there, or all that are wait for
        the store (`waits_for_store`). A plan may have no requests, only transfers or rows to forget."""
        if self._plan is not None:
            raise InvariantError("schedule called again before the last plan's result was applied")
        new, scheduled, gone = self._scheduler.schedule(now_ns) if self._requests else ([], [], [])
        if self._requests and not scheduled and not self.waits_for_store(now_ns):
            raise InvariantError(f"{len(self._requests)} requests are there and none can run")
        transfers = self.kv.take_transfers(now_ns)
        if not (scheduled or gone or transfers):
            return None
        freed_full, freed_swa = self.kv.take_freed()
        self._plan = StepPlan(self._steps, tuple(gone), tuple(new), tuple(scheduled), freed_full, freed_swa, transfers)
        self._steps += 1
        return self._plan

    def waits_for_store(self, now_ns: int) -> bool:
        """Whether every request there waits for what the store may have for it."""
        return not self.running and all(not self.kv.ready(request.kv, now_ns) for request in self._scheduler.waiting)

    @property
    def wants_step(self) -> bool:
        """Whether there are requests, or something to copy between tiers."""
        return bool(self._requests) or self.kv.wants_transfers

    def take_store_commands(self) -> Sequence[StoreCommand]:
        """What the store is to do, decided since the last call."""
        return self.kv.store.take_commands() if self.kv.store is not None else ()

    def store_results(self, results: Iterable[StoreResult], now_ns: int) -> None:
        """Take in what the store did; between `apply` and the next `schedule`."""
        self._known_repeats = 0
        if self.kv.store is not None:
            for request_id in self.kv.store.handle(results, now_ns):
                if (request := self._requests.get(request_id)) is not None and not request.running:
                    self._scheduler.requeue(request)

    def apply(self, result: StepResult, now_ns: int) -> list[RequestOutput]:
        """Take in what a plan's forward pass gave. Requests aborted meanwhile are passed over."""
        plan, self._plan, self._known_repeats = self._plan, None, 0
        if plan is None or plan.step != result.step:
            raise InvariantError(f"result of step {result.step} does not belong to the plan in flight")
        self.kv.transfers_done(now_ns)
        outputs, computed, size = [], 0, self.kv.block_size
        for scheduled in plan.requests:
            request = self._requests.get(scheduled.request_id)
            if request is None or not request.running:
                continue
            num_tokens = scheduled.num_tokens
            computed += num_tokens
            kv, end = request.kv, scheduled.start + num_tokens
            if kv.num_computed // size == end // size:
                kv.num_computed = end  # as `commit` does where no block is completed: most decoded tokens
            else:
                self.kv.commit(kv, request.token_ids, end, now_ns)
            if scheduled.sample:
                outputs.append(self._append(request, result.sampled[request.request_id], now_ns))
        self._computed_tokens += computed
        self._generated_tokens += len(outputs)
        return outputs

    # ------------------------------------------------------------ equal steps

    def num_repeats(self) -> int:
        """How many steps after the one in flight are the same again, each start one further, if nobody calls but
        `apply` and `schedule`.

        After so many something is to be decided: a request ends or has filled a block. 0 where more is on its way than
        decodes of requests that have begun to answer, where a token could end a request, and where one that waits may
        be admitted.
        """
        self._known_repeats = self._count_repeats()
        return self._known_repeats

    def _count_repeats(self) -> int:
        plan, running = self._plan, self._scheduler.running
        if plan is None or plan.new or plan.transfers or len(plan.requests) != len(running):
            return 0
        if not (self.kv.settled and self._scheduler.admits_as_before()):
            return 0
        size, repeats = self.kv.block_size, 1 << 62
        for scheduled in plan.requests:
            request = running[scheduled.request_id]
            said = len(request.token_ids) - request.num_prompt_tokens
            if scheduled.num_tokens != 1 or not scheduled.sample or said == 0 or request.stop_ids:
                return 0
            repeats = min(repeats, size - 1 - scheduled.start % size, request.max_tokens - 1 - said)
        return repeats

    def repeat(self, count: int, sampled: Mapping[RequestId, SampledToken]) -> StepPlan:
        """The same as `count` times (at most `num_repeats()`) `apply` of a result with `sampled`, and `schedule`.

        What is in flight afterwards, and returned, is the last of these plans.
        """
        plan = self._plan
        if plan is None or (count > self._known_repeats and count > self.num_repeats()):
            raise InvariantError(f"the plan in flight does not come {count} times again")
        if count == 0:
            return plan
        repeated = []
        for scheduled in plan.requests:
            request = self._requests[scheduled.request_id]
            request.token_ids.extend([sampled[request.request_id].token_id] * count)
            request.kv.num_computed += count
            repeated.append(self._scheduler.dispatch(request, 1))
        tokens = count * len(repeated)
        self._computed_tokens += tokens
        self._generated_tokens += tokens
        self._steps += count
        self._plan, self._known_repeats = StepPlan(plan.step + count, (), (), tuple(repeated)), 0
        return self._plan

    def _append(self, request: Request, sampled: SampledToken, now_ns: int) -> RequestOutput:
        token_ids, num_prompt_tokens = request.token_ids, request.num_prompt_tokens
        token_ids.append(sampled.token_id)
        said = len(token_ids) - num_prompt_tokens
        if said == 1:
            self._prompt_tokens += num_prompt_tokens
            if self.kv.journal.on and (whole := num_prompt_tokens // self.kv.block_size):
                key = request.kv.keys[whole - 1]
                self.kv.journal.computed(request.request_id, num_prompt_tokens, key)
        stopped = sampled.token_id in request.stop_ids and said >= request.sampling.min_tokens
        if stopped or said >= request.max_tokens:
            return self._finish(request, "stop" if stopped else "length", now_ns, sampled)
        return self._output(request, sampled)

    def _finish(self, request: Request, reason: str, now_ns: int, sampled: SampledToken | None = None) -> RequestOutput:
        del self._requests[request.request_id]
        self._scheduler.remove(request, now_ns)
        request.finish_reason = reason
        return self._output(request, sampled)

    def _output(self, request: Request, sampled: SampledToken | None) -> RequestOutput:
        logprobs = [sampled.logprobs] if sampled and sampled.logprobs else None
        return RequestOutput(
            request.request_id,
            [sampled.token_id] if sampled else [],
            logprobs,
            request.finish_reason,
            sampled.token_id if sampled and request.finish_reason == "stop" else None,
            request.cached.total,
            max(0, request.admitted_ns - request.arrival_ns) if request.admitted_ns is not None else 0,
            num_host_tokens=request.cached.host,
            num_store_tokens=request.cached.store,
        )

    # -------------------------------------------------------------------- stats

    def stats(self, *, last_step_tokens: int = 0, last_step_ms: float = 0.0) -> EngineStats:
        """Snapshot of counters and gauges. O(1)."""
        full, swa = self.kv.pool_stats()
        seen, tree = self._scheduler.stats, self.kv.tree
        stats = EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            full=full,
            swa=swa,
            tree_blocks=len(tree),
            tree_windows=tree.num_checkpoints,
            steps_total=self._steps,
            computed_tokens_total=self._computed_tokens,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generated_tokens,
            prefix_query_tokens_total=seen.query_tokens,
            full_hit_tokens_total=seen.full_hit_tokens,
            window_safe_hit_tokens_total=seen.window_safe_hit_tokens,
            effective_hit_tokens_total=seen.effective_hit_tokens,
            rebuilt_tokens_total=seen.rebuilt_tokens,
            truncated_tokens_total=seen.full_hit_tokens - seen.effective_hit_tokens,
            preemptions_total=seen.preemptions,
            evicted_full_blocks_total=tree.evicted_full_blocks_total,
            evicted_windows_total=tree.evicted_windows_total,
            last_step_tokens=last_step_tokens,
            last_step_ms=last_step_ms,
        )
        return with_lower_tiers(stats, self.kv, seen)

    def audit(self) -> list[str]:
        """Recompute all bookkeeping from scratch; all discrepancies."""
        faults = self.kv.audit() + self._scheduler.audit()
        known = len(self._scheduler.running) + len(self._scheduler.waiting)
        if known != len(self._requests):
            faults.append(f"{len(self._requests)} requests known, {known} waiting or running")
        if self._plan is None:
            faults += [
                f"{r.request_id} has {r.num_remaining_tokens} tokens to run, and blocks for {len(r.kv.full_blocks)}"
                for r in self.running.values()
                if r.num_remaining_tokens < 1 or len(r.kv.full_blocks) * self.kv.block_size < r.num_computed_tokens
            ]
        return faults
