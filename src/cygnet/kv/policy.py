"""Choices of the KV cache that are not sizes; see `KVSettings` for what they mean to users."""

from dataclasses import dataclass
from typing import Literal

WritePolicy = Literal["through", "selective", "back"]
WaitPolicy = Literal["best_effort", "timeout", "wait"]


@dataclass(frozen=True)
class KVPolicy:
    """How each tier's tree is kept."""

    prefix_cache: bool = True
    rebuild: bool = True
    retention: tuple[str, ...] = ("prompt_end", "response_end", "branch", "geometric", "message")
    eviction: str = "value"
    track_freed: bool = False
    """Remember freed blocks for `take_freed` (NaN poison)."""
    seed: int = 0


@dataclass(frozen=True)
class TierPolicy:
    """How KV moves between the tiers."""

    write: WritePolicy = "through"
    """When the device's blocks are copied to the host: as soon as computed; once reused; or when evicted."""
    write_hits: int = 1
    """Reuses after which `selective` copies."""
    wait: WaitPolicy = "timeout"
    """Whether a request waits for the store: not at all, for a time that grows with what is to come, or to the end."""
    timeout_ns: int = 200_000_000
    timeout_ns_per_ki_token: int = 50_000_000
    min_fetch_tokens: int = 64
    """Fewest tokens that a fetch from the store must save."""
    keep_alive_ns: int = 300_000_000_000
    """Objects hot in a faster tier are put (and so refreshed) in the store again after this time."""
    max_put_objects: int = 4096
    """Objects on their way to the store at once; as many host blocks are pinned meanwhile."""
