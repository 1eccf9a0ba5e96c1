"""Pools and prefix tree as a state machine against the dumb model of `shadow`: safety, exactness and liveness."""

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cygnet.kv.policy import KVPolicy
from kv.shadow import ALL_RULES, Running, Shadow
from kv.walk import random_walk

MAX_TOKENS = 40


class KVMachine(RuleBasedStateMachine):
    """Requests come, are admitted, computed in chunks, decoded, preempted and aborted; `Shadow` checks every step."""

    shadow: Shadow

    @initialize(
        block_size=st.integers(2, 4),
        window=st.integers(1, 9),
        swa_layers=st.integers(0, 3),
        full_blocks=st.integers(20, 28),
        swa_spare=st.integers(0, 8),
        max_chunk=st.integers(1, 9),
        rebuild=st.booleans(),
        prefix_cache=st.sampled_from((True, True, True, False)),
        retention=st.sets(st.sampled_from(ALL_RULES)),
        eviction=st.sampled_from(("value", "lru")),
    )
    def start(self, rebuild: bool, prefix_cache: bool, retention: set[str], eviction: str, **sizes: int) -> None:
        rules = tuple(name for name in ALL_RULES if name in retention)
        policy = KVPolicy(prefix_cache, rebuild, rules, eviction, track_freed=True)
        self.shadow = Shadow(**sizes, policy=policy)
        self.history: list[list[int]] = [[0] * 12]

    def pick(self, requests: list[Running], choice: int) -> Running:
        return requests[choice % len(requests)]

    def waiting(self) -> list[Running]:
        return [r for r in self.shadow.requests.values() if not r.active]

    @precondition(lambda self: len(self.shadow.requests) < 5)
    @rule(
        base=st.integers(0, 20),
        keep=st.integers(0, MAX_TOKENS),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=9),
    )
    def add(self, base: int, keep: int, tail: list[int]) -> None:
        """A new prompt that shares a prefix with an earlier one."""
        tokens = (self.history[base % len(self.history)][:keep] + tail)[: MAX_TOKENS - 4]
        self.history.append(tokens)
        self.shadow.add(tokens)

    @precondition(lambda self: self.waiting())
    @rule(choice=st.integers(0, 5), swa_room=st.integers(1, 3))
    def admit(self, choice: int, swa_room: int) -> None:
        self.shadow.admit(self.pick(self.waiting(), choice), swa_room=swa_room)

    @precondition(lambda self: self.shadow.active())
    @rule(choice=st.integers(0, 5), count=st.integers(1, 9), letter=st.integers(0, 1))
    def run_chunk(self, choice: int, count: int, letter: int) -> None:
        """A chunk of the prompt or, when that is done, one decoded token."""
        request = self.pick(self.shadow.active(), choice)
        if request.kv.num_computed == len(request.tokens) < MAX_TOKENS:
            request.tokens.append(letter)
        self.shadow.run(request, count)

    @precondition(lambda self: self.shadow.active())
    @rule(choice=st.integers(0, 5))
    def finish_prompt(self, choice: int) -> None:
        request = self.pick(self.shadow.active(), choice)
        while self.shadow.run(request, 9):
            pass

    @precondition(lambda self: self.shadow.requests)
    @rule(choice=st.integers(0, 5))
    def end(self, choice: int) -> None:
        """Finish or abort, whatever state the request is in."""
        request = self.pick(list(self.shadow.requests.values()), choice)
        self.history.append(list(request.tokens))
        self.shadow.free(request)

    @precondition(lambda self: self.shadow.active())
    @rule(choice=st.integers(0, 5))
    def preempt(self, choice: int) -> None:
        self.shadow.free(self.pick(self.shadow.active(), choice), requeue=True)

    @precondition(lambda self: self.shadow.active())
    @rule(choice=st.integers(0, 5), boundary=st.integers(0, MAX_TOKENS // 2))
    def want_checkpoint(self, choice: int, boundary: int) -> None:
        request = self.pick(self.shadow.active(), choice)
        self.shadow.want(request, min(boundary, len(request.tokens) // self.shadow.size))

    @precondition(lambda self: self.shadow.active())
    @rule(choice=st.integers(0, 5))
    def overask(self, choice: int) -> None:
        self.shadow.overask(self.pick(self.shadow.active(), choice))

    @rule(really=st.integers(0, 4))
    def flush(self, really: int) -> None:
        if really == 0:
            self.shadow.flush()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "shadow"):
            self.shadow.check()

    def teardown(self) -> None:
        """With every request gone nothing is used, and after a flush both pools are free."""
        if not hasattr(self, "shadow"):
            return
        for request in list(self.shadow.requests.values()):
            self.shadow.free(request)
        assert [stats.used for stats in self.shadow.manager.pool_stats()] == [0, 0]
        self.shadow.flush()
        assert [s.free for s in self.shadow.manager.pool_stats()] == [
            s.num_blocks for s in self.shadow.manager.pool_stats()
        ]


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("swa_layers", [0, 1, 2, 3])
def test_long_random_runs_meet_every_situation_and_stay_sound(swa_layers: int) -> None:
    """The same checks over longer runs, where the rare situations are common; that they occur is checked too."""
    seen: Counter[str] = Counter()
    for seed in range(25):
        random = Random(seed)
        shadow = Shadow(
            block_size=random.choice((2, 3, 4)),
            window=random.choice((1, 2, 3, 4, 5, 7)),
            swa_layers=swa_layers,
            full_blocks=random.randint(20, 30),
            swa_spare=random.randint(0, 8),
            max_chunk=random.randint(1, 9),
            policy=KVPolicy(track_freed=True, eviction=random.choice(("value", "lru"))),
        )
        random_walk(shadow, seed, 150)
        seen += shadow.seen
    situations = {"cold", "resume", "twin", "no room", "evict full", "stalled"}
    if swa_layers:
        situations |= {"rebuild", "replay below full hit", "stopped below full hit", "evict swa", "window lost"}
    missing = {situation for situation in situations if not seen[situation]}
    assert not missing
