"""From a config to the tiers below the device: host memory, copies, and the store with its worker."""

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

import cygnet.gcache.runtime.store  # noqa: F401  registers "gcache"
from cygnet.base.config import Config, check_host_cache
from cygnet.base.geometry import KVGeometry
from cygnet.base.units import format_bytes
from cygnet.kv.manager import KVManager, LowerTiers
from cygnet.kv.policy import TierPolicy
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.runtime.host_pool import HostPool
from cygnet.kv.runtime.store_worker import StoreWorker
from cygnet.kv.runtime.stores import open_store
from cygnet.kv.runtime.transfers import TransferEngine
from cygnet.kv.sizing import plan_host
from cygnet.kv.store import Store, namespace_of
from cygnet.model.description import ModelDescription

HOST_SHARE = 4
"""An automatic host cache takes one part in so many of the free memory at most."""
MS = 1_000_000


@dataclass
class TierRuntime:
    """What carries out the decisions about the tiers; to be closed in the end."""

    host: HostPool
    transfers: TransferEngine
    worker: StoreWorker | None
    store: Store | None

    def close(self) -> None:
        """Write what has been put to the store, and end. Bounded; may be called twice."""
        self.transfers.close()
        if self.worker is not None:
            self.worker.close()
        if self.store is not None:
            self.store.close()


def host_budget(config: Config, device: torch.device, device_bytes: int) -> int:
    """Bytes that `kv.host_cache` means; 0 for no host tier."""
    size = check_host_cache(config.kv.host_cache, config.kv.store)
    if size is not None:
        return size
    wanted = 2 * device_bytes if device.type == "cuda" else device_bytes if config.kv.store else 0
    return min(wanted, int(psutil.virtual_memory().available) // HOST_SHARE)


def tier_policy(config: Config) -> TierPolicy:
    """How KV moves between the tiers."""
    kv = config.kv
    return TierPolicy(
        write=kv.write_policy,
        write_hits=kv.write_hits,
        wait=kv.store_wait,
        timeout_ns=kv.store_timeout_ms * MS,
        timeout_ns_per_ki_token=kv.store_timeout_ms_per_1k * MS,
        keep_alive_ns=kv.store_keep_alive_s * 1000 * MS,
    )


def plan_lower(
    config: Config, geometry: KVGeometry, device: torch.device, device_bytes: int, *, fingerprint: str, dtype: str
) -> LowerTiers | None:
    """The tiers below a device pool of `device_bytes`; `None` for none. Raises `ConfigError` for a host cache that is
    too small."""
    budget = host_budget(config, device, device_bytes) if config.kv.prefix_cache else 0
    if not budget:
        return None
    sizes = plan_host(
        geometry,
        block_size=config.kv.block_size,
        budget_bytes=budget,
        swa_share=config.kv.swa_share,
        session_tokens=config.kv.session_tokens,
        windows_per_session=config.kv.windows_per_session,
    )
    namespace = namespace_of(fingerprint, geometry, config.kv.block_size, dtype) if config.kv.store else None
    return LowerTiers(sizes, tier_policy(config), namespace)


def start_tiers(
    config: Config,
    lower: LowerTiers,
    geometry: KVGeometry,
    pool: DevicePool,
    description: ModelDescription,
    dtype: torch.dtype,
    device: torch.device,
    on_result: Callable[[], None],
) -> TierRuntime:
    """Host memory, copies and store, ready. Raises `ConfigError` for a store that can't be opened."""
    host = HostPool(
        geometry,
        lower.host.full_blocks,
        lower.host.swa_blocks,
        lower.host.block_size,
        dtype,
        pinned=device.type == "cuda",
        poison=config.kv.poison,
    )
    transfers = TransferEngine(pool, host, description.layer_groups)
    store = worker = None
    if lower.namespace is not None:
        store = open_store(config.kv.store)
        worker = StoreWorker(store, host, lower.namespace, on_result=on_result)
    return TierRuntime(host, transfers, worker, store)


def describe_tiers(kv: KVManager, store: str) -> str:
    """One more line for people; empty without lower tiers."""
    if kv.host is None:
        return ""
    sizes = kv.host.sizes
    text = f"\nhost cache {format_bytes(sizes.num_bytes(kv.geometry))}: {sizes.full_blocks * sizes.block_size} tokens"
    if kv.geometry.has_swa:
        text += f", {sizes.swa_blocks // kv.tree.window_blocks} windows"
    return text + (f"; store {store}" if kv.store is not None else "")
