"""Runs whole requests through a KVManager, for tests that ask about the cache and not about single steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cygnet.base.geometry import KVGeometry
from cygnet.base.ids import NO_BLOCK, RequestId
from cygnet.kv.hashing import root_key
from cygnet.kv.manager import KVManager
from cygnet.kv.policy import KVPolicy
from cygnet.kv.request_kv import RequestKV
from cygnet.kv.reuse import ReusePlan
from cygnet.kv.sizing import PoolSizes, min_swa_blocks

ROOT = root_key("driver")
SECOND = 1_000_000_000


@dataclass
class Driver:
    """`swa_windows`: room in the SWA pool besides what one running request needs, in windows."""

    geometry: KVGeometry
    full_blocks: int
    swa_windows: float = 4.0
    block_size: int = 4
    chunk: int = 16
    policy: KVPolicy = field(default_factory=KVPolicy)

    def __post_init__(self) -> None:
        self.window_blocks = self.geometry.window_blocks(self.block_size)
        swa = min_swa_blocks(self.geometry, self.block_size, self.chunk) + int(self.swa_windows * self.window_blocks)
        sizes = PoolSizes(self.block_size, self.full_blocks, swa, self.full_blocks * self.block_size)
        self.manager = KVManager(self.geometry, sizes, self.policy)
        self.now_ns = 0
        self._count = 0

    def plan(self, tokens: Sequence[int]) -> ReusePlan:
        """What a request for `tokens` would reuse."""
        return self.manager.plan(self.manager.new(RequestId("probe"), ROOT, tokens), len(tokens))

    def start(self, tokens: Sequence[int], message_starts: Sequence[int] = ()) -> tuple[RequestKV, ReusePlan]:
        """Admit a request, one second after the last."""
        self._count += 1
        self.now_ns += SECOND
        kv = self.manager.new(RequestId(f"r{self._count}"), ROOT, tokens, message_starts)
        plan = self.manager.plan(kv, len(tokens))
        swa_room = 1 if self.geometry.has_swa else 0
        assert self.manager.admit(kv, plan, full_room=0, swa_room=swa_room, now_ns=self.now_ns)
        return kv, plan

    def compute(
        self, kv: RequestKV, tokens: Sequence[int], upto: int | None = None, each: Callable[[], None] | None = None
    ) -> None:
        """Compute up to token `upto` in chunks as long as the pools allow; `each` is called after every chunk."""
        upto = len(tokens) if upto is None else upto
        while kv.num_computed < upto:
            end = min(upto, kv.num_computed + self.chunk, self.manager.extent(kv))
            assert end > kv.num_computed, "no room for a single token"
            assert self.manager.allocate(kv, end, self.now_ns)
            self.manager.commit(kv, tokens, end, self.now_ns)
            if each:
                each()

    def end(self, kv: RequestKV) -> None:
        """Finish or preempt a request, one second later."""
        self.now_ns += SECOND
        self.manager.free(kv, self.now_ns)

    def request(self, tokens: Sequence[int]) -> ReusePlan:
        """A whole request, from plan to free."""
        kv, plan = self.start(tokens)
        self.compute(kv, tokens)
        self.end(kv)
        return plan

    def live_swa(self, kv: RequestKV) -> int:
        return sum(1 for block in kv.swa_blocks if block != NO_BLOCK)

    def drop_windows(self) -> None:
        """Evict every window that nobody reads."""
        tree = self.manager.tree
        tree.evict_windows(tree.num_evictable_swa, self.now_ns)
        assert self.manager.audit() == []
