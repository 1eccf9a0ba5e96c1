"""The host tier: KV blocks in host memory, below the device's and above the store's.

It is the same thing as the device's cache, once more: two pools, a prefix tree over them, retained windows, eviction by
worth. What the trees hold overlaps: a block that the device has is usually here too, so that losing it there costs a
copy. Each tree is closed under prefixes by itself, so the full hit over both is the longer of the two, and
losing a block in one tier never makes one in another unreachable.

Nothing runs from here. Blocks are read and written by copies and by store commands, which pin them meanwhile.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from cygnet.base.errors import InvariantError
from cygnet.base.geometry import KVGeometry
from cygnet.base.ids import NO_BLOCK, BlockId, BlockKey
from cygnet.base.messages import PoolStats
from cygnet.kv.block_pool import BlockPool
from cygnet.kv.node import Node
from cygnet.kv.policy import KVPolicy
from cygnet.kv.prefix_tree import PrefixTree
from cygnet.kv.sizing import HostSizes
from cygnet.kv.store import Group
from cygnet.kv.transfers import object_bytes


class Pin:
    """Blocks that a copy or a store command uses, and so must stay: a path of nodes, and some nodes' SWA blocks."""

    __slots__ = ("path", "window")

    def __init__(self, path: list[Node], window: list[Node]) -> None:
        self.path = path
        """From the root on."""
        self.window = window


class HostTier:
    """Two pools of objects in host memory and the tree over them.

    Invariants (`audit`): every block of a pool is free, or the tree's, or reserved; the tree's locks are those of the
    pins. Functions that may lack room say so by their result, and then nothing has changed but what was evicted.
    """

    def __init__(self, geometry: KVGeometry, sizes: HostSizes, policy: KVPolicy) -> None:
        self.geometry = geometry
        self.sizes = sizes
        self.full_pool = BlockPool("host full", sizes.full_blocks, track_freed=policy.track_freed)
        self.swa_pool = BlockPool("host swa", sizes.swa_blocks, track_freed=policy.track_freed)
        self.tree = PrefixTree(
            self.full_pool,
            self.swa_pool,
            block_size=sizes.block_size,
            window_blocks=geometry.window_blocks(sizes.block_size),
            rebuild_tokens=geometry.rebuild_tokens if policy.rebuild else None,
            eviction=policy.eviction,
            seed=policy.seed + 1000,
        )
        self._reserved: dict[Group, set[BlockId]] = {Group.FULL: set(), Group.SWA: set()}
        self._pins: set[Pin] = set()

    # ------------------------------------------------------------------- hits

    def match(self, keys: Sequence[BlockKey], limit: int) -> tuple[int, int]:
        """Full and window-safe hit in blocks, of `keys[:limit]`."""
        full = self.tree.longest_cached(keys, limit)
        return full, self.tree.longest_window_safe(keys, full)

    def touch(self, tip: Node | None, resumed_at: Node | None, now_ns: int) -> None:
        """A sequence uses the path to `tip`, and the window that ends with `resumed_at`. O(depth)."""
        for node in tip.path_up(tip.index + 1) if tip is not None else ():
            node.last_access_ns = now_ns
            node.hits += 1
        if resumed_at is not None:
            self.tree.touch_window(resumed_at, now_ns)

    # ------------------------------------------------------------------- room

    def pool(self, group: Group) -> BlockPool:
        """The pool of one group."""
        return self.full_pool if group is Group.FULL else self.swa_pool

    def room(self, group: Group) -> int:
        """Blocks free or evictable."""
        tree = self.tree
        evictable = tree.num_evictable_full if group is Group.FULL else tree.num_evictable_swa
        return self.pool(group).num_free + evictable

    def _take(self, group: Group, count: int, now_ns: int) -> list[BlockId] | None:
        """`count` blocks, evicting as needed; `None` where there is no room."""
        if count > self.room(group):
            return None
        obtain = self.tree.obtain_full if group is Group.FULL else self.tree.obtain_swa
        return obtain(count, now_ns)

    def reserve(self, group: Group, count: int, now_ns: int) -> list[BlockId] | None:
        """`count` blocks for what comes from the store, which belong to nobody until `adopt` or `give_back`."""
        blocks = self._take(group, count, now_ns)
        if blocks is not None:
            self._reserved[group].update(blocks)
        return blocks

    def reserved(self, group: Group) -> frozenset[BlockId]:
        """Blocks that are reserved now."""
        return frozenset(self._reserved[group])

    @property
    def num_reserved(self) -> int:
        """Blocks of both groups that are reserved now."""
        return sum(map(len, self._reserved.values()))

    def give_back(self, group: Group, blocks: Sequence[BlockId]) -> None:
        """Free reserved blocks."""
        self._reserved[group].difference_update(blocks)
        self.pool(group).free(blocks)

    # ------------------------------------------------------- blocks into the tree

    def extend(self, parent: Node | None, keys: Sequence[BlockKey], now_ns: int) -> list[Node]:
        """Nodes with new blocks for as many of `keys` as there is room for, one below the other under `parent`.

        The caller pins `parent` before, and the last node after: what is in the blocks has yet to be written.
        """
        count = min(len(keys), self.room(Group.FULL))
        blocks = self._take(Group.FULL, count, now_ns)
        if blocks is None:
            raise InvariantError("host full pool: counted room, and then found none")
        nodes = []
        for key, block in zip(keys, blocks, strict=False):
            parent = self.tree.insert(key, parent, block, now_ns)
            nodes.append(parent)
        return nodes

    def adopt(self, parent: Node | None, key: BlockKey, block: BlockId, now_ns: int) -> Node:
        """A node for a reserved block that has been filled. A block whose key is here by now is given back."""
        node = self.tree.get(key)
        if node is not None:
            self.give_back(Group.FULL, (block,))
            return node
        self._reserved[Group.FULL].discard(block)
        return self.tree.insert(key, parent, block, now_ns)

    def missing_window(self, node: Node) -> list[Node]:
        """Nodes without SWA KV in the window that ends with `node`, from the left."""
        window = node.path_up(self.tree.window_blocks)
        return [member for member in window if member.swa_block == NO_BLOCK][::-1]

    def open_window(self, node: Node, now_ns: int) -> tuple[Pin, list[Node]] | None:
        """Retain the window that ends with `node`, with new blocks where it has none; `None` where there is no room.

        The window is pinned: what is in the new blocks (of the nodes returned) has yet to be written.
        """
        pin = self.pin(node)  # its path, and what is there of the window, must outlive the eviction for the rest
        blocks = self._take(Group.SWA, len(self.missing_window(node)), now_ns)
        if blocks is None:
            self.unpin(pin)
            return None
        return pin, self._fill(pin, node, blocks)

    def adopt_window(self, node: Node, blocks: Mapping[int, BlockId], now_ns: int) -> bool:
        """Retain the window that ends with `node`, filling its gaps from reserved, filled `blocks` by block index.

        Blocks that are not needed are given back; all of them, with False, where that leaves a gap.
        """
        missing = self.missing_window(node)
        whole = all(member.index in blocks for member in missing)
        used = [blocks[member.index] for member in missing] if whole else []
        self.give_back(Group.SWA, [block for block in blocks.values() if block not in used])
        if not whole:
            return False
        self._reserved[Group.SWA].difference_update(used)
        pin = self.pin(node)
        for member in self._fill(pin, node, used):
            member.swa_stored_ns = now_ns
        self.unpin(pin)
        return True

    def _fill(self, pin: Pin, node: Node, blocks: Sequence[BlockId]) -> list[Node]:
        missing = self.missing_window(node)
        for member, block in zip(missing, blocks, strict=True):
            self.tree.attach_swa(member, block)  # locked once, for the pin
        pin.window += missing
        if not self.tree.add_checkpoint(node):
            raise InvariantError(f"host: window of node {node.index} was filled and is not whole")
        return missing

    # --------------------------------------------------------------------- pins

    def pin(self, node: Node, *, window: bool = True) -> Pin:
        """Keep the path to `node` and, with `window`, what SWA KV there is in the window that ends with it.

        O(depth).
        """
        path = list(node.path_up(node.index + 1))[::-1]
        members = path[-self.tree.window_blocks :] if window and self.tree.window_blocks else []
        pin = Pin(path, [member for member in members if member.swa_block != NO_BLOCK])
        for member in path:
            self.tree.lock(member)
        for member in pin.window:
            self.tree.lock_swa(member)
        self._pins.add(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Undo `pin`."""
        self._pins.remove(pin)
        for member in pin.window:
            self.tree.unlock_swa(member)
        for member in reversed(pin.path):
            self.tree.unlock(member)

    # ----------------------------------------------------------------- the rest

    def take_freed(self) -> tuple[tuple[BlockId, ...], tuple[BlockId, ...]]:
        """Blocks freed since the last call that are still free, when `track_freed` is on."""

        def still_free(pool: BlockPool) -> tuple[BlockId, ...]:
            return tuple(block for block in pool.take_freed() if pool.is_free(block))

        return still_free(self.full_pool), still_free(self.swa_pool)

    def flush(self) -> tuple[int, int]:
        """Drop everything that nothing pins; how many full blocks and windows that was."""
        return self.tree.flush()

    def tips(self) -> list[Node]:
        """Where the pinned paths end: every leaf that is locked is among them."""
        return [pin.path[-1] for pin in self._pins]

    def pool_stats(self) -> tuple[PoolStats, PoolStats]:
        """Full and SWA pool; used blocks are pinned or reserved."""
        full, swa = (object_bytes(group, self.sizes.block_size) for group in (self.geometry.full, self.geometry.swa))
        return (
            self.full_pool.stats(self.tree.num_evictable_full, full),
            self.swa_pool.stats(self.tree.num_evictable_swa, swa),
        )

    def audit(self) -> list[str]:
        """All discrepancies between pools, tree, reservations and pins."""
        faults = self.full_pool.audit() + self.swa_pool.audit() + [f"host {fault}" for fault in self.tree.audit()]
        nodes = list(self.tree.nodes())
        for group, owned in (
            (Group.FULL, [n.full_block for n in nodes]),
            (Group.SWA, [n.swa_block for n in nodes if n.swa_block != NO_BLOCK]),
        ):
            pool, reserved = self.pool(group), self._reserved[group]
            both = len(set(owned) & reserved)
            if both:
                faults.append(f"{pool.name} pool: {both} blocks are both reserved and the tree's")
            if len(owned) + len(reserved) + pool.num_free != pool.num_blocks:
                faults.append(
                    f"{pool.name} pool: {len(owned)} in the tree + {len(reserved)} reserved + {pool.num_free} free "
                    f"!= {pool.num_blocks}"
                )
        locks = Counter(id(member) for pin in self._pins for member in pin.path)
        swa_locks = Counter(id(member) for pin in self._pins for member in pin.window)
        faults += [
            f"host node {node.index}: {node.locks} locks and {node.swa_locks} on its SWA, "
            f"pins make {locks[id(node)]} and {swa_locks[id(node)]}"
            for node in nodes
            if node.locks != locks[id(node)] or node.swa_locks != swa_locks[id(node)]
        ]
        return faults
