"""Equal steps taken at once: the same as one by one, in every plan and every count."""

from array import array
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cygnet.base.errors import InvariantError
from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import BlockKey, RequestId
from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.engine.core import EngineCore, PreparedRequest
from cygnet.engine.plan import SampledToken, StepPlan, StepResult
from cygnet.engine.queue import REFRESH_PER_STEP, WaitingQueue
from cygnet.engine.request import Request
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.manager import KVManager
from cygnet.kv.request_kv import RequestKV
from cygnet.kv.sizing import PoolSizes

HYBRID = KVGeometry(GroupGeometry(2, 1, 4, 4, 2), GroupGeometry(3, 1, 4, 4, 2, window=6))
FULL_ONLY = KVGeometry(GroupGeometry(2, 1, 4, 4, 2), GroupGeometry(0, 0, 0, 0, 2))
STEP_NS = 1_000_000


def core_of(
    geometry: KVGeometry, *, full_blocks: int = 64, seqs: int = 8, chunk: int = 16, size: int = 8
) -> EngineCore:
    sizes = PoolSizes(size, full_blocks, 24 if geometry.has_swa else 0, 120)
    policy = SchedulerPolicy(max_num_seqs=seqs, max_num_batched_tokens=chunk)
    return EngineCore(KVManager(geometry, sizes), policy, fingerprint="fake", vocab_size=100)


def message(name: str, prompt: list[int], max_tokens: int, **sampling: bool) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **sampling})
    return AddRequest(name, prompt, params)


class Drive:
    """Runs a core in steps of 1 ms; with `at_once`, equal steps as one. `seen` has every plan, `tokens` every answer.

    Every request says the same token always, its own.
    """

    def __init__(self, core: EngineCore, *, at_once: bool) -> None:
        self.core, self.at_once, self.now_ns = core, at_once, 0
        self.seen: list[StepPlan] = []
        self.num_repeats = 0

    def until(self, time_ns: int) -> None:
        """Run the steps that begin before `time_ns`, or as long as there are requests."""
        while self.now_ns < time_ns and (plan := self.core.schedule(self.now_ns)) is not None:
            self.seen.append(plan)
            says = {r.request_id: SampledToken(int(r.request_id)) for r in plan.requests}
            room = (time_ns - self.now_ns - 1) // STEP_NS
            count = min(self.core.num_repeats(), room) if self.at_once else 0
            if count:
                plan = self.core.repeat(count, says)
                self.num_repeats += count
            self.now_ns += (count + 1) * STEP_NS
            sampled = {r.request_id: says[r.request_id] for r in plan.requests if r.sample}
            self.core.apply(StepResult(plan.step, sampled), self.now_ns)
            assert self.core.audit() == []
        self.now_ns = max(self.now_ns, time_ns)


def load(seed: int) -> Iterator[tuple[int, AddRequest]]:
    """Requests and when they come."""
    rnd, now_ns = Random(seed), 0
    for index in range(14):
        prompt = [rnd.choice((1, 2))] * rnd.randint(1, 60)
        yield now_ns, message(str(index), prompt, rnd.randint(1, 50))
        now_ns += rnd.choice((0, 0, 3, 17, 40)) * STEP_NS


@pytest.mark.parametrize("geometry", [HYBRID, FULL_ONLY], ids=["hybrid", "full-only"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    full_blocks=st.integers(15, 60),
    seqs=st.integers(1, 8),
    chunk=st.sampled_from([4, 7, 16, 64]),
    size=st.sampled_from([4, 8, 16]),
)
def test_equal_steps_at_once_are_the_same_as_one_by_one(
    geometry: KVGeometry, seed: int, full_blocks: int, seqs: int, chunk: int, size: int
) -> None:
    drives = [
        Drive(core_of(geometry, full_blocks=full_blocks, seqs=seqs, chunk=chunk, size=size), at_once=at_once)
        for at_once in (False, True)
    ]
    full_blocks = drives[0].core.kv.sizes.full_blocks
    for drive in drives:
        for now_ns, request in load(seed):
            if len(request.prompt_token_ids) + 50 <= full_blocks * size:
                drive.until(now_ns)
                drive.core.add(request, drive.now_ns)
        drive.until(1 << 50)
    single, several = drives
    assert several.core.num_requests == 0
    assert several.core.stats() == single.core.stats()
    by_step = {plan.step: plan for plan in single.seen}
    assert all(by_step[plan.step] == plan for plan in several.seen)
    assert len(several.seen) + several.num_repeats == len(single.seen)


def test_a_long_answer_is_taken_block_by_block() -> None:
    drive = Drive(core_of(FULL_ONLY), at_once=True)
    drive.core.add(message("1", [1] * 10, 40), 0)
    drive.until(1 << 50)
    # Prefill; the rest of the second block, tokens 10 to 15; whole blocks of 8 up to 48; and the last token, alone, as
    # the answer's 40th is never computed.
    assert [(plan.requests[0].start, plan.requests[0].num_tokens) for plan in drive.seen] == [
        (0, 10), (10, 1), (16, 1), (24, 1), (32, 1), (40, 1), (48, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "requests"),
    [
        ("a token may end it", [message("1", [1], 40, ignore_eos=False)]),
        ("a prompt is being computed", [message("1", [1] * 40, 40)]),
    ],
)
def test_what_may_need_a_decision_is_not_repeated(what: str, requests: list[AddRequest]) -> None:
    sizes, policy = PoolSizes(8, 64, 0, 120), SchedulerPolicy(max_num_seqs=2, max_num_batched_tokens=16)
    core = EngineCore(KVManager(FULL_ONLY, sizes), policy, fingerprint="fake", vocab_size=100, eos_token_ids=[7])
    for request in requests:
        core.add(request, 0)
    for now_ns in range(2):
        plan = core.schedule(now_ns)
        assert plan is not None
        assert core.num_repeats() == 0, what
        sampled = {r.request_id: SampledToken(1) for r in plan.requests if r.sample}
        core.apply(StepResult(plan.step, sampled), now_ns)


def test_more_repeats_than_there_are_is_a_mistake() -> None:
    core = core_of(FULL_ONLY)
    core.add(message("1", [1] * 8, 40), 0)
    says = {"1": SampledToken(1)}
    for _ in range(2):
        plan = core.schedule(0)
        assert plan is not None
        if plan.step == 0:
            core.apply(StepResult(0, says), 0)
    assert core.num_repeats() == 7
    with pytest.raises(InvariantError, match="8 times"):
        core.repeat(8, says)


def test_a_prompt_may_be_known_by_its_keys_alone() -> None:
    """Blocks with keys are cached and found by these, whatever the tokens say."""
    core = core_of(FULL_ONLY)
    named = core.prepare(message("1", [1, 2, 3] * 10, 2))
    for name, kv in (("1", named.kv), ("2", core.kv.new("2", named.kv.root, ()))):
        kv.keys[:] = named.kv.keys
        core.add_prepared(PreparedRequest(message(name, [], 2), kv, array("i", bytes(4 * 30))), 0)
        drive = Drive(core, at_once=False)
        drive.until(1 << 50)
    assert core.stats().effective_hit_tokens_total == 24


def waiting(name: str) -> Request:
    kv = RequestKV(RequestId(name), BlockKey(b"root"))
    return Request(
        kv.request_id, [1], 1, SamplingParams(), 1, arrival_ns=0, sequence=int(name), kv=kv, stop_ids=frozenset()
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "change", "refresh"]), st.integers(0, 60)), max_size=200))
def test_a_queue_that_is_current_has_the_keys_that_it_should(calls: list[tuple[str, int]]) -> None:
    """Keys here are the cache's version: that of the last push or refresh."""
    queue, version = WaitingQueue(0), 0
    for number in range(2 * REFRESH_PER_STEP + 3):
        queue.push(waiting(str(number)), version)
    for what, number in calls:
        name = RequestId(str(number))
        if what == "push" and name not in queue:
            queue.push(waiting(name), version)
        elif what == "remove":
            queue.remove(name)
        elif what == "change":
            version += 1
        elif what == "refresh":
            queue.refresh(version, lambda request, version=version: version)
        if queue.is_current(version):
            assert set(queue._keys.values()) <= {version * 1_000_000_000}
        assert queue.audit() == []
    for _ in range(1 + len(queue) // REFRESH_PER_STEP):
        queue.refresh(version, lambda request, version=version: version)
    assert queue.is_current(version)
