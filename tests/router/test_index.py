"""The prefix index against a dumb model: a dict of every prefix that was inserted."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cygnet.router.index import MIN_ENTRIES, PrefixIndex
from cygnet.router.ladder import KEY_BYTES, LADDER, MAX_BLOCKS, chain_length, rungs, step_at, stored_depths
from router.chains import chain_of

TTL = 1000


def test_ladder_thins_out() -> None:
    assert LADDER[:33] == (*range(1, 33), 36)
    assert rungs(31) == tuple(range(1, 32))
    assert rungs(271)[-2:] == (252, 256)
    assert rungs(272)[-1] == 272
    assert [step_at(depth) for depth in (1, 31, 32, 252, 256, 272)] == [1, 1, 4, 4, 16, 16]
    assert max(LADDER) <= MAX_BLOCKS
    assert stored_depths(0) == []
    assert stored_depths(3) == [1, 2, 3]
    assert stored_depths(300)[-10:] == [272, 288, *range(293, 301)]
    assert len(stored_depths(2048)) < 210


@pytest.mark.parametrize("num_blocks", [1, 5, 31, 33, 40, 255, 300, 1000, 2049])
def test_a_grown_prompt_matches_exactly(num_blocks: int) -> None:
    words = list(range(num_blocks + 100))
    index = PrefixIndex(TTL, MIN_ENTRIES)
    index.insert(chain_of(words[:num_blocks]), 3, 0, 1 << 3, 0)
    for grown in (0, 1, 7, 100):
        assert index.match(chain_of(words[: num_blocks + grown]), [2, 3], 0) == [0, num_blocks]


@pytest.mark.parametrize("num_blocks", [20, 100, 1000])
def test_a_branch_is_short_by_less_than_a_step(num_blocks: int) -> None:
    index = PrefixIndex(TTL, MIN_ENTRIES)
    words = list(range(num_blocks))
    index.insert(chain_of(words), 0, 0, 1, 0)
    for parted in range(1, num_blocks, 7):
        branch = words[:parted] + [10**6 + i for i in range(50)]
        (found,) = index.match(chain_of(branch), [0], 0)
        assert parted - step_at(found) < found <= parted


def test_many_workers_with_different_depths() -> None:
    index = PrefixIndex(TTL, 1 << 16)
    words = list(range(400))
    ends = {0: 10, 5: 50, 9: 200, 40: 399}
    for slot, end in ends.items():
        index.insert(chain_of(words[:end]), slot, 0, (1 << 41) - 1, 0)
    found = index.match(chain_of(words), list(ends), 0)
    for (_, end), depth in zip(ends.items(), found, strict=True):
        assert end - step_at(end) < depth <= end


def test_entries_expire_and_are_renewed_by_use() -> None:
    index = PrefixIndex(TTL, MIN_ENTRIES)
    chain = chain_of(list(range(20)))
    index.insert(chain, 0, 0, 1, 0)
    assert index.match(chain, [0], TTL - 1) == [20]
    index.insert(chain, 0, 20, 1, TTL - 1)
    assert index.match(chain, [0], TTL + 5) == [20]
    assert index.match(chain, [0], 2 * TTL) == [0]


def test_a_slot_that_left_is_gone_from_what_is_renewed() -> None:
    index = PrefixIndex(TTL, MIN_ENTRIES)
    chain = chain_of(list(range(5)))
    index.insert(chain, 0, 0, 0b11, 0)
    index.insert(chain, 1, 0, 0b10, 1)
    assert index.match(chain, [0, 1], 2) == [0, 5]


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    index = PrefixIndex(10**9, MIN_ENTRIES)
    hot = chain_of([-1 & 0xFFFFFF, *range(30)])
    index.insert(hot, 0, 0, 1, 0)
    for turn in range(2000):
        index.insert(chain_of([turn + 10**6, *range(20)]), 0, 0, 1, turn)
        if turn % 20 == 0:
            (depth,) = index.match(hot, [0], turn)
            assert depth == 31, "used every 20 requests and lost"
            index.insert(hot, 0, depth, 1, turn)
        assert len(index) <= MIN_ENTRIES
    assert index.audit([hot], 2000) == []


@pytest.mark.parametrize(("ttl", "entries"), [(0, MIN_ENTRIES), (1, MIN_ENTRIES - 1)])
def test_impossible_sizes_are_refused(ttl: int, entries: int) -> None:
    with pytest.raises(ValueError, match="index needs"):
        PrefixIndex(ttl, entries)


class IndexMachine(RuleBasedStateMachine):
    """Sessions that grow and branch over a few workers which come and go, while time passes."""

    SLOTS = range(6)

    @initialize(seed=st.integers(0, 1000))
    def start(self, seed: int) -> None:
        self.index = PrefixIndex(TTL, MIN_ENTRIES)
        self.random = Random(seed)
        self.now = 0
        self.live = (1 << len(self.SLOTS)) - 1
        self.sessions: list[list[int]] = [[1]]
        self.routed: dict[tuple[int, bytes], int] = {}  # (slot, key of a prefix) -> last time it was routed there

    def _matched(self, words: list[int], slots: list[int]) -> list[int]:
        return self.index.match(chain_of(words), slots, self.now)

    @rule(session=st.integers(0, 50), keep=st.floats(0, 1), more=st.integers(1, 120), slot=st.sampled_from(SLOTS))
    def route(self, session: int, keep: float, more: int, slot: int) -> None:
        old = self.sessions[session % len(self.sessions)]
        cut = len(old) if keep > 0.5 else max(1, int(len(old) * keep * 2))
        words = (old[:cut] + [self.random.randrange(1 << 30) for _ in range(more)])[:400]
        self.sessions.append(words)
        if not self.live >> slot & 1:
            return
        chain = chain_of(words)
        (matched,) = self._matched(words, [slot])
        self.index.insert(chain, slot, matched, self.live, self.now)
        for depth in range(1, chain_length(chain) + 1):
            self.routed[slot, chain[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]] = self.now
        assert self._matched(words, [slot]) == [chain_length(chain)], "what was just routed is not found"

    @rule(by=st.integers(1, TTL // 2))
    def time_passes(self, by: int) -> None:
        self.now += by

    @rule(slot=st.sampled_from(SLOTS))
    def worker_leaves(self, slot: int) -> None:
        self.live &= ~(1 << slot)
        self.routed = {key: at for key, at in self.routed.items() if key[0] != slot}

    @rule()
    def workers_join_after_quarantine(self) -> None:
        if self.live != (1 << len(self.SLOTS)) - 1:
            self.now += TTL
            self.live = (1 << len(self.SLOTS)) - 1

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "index"):
            return
        chains = [chain_of(words) for words in self.sessions[-4:]]
        slots = [slot for slot in self.SLOTS if self.live >> slot & 1]
        for chain in chains:
            for slot, depth in zip(slots, self.index.match(chain, slots, self.now), strict=True):
                if depth:
                    key = chain[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
                    assert (slot, key) in self.routed, "a worker is said to hold what it never got"
        assert self.index.audit(chains, self.now) == []


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
