"""The caches that `prefix_cache.py` compares, built from Cygnet's own tree and policies; and the infinite one."""

from dataclasses import dataclass, replace
from math import ceil

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import BlockKey, RequestId
from cygnet.kv.hashing import root_key
from cygnet.kv.manager import KVManager
from cygnet.kv.policy import KVPolicy
from cygnet.kv.request_kv import RequestKV
from cygnet.kv.sizing import min_swa_blocks, plan_pools
from prefix_replay import Hit
from prefix_traces import Request

BLOCK = 128
"""Tokens per block, for every system: MiMo's window, so that a window is one block; a quarter of a trace's block."""
CHUNK = 2048
MAX_LEN = 1 << 20
PRO = KVGeometry(
    full=GroupGeometry(num_layers=10, num_kv_heads=8, key_dim=192, value_dim=128, dtype_bytes=2),
    swa=GroupGeometry(num_layers=60, num_kv_heads=8, key_dim=192, value_dim=128, dtype_bytes=2, window=128),
)
"""MiMo-V2.5-Pro without its MTP layers."""
UNIFORM = KVGeometry(replace(PRO.full, num_layers=70), GroupGeometry(0, 8, 192, 128, 2))
"""The same layers in one pool that keeps every token of all of them."""
ROOT = root_key("prefix-cache-benchmark")


@dataclass(frozen=True)
class System:
    """A cache made of Cygnet's code."""

    name: str
    policy: KVPolicy
    geometry: KVGeometry = PRO


class CygnetCache:
    """KVManager, driven as the scheduler drives it, one request at a time."""

    def __init__(self, system: System, budget_bytes: int, session_tokens: int) -> None:
        self.sizes = plan_pools(
            system.geometry,
            block_size=BLOCK,
            budget_bytes=budget_bytes,
            chunk=CHUNK,
            model_max_len=MAX_LEN,
            session_tokens=session_tokens,
        )
        self.manager = KVManager(system.geometry, self.sizes, system.policy)
        self._swa_room = min_swa_blocks(system.geometry, BLOCK, CHUNK)
        self._running: dict[int, RequestKV] = {}

    def start(self, request: Request, now_ns: int) -> Hit | None:
        manager = self.manager
        kv = manager.new(RequestId(str(request.index)), ROOT, (), message_starts=request.message_starts)
        kv.keys = [BlockKey(number.to_bytes(8)) for number in request.blocks(BLOCK)]
        plan = manager.plan(kv, request.prompt_tokens)
        lacking = ceil(request.num_tokens / BLOCK) - plan.num_full_blocks
        if not manager.admit(kv, plan, full_room=lacking, swa_room=self._swa_room, now_ns=now_ns):
            return None
        self._running[request.index] = kv
        for upto in (request.prompt_tokens, request.num_tokens):
            while kv.num_computed < upto:
                end = min(upto, kv.num_computed + CHUNK)
                if not manager.allocate(kv, end, now_ns):
                    raise RuntimeError(f"no room for request {request.index}, though it was admitted")
                manager.commit(kv, (), end, now_ns)
        return Hit(plan.start, plan.num_full_blocks * BLOCK, plan.rebuilt_tokens(BLOCK))

    def end(self, request: Request, now_ns: int) -> None:
        self.manager.free(self._running.pop(request.index), now_ns)


class InfiniteCache:
    """Every block that any earlier request had, and every window."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def start(self, request: Request, now_ns: int) -> Hit | None:
        numbers = request.blocks(BLOCK)
        hit = 0
        for number in numbers[: (request.prompt_tokens - 1) // BLOCK]:
            if number not in self._known:
                break
            hit += BLOCK
        self._known.update(numbers)
        return Hit(hit, hit)

    def end(self, request: Request, now_ns: int) -> None:
        """Nothing is held."""

    @property
    def num_blocks(self) -> int:
        return len(self._known)
