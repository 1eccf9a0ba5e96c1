"""KVManager: what the scheduler sees of the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from msgspec.structs import replace

from cygnet.base.cache_report import FlushReport
from cygnet.base.errors import InvariantError
from cygnet.base.geometry import KVGeometry
from cygnet.base.ids import NO_BLOCK, BlockId, BlockKey, RequestId
from cygnet.base.messages import PoolStats
from cygnet.kv.block_pool import BlockPool
from cygnet.kv.hashing import extend_keys
from cygnet.kv.host_tier import HostTier
from cygnet.kv.journal import Journal
from cygnet.kv.node import Node
from cygnet.kv.policy import KVPolicy, TierPolicy
from cygnet.kv.prefix_tree import PrefixTree
from cygnet.kv.request_audit import audit_requests
from cygnet.kv.request_kv import RequestKV
from cygnet.kv.retention import RETENTION_RULES, RetentionContext
from cygnet.kv.reuse import CachedTokens, ReusePlan, plan_reuse
from cygnet.kv.sizing import HostSizes, PoolSizes
from cygnet.kv.store import Namespace
from cygnet.kv.store_tier import StoreTier
from cygnet.kv.tiers import Tiers
from cygnet.kv.transfers import NO_TRANSFERS, StepTransfers

SAVE_BLOCKS = 8
"""A running sequence's blocks are copied to the host by so many at a time."""


@dataclass(frozen=True)
class LowerTiers:
    """What there is below the device."""

    host: HostSizes
    policy: TierPolicy
    namespace: Namespace | None = None
    """What this model's objects are called in the store; `None` without a store."""


class KVManager:
    """Two pools, the tree over them, and the block tables of the running requests.

    Life of a request's KV: `new` → (`plan` → `admit`)+ → (`allocate` → `commit`)* → `free`.

    Invariants (`audit`): every block of a pool is free, or owned by exactly one tree node or one request; a request's
    nodes are locked once by it, and so are the tree's SWA blocks in its window; block tables and nodes agree.
    Functions that may lack room say so by their result, and then nothing has changed.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        sizes: PoolSizes,
        policy: KVPolicy | None = None,
        *,
        lower: LowerTiers | None = None,
    ) -> None:
        self.geometry = geometry
        self.sizes = sizes
        self.policy = policy or KVPolicy()
        self.block_size = sizes.block_size
        self._has_swa = geometry.has_swa
        self.full_pool = BlockPool("full", sizes.full_blocks, track_freed=self.policy.track_freed)
        self.swa_pool = BlockPool("swa", sizes.swa_blocks, track_freed=self.policy.track_freed)
        self.tree = PrefixTree(
            self.full_pool,
            self.swa_pool,
            block_size=sizes.block_size,
            window_blocks=geometry.window_blocks(sizes.block_size),
            rebuild_tokens=geometry.rebuild_tokens if self.policy.rebuild else None,
            eviction=self.policy.eviction,
            seed=self.policy.seed,
        )
        self._rules = [RETENTION_RULES.get(name) for name in self.policy.retention]
        self._keep_response_end = "response_end" in self.policy.retention
        self._active: dict[RequestId, RequestKV] = {}
        self.host: HostTier | None = None
        self.store: StoreTier | None = None
        self.tiers: Tiers | None = None
        if lower is not None and self.policy.prefix_cache:
            self.host = HostTier(geometry, lower.host, self.policy)
            if lower.namespace is not None:
                self.store = StoreTier(geometry, self.host, lower.namespace, lower.policy, self.plan)
            self.tiers = Tiers(self.tree, self.host, lower.policy, self.store)
        self.journal = Journal([self.tree] if self.host is None else [self.tree, self.host.tree])

    # ------------------------------------------------------------ admission

    def new(
        self, request_id: RequestId, root: BlockKey, token_ids: Sequence[int], message_starts: Sequence[int] = ()
    ) -> RequestKV:
        """The (empty) KV of a request that is not admitted yet, with the keys of its tokens computed.

        `message_starts`: tokens at which the chat's messages begin, ascending, where that is known.
        """
        kv = RequestKV(request_id, root, message_starts=tuple(message_starts))
        extend_keys(kv.keys, root, token_ids, self.block_size, len(token_ids))
        return kv

    def plan(self, kv: RequestKV, num_tokens: int) -> ReusePlan:
        """What a sequence of `num_tokens` tokens would reuse now, from device and host. Changes nothing."""
        limit = (num_tokens - 1) // self.block_size if self.policy.prefix_cache else 0
        on_device = self.tree.longest_cached(kv.keys, limit)
        full, safe = on_device, self.tree.longest_window_safe(kv.keys, on_device)
        if self.host is not None:
            host_full, host_safe = self.host.match(kv.keys, limit)
            full, safe = max(full, host_full), max(safe, host_safe)
        plan = plan_reuse(
            self.geometry,
            block_size=self.block_size,
            num_tokens=num_tokens,
            num_full_blocks=full,
            num_safe_blocks=safe,
            allow_rebuild=self.policy.rebuild,
        )
        return plan if self.host is None else self._with_loads(kv, plan, on_device)

    def _with_loads(self, kv: RequestKV, plan: ReusePlan, on_device: int) -> ReusePlan:
        """`plan`, with what it has to load from the host. What lies beyond where a sequence resumes is not worth it."""
        full = plan.num_full_blocks if plan.kind == "rebuild" else max(on_device, plan.num_safe_blocks)
        window = self._window_of(plan)
        nodes = [self.tree.get(key) for key in kv.keys[window.start : window.stop]]
        lost = sum(1 for node in nodes if node is None or node.swa_block == NO_BLOCK) if self._has_swa else 0
        return replace(
            plan,
            num_full_blocks=full,
            num_unused_blocks=plan.num_full_blocks - full,
            num_full_loads=full - min(on_device, full),
            num_swa_loads=lost,
        )

    def _window_of(self, plan: ReusePlan) -> range:
        """Blocks whose SWA KV `plan` reads from the cache."""
        start = plan.start // self.block_size
        return range(max(0, start - self.tree.window_blocks) if plan.kind == "resume" else start, start)

    def cached_by_tier(self, kv: RequestKV, plan: ReusePlan) -> CachedTokens:
        """From which tiers the tokens come that `plan` reuses."""
        device = min(plan.start, plan.num_device_blocks * self.block_size)
        first, end = (block * self.block_size for block in kv.fetched)
        store = max(0, min(end, plan.start) - max(first, device))
        return CachedTokens(device, plan.start - device - store, store)

    def admit(self, kv: RequestKV, plan: ReusePlan, *, full_room: int, swa_room: int, now_ns: int) -> bool:
        """Lock what `plan` reuses, if afterwards `full_room` and `swa_room` blocks could still be allocated.

        `plan` must have been made since the tree last changed; one whose blocks are gone is an `InvariantError`.
        """
        if kv.request_id in self._active:
            raise InvariantError(f"request {kv.request_id} admitted twice")
        if full_room > self.available_full or swa_room > self.available_swa:
            return False
        self._lock_prefix(kv, plan)
        if full_room > self.available_full or swa_room > self.available_swa:
            self._unlock(kv)
            return False
        kv.turns = self._count_turns(kv, plan, now_ns)
        if plan.num_full_loads or plan.num_swa_loads:
            self._load_prefix(kv, plan, now_ns)
        for node in kv.nodes:
            node.last_access_ns = now_ns
            node.hits += 1
        resumed = kv.nodes[plan.start // self.block_size - 1] if plan.kind == "resume" else None
        if resumed is not None:
            self.tree.touch_window(resumed, now_ns)
        kv.num_saved = len(kv.nodes)
        self._active[kv.request_id] = kv
        self._mark_boundaries(kv, plan)
        if self.tiers is not None and kv.nodes:
            self.tiers.reused(kv.nodes[-1], resumed, now_ns)
        return True

    def _count_turns(self, kv: RequestKV, plan: ReusePlan, now_ns: int) -> int:
        """The turns of `kv`'s sequence, this one included; it goes on from others if it reuses half of its tokens."""
        if 2 * plan.num_full_blocks * self.block_size <= plan.num_tokens:
            return 1
        trees = [self.tree] if self.host is None else [self.tree, self.host.tree]
        tips = [(tree, node) for tree in trees if (node := tree.get(kv.keys[plan.num_full_blocks - 1])) is not None]
        return 1 + max(tree.note_use(node, now_ns) for tree, node in tips)

    def _lock_prefix(self, kv: RequestKV, plan: ReusePlan) -> None:
        """Lock what `plan` reuses of the device's blocks; gaps that it loads are left open."""
        found = [self.tree.get(key) for key in kv.keys[: plan.num_device_blocks]]
        nodes = [node for node in found if node is not None]
        window = self._window_of(plan)
        live = [node for node in nodes[window.start : window.stop] if not self._has_swa or node.swa_block != NO_BLOCK]
        if len(nodes) < len(found) or len(live) + plan.num_swa_loads < len(window):
            raise InvariantError(f"request {kv.request_id}: reuse plan is stale")
        for node in nodes:
            self.tree.lock(node)
        kv.nodes, kv.full_blocks = nodes, [node.full_block for node in nodes]
        kv.swa_published = window.stop
        if self._has_swa:
            for node in live:
                self.tree.lock_swa(node)
            kv.swa_blocks = [NO_BLOCK] * window.stop
            for node in live:
                kv.swa_blocks[node.index] = node.swa_block
            kv.live_from = window.start
        kv.num_hit_blocks = plan.num_full_blocks
        kv.key_floor, kv.exact_from, kv.num_computed = plan.key_floor, plan.exact_from, plan.start

    def _load_prefix(self, kv: RequestKV, plan: ReusePlan, now_ns: int) -> None:
        """Fill the gaps that `_lock_prefix` left with new blocks, to be loaded from the host."""
        assert self.tiers is not None
        window, loaded = self._window_of(plan), range(plan.num_device_blocks, plan.num_full_blocks)
        sources = self.tiers.hold(kv.keys, max(loaded.stop if loaded else 0, window.stop if plan.num_swa_loads else 0))
        blocks = self.tree.obtain_full(len(loaded), now_ns)
        for index, block in zip(loaded, blocks, strict=True):
            node = self.tree.insert(kv.keys[index], kv.nodes[-1] if kv.nodes else None, block, now_ns)
            node.turns = kv.turns
            self.tree.lock(node)
            kv.nodes.append(node)
        kv.full_blocks += blocks
        self.tiers.load_full(sources[loaded.start : loaded.stop], blocks)
        gaps = [index for index in window if kv.swa_blocks[index] == NO_BLOCK] if self._has_swa else []
        blocks = self.tree.obtain_swa(len(gaps), now_ns)
        for index, block in zip(gaps, blocks, strict=True):
            self.tree.attach_swa(kv.nodes[index], block)
            kv.swa_blocks[index] = block
        self.tiers.load_swa([sources[index] for index in gaps], blocks)
        if gaps:
            kv.checkpoints.add(window.stop)  # it has proved its worth

    def _mark_boundaries(self, kv: RequestKV, plan: ReusePlan) -> None:
        full = plan.num_full_blocks
        context = RetentionContext(
            prompt_blocks=(plan.num_tokens - 1) // self.block_size,
            num_full_blocks=full,
            num_safe_blocks=plan.num_safe_blocks,
            diverges=full > 0 and kv.nodes[full - 1].num_children > 0,
            window_blocks=self.tree.window_blocks,
            message_blocks=kv.message_blocks(self.block_size, plan.num_tokens),
        )
        # The start itself too: its window is live now, but maybe only as long as another request runs.
        first = max(1, plan.start // self.block_size)
        kv.checkpoints |= {b for rule in self._rules for b in rule(context) if b >= first}
        self._retain(kv)

    def want_checkpoint(self, kv: RequestKV, boundary: int) -> None:
        """Retain the window at `boundary` (blocks) when `kv` gets there: another request waits to branch off there."""
        if boundary > 0 and boundary >= kv.num_computed // self.block_size:
            kv.checkpoints.add(boundary)
            self._retain(kv)

    # ----------------------------------------------------------- allocation

    @property
    def available_full(self) -> int:
        """Full blocks free or evictable."""
        return self.full_pool.num_free + self.tree.num_evictable_full

    @property
    def available_swa(self) -> int:
        """SWA blocks free or evictable."""
        return self.swa_pool.num_free + self.tree.num_evictable_swa

    def extent(self, kv: RequestKV) -> int:
        """How many tokens `kv` could have blocks for at most, evicting all that can be evicted."""
        blocks = len(kv.full_blocks) + self.available_full
        if self.geometry.has_swa:
            blocks = min(blocks, len(kv.swa_blocks) + self.available_swa)
        return blocks * self.block_size

    def allocate(self, kv: RequestKV, num_tokens: int, now_ns: int) -> bool:
        """Give `kv` blocks of both groups for its first `num_tokens` tokens, evicting as needed from the pool that is
        short. False, and no change, where there is no room."""
        has = len(kv.full_blocks) if not self._has_swa else min(len(kv.full_blocks), len(kv.swa_blocks))
        if num_tokens <= has * self.block_size:
            return True  # most decoded tokens
        blocks = ceil(num_tokens / self.block_size)
        full = max(0, blocks - len(kv.full_blocks))
        swa = max(0, blocks - len(kv.swa_blocks)) if self._has_swa else 0
        if full > self.available_full or swa > self.available_swa:
            return False
        kv.full_blocks += self.tree.obtain_full(full, now_ns)
        kv.swa_blocks += self.tree.obtain_swa(
            swa, now_ns
        )  # after full blocks, as windows that end in evicted ones go too
        return True

    # ---------------------------------------------------- publish and release

    def commit(self, kv: RequestKV, token_ids: Sequence[int], num_computed: int, now_ns: int) -> None:
        """The KV of `token_ids[:num_computed]` now exists: publish whole blocks, retain and release windows."""
        first, upto = kv.num_computed // self.block_size, num_computed // self.block_size
        kv.num_computed = num_computed
        if first == upto:
            return  # most decoded tokens: no block was completed, so nothing is to publish and no window moved on
        if self.policy.prefix_cache:
            extend_keys(kv.keys, kv.root, token_ids, self.block_size, num_computed)
            self._publish(kv, upto, now_ns)
            self._retain(kv)
            if self.tiers is not None and len(kv.nodes) - kv.num_saved >= SAVE_BLOCKS:
                self.tiers.computed(kv.nodes[-1])
                kv.num_saved = len(kv.nodes)
        self._release_out_of_window(kv)

    def _publish(self, kv: RequestKV, upto: int, now_ns: int) -> None:
        """Publish blocks up to `upto`: both groups of one block before the next block."""
        tree, nodes, has_swa = self.tree, kv.nodes, self._has_swa
        for index in range(kv.swa_published if has_swa else len(nodes), upto):
            if index == len(nodes):
                key = kv.keys[index]
                node = tree.get(key)
                if node is None:
                    parent = nodes[-1] if nodes else None
                    node = tree.insert(key, parent, kv.full_blocks[index], now_ns, locked=True)
                    node.turns = kv.turns
                else:
                    kv.private_full.add(index)
                    tree.lock(node)
                nodes.append(node)
            if has_swa:
                node = nodes[index]
                if node.swa_block == NO_BLOCK and self._is_exact(kv, index):
                    tree.attach_swa(node, kv.swa_blocks[index])
                else:
                    kv.private_swa.add(index)
                kv.swa_published = index + 1

    def _retain(self, kv: RequestKV) -> None:
        reached = min(kv.num_computed // self.block_size, len(kv.nodes))
        for boundary in sorted(b for b in kv.checkpoints if b <= reached):
            kv.checkpoints.discard(boundary)
            self._keep_window(kv, boundary)

    def _keep_window(self, kv: RequestKV, boundary: int) -> None:
        """Retain the window before `boundary` if all of it is live.

        Where a twin published first and has let go since, our own copy takes the place of the twin's.
        """
        for index in range(max(kv.live_from, boundary - self.tree.window_blocks), boundary):
            node = kv.nodes[index]
            if self._is_exact(kv, index) and index in kv.private_swa and node.swa_block == NO_BLOCK:
                self.tree.attach_swa(node, kv.swa_blocks[index])
                kv.private_swa.discard(index)
        self.tree.add_checkpoint(kv.nodes[boundary - 1])

    def _is_exact(self, kv: RequestKV, index: int) -> bool:
        return index * self.block_size >= kv.exact_from

    def _release_out_of_window(self, kv: RequestKV) -> None:
        """Let go of SWA blocks that neither the next token nor a checkpoint at the last whole block will read."""
        if not self.geometry.has_swa:
            return
        boundary = kv.num_computed // self.block_size * self.block_size
        dead_below = max(0, boundary - self.geometry.window) // self.block_size
        self._release_swa(kv, dead_below)

    def _release_swa(self, kv: RequestKV, upto: int) -> None:
        for index in range(kv.live_from, min(upto, len(kv.swa_blocks))):
            block = kv.swa_blocks[index]
            if block == NO_BLOCK:
                continue  # a gap that was to be loaded
            if index >= kv.swa_published or index in kv.private_swa:
                self.swa_pool.free_one(block)
                kv.private_swa.discard(index)
            else:
                self.tree.unlock_swa(kv.nodes[index])
            kv.swa_blocks[index] = NO_BLOCK
        kv.live_from = max(kv.live_from, min(upto, len(kv.swa_blocks)))

    def free(self, kv: RequestKV, now_ns: int) -> None:
        """The request ends or is preempted: all it published stays cached, the rest is freed. `kv` is empty after."""
        if self._active.get(kv.request_id) is not kv:
            raise InvariantError(f"request {kv.request_id} freed without being admitted")
        del self._active[kv.request_id]
        boundary = min(kv.num_computed // self.block_size, len(kv.nodes), kv.swa_published)
        for node in kv.nodes:
            node.last_access_ns = now_ns
        if self._keep_response_end and boundary > 0:
            self._keep_window(kv, boundary)
        if self.tiers is not None and len(kv.nodes) > kv.num_saved:
            self.tiers.computed(kv.nodes[-1])
        self._unlock(kv)

    def _unlock(self, kv: RequestKV) -> None:
        self._release_swa(kv, len(kv.swa_blocks))
        self.full_pool.free(kv.owned_full())
        for node in reversed(kv.nodes):
            self.tree.unlock(node)
        kv.clear()

    # ------------------------------------------------------------- the rest

    def take_freed(self) -> tuple[tuple[BlockId, ...], tuple[BlockId, ...]]:
        """Full and SWA blocks freed since the last call, when `track_freed` is on."""
        return self.full_pool.take_freed(), self.swa_pool.take_freed()

    def want(self, kv: RequestKV, num_tokens: int, now_ns: int) -> None:
        """A request begins to wait: what the store has for it is brought to the host meanwhile."""
        if self.store is not None:
            self.store.reads.want(kv, num_tokens, now_ns)

    def ready(self, kv: RequestKV, now_ns: int) -> bool:
        """Whether a waiting request need not wait for the store (any longer)."""
        return self.store is None or self.store.reads.ready(kv.request_id, now_ns)

    def forget(self, kv: RequestKV) -> None:
        """A request waits no more, as it was admitted or aborted."""
        if self.store is not None:
            self.store.reads.forget(kv.request_id)

    def take_transfers(self, now_ns: int) -> StepTransfers:
        """Copies that go with the step just scheduled. To be called when all its blocks are allocated."""
        return NO_TRANSFERS if self.tiers is None else self.tiers.take(now_ns)

    def transfers_done(self, now_ns: int) -> None:
        """The copies last taken are done."""
        if self.tiers is not None:
            self.tiers.step_done(now_ns)

    @property
    def version(self) -> int:
        """Changes whenever a request's plan may: with what is cached on device and host."""
        return self.tree.version + (self.host.tree.version if self.host is not None else 0)

    @property
    def settled(self) -> bool:
        """Whether nothing is to be copied or stored until something is admitted, published or evicted."""
        return self.tiers is None or self.tiers.settled

    @property
    def wants_transfers(self) -> bool:
        """Whether there is something to copy even if no request is left."""
        return self.tiers is not None and self.tiers.pending

    def flush(self, *, store: bool = False) -> FlushReport:
        """Drop every cached block of device and host that nothing uses, and with `store` the store's too."""
        device, host, kept = self.tree.flush(), (0, 0), len(self.tree)
        if self.tiers is not None:
            self.tiers.forget()
            host = self.tiers.host.flush()
            kept += len(self.tiers.host.tree)
        if self.store is not None and store:
            self.store.clear()
        return FlushReport(*device, *host, kept, store and self.store is not None)

    def tips(self) -> list[Node]:
        """Where the running requests' published blocks end: every leaf that is locked is among them."""
        return [kv.nodes[-1] for kv in self._active.values() if kv.nodes]

    def pool_stats(self) -> tuple[PoolStats, PoolStats]:
        """Full and SWA pool: free + used + cached = total, cached meaning evictable."""
        full, swa = self.geometry.full, self.geometry.swa
        return (
            self.full_pool.stats(self.tree.num_evictable_full, full.block_bytes(self.block_size)),
            self.swa_pool.stats(self.tree.num_evictable_swa, swa.block_bytes(self.block_size)),
        )

    @property
    def num_cached_blocks(self) -> int:
        """Nodes in the trees of device and host."""
        return len(self.tree) + (len(self.host.tree) if self.host is not None else 0)

    def audit(self) -> list[str]:
        """Check pools, tiers, trees and requests against each other from scratch; all discrepancies."""
        faults = self.tiers.audit() if self.tiers is not None else []
        faults += self.store.audit() if self.store is not None else []
        return faults + audit_requests(self.full_pool, self.swa_pool, self.tree, list(self._active.values()))
