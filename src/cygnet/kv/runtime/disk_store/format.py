"""Bytes on disk: what a segment file, its sealed index and its marks look like. All numbers are little-endian.

    segment  NAME.v1.seg     page 0: SegmentHead       then extents, one after another
    extent                   one page: ExtentHead, entries, checksum      then the objects' bytes, each from a new page
    index    NAME.v1.idx     IndexHead, entries of the whole segment, checksum; written when the segment is sealed
    marks    NAME.v1.marks   two bytes per page of the segment: [2p] object at page p was used, [2p + 1] it is dead

An extent is what one write put down, so its objects lie side by side and are read with one call. Heads name the file
they belong to and their own place in it: a page found elsewhere is no head. An object's checksum is seeded with its
key, so bytes of another object, whole as they may be, do not pass for it.
"""

from collections.abc import Sequence
from struct import Struct

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from cygnet.kv.store import OBJECT_KEY_BYTES, ObjectKey

VERSION = 1
PAGE = 4096
"""Objects begin at multiples of this, in files and therefore on disks: direct reads need it."""

SEGMENT_MAGIC, EXTENT_MAGIC, INDEX_MAGIC = b"CYGNETsg", b"CYGNETex", b"CYGNETix"

SegmentHead = Struct("<8sI4xQ")  # magic, version, reserved bytes
ExtentHead = Struct("<8s16sIII4x")  # magic, file's tag, own page, pages with this one, entries
Entry = Struct(f"<{OBJECT_KEY_BYTES}s3xIIQ")  # key, length in bytes, first page in the file, checksum
IndexHead = Struct("<8s16sI4xQQ")  # magic, file's tag, version, bytes of the segment, entries
Checksum = Struct("<Q")

ENTRY = np.dtype(
    [("key", f"V{OBJECT_KEY_BYTES}"), ("pad", "V3"), ("length", "<u4"), ("page", "<u4"), ("checksum", "<u8")]
)
MAX_ENTRIES = (PAGE - ExtentHead.size - Checksum.size) // Entry.size
"""Objects per extent."""
MAX_OBJECT_BYTES = (1 << 32) - PAGE

Entries = NDArray[np.void]


def pages_of(num_bytes: int) -> int:
    """Whole pages that hold `num_bytes`."""
    return -(-num_bytes // PAGE)


def round_up(num_bytes: int) -> int:
    """`num_bytes` in whole pages, in bytes: what a file of that size takes of the disk."""
    return -(-num_bytes // PAGE) * PAGE


def tag_of(name: str) -> bytes:
    """What the heads in segment `name` carry."""
    return xxh3_128_digest(name.encode())


def object_checksum(key: ObjectKey, payload: memoryview | bytes) -> int:
    """Checksum of an object's bytes under its key."""
    return xxh3_64_intdigest(payload, seed=xxh3_64_intdigest(key))


def extent_bytes(lengths: Sequence[int]) -> int:
    """Size of an extent with objects of these lengths."""
    return PAGE * (1 + sum(pages_of(length) for length in lengths))


def index_bytes(num_entries: int) -> int:
    """Size of a sealed index."""
    return IndexHead.size + num_entries * Entry.size + Checksum.size


def marks_bytes(segment_bytes: int) -> int:
    """Largest size of the marks of a segment of `segment_bytes`."""
    return 2 * pages_of(segment_bytes)


def _sealed(page: bytearray) -> bytes:
    Checksum.pack_into(page, PAGE - Checksum.size, xxh3_64_intdigest(memoryview(page)[: -Checksum.size]))
    return bytes(page)


def _intact(page: memoryview) -> bool:
    return len(page) == PAGE and xxh3_64_intdigest(page[: -Checksum.size]) == Checksum.unpack_from(page, PAGE - 8)[0]


def pack_segment_head(reserve: int) -> bytes:
    """First page of a segment that may take up to `reserve` bytes of disk, with everything that belongs to it."""
    page = bytearray(PAGE)
    SegmentHead.pack_into(page, 0, SEGMENT_MAGIC, VERSION, reserve)
    return _sealed(page)


def unpack_segment_head(page: memoryview) -> int | None:
    """The reserved bytes, or `None` for a damaged page."""
    if not _intact(page):
        return None
    magic, version, reserve = SegmentHead.unpack_from(page)
    return reserve if (magic, version) == (SEGMENT_MAGIC, VERSION) else None


def pack_extent_head(
    tag: bytes, page: int, keys: Sequence[ObjectKey], lengths: Sequence[int], checksums: Sequence[int]
) -> bytes:
    """Head of an extent that begins at `page`."""
    head = bytearray(PAGE)
    place, offset = page + 1, ExtentHead.size
    for key, length, checksum in zip(keys, lengths, checksums, strict=True):
        Entry.pack_into(head, offset, key, length, place, checksum)
        place += pages_of(length)
        offset += Entry.size
    ExtentHead.pack_into(head, 0, EXTENT_MAGIC, tag, page, place - page, len(keys))
    return _sealed(head)


def unpack_extent_head(head: memoryview, tag: bytes, page: int) -> tuple[Entries, int] | None:
    """Entries of the extent that begins at `page`, and the page after it; `None` when there is none."""
    if head[: len(EXTENT_MAGIC)] != EXTENT_MAGIC or not _intact(head):
        return None
    _, its_tag, its_page, pages, count = ExtentHead.unpack_from(head)
    if (its_tag, its_page) != (tag, page) or not 0 < count <= MAX_ENTRIES:
        return None
    return np.frombuffer(head, ENTRY, count, ExtentHead.size).copy(), page + pages


def pack_index(tag: bytes, segment_bytes: int, entries: bytes) -> bytes:
    """A sealed index; `entries` are packed ones."""
    body = IndexHead.pack(INDEX_MAGIC, tag, VERSION, segment_bytes, len(entries) // Entry.size) + entries
    return body + Checksum.pack(xxh3_64_intdigest(body))


def unpack_index(data: memoryview, tag: bytes) -> tuple[Entries, int] | None:
    """Entries of a segment and how many of its bytes they account for; `None` for a damaged index."""
    if len(data) < IndexHead.size + Checksum.size:
        return None
    body = data[: -Checksum.size]
    if xxh3_64_intdigest(body) != Checksum.unpack_from(data, len(body))[0]:
        return None
    magic, its_tag, version, segment_bytes, count = IndexHead.unpack_from(body)
    if (magic, its_tag, version) != (INDEX_MAGIC, tag, VERSION) or len(body) != IndexHead.size + count * Entry.size:
        return None
    return np.frombuffer(body, ENTRY, count, IndexHead.size), segment_bytes


def find_extent_heads(data: memoryview, first_page: int) -> list[int]:
    """Pages in `data` (whole pages from `first_page` on) that look like an extent's head. To go on after damage."""
    words = np.frombuffer(data, "<u8")[:: PAGE // 8]
    magic = np.frombuffer(EXTENT_MAGIC, "<u8")[0]
    return [first_page + int(place) for place in np.flatnonzero(words == magic)]
