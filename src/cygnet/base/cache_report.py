"""What is cached where, and what a flush has dropped: reports for people and programs.

They name sequences by the beginnings of their keys, which are hashes; never by tokens or text.
"""

import msgspec


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """One pool: its blocks are used (held by requests or copies), cached (evictable) or free."""

    tier: str
    """`device` or `host`."""
    group: str
    """`full` or `swa`."""
    num_blocks: int
    used: int
    cached: int
    free: int
    block_bytes: int


class WindowReport(msgspec.Struct, frozen=True):
    """A retained window: a sequence can resume here."""

    end: int
    """Tokens of the sequence up to the window's end."""
    tiers: tuple[str, ...]
    """Where it is: `device`, `host`, `store`."""


class SequenceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One cached sequence, from the start to a block that none goes on from. Lengths are in tokens."""

    key: str
    """Beginning of its last block's key, in hexadecimal digits: it names the whole sequence."""
    prefix: str
    """Beginning of its first block's key, the same for all that begin alike."""
    num_tokens: int
    device_tokens: int
    """The first so many have full-attention KV on the device."""
    host_tokens: int
    """The first so many have it in host memory."""
    store_tokens: int
    """The first so many were fetched from the store or sent there, as far as this server remembers."""
    windows: tuple[WindowReport, ...]
    """From the start on."""
    shared_tokens: int
    """Where it leaves the nearest other sequence; 0 if it shares nothing."""
    reuses: int
    """How often a request went on from within what is its own."""
    num_running: int
    """Requests that hold blocks of what is its own now."""
    age_s: float
    """Time since a request last used it."""


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is cached where. Sequences come most recently used first."""

    block_size: int
    window: int
    """Tokens of one window; 0 without sliding-window layers."""
    tiers: tuple[str, ...]
    pools: tuple[PoolReport, ...]
    num_sequences: int
    """All there are, of which `sequences` describes the first ones."""
    sequences: tuple[SequenceReport, ...]


class FlushReport(msgspec.Struct, frozen=True):
    """What a flush has dropped."""

    device_blocks: int
    """Blocks of full-attention KV."""
    device_windows: int
    """Retained windows."""
    host_blocks: int = 0
    host_windows: int = 0
    kept_blocks: int = 0
    """Blocks of full-attention KV that stayed on device and host, as requests or copies use them."""
    store: bool = False
    """Whether the store has been told to give up all that it has of this model."""
