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
)
