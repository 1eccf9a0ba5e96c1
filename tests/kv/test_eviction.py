"""What goes first: stale sessions whole, in proportion to what is lacking, and never all at once."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cygnet.base.errors import InvariantError
from cygnet.base.ids import BlockKey, RequestId
from cygnet.kv.block_pool import BlockPool
from cygnet.kv.eviction import Candidate, SampledSet, lru, value
from cygnet.kv.policy import KVPolicy
from cygnet.kv.prefix_tree import PrefixTree
from kv.driver import ROOT, Driver
from kv.shadow import make_geometry

WINDOW, LAYERS, SIZE = 8, 3, 4
WINDOW_BLOCKS = WINDOW // SIZE
BLOCKS = 16


def session(number: int, blocks: int = BLOCKS) -> list[int]:
    return [number] * (blocks * SIZE) + [0]


def driver(full_blocks: int, swa_windows: float, **policy: object) -> Driver:
    return Driver(make_geometry(WINDOW, LAYERS), full_blocks, swa_windows, SIZE, policy=KVPolicy(**policy))  # type: ignore[arg-type]


# ------------------------------------------------------------------- the sampled set


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9))), st.integers(0, 12))
def test_sampled_set_is_a_set(steps: list[tuple[bool, int]], count: int) -> None:
    sampled, plain = SampledSet[int](), set[int]()
    for add, item in steps:
        (sampled.add if add else sampled.discard)(item)
        (plain.add if add else plain.discard)(item)
        assert set(sampled) == plain
        assert len(sampled) == len(plain)
        assert all((i in sampled) == (i in plain) for i in range(10))
        assert sampled.audit() == []
    sample = sampled.sample(count)
    assert len(set(sample)) == len(sample) <= count
    assert set(sample) <= plain
    assert len(plain) > count or set(sample) == plain


def test_a_misplaced_item_is_found() -> None:
    sampled = SampledSet[str]()
    for item in "abc":
        sampled.add(item)
    sampled._items[0], sampled._items[1] = "b", "a"
    assert sampled.audit() == ["item 0 is not indexed there", "item 1 is not indexed there"]
    sampled._items[:] = ["a", "b"]
    assert sampled.audit() == ["2 items, 3 indexed"]


def test_every_member_is_sampled_and_the_seed_decides() -> None:
    def draw(seed: int) -> list[list[int]]:
        sampled = SampledSet[int](seed)
        for item in range(100):
            sampled.add(item)
        return [sampled.sample(8) for _ in range(200)]

    assert draw(1) == draw(1) != draw(2)
    times = Counter(item for sample in draw(3) for item in sample)
    assert len(times) == 100
    assert max(times.values()) < 3 * 200 * 8 / 100


# ----------------------------------------------------------------------- policies


def test_value_grows_with_saving_and_expected_use_and_falls_with_size() -> None:
    worth = value(Candidate(saved_tokens=100, num_blocks=2, rate=1.0, age_ns=10**9), 1.0)
    assert value(Candidate(200, 2, 1.0, 10**9), 1.0) > worth
    assert value(Candidate(100, 2, 2.0, 10**9), 1.0) > worth
    assert value(Candidate(100, 4, 1.0, 10**9), 1.0) < worth
    assert lru(Candidate(1, 1, 0.0, 5), 1.0) < lru(Candidate(9, 1, 9.0, 4), 1.0)


@pytest.mark.parametrize(("ratio", "odds"), [(1.0, 1.0), (1.5, 1.5**4), (2.0, 2.0**4)])
def test_value_leaves_to_chance_what_is_nearly_worth_the_same(ratio: float, odds: float) -> None:
    chance = SampledSet[int](7).chance
    less, more = Candidate(16, 1, 1.0, 0), Candidate(16, 1, ratio, 0)
    less_first = sum(value(less, chance()) < value(more, chance()) for _ in range(4000))
    assert less_first / 4000 == pytest.approx(odds / (odds + 1), abs=0.02)


# ---------------------------------------------------------------- whole stale sessions


def test_a_shortage_trims_one_stale_session_and_not_all() -> None:
    """Sessions lose their ends one after another: at most one is shortened in part at any time."""
    cache = driver(10 * BLOCKS, 30)
    for number in range(1, 10):
        cache.request(session(number))
    for extra in range(50, 58):
        cache.request(session(extra, 5))
        left = [cache.plan(session(number)).num_full_blocks for number in range(1, 10)]
        assert sum(0 < blocks < BLOCKS for blocks in left) <= 1, left
    assert sum(left) < 9 * BLOCKS


def test_a_session_used_again_while_it_is_trimmed_is_trimmed_no_further() -> None:
    cache = driver(6 * BLOCKS, 30, eviction="lru")
    for number in range(1, 6):
        cache.request(session(number))
    cache.request(session(50, BLOCKS + 3))
    assert [cache.plan(session(n)).num_full_blocks for n in (1, 2)] == [BLOCKS - 4, BLOCKS]
    kv, plan = cache.start(session(1)[: 10 * SIZE])  # session 1 is in use again, as far as this
    cache.end(kv)
    assert plan.num_full_blocks == 9
    cache.request(session(51, 8))
    left = [cache.plan(session(n)).num_full_blocks for n in (1, 2, 3)]
    assert left[0] >= 9, "the part in use stays"
    assert sum(left) == 3 * BLOCKS - 12


def test_windows_go_whole_and_only_as_many_as_are_short() -> None:
    cache = driver(20 * BLOCKS, 10, retention=("prompt_end",))
    for number in range(1, 11):
        cache.request(session(number))
    tree, before = cache.manager.tree, cache.manager.tree.num_checkpoints
    free = cache.manager.swa_pool.num_free
    assert tree.evict_windows(1, cache.now_ns)
    assert before - tree.num_checkpoints == 1
    assert cache.manager.swa_pool.num_free - free == WINDOW_BLOCKS
    safe = [cache.plan(session(number)).num_safe_blocks for number in range(1, 11)]
    assert sorted(safe) == [0] + [BLOCKS] * 9
    assert all(cache.plan(session(number)).num_full_blocks == BLOCKS for number in range(1, 11))


def test_where_windows_overlap_the_newest_is_not_the_first_to_go() -> None:
    """Turns shorter than a window: inner windows share all blocks, only the ends free any. The old end goes."""
    cache = driver(20 * BLOCKS, 40, retention=("response_end",), eviction="lru")
    for turn in range(4, 20):
        cache.request(session(1, turn)[:-1])
    tree = cache.manager.tree
    assert tree.num_checkpoints == 16
    newest = cache.plan(session(1, 19)).num_safe_blocks
    while tree.num_checkpoints > 1:
        assert tree.evict_windows(1, cache.now_ns)
        assert cache.manager.audit() == []
        assert cache.plan(session(1, 19)).num_safe_blocks == newest


def test_a_window_counts_as_reused_when_others_than_its_own_session_resume_there() -> None:
    def hits(cache: Driver, tokens: list[int]) -> int:
        keys = cache.manager.new(RequestId("probe"), ROOT, tokens).keys
        node = cache.manager.tree.get(keys[BLOCKS - 1])
        assert node is not None
        assert node.checkpoint is not None
        return node.checkpoint.hits

    cache = driver(20 * BLOCKS, 20, retention=("prompt_end",))
    for _ in range(4):
        cache.request(session(1))
    assert hits(cache, session(1)) == 3, "the same prompt three times more"
    cache.request(session(2))
    for turn in (1, 2, 3):
        cache.request(session(2, BLOCKS + turn))
    assert hits(cache, session(2)) == 0, "its session resumed there once and has gone on"


def test_a_long_stretch_without_windows_is_walked_once() -> None:
    """Planning again costs nothing that grows with the prefix, also while other requests publish."""
    cache = driver(20 * BLOCKS, 20)
    cache.request(session(1, 6 * BLOCKS))
    cache.drop_windows()
    tree = cache.manager.tree
    top = tree.get(cache.manager.new(RequestId("probe"), ROOT, session(1, 6 * BLOCKS)).keys[6 * BLOCKS - 1])
    assert top is not None
    cache.plan(session(1, 6 * BLOCKS))
    epoch = tree._skip_epoch
    assert (top.skip, top.skip_epoch) == (None, epoch)
    for number in range(2, 6):
        cache.request(session(number))
    assert tree._skip_epoch == epoch
    cache.request(session(1, 6 * BLOCKS))  # a rebuild brings a window back below nodes that may skip it
    assert tree._skip_epoch > epoch
    assert cache.plan(session(1, 6 * BLOCKS)).num_safe_blocks == 6 * BLOCKS


def test_windows_wholly_in_use_are_not_dropped_in_vain() -> None:
    """Where all evictable blocks are covered twice, dropping one window frees nothing; one in use never frees any."""
    cache = driver(20 * BLOCKS, 10, retention=("prompt_end", "response_end"))
    kv, _ = cache.start(session(1))
    cache.compute(kv, session(1))
    tree = cache.manager.tree
    assert tree.num_checkpoints == 1
    cache.request(session(2)[:-1])  # prompt_end at 15 and response_end at 16 overlap in one block
    while tree.num_evictable_swa:
        tree.evict_windows(1, cache.now_ns)
    assert tree.num_checkpoints == 1, "the running request's own window is still kept"
    assert kv.nodes[BLOCKS - 1].checkpoint is not None


def test_what_cannot_be_freed_is_refused_and_nothing_changes() -> None:
    cache = driver(4 * BLOCKS, 10)
    cache.request(session(1))
    tree = cache.manager.tree
    assert not tree.evict_full(tree.num_evictable_full + 1, cache.now_ns)
    assert not tree.evict_windows(tree.num_evictable_swa + 1, cache.now_ns)
    assert cache.plan(session(1)).num_safe_blocks == BLOCKS


def test_a_locked_node_keeps_its_ancestors_and_loses_its_unlocked_children() -> None:
    pool = BlockPool("full", 8)
    tree = PrefixTree(pool, BlockPool("swa", 0), block_size=4, window_blocks=0, rebuild_tokens=0)
    blocks = pool.allocate(4)
    assert blocks is not None
    root = tree.insert(BlockKey(b"a"), None, blocks[0], 0)
    locked = tree.insert(BlockKey(b"b"), root, blocks[1], 0)
    tree.lock(root)
    tree.lock(locked)
    tree.insert(BlockKey(b"c"), locked, blocks[2], 0)
    tree.insert(BlockKey(b"d"), root, blocks[3], 0)
    assert not tree.evict_full(3, 1)
    assert tree.evict_full(2, 1)
    assert [node.key for node in tree.nodes()] == [b"a", b"b"]
    with pytest.raises(InvariantError, match="inserted twice"):
        tree.insert(BlockKey(b"b"), root, blocks[2], 0)
    tree.unlock(locked)
    with pytest.raises(InvariantError, match="more often than locked"):
        tree.unlock(locked)


# ------------------------------------------------------------------------- no cliff


def hit_share(cache: Driver, sessions: int, rounds: int = 8) -> float:
    """Share of tokens reused when `sessions` sessions take turns, after the first two rounds."""
    hit = total = 0
    for turn in range(rounds):
        for number in range(1, sessions + 1):
            plan = cache.request(session(number))
            if turn >= 2:
                hit += plan.start
                total += len(session(number)) - 1
    assert cache.manager.audit() == []
    return hit / total


def short_of_full(sessions: int, share: float, eviction: str, seed: int) -> Driver:
    """Room for `share` of the sessions' full blocks while one more request runs, and for all windows."""
    return driver(int(sessions * BLOCKS * share) + 2, 3 * sessions, eviction=eviction, seed=seed)


def short_of_windows(sessions: int, share: float, eviction: str, seed: int) -> Driver:
    """Room for all full blocks and for `share` of the sessions' windows; a lost window costs the whole prefix."""
    return driver(
        int(sessions * BLOCKS * 1.5),
        sessions * share,
        eviction=eviction,
        seed=seed,
        retention=("prompt_end",),
        rebuild=False,
    )


SHORTAGES = pytest.mark.parametrize("shortage", [short_of_full, short_of_windows])


@SHORTAGES
@pytest.mark.parametrize("sessions", [24, 60])
def test_under_a_cyclic_load_a_tenth_too_little_costs_no_more_than_a_third(
    shortage: Callable[[int, float, str, int], Driver], sessions: int
) -> None:
    shares = [hit_share(shortage(sessions, 0.9, "value", seed), sessions) for seed in range(3)]
    assert min(shares) > 0.66, shares


@SHORTAGES
def test_strict_lru_falls_off_the_cliff_that_value_avoids(
    shortage: Callable[[int, float, str, int], Driver],
) -> None:
    """The same load, so that the test above is known to be able to fail."""
    assert hit_share(shortage(60, 0.9, "lru", 0), 60) < 0.4


@SHORTAGES
def test_hits_fall_gradually_with_the_room(shortage: Callable[[int, float, str, int], Driver]) -> None:
    """Less room, fewer hits; no step takes more than about a third, and half the room still hits."""
    shares = [hit_share(shortage(40, share, "value", 1), 40) for share in (1.2, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)]
    assert shares[0] > 0.97
    assert all(later <= earlier + 0.03 for earlier, later in pairwise(shares)), shares
    assert all(earlier - later < 0.34 for earlier, later in pairwise(shares)), shares
    assert shares[-1] > 0.04, shares


def test_a_lost_window_costs_a_rebuild_and_not_the_prefix() -> None:
    """With rebuild, half of the windows missing costs at most R tokens per turn."""
    sessions, longest = 30, LAYERS * WINDOW + SIZE
    cache = driver(30 * BLOCKS * 2, 15, retention=("prompt_end",))
    share = hit_share(cache, sessions)
    assert share > 1 - longest / (BLOCKS * SIZE) - 0.01
