"""A simulated worker: the real EngineCore, with a cost model in place of a device."""

from collections.abc import Callable, Sequence

from cygnet.base.errors import InvariantError, QueueFullError
from cygnet.base.ids import RequestId
from cygnet.base.messages import RequestOutput
from cygnet.engine.core import EngineCore, PreparedRequest
from cygnet.engine.plan import SampledToken, StepPlan, StepResult
from cygnet.sim.cost import CostModel
from cygnet.sim.events import EventLoop, Priority

OnOutputs = Callable[[Sequence[RequestOutput], int], None]
OnRefused = Callable[[RequestId], None]
Watch = Callable[[StepPlan, int], None]


class SimWorker:
    """One engine in simulated time.

    As in the live loop, requests that come during a step are taken in between its end and the next one's start, in the
    order in which they came; steps follow one another without a gap as long as there are any. Every request says the
    same token again and again, one that no other request says: what it generates is shared with nobody.

    Invariant: a step is in flight, or the start of one is scheduled, exactly while there are requests.
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
    ) -> None:
        self.core = core
        self.busy_ns = 0
        self._cost, self._loop, self._watch = cost, loop, watch
        self._on_outputs, self._on_refused = on_outputs, on_refused
        self._inbox: list[tuple[PreparedRequest, SampledToken]] = []
        self._says: dict[RequestId, SampledToken] = {}
        self._active = False
        self._plan: StepPlan | None = None

    @property
    def num_requests(self) -> int:
        """Requests that were added and have not come to an end."""
        return self.core.num_requests + len(self._inbox)

    def add(self, prepared: PreparedRequest, token_id: int, now_ns: int) -> None:
        """Give a request to the engine, whose every token will be `token_id`. One that the engine has no place for is
        refused when it is taken in."""
        self._inbox.append((prepared, SampledToken(token_id)))
        if not self._active:
            self._wake(now_ns)

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

    def _start(self, now_ns: int) -> None:
        self._take_in(now_ns)
        plan = self.core.schedule(now_ns)
        if plan is None:  # all that came were refused
            self._active = False
            return
        if self._watch is not None:
            self._watch(plan, now_ns)
        self._plan = plan
        took = self._cost.step_ns(plan)
        self.busy_ns += took
        self._loop.at(now_ns + took, Priority.STEP_END, self._end)

    def _end(self, now_ns: int) -> None:
        plan, says = self._plan, self._says
        if plan is None:
            raise InvariantError("a step ended that had not started")
        sampled = {request.request_id: says[request.request_id] for request in plan.requests if request.sample}
        outputs = self.core.apply(StepResult(plan.step, sampled), now_ns)
        self._plan = None
        for output in outputs:
            if output.finish_reason is not None:
                del says[RequestId(output.request_id)]
        if self.num_requests:
            self._wake(now_ns)
        else:
            self._active = False
        self._on_outputs(outputs, now_ns)

    def audit(self) -> list[str]:
        """All discrepancies of the engine, and of the worker with it."""
        faults = self.core.audit()
        if self._active != (self.num_requests > 0):
            faults.append(f"{self.num_requests} requests, and {'a' if self._active else 'no'} step to come")
        if len(self._says) != self.core.num_requests:
            faults.append(f"{self.core.num_requests} requests in the engine, tokens of {len(self._says)}")
        return faults
