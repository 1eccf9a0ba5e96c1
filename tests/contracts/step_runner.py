"""What every `StepRunner` does, whatever runs the steps. Each check is given a function that makes a subject."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cygnet.base.errors import InvariantError
from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.engine.core import EngineCore
from cygnet.engine.plan import PendingStep, StepPlan, StepRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = {"a": [1, 2, 3], "b": [4, 5, 6] * 11, "c": [7] * 9}


@dataclass
class Subject:
    """A runner, and a core that plans for it: at most 16 tokens a step, blocks of 4."""

    core: EngineCore
    runner: StepRunner
    now: int = 0

    def add(self, *names: str, sampling: SamplingParams = GREEDY) -> None:
        for name in names:
            self.core.add(AddRequest(name, PROMPTS[name], sampling), self.now)

    def launch(self) -> tuple[StepPlan, PendingStep]:
        self.now += 1
        plan = self.core.schedule(self.now)
        assert plan is not None
        return plan, self.runner.launch(plan)

    def finish(self, pending: PendingStep) -> dict[str, list[int]]:
        """New tokens by request, of those that have not ended."""
        outputs = self.core.apply(pending.result(), self.now)
        assert self.runner.audit(self.core.running, self.core.gone) == []
        return {output.request_id: output.token_ids for output in outputs}

    def run(self) -> dict[str, list[int]]:
        """All requests to their end; their tokens."""
        tokens: dict[str, list[int]] = {}
        while self.core.num_requests:
            for name, new in self.finish(self.launch()[1]).items():
                tokens.setdefault(name, []).extend(new)
        return tokens


MakeSubject = Callable[[], Subject]


def alone(make: MakeSubject, name: str) -> list[int]:
    subject = make()
    subject.add(name)
    return subject.run()[name]


def check_tokens(make: MakeSubject) -> None:
    """A token for each request that is at its last one, the same as when it runs alone; several steps of prompt."""
    subject = make()
    subject.add("a", "b", "c")
    assert subject.run() == {name: alone(make, name) for name in PROMPTS}


def check_result_is_the_plans(make: MakeSubject) -> None:
    """It has the plan's number, and tokens for just those that are to be sampled."""
    subject = make()
    subject.add("a", "b")
    for _ in range(6):
        plan, pending = subject.launch()
        result = pending.result()
        assert result.step == plan.step
        assert result.sampled.keys() == {r.request_id for r in plan.requests if r.sample}
        subject.core.apply(result, subject.now)


def check_one_at_a_time(make: MakeSubject) -> None:
    """A step can't be launched while another one is pending."""
    subject = make()
    subject.add("a")
    plan, _ = subject.launch()
    with pytest.raises(InvariantError):
        subject.runner.launch(plan)


def check_done(make: MakeSubject) -> None:
    """Without asynchrony a step is done once it is launched; else at some time. Its result can be had at any time."""
    subject = make()
    subject.add("a", "c")
    _, pending = subject.launch()
    if not subject.runner.asynchronous:
        assert pending.done()
    looks = 0
    while not pending.done():
        looks += 1
        assert looks < 1000
    tokens = {name: list(new) for name, new in subject.finish(pending).items()}
    _, pending = subject.launch()
    for name, new in subject.finish(pending).items():  # without looking
        tokens[name] += new
    assert tokens == {name: alone(make, name)[:2] for name in ("a", "c")}


def check_abort_while_pending(make: MakeSubject) -> None:
    """A request that ends between launch and result leaves the others as they are; its row goes with the next plan."""
    subject = make()
    subject.add("a", "b", "c")
    tokens: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for step in range(20):
        _, pending = subject.launch()
        if step == 2:
            subject.core.abort(["c"], subject.now)
        for name, new in subject.finish(pending).items():
            tokens[name] += new
        if not subject.core.num_requests:
            break
    assert tokens["a"] == alone(make, "a")
    assert tokens["b"] == alone(make, "b")
    assert len(tokens["c"]) < GREEDY.max_tokens


def check_sampled_tokens(make: MakeSubject) -> None:
    """With a seed, sampled tokens too are the same every time, beside greedy requests as well."""
    seeded = SamplingParams(temperature=1.5, top_p=0.9, seed=3, max_tokens=5, ignore_eos=True)
    runs = []
    for _ in range(2):
        subject = make()
        subject.add("a")
        subject.add("c", sampling=seeded)
        runs.append(subject.run())
    assert runs[0] == runs[1]
    assert runs[0]["a"] == alone(make, "a")


CHECKS = (
    check_tokens,
    check_result_is_the_plans,
    check_one_at_a_time,
    check_done,
    check_abort_while_pending,
    check_sampled_tokens,
)
