"""Bytes on disk. What a release has written another one reads, or refuses by its version."""

from hashlib import sha256
from pathlib import Path

import pytest

from contracts.store import get, key, payload
from cygnet.kv.runtime.disk_store.format import (
    MAX_ENTRIES,
    PAGE,
    VERSION,
    Entry,
    ExtentHead,
    object_checksum,
    pack_extent_head,
    pack_index,
    pack_segment_head,
    tag_of,
    unpack_extent_head,
    unpack_index,
    unpack_segment_head,
)
from cygnet.kv.store import ObjectKey, Outcome
from support.store_folder import small_store

NAME = "0123456789abcdef-01234567"
KEYS = [ObjectKey(bytes((i,)) * 33) for i in (1, 2)]


def test_the_format_is_the_same_for_ever() -> None:
    """When this must change, so must `VERSION`: else what is on disks is misread or lost without a word."""
    tag = tag_of(NAME)
    head = pack_extent_head(tag, 7, KEYS, [5000, 4096], [11, 12])
    entries = head[ExtentHead.size : ExtentHead.size + 2 * Entry.size]
    files = (pack_segment_head(1 << 20), head, pack_index(tag, 9 << 20, entries), tag)
    assert VERSION == 1
    assert [sha256(file).hexdigest()[:16] for file in files] == [
        "03d60ede8ef70e1d",
        "75a7ec6820c9866f",
        "e94ad91fc4340965",
        "5e4564b69f4473a3",
    ]
    assert object_checksum(KEYS[0], b"some bytes") == 0x5240394F8965B3B1


def test_heads_are_read_back() -> None:
    tag = tag_of(NAME)
    assert unpack_segment_head(memoryview(pack_segment_head(1 << 40))) == 1 << 40
    head = pack_extent_head(tag, 7, KEYS, [5000, 4096], [11, 12])
    found = unpack_extent_head(memoryview(head), tag, 7)
    assert found is not None
    assert found[0].tolist() == [(KEYS[0], b"\0\0\0", 5000, 8, 11), (KEYS[1], b"\0\0\0", 4096, 10, 12)]
    assert found[1] == 11
    index = unpack_index(memoryview(pack_index(tag, 9 << 20, found[0].tobytes())), tag)
    assert index is not None
    assert (index[0].tolist(), index[1]) == (found[0].tolist(), 9 << 20)


def test_a_head_elsewhere_is_no_head() -> None:
    """Neither in another file nor at another place of the same."""
    tag = tag_of(NAME)
    head = memoryview(pack_extent_head(tag, 7, KEYS, [1, 1], [11, 12]))
    assert unpack_extent_head(head, tag_of(NAME[:-1] + "8"), 7) is None
    assert unpack_extent_head(head, tag, 8) is None
    assert unpack_extent_head(head[:-1], tag, 7) is None
    index = memoryview(pack_index(tag, 9 << 20, b""))
    assert unpack_index(index, tag_of(NAME[:-1] + "8")) is None


@pytest.mark.parametrize("place", [0, 9, 25, 33, 60, PAGE - 1])
def test_a_damaged_head_is_no_head(place: int) -> None:
    tag = tag_of(NAME)
    head = bytearray(pack_extent_head(tag, 7, KEYS, [1, 1], [11, 12]))
    head[place] ^= 1
    assert unpack_extent_head(memoryview(head), tag, 7) is None


def test_a_full_head() -> None:
    keys = [ObjectKey(bytes((i,)) * 33) for i in range(MAX_ENTRIES)]
    head = memoryview(pack_extent_head(tag_of(NAME), 1, keys, [9] * MAX_ENTRIES, list(range(MAX_ENTRIES))))
    assert len(head) == PAGE
    found = unpack_extent_head(head, tag_of(NAME), 1)
    assert found is not None
    assert len(found[0]) == MAX_ENTRIES
    assert (found[0]["checksum"][-1], found[0]["page"][-1], found[1]) == (
        MAX_ENTRIES - 1,
        1 + MAX_ENTRIES,
        2 + MAX_ENTRIES,
    )


def test_the_same_bytes_under_another_key_have_another_checksum() -> None:
    assert object_checksum(KEYS[0], b"bytes") != object_checksum(KEYS[1], b"bytes")


def test_a_copied_segment_is_nothing(tmp_path: Path) -> None:
    """A file under another's name has no objects: its heads say where they belong."""
    store = small_store(tmp_path)
    store.batch_put([key(1)], [payload(key(1))])
    store.close()
    (data,) = tmp_path.glob("*.seg")
    data.rename(tmp_path / f"{NAME}.v1.seg")
    store = small_store(tmp_path)
    assert get(store, key(1)) == [Outcome.MISS]
    assert list(tmp_path.glob("*.seg")) == []
    store.close()
