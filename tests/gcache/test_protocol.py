"""Frames: golden bytes, round trips, and what a hostile peer may send."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cygnet.gcache.limits import MAX_BATCH, MAX_FRAME_BYTES, MAX_META_BYTES
from cygnet.gcache.protocol import (
    ANSWER_MAGIC,
    HEAD_BYTES,
    REQUEST_MAGIC,
    SUMS_FOLLOW,
    Got,
    Head,
    Item,
    Op,
    ProtocolError,
    Put,
    Viewed,
    Want,
    pack_answer,
    pack_flags,
    pack_gots,
    pack_keys,
    pack_puts,
    pack_request,
    pack_view,
    pack_viewed,
    pack_wants,
    span_bytes,
    unpack_flags,
    unpack_gots,
    unpack_head,
    unpack_keys,
    unpack_puts,
    unpack_view,
    unpack_viewed,
    unpack_wants,
)
from cygnet.gcache.record import CHUNK_BYTES

KEYS = st.binary(min_size=1, max_size=40).map(lambda name: b"\x03kv0" + name)


def test_the_bytes_are_frozen() -> None:
    """Clients in other languages are written from these."""
    request = pack_request(Op.GET, 0x1122, b"meta", count=1, epoch=3, budget_ms=250)
    assert request.hex() == (
        "47435131" "03" "00" "0100" "2211000000000000" "0300000000000000" "fa000000" "04000000" "0000000000000000"
        "6d657461"
    )  # fmt: skip
    assert pack_answer(Op.PUT, 5, status=3, epoch=9, body_bytes=7).hex() == (
        "47435331" "04" "03" "0000" "0500000000000000" "0900000000000000" "00000000" "00000000" "0700000000000000"
    )  # fmt: skip
    key = b"\x01na"
    assert pack_keys([key]).hex() == "0300016e61"
    assert pack_wants([Want(key, 9, 1, 2)]).hex() == "090000000000000001000000020000000300016e61"
    assert pack_gots([Got(0, 9, 4, 0, 1, b"12345678")]).hex() == (
        "00000000" "00000000" "0900000000000000" "0400000000000000" "01000000" "3132333435363738"
    )  # fmt: skip
    assert pack_puts([Put(key, 9, b"12345678", 0, 1, 5, 6)]).hex() == (
        "0900000000000000" "0600000000000000" "0500000000000000" "00000000" "01000000" "0300" "016e61"
        "3132333435363738"
    )  # fmt: skip
    assert pack_flags([True, False]).hex() == "0100"
    assert pack_view([8], [Want(key)]).hex() == (
        "01000000" "0800000000000000" "ffffffffffffffff" "00000000" "00000000" "0300" "016e61"
    )  # fmt: skip
    assert pack_viewed([Viewed(0, 2, 3, 4, 5, 6)]).hex() == (
        "00000000" "02000000" "0300000000000000" "0400000000000000" "0500000000000000" "0600000000000000"
    )  # fmt: skip


@given(st.lists(KEYS, max_size=20), st.data())
def test_round_trips(keys: list[bytes], data: st.DataObject) -> None:
    count = len(keys)
    number = st.integers(0, 3)
    assert unpack_keys(pack_keys(keys), count) == keys
    wants = [Want(key, data.draw(st.integers(0, 2**64 - 1)), data.draw(number), data.draw(number)) for key in keys]
    assert unpack_wants(pack_wants(wants), count) == wants
    released = tuple(data.draw(st.lists(st.integers(0, 2**64 - 1), max_size=5)))
    assert unpack_view(pack_view(released, wants), count) == (released, wants)
    gots = [Got(Item.OK, 3 * CHUNK_BYTES, 5, 1, 2, b"s" * 16) if i % 2 else Got(Item.MISS) for i in range(count)]
    assert unpack_gots(pack_gots(gots), count) == gots
    puts = [Put(key, 2 * CHUNK_BYTES + 1, b"s" * 8, 2, 1, 10, i + 1) for i, key in enumerate(keys)]
    assert unpack_puts(pack_puts(puts), count) == puts
    bare = [Put(key, 2 * CHUNK_BYTES + 1, b"", 2, 1, 10, i + 1) for i, key in enumerate(keys)]
    assert unpack_puts(pack_puts(bare), count, SUMS_FOLLOW) == bare
    flags = [i % 3 == 0 for i in range(count)]
    assert unpack_flags(pack_flags(flags), count) == flags
    viewed = [Viewed(Item.OK, i, 1, 2, 3, 4) for i in range(count)]
    assert unpack_viewed(pack_viewed(viewed), count) == viewed


@given(st.binary(max_size=200), st.integers(0, 5))
def test_any_bytes_are_read_or_refused(meta: bytes, count: int) -> None:
    """And nothing else happens: no other error, no memory to speak of."""
    for unpack in (unpack_keys, unpack_wants, unpack_gots, unpack_puts, unpack_flags, unpack_view, unpack_viewed):
        try:
            unpack(meta, count)
        except ProtocolError:
            continue


@pytest.mark.parametrize("cut", [-1, 1])
def test_meta_of_a_wrong_length_is_refused(cut: int) -> None:
    for packed, unpack in (
        (pack_keys([b"\0a"]), unpack_keys),
        (pack_wants([Want(b"\0a")]), unpack_wants),
        (pack_gots([Got(Item.OK, 5, 1, 0, 1, bytes(8))]), unpack_gots),
        (pack_puts([Put(b"\0a", 5, bytes(8), 0, 1)]), unpack_puts),
        (pack_flags([True]), unpack_flags),
        (pack_view([1], [Want(b"\0a")]), unpack_view),
        (pack_viewed([Viewed(0)]), unpack_viewed),
    ):
        unpack(packed, 1)
        with pytest.raises(ProtocolError):
            unpack(packed[:-1] if cut < 0 else packed + b"x", 1)


@pytest.mark.parametrize(
    "head",
    [
        Head.pack(b"HTTP", 3, 0, 1, 1, 0, 0, 0, 0),
        Head.pack(ANSWER_MAGIC, 3, 0, 1, 1, 0, 0, 0, 0),
        Head.pack(REQUEST_MAGIC, 3, 0, MAX_BATCH + 1, 1, 0, 0, 0, 0),
        Head.pack(REQUEST_MAGIC, 3, 0, 1, 1, 0, 0, MAX_META_BYTES + 1, 0),
        Head.pack(REQUEST_MAGIC, 3, 0, 1, 1, 0, 0, 0, MAX_FRAME_BYTES + 1),
    ],
)
def test_heads_over_the_limits_are_refused(head: bytes) -> None:
    assert len(head) == HEAD_BYTES
    with pytest.raises(ProtocolError):
        unpack_head(head, REQUEST_MAGIC)


def test_lies_about_lengths_are_refused() -> None:
    with pytest.raises(ProtocolError, match="chunks 1 to 2"):
        unpack_gots(pack_gots([Got(Item.OK, 5, 1, 1, 1, bytes(8))]), 1)
    with pytest.raises(ProtocolError, match="chunks 0 to 2"):
        unpack_puts(pack_puts([Put(b"\0a", 5, bytes(16), 0, 2)]), 1)
    with pytest.raises(ProtocolError, match="without an upload"):
        unpack_puts(pack_puts([Put(b"\0a", 2 * CHUNK_BYTES, bytes(8), 0, 1)]), 1)
    with pytest.raises(ProtocolError, match="no name"):
        unpack_keys(pack_keys([b"\x05ab"]), 1)


def test_spans() -> None:
    assert span_bytes(0, 0, 0) == 0
    assert span_bytes(5, 0, 1) == 5
    assert span_bytes(CHUNK_BYTES + 5, 1, 1) == 5
    assert span_bytes(3 * CHUNK_BYTES, 1, 2) == 2 * CHUNK_BYTES
