"""Records what changes in the prefix trees, for those who follow a worker's cache from outside."""

from collections.abc import Callable, Sequence

from cygnet.base.ids import NO_BLOCK, BlockKey
from cygnet.base.messages import CacheChanged
from cygnet.base.residency import ADDED, KINDS, WINDOW_LIVE, CacheChange, PromptCached
from cygnet.kv.node import Node
from cygnet.kv.prefix_tree import PrefixTree

MAX_CHANGES = 100_000
"""Changes kept between two calls of `take`; beyond that the next one tells everything anew."""


class Journal:
    """Changes of some trees (tier 0 first) since the last `take`, and prompts computed meanwhile.

    Invariants: while it is on, all changes told since a whole, applied to it in their order, give what the trees hold;
    at most `limit` changes and as many prompts are kept. While it is off, a change of a tree costs one comparison.
    """

    def __init__(self, trees: Sequence[PrefixTree], limit: int = MAX_CHANGES) -> None:
        self._trees = trees
        self._limit = limit
        self._changes: list[CacheChange] = []
        self._prompts: list[PromptCached] = []
        self._sequence = 0
        self.on = False

    def switch(self, on: bool) -> None:
        """Begin to record, or end."""
        self.on = on
        self._changes, self._prompts = [], []
        for tier, tree in enumerate(self._trees):
            tree.on_change = self._recorder(tier * KINDS) if on else None

    def _recorder(self, base: int) -> Callable[[int, Node], None]:
        def record(kind: int, node: Node) -> None:
            if len(self._changes) <= self._limit:
                parent = node.parent.key if kind == ADDED and node.parent is not None else b""
                self._changes.append((base + kind, node.key, parent))

        return record

    def computed(self, request_id: str, num_tokens: int, key: BlockKey) -> None:
        """A prompt is computed, and cached up to the block `key`."""
        if self.on and len(self._prompts) < self._limit:
            self._prompts.append((request_id, num_tokens, key))

    def take(self) -> CacheChanged | None:
        """What has changed since the last call; `None` if nothing has."""
        if not self._changes and not self._prompts:
            return None
        changes, self._changes = self._changes, []
        prompts, self._prompts = self._prompts, []
        self._sequence += 1
        lost = len(changes) > self._limit
        return CacheChanged(self._sequence, lost, self._everything() if lost else changes, prompts)

    def whole(self) -> CacheChanged:
        """All that is cached, for one who begins to follow. To be asked right after `take`. O(blocks)."""
        return CacheChanged(self._sequence, True, self._everything(), [])

    def _everything(self) -> list[CacheChange]:
        changes: list[CacheChange] = []
        for tier, tree in enumerate(self._trees):
            for node in tree.nodes():  # parents come before their children
                changes.append((tier * KINDS + ADDED, node.key, node.parent.key if node.parent is not None else b""))
                if node.swa_block != NO_BLOCK:
                    changes.append((tier * KINDS + WINDOW_LIVE, node.key, b""))
        return changes
