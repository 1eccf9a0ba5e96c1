"""Id types. `NewType` keeps a block id from being passed where a block key is meant, at no run-time cost."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""Names one request for its whole life, in every process."""

BlockId = NewType("BlockId", int)
"""Index of one block in one pool. The same number in two pools means two different blocks."""

BlockKey = NewType("BlockKey", bytes)
"""Chained hash of a block and everything before it (see `cygnet.kv.hashing`); equal keys mean equal prefixes."""

NO_BLOCK = BlockId(-1)
"""Stands in a block table where a position has no live block (an SWA block out of its window)."""
