"""A simulated worker: the real EngineCore, with a cost model in place of a device."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from cygnet.base.errors import QueueFullError
from cygnet.base.ids import RequestId
from cygnet.base.messages import EngineStats, RequestOutput
from cygnet.engine.core import EngineCore, PreparedRequest
from cygnet.engine.plan import SampledToken, StepPlan, StepResult
from cygnet.kv.transfers import StoreResult
from cygnet.sim.events import EventLoop
from cygnet.sim.steps import Steps
from cygnet.sim.store import Servers, StoreLink, StoreWorker

OnOutputs = Callable[[Sequence[RequestOutput], int, int], None]
"""(what a step gave, how many equal steps had given one token each of the same requests before it, now)"""
OnRefused = Callable[[RequestId], None]
Watch = Callable[[StepPlan, int], None]


class SimWorker:
    """One engine in simulated time; when it steps is said by the `Steps` that it shares with the ranks it waits for.

    As in the live loop, requests that come during a step are taken in between its end and the next one's start, in the
    order in which they came. Every request says the same token again and again, one that no other request says: what it
    generates is shared with nobody.
    """

    def __init__(
        self,
        core: EngineCore,
        steps: Steps,
        loop: EventLoop,
        on_outputs: OnOutputs,
        on_refused: OnRefused,
        *,
        watch: Watch | None = None,
        store: Servers | None = None,
        link: StoreLink | None = None,
    ) -> None:
        """`store` and the `link` to it, where the engine has one."""
        self.core = core
        self.busy_ns = 0
        self.dead: list[EngineStats] = []
        """Last counts of the engines that were lost."""
        self.plan: StepPlan | None = None
        """The step in flight."""
        self.steps = steps
        steps.ranks.append(self)
        self._loop, self._watch = loop, watch
        self._on_outputs, self._on_refused = on_outputs, on_refused
        self.store = StoreWorker(store, link, loop, self._take_result) if store is not None and link else None
        self._results: list[StoreResult] = []
        self._inbox: list[tuple[PreparedRequest, SampledToken]] = []
        self._says: dict[RequestId, SampledToken] = {}

    @property
    def num_requests(self) -> int:
        """Requests that were added and have not come to an end."""
        return self.core.num_requests + len(self._inbox)

    def add(self, prepared: PreparedRequest, token_id: int, now_ns: int) -> None:
        """Give a request to the engine, whose every token will be `token_id`. One that the engine has no place for is
        refused when it is taken in."""
        self._inbox.append((prepared, SampledToken(token_id)))
        self.steps.something_came(now_ns)

    def _take_result(self, result: StoreResult, now_ns: int) -> None:
        self._results.append(result)
        self.steps.something_came(now_ns)

    def _take_in(self, now_ns: int) -> None:
        inbox, self._inbox = self._inbox, []
        for prepared, token in inbox:
            try:
                self.core.add_prepared(prepared, now_ns)
            except QueueFullError:
                self._on_refused(prepared.kv.request_id)
            else:
                self._says[prepared.kv.request_id] = token

        if self._results:
            results, self._results = self._results, []
            self.core.store_results(results, now_ns)

    def _command_store(self, now_ns: int) -> None:
        if self.store is not None and (commands := self.core.take_store_commands()):
            self.store.submit(commands, now_ns)

    # ------------------------------------------------------- called by `Steps`

    def start(self, now_ns: int) -> StepPlan | None:
        """Take in what has come, and decide the next step; `None` if there is nothing to do now."""
        self._take_in(now_ns)
        self._command_store(now_ns)
        self.plan = self.core.schedule(now_ns)
        self._command_store(now_ns)
        if self.plan is not None:
            self.busy_ns -= now_ns
            if self._watch is not None:
                self._watch(self.plan, now_ns)
        return self.plan

    def num_repeats(self) -> int | None:
        """How many steps may follow that are the same; `None` where nothing is here that they could change."""
        if self.plan is not None:
            return self.core.num_repeats()
        return 0 if self.num_requests else None

    def next_deadline_ns(self) -> int | None:
        """When the next request stops waiting for the store, if none is answered before."""
        if self.core.kv.store is None or not self.core.num_requests:
            return None
        return self.core.kv.store.reads.next_deadline_ns()

    def finish(self, repeats: int, ends_ns: Callable[[], Sequence[int]], now_ns: int) -> Sequence[RequestOutput]:
        """The step in flight, and `repeats` after it, have ended, the last one now; what the last one gave. `ends_ns`
        says when each did."""
        plan, says = self.plan, self._says
        if plan is None:
            return ()
        self.busy_ns += now_ns
        if repeats:
            plan = self.core.repeat(repeats, says)
            if self._watch is not None:
                self._watch_repeats(plan, repeats, ends_ns())
        outputs = self.core.apply(StepResult(plan.step, says), now_ns)
        self._command_store(now_ns)
        self.plan = None
        for output in outputs:
            if output.finish_reason is not None:
                del says[RequestId(output.request_id)]
        return outputs

    @property
    def wants_step(self) -> bool:
        """Whether there is something to take in or to do."""
        return bool(self._inbox or self._results) or self.core.wants_step

    def tell(self, outputs: Sequence[RequestOutput], repeats: int, now_ns: int) -> None:
        """Pass on what `finish` gave."""
        self._on_outputs(outputs, repeats, now_ns)

    def _watch_repeats(self, last: StepPlan, repeats: int, ends_ns: Sequence[int]) -> None:
        """Show the plans of repeated steps, of which `last` is the last one."""
        assert self._watch is not None
        for place in range(1, repeats + 1):
            back = repeats - place
            requests = tuple(msgspec.structs.replace(r, start=r.start - back) for r in last.requests)
            self._watch(replace(last, step=last.step - back, requests=requests), ends_ns[place - 1])

    def die(self, core: EngineCore) -> None:
        """All requests and all that is cached are gone; from now on it has `core`, with the counts of the old one. All
        ranks that step together die together."""
        self.dead.append(self.core.stats())
        if self.plan is not None:
            self.busy_ns += self._loop.now_ns
        self.core, self.plan = core, None
        self._inbox, self._results, self._says = [], [], {}
        if self.store is not None:
            self.store = self.store.reopened(self._take_result)
        self.steps.stop()

    def audit(self) -> list[str]:
        """All discrepancies of the engine, and of the worker with it."""
        faults = self.core.audit() + (self.store.audit() if self.store is not None else [])
        waits = self.num_requests > 0 and not self._inbox and self.core.waits_for_store(self._loop.now_ns)
        if self.num_requests > 0 and not waits and not self.steps.active:
            faults.append(f"{self.num_requests} requests, and no step to come")
        if len(self._says) != self.core.num_requests:
            faults.append(f"{self.core.num_requests} requests in the engine, tokens of {len(self._says)}")
        return faults
