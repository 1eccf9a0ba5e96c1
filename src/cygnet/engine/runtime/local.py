"""An engine in this process: core and runner, stepped by whoever holds it."""

import time
from collections.abc import Callable, Sequence

import msgspec

from cygnet.base.cache_report import CacheReport, FlushReport
from cygnet.base.errors import InvariantError
from cygnet.base.messages import AddRequest, CacheChanged, EngineStats, RequestOutput
from cygnet.base.sampling import SamplingParams
from cygnet.engine.core import EngineCore, PreparedRequest
from cygnet.engine.plan import PendingStep, StepRunner
from cygnet.engine.runtime.tier_setup import TierRuntime
from cygnet.engine.runtime.waker import Waker

MOST_AUDITED = 50_000
"""Cached blocks, of device and host, that an audit looks at in idle time: about 0.2 s."""
STALL_S = 0.005
"""How long to wait for the store before looking again which requests have waited long enough."""


class LocalEngine:
    """EngineCore and a runner with a clock. Not thread-safe: one caller steps it.

        step    =  begin  ···············  finish
                   schedule, launch        wait for the device, apply

    In between, with an asynchronous runner, its holder may do what changes nothing here: `prepare` requests, send
    outputs. `add` and `abort` belong between `finish` and `begin`, as the core says.

    `audit`: `step` re-checks all bookkeeping after every step, `idle` when its holder calls `rest`, `off` never. A
    discrepancy is an `InvariantError`. A check looks at everything cached, so it must not come between a step and its
    outputs in production.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: StepRunner,
        *,
        audit: str = "idle",
        clock_ns: Callable[[], int] = time.monotonic_ns,
        tiers: TierRuntime | None = None,
        waker: Waker | None = None,
    ) -> None:
        """`tiers` is closed with the engine; its store worker wakes `waker` when it has something to say."""
        self.core = core
        self.tiers = tiers
        self.waker = waker or Waker()
        self._worker = tiers.worker if tiers is not None else None
        self._runner = runner
        self._audit = audit
        self._clock_ns = clock_ns
        self._unchecked = False
        self._pending: PendingStep | None = None
        self._started_ns = 0
        self._last_tokens = 0
        self._last_ms = 0.0

    def add(self, message: AddRequest) -> None:
        """Queue a request; raises a `RequestError` if it can't be served."""
        self.core.add(message, self._clock_ns())
        self._command_store()

    def prepare(self, message: AddRequest) -> PreparedRequest:
        """The long part of `add`, at any time: see `EngineCore.prepare`."""
        return self.core.prepare(message)

    def add_prepared(self, prepared: PreparedRequest) -> None:
        """The rest of `add`; raises a `RequestError` if it can't be served now."""
        self.core.add_prepared(prepared, self._clock_ns())
        self._command_store()

    def abort(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """End requests now."""
        outputs = self.core.abort(request_ids, self._clock_ns())
        self._command_store()
        return outputs

    def inspect_cache(self, limit: int) -> CacheReport:
        """What is cached where: see `EngineCore.inspect_cache`."""
        return self.core.inspect_cache(limit, self._clock_ns())

    def flush_cache(self, *, store: bool = False) -> FlushReport:
        """Drop what is cached: see `EngineCore.flush_cache`."""
        dropped = self.core.flush_cache(store=store)
        self._command_store()
        return dropped

    def watch_cache(self, *, on: bool) -> CacheChanged | None:
        """Begin to record what changes in the cache (again: all that is cached, as a start), or end."""
        journal = self.core.kv.journal
        if on != journal.on:
            journal.switch(on)
        return journal.whole() if on else None

    def take_cache_changes(self) -> CacheChanged | None:
        """What has changed in the cache since the last call, if that is recorded."""
        return self.core.kv.journal.take()

    @property
    def hears_store(self) -> bool:
        """Whether there is a store, which wakes `waker`."""
        return self._worker is not None

    def hear_store(self) -> None:
        """Take in what the store has done, between two steps. Its requests may be ready, and its memory free."""
        if self._worker is not None:
            self.waker.clear()
            self.core.store_results(self._worker.take_results(), self._clock_ns())
            self._command_store()

    def _command_store(self) -> None:
        if self._worker is not None and (commands := self.core.take_store_commands()):
            self._worker.submit(commands)

    @property
    def busy(self) -> bool:
        """Whether there are requests to work on, or something to copy between tiers."""
        return self.core.wants_step

    @property
    def asynchronous(self) -> bool:
        """Whether `begin` comes back before the step is done, so that something can be done meanwhile."""
        return self._runner.asynchronous

    def step(self) -> list[RequestOutput]:
        """Schedule, run and apply one step; what it produced. Where all wait for the store, wait a moment with them."""
        if self.begin():
            return self.finish()
        if self.busy:
            self.waker.wait(STALL_S)
        return []

    def begin(self) -> bool:
        """Schedule a step and launch it; False if there is nothing to run (now: see `EngineCore.schedule`)."""
        self.hear_store()
        self._started_ns = self._clock_ns()
        plan = self.core.schedule(self._started_ns)
        self._command_store()
        if plan is None:
            return False
        self._pending = self._runner.launch(plan)
        self._last_tokens = plan.num_tokens
        return True

    @property
    def done(self) -> bool:
        """Whether `finish` would not wait for the device."""
        return self._pending is None or self._pending.done()

    def finish(self) -> list[RequestOutput]:
        """Wait for the step that was begun, and apply it; what it produced."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise InvariantError("finish called without a step that was begun")
        result = pending.result()
        finished = self._clock_ns()
        outputs = self.core.apply(result, finished)
        self._command_store()
        self._last_ms = (finished - self._started_ns) / 1e6
        self._unchecked = True
        if self._audit == "step":
            self.check()
        return outputs

    @property
    def wants_rest(self) -> bool:
        """Whether `rest` would do anything. Not where so much is cached that a request would have to wait for it."""
        return self._unchecked and self._audit == "idle" and self.core.kv.num_cached_blocks <= MOST_AUDITED

    def rest(self) -> None:
        """To be called when nothing is to do for a while: audits what was done since the last time."""
        if self.wants_rest:
            self.check()

    def check(self) -> None:
        """Audit now; raises `InvariantError` with all discrepancies."""
        self._unchecked = False
        faults = self.core.audit() + self._runner.audit(self.core.running, self.core.gone)
        if faults:
            raise InvariantError("bookkeeping is broken:\n  " + "\n  ".join(faults))

    def close(self) -> None:
        """Write what has been put to the store, and give everything back."""
        if self.tiers is not None:
            self.tiers.close()
        self.waker.close()

    def stats(self) -> EngineStats:
        """Snapshot of the engine."""
        stats = self.core.stats(last_step_tokens=self._last_tokens, last_step_ms=self._last_ms)
        if self._worker is None:
            return stats
        traffic = self._worker.traffic()
        return msgspec.structs.replace(
            stats,
            store_read_bytes_total=traffic.bytes_read,
            store_written_bytes_total=traffic.bytes_written,
            store_fetch_seconds_total=traffic.fetch_seconds,
            store_put_seconds_total=traffic.put_seconds,
            store_hung_calls=traffic.num_lost,
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams], *, salt: str = ""
    ) -> list[list[int]]:
        """Run prompts (token ids) to their end, batched; the output token ids of each. For tests and scripts."""
        settings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        first = self.core.num_added
        tokens: dict[str, list[int]] = {}
        for index, (prompt, params) in enumerate(zip(prompts, settings, strict=True)):
            request_id = f"generate-{first + index}"
            tokens[request_id] = []
            self.add(AddRequest(request_id, list(prompt), params, cache_salt=salt))
        while self.busy:
            for output in self.step():
                if output.request_id in tokens:
                    tokens[output.request_id] += output.token_ids
        return list(tokens.values())
