"""Failures that users of such caches met, as behaviour that must hold here. Each test states trigger and behaviour."""

import pytest

from cygnet.base.errors import InvariantError
from cygnet.base.ids import NO_BLOCK, BlockId, RequestId
from cygnet.kv.manager import KVManager
from cygnet.kv.policy import KVPolicy
from cygnet.kv.sizing import PoolSizes, min_swa_blocks
from kv.driver import ROOT, Driver
from kv.shadow import Shadow, make_geometry
from kv.walk import random_walk

SIZE, WINDOW, LAYERS, WINDOW_BLOCKS = 4, 8, 3, 2
REBUILD = WINDOW * LAYERS


def driver(full_blocks: int, swa_windows: float, **policy: object) -> Driver:
    return Driver(make_geometry(WINDOW, LAYERS), full_blocks, swa_windows, SIZE, policy=KVPolicy(**policy))  # type: ignore[arg-type]


def prompt(session: int, tokens: int) -> list[int]:
    return [session * 1000 + i for i in range(tokens)]


def test_sessions_in_round_robin_lose_hits_gradually_as_windows_grow_scarce() -> None:
    """Agents take turns and the SWA pool holds ever fewer of their tails, the full pool all of their prefixes: hits
    fall by what is missing, never to nothing."""
    sessions, turns, grow = 20, 6, 24
    shares = []
    for windows in (3 * sessions, sessions, sessions // 2, sessions // 4):
        cache = driver(sessions * turns * grow, windows, retention=("response_end",))
        history = {s: prompt(s, 400) for s in range(sessions)}
        hit = total = 0
        for turn in range(turns):
            for s in range(sessions):
                plan = cache.request(history[s])
                hit, total = (hit + plan.start, total + len(history[s])) if turn else (0, 0)
                history[s] = [*history[s], *prompt(s + 100 + turn, grow)]
        shares.append(hit / total)
    assert shares[0] > 0.9
    assert shares[-1] > shares[0] - (REBUILD + SIZE) / 400 - 0.02, "a missing tail costs a rebuild at most"
    assert shares == sorted(shares, reverse=True)


def test_a_session_keeps_its_tail_window_while_stale_ones_can_go() -> None:
    """A live session and many that ended long ago, SWA pool full: the stale ones' windows go, the live tail stays."""
    cache = driver(2000, 20, retention=("response_end",), eviction="lru")
    for session in range(19):
        cache.request(prompt(session, 60))
    live = prompt(50, 60)
    for turn in range(12):
        live = [*live, *prompt(60 + turn, 20)]
        plan = cache.request(live)
        assert turn == 0 or plan.num_safe_blocks == plan.num_full_blocks
        cache.request(prompt(80 + turn, 60))


def test_a_tail_that_lost_its_window_falls_back_to_an_earlier_one_and_not_to_zero() -> None:
    """A session idle in a tool call loses its last window whole: the window before it is used, or a rebuild."""
    for rebuild, start in ((False, 20), (True, 240 - REBUILD - SIZE)):
        cache = driver(400, 20, rebuild=rebuild, retention=("prompt_end",))
        cache.request(prompt(1, 21))
        cache.request(prompt(1, 241))
        tail = cache.manager.tree.get(cache.manager.new(RequestId("x"), ROOT, prompt(1, 241)).keys[59])
        assert tail is not None
        assert cache.manager.tree.drop_checkpoint(tail) == WINDOW_BLOCKS, "windows are dropped whole"
        plan = cache.plan(prompt(1, 241))
        assert (plan.num_full_blocks, plan.num_safe_blocks) == (60, 5)
        assert abs(plan.start - start) <= SIZE


@pytest.mark.parametrize("tokens", range(1, 30))
def test_prompts_of_any_length_hit_up_to_their_last_whole_block(tokens: int) -> None:
    """Short prompts, and ones that are no multiple of a block: window-safe at block granularity, not coarser."""
    cache = driver(100, 10)
    cache.request(prompt(1, tokens))
    plan = cache.plan(prompt(1, tokens))
    assert plan.start == (tokens - 1) // SIZE * SIZE


@pytest.mark.parametrize("tokens", [4, 8, 12, 16, 40])
def test_the_window_is_kept_for_the_boundary_that_a_match_will_use(tokens: int) -> None:
    """A prompt of N = k blocks matches N - 1 tokens at most: the window kept must end at k - 1 blocks, not at k."""
    cache = driver(100, 10, retention=("prompt_end",), rebuild=False)
    cache.request(prompt(1, tokens))
    plan = cache.plan(prompt(1, tokens))
    assert plan.start == plan.num_full_blocks * SIZE == tokens - SIZE


@pytest.mark.parametrize("stop", [30, 33, 61])
def test_an_unfinished_request_publishes_no_swa_that_it_let_go(stop: int) -> None:
    """A long prompt stops half way: SWA blocks that left its window are free, and not counted as cached."""
    cache = driver(100, 10, retention=("response_end",))
    kv, _ = cache.start(prompt(1, 100))
    cache.compute(kv, prompt(1, 100), stop)
    cache.end(kv)
    with_swa = [node.index for node in cache.manager.tree.nodes() if node.swa_block != NO_BLOCK]
    assert with_swa == [stop // SIZE - 2, stop // SIZE - 1]
    for stats in cache.manager.pool_stats():
        assert stats.free + stats.cached == stats.num_blocks
        assert stats.used == 0


def test_freed_swa_is_never_published_again() -> None:
    """After a sequence far longer than the window ends and runs again, no block is in the tree and in the free list."""
    cache = driver(200, 4)
    for tokens in (150, 300, 300):
        kv, _ = cache.start(prompt(1, tokens))
        cache.compute(kv, prompt(1, tokens), each=lambda: _no_free_block_published(cache.manager))
        cache.end(kv)
        _no_free_block_published(cache.manager)


def _no_free_block_published(manager: KVManager) -> None:
    for node in manager.tree.nodes():
        assert not manager.full_pool.is_free(node.full_block)
        assert node.swa_block == NO_BLOCK or not manager.swa_pool.is_free(node.swa_block)


def test_no_block_leaks_after_any_mix() -> None:
    """After a mix of everything, idle: used is 0, and after a flush both pools are free to the last block."""
    for seed in range(6):
        shadow = Shadow(swa_layers=seed % 3, policy=KVPolicy(track_freed=True))
        random_walk(shadow, seed, 300)
        for request in list(shadow.requests.values()):
            shadow.free(request)
        assert [stats.used for stats in shadow.manager.pool_stats()] == [0, 0]
        shadow.flush()
        assert all(stats.free == stats.num_blocks for stats in shadow.manager.pool_stats())


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_a_prompt_of_many_windows_never_maps_a_block_it_let_go(chunk: int) -> None:
    """Front-evicted SWA leaves no stale ids: a prompt of 20 windows has the right KV in its window at every chunk."""
    shadow = Shadow(block_size=2, window=3, swa_layers=2, full_blocks=40, swa_spare=0, max_chunk=chunk)
    request = shadow.add([i % 3 for i in range(60)])
    assert shadow.admit(request)
    while shadow.run(request, chunk):
        dead = request.kv.swa_blocks[: request.kv.live_from]
        assert set(dead) <= {NO_BLOCK}
    assert request.kv.num_computed == 60


@pytest.mark.parametrize("tokens", [70, 400])
def test_a_prompt_longer_than_the_swa_pool_is_served_in_chunks_that_fit(tokens: int) -> None:
    """SWA pool of one window and one block more: a prompt many times as long still runs; its chunk shrinks."""
    geometry = make_geometry(WINDOW, LAYERS)
    sizes = PoolSizes(SIZE, 120, WINDOW_BLOCKS + 2, 480)
    manager = KVManager(geometry, sizes, KVPolicy())
    kv = manager.new(RequestId("long"), ROOT, prompt(1, tokens))
    assert manager.admit(kv, manager.plan(kv, tokens), full_room=100, swa_room=1, now_ns=0)
    steps = 0
    while kv.num_computed < tokens:
        end = min(tokens, manager.extent(kv), kv.num_computed + 64)
        assert end > kv.num_computed, "stuck"
        assert manager.allocate(kv, end, steps)
        manager.commit(kv, prompt(1, tokens), end, steps)
        assert manager.audit() == []
        steps += 1
    assert steps <= tokens / SIZE + 1


def test_one_long_prefill_does_not_pin_the_swa_pool() -> None:
    """After every chunk of a long prompt all but its window can be had by others."""
    cache = driver(200, 8, retention=("geometric",))
    total = cache.manager.swa_pool.num_blocks
    kv, _ = cache.start(prompt(1, 600))

    def others_find_room() -> None:
        assert cache.manager.available_swa >= total - WINDOW_BLOCKS - 1

    cache.compute(kv, prompt(1, 600), each=others_find_room)


def test_the_pool_that_is_short_is_the_one_evicted() -> None:
    """Much cached SWA and no free one: windows go and no full block does; and the other way round."""
    cache = driver(400, 8, retention=("prompt_end",))
    tree = cache.manager.tree
    for session in range(20):
        cache.request(prompt(session, 41))
    assert tree.evicted_windows_total > 0
    assert tree.evicted_full_blocks_total == 0
    assert len(tree) == 20 * 10

    cache = driver(60, 40, retention=("prompt_end",))
    tree = cache.manager.tree
    for session in range(20):
        cache.request(prompt(session, 41))
    assert tree.evicted_full_blocks_total > 0
    assert tree.evicted_windows_total == 0


def test_a_long_load_at_the_smallest_pools_never_gets_stuck() -> None:
    """Both pools at their minimum, many sessions one after another: always admitted, always finished."""
    geometry = make_geometry(5, 2)
    cache = Driver(geometry, full_blocks=20, swa_windows=0, block_size=SIZE, chunk=16)
    assert cache.manager.swa_pool.num_blocks == min_swa_blocks(geometry, SIZE, 16)
    for session in range(60):
        cache.request(prompt(session % 7, 20 + session))
        assert cache.manager.audit() == []


# ------------------------------------------------------------------ misuse is noticed


def test_a_stale_plan_is_an_error_that_changes_nothing() -> None:
    for lost in ("full", "swa"):
        cache = driver(100, 10)
        cache.request(prompt(1, 41))
        kv = cache.manager.new(RequestId("late"), ROOT, prompt(1, 41))
        plan = cache.manager.plan(kv, 41)
        tree = cache.manager.tree
        if lost == "full":
            assert tree.evict_full(3, cache.now_ns)
        else:
            assert tree.evict_windows(tree.num_evictable_swa, cache.now_ns)
        before = cache.manager.pool_stats()
        with pytest.raises(InvariantError, match="stale"):
            cache.manager.admit(kv, plan, full_room=0, swa_room=0, now_ns=cache.now_ns)
        assert cache.manager.audit() == []
        assert cache.manager.pool_stats() == before


def test_admitting_or_freeing_twice_is_an_error() -> None:
    cache = driver(100, 10)
    kv, plan = cache.start(prompt(1, 41))
    with pytest.raises(InvariantError, match="admitted twice"):
        cache.manager.admit(kv, plan, full_room=10**6, swa_room=0, now_ns=0)
    cache.compute(kv, prompt(1, 41))
    cache.end(kv)
    with pytest.raises(InvariantError, match="without being admitted"):
        cache.end(kv)
    assert cache.manager.audit() == []


def test_audit_notices_a_lost_lock_a_lost_block_and_a_wrong_table() -> None:
    cache = driver(100, 10)
    kv, _ = cache.start(prompt(1, 50))
    cache.compute(kv, prompt(1, 50))
    assert cache.manager.audit() == []
    kv.nodes[-1].locks -= 1
    assert any("locks" in fault for fault in cache.manager.audit())
    kv.nodes[-1].locks += 1
    kv.nodes[-1].swa_locks += 1
    assert any("SWA locks" in fault for fault in cache.manager.audit())
    kv.nodes[-1].swa_locks -= 1
    kv.full_blocks[0], kv.full_blocks[1] = kv.full_blocks[1], kv.full_blocks[0]
    assert any("not its node's" in fault for fault in cache.manager.audit())
    kv.full_blocks[0], kv.full_blocks[1] = kv.full_blocks[1], kv.full_blocks[0]
    cache.manager.full_pool.free([BlockId(kv.full_blocks[-1])])
    assert any("owned" in fault for fault in cache.manager.audit())
