"""How much of a cached prefix to reuse, and from which token to compute.

    tokens   0 ............. S ................... F .......... N
             full KV cached ───────────────────────┤
             SWA window live before S only

    resume   compute S .. N                        cost N - S
    rebuild  compute F - R .. N, R = n_swa * window  cost N - F + R, exact (see below)

Both read the cached full KV up to F and never overwrite it. In a rebuild the replayed tokens see, in SWA layers, only
what the replay itself produced; what that leaves out matters one window further on per SWA layer, so after R tokens
nothing is left of it. `start` is aligned so that the last window's *blocks* are exact from their first token on, at
most one block more than R needs: else that window could not be published, and the next request would rebuild it again.
"""

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from cygnet.base.geometry import KVGeometry

ReuseKind = Literal["cold", "resume", "rebuild"]


class ReusePlan(Struct, frozen=True, gc=False):
    """What a request will reuse. All token counts are from the start of the sequence."""

    kind: ReuseKind
    num_tokens: int
    """Tokens the sequence has now; at least the last one is computed."""
    num_full_blocks: int
    """Full hit: leading blocks whose full KV is cached, and will be read."""
    num_safe_blocks: int
    """Window-safe hit in blocks."""
    start: int
    """First token to compute: the effective hit."""
    key_floor: int
    """First position whose SWA KV may be read."""
    exact_from: int
    """First position whose SWA KV, once computed, equals a cold run's."""
    num_unused_blocks: int = 0
    """Blocks of full KV beyond `num_full_blocks` that the host tier has and that are not worth loading."""
    num_full_loads: int = 0
    """Last blocks of the full hit that only the host tier has."""
    num_swa_loads: int = 0
    """Blocks of the window before `start` that only the host tier has."""

    @property
    def num_device_blocks(self) -> int:
        """Leading blocks whose full KV is on the device."""
        return self.num_full_blocks - self.num_full_loads

    @property
    def num_uncached_tokens(self) -> int:
        return self.num_tokens - self.start

    def rebuilt_tokens(self, block_size: int) -> int:
        """Tokens replayed only to get a window back."""
        return self.num_full_blocks * block_size - self.start if self.kind == "rebuild" else 0


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Where the tokens came from that a request did not compute."""

    device: int = 0
    host: int = 0
    store: int = 0

    @property
    def total(self) -> int:
        """The effective hit."""
        return self.device + self.host + self.store


def plan_reuse(
    geometry: KVGeometry,
    *,
    block_size: int,
    num_tokens: int,
    num_full_blocks: int,
    num_safe_blocks: int,
    allow_rebuild: bool = True,
) -> ReusePlan:
    """The cheaper of resume and rebuild; resume on a tie. `num_full_blocks * block_size < num_tokens` is required."""
    full, safe = num_full_blocks * block_size, num_safe_blocks * block_size
    if allow_rebuild and safe < full:
        lead = (geometry.swa.num_layers - 1) * geometry.window  # replayed, and not exact yet in the last SWA layer
        replay_start = (full - geometry.window_blocks(block_size) * block_size - lead) // block_size * block_size
        if replay_start > safe:
            exact_from = replay_start + lead
            return ReusePlan(
                "rebuild", num_tokens, num_full_blocks, num_safe_blocks, replay_start, replay_start, exact_from
            )
    kind: ReuseKind = "resume" if safe else "cold"
    floor = max(0, safe - geometry.window)
    return ReusePlan(kind, num_tokens, num_full_blocks, num_safe_blocks, safe, floor, floor)
