"""The store tier's interface: a cache of KV blocks outside this process's memory, on a disk or in a cluster. Pure.

An *object* is the KV of one block of one group, all layers of it. Its key says everything its bytes depend on:

    ObjectKey (33 bytes)  =  namespace (16)  |  group (1)  |  block key (16)

The block key is the chained hash of the block and all before it, and carries the tenant's salt (`hashing`). The
namespace stands for the rest: model, geometry, dtype, layout. So equal keys mean equal bytes, whoever wrote them and
whenever; a store need not know what they mean, and an object never changes.

An implementation registers an opener in `STORES` under the name that specs begin with (`disk:/data/kv:20GiB`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, NewType, Protocol

from cygnet.base.errors import ConfigError
from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import BlockKey
from cygnet.base.registry import Registry
from cygnet.kv.hashing import KEY_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

LAYOUT_VERSION = 1
"""Raised when the order of bytes inside an object changes: old objects are then not found, instead of misread."""

NAMESPACE_BYTES = 16
OBJECT_KEY_BYTES = NAMESPACE_BYTES + 1 + KEY_BYTES
DEFAULT_TIMEOUT_S = 10.0

Namespace = NewType("Namespace", bytes)
"""Digest of what an object's bytes depend on besides tokens and salt."""

ObjectKey = NewType("ObjectKey", bytes)
"""Names one object; see the module's text. Fixed length, so that stores can lay it out."""


class Group(IntEnum):
    """The group whose KV an object holds. Values are part of the key: they never change meaning."""

    FULL = 0
    SWA = 1


class Outcome(Enum):
    """What became of one key in a batch. None of these is an error of the caller's; nothing is raised for them."""

    OK = "ok"
    """Got: the buffer holds the object. Put: the store holds it, from now on or since earlier."""
    MISS = "miss"
    """Not there (or with another length)."""
    TORN = "torn"
    """Was there, but its bytes are not what was put. Gone from now on."""
    FULL = "full"
    """No room, and none to be made. Nothing has changed."""
    TIMED_OUT = "timed_out"
    """Not begun in time."""
    FAILED = "failed"
    """The medium or the peer failed, or the store is closed."""


def namespace_of(
    fingerprint: str,
    geometry: KVGeometry,
    block_size: int,
    dtype: str,
    *,
    shard: str = "",
    layout: int = LAYOUT_VERSION,
) -> Namespace:
    """Namespace of a model (`fingerprint`) whose KV has this shape and `dtype`, in blocks of `block_size` tokens.

    `shard` names the part of the model whose KV this is, such as `tp1/4`; empty when it is not split. The digest is the
    same in every process and release: it is made of these values only, each with its length.
    """

    def shape(group: GroupGeometry) -> str:
        dims = (group.num_layers, group.num_kv_heads, group.key_dim, group.value_dim, group.dtype_bytes, group.window)
        return "/".join(str(dim) for dim in dims)

    digest = blake2b(digest_size=NAMESPACE_BYTES, person=b"cygnet.store")
    for part in (fingerprint, shape(geometry.full), shape(geometry.swa), str(block_size), dtype, shard, str(layout)):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return Namespace(digest.digest())


def object_key(namespace: Namespace, group: Group, block: BlockKey) -> ObjectKey:
    """Key of `block`'s KV in `group`."""
    return ObjectKey(namespace + bytes((group,)) + block)


def object_keys(namespace: Namespace, group: Group, blocks: Sequence[BlockKey]) -> list[ObjectKey]:
    """Keys of many blocks of one group. O(blocks)."""
    head = namespace + bytes((group,))
    return [ObjectKey(head + block) for block in blocks]


def namespace_of_key(key: ObjectKey) -> Namespace:
    """The namespace a key belongs to."""
    return Namespace(key[:NAMESPACE_BYTES])


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened, and its size now."""

    num_objects: int
    bytes_used: int
    """Everything that counts against the capacity: objects, their padding, indexes, room reserved for writers."""
    capacity_bytes: int
    gets: Mapping[Outcome, int]
    puts: Mapping[Outcome, int]
    puts_present: int
    """Puts of objects that were there already; part of `puts[OK]`."""
    bytes_read: int
    """Bytes of objects got."""
    bytes_written: int
    """Bytes of objects put."""
    evicted_objects: int
    """Objects given up for room."""
    moved_objects: int
    """Objects kept when their place was given up, because they had been used."""


class Store(Protocol):
    """A cache of immutable objects. Everything in it may be gone at any time; nothing in it is ever wrong.

    Calls block, from any number of threads at once. Expected outcomes are values (`Outcome`), per key and in the order
    of `keys`. A buffer is C-contiguous memory of exactly the object's length, at least one byte; it is not touched
    after the call has returned. `timeout_s` bounds when work is begun: a read or write under way is waited for, because
    it uses the caller's memory. `ValueError` is raised for lists of different lengths, keys of a wrong length and empty
    (or, to be filled, read-only) buffers, before anything is done. After `close` nothing is found, and every get and
    put has `FAILED`.
    """

    @property
    def buffer_alignment(self) -> int:
        """Bytes to which buffers had best be aligned, in address and length; others work, but are copied once more.

        `cygnet.kv.runtime.memory.pool_memory` suits every store, and is faster than other aligned memory.
        """

    def batch_exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Whether each object is there, from memory alone or in one round trip. Not a use: nothing is refreshed."""

    def batch_get_into(
        self, keys: Sequence[ObjectKey], buffers: "Sequence[Buffer]", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Outcome]:
        """Fill each (writable) buffer with its object: `OK`, `MISS`, `TORN`, `TIMED_OUT` or `FAILED`.

        A buffer whose outcome is not `OK` holds nothing of use, and its object is not found again after `TORN` or
        `FAILED` until it is put again: a load that failed once is not tried for ever.
        """

    def batch_put(
        self, keys: Sequence[ObjectKey], buffers: "Sequence[Buffer]", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Outcome]:
        """Store each object: `OK`, `FULL`, `TIMED_OUT` or `FAILED`. One that is there is refreshed at next to no cost.

        Blocks of one sequence are best put together and in order: they are then read together.
        """

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Say that these objects are in use elsewhere (a faster tier), so that they stay. Unknown keys are ignored.

        For users of a store that have only the keys. The engine has the bytes as well and puts again: that refreshes
        what is there for the same price, and mends what is not.
        """

    def remove(self, keys: Sequence[ObjectKey]) -> int:
        """Give up these objects; returns how many were there."""

    def clear(self, namespace: Namespace | None = None) -> int:
        """Give up all objects of a namespace, or all; returns how many."""

    def stats(self) -> StoreStats:
        """Size and counters."""

    def audit(self) -> list[str]:
        """All discrepancies between what the store believes and what is there. Slow: it reads every record's head."""

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Take no more calls, let those under way end, and give back all resources. May be called twice."""


def check_batch(
    keys: Sequence[ObjectKey], buffers: "Sequence[Buffer] | None" = None, *, writable: bool = False
) -> list[memoryview]:
    """The buffers as flat bytes, after the checks that `Store` promises."""
    if any(len(key) != OBJECT_KEY_BYTES for key in keys):
        raise ValueError(f"an object key has {OBJECT_KEY_BYTES} bytes; make it with object_key()")
    if buffers is None:
        return []
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys, but {len(buffers)} buffers")
    views = [memoryview(buffer) for buffer in buffers]
    if not all(view.c_contiguous and view.nbytes for view in views):
        raise ValueError("an object is one contiguous piece of memory of at least one byte")
    if writable and any(view.readonly for view in views):
        raise ValueError("objects are read into writable buffers")
    return [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views]


STORES: Registry[Callable[[str], Store]] = Registry("store")
"""Name -> opener. It is given what follows `name:` in the spec, and raises `ConfigError` when that can't be opened."""


def split_spec(spec: str) -> tuple[str, str]:
    """Name and rest: `disk:/data/kv:20GiB` -> `("disk", "/data/kv:20GiB")`; a path means a disk store.

    What could be read either way is a name: a relative path is written `./kv`.
    """
    if not spec:
        raise ConfigError("an empty store; write a folder such as /data/kv:20GiB")
    match = re.match(r"([A-Za-z][A-Za-z0-9_-]*):(.*)", spec, re.DOTALL)
    if match is not None:
        if match[1] in STORES:
            return match[1], match[2]
        if "/" not in match[1]:
            known = ", ".join(STORES)
            raise ConfigError(f"store {spec!r}: {match[1]!r} is no kind of store ({known}); a folder is ./{spec}")
    return "disk", spec
