"""Byte arithmetic, and the split of a budget between two pools."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cygnet.base.errors import ConfigError
from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.kv.sizing import min_swa_blocks, plan_pools

GEMMA = KVGeometry(full=GroupGeometry(3, 1, 256, 256, 2), swa=GroupGeometry(15, 1, 256, 256, 2, 511))
MIMO = KVGeometry(full=GroupGeometry(9, 4, 192, 128, 2), swa=GroupGeometry(39, 8, 192, 128, 2, 128))
MIMO_PRO = KVGeometry(full=GroupGeometry(10, 8, 192, 128, 2), swa=GroupGeometry(60, 8, 192, 128, 2, 128))
LLAMA = KVGeometry(full=GroupGeometry(30, 3, 64, 64, 2), swa=GroupGeometry(0, 3, 64, 64, 2))
GIB = 2**30


def test_gemma_3_270m() -> None:
    assert GEMMA.full.token_bytes == 3 * 512 * 2
    assert GEMMA.swa.token_bytes == 15 * 512 * 2
    assert GEMMA.rebuild_tokens == 7665
    assert GEMMA.uniform_token_bytes == 6 * GEMMA.full.token_bytes


def test_gemma_at_32k_needs_at_least_4_5_times_fewer_bytes_than_one_uniform_pool() -> None:
    context = 32 * 1024
    saving = GEMMA.uniform_token_bytes * context / GEMMA.cached_bytes(context)
    assert 4.5 < saving < 6
    assert GEMMA.uniform_token_bytes * context / GEMMA.cached_bytes(context, num_windows=4) > 4.5
    in_blocks = context // 16 * GEMMA.full.block_bytes(16) + GEMMA.window_blocks(16) * GEMMA.swa.block_bytes(16)
    assert GEMMA.uniform_token_bytes * context / in_blocks > 4.5


def test_mimo_v2() -> None:
    """KV is 192 + 128 elements per head; 9 full layers of 4 heads, 39 SWA layers of 8 (Pro: 10 of 8, 60 of 8)."""
    assert MIMO.full.token_bytes == 23_040
    assert MIMO.swa.token_bytes == 199_680
    assert MIMO.uniform_token_bytes == 222_720
    assert MIMO.window * MIMO.swa.token_bytes == pytest.approx(25.6e6, rel=0.01)
    assert MIMO.window * MIMO.swa.token_bytes // MIMO.full.token_bytes == 1109
    assert MIMO.rebuild_tokens == 4992
    assert (MIMO_PRO.full.token_bytes, MIMO_PRO.swa.token_bytes) == (51_200, 307_200)
    assert MIMO_PRO.window * MIMO_PRO.swa.token_bytes == 768 * MIMO_PRO.full.token_bytes
    assert MIMO_PRO.rebuild_tokens == 7680


def test_a_short_sequence_holds_no_more_swa_than_it_has_tokens() -> None:
    assert GEMMA.cached_bytes(100, num_windows=4) == 100 * GEMMA.uniform_token_bytes


@pytest.mark.parametrize(("window", "block_size", "blocks"), [(511, 16, 32), (512, 16, 32), (513, 16, 33), (1, 16, 1)])
def test_window_blocks_cover_the_window(window: int, block_size: int, blocks: int) -> None:
    geometry = KVGeometry(GroupGeometry(1, 1, 1, 1, 2), GroupGeometry(1, 1, 1, 1, 2, window))
    assert geometry.window_blocks(block_size) == blocks


@pytest.mark.parametrize("geometry", [GEMMA, MIMO, LLAMA])
def test_below_the_minimum_the_minimum_is_named_and_is_enough(geometry: KVGeometry) -> None:
    def plan(budget: int) -> int:
        sizes = plan_pools(geometry, block_size=16, budget_bytes=budget, chunk=512, model_max_len=32768)
        assert sizes.swa_blocks >= min_swa_blocks(geometry, 16, 512)
        return sizes.num_bytes(geometry)

    with pytest.raises(ConfigError, match=r"minimum of .*--kv-cache-memory") as caught:
        plan(1024)
    named = re.search(r"\((\d+) bytes\)", str(caught.value))
    assert named is not None
    minimum = int(named[1])
    assert plan(minimum) <= minimum
    with pytest.raises(ConfigError):
        plan(minimum - 1)


def test_a_given_length_must_fit() -> None:
    def plan(length: int) -> int:
        return plan_pools(
            GEMMA, block_size=16, budget_bytes=GIB // 8, chunk=512, model_max_len=131072, max_model_len=length
        ).max_model_len

    assert plan(8192) == 8192
    with pytest.raises(ConfigError, match="--max-model-len"):
        plan(100_000)


def test_without_swa_layers_all_goes_to_the_full_pool() -> None:
    sizes = plan_pools(LLAMA, block_size=16, budget_bytes=GIB, chunk=512, model_max_len=8192)
    assert (sizes.full_blocks, sizes.swa_blocks) == (GIB // LLAMA.full.block_bytes(16), 0)


def test_the_full_pool_may_be_far_longer_than_the_swa_pool() -> None:
    sizes = plan_pools(GEMMA, block_size=16, budget_bytes=GIB // 4, chunk=512, model_max_len=32768)
    assert sizes.max_model_len == 32768
    assert sizes.swa_blocks * 3 < sizes.full_blocks


@given(
    geometry=st.sampled_from((GEMMA, MIMO, MIMO_PRO, LLAMA)),
    block_size=st.sampled_from((8, 16, 32, 64)),
    budget=st.integers(10**6, 10**11),
    chunk=st.integers(1, 8192),
    share=st.sampled_from((0.0, 0.05, 0.3, 0.9)),
    length=st.sampled_from((0, 1024, 32768)),
)
def test_a_budget_is_kept_and_used(
    geometry: KVGeometry, block_size: int, budget: int, chunk: int, share: float, length: int
) -> None:
    try:
        sizes = plan_pools(
            geometry,
            block_size=block_size,
            budget_bytes=budget,
            chunk=chunk,
            model_max_len=131072,
            max_model_len=length,
            swa_share=share,
        )
    except ConfigError:
        return
    assert 0 <= budget - sizes.num_bytes(geometry) < geometry.full.block_bytes(block_size)
    needed = min_swa_blocks(geometry, block_size, min(chunk, length or 131072))
    assert sizes.swa_blocks >= needed
    assert sizes.swa_blocks <= max(needed, sizes.full_blocks), "more SWA blocks than full ones can't be mapped"
    assert 0 < sizes.max_model_len <= sizes.full_blocks * block_size
    if length:
        assert sizes.max_model_len == length
