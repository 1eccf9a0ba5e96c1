"""The prefix tree: which blocks of KV are cached, under which prefix.

One node is one block, found by its chained key. A radix tree over runs of blocks would have fewer nodes, but must split
nodes at every divergence and whenever part of a run loses its SWA KV, which is where such trees break; with chained
keys a node needs no token comparison, no split, and the longest cached prefix is found by bisection.

    root ── b0 ── b1 ── b2 ── b3 ── b4        full KV live in every node
            .     .     .     s     s         SWA KV (s) only where a request runs or a checkpoint keeps it
                                    ▲ checkpoint: its window (the last `window_blocks` nodes up to here) stays

A boundary is *window-safe* when all SWA blocks of the window before it are live. SWA blocks live while a running
request reads them (`swa_locks`) or a checkpoint covers them (`swa_marks`), and are freed with the last of these.
Windows are thus kept and evicted whole: dropping a checkpoint frees what no other one covers.
"""

from collections.abc import Callable, Iterator, Sequence

from cygnet.base.errors import InvariantError
from cygnet.base.ids import NO_BLOCK, BlockId, BlockKey
from cygnet.base.residency import ADDED, REMOVED, WINDOW_GONE, WINDOW_LIVE
from cygnet.kv.block_pool import BlockPool
from cygnet.kv.eviction import EVICTION_POLICIES, Candidate, SampledSet
from cygnet.kv.node import Checkpoint, Node
from cygnet.kv.reuse_model import ReuseModel
from cygnet.kv.tree_audit import TreeAudit

SAMPLE = 16
BACKED_COST = 0.1
"""What losing KV costs that the tier below has, as part of computing it again: a copy."""
TURNS = 5
"""Kinds of sequences: of 1, 2, 3 to 4, 5 to 8, and more turns."""


def kind_of_leaf(node: Node) -> int:
    """Which sequences `node`'s is like: how many turns it had so far says how likely another one is."""
    return min((node.turns - 1).bit_length(), TURNS - 1)


def kind_of_window(checkpoint: Checkpoint) -> int:
    """A sequence's end is like others of as many turns; where it has gone on since, how often others resumed there."""
    if checkpoint.node.num_children == 0:
        return kind_of_leaf(checkpoint.node)
    return TURNS + min(checkpoint.hits, 2)


class PrefixTree:
    """Cached blocks of both pools.

    Invariants (`audit`):
      - a node's parent is in the tree; `num_children` counts its children; keys chain;
      - every node holds one full block; no block is held twice or free in its pool;
      - `locks` never grows towards the leaves: a node is locked by at least the requests that lock its children;
      - a node holds an SWA block only while `swa_locks + swa_marks > 0`; `swa_locks > 0` implies `locks > 0`;
      - `swa_marks` counts the checkpoints whose window covers the node; a checkpoint's whole window is live;
      - the leaf set holds exactly the unlocked nodes without children; the two evictable counters are exact;
      - a node's `skip` (of the current epoch) passes over no live SWA block.

    `seed` fixes the sampling of eviction victims. All times are integer nanoseconds given by the caller.
    """

    def __init__(
        self,
        full_pool: BlockPool,
        swa_pool: BlockPool,
        *,
        block_size: int,
        window_blocks: int,
        rebuild_tokens: int | None,
        eviction: str = "value",
        seed: int = 0,
    ) -> None:
        self.block_size = block_size
        self.window_blocks = window_blocks
        self._full_pool = full_pool
        self._swa_pool = swa_pool
        self.rebuild_tokens = rebuild_tokens
        self._policy = EVICTION_POLICIES.get(eviction)
        self._nodes: dict[BlockKey, Node] = {}
        self._leaves: SampledSet[Node] = SampledSet(seed)
        self._checkpoints: SampledSet[Checkpoint] = SampledSet(seed + 1)
        self._leaf_uses = ReuseModel(TURNS)
        self._window_uses = ReuseModel(TURNS + 3)
        self._victim: Node | None = None
        self._victim_access_ns = 0
        self._skip_epoch = 0
        self.on_retain: Callable[[Node], None] | None = None
        """Called with a node whose window is retained from now on."""
        self.on_evict: Callable[[Node, int], None] | None = None
        """Called with a node and the time before eviction takes its full block, or the window that ends with it."""
        self.is_backed: Callable[[Node, bool], bool] | None = None
        """Whether the tier below has a node's full block, or (True) the window that ends with it."""
        self.on_change: Callable[[int, Node], None] | None = None
        """Called with what became of a node (see `cygnet.base.residency`), and the node."""
        self.version = 0
        """Changes with every block, of either group, that comes or goes: as long as it stays, so do matches."""
        self.num_evictable_full = 0
        self.num_evictable_swa = 0
        self.num_swa_blocks = 0
        self.evicted_full_blocks_total = 0
        self.evicted_windows_total = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    def nodes(self) -> Iterator[Node]:
        """All nodes, in insertion order."""
        return iter(self._nodes.values())

    def leaves(self) -> Iterator[Node]:
        """Nodes without children that nobody locks."""
        return iter(self._leaves)

    def get(self, key: BlockKey) -> Node | None:
        return self._nodes.get(key)

    # ------------------------------------------------------------------ match

    def longest_cached(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Number of leading blocks of `keys[:limit]` in the tree. O(log n)."""
        low, high = 0, min(limit, len(keys))
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in self._nodes:
                low = middle
            else:
                high = middle - 1
        return low

    def longest_window_safe(self, keys: Sequence[BlockKey], num_full: int) -> int:
        """Largest window-safe boundary at or below `num_full` cached blocks, in blocks; 0 when there is none.

        A boundary nearer to the start than one window needs every block before it. Stretches without SWA KV are walked
        once and skipped from then on, so what a long prefix costs is O(live SWA blocks on it).
        """
        if self.window_blocks == 0 or num_full == 0:
            return num_full
        boundary, run = num_full, 0
        node: Node | None = self._nodes[keys[num_full - 1]]
        while node is not None:
            if node.swa_block == NO_BLOCK:
                node = self._nearest_live(node)
                boundary, run = (node.index + 1 if node else 0), 0
            else:
                run += 1
                if run == self.window_blocks:
                    return boundary
                node = node.parent
        return boundary

    def _nearest_live(self, node: Node) -> Node | None:
        """The nearest node with SWA KV at or above `node`; remembered at `node`."""
        found: Node | None = node
        while found is not None and found.swa_block == NO_BLOCK:
            found = found.skip if found.skip_epoch == self._skip_epoch else found.parent
        node.skip, node.skip_epoch = found, self._skip_epoch
        return found

    # --------------------------------------------------------- insert and lock

    def insert(
        self, key: BlockKey, parent: Node | None, full_block: BlockId, now_ns: int, *, locked: bool = False
    ) -> Node:
        """Add a block under `parent` (`None`: the root); the tree owns `full_block` from now on. `locked`: once, as by
        `lock`."""
        if key in self._nodes:
            raise InvariantError(f"block key {key.hex()} inserted twice")
        node = Node(key, parent, parent.index + 1 if parent else 0, full_block, now_ns)
        self._nodes[key] = node
        self.version += 1
        if parent is not None:
            parent.num_children += 1
            self._leaves.discard(parent)
        if locked:
            node.locks = 1
        else:
            self._leaves.add(node)
            self.num_evictable_full += 1
        if self.on_change is not None:
            self.on_change(ADDED, node)
        return node

    def lock(self, node: Node) -> None:
        """Keep `node` from eviction until `unlock`. Its parent must be locked at least as often."""
        node.locks += 1
        if node.locks == 1:
            self.num_evictable_full -= 1
            self._leaves.discard(node)

    def unlock(self, node: Node) -> None:
        """Undo one `lock`; children must have been unlocked first."""
        if node.locks <= 0:
            raise InvariantError(f"node {node.index} unlocked more often than locked")
        node.locks -= 1
        if node.locks == 0:
            self.num_evictable_full += 1
            if node.num_children == 0:
                self._leaves.add(node)

    # ------------------------------------------------------------ SWA windows

    def attach_swa(self, node: Node, block: BlockId) -> None:
        """Give `node` (which must have none) a live SWA block, locked once for the giver."""
        if node.swa_block != NO_BLOCK:
            raise InvariantError(f"node {node.index} has an SWA block already")
        if node.num_children > 0:
            self._skip_epoch += 1  # nodes below may skip over this one
        node.swa_block = block
        node.swa_locks = 1
        self.version += 1
        self.num_swa_blocks += 1
        if self.on_change is not None:
            self.on_change(WINDOW_LIVE, node)

    def lock_swa(self, node: Node) -> None:
        """Keep `node`'s live SWA block until `unlock_swa`."""
        if node.swa_block == NO_BLOCK:
            raise InvariantError(f"node {node.index} has no SWA block to lock")
        node.swa_locks += 1
        if node.swa_locks == 1:
            self.num_evictable_swa -= 1

    def unlock_swa(self, node: Node) -> None:
        """Undo one `lock_swa` or `attach_swa`; an SWA block that nothing keeps is freed."""
        if node.swa_locks <= 0:
            raise InvariantError(f"SWA block of node {node.index} unlocked more often than locked")
        node.swa_locks -= 1
        if node.swa_locks == 0:
            if node.swa_marks == 0:
                self._free_swa(node)
            else:
                self.num_evictable_swa += 1

    def add_checkpoint(self, node: Node) -> bool:
        """Keep the window that ends with `node`. False, and no change, if that window is not wholly live."""
        if self.window_blocks == 0:
            return False
        if node.checkpoint is not None:
            return True
        window = list(node.path_up(self.window_blocks))
        if any(member.swa_block == NO_BLOCK for member in window):
            return False
        for member in window:
            member.swa_marks += 1
        node.checkpoint = Checkpoint(node, self._nearest_checkpoint(node))
        self._checkpoints.add(node.checkpoint)
        if self.on_retain is not None:
            self.on_retain(node)
        return True

    def drop_checkpoint(self, node: Node) -> int:
        """Stop keeping the window that ends with `node`; the number of SWA blocks this freed."""
        checkpoint = node.checkpoint
        if checkpoint is None:
            return 0
        freed = 0
        for member in node.path_up(self.window_blocks):
            member.swa_marks -= 1
            if member.swa_marks == 0 and member.swa_locks == 0:
                self.num_evictable_swa -= 1
                self._free_swa(member)
                freed += 1
        checkpoint.dropped = True
        node.checkpoint = None
        self._checkpoints.discard(checkpoint)
        return freed

    def note_use(self, node: Node, now_ns: int) -> int:
        """A sequence goes on from `node`, which was used last at its `last_access_ns`; its turns so far."""
        self._leaf_uses.used(kind_of_leaf(node), now_ns - node.last_access_ns)
        return node.turns

    def touch_window(self, node: Node, now_ns: int) -> None:
        """A sequence resumes at the window that ends with `node`: note it where a checkpoint keeps that window."""
        if node.checkpoint is not None:
            self._window_uses.used(kind_of_window(node.checkpoint), now_ns - node.checkpoint.last_access_ns)
            node.checkpoint.last_access_ns = now_ns
            node.checkpoint.resumes += 1

    def _free_swa(self, node: Node) -> None:
        self._swa_pool.free_one(node.swa_block)
        node.swa_block = NO_BLOCK
        self.version += 1
        self.num_swa_blocks -= 1
        if self.on_change is not None:
            self.on_change(WINDOW_GONE, node)

    def _nearest_checkpoint(self, node: Node) -> Checkpoint | None:
        """The nearest checkpoint above `node`, no farther than a rebuild would reach (beyond, its distance is moot)."""
        reach = node.index + 1 if self.rebuild_tokens is None else self.rebuild_tokens // self.block_size + 1
        for member in node.path_up(reach):
            if member.checkpoint is not None and member is not node:
                return member.checkpoint
        return None

    # ---------------------------------------------------------------- evict

    def evict_full(self, count: int, now_ns: int) -> bool:
        """Free at least `count` full blocks, or do nothing and say False.

        Leaves go first, and the same sequence goes on being trimmed from its end before another is touched, so that a
        shortage costs one stale session its tail and not every session its last block.
        """
        if count > self.num_evictable_full:
            return False
        while count > 0:
            leaf = self._victim
            # Used since: no longer stale, so the choice is made anew.
            if leaf is None or leaf not in self._leaves or leaf.last_access_ns != self._victim_access_ns:
                leaf = self._pick_leaf(now_ns)
                self._leaf_uses.lost(kind_of_leaf(leaf), now_ns - leaf.last_access_ns)
            if self.on_evict is not None:
                self.on_evict(leaf, now_ns)
            self._remove(leaf)
            count -= 1
            self._victim = leaf.parent
            self._victim_access_ns = leaf.last_access_ns
        return True

    def evict_windows(self, count: int, now_ns: int) -> bool:
        """Free at least `count` SWA blocks by dropping whole windows, or do nothing and say False."""
        if count > self.num_evictable_swa:
            return False
        while count > 0:
            checkpoint = self._pick_window(now_ns)
            self._window_uses.lost(kind_of_window(checkpoint), now_ns - checkpoint.last_access_ns)
            if self.on_evict is not None:
                self.on_evict(checkpoint.node, now_ns)
            count -= self.drop_checkpoint(checkpoint.node)
            self.evicted_windows_total += 1
        return True

    def obtain_full(self, count: int, now_ns: int) -> list[BlockId]:
        """`count` full blocks, of those free or evictable, evicting as needed; that there are so many was checked."""
        if count > self._full_pool.num_free:
            self.evict_full(count - self._full_pool.num_free, now_ns)
        return _promised(self._full_pool, count)

    def obtain_swa(self, count: int, now_ns: int) -> list[BlockId]:
        """The same of SWA blocks."""
        if count > self._swa_pool.num_free:
            self.evict_windows(count - self._swa_pool.num_free, now_ns)
        return _promised(self._swa_pool, count)

    def flush(self) -> tuple[int, int]:
        """Drop everything unlocked; how many full blocks and windows that was."""
        blocks, windows = len(self._nodes), len(self._checkpoints)
        for checkpoint in list(self._checkpoints):
            self.drop_checkpoint(checkpoint.node)
        while len(self._leaves):
            for leaf in list(self._leaves):
                self._remove(leaf)
        return blocks - len(self._nodes), windows - len(self._checkpoints)

    def _remove(self, leaf: Node) -> None:
        if leaf.checkpoint is not None:
            self.drop_checkpoint(leaf)
        if leaf.swa_block != NO_BLOCK or leaf.locks or leaf.num_children:
            raise InvariantError(f"evicted node {leaf.index} is still in use")
        del self._nodes[leaf.key]
        if self.on_change is not None:
            self.on_change(REMOVED, leaf)
        self.version += 1
        self._leaves.discard(leaf)
        self.num_evictable_full -= 1
        self.evicted_full_blocks_total += 1
        self._full_pool.free_one(leaf.full_block)
        parent = leaf.parent
        if parent is not None:
            parent.num_children -= 1
            if parent.num_children == 0 and parent.locks == 0:
                self._leaves.add(parent)

    def _pick_leaf(self, now_ns: int) -> Node:
        policy, rate_of, chance, size = self._policy, self._leaf_uses.rate, self._leaves.chance, self.block_size
        plain = self.is_backed is None

        def worth(leaf: Node) -> float:
            age_ns = now_ns - leaf.last_access_ns
            saved = size * (1.0 if plain else self._cost(leaf, window=False))
            return policy(Candidate(saved, 1, rate_of(kind_of_leaf(leaf), age_ns), age_ns), chance())

        return min(self._leaves.sample(SAMPLE), key=worth)

    def _pick_window(self, now_ns: int) -> Checkpoint:
        def freed_by(checkpoint: Checkpoint) -> int:
            node: Node | None = checkpoint.node
            freed = 0
            for _ in range(self.window_blocks):  # as `path_up`, which is slower: this looks at many, time and again
                if node is None:
                    break
                if node.swa_marks == 1 and node.swa_locks == 0:
                    freed += 1
                node = node.parent
            return freed

        def unlocked(checkpoint: Checkpoint) -> int:
            return sum(1 for member in checkpoint.node.path_up(self.window_blocks) if member.swa_locks == 0)

        def worth(checkpoint: Checkpoint, blocks: int) -> float:
            age_ns = now_ns - checkpoint.last_access_ns
            rate = self._window_uses.rate(kind_of_window(checkpoint), age_ns)
            saving = self._window_saving(checkpoint) * self._cost(checkpoint.node, window=True)
            candidate = Candidate(saving, blocks, rate, age_ns)
            return self._policy(candidate, self._checkpoints.chance())

        def best(checkpoints: Sequence[Checkpoint], blocks: Callable[[Checkpoint], int]) -> Checkpoint | None:
            worths = [(worth(c, b), i) for i, c in enumerate(checkpoints) if (b := blocks(c)) > 0]
            return checkpoints[min(worths)[1]] if worths else None

        # Where windows overlap, dropping any one may free nothing by itself; then the least worth goes, which leaves
        # its neighbours sole keepers of the shared blocks. Never one whose blocks are all locked: that frees nothing.
        sampled = self._checkpoints.sample(SAMPLE)
        chosen = best(sampled, freed_by) or best(sampled, unlocked)
        if chosen is None:
            everything = list(self._checkpoints)
            chosen = best(everything, freed_by) or best(everything, unlocked)
        if chosen is None:
            raise InvariantError("SWA blocks are counted evictable, but no checkpoint keeps any")
        return chosen

    def _cost(self, node: Node, *, window: bool) -> float:
        return BACKED_COST if self.is_backed is not None and self.is_backed(node, window) else 1.0

    def _window_saving(self, checkpoint: Checkpoint) -> int:
        """Tokens to compute again if this window were lost: from the checkpoint before it, or by a rebuild."""
        previous = checkpoint.live_previous()
        start = previous.node.index + 1 if previous else 0
        saving = (checkpoint.node.index + 1 - start) * self.block_size
        return saving if self.rebuild_tokens is None else min(saving, self.rebuild_tokens)

    def audit(self) -> list[str]:
        """Recompute every derived quantity from the nodes alone; all discrepancies. O(nodes x window)."""
        return TreeAudit(self).faults()


def _promised(pool: BlockPool, count: int) -> list[BlockId]:
    blocks = pool.allocate(count)
    if blocks is None:
        raise InvariantError(f"{pool.name} pool: eviction promised {count} blocks and did not free them")
    return blocks
