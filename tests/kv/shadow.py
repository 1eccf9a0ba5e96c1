"""A KVManager together with a dumb model of what it should do, checked against each other after every step.

The dumb model has no hashes, counters or locks. It keeps

    memory      (pool, block) -> per token the prefix whose KV was written there, and in how many SWA layers it is exact
    published   token prefix (whole blocks) -> the full block that the cache holds for it
    retained    token prefixes whose window a retention rule asked to keep and that nothing has evicted since

and computes by brute force what may be reused, what there is room for, and what must not have moved. A request is run
as a model would run it: an SWA layer's KV is exact at a position when its input is, and its output is exact when every
key in its window was written by this sequence, is readable and is exact.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import NO_BLOCK, BlockId, RequestId
from cygnet.kv.hashing import root_key
from cygnet.kv.manager import KVManager
from cygnet.kv.policy import KVPolicy
from cygnet.kv.request_kv import RequestKV
from cygnet.kv.reuse import ReusePlan
from cygnet.kv.sizing import PoolSizes, min_swa_blocks

Tokens = tuple[int, ...]
ROOT = root_key("shadow")
ALL_RULES = ("prompt_end", "response_end", "branch", "geometric", "message")


def make_geometry(window: int, swa_layers: int) -> KVGeometry:
    """A model with one full layer and `swa_layers` SWA layers (none: `window` is ignored)."""
    swa = GroupGeometry(swa_layers, 1, 4, 4, 2, window if swa_layers else None)
    return KVGeometry(full=GroupGeometry(1, 1, 4, 4, 2), swa=swa)


@dataclass
class Written:
    """KV of one token in one block."""

    prefix: Tokens
    exact_layers: int
    """Leading SWA layers whose *output* here is a cold run's; so the KV of one layer more is."""


@dataclass
class Running:
    """What the dumb model knows of a request."""

    request_id: RequestId
    kv: RequestKV
    tokens: list[int]
    active: bool = False
    plan: ReusePlan | None = None
    wanted: set[int] = field(default_factory=set)
    exact_layers: dict[int, int] = field(default_factory=dict)
    """Per position what it wrote, or found in the window where it resumed; kept when the block is let go."""
    tables: tuple[Tokens, Tokens] = ((), ())
    """Block tables at the end of the last step."""


class Shadow:
    """Runs requests through a `KVManager` and checks everything it says and does."""

    def __init__(
        self,
        *,
        block_size: int = 2,
        window: int = 3,
        swa_layers: int = 2,
        full_blocks: int = 24,
        swa_spare: int = 4,
        max_chunk: int = 6,
        policy: KVPolicy | None = None,
    ) -> None:
        self.size = block_size
        self.geometry = make_geometry(window, swa_layers)
        self.window, self.layers = self.geometry.window, swa_layers
        self.window_blocks = ceil(self.window / block_size)
        swa_blocks = min_swa_blocks(self.geometry, block_size, max_chunk) + (swa_spare if swa_layers else 0)
        self.policy = policy or KVPolicy(track_freed=True)
        sizes = PoolSizes(block_size, full_blocks, swa_blocks, full_blocks * block_size)
        self.manager = KVManager(self.geometry, sizes, self.policy)
        self.max_chunk = max_chunk
        self.memory: dict[tuple[str, int], dict[int, Written]] = {}
        self.published: dict[Tokens, BlockId] = {}
        self.retained: set[Tokens] = set()
        self.requests: dict[RequestId, Running] = {}
        self.now_ns = 0
        self.seen: Counter[str] = Counter()
        """What happened so far, so that a test can tell that the interesting things did."""
        self._count = 0

    # ------------------------------------------------------------- brute force

    def prefixes(self, tokens: Sequence[int], upto: int) -> list[Tokens]:
        """The first `upto` whole-block prefixes of `tokens`."""
        return [tuple(tokens[: (i + 1) * self.size]) for i in range(upto)]

    def active(self) -> list[Running]:
        return [r for r in self.requests.values() if r.active]

    def swa_in_tree(self, prefix: Tokens) -> BlockId:
        """The SWA block that the cache holds for a whole-block prefix, after checking that its content is right."""
        keys = self.manager.new(RequestId("probe"), ROOT, prefix).keys
        node = self.manager.tree.get(keys[-1])
        assert node is not None, f"{prefix} is published and not in the tree"
        if node.swa_block != NO_BLOCK:
            self.check_content("swa", node.swa_block, prefix, len(prefix) - self.size, len(prefix), "the tree's")
        return node.swa_block

    def full_hit(self, tokens: Sequence[int]) -> int:
        """Leading whole blocks of `tokens[:-1]` that are published."""
        hit = 0
        for prefix in self.prefixes(tokens, (len(tokens) - 1) // self.size):
            if prefix not in self.published:
                break
            hit += 1
        return hit

    def window_safe_hit(self, tokens: Sequence[int], full: int) -> int:
        """The largest boundary whose whole window is in the tree."""
        prefixes = self.prefixes(tokens, full)
        for boundary in range(full, 0, -1):
            window = prefixes[max(0, boundary - self.window_blocks) : boundary] if self.window else []
            if all(self.swa_in_tree(prefix) != NO_BLOCK for prefix in window):
                return boundary
        return 0

    def used_full(self, also: Sequence[Tokens] = ()) -> set[int]:
        """Full blocks that running requests hold, or keep the tree from evicting by having computed their tokens."""
        used = {b for r in self.active() for b in r.kv.full_blocks}
        if self.policy.prefix_cache:
            for r in self.active():
                reached = max(r.kv.num_computed // self.size, r.plan.num_full_blocks if r.plan else 0)
                used |= {self.published[p] for p in self.prefixes(r.tokens, reached)}
        return used | {self.published[p] for p in also}

    def used_swa(self) -> set[int]:
        return {b for r in self.active() for b in r.kv.swa_blocks if b != NO_BLOCK}

    # ------------------------------------------------------------------- steps

    def add(self, tokens: Sequence[int]) -> Running:
        self._count += 1
        request_id = RequestId(f"r{self._count}")
        request = Running(request_id, self.manager.new(request_id, ROOT, tokens), list(tokens))
        self.requests[request_id] = request
        return request

    def check_plan(self, request: Running) -> ReusePlan:
        """Ask for a plan and compare it with the brute-force answer."""
        tokens, size = request.tokens, self.size
        plan = self.manager.plan(request.kv, len(tokens))
        if not self.policy.prefix_cache:
            assert (plan.num_full_blocks, plan.start) == (0, 0)
            return plan
        full = self.full_hit(tokens)
        safe = self.window_safe_hit(tokens, full)
        assert (plan.num_full_blocks, plan.num_safe_blocks) == (full, safe)
        assert full * size < len(tokens)
        assert plan.start < len(tokens)
        assert plan.start % size == 0
        need = self.layers * self.window
        if self.policy.rebuild and full * size - need - 2 * size >= safe * size:
            assert plan.kind == "rebuild", "a rebuild is clearly cheaper"
        if plan.kind == "rebuild":
            assert self.policy.rebuild
            assert full * size - need - 2 * size < plan.start <= full * size - need
            assert plan.start > safe * size
            window_start = (full - self.window_blocks) * size
            assert plan.start + (self.layers - 1) * self.window <= window_start, "the window rebuilt is not whole"
        else:
            assert plan.start == safe * size
        return plan

    def admit(self, request: Running, *, full_room: int | None = None, swa_room: int = 1) -> bool:
        """Plan and admit; the answer must be what counting blocks gives."""
        plan = self.check_plan(request)
        if full_room is None:
            full_room = ceil(len(request.tokens) / self.size) - plan.num_full_blocks
        prefixes = self.prefixes(request.tokens, plan.num_full_blocks)
        swa_room = swa_room if self.layers else 0
        start = plan.start // self.size
        window = prefixes[max(0, start - self.window_blocks) : start] if plan.kind == "resume" and self.layers else []
        full_used = self.used_full(prefixes)
        swa_used = self.used_swa() | {self.swa_in_tree(prefix) for prefix in window}
        fits = (
            len(full_used) + full_room <= self.manager.full_pool.num_blocks
            and len(swa_used) + swa_room <= self.manager.swa_pool.num_blocks
        )
        self.now_ns += 1_000_000_000
        admitted = self.manager.admit(request.kv, plan, full_room=full_room, swa_room=swa_room, now_ns=self.now_ns)
        assert admitted == fits, f"admit says {admitted}; by count: {fits}"
        self.seen["admit" if admitted else "no room"] += 1
        if admitted:
            self.seen[plan.kind] += 1
            self.seen["replay below full hit"] += plan.start < plan.num_full_blocks * self.size
            request.active, request.plan, request.tables = True, plan, ((), ())
            request.wanted = self.rule_boundaries(request, plan)
            first = plan.start - self.window_blocks * self.size
            request.exact_layers = dict.fromkeys(range(first, plan.start), self.layers) if window else {}
            self.retain(request)
        self.check()
        return admitted

    def rule_boundaries(self, request: Running, plan: ReusePlan) -> set[int]:
        rules, wanted = self.policy.retention, set()
        last = (len(request.tokens) - 1) // self.size
        if "prompt_end" in rules:
            wanted.add(last)
        if "branch" in rules and plan.num_full_blocks > 0:
            hit = tuple(request.tokens[: plan.num_full_blocks * self.size])
            if any(len(p) > len(hit) and p[: len(hit)] == hit for p in self.published):
                wanted.add(plan.num_full_blocks)
        if "geometric" in rules and self.window_blocks:
            boundary = self.window_blocks
            while boundary < last:
                wanted.add(boundary)
                boundary *= 2
        return {b for b in wanted if b > 0 and b * self.size >= plan.start}

    def run(self, request: Running, count: int) -> int:
        """Compute up to `count` more tokens, as many as there is room for; the number computed."""
        kv = request.kv
        used_full, used_swa = len(self.used_full()), len(self.used_swa())
        blocks = len(kv.full_blocks) + self.manager.full_pool.num_blocks - used_full
        if self.layers:
            blocks = min(blocks, len(kv.swa_blocks) + self.manager.swa_pool.num_blocks - used_swa)
        assert self.manager.extent(kv) == blocks * self.size, "extent differs from a count of blocks"
        start = kv.num_computed
        end = min(len(request.tokens), start + min(count, self.max_chunk), blocks * self.size)
        if end <= start:
            self.seen["stalled"] += 1
            return 0
        self.allocate(request, end)
        for position in range(start, end):
            self.write(request, position)
        self.retain(request, end)
        self.now_ns += 1_000_000_000
        self.manager.commit(kv, request.tokens, end, self.now_ns)
        if self.policy.prefix_cache:
            for prefix, block in zip(self.prefixes(request.tokens, end // self.size), kv.full_blocks, strict=False):
                if self.published.setdefault(prefix, block) != block:
                    self.seen["twin"] += 1
        live = sum(1 for block in kv.swa_blocks if block != NO_BLOCK)
        assert live <= self.window_blocks + 1, "holds SWA KV out of its window after a chunk"
        self.check()
        return end - start

    def allocate(self, request: Running, end: int) -> None:
        """Allocate blocks for `end` tokens, which must succeed and evict no more than is short."""
        kv, manager = request.kv, self.manager
        short_full = max(0, ceil(end / self.size) - len(kv.full_blocks)) - manager.full_pool.num_free
        short_swa = max(0, ceil(end / self.size) - len(kv.swa_blocks)) - manager.swa_pool.num_free
        cached = len(self.published)
        assert manager.allocate(kv, end, self.now_ns), "extent promised room that is not there"
        self.collect_freed(may_evict=(short_full > 0, self.layers > 0 and (short_full > 0 or short_swa > 0)))
        assert cached - len(self.published) == max(0, short_full), "evicted other than what was short"
        self.seen["evict full"] += short_full > 0
        self.seen["evict swa"] += self.layers > 0 and short_swa > 0

    def overask(self, request: Running) -> None:
        """More than there is room for: refused, and nothing changes."""
        before = (self.manager.pool_stats(), list(request.kv.full_blocks), list(request.kv.swa_blocks))
        assert not self.manager.allocate(request.kv, self.manager.extent(request.kv) + 1, self.now_ns)
        assert (self.manager.pool_stats(), list(request.kv.full_blocks), list(request.kv.swa_blocks)) == before
        self.check()

    def want(self, request: Running, boundary: int) -> None:
        """Another request waits to branch off at `boundary`."""
        self.manager.want_checkpoint(request.kv, boundary)
        if boundary > 0 and boundary * self.size > request.kv.num_computed - self.size:
            request.wanted.add(boundary)
            self.retain(request)
        self.check()

    def free(self, request: Running, *, requeue: bool = False) -> None:
        """End a request, or preempt it."""
        if request.active:
            kv = request.kv
            request.wanted = {kv.num_computed // self.size} if "response_end" in self.policy.retention else set()
            held = (set(kv.full_blocks), {b for b in kv.swa_blocks if b != NO_BLOCK})
            mid_rebuild = request.plan is not None and kv.num_computed < request.plan.num_full_blocks * self.size
            self.seen["stopped below full hit"] += mid_rebuild
            self.retain(request)
            self.now_ns += 1_000_000_000
            self.manager.free(kv, self.now_ns)
            request.active, request.plan = False, None
            self.collect_freed()
            assert not kv.full_blocks
            assert not kv.swa_blocks
            assert not kv.nodes
            kept = set(self.published.values())
            lost = [b for b in held[0] - kept - self.used_full() if not self.manager.full_pool.is_free(BlockId(b))]
            assert not lost, f"full blocks {lost} leaked"
        if not requeue:
            del self.requests[request.request_id]
        self.check()

    def flush(self) -> None:
        freed = self.manager.flush().device_blocks
        before = len(self.published)
        self.retained.clear()
        self.collect_freed(may_evict=(True, True))
        assert before - len(self.published) == freed
        assert set(self.published.values()) <= self.used_full(), "flush left blocks that nobody holds"
        self.check()

    # ------------------------------------------------------------- the "model"

    def write(self, request: Running, position: int) -> None:
        """Run one token through the model: read what it may see, write its KV where it does not read the cached."""
        kv, tokens = request.kv, request.tokens
        prefix = tuple(tokens[: position + 1])
        written = request.plan.num_full_blocks * self.size if request.plan else 0
        exact = self.readable_layers(request, position)
        if self.layers:
            block = kv.swa_blocks[position // self.size]
            assert block != NO_BLOCK
            assert not self.manager.swa_pool.is_free(block)
            self.memory.setdefault(("swa", block), {})[position] = Written(prefix, exact)
            request.exact_layers[position] = exact
        if position >= written:
            block = kv.full_blocks[position // self.size]
            assert not self.manager.full_pool.is_free(block)
            assert block not in self.published.values(), "wrote into a published full block"
            assert exact == self.layers, f"hidden state at {position} is not exact: {exact} of {self.layers} layers"
            self.memory.setdefault(("full", block), {})[position] = Written(prefix, exact)

    def readable_layers(self, request: Running, position: int) -> int:
        """Leading SWA layers whose output at `position` is a cold run's: all its keys there, readable and exact."""
        exact = self.layers
        for key in range(max(0, position - self.window), position):
            if key < request.kv.key_floor:
                exact = 0
                continue
            block = request.kv.swa_blocks[key // self.size]
            stored = self.memory.get(("swa", block), {}).get(key)
            assert stored is not None, f"may read SWA KV at {key}, which is not there"
            assert stored.prefix == tuple(request.tokens[: key + 1]), f"reads another sequence's SWA KV at {key}"
            exact = min(exact, stored.exact_layers + 1)
        return exact

    def retain(self, request: Running, computed: int | None = None) -> None:
        """Note the wanted boundaries that are reached and whose window the request holds, exact."""
        if not self.policy.prefix_cache or not self.layers:
            return
        reached = (request.kv.num_computed if computed is None else computed) // self.size
        for boundary in sorted(b for b in request.wanted if 0 < b <= reached):
            request.wanted.discard(boundary)
            window = range(max(0, boundary - self.window_blocks) * self.size, boundary * self.size)
            if all(request.exact_layers.get(position, -1) >= self.layers - 1 for position in window):
                self.retained.add(tuple(request.tokens[: boundary * self.size]))
                self.seen["retained"] += 1

    # ------------------------------------------------------------------ checks

    def collect_freed(self, *, may_evict: tuple[bool, bool] = (False, False)) -> None:
        """Forget the content of freed blocks. What is published or retained may go in an eviction only."""
        full, swa = self.manager.take_freed()
        for name, blocks in (("full", full), ("swa", swa)):
            for block in blocks:
                self.memory.pop((name, block), None)
        gone = [prefix for prefix, block in self.published.items() if block in set(full)]
        assert may_evict[0] or not gone, f"cached blocks {gone} lost without a shortage"
        for prefix in gone:
            del self.published[prefix]
        if may_evict[1]:
            lost = {prefix for prefix in self.retained if prefix not in self.published or not self.is_safe(prefix)}
            self.seen["window lost"] += len(lost)
            self.retained -= lost
        for prefix in self.published:
            assert len(prefix) == self.size or prefix[: -self.size] in self.published, "a cached block lost its parent"

    def is_safe(self, prefix: Tokens) -> bool:
        blocks = len(prefix) // self.size
        return self.window_safe_hit((*prefix, 0), blocks) == blocks

    def check_content(self, pool: str, block: BlockId, tokens: Sequence[int], first: int, last: int, who: str) -> None:
        """Positions `first .. last - 1` of a sequence must be in `block`, exact."""
        for position in range(first, last):
            stored = self.memory.get((pool, block), {}).get(position)
            assert stored is not None, f"{who} {pool} block {block} lacks position {position}"
            assert stored.prefix == tuple(tokens[: position + 1]), f"{who} {pool} block {block} holds another prefix"
            needed = self.layers - 1 if pool == "swa" else self.layers
            assert stored.exact_layers >= needed, f"{who} {pool} block {block} is inexact at {position}"

    def check(self) -> None:
        """Everything that must hold between steps."""
        assert self.manager.audit() == []
        self.collect_freed()
        self.check_owners()
        for request in self.active():
            self.check_tables(request)
        for prefix, block in self.published.items():
            self.check_content("full", block, prefix, len(prefix) - self.size, len(prefix), "the tree's")
            self.swa_in_tree(prefix)
        assert len(self.manager.tree) == len(self.published), "the tree holds other prefixes than were computed"
        for prefix in self.retained:
            assert self.is_safe(prefix), f"the window retained at {len(prefix)} is gone though nothing was evicted"
        for tokens in (r.tokens for r in self.requests.values() if not r.active):
            self.check_plan(Running(RequestId("probe"), self.manager.new(RequestId("probe"), ROOT, tokens), tokens))

    def check_owners(self) -> None:
        """No block has two owners; free + used + cached = total, each counted on its own."""
        manager = self.manager
        full_tree = list(self.published.values())
        swa_tree = [b for p in self.published if (b := self.swa_in_tree(p)) != NO_BLOCK]
        stats = manager.pool_stats()
        for pool, stat, tree, used, tables in (
            (manager.full_pool, stats[0], full_tree, self.used_full(), [r.kv.full_blocks for r in self.active()]),
            (manager.swa_pool, stats[1], swa_tree, self.used_swa(), [r.kv.swa_blocks for r in self.active()]),
        ):
            assert len(set(tree)) == len(tree), f"{pool.name}: two cached prefixes share a block"
            private = [b for table in tables for b in table if b != NO_BLOCK and b not in set(tree)]
            assert len(set(private)) == len(private), f"{pool.name}: two requests own the same block"
            free = {b for b in range(pool.num_blocks) if pool.is_free(BlockId(b))}
            assert not free & (used | set(tree)), f"{pool.name}: blocks free and in use"
            cached = set(tree) - used
            assert (stat.free, stat.used, stat.cached) == (len(free), len(used), len(cached))
            assert stat.free + stat.used + stat.cached == pool.num_blocks

    def check_tables(self, request: Running) -> None:
        """Tables of a running request only grow at the end (SWA: and shrink at the front), and hold its own KV."""
        kv, tokens = request.kv, request.tokens
        old_full, old_swa = request.tables
        assert tuple(kv.full_blocks[: len(old_full)]) == old_full or not old_full, "a running request's table changed"
        for old, new in zip(old_swa, kv.swa_blocks, strict=False):
            assert new in (old, NO_BLOCK), "a running request's SWA table changed"
        request.tables = (tuple(kv.full_blocks), tuple(kv.swa_blocks))
        readable = max(kv.num_computed, request.plan.num_full_blocks * self.size if request.plan else 0)
        for position in range(readable):
            block = kv.full_blocks[position // self.size]
            self.check_content("full", block, tokens, position, position + 1, request.request_id)
        if not self.layers:
            assert not kv.swa_blocks
            return
        for position in range(max(0, kv.num_computed - self.window, kv.key_floor), kv.num_computed):
            block = kv.swa_blocks[position // self.size]
            assert block != NO_BLOCK, f"{request.request_id}: SWA KV at {position} is in its window and gone"
            if position >= kv.exact_from:
                self.check_content("swa", block, tokens, position, position + 1, request.request_id)
