"""Frames about one object: the same bytes as the general ones, read the same way, and nothing else taken for them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.gcache.protocol import (
    ANSWER_MAGIC,
    HEAD_BYTES,
    REQUEST_MAGIC,
    Got,
    Item,
    Op,
    Viewed,
    Want,
    pack_answer,
    pack_gots,
    pack_request,
    pack_view,
    pack_viewed,
    pack_wants,
    unpack_head,
    unpack_view,
    unpack_wants,
)
from cygnet.gcache.quick import (
    GOT_BYTES,
    VIEWED_BYTES,
    pack_get_of_one,
    pack_got_one,
    pack_view_of_one,
    pack_viewed_one,
    unpack_got_one,
    unpack_one,
    unpack_viewed_one,
)
from cygnet.gcache.record import CHUNK_BYTES

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
KEYS = st.binary(min_size=1, max_size=40).map(lambda name: b"\x03kv0" + name)
SIZES = st.integers(1, CHUNK_BYTES)


@settings(deadline=None)
@given(U64, U64, U32, U64, KEYS, U64)
def test_a_view_of_one(request_id: int, epoch: int, budget_ms: int, lease: int, key: bytes, size: int) -> None:
    frame = pack_view_of_one(request_id, epoch, budget_ms, lease, key, size)
    meta = pack_view([lease], [Want(key, size)])
    assert frame == pack_request(Op.VIEW, request_id, meta, count=1, epoch=epoch, budget_ms=budget_ms)
    assert unpack_one(memoryview(frame)) == (Op.VIEW, request_id, epoch, budget_ms, lease, size, key)


@settings(deadline=None)
@given(U64, U64, U32, KEYS, SIZES)
def test_a_get_of_one(request_id: int, epoch: int, budget_ms: int, key: bytes, size: int) -> None:
    frame = pack_get_of_one(request_id, epoch, budget_ms, key, size)
    meta = pack_wants([Want(key, size, 0, 1)])
    assert frame == pack_request(Op.GET, request_id, meta, count=1, epoch=epoch, budget_ms=budget_ms)
    assert unpack_one(memoryview(frame)) == (Op.GET, request_id, epoch, budget_ms, 0, size, key)


@settings(deadline=None)
@given(U64, U64, U32, SIZES, U64, U64)
def test_answers(request_id: int, epoch: int, slot: int, size: int, version: int, number: int) -> None:
    where = (slot, number, size, version, number)
    viewed = pack_viewed_one(request_id, epoch, *where)
    assert viewed == pack_answer(Op.VIEW, request_id, pack_viewed([Viewed(Item.OK, *where)]), count=1, epoch=epoch)
    assert len(viewed) == VIEWED_BYTES
    assert unpack_viewed_one(memoryview(viewed), request_id) == Viewed(Item.OK, *where)
    assert unpack_viewed_one(memoryview(viewed), request_id ^ 1) is None

    got = pack_got_one(request_id, epoch, size, version, number)
    meta = pack_gots([Got(Item.OK, size, version, 0, 1, number.to_bytes(8, "little"))])
    assert got == pack_answer(Op.GET, request_id, meta, count=1, epoch=epoch, body_bytes=size)
    assert len(got) == GOT_BYTES
    assert unpack_got_one(memoryview(got + b"value"), request_id, size) == number
    assert unpack_got_one(memoryview(got), request_id, size ^ 1) is None
    assert unpack_got_one(memoryview(got), request_id ^ 1, size) is None


def mutated(frame: bytes, data: st.DataObject) -> bytes:
    changed = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    return bytes(changed)[: data.draw(st.integers(HEAD_BYTES, len(changed)))]


@settings(deadline=None)
@given(KEYS, SIZES, st.data())
def test_a_request_taken_for_one_means_the_same_to_the_general_way(key: bytes, size: int, data: st.DataObject) -> None:
    """Whatever bytes are changed or missing."""
    frames = pack_view_of_one(1, 2, 3, 4, key, size), pack_get_of_one(1, 2, 3, key, size)
    frame = mutated(data.draw(st.sampled_from(frames)), data)
    asked = unpack_one(memoryview(frame))
    if asked is None:
        return
    head = unpack_head(frame, REQUEST_MAGIC)
    assert (head.op, head.request_id, head.epoch, head.budget_ms, head.count, head.body_bytes) == (*asked[:4], 1, 0)
    assert len(frame) == HEAD_BYTES + head.meta_bytes
    meta = frame[HEAD_BYTES:]
    if head.op == Op.VIEW:
        released, wants = unpack_view(meta, 1)
        assert released == (asked.released,)
    else:
        wants = unpack_wants(meta, 1)
        assert (wants[0].first_chunk, wants[0].num_chunks) == (0, 1)
    assert (wants[0].key, wants[0].value_bytes) == (asked.key, asked.value_bytes)


@settings(deadline=None)
@given(st.binary(min_size=HEAD_BYTES, max_size=200), U64, SIZES)
def test_any_bytes_are_left_to_the_general_way(tail: bytes, request_id: int, size: int) -> None:
    for magic in (REQUEST_MAGIC, ANSWER_MAGIC):
        frame = memoryview(magic + tail)
        unpack_one(frame)
        unpack_viewed_one(frame, request_id)
        unpack_got_one(frame, request_id, size)
