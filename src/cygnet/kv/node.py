"""What the prefix tree is made of: nodes (one cached block each) and checkpoints (one retained window each)."""

from collections.abc import Iterator

from cygnet.base.ids import NO_BLOCK, BlockId, BlockKey

NEVER = -(1 << 62)


class Node:
    """One cached block. `index` is its place in the sequence: it holds tokens `index * block_size` and on."""

    __slots__ = (
        "checkpoint",
        "full_block",
        "hits",
        "index",
        "key",
        "last_access_ns",
        "locks",
        "num_children",
        "parent",
        "skip",
        "skip_epoch",
        "stored_ns",
        "swa_block",
        "swa_locks",
        "swa_marks",
        "swa_stored_ns",
        "turns",
    )

    def __init__(self, key: BlockKey, parent: "Node | None", index: int, full_block: BlockId, now_ns: int) -> None:
        self.key = key
        self.parent = parent
        self.index = index
        self.full_block = full_block
        self.swa_block = NO_BLOCK
        self.locks = 0
        self.swa_locks = 0
        self.swa_marks = 0
        self.num_children = 0
        self.checkpoint: Checkpoint | None = None
        self.last_access_ns = now_ns
        self.hits = 0
        self.turns = 1
        """How many requests in a row went on from one another to compute this block."""
        self.skip: Node | None = None
        self.skip_epoch = -1
        """No node between this one and its ancestor `skip` has SWA KV, as long as the tree is in this epoch."""
        self.stored_ns = self.swa_stored_ns = NEVER
        """When the tier below was last known to hold the full and the SWA block; used by the host tier."""

    def path_up(self, count: int) -> Iterator["Node"]:
        """This node and its ancestors, at most `count` nodes."""
        node: Node | None = self
        while node is not None and count > 0:
            yield node
            node, count = node.parent, count - 1


class Checkpoint:
    """A retained window: the tree keeps the SWA KV of the window that ends with `node`.

    Its age and hits are its own. That a sequence passed through `node` says nothing about this window; that one
    resumed here does.
    """

    __slots__ = ("dropped", "last_access_ns", "node", "previous", "resumes")

    def __init__(self, node: Node, previous: "Checkpoint | None") -> None:
        self.node = node
        self.previous = previous
        """The checkpoint before this one on the same path when this one was made (it may be dropped since)."""
        self.dropped = False
        self.last_access_ns = node.last_access_ns
        self.resumes = 0

    @property
    def hits(self) -> int:
        """How often it was reused, not counting the sequence that it was kept for and that has gone on from here."""
        return max(0, self.resumes - (self.node.num_children > 0))

    def live_previous(self) -> "Checkpoint | None":
        """Nearest earlier checkpoint still there; skips dropped ones for good."""
        while self.previous is not None and self.previous.dropped:
            self.previous = self.previous.previous
        return self.previous
