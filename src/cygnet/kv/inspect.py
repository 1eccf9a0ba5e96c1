"""What is cached where, as a report. Looks at both trees and changes nothing.

A *sequence* is a path from the root to a block that none goes on from in either tree. The trees overlap and are each
closed under prefixes, so what a tier has of a sequence is a prefix of it:

    device   b0 ── b1 ── b2                        3 blocks on the device
    host     b0 ── b1 ── b2 ── b3 ── b4            5 in the host: one sequence, 5 blocks long
                    └─── c2                        another one, which leaves the first after 2 blocks
"""

import heapq
from dataclasses import dataclass, field

from cygnet.base.cache_report import CacheReport, PoolReport, SequenceReport, WindowReport
from cygnet.base.ids import BlockKey
from cygnet.kv.manager import KVManager
from cygnet.kv.node import NEVER, Node
from cygnet.kv.prefix_tree import PrefixTree

KEY_DIGITS = 8
MOST_NODES = 30_000
"""After so many blocks no further sequence is described: a step waits meanwhile."""


def inspect_cache(kv: KVManager, limit: int, now_ns: int) -> CacheReport:
    """The pools, and the `limit` sequences used last (fewer where they are very long).

    O(leaves) to find them, and then O(blocks) of those described, each block once however many sequences share it.
    """
    tips = _tips(kv)
    walk = _Walk(kv.tree, kv.host.tree if kv.host is not None else None, kv.block_size, now_ns)
    sequences: list[SequenceReport] = []
    for tip in heapq.nlargest(limit, tips, key=_Place.last_access_ns):
        if walk.num_nodes >= MOST_NODES:
            break
        sequences.append(walk.describe(tip))
    return CacheReport(
        block_size=kv.block_size,
        window=kv.geometry.window,
        tiers=tiers_of(kv),
        pools=_pools(kv),
        num_sequences=len(tips),
        sequences=tuple(sequences),
    )


def tiers_of(kv: KVManager) -> tuple[str, ...]:
    """Where KV is cached, from the top down."""
    return ("device", *(("host",) if kv.host is not None else ()), *(("store",) if kv.store is not None else ()))


def _pools(kv: KVManager) -> tuple[PoolReport, ...]:
    pools = [("device", kv.pool_stats())]
    if kv.host is not None:
        pools.append(("host", kv.host.pool_stats()))
    return tuple(
        PoolReport(
            tier=tier,
            group=group,
            num_blocks=pool.num_blocks,
            used=pool.used,
            cached=pool.cached,
            free=pool.free,
            block_bytes=pool.block_bytes,
        )
        for tier, (full, swa) in pools
        for group, pool in (("full", full), ("swa", swa))
        if pool.num_blocks
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """One block of a sequence: its node in each tree that has it."""

    device: Node | None
    host: Node | None

    def any(self) -> Node:
        """Either node."""
        node = self.device if self.device is not None else self.host
        assert node is not None
        return node

    def last_access_ns(self) -> int:
        return max(node.last_access_ns for node in (self.device, self.host) if node is not None)

    def has_children(self) -> bool:
        return any(node is not None and node.num_children > 0 for node in (self.device, self.host))


def _tips(kv: KVManager) -> list[_Place]:
    """Last blocks of all sequences."""
    leaves = [*kv.tree.leaves(), *kv.tips()]
    if kv.host is not None:
        leaves += [*kv.host.tree.leaves(), *kv.host.tips()]
    places = []
    for key in {leaf.key: None for leaf in leaves}:
        place = _Place(kv.tree.get(key), kv.host.tree.get(key) if kv.host is not None else None)
        if not place.has_children():
            places.append(place)
    return places


@dataclass(slots=True)
class _Sequence:
    """What is known of one sequence, in blocks."""

    device: int = 0
    host: int = 0
    store: int = 0
    shared: int = 0
    first: Node | None = None
    """Of its first block."""
    windows: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    """Ends and tiers, the last window first."""

    def see(self, device: Node | None, host: Node | None, end: int) -> None:
        """Take in one block; blocks come last first."""
        on_device = on_host = False
        if device is not None:
            self.device = self.device or end
            on_device = device.checkpoint is not None
        if host is not None:
            self.host = self.host or end
            on_host = host.checkpoint is not None
            if not self.store and host.stored_ns != NEVER:
                self.store = end
        if on_device or on_host:
            in_store = host is not None and host.swa_stored_ns != NEVER
            there = (("device", on_device), ("host", on_host), ("store", in_store))
            self.windows.append((end, tuple(tier for tier, is_there in there if is_there)))

    def inherit(self, other: "_Sequence", end: int) -> None:
        """The first `end` blocks are those of `other`."""
        self.device = self.device or min(end, other.device)
        self.host = self.host or min(end, other.host)
        self.store = self.store or min(end, other.store)
        self.windows += [window for window in other.windows if window[0] <= end]
        self.first = other.first


class _Walk:
    """Describes sequences, one after another; blocks that one before has seen are not walked again."""

    def __init__(self, device: PrefixTree, host: PrefixTree | None, block_size: int, now_ns: int) -> None:
        self._device, self._host = device, host
        self._block_size = block_size
        self._now_ns = now_ns
        self._seen: dict[BlockKey, _Sequence] = {}
        self.num_nodes = 0
        """Blocks walked so far."""

    def describe(self, tip: _Place) -> SequenceReport:
        """The sequence that ends with `tip`."""
        sequence, own = self._climb(tip)
        size = self._block_size
        nodes = [node for node in (own.device, own.host) if node is not None]
        assert sequence.first is not None
        return SequenceReport(
            key=_shown(tip.any().key),
            prefix=_shown(sequence.first.key),
            num_tokens=(tip.any().index + 1) * size,
            device_tokens=sequence.device * size,
            host_tokens=sequence.host * size,
            store_tokens=sequence.store * size,
            windows=tuple(WindowReport(end * size, tiers) for end, tiers in reversed(sequence.windows)),
            shared_tokens=sequence.shared * size,
            reuses=max(node.hits for node in nodes),
            num_running=own.device.locks if own.device is not None else 0,
            age_s=round(max(0, self._now_ns - tip.last_access_ns()) / 1e9, 1),
        )

    def _climb(self, tip: _Place) -> tuple[_Sequence, _Place]:
        """What is to be known of a sequence, and the first block that it shares with no other."""
        sequence, own, seen = _Sequence(), tip, self._seen
        device, host = tip.device, tip.host
        device_below: Node | None = None
        host_below: Node | None = None
        while (node := device if device is not None else host) is not None:
            end = node.index + 1
            if not sequence.shared and (
                (device is not None and device.num_children > (device_below is not None))
                or (host is not None and host.num_children > (host_below is not None))
            ):
                sequence.shared, own = end, _Place(device_below, host_below)
            if (other := seen.get(node.key)) is not None:
                sequence.inherit(other, end)
                return sequence, own
            self.num_nodes += 1
            seen[node.key] = sequence
            sequence.see(device, host, end)
            sequence.first = node
            parent, device_below, host_below = node.parent, device, host
            device, host = self._above(device, parent, self._device), self._above(host, parent, self._host)
        return sequence, own if sequence.shared else _Place(device_below, host_below)

    @staticmethod
    def _above(node: Node | None, parent: Node | None, tree: PrefixTree | None) -> Node | None:
        """The node of `tree` before `node`, if it has one; `parent` is that node in this or the other tree."""
        if node is not None:
            return node.parent
        return tree.get(parent.key) if tree is not None and parent is not None else None


def _shown(key: BlockKey) -> str:
    return key.hex()[:KEY_DIGITS]
