"""Every metric a GCache server publishes, and which of its statistics each is made of. Pure."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CacheMetric:
    """One metric. The statistic is a number or, with a `label`, a table of numbers by the label's value."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    statistic: str
    label: str = ""


METRICS = (
    CacheMetric("cygnet:gcache_objects", "gauge", "Objects in memory.", "objects"),
    CacheMetric("cygnet:gcache_memory_bytes", "gauge", "Bytes of the arena in use.", "memory_bytes"),
    CacheMetric("cygnet:gcache_memory_capacity_bytes", "gauge", "Bytes of the arena.", "memory_capacity_bytes"),
    CacheMetric("cygnet:gcache_leased_bytes", "gauge", "Bytes kept in place for views.", "leased_bytes"),
    CacheMetric("cygnet:gcache_connections", "gauge", "Open connections.", "connections"),
    CacheMetric("cygnet:gcache_uploads", "gauge", "Values arriving in slices.", "uploads"),
    CacheMetric("cygnet:gcache_refused_connections", "counter", "Connections over the limit.", "refused_connections"),
    CacheMetric("cygnet:gcache_gets", "counter", "Objects (or slices) asked for.", "gets", "outcome"),
    CacheMetric("cygnet:gcache_puts", "counter", "Objects (or slices) put.", "puts", "outcome"),
    CacheMetric("cygnet:gcache_bytes_got", "counter", "Bytes of values sent.", "bytes_got"),
    CacheMetric("cygnet:gcache_bytes_put", "counter", "Bytes of values stored.", "bytes_put"),
    CacheMetric("cygnet:gcache_disk_hits", "counter", "Objects brought up from the disk.", "disk_hits"),
    CacheMetric("cygnet:gcache_evicted_objects", "counter", "Objects that left memory for room.", "evicted_objects"),
    CacheMetric(
        "cygnet:gcache_dropped_objects",
        "counter",
        "Of these, lost because the disk was too slow.",
        "dropped_objects",
    ),
    CacheMetric(
        "cygnet:gcache_over_quota_objects",
        "counter",
        "Of the evicted, those that left for their own namespace's quota.",
        "over_quota_objects",
    ),
    CacheMetric(
        "cygnet:gcache_namespace_bytes",
        "gauge",
        "Bytes in memory of namespaces that have limits; of at most 100, those with most.",
        "namespace_bytes",
        "namespace",
    ),
    CacheMetric("cygnet:gcache_namespace_objects", "gauge", "Their objects.", "namespace_objects", "namespace"),
    CacheMetric("cygnet:gcache_written_down_objects", "counter", "Objects written to disk.", "written_down_objects"),
    CacheMetric("cygnet:gcache_torn_objects", "counter", "Objects found damaged, and given up.", "torn_objects"),
    CacheMetric("cygnet:gcache_disk_objects", "gauge", "Objects on disk.", "disk_objects"),
    CacheMetric("cygnet:gcache_disk_bytes", "gauge", "Bytes of the disk tier in use.", "disk_bytes"),
    CacheMetric("cygnet:gcache_disk_capacity_bytes", "gauge", "Bytes of the disk tier.", "disk_capacity_bytes"),
    CacheMetric("cygnet:gcache_disk_evicted_objects", "counter", "Objects that left the disk.", "disk_evicted_objects"),
    CacheMetric("cygnet:gcache_epoch", "gauge", "Epoch of the cluster's view; 0: in no cluster.", "epoch"),
    CacheMetric("cygnet:gcache_cluster_servers", "gauge", "Servers of the cluster.", "cluster_servers", "state"),
    CacheMetric("cygnet:gcache_moving", "gauge", "1 while objects move from server to server.", "moving"),
    CacheMetric("cygnet:gcache_moved_objects", "counter", "Objects moved to other servers.", "moved_objects"),
    CacheMetric("cygnet:gcache_moved_bytes", "counter", "Bytes of their values.", "moved_bytes"),
    CacheMetric("cygnet:gcache_move_failures", "counter", "Moves to be tried again.", "move_failures"),
    CacheMetric(
        "cygnet:gcache_move_given_up_objects",
        "counter",
        "Objects lost because their new server had no room.",
        "move_given_up_objects",
    ),
    CacheMetric(
        "cygnet:gcache_move_left_objects", "gauge", "Objects in memory still to be moved.", "move_left_objects"
    ),
    CacheMetric(
        "cygnet:gcache_move_disk_records", "gauge", "Records on disk to look at for a move.", "move_disk_records"
    ),
    CacheMetric(
        "cygnet:gcache_move_disk_records_seen", "gauge", "Of these, looked at so far.", "move_disk_records_seen"
    ),
    CacheMetric("cygnet:gcache_registry_failures", "counter", "Failed calls to etcd.", "registry_failures"),
    CacheMetric("cygnet:gcache_fenced", "gauge", "1 while a fenced server refuses what it is asked.", "fenced"),
)
