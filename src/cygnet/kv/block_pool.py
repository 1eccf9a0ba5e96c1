"""One pool of equally sized KV blocks."""

from collections.abc import Iterable

from cygnet.base.errors import InvariantError
from cygnet.base.ids import BlockId
from cygnet.base.messages import PoolStats


class BlockPool:
    """Hands out block ids `0 .. num_blocks - 1`.

    Invariants: an id is either free (once in the free list) or allocated; free + allocated = num_blocks.
    Who holds an allocated block is the tree's and the requests' business; `KVManager.audit` compares both.
    """

    def __init__(self, name: str, num_blocks: int, *, track_freed: bool = False) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self._free = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._is_free = bytearray(b"\x01") * num_blocks
        self._freed: list[BlockId] | None = [] if track_freed else None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks, or `None` and no change when fewer are free."""
        if count == 0:
            return []
        if count > len(self._free):
            return None
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Give blocks back. A block that is free already is an `InvariantError`."""
        for block in blocks:
            self.free_one(block)

    def free_one(self, block: BlockId) -> None:
        """Give one block back."""
        if not 0 <= block < self.num_blocks or self._is_free[block]:
            raise InvariantError(f"{self.name} pool: block {block} freed twice or out of range")
        self._is_free[block] = 1
        self._free.append(block)
        if self._freed is not None:
            self._freed.append(block)

    def is_free(self, block: BlockId) -> bool:
        return bool(self._is_free[block])

    def take_freed(self) -> tuple[BlockId, ...]:
        """Blocks freed since the last call (some may be allocated again, not yet written); for poisoning."""
        if not self._freed:
            return ()
        freed = tuple(dict.fromkeys(self._freed))
        self._freed.clear()
        return freed

    def stats(self, cached: int, block_bytes: int) -> PoolStats:
        """What its blocks are: free, `cached` (evictable, as their owner counts them), and the rest used."""
        used = self.num_blocks - self.num_free - cached
        return PoolStats(
            num_blocks=self.num_blocks, free=self.num_free, used=used, cached=cached, block_bytes=block_bytes
        )

    def audit(self) -> list[str]:
        """All discrepancies between the free list and the per-block flags."""
        faults = []
        if len(set(self._free)) != len(self._free):
            faults.append(f"{self.name} pool: free list has duplicates")
        if sum(self._is_free) != len(self._free):
            faults.append(f"{self.name} pool: {sum(self._is_free)} blocks flagged free, {len(self._free)} listed")
        faults += [
            f"{self.name} pool: block {b} is listed free but not flagged" for b in self._free if not self._is_free[b]
        ]
        return faults
