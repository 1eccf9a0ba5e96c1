"""The part of the engine's statistics that is about the tiers below the device."""

import msgspec

from cygnet.base.messages import EngineStats
from cygnet.engine.scheduler import AdmissionStats
from cygnet.kv.manager import KVManager
from cygnet.kv.store_tier import StoreTier


def with_lower_tiers(stats: EngineStats, kv: KVManager, seen: AdmissionStats) -> EngineStats:
    """`stats` with what host tier and store have to say; unchanged where there are none. O(1)."""
    if kv.host is None or kv.tiers is None:
        return stats
    host, tiers = kv.host, kv.tiers
    full, swa = host.pool_stats()
    stats = msgspec.structs.replace(
        stats,
        host_full=full,
        host_swa=swa,
        host_tree_blocks=len(host.tree),
        host_tree_windows=host.tree.num_checkpoints,
        host_hit_tokens_total=seen.host_hit_tokens,
        store_hit_tokens_total=seen.store_hit_tokens,
        loaded_full_blocks_total=tiers.loaded_full_blocks_total,
        loaded_swa_blocks_total=tiers.loaded_swa_blocks_total,
        saved_full_blocks_total=tiers.saved_full_blocks_total,
        saved_swa_blocks_total=tiers.saved_swa_blocks_total,
        refused_blocks_total=tiers.refused_blocks_total,
        evicted_host_full_blocks_total=host.tree.evicted_full_blocks_total,
        evicted_host_windows_total=host.tree.evicted_windows_total,
    )
    return stats if kv.store is None else _with_store(stats, kv.store)


def _with_store(stats: EngineStats, store: StoreTier) -> EngineStats:
    reads, writes = store.reads, store.writes
    return msgspec.structs.replace(
        stats,
        store_lookups_total=reads.lookups_total,
        store_timeouts_total=reads.timeouts_total,
        store_found_objects_total=reads.found_objects_total,
        store_fetched_objects_total=reads.fetched_objects_total,
        store_lost_objects_total=reads.lost_objects_total,
        store_stored_objects_total=writes.stored_objects_total,
        store_failed_objects_total=writes.failed_objects_total,
        store_dropped_writes_total=writes.dropped_total,
        store_waiting_fetches=reads.num_waiting_objects,
        store_waiting_puts=writes.num_waiting_objects,
        store_queued_writes=writes.num_queued,
    )
