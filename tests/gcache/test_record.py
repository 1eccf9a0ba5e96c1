"""The bytes of records, slots and the arena's head are frozen; damage of any of them is noticed."""

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cygnet.base.errors import ConfigError
from cygnet.gcache.limits import MAX_KEY_BYTES
from cygnet.gcache.record import (
    CHUNK_BYTES,
    GRANULE,
    PAGE,
    VALUE_ALIGNMENT,
    ArenaShape,
    arena_shape,
    checksums,
    full_key,
    is_full_key,
    layout,
    num_chunks,
    pack_arena_head,
    pack_prefix,
    pack_sums,
    slot_checksum,
    split_key,
    unpack_arena_head,
    unpack_record,
    value_is_whole,
)

KEY = full_key(b"ns", b"name")
VALUE = bytes(range(256)) * 4


def record_of(key: bytes, value: bytes, version: int = 7, expiry_ns: int = 0) -> bytearray:
    prefix, _ = pack_prefix(key, len(value), pack_sums(checksums(key, value)), version, expiry_ns)
    places = layout(len(key), len(value))
    return bytearray(prefix + value + bytes(places.record_bytes - len(prefix) - len(value)))


def test_the_bytes_are_frozen() -> None:
    """A server of another release, or a restarted one, must read what is there."""
    assert KEY == b"\x02nsname"
    assert checksums(KEY, VALUE) == [11944942879223367676]
    assert blake2b(record_of(KEY, VALUE, 7, 9), digest_size=8).hexdigest() == "1a9e703263a6971a"
    assert (
        blake2b(pack_arena_head(ArenaShape(16, 8192, 64), bytes(16)), digest_size=8).hexdigest() == "d6a9ec986f2c2cb0"
    )
    assert slot_checksum((1, 2, 3, 4, 5, 6)) == 17423934342835715992


@given(
    st.binary(max_size=255),
    st.binary(min_size=1, max_size=300),
    st.sampled_from((0, 1, 447, 448, 449, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES)),
)
def test_round_trip(namespace: bytes, name: bytes, length: int) -> None:
    key = full_key(namespace, name)
    assert split_key(key) == (namespace, name)
    assert is_full_key(key)
    value = (b"ab" * (length // 2 + 1))[:length]
    data = record_of(key, value)
    assert len(data) % GRANULE == 0
    record = unpack_record(memoryview(data))
    assert record is not None
    assert (record.key, record.value_bytes, record.version) == (key, length, 7)
    assert record.places.value % VALUE_ALIGNMENT == 0
    assert data[record.places.value : record.places.value + length] == value
    assert len(record.sums) == 8 * num_chunks(length)
    assert value_is_whole(key, value, record.sums)


@given(st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject) -> None:
    """In head, key or sums by `unpack_record`, in the value by its checksums; padding does not matter."""
    raw = record_of(KEY, VALUE)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    places = layout(len(KEY), len(VALUE))
    value = slice(places.value, places.value + len(VALUE))
    record = unpack_record(memoryview(raw))
    meaningful = at < 64 + len(KEY) or places.sums <= at < places.sums + 8 or value.start <= at < value.stop
    whole = record is not None and value_is_whole(KEY, bytes(raw[value]), record.sums)
    assert whole == (not meaningful)


def test_a_value_under_another_key_or_moved_chunks_do_not_pass() -> None:
    value = bytes(CHUNK_BYTES) + b"\1" * CHUNK_BYTES
    record = unpack_record(memoryview(record_of(KEY, value)))
    assert record is not None
    assert value_is_whole(KEY, value, record.sums)
    assert not value_is_whole(full_key(b"ns", b"other"), value, record.sums)
    assert not value_is_whole(KEY, value[CHUNK_BYTES:] + value[:CHUNK_BYTES], record.sums)
    assert len(set(checksums(KEY, bytes(2 * CHUNK_BYTES)))) == 2, "equal chunks have sums of their own place"


def test_a_record_cut_short_is_none() -> None:
    raw = memoryview(record_of(KEY, VALUE))
    for length in (0, 10, 63, 64, 65, len(raw) - 1):
        assert unpack_record(raw[:length]) is None
    assert unpack_record(memoryview(bytes(4096))) is None


def test_heads_of_other_versions_are_not_read() -> None:
    shape = arena_shape(1 << 20, 1 << 14)
    head = bytearray(pack_arena_head(shape, b"i" * 16))
    assert unpack_arena_head(head) == (shape, b"i" * 16)
    assert unpack_arena_head(head[:40]) is None
    for at in range(len(head)):
        head[at] ^= 4
        assert unpack_arena_head(head) is None
        head[at] ^= 4


def test_shapes() -> None:
    shape = arena_shape(16 << 20, 16 << 10)
    assert shape.num_slots == 1024
    assert shape.data_at % PAGE == 0
    assert shape.data_at >= PAGE + 1024 * 64
    assert (16 << 20) - GRANULE < shape.file_bytes <= 16 << 20
    with pytest.raises(ConfigError, match="1MiB or more"):
        arena_shape(1 << 19, 1 << 14)
    with pytest.raises(ConfigError, match="the least is 512"):
        arena_shape(1 << 20, 100)


def test_impossible_keys() -> None:
    with pytest.raises(ValueError, match="namespace of 256 bytes"):
        full_key(bytes(256), b"a")
    for name in (b"", bytes(MAX_KEY_BYTES)):
        with pytest.raises(ValueError, match="a name has 1 to"):
            full_key(b"ns", name)
    assert not is_full_key(b"")
    assert not is_full_key(b"\x02ns")
    assert not is_full_key(b"\x00" + bytes(MAX_KEY_BYTES))
