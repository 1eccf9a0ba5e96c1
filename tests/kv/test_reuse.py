"""Resume or rebuild: the cheaper one, never at or beyond the last token, exact where it says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.kv.reuse import ReusePlan, plan_reuse
from kv.shadow import make_geometry

GEMMA = KVGeometry(full=GroupGeometry(3, 1, 256, 256, 2), swa=GroupGeometry(15, 1, 256, 256, 2, 511))


def gemma_plan(full_tokens: int, safe_tokens: int, *, rebuild: bool = True) -> ReusePlan:
    return plan_reuse(
        GEMMA,
        block_size=16,
        num_tokens=full_tokens + 5,
        num_full_blocks=full_tokens // 16,
        num_safe_blocks=safe_tokens // 16,
        allow_rebuild=rebuild,
    )


def test_a_lost_window_costs_a_replay_that_does_not_grow_with_the_prefix() -> None:
    for full in (16_000, 32_000, 320_000):
        plan = gemma_plan(full, 0)
        assert plan.kind == "rebuild"
        assert full - plan.start == plan.rebuilt_tokens(16) == 7680, "R = 15 * 511 = 7665, aligned to blocks of 16"
        assert plan.num_uncached_tokens == 7685


def test_short_prefixes_are_computed_again_rather_than_rebuilt() -> None:
    assert gemma_plan(7680, 0).kind == "cold"
    assert gemma_plan(7680 + 16, 0).kind == "rebuild"


def test_a_window_nearer_than_a_rebuild_is_resumed_at_and_so_is_one_as_near() -> None:
    tie = gemma_plan(16_000, 16_000 - 7680)
    assert (tie.kind, tie.start) == ("resume", 16_000 - 7680)
    assert gemma_plan(16_000, 16_000 - 7680 - 16).kind == "rebuild"
    whole = gemma_plan(16_000, 16_000)
    assert (whole.kind, whole.start, whole.rebuilt_tokens(16)) == ("resume", 16_000, 0)
    assert whole.key_floor == whole.exact_from == 16_000 - 511


def test_where_rebuild_is_off_the_window_safe_hit_is_resumed_at() -> None:
    plan = gemma_plan(16_000, 1_600, rebuild=False)
    assert (plan.kind, plan.start, plan.num_full_blocks) == ("resume", 1_600, 1000)


def test_a_model_without_swa_resumes_at_the_full_hit() -> None:
    plan = plan_reuse(make_geometry(0, 0), block_size=4, num_tokens=17, num_full_blocks=4, num_safe_blocks=4)
    assert (plan.kind, plan.start, plan.key_floor) == ("resume", 16, 16)


@given(
    block_size=st.integers(1, 5),
    window=st.integers(1, 12),
    layers=st.integers(1, 4),
    full=st.integers(0, 40),
    below=st.integers(0, 40),
    extra=st.integers(1, 9),
)
def test_a_plan_is_legal_cheapest_and_exact(
    block_size: int, window: int, layers: int, full: int, below: int, extra: int
) -> None:
    safe = max(0, full - below)
    geometry = make_geometry(window, layers)
    num_tokens = full * block_size + extra
    plan = plan_reuse(
        geometry, block_size=block_size, num_tokens=num_tokens, num_full_blocks=full, num_safe_blocks=safe
    )
    assert 0 <= plan.start < num_tokens
    assert plan.start % block_size == 0
    assert safe * block_size <= plan.start <= full * block_size
    if plan.kind != "rebuild":
        assert plan.start == safe * block_size
        assert full * block_size - plan.start <= geometry.rebuild_tokens + 2 * block_size
        return
    # The error front: outputs of SWA layer l are exact from here on.
    front = plan.start
    for _ in range(layers - 1):
        front += window
    assert plan.exact_from == front, "keys of the last SWA layer"
    assert front + window <= full * block_size, "hidden states after the full hit must be exact"
    assert front <= (full - geometry.window_blocks(block_size)) * block_size, "the window's blocks must be whole"
    assert full * block_size - plan.start < geometry.rebuild_tokens + 2 * block_size
    assert plan.key_floor == plan.start


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 9])
def test_nothing_cached_is_cold(num_tokens: int) -> None:
    plan = plan_reuse(GEMMA, block_size=4, num_tokens=num_tokens, num_full_blocks=0, num_safe_blocks=0)
    assert (plan.kind, plan.start, plan.num_uncached_tokens) == ("cold", 0, num_tokens)
