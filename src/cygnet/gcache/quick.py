"""Whole frames about one object, packed and read with one call each. Pure.

They are the same bytes that `gcache.protocol` makes of a list of one; a request for one object costs so little
otherwise that a general frame's parts would be most of it. Whatever is not exactly such a frame is left to the general
way: these functions say `None`.

    VIEW    of one object, with one lease given back
    GET     of an object of one chunk, whole
    PUT     of an object of one chunk, whole
"""

from struct import Struct
from typing import NamedTuple

from cygnet.gcache.limits import MAX_KEY_BYTES
from cygnet.gcache.protocol import (
    ANSWER_MAGIC,
    ANY,
    HEAD_BYTES,
    REQUEST_MAGIC,
    ROUTED,
    SUMS_FOLLOW,
    Item,
    Op,
    Status,
    Viewed,
)
from cygnet.gcache.record import CHUNK_BYTES, is_full_key

_HEAD = "<4sBBHQQIIQ"
_AskView = Struct(_HEAD + "IQ" + "QIIH")  # head | one lease | what is wanted; the key follows
_Viewed = Struct(_HEAD + "BxxxIQQQQ")  # head | where it lies
_AskGet = Struct(_HEAD + "QIIH")  # head | what is wanted; the key follows
_AskPut = Struct(_HEAD + "QQQIIH")  # head | what comes; the key follows, its checksum here or behind the value
_AskRoutedPut = Struct(_HEAD + "Q" + "QQQIIH")  # the same behind the place of the key's root
_Got = Struct(_HEAD + "BxxxIQQI" + "Q")  # head | what comes | its checksum; the value follows
VIEWED_BYTES, GOT_BYTES = _Viewed.size, _Got.size


class Asked(NamedTuple):
    """A request about one object."""

    op: int
    request_id: int
    epoch: int
    budget_ms: int
    released: int
    """Lease given back; 0, which is nobody's, for none."""
    value_bytes: int
    key: bytes


def pack_view_of_one(
    request_id: int, epoch: int, budget_ms: int, released: int, key: bytes, value_bytes: int = ANY
) -> bytes:
    """Ask where `key` lies, and give back a lease."""
    size = len(key)
    head = (REQUEST_MAGIC, Op.VIEW, 0, 1, request_id, epoch, budget_ms, _AskView.size - HEAD_BYTES + size, 0)
    return _AskView.pack(*head, 1, released, value_bytes, 0, 0, size) + key


def pack_get_of_one(request_id: int, epoch: int, budget_ms: int, key: bytes, value_bytes: int) -> bytes:
    """Ask for all of `key`, which has one chunk."""
    size = len(key)
    head = (REQUEST_MAGIC, Op.GET, 0, 1, request_id, epoch, budget_ms, _AskGet.size - HEAD_BYTES + size, 0)
    return _AskGet.pack(*head, value_bytes, 0, 1, size) + key


class PutAsked(NamedTuple):
    """A request to store one object of one chunk."""

    request_id: int
    epoch: int
    budget_ms: int
    key: bytes
    value_bytes: int
    ttl_ms: int
    checksum: bytes
    """Packed; empty: it comes behind the value."""
    root: int
    frame_bytes: int
    """Before the value."""


def pack_put_of_one(
    request_id: int,
    epoch: int,
    budget_ms: int,
    key: bytes,
    value_bytes: int,
    ttl_ms: int,
    root: int,
    checksum: bytes,
) -> bytes:
    """Store an object of one chunk. Without its packed checksum, that comes behind the value."""
    flags = (ROUTED if root else 0) | (0 if checksum else SUMS_FOLLOW)
    size = len(key)
    meta_bytes = _AskPut.size - HEAD_BYTES + size + (8 if root else 0) + len(checksum)
    head = (REQUEST_MAGIC, Op.PUT, flags, 1, request_id, epoch, budget_ms, meta_bytes)
    body_bytes = value_bytes + 8 - len(checksum)
    if not root:
        return _AskPut.pack(*head, body_bytes, value_bytes, 0, ttl_ms, 0, 1, size) + key + checksum
    return _AskRoutedPut.pack(*head, body_bytes, root, value_bytes, 0, ttl_ms, 0, 1, size) + key + checksum


def unpack_put_of_one(frame: memoryview) -> PutAsked | None:
    """What a frame that begins so asks to store, if it is one object of one chunk."""
    if frame[4] != Op.PUT or frame[5] & ~(ROUTED | SUMS_FOLLOW):
        return None
    ask = _AskRoutedPut if frame[5] & ROUTED else _AskPut
    at = ask.size
    if len(frame) <= at:
        return None
    fields = ask.unpack_from(frame)
    (magic, _, flags, count, request_id, epoch, budget_ms, meta_bytes, body_bytes) = fields[:9]
    root = fields[9] if flags & ROUTED else 0
    (value_bytes, upload, ttl_ms, first, chunks, size) = fields[-6:]
    late = flags & SUMS_FOLLOW
    end = at + size + (0 if late else 8)
    if count != 1 or magic != REQUEST_MAGIC or upload or first or chunks != 1 or not 0 < value_bytes <= CHUNK_BYTES:
        return None
    if meta_bytes != end - HEAD_BYTES or body_bytes != value_bytes + (8 if late else 0) or len(frame) < end:
        return None
    key = bytes(frame[at : at + size])
    if not is_full_key(key):
        return None
    checksum = bytes(frame[at + size : end])
    return PutAsked(request_id, epoch, budget_ms, key, value_bytes, ttl_ms, checksum, root, end)


def unpack_one(frame: memoryview) -> Asked | None:
    """What a frame asks about one object."""
    op = frame[4]
    released, one = 0, 1
    if op == Op.GET:
        at = _AskGet.size
        if len(frame) <= at:
            return None
        (magic, _, _, count, request_id, epoch, budget_ms, meta_bytes, body_bytes, value_bytes, first, one, size) = (
            _AskGet.unpack_from(frame)
        )
        if not 0 < value_bytes <= CHUNK_BYTES or first:
            return None
    elif op == Op.VIEW:
        at = _AskView.size
        if len(frame) <= at:
            return None
        fields = _AskView.unpack_from(frame)
        (magic, _, _, count, request_id, epoch, budget_ms, meta_bytes, body_bytes) = fields[:9]
        (one, released, value_bytes, _, _, size) = fields[9:]
    else:
        return None
    if count != 1 or one != 1 or magic != REQUEST_MAGIC or body_bytes or size > MAX_KEY_BYTES:
        return None
    if len(frame) != at + size or meta_bytes != at + size - HEAD_BYTES:
        return None
    key = bytes(frame[at:])
    return Asked(op, request_id, epoch, budget_ms, released, value_bytes, key) if is_full_key(key) else None


def pack_viewed_one(
    request_id: int, epoch: int, slot: int, offset: int, value_bytes: int, stamp: int, lease: int
) -> bytes:
    """The answer to a view: where the object lies."""
    head = (ANSWER_MAGIC, Op.VIEW, Status.OK, 1, request_id, epoch, 0, VIEWED_BYTES - HEAD_BYTES, 0)
    return _Viewed.pack(*head, Item.OK, slot, offset, value_bytes, stamp, lease)


def unpack_viewed_one(frame: memoryview, request_id: int) -> Viewed | None:
    """What the answer to `request_id` says, if it is one about one object."""
    if len(frame) != VIEWED_BYTES:
        return None
    (magic, op, code, count, answered, _, _, meta_bytes, body_bytes, *viewed) = _Viewed.unpack_from(frame)
    if answered != request_id or op != Op.VIEW or code != Status.OK or count != 1 or magic != ANSWER_MAGIC:
        return None
    return Viewed(*viewed) if (meta_bytes, body_bytes) == (VIEWED_BYTES - HEAD_BYTES, 0) else None


def pack_got_one(request_id: int, epoch: int, value_bytes: int, version: int, checksum: int) -> bytes:
    """The answer to a get, before the value."""
    head = (ANSWER_MAGIC, Op.GET, Status.OK, 1, request_id, epoch, 0, GOT_BYTES - HEAD_BYTES, value_bytes)
    return _Got.pack(*head, Item.OK, 0, value_bytes, version, 1, checksum)


def unpack_got_one(frame: memoryview, request_id: int, value_bytes: int) -> int | None:
    """Checksum of the value that follows, if the frame begins the answer to `request_id` with all of an object."""
    if len(frame) < GOT_BYTES:
        return None
    (magic, op, code, count, answered, _, _, meta_bytes, body_bytes, item, first, found, _, chunks, checksum) = (
        _Got.unpack_from(frame)
    )
    if answered != request_id or op != Op.GET or code != Status.OK or count != 1 or magic != ANSWER_MAGIC:
        return None
    if (meta_bytes, body_bytes, found) != (GOT_BYTES - HEAD_BYTES, value_bytes, value_bytes):
        return None
    return int(checksum) if (item, first, chunks) == (Item.OK, 0, 1) else None
