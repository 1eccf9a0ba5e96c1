"""Which batch sizes get a CUDA graph, which graph serves a step, and what they cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cygnet.engine.graph_buckets import COARSE_FROM, STEP, Buckets, GraphMemory, candidate_sizes, choose_buckets

MIB = 1 << 20


def test_sizes_for_a_few_limits() -> None:
    assert candidate_sizes(0) == ()
    assert candidate_sizes(1) == (1,)
    assert candidate_sizes(3) == (1, 2, 3)
    assert candidate_sizes(8) == (1, 2, 4, 8)
    assert candidate_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert candidate_sizes(256)[-8:] == (128, 144, 160, 176, 192, 216, 240, 256)


@given(limit=st.integers(1, 2000), data=st.data())
def test_every_batch_has_a_bucket_and_padding_is_bounded(limit: int, data: st.DataObject) -> None:
    sizes = candidate_sizes(limit)
    assert sizes[-1] == limit
    buckets = Buckets(sizes)
    batch = data.draw(st.integers(1, limit))
    bucket = buckets.bucket_for(batch)
    assert bucket == min(size for size in sizes if size >= batch)
    assert buckets.padding(batch) == bucket - batch
    assert buckets.padding(batch) < max(STEP, batch / 8)
    assert len(sizes) <= 4 + COARSE_FROM // STEP + 30


def test_no_graph_for_empty_or_larger_batches() -> None:
    buckets = Buckets((1, 4))
    assert [buckets.bucket_for(n) for n in range(6)] == [None, 1, 4, 4, 4, None]
    assert [buckets.padding(n) for n in range(6)] == [0, 0, 2, 1, 0, 0]
    assert Buckets(()).bucket_for(1) is None
    assert Buckets((1, 4)).capture_order() == (4, 1)


@pytest.mark.parametrize("sizes", [(0, 1), (2, 1), (1, 1), (-1,)])
def test_bad_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="positive and ascending"):
        Buckets(sizes)


@given(
    limit=st.integers(1, 600),
    per_row=st.integers(0, 4 * MIB),
    per_graph=st.integers(0, 8 * MIB),
    budget=st.integers(0, 2000 * MIB),
)
def test_choice_keeps_to_the_budget(limit: int, per_row: int, per_graph: int, budget: int) -> None:
    memory = GraphMemory(per_row, per_graph)
    chosen = choose_buckets(limit, memory, budget)
    assert memory.total(chosen.sizes) <= budget
    assert set(chosen.sizes) <= set(candidate_sizes(limit))
    if memory.total(candidate_sizes(limit)) <= budget:
        assert chosen.sizes == candidate_sizes(limit)
    if memory.total((1,)) <= budget:
        assert chosen.sizes, "a graph for one request fits"
        assert chosen.sizes[0] == 1
    else:
        assert not chosen.sizes


def test_memory_counts_one_pool_for_all() -> None:
    memory = GraphMemory(pool_bytes_per_row=10, graph_bytes=3)
    assert memory.total((1, 2, 8)) == 80 + 9
    assert memory.total(()) == 0


def test_large_rows_cost_large_buckets_and_large_records_thin_them() -> None:
    few_rows = choose_buckets(64, GraphMemory(MIB, 1), 20 * MIB)
    assert few_rows.largest == 16
    few_graphs = choose_buckets(64, GraphMemory(1, MIB), 6 * MIB + 64)
    assert few_graphs.largest == 64
    assert len(few_graphs.sizes) <= 6
