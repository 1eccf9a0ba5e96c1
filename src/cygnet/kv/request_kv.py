"""The KV of one running request: its two block tables and which of the blocks the tree owns."""

from dataclasses import dataclass, field

from cygnet.base.ids import NO_BLOCK, BlockId, BlockKey, RequestId
from cygnet.kv.node import Node


@dataclass(slots=True, eq=False)
class RequestKV:
    """Block tables of one request, by block index (position // block_size).

        full_blocks   [ b0 b1 ........ b(c-1) | bc ... ]         c = len(nodes): published blocks, owned by the tree and
                        nodes[i] locked by us    ours             locked, except `private_full` (a twin got there first)
        swa_blocks    [ -- -- -- s s s s | s s ]                  -1 out of the window (or never computed)
                                 live_from   swa_published

    Only `KVManager` changes it.
    """

    request_id: RequestId
    root: BlockKey
    keys: list[BlockKey] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    full_blocks: list[BlockId] = field(default_factory=list)
    swa_blocks: list[BlockId] = field(default_factory=list)
    private_full: set[int] = field(default_factory=set)
    private_swa: set[int] = field(default_factory=set)
    """Indices below `swa_published` whose SWA block is ours: inexact (early replay), or the tree has its own."""
    live_from: int = 0
    """First block index with a live SWA block."""
    swa_published: int = 0
    """SWA blocks below this index were published or set aside as private."""
    num_hit_blocks: int = 0
    """Full hit at admission: positions below are never written in the full group."""
    turns: int = 1
    """How many requests in a row went on from one another, this one included."""
    key_floor: int = 0
    exact_from: int = 0
    num_computed: int = 0
    message_starts: tuple[int, ...] = ()
    """Tokens at which messages after the first begin, ascending; empty when unknown."""
    num_saved: int = 0
    """Nodes that the host tier has been told of."""
    fetched: tuple[int, int] = (0, 0)
    """Blocks that came from the store while the request waited: first, and end."""
    checkpoints: set[int] = field(default_factory=set)
    """Boundaries (blocks) at which to retain a window when computing gets there."""

    def clear(self) -> None:
        """Back to the state before admission. Keys and message starts stay: they describe the tokens, whatever becomes
        of the blocks."""
        self.nodes, self.full_blocks, self.swa_blocks = [], [], []
        self.private_full, self.private_swa, self.checkpoints = set(), set(), set()
        self.live_from = self.swa_published = self.num_hit_blocks = self.num_saved = 0
        self.key_floor = self.exact_from = self.num_computed = 0

    def message_blocks(self, block_size: int, num_tokens: int) -> tuple[int, ...]:
        """Boundaries, in whole blocks of the first `num_tokens` tokens, at or below which a message begins."""
        boundaries = (start // block_size for start in self.message_starts if start < num_tokens)
        return tuple(dict.fromkeys(boundary for boundary in boundaries if boundary > 0))

    def owned_full(self) -> list[BlockId]:
        """Full blocks that belong to this request and not to the tree."""
        published = len(self.nodes)
        return [b for i, b in enumerate(self.full_blocks) if i >= published or i in self.private_full]

    def owned_swa(self) -> list[BlockId]:
        """Live SWA blocks that belong to this request and not to the tree."""
        return [
            block
            for i, block in enumerate(self.swa_blocks[self.live_from :], self.live_from)
            if block != NO_BLOCK and (i >= self.swa_published or i in self.private_swa)
        ]

    def shared_swa(self) -> list[int]:
        """Indices of live SWA blocks that the tree owns and we have locked."""
        return [
            i
            for i in range(self.live_from, min(self.swa_published, len(self.swa_blocks)))
            if self.swa_blocks[i] != NO_BLOCK and i not in self.private_swa
        ]

    def audit(self) -> list[str]:
        """Discrepancies within the tables, and with the nodes that they share blocks with."""
        name = f"request {self.request_id}"
        faults = [
            f"{name}: block {i} is not its node's"
            for i, node in enumerate(self.nodes)
            if i not in self.private_full and self.full_blocks[i] != node.full_block
        ]
        faults += [
            f"{name}: SWA block {i} is not its node's"
            for i in self.shared_swa()
            if self.swa_blocks[i] != self.nodes[i].swa_block
        ]
        if any(block != NO_BLOCK for block in self.swa_blocks[: self.live_from]):
            faults.append(f"{name}: live SWA blocks out of its window")
        if any(block == NO_BLOCK for block in self.swa_blocks[self.live_from :]):
            faults.append(f"{name}: holes in its SWA window")
        if any(index < self.live_from or index >= self.swa_published for index in self.private_swa):
            faults.append(f"{name}: counts SWA blocks as private that are gone or not published")
        return faults
