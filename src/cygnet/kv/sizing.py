"""From a byte budget to the two pools, in one pass."""

from dataclasses import dataclass
from math import ceil

from cygnet.base.errors import ConfigError
from cygnet.base.geometry import KVGeometry
from cygnet.base.units import format_bytes
from cygnet.kv.transfers import object_bytes


@dataclass(frozen=True)
class PoolSizes:
    """Blocks per pool, and the longest request they can serve."""

    block_size: int
    full_blocks: int
    swa_blocks: int
    max_model_len: int

    def num_bytes(self, geometry: KVGeometry) -> int:
        """Bytes of both pools."""
        return self.full_blocks * geometry.full.block_bytes(
            self.block_size
        ) + self.swa_blocks * geometry.swa.block_bytes(self.block_size)


def min_swa_blocks(geometry: KVGeometry, block_size: int, chunk: int) -> int:
    """SWA blocks that one request needs to run a chunk: window + chunk, and one block as neither is block-aligned."""
    return geometry.window_blocks(block_size) + ceil(chunk / block_size) + 1 if geometry.has_swa else 0


@dataclass(frozen=True)
class MinimumPools:
    """The least that is worth starting with: blocks of each pool, and what they weigh."""

    full_blocks: int
    swa_blocks: int
    num_bytes: int


def min_pools(
    geometry: KVGeometry, *, block_size: int, chunk: int, model_max_len: int, max_model_len: int = 0
) -> MinimumPools:
    """What `plan_pools` refuses to go below: a request of `max_model_len` tokens or, where that is 0, one chunk."""
    length = max_model_len or model_max_len
    full = ceil(length / block_size) if max_model_len else ceil(chunk / block_size) + 1
    swa = min_swa_blocks(geometry, block_size, min(chunk, length))
    weight = full * geometry.full.block_bytes(block_size) + swa * geometry.swa.block_bytes(block_size)
    return MinimumPools(full, swa, weight)


def plan_pools(
    geometry: KVGeometry,
    *,
    block_size: int,
    budget_bytes: int,
    chunk: int,
    model_max_len: int,
    max_model_len: int = 0,
    swa_share: float = 0.0,
    session_tokens: int = 8192,
    windows_per_session: int = 2,
) -> PoolSizes:
    """Split `budget_bytes` between the full and the SWA pool.

    The SWA pool gets one request's window + chunk + one block, and of what then remains `swa_share` or, when that is
    0, the share that windows have in a cached session of `session_tokens` tokens with `windows_per_session` of them;
    never more than the full pool's tokens could use. `max_model_len` 0 means as long as the model and the
    full pool allow; a given one must fit. Raises `ConfigError` naming the smallest budget that works.
    """
    if max_model_len > model_max_len:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than this model's {model_max_len} tokens; lower or omit it"
        )
    full_block, swa_block = geometry.full.block_bytes(block_size), geometry.swa.block_bytes(block_size)
    length = max_model_len or model_max_len
    least = min_pools(
        geometry, block_size=block_size, chunk=chunk, model_max_len=model_max_len, max_model_len=max_model_len
    )
    needed_full, needed_swa = least.full_blocks, least.swa_blocks
    if budget_bytes < least.num_bytes:
        raise ConfigError(
            f"KV budget {format_bytes(budget_bytes)} is below the minimum of {format_bytes(least.num_bytes)} "
            f"({least.num_bytes} bytes): {needed_full * block_size} tokens of full KV"
            + (f" + window {geometry.window} + chunk {min(chunk, length)} + one block of SWA KV" if needed_swa else "")
            + "; raise --kv-cache-memory, or lower --max-num-batched-tokens"
            + (" or --max-model-len" if max_model_len else "")
        )
    if not geometry.has_swa:
        full_blocks, swa_blocks = budget_bytes // full_block, 0
    else:
        share = swa_share or _session_share(geometry, session_tokens, windows_per_session)
        # On top of what a step works in: else a small budget would have no room for a window that stays.
        swa_blocks = needed_swa + int((budget_bytes - needed_swa * swa_block) * share) // swa_block
        swa_blocks = min(swa_blocks, (budget_bytes - needed_full * full_block) // swa_block)
        # Beyond one SWA block per full block nothing could be mapped to it.
        even = budget_bytes // (full_block + swa_block)
        swa_blocks = max(needed_swa, min(swa_blocks, even))
        full_blocks = (budget_bytes - swa_blocks * swa_block) // full_block
    return PoolSizes(block_size, full_blocks, swa_blocks, min(length, full_blocks * block_size))


def _session_share(geometry: KVGeometry, session_tokens: int, windows: int) -> float:
    full = session_tokens * geometry.full.token_bytes
    return 1.0 - full / geometry.cached_bytes(session_tokens, windows)


@dataclass(frozen=True)
class HostSizes:
    """Blocks per pool of the host tier."""

    block_size: int
    full_blocks: int
    swa_blocks: int

    def num_bytes(self, geometry: KVGeometry) -> int:
        """Bytes of both pools, in objects as they are laid out there."""
        return self.full_blocks * object_bytes(geometry.full, self.block_size) + self.swa_blocks * object_bytes(
            geometry.swa, self.block_size
        )


def plan_host(
    geometry: KVGeometry,
    *,
    block_size: int,
    budget_bytes: int,
    swa_share: float = 0.0,
    session_tokens: int = 8192,
    windows_per_session: int = 2,
) -> HostSizes:
    """Split the host tier's `budget_bytes` between its pools, by the shares that `plan_pools` uses.

    Raises `ConfigError` below the smallest that can hold anything: one window, and the full KV of as many tokens.
    """
    full_block, swa_block = object_bytes(geometry.full, block_size), object_bytes(geometry.swa, block_size)
    window = geometry.window_blocks(block_size)
    least = (window + 1) * full_block + (window + 1) * swa_block
    if budget_bytes < least:
        raise ConfigError(
            f"host cache {format_bytes(budget_bytes)} is below the minimum of {format_bytes(least)} ({least} bytes): "
            "one window of both groups; raise --host-cache, or turn it off"
        )
    if not swa_block:
        return HostSizes(block_size, budget_bytes // full_block, 0)
    share = swa_share or _session_share(geometry, session_tokens, windows_per_session)
    even = budget_bytes // (full_block + swa_block)
    swa_blocks = max(window + 1, min(int(budget_bytes * share) // swa_block, even))
    return HostSizes(block_size, (budget_bytes - swa_blocks * swa_block) // full_block, swa_blocks)
