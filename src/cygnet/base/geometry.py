"""The shape of a model's KV cache, and all byte arithmetic on it.

A hybrid model has two *groups* of layers. All layers of a group share one block table:

    full   every query sees all earlier keys          KV grows with the sequence, O(N)
    swa    a query sees `window` earlier keys         KV in use is O(window)

`window` counts *earlier* keys; the query's own key is seen too and is not counted. Implementations differ by one here
(MiMo-V2: 128, gpt-oss: 127, Gemma 3: `sliding_window - 1`); the model's description states it once, in this unit.
"""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class GroupGeometry:
    """KV shape of one group. `num_layers == 0` means that the model has no such layers."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype_bytes: int
    window: int | None = None
    """Earlier keys a query sees; `None` means all of them (the full group)."""

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token over all layers of the group."""
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype_bytes

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens over all layers of the group."""
        return self.token_bytes * block_size


@dataclass(frozen=True)
class KVGeometry:
    """KV shape of a whole model."""

    full: GroupGeometry
    swa: GroupGeometry

    def __post_init__(self) -> None:
        if self.full.num_layers < 1:
            raise ValueError("a model needs at least one full-attention layer: the full block table is authoritative")
        if self.full.window is not None:
            raise ValueError("the full group has no window")
        if self.swa.num_layers > 0 and (self.swa.window is None or self.swa.window < 1):
            raise ValueError("the swa group needs a window of at least one earlier key")

    @property
    def has_swa(self) -> bool:
        """Whether the model has sliding-window layers at all."""
        return self.swa.num_layers > 0

    @property
    def window(self) -> int:
        """Earlier keys an SWA query sees; 0 for a model without SWA layers."""
        return self.swa.window or 0 if self.has_swa else 0

    @property
    def rebuild_tokens(self) -> int:
        """Tokens to replay so that a lost SWA window becomes exact again from full KV alone.

        Each SWA layer moves the error front forward by one window, so `n_swa_layers * window` tokens suffice
        (design.md §4, shown numerically there).
        """
        return self.swa.num_layers * self.window

    def window_blocks(self, block_size: int) -> int:
        """Blocks that cover the `window` tokens before a block boundary."""
        return ceil(self.window / block_size)

    @property
    def uniform_token_bytes(self) -> int:
        """Bytes per token if SWA layers kept the whole sequence, as one uniform pool does."""
        return self.full.token_bytes + self.swa.token_bytes

    def cached_bytes(self, num_tokens: int, num_windows: int = 1) -> int:
        """Bytes that a cached sequence of `num_tokens` needs with `num_windows` retained windows."""
        return num_tokens * self.full.token_bytes + min(num_tokens, num_windows * self.window) * self.swa.token_bytes
