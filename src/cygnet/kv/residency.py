"""A worker's caches as seen from outside: what its `Journal` tells, put together again."""

from collections.abc import Sequence

from cygnet.base.geometry import KVGeometry
from cygnet.base.messages import CacheChanged
from cygnet.base.residency import ADDED, KINDS, REMOVED, TIERS, WINDOW_LIVE
from cygnet.kv.reuse import plan_reuse

MOST_BLOCKS = 1 << 62


class Block:
    """One cached block of one tier. `index` is its place in the sequence."""

    __slots__ = ("index", "key", "live", "parent")

    def __init__(self, key: bytes, parent: "Block | None") -> None:
        self.key = key
        self.parent = parent
        self.index: int = 0 if parent is None else parent.index + 1
        self.live = False
        """Its SWA KV is there."""


class ResidencyView:
    """What one worker holds in each tier: a mirror of its prefix trees, without their bookkeeping.

    Invariants: each tier is closed under prefixes; `sequence` is that of the last telling taken in. A view that is not
    `valid` knows nothing: one telling was missed, or did not fit, and only a whole one makes it valid again.
    """

    def __init__(self, geometry: KVGeometry, block_size: int, *, rebuild: bool = True) -> None:
        self.block_size = block_size
        self.valid = False
        self.sequence = 0
        self._geometry = geometry
        self._rebuild = rebuild
        self._window_blocks = geometry.window_blocks(block_size) if geometry.has_swa else 0
        self._reach = geometry.rebuild_tokens // block_size + self._window_blocks + 2 if rebuild else None
        """How far back a live window may be, in blocks, and still be nearer than where a rebuild begins."""
        self._tiers: list[dict[bytes, Block]] = [{} for _ in TIERS]

    def __len__(self) -> int:
        """Blocks in all tiers."""
        return sum(map(len, self._tiers))

    def apply(self, told: CacheChanged) -> bool:
        """Take in what was told. False when it does not go on from what is known: then the view is void."""
        if told.whole:
            self.reset()
            self.valid = True
        elif not self.valid or told.sequence != self.sequence + 1:
            self.reset()
            return False
        self.sequence = told.sequence
        try:
            for code, key, parent in told.changes:
                self._change(code, key, parent)
        except (KeyError, IndexError):
            self.reset()
            return False
        return True

    def _change(self, code: int, key: bytes, parent: bytes) -> None:
        tier, kind = divmod(code, KINDS)
        blocks = self._tiers[tier]
        if kind == ADDED:
            blocks[key] = Block(key, blocks[parent] if parent else None)
        elif kind == REMOVED:
            del blocks[key]
        else:
            blocks[key].live = kind == WINDOW_LIVE

    def reset(self) -> None:
        """Know nothing."""
        self.valid = False
        for blocks in self._tiers:
            blocks.clear()

    def find(self, key: bytes) -> Block | None:
        """A block of any tier; the fastest one's if there are several."""
        return next((block for blocks in self._tiers if (block := blocks.get(key)) is not None), None)

    def effective(self, keys: Sequence[bytes], num_tokens: int) -> int:
        """Tokens that a prompt of `num_tokens` tokens, whose whole blocks have `keys`, would not have to compute: what
        the worker's `KVManager.plan` would say. `keys` may leave blocks out, and then what ends there is not seen.
        """
        full, safe, _ = self._hits(keys, (num_tokens - 1) // self.block_size)
        return self._start(num_tokens, full, safe)

    def reusable(self, keys: Sequence[bytes]) -> tuple[int, float]:
        """How many of `keys`, which go on from one another, are there (the last of them in the deepest tier that has
        it), and which part of the tokens up to there a prompt that goes on would not have to compute.
        """
        full, safe, count = self._hits(keys, MOST_BLOCKS)
        num_tokens = full * self.block_size
        return count, self._start(num_tokens + 1, full, safe) / num_tokens if full else 0.0

    def _hits(self, keys: Sequence[bytes], most: int) -> tuple[int, int, int]:
        """Full and window-safe hit in blocks over all tiers, and how many of `keys` the former covers."""
        full = safe = count = 0
        for blocks in self._tiers:
            tip, covered = _deepest(blocks, keys, most)
            if tip is not None:
                full, count = max(full, tip.index + 1), max(count, covered)
                safe = max(safe, self._safe(tip))
        return full, safe, count

    def _start(self, num_tokens: int, full: int, safe: int) -> int:
        return plan_reuse(
            self._geometry,
            block_size=self.block_size,
            num_tokens=num_tokens,
            num_full_blocks=full,
            num_safe_blocks=safe,
            allow_rebuild=self._rebuild,
        ).start

    def _safe(self, tip: Block) -> int:
        """Largest window-safe boundary at or above `tip`, in blocks; 0 where a rebuild is nearer. O(blocks between)."""
        if not self._window_blocks:
            return tip.index + 1
        boundary, run = tip.index + 1, 0
        block: Block | None = tip
        last = -1 if self._reach is None else tip.index - self._reach
        while block is not None:
            if block.index < last:
                return 0
            if block.live:
                run += 1
                if run == self._window_blocks:
                    return boundary
            else:
                boundary, run = block.index, 0
            block = block.parent
        return boundary

    def contents(self) -> list[dict[bytes, tuple[int, bool]]]:
        """By tier: key -> index and whether its SWA KV is there. For comparison with the trees."""
        return [{key: (block.index, block.live) for key, block in blocks.items()} for blocks in self._tiers]


def _deepest(blocks: dict[bytes, Block], keys: Sequence[bytes], most: int) -> tuple[Block | None, int]:
    """The last of `keys` that is there, with an index below `most`, and its place from 1; O(log keys), as what is there
    is closed under prefixes."""
    low, high = 0, len(keys)
    found: Block | None = None
    while low < high:
        middle = (low + high) // 2
        block = blocks.get(keys[middle])
        if block is not None and block.index < most:
            found, low = block, middle + 1
        else:
            high = middle
    return found, low
