"""An engine whose steps take what a cost model says, by a clock that only they move."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from cygnet.base.ids import RequestId
from cygnet.engine.plan import SampledToken, StepPlan, StepResult
from cygnet.engine.request import Request
from cygnet.sim.cost import CostModel


@dataclass
class Clock:
    now_ns: int = 0


class PacedRunner:
    """A `StepRunner` that computes nothing. `say` is the token that a request says, always; `seen` gets every plan and
    when it begins."""

    asynchronous = False

    def __init__(
        self,
        cost: CostModel,
        clock: Clock,
        *,
        say: Callable[[str], int] = lambda request_id: 1,
        seen: Callable[[StepPlan, int], None] = lambda plan, now_ns: None,
    ) -> None:
        self._cost, self._clock, self._say, self._seen = cost, clock, say, seen
        self._result: StepResult | None = None

    def launch(self, plan: StepPlan) -> "PacedRunner":
        self._seen(plan, self._clock.now_ns)
        self._clock.now_ns += self._cost.step_ns(plan)
        sampled = {r.request_id: SampledToken(self._say(r.request_id)) for r in plan.requests if r.sample}
        self._result = StepResult(plan.step, sampled)
        return self

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        assert self._result is not None
        return self._result

    def audit(self, running: Mapping[RequestId, Request], gone: Collection[RequestId]) -> list[str]:
        return []
