"""What a server accepts, and a client sends. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_NAMESPACE_BYTES = 255
MAX_KEY_BYTES = 4096
MAX_VALUE_BYTES = 64 << 30
MAX_BATCH = 4096
"""Keys in one frame."""
MAX_META_BYTES = 16 << 20
FLAGS_PER_FRAME = 2048
"""Keys asked about with one request: half of what a frame may have, so that the longest keys fit too."""
MAX_FRAME_BYTES = 1 << 30
"""Values in one frame; larger ones are sent in slices."""
MAX_EXPIRY_NS = (1 << 63) - 1
"""Latest end of an object that has one, in the year 2262: records and clients of any kind can tell it."""


def expiry_of(now_ns: int, ttl_ms: int) -> int:
    """Wall clock at which an object with that time to live ends; 0 for never. A peer may have sent any number."""
    return min(now_ns + ttl_ms * 1_000_000, MAX_EXPIRY_NS) if ttl_ms else 0


@dataclass(frozen=True)
class NamespaceLimits:
    """Of one namespace; 0 is no limit."""

    max_bytes: int = 0
    """Of records in memory. A put that would be over it takes the place of the namespace's own oldest objects."""
    max_value_bytes: int = 0
    """Of one value."""
    ttl_ms: int = 0
    """Objects live no longer than this, and exactly so long if they were put without a time."""

    def ttl_of(self, ttl_ms: int) -> int:
        """Time to live of an object that is put with `ttl_ms`, 0 for none."""
        return min(ttl_ms or self.ttl_ms, self.ttl_ms or ttl_ms)


@dataclass(frozen=True)
class Limits:
    """What one server accepts; never more than the protocol's own limits above."""

    max_key_bytes: int = 1024
    max_value_bytes: int = 1 << 30
    max_resp_bytes: int = 64 << 20
    """Of one command of a Redis client, which is held in the server's own memory until it is complete."""
    max_connections: int = 256
    frame_timeout_s: float = 30.0
    """A frame that has begun must have arrived, and an answer must have left, within this time."""
    upload_timeout_s: float = 60.0
    """A value sent in slices must be complete this long after its first slice."""
    max_uploads: int = 256
    lease_s: float = 5.0
    """How long a view of the arena is safe from reuse."""
    max_leased_fraction: float = 0.5
    """Part of the arena that views may keep in place."""
    namespaces: Mapping[bytes, NamespaceLimits] = field(default_factory=dict)
    """Limits of namespaces by name, or by `beginning*`; others have none of their own."""
