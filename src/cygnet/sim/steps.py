"""When engines step: each for itself, or the ranks of a replica together."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from cygnet.sim.cost import CostModel
from cygnet.sim.events import EventLoop, Priority

if TYPE_CHECKING:
    from cygnet.sim.worker import SimWorker


class Steps:
    """The steps of one rank, or of ranks that share experts and so wait for one another (DP attention).

    Steps follow one another without a gap as long as there are any. Ranks that share experts begin each step together,
    those with nothing to do as well, and it lasts as long as the cost model says of all their plans.

    Steps that only go on decoding are one event, as many as every rank's core says will be the same
    (`EngineCore.num_repeats`). What comes meanwhile, to any rank, ends it with the step in which it comes: no step is
    left out or timed otherwise.

        step     0 | 1 | 2 | 3 | 4 | 5        `_times` has the time of each
                         ▲ a request comes: the event is the end of 2, and 3 is scheduled with it

    Invariant: a step is in flight, or the start of one is scheduled (`active`), exactly while some rank has requests
    that need not wait for the store.
    """

    def __init__(self, cost: CostModel, loop: EventLoop) -> None:
        self.ranks: list[SimWorker] = []
        self.active = False
        self.total_ns = 0
        """Time spent in steps, times ranks."""
        self.waiting_ns = 0
        """Part of it that ranks waited for slower ones."""
        self._cost, self._loop = cost, loop
        self._times: Sequence[int] = ()
        """What the step in flight and those that repeat it take; empty between steps."""
        self._started_ns = 0
        self._repeats = 0
        """How many repeated steps there are to be."""
        self._end_ns = 0
        """When the last of them is to end."""
        self._waiting_each_ns = 0

    def something_came(self, now_ns: int) -> None:
        """There is something for a rank to take in at the next start of a step: see that there is one."""
        if not self.active:
            self._wake(now_ns)
        elif self._repeats:
            ends_ns = self._ends_ns()
            repeats = bisect_left(ends_ns, now_ns)  # a step that ends just now has ended before
            if repeats < self._repeats:
                self._repeats, self._end_ns = repeats, ends_ns[repeats]
                self._loop.at(self._end_ns, Priority.STEP_END, self._end)

    def _ends_ns(self) -> list[int]:
        """When the step in flight and those that repeat it end."""
        return list(accumulate(self._times, initial=self._started_ns))[1:]

    def stop(self) -> None:
        """The ranks have died: nothing is in flight."""
        self.active, self._times, self._repeats = False, (), 0

    def _wake(self, now_ns: int) -> None:
        self.active = True
        self._loop.at(now_ns, Priority.STEP_START, self._start)

    def _start(self, now_ns: int) -> None:
        if not self.active or self._times:
            return  # they have died since
        plans = [plan for rank in self.ranks if (plan := rank.start(now_ns)) is not None]
        if not plans:  # all that came were refused, or wait for the store
            self.active = False
            deadlines = [deadline for rank in self.ranks if (deadline := rank.next_deadline_ns()) is not None]
            if deadlines:
                self._loop.at(max(now_ns, min(deadlines)), Priority.STORE, self.something_came)
            return
        self._repeats = min(count for rank in self.ranks if (count := rank.num_repeats()) is not None)
        times: Sequence[int]
        if len(self.ranks) == 1:
            (plan,) = plans
            times = [self._cost.step_ns(plan)]
            if self._repeats:
                times += self._cost.repeats_ns(plan, self._repeats)
        else:
            step = self._cost.together(plans, len(self.ranks), self._repeats)
            times, self._waiting_each_ns = step.times_ns, step.waiting_ns
        self._times, self._started_ns, self._end_ns = times, now_ns, now_ns + sum(times)
        self._loop.at(self._end_ns, Priority.STEP_END, self._end)

    def _end(self, now_ns: int) -> None:
        repeats = self._repeats
        if not self._times or now_ns != self._end_ns:
            return  # the event was brought forward
        self.total_ns += (now_ns - self._started_ns) * len(self.ranks)
        self.waiting_ns += self._waiting_each_ns * (repeats + 1)
        given = [rank.finish(repeats, self._ends_ns, now_ns) for rank in self.ranks]
        self._times, self._repeats = (), 0
        if any(rank.wants_step for rank in self.ranks):
            self._wake(now_ns)
        else:
            self.active = False
        for rank, outputs in zip(self.ranks, given, strict=True):
            if outputs:
                rank.tell(outputs, repeats, now_ns)

    def audit(self) -> list[str]:
        """All discrepancies; between events."""
        if self.active and not self._times and not any(rank.wants_step for rank in self.ranks):
            return ["steps: a step is to come, and no rank has anything to do"]
        return []
