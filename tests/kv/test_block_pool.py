"""A pool hands every block out once, and notices when one comes back twice."""

import pytest

from cygnet.base.errors import InvariantError
from cygnet.base.ids import BlockId
from cygnet.kv.block_pool import BlockPool


def test_all_blocks_are_handed_out_once_and_then_none() -> None:
    pool = BlockPool("full", 5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    assert pool.audit() == []


def test_asking_for_too_many_changes_nothing() -> None:
    pool = BlockPool("full", 3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3


@pytest.mark.parametrize("blocks", [[1, 1], [0], [7], [-1]])
def test_a_block_that_is_free_or_unknown_cannot_be_freed(blocks: list[int]) -> None:
    pool = BlockPool("swa", 4)
    pool.allocate(2)
    pool.free([BlockId(0)])
    with pytest.raises(InvariantError, match="swa pool: block"):
        pool.free(BlockId(b) for b in blocks)


def test_freed_blocks_are_reported_once_when_asked_for() -> None:
    pool = BlockPool("swa", 4, track_freed=True)
    pool.allocate(4)
    pool.free([BlockId(2), BlockId(0)])
    pool.allocate(1)
    pool.free([BlockId(0)])
    assert pool.take_freed() == (2, 0)
    assert pool.take_freed() == ()
    assert BlockPool("full", 4).take_freed() == ()


def test_audit_sees_a_list_and_flags_that_differ() -> None:
    pool = BlockPool("full", 3)
    pool.allocate(1)
    pool._free.append(BlockId(0))
    assert any("not flagged" in fault for fault in pool.audit())
    pool._free.append(BlockId(0))
    assert any("duplicates" in fault for fault in pool.audit())


def test_an_empty_pool_works() -> None:
    pool = BlockPool("swa", 0)
    assert pool.allocate(0) == []
    assert pool.allocate(1) is None
    assert pool.audit() == []
