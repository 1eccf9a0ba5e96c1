"""What moves between device and host, decided step by step.

    write-through   a block is copied down as soon as a step has computed it, a window as soon as it is retained
    selective       the same, once it has been reused
    write-back      when the device evicts it
    load            an admitted request's blocks that only the host has, before the layers that read them

Reconciliation is not a task of its own. Whenever a sequence is admitted, moves on by some blocks or ends, what the host
lacks of its path is copied down, whatever the reason; what the device lacks is loaded at the next hit.

Copies are decided within `EngineCore.schedule` and done when the step's result is applied. In between, nothing is
allocated or freed in either tier, so what they read and write is safe without further ado; within `schedule`, pins keep
host blocks from being evicted for one another.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from cygnet.base.errors import InvariantError
from cygnet.base.ids import NO_BLOCK, BlockId, BlockKey
from cygnet.kv.host_tier import HostTier, Pin
from cygnet.kv.node import NEVER, Node
from cygnet.kv.policy import TierPolicy
from cygnet.kv.prefix_tree import PrefixTree
from cygnet.kv.transfers import Copies, Pair, StepTransfers

MOST_WINDOWS = 4
"""Retained windows of a reused sequence that are looked at for copies the host lacks, nearest first."""


class BelowHost(Protocol):
    """Who wants to know what the host has: the way to the store."""

    def keep(self, node: Node, now_ns: int, *, window: bool) -> None:
        """The path to the host's `node`, or the window that ends with it, is there and worth storing."""

    def pump(self, now_ns: int) -> None:
        """Decide what to write next."""

    @property
    def num_queued(self) -> int:
        """What `pump` has yet to decide on."""


class _Copying:
    """Pairs chosen so far for one direction."""

    def __init__(self) -> None:
        self.full: list[Pair] = []
        self.swa: list[Pair] = []

    def take(self) -> Copies:
        copies = Copies(tuple(self.full), tuple(self.swa))
        self.full, self.swa = [], []
        return copies


class Tiers:
    """Copies between the device's tree and the host tier.

    Invariant (`audit`): outside of a step (between `step_done` and the next decision) nothing is pinned for copies.
    """

    def __init__(self, device: PrefixTree, host: HostTier, policy: TierPolicy, store: BelowHost | None = None) -> None:
        self.host = host
        self._device = device
        self._policy = policy
        self._store = store
        self._loads, self._saves, self._evicted = _Copying(), _Copying(), _Copying()
        self._pins: list[Pin] = []
        self._dirty: dict[Node, None] = {}
        """Tips of the device's paths that the host may lack."""
        self._windows: dict[Node, None] = {}
        """Nodes on the device whose retained windows the host may lack."""
        self._written: dict[Node, None] = {}
        self._written_windows: dict[Node, None] = {}
        """Nodes of the host that this step fills."""
        self.loaded_full_blocks_total = self.loaded_swa_blocks_total = 0
        self.saved_full_blocks_total = self.saved_swa_blocks_total = self.refused_blocks_total = 0
        device.on_evict = self._evicting if policy.write != "selective" else None
        device.on_retain = self._retained if policy.write == "through" else None
        device.is_backed = self._in_host
        if store is not None:
            host.tree.is_backed = _in_store

    # ------------------------------------------------------------------- loads

    def hold(self, keys: Sequence[BlockKey], boundary: int) -> list[Node]:
        """Pin the host's path of `keys` up to `boundary` blocks, with its last window, for the rest of the step."""
        node = self.host.tree.get(keys[boundary - 1])
        if node is None:
            raise InvariantError("a reuse plan counts on blocks that the host has lost")
        pin = self.host.pin(node)
        self._pins.append(pin)
        return pin.path

    def load_full(self, sources: Sequence[Node], blocks: Sequence[BlockId]) -> None:
        """Copy the full KV of the host's nodes into the device's `blocks`."""
        self._loads.full += [(node.full_block, block) for node, block in zip(sources, blocks, strict=True)]

    def load_swa(self, sources: Sequence[Node], blocks: Sequence[BlockId]) -> None:
        """Copy the SWA KV of the host's nodes into the device's `blocks`."""
        if any(node.swa_block == NO_BLOCK for node in sources):
            raise InvariantError("a reuse plan counts on a window that the host has lost")
        self._loads.swa += [(node.swa_block, block) for node, block in zip(sources, blocks, strict=True)]

    # ------------------------------------------------------------------- saves

    def computed(self, tip: Node) -> None:
        """A sequence's blocks up to the device's `tip` are there."""
        if self._policy.write == "through":
            self._dirty[tip] = None

    def reused(self, tip: Node, boundary: Node | None, now_ns: int) -> None:
        """A sequence was admitted that reuses the path to the device's `tip`, resuming at `boundary` if not `None`.

        Wherever it was found, it is in use in the host tier and in the store too.
        """
        below = self.host.tree.get(tip.key)
        window = self.host.tree.get(boundary.key) if boundary is not None else None
        self.host.touch(below, window, now_ns)
        if self._policy.write != "back":
            self._dirty[tip] = None
            for node in self._checkpoints_above(tip):
                self._windows[node] = None
        if self._store is not None:
            if below is not None:
                self._store.keep(below, now_ns, window=False)
            if window is not None:
                self._store.keep(window, now_ns, window=True)

    def _checkpoints_above(self, tip: Node) -> Iterator[Node]:
        node: Node | None = tip
        for _ in range(self._device.window_blocks + 1):  # the nearest one, if near; then from one to the one before
            if node is None or node.checkpoint is not None:
                break
            node = node.parent
        checkpoint = node.checkpoint if node is not None else None
        for _ in range(MOST_WINDOWS):
            if checkpoint is None:
                return
            yield checkpoint.node
            checkpoint = checkpoint.live_previous()

    def _retained(self, node: Node) -> None:
        self._windows[node] = None

    def _in_host(self, node: Node, window: bool) -> bool:
        below = self.host.tree.get(node.key)
        return below is not None and (not window or below.checkpoint is not None)

    def _worth_writing(self, node: Node) -> bool:
        return self._policy.write != "selective" or node.hits >= self._policy.write_hits

    def _evicting(self, node: Node, now_ns: int) -> None:
        """The device is about to evict: what the host lacks is copied before anything else of the step."""
        tip = self._save_path(node, self._evicted, now_ns)
        if tip is not None and tip.key == node.key and node.checkpoint is not None:
            self._save_window(node, tip, self._evicted, now_ns)

    def _save_path(self, node: Node, out: _Copying, now_ns: int) -> Node | None:
        """Copy to the host what it lacks of the path to the device's `node`, from the root on, as far as there is
        room; the last node of the path that the host has then."""
        missing = []
        at: Node | None = node
        while at is not None and (below := self.host.tree.get(at.key)) is None:
            missing.append(at)
            at = at.parent
        parent = None if at is None else below
        if not missing:
            return parent
        guard = self.host.pin(parent, window=False) if parent is not None else None
        missing.reverse()
        made = self.host.extend(parent, [above.key for above in missing], now_ns)
        if guard is not None:
            self.host.unpin(guard)
        self.refused_blocks_total += len(missing) - len(made)
        if not made:
            return parent
        self._pins.append(self.host.pin(made[-1], window=False))
        for above, copy in zip(missing, made, strict=False):
            copy.last_access_ns, copy.hits, copy.turns = above.last_access_ns, above.hits, above.turns
            out.full.append((above.full_block, copy.full_block))
        self._written[made[-1]] = None
        return made[-1]

    def _save_window(self, node: Node, below: Node, out: _Copying, now_ns: int) -> None:
        """Copy the window that ends with the device's `node` to the host, if it has not retained it."""
        window = {member.key: member.swa_block for member in node.path_up(self._device.window_blocks)}
        if below.checkpoint is not None or NO_BLOCK in window.values():
            return
        opened = self.host.open_window(below, now_ns)
        if opened is None:
            self.refused_blocks_total += len(window)
            return
        pin, filled = opened
        if filled:
            self._pins.append(pin)
        else:  # other windows had it all, so there is no copy that the pin would have to outlast, and maybe no step
            self.host.unpin(pin)
        out.swa += [(window[copy.key], copy.swa_block) for copy in filled]
        self._written_windows[below] = None

    # ------------------------------------------------------------------- steps

    def take(self, now_ns: int) -> StepTransfers:
        """The copies of the step that has just been scheduled: to be called last, when all its blocks are allocated."""
        for node in self._dirty:
            if (tip := self._worth(self._still_there(node))) is not None:
                self._save_path(tip, self._saves, now_ns)
        for node in self._windows:
            if self._device.get(node.key) is node and node.checkpoint is not None and self._worth_writing(node):
                below = self._save_path(node, self._saves, now_ns)
                if below is not None and below.key == node.key:
                    self._save_window(node, below, self._saves, now_ns)
        self._dirty.clear()
        self._windows.clear()
        evicted, loads, saves = self._evicted.take(), self._loads.take(), self._saves.take()
        self.loaded_full_blocks_total += len(loads.full)
        self.loaded_swa_blocks_total += len(loads.swa)
        self.saved_full_blocks_total += len(evicted.full) + len(saves.full)
        self.saved_swa_blocks_total += len(evicted.swa) + len(saves.swa)
        freed_full, freed_swa = self.host.take_freed()
        return StepTransfers(evicted, loads, saves, freed_full, freed_swa)

    def _still_there(self, node: Node) -> Node | None:
        at: Node | None = node
        while at is not None and self._device.get(at.key) is not at:
            at = at.parent
        return at

    def _worth(self, node: Node | None) -> Node | None:
        while node is not None and not self._worth_writing(node):
            node = node.parent
        return node

    @property
    def pending(self) -> bool:
        """Whether there is something to copy although nothing may be left to compute."""
        return bool(self._dirty or self._windows or self._evicted.full or self._evicted.swa)

    @property
    def settled(self) -> bool:
        """Whether steps go by without anything to copy or store, as long as the trees don't change."""
        copying = self.pending or self._pins or self._written or self._written_windows
        return not copying and (self._store is None or not self._store.num_queued)

    def step_done(self, now_ns: int) -> None:
        """The step's copies are done."""
        for pin in self._pins:
            self.host.unpin(pin)
        self._pins.clear()
        if self._store is not None:
            for node in self._written:
                self._store.keep(node, now_ns, window=False)
            for node in self._written_windows:
                self._store.keep(node, now_ns, window=True)
            self._store.pump(now_ns)
        self._written.clear()
        self._written_windows.clear()

    def forget(self) -> None:
        """The device's tree was flushed: nothing is left to copy down."""
        self._dirty.clear()
        self._windows.clear()

    def audit(self) -> list[str]:
        """All discrepancies of the host tier, and copies left over; between steps."""
        left = len(self._pins) + len(self._loads.full) + len(self._loads.swa)
        return self.host.audit() + ([f"{left} loads or pins are left over from a step"] if left else [])


def _in_store(node: Node, window: bool) -> bool:
    """As far as is known: the store may have lost it since."""
    return (node.swa_stored_ns if window else node.stored_ns) != NEVER
