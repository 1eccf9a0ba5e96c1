"""What a worker's caches hold, told as changes: the words that engine, API and router share.

A change is (code, key, parent): `code` is `tier * KINDS + kind`, `key` names a cached block (see `cygnet.kv.hashing`),
`parent` the block before it, given when it is added below another one.
"""

import msgspec

from cygnet.base.geometry import KVGeometry

ADDED, REMOVED, WINDOW_LIVE, WINDOW_GONE = range(4)
"""A block with its full KV came or went; its SWA KV came or went. A block that goes has no SWA KV left."""

KINDS = 4
TIERS = ("device", "host")
"""Tiers by number. What the store holds is not told: it belongs to no worker."""

CacheChange = tuple[int, bytes, bytes]

PromptCached = tuple[str, int, bytes]
"""A prompt that is computed: request id, its tokens, key of its last whole block."""


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """What a follower must know to make sense of changes."""

    version: int
    """Of this format: `FORMAT`."""
    block_size: int
    geometry: KVGeometry
    rebuild: bool
    """Lost SWA windows are rebuilt from full KV."""


FORMAT = 1
