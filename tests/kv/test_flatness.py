"""SWA KV in use does not grow with the sequence, in prefill and in decode; full KV grows by what is needed."""

import pytest

from cygnet.base.geometry import GroupGeometry, KVGeometry
from kv.driver import Driver

GEMMA = KVGeometry(full=GroupGeometry(3, 1, 256, 256, 2), swa=GroupGeometry(15, 1, 256, 256, 2, 511))
SIZE, TOKENS = 16, 30_000


@pytest.mark.parametrize("chunk", [100, 512])
def test_a_30k_token_session_runs_in_an_swa_pool_of_a_few_windows(chunk: int) -> None:
    cache = Driver(GEMMA, full_blocks=TOKENS // SIZE + 1, swa_windows=2, block_size=SIZE, chunk=chunk)
    window, chunk_blocks = GEMMA.window_blocks(SIZE), -(-chunk // SIZE)
    assert cache.manager.swa_pool.num_blocks * SIZE < TOKENS / 13
    tokens = [i % 1000 for i in range(TOKENS)]
    kv, _ = cache.start(tokens)
    after_chunk: list[int] = []
    allocated: list[int] = []

    def note() -> None:
        after_chunk.append(cache.live_swa(kv))
        allocated.append(len(kv.swa_blocks) - kv.live_from + chunk_blocks)

    prefill = TOKENS - 2_000
    cache.compute(kv, tokens, prefill, each=note)
    assert max(after_chunk) <= window + 1
    assert max(allocated) <= window + chunk_blocks + 1
    assert after_chunk[-1] <= max(after_chunk[: 4 * 512 // chunk]), "no more at the end than after a few windows"
    assert cache.manager.pool_stats()[1].used <= window + 1

    cache.chunk = 1
    decode: list[int] = []
    cache.compute(kv, tokens, each=lambda: decode.append(cache.manager.pool_stats()[1].used))
    assert max(decode) <= window + 1
    assert cache.manager.pool_stats()[0].used == TOKENS // SIZE
    assert cache.manager.audit() == []
    cache.end(kv)
    assert cache.plan([*tokens, 1]).start == TOKENS


def test_many_long_sessions_share_an_swa_pool_of_a_few_windows_each() -> None:
    """Ten sessions of 6K tokens run side by side; SWA in use is ten windows, whatever their length."""
    cache = Driver(GEMMA, full_blocks=10 * 375 + 10, swa_windows=20, block_size=SIZE, chunk=256)
    prompts = [[s * 10_000 + i for i in range(6_000)] for s in range(10)]
    running = [cache.start(tokens)[0] for tokens in prompts]
    for upto in range(500, 6_001, 500):
        for kv, tokens in zip(running, prompts, strict=True):
            cache.compute(kv, tokens, upto)
        assert cache.manager.pool_stats()[1].used <= 10 * (GEMMA.window_blocks(SIZE) + 1)
    for kv in running:
        cache.end(kv)
    assert cache.manager.audit() == []
