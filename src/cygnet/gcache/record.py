"""Bytes of a cached object: its record, its slot in the arena's table, and the arena's head. Pure.

All numbers are little-endian. A record is the same in memory and on disk:

    RecordHead        64 bytes, with a checksum of itself, of the key and of the table of checksums
    key               the full key: u8 length of the namespace | namespace | name
    checksums         u64 for each chunk of 1 MiB of the value, from the next multiple of 8 on
    value             from the next multiple of 64 on; the record ends with the granule of 512 bytes

A chunk's checksum is xxh3_64 of its bytes, seeded with xxh3_64(key) + its number: bytes of another object, or of
another place in this one, do not pass. It is made by whoever puts the object and checked by whoever gets it.

The arena is one file: a page with ArenaHead, a table of slots of 64 bytes, the records. A slot is eight words:

    0  stamp: generation << 2 | state          written last; everything else counts only under COMMITTED
    1  first granule of the record             4  bytes of the value
    2  granules of the record                  5  version: rises with every commit of the arena
    3  bytes of the key                        6  checksum of the record's head
                                               7  xxh3_64 of words 1 to 6

The generation rises each time a slot's record is given up, before its memory is used for anything else. So whoever has
used a record without the server's help finds out afterwards whether it was still there, by reading one word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from struct import Struct, pack, unpack
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from cygnet.base.errors import ConfigError
from cygnet.gcache.limits import MAX_KEY_BYTES, MAX_NAMESPACE_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

VERSION = 1
PAGE = 4096
GRANULE = 512
CHUNK_BYTES = 1 << 20
VALUE_ALIGNMENT = 64
ARENA_MAGIC, RECORD_MAGIC = b"CYGNETar", b"GCr1"
U64 = (1 << 64) - 1

ArenaHead = Struct("<8sIIQQQ16sQ")  # magic, version, granule, slots, first byte of records, granules, incarnation, sum
RecordHead = Struct("<4sIQQQQQ8xQ")  # magic, key bytes, value bytes, version, expiry ns, checksum of sums, root | sum
SLOT_WORDS = 8
SLOT_BYTES = 8 * SLOT_WORDS
Words = Struct("<6Q")


class State(IntEnum):
    """The two low bits of a stamp."""

    FREE = 0
    COMMITTED = 2
    DEAD = 3
    """Not to be found any more; its bytes are still there, for those who are reading them."""


def full_key(namespace: bytes, name: bytes) -> bytes:
    """The key under which an object is cached. Raises `ValueError` for a name that is empty or too long."""
    if len(namespace) > MAX_NAMESPACE_BYTES:
        raise ValueError(f"namespace of {len(namespace)} bytes, at most {MAX_NAMESPACE_BYTES}")
    if not name or 1 + len(namespace) + len(name) > MAX_KEY_BYTES:
        raise ValueError(f"a name has 1 to {MAX_KEY_BYTES - 1 - len(namespace)} bytes, not {len(name)}")
    return bytes((len(namespace),)) + namespace + name


def split_key(key: bytes) -> tuple[bytes, bytes]:
    """Namespace and name of a full key."""
    return key[1 : 1 + key[0]], key[1 + key[0] :]


def is_full_key(key: bytes) -> bool:
    """Whether `key` is one that `full_key` could have made."""
    return 0 < len(key) <= MAX_KEY_BYTES and len(key) > 1 + key[0]


def num_chunks(value_bytes: int) -> int:
    """Chunks of a value; an empty one has none."""
    return -(-value_bytes // CHUNK_BYTES)


def chunk_seed(key: bytes) -> int:
    """Seed of the checksum of a value's first chunk; each later chunk's is one more (modulo 2^64)."""
    return xxh3_64_intdigest(key)


def checksums(key: bytes, value: "memoryview | bytes", first_chunk: int = 0) -> list[int]:
    """Checksum of each chunk of `value`, contiguous bytes that begin with a chunk of that number."""
    seed = chunk_seed(key) + first_chunk
    if len(value) <= CHUNK_BYTES:
        return [xxh3_64_intdigest(value, seed=seed & U64)] if len(value) else []
    view = memoryview(value)
    return [
        xxh3_64_intdigest(view[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES], seed=(seed + i) & U64)
        for i in range(num_chunks(len(value)))
    ]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a record lie, in bytes from its beginning."""

    sums: int
    value: int
    record_bytes: int
    """In whole granules."""


@lru_cache(maxsize=4096)
def layout(key_bytes: int, value_bytes: int) -> Layout:
    """Layout of a record. O(1)."""
    sums = -(-(RecordHead.size + key_bytes) // 8) * 8
    value = -(-(sums + 8 * num_chunks(value_bytes)) // VALUE_ALIGNMENT) * VALUE_ALIGNMENT
    return Layout(sums, value, -(-(value + value_bytes) // GRANULE) * GRANULE)


def pack_prefix(
    key: bytes, value_bytes: int, packed: bytes, version: int, expiry_ns: int, root: int = 0
) -> tuple[bytes, int]:
    """Everything of a record before its value, and the checksum in its head. `packed` are the value's checksums."""
    places = layout(len(key), value_bytes)
    sum_of_sums = xxh3_64_intdigest(packed)
    head = RecordHead.pack(RECORD_MAGIC, len(key), value_bytes, version, expiry_ns, sum_of_sums, root, 0)[:-8]
    own = xxh3_64_intdigest(key, seed=xxh3_64_intdigest(head))
    before_sums = (head + own.to_bytes(8, "little") + key).ljust(places.sums, b"\0")
    return (before_sums + packed).ljust(places.value, b"\0"), own


@dataclass(frozen=True, slots=True)
class Record:
    """What a record's head says of it."""

    key: bytes
    value_bytes: int
    version: int
    expiry_ns: int
    """Wall clock; 0: never."""
    sums: bytes
    """Packed checksums of the chunks."""
    checksum: int
    """Of the head."""
    places: Layout
    root: int
    """Place of the object's root (`placement.root_place`); 0: it has none."""


def unpack_record(memory: memoryview) -> Record | None:
    """Read the record that begins `memory`, but not its value; `None` when it is damaged or does not fit."""
    if len(memory) < RecordHead.size:
        return None
    magic, key_bytes, value_bytes, version, expiry_ns, sum_of_sums, root, own = RecordHead.unpack_from(memory)
    if magic != RECORD_MAGIC or not 0 < key_bytes <= MAX_KEY_BYTES:
        return None
    places = layout(key_bytes, value_bytes)
    if places.record_bytes > len(memory):
        return None
    key = bytes(memory[RecordHead.size : RecordHead.size + key_bytes])
    packed = bytes(memory[places.sums : places.sums + 8 * num_chunks(value_bytes)])
    head = xxh3_64_intdigest(memory[: RecordHead.size - 8])
    if xxh3_64_intdigest(packed) != sum_of_sums or xxh3_64_intdigest(key, seed=head) != own or not is_full_key(key):
        return None
    return Record(key, value_bytes, version, expiry_ns, packed, own, places, root)


def pack_sums(sums: Sequence[int]) -> bytes:
    """Checksums as records and frames have them."""
    if len(sums) == 1:
        return sums[0].to_bytes(8, "little")
    return pack(f"<{len(sums)}Q", *sums)


def unpack_sums(packed: bytes) -> list[int]:
    """What `pack_sums` made."""
    return list(unpack(f"<{len(packed) // 8}Q", packed))


def value_is_whole(key: bytes, value: "memoryview | bytes", sums: bytes) -> bool:
    """Whether a value has the (packed) checksums."""
    return pack_sums(checksums(key, value)) == sums


def slot_checksum(words: Sequence[int]) -> int:
    """Word 7 of a slot, from words 1 to 6."""
    return xxh3_64_intdigest(Words.pack(*words))


def pack_words(words: Sequence[int]) -> bytes:
    """Words 1 to 7 of a slot, from words 1 to 6."""
    packed = Words.pack(*words)
    return packed + xxh3_64_intdigest(packed).to_bytes(8, "little")


@dataclass(frozen=True)
class ArenaShape:
    """Sizes of an arena's parts."""

    num_slots: int
    data_at: int
    """First byte of the records."""
    num_granules: int

    @property
    def file_bytes(self) -> int:
        """Size of the arena's file."""
        return self.data_at + self.num_granules * GRANULE


MIN_ARENA_BYTES = 1 << 20


def arena_shape(memory_bytes: int, mean_object_bytes: int) -> ArenaShape:
    """Shape of an arena that takes `memory_bytes`, with a slot for each `mean_object_bytes` of them."""
    if memory_bytes < MIN_ARENA_BYTES:
        raise ConfigError(f"gcache memory of {memory_bytes} bytes is too small; give it 1MiB or more")
    if mean_object_bytes < GRANULE:
        raise ConfigError(f"gcache objects of {mean_object_bytes} bytes on average; the least is {GRANULE}")
    num_slots = max(16, memory_bytes // mean_object_bytes)
    data_at = -(-(PAGE + num_slots * SLOT_BYTES) // PAGE) * PAGE
    return ArenaShape(num_slots, data_at, (memory_bytes - data_at) // GRANULE)


def pack_arena_head(shape: ArenaShape, incarnation: bytes) -> bytes:
    """First bytes of an arena."""
    body = ArenaHead.pack(
        ARENA_MAGIC, VERSION, GRANULE, shape.num_slots, shape.data_at, shape.num_granules, incarnation, 0
    )
    return body[:-8] + xxh3_64_intdigest(body[:-8]).to_bytes(8, "little")


def unpack_arena_head(data: "Buffer") -> tuple[ArenaShape, bytes] | None:
    """Shape and incarnation; `None` for anything but an arena of this version."""
    view = memoryview(data)
    if len(view) < ArenaHead.size:
        return None
    magic, version, granule, slots, data_at, granules, incarnation, own = ArenaHead.unpack_from(view)
    if (magic, version, granule) != (ARENA_MAGIC, VERSION, GRANULE):
        return None
    if own != xxh3_64_intdigest(view[: ArenaHead.size - 8]):
        return None
    return ArenaShape(slots, data_at, granules), incarnation
