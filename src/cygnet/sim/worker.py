"""A simulated worker: the real EngineCore, with a cost model in place of a device."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import msgspec

from cygnet.base.errors import QueueFullError
from cygnet.base.ids import RequestId
from cygnet.base.messages import EngineStats, RequestOutput
from cygnet.engine.core import EngineCore, PreparedRequest
from cygnet.engine.plan import SampledToken, StepPlan, StepResult
from cygnet.kv.transfers import StoreResult
from cygnet.sim.cost import CostModel
from cygnet.sim.events import EventLoop, Priority
from cygnet.sim.store import SimStore, StoreLink, StoreWorker

OnOutputs = Callable[[Sequence[RequestOutput], int, int], None]
"""(what a step gave, how many equal steps had given one token each of the same requests before it, now)"""
OnRefused = Callable[[RequestId], None]
Watch = Callable[[StepPlan, int], None]


class SimWorker:
    """One engine in simulated time.

    As in the live loop, requests that come during a step are taken in between its end and the next one's start, in the
    order in which they came; steps follow one another without a gap as long as there are any. Every request says the
    same token again and again, one that no other request says: what it generates is shared with nobody.

    Steps that only go on decoding are one event, as many as the core says will be the same (`EngineCore.num_repeats`).
    What comes meanwhile ends it with the step in which it comes: no step is left out or timed otherwise.

        step     0 | 1 | 2 | 3 | 4 | 5        `_ends` has the time of each `|` and of the last end
                         ▲ a request comes: the event is the end of 2, and 3 is scheduled with it

    Invariant: a step is in flight, or the start of one is scheduled, exactly while there are requests that need not
    wait for the store.
    """

    def __init__(
        self,
        core: EngineCore,
        cost: CostModel,
        loop: EventLoop,
        on_outputs: OnOutputs,
        on_refused: OnRefused,
        *,
        watch: Watch | None = None,
        store: SimStore | None = None,
        link: StoreLink | None = None,
    ) -> None:
        """`store` and the `link` to it, where the engine has one."""
        self.core = core
        self.busy_ns = 0
        self.dead: list[EngineStats] = []
        """Last counts of the engines that were lost."""
        self._cost, self._loop, self._watch = cost, loop, watch
        self._on_outputs, self._on_refused = on_outputs, on_refused
        self.store = StoreWorker(store, link, loop, self._take_result) if store and link else None
        self._results: list[StoreResult] = []
        self._inbox: list[tuple[PreparedRequest, SampledToken]] = []
        self._says: dict[RequestId, SampledToken] = {}
        self._active = False
        self._plan: StepPlan | None = None
        self._ends: list[int] = []
        """When the step in flight and those that repeat it end."""
        self._repeats = 0
        """How many of them there are to be."""

    @property
    def num_requests(self) -> int:
        """Requests that were added and have not come to an end."""
        return self.core.num_requests + len(self._inbox)

    def add(self, prepared: PreparedRequest, token_id: int, now_ns: int) -> None:
        """Give a request to the engine, whose every token will be `token_id`. One that the engine has no place for is
        refused when it is taken in."""
        self._inbox.append((prepared, SampledToken(token_id)))
        self._something_came(now_ns)

    def _take_result(self, result: StoreResult, now_ns: int) -> None:
        self._results.append(result)
        self._something_came(now_ns)

    def _something_came(self, now_ns: int) -> None:
        """There is something to take in at the next start of a step: see that there is one."""
        if not self._active:
            self._wake(now_ns)
        elif self._repeats:
            # A step that ends just now has ended before.
            repeats = bisect_left(self._ends, now_ns)
            if repeats < self._repeats:
                self._repeats = repeats
                self._loop.at(self._ends[repeats], Priority.STEP_END, self._end)

    def _wake(self, now_ns: int) -> None:
        self._active = True
        self._loop.at(now_ns, Priority.STEP_START, self._start)

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

    def _start(self, now_ns: int) -> None:
        if not self._active or self._plan is not None:
            return  # it has died since
        self._take_in(now_ns)
        self._command_store(now_ns)
        plan = self.core.schedule(now_ns)
        self._command_store(now_ns)
        if plan is None:  # all that came were refused, or wait for the store
            self._active = False
            if self.core.num_requests and self.core.kv.store is not None:
                deadline_ns = self.core.kv.store.reads.next_deadline_ns()
                if deadline_ns is not None:
                    self._loop.at(max(now_ns, deadline_ns), Priority.STORE, self._something_came)
            return
        if self._watch is not None:
            self._watch(plan, now_ns)
        self._plan = plan
        self._repeats = self.core.num_repeats()
        times = [self._cost.step_ns(plan)]
        if self._repeats:
            times += self._cost.repeats_ns(plan, self._repeats)
        self.busy_ns -= now_ns
        self._ends = [now_ns + end for end in accumulate(times)]
        self._loop.at(self._ends[-1], Priority.STEP_END, self._end)

    def _end(self, now_ns: int) -> None:
        plan, says, repeats = self._plan, self._says, self._repeats
        if plan is None or now_ns != self._ends[repeats]:
            return  # the event was brought forward
        self.busy_ns += now_ns
        if repeats:
            plan = self.core.repeat(repeats, says)
            if self._watch is not None:
                self._watch_repeats(plan)
        outputs = self.core.apply(StepResult(plan.step, says), now_ns)
        self._command_store(now_ns)
        self._plan, self._repeats = None, 0
        for output in outputs:
            if output.finish_reason is not None:
                del says[RequestId(output.request_id)]
        if self._inbox or self._results or self.core.wants_step:
            self._wake(now_ns)
        else:
            self._active = False
        self._on_outputs(outputs, repeats, now_ns)

    def _watch_repeats(self, last: StepPlan) -> None:
        """Show the plans of repeated steps, of which `last` is the last one."""
        assert self._watch is not None
        for place in range(1, self._repeats + 1):
            back = self._repeats - place
            requests = tuple(msgspec.structs.replace(r, start=r.start - back) for r in last.requests)
            self._watch(replace(last, step=last.step - back, requests=requests), self._ends[place - 1])

    def die(self, core: EngineCore) -> None:
        """All requests and all that is cached are gone; from now on it has `core`, with the counts of the old one."""
        self.dead.append(self.core.stats())
        if self._plan is not None:
            self.busy_ns += self._loop.now_ns
        self.core, self._plan, self._repeats, self._active = core, None, 0, False
        self._inbox, self._results, self._says = [], [], {}
        if self.store is not None:
            self.store = self.store.reopened(self._take_result)

    def audit(self) -> list[str]:
        """All discrepancies of the engine, and of the worker with it."""
        faults = self.core.audit() + (self.store.audit() if self.store is not None else [])
        waits = self.num_requests > 0 and not self._inbox and self.core.waits_for_store(self._loop.now_ns)
        if self._active != (self.num_requests > 0) and not waits:
            faults.append(f"{self.num_requests} requests, and {'a' if self._active else 'no'} step to come")
        if len(self._says) != self.core.num_requests:
            faults.append(f"{self.core.num_requests} requests in the engine, tokens of {len(self._says)}")
        return faults
