"""Frames of the native protocol, as `docs/gcache-protocol.md` describes them. Pure: bytes in, values out.

All numbers are little-endian. A frame is a head of 40 bytes, `meta_bytes` of what the tables below say, and
`body_bytes` of values, one after another. Answers carry the request's id; a connection's answers come in the order of
its requests.

    request  magic "GCQ1", op, flags, count, id, epoch, budget in ms, meta bytes, body bytes
    answer   magic "GCS1", op, status, count, id, epoch, 0, meta bytes, body bytes
"""

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from struct import error as StructError

import msgspec

from cygnet.gcache.limits import MAX_BATCH, MAX_FRAME_BYTES, MAX_META_BYTES, MAX_VALUE_BYTES
from cygnet.gcache.record import CHUNK_BYTES, is_full_key, num_chunks
from cygnet.kv.store import Outcome

REQUEST_MAGIC, ANSWER_MAGIC = b"GCQ1", b"GCS1"
Head = Struct("<4sBBHQQIIQ")
HEAD_BYTES = Head.size
ANY = (1 << 64) - 1
"""Instead of a value's size: whatever it is."""
PROTOCOL_VERSION = 1


class Op(IntEnum):
    """What a frame asks for. Values never change meaning."""

    HELLO = 1
    PING = 2
    GET = 3
    PUT = 4
    EXISTS = 5
    DELETE = 6
    CLEAR = 7
    VIEW = 8
    STAT = 9
    AUDIT = 10
    MEMBERS = 16
    ADOPT = 17
    DRAIN = 18
    ATTACH = 19
    TICKET = 20


NO_BLOCK = (1 << 64) - 1
"""Answer to ATTACH: there is none."""
PLACED = frozenset((Op.GET, Op.PUT, Op.EXISTS, Op.DELETE, Op.VIEW))
"""What a server in a cluster answers in its own epoch only."""
CHANGES = frozenset((Op.PUT, Op.DELETE))
"""Of these, what stores or removes."""


class Status(IntEnum):
    """What became of a frame as a whole."""

    OK = 0
    BAD_REQUEST = 1
    """Meta is a text that says why; the connection is closed."""
    DENIED = 2
    """No token or a wrong one; the connection is closed."""
    WRONG_EPOCH = 3
    """Nothing was done; the answer's epoch is the server's, and meta its view of the cluster."""
    BUSY = 4
    """Too many connections; this one is closed."""


class Item(IntEnum):
    """What became of one key."""

    OK = 0
    MISS = 1
    TORN = 2
    FULL = 3
    TIMED_OUT = 4
    FAILED = 5
    PART = 6
    """A slice is stored; the value is not complete yet."""


OUTCOMES = {
    Item.OK: Outcome.OK,
    Item.MISS: Outcome.MISS,
    Item.TORN: Outcome.TORN,
    Item.FULL: Outcome.FULL,
    Item.TIMED_OUT: Outcome.TIMED_OUT,
    Item.FAILED: Outcome.FAILED,
    Item.PART: Outcome.FAILED,
}
"""What a caller is told. A slice that never became a value is a failure."""

TOUCH = 1
"""Flag of EXISTS: it is a use."""
EVERYTHING = 1
"""Flag of CLEAR: all namespaces."""
SUMS_FOLLOW = 1
"""Flag of PUT: checksums are not in meta but end the body, so that they can be made while values are on their way."""
ROUTED = 2
"""Flag of PUT: meta begins with a u64, the place of the root of all its keys (`placement.root_place`)."""
KEEP = 4
"""Flag of PUT: what is there already stays. Meta begins with a u64, a ticket (`gcache.changes`)."""
NOT_DONE = 2
"""In place of DELETE's flag: others were busy with the object until the deadline, and it is still there."""
UNDO = 1
"""Flag of DRAIN: the server shall stay."""


class ProtocolError(ValueError):
    """A peer sent what is no frame; the connection can't be used any more."""


class FrameHead(msgspec.Struct, frozen=True, gc=False):
    """Head of a frame. `code` is the request's flags or the answer's status."""

    op: int
    code: int
    count: int
    request_id: int
    epoch: int
    budget_ms: int
    meta_bytes: int
    body_bytes: int


def pack_request(
    op: Op,
    request_id: int,
    meta: bytes = b"",
    *,
    flags: int = 0,
    count: int = 0,
    epoch: int = 0,
    budget_ms: int = 0,
    body_bytes: int = 0,
) -> bytes:
    """Head and meta of a request; the body follows."""
    head = Head.pack(REQUEST_MAGIC, op, flags, count, request_id, epoch, budget_ms, len(meta), body_bytes)
    return head + meta


def pack_answer(
    op: int,
    request_id: int,
    meta: bytes = b"",
    *,
    status: int = Status.OK,
    count: int = 0,
    epoch: int = 0,
    body_bytes: int = 0,
) -> bytes:
    """Head and meta of an answer; the body follows."""
    return Head.pack(ANSWER_MAGIC, op, status, count, request_id, epoch, 0, len(meta), body_bytes) + meta


def unpack_head(data: "bytes | bytearray | memoryview", magic: bytes) -> FrameHead:
    """Read a head, and check what it claims against the limits. Raises `ProtocolError`."""
    found, op, code, count, request_id, epoch, budget_ms, meta_bytes, body_bytes = Head.unpack_from(data)
    if found != magic:
        raise ProtocolError(
            f"a frame begins with {found!r} instead of {magic!r}: the peer does not speak this protocol"
        )
    if count > MAX_BATCH or meta_bytes > MAX_META_BYTES or body_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame with {count} keys, {meta_bytes} + {body_bytes} bytes is over the limits")
    return FrameHead(op, code, count, request_id, epoch, budget_ms, meta_bytes, body_bytes)


# --- lists of keys: DELETE

_KeyHead = Struct("<H")


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Per key: u16 length, key."""
    return b"".join([part for key in keys for part in (_KeyHead.pack(len(key)), key)])


def unpack_keys(meta: bytes, count: int) -> list[bytes]:
    """What `pack_keys` made."""
    keys, at = [], 0
    for _ in range(count):
        (length,) = _unpack(_KeyHead, meta, at)
        at += _KeyHead.size
        keys.append(_key(meta, at, length))
        at += length
    _ends(meta, at)
    return keys


def _key(meta: bytes, at: int, length: int) -> bytes:
    key = meta[at : at + length]
    if len(key) != length or not is_full_key(key):
        raise ProtocolError("a key is cut short, or has no name behind its namespace")
    return key


def _unpack(what: Struct, meta: bytes, at: int) -> tuple[int, ...]:
    try:
        return what.unpack_from(meta, at)
    except StructError:
        raise ProtocolError("a frame's meta part ends too early") from None


def _ends(meta: bytes, at: int) -> None:
    if at != len(meta):
        raise ProtocolError(f"a frame's meta part has {len(meta)} bytes where {at} are expected")


# --- GET

_Want = Struct("<QIIH")
_Got = Struct("<BxxxIQQI")


class Want(msgspec.Struct, frozen=True, gc=False):
    """Chunks of one object. `num_chunks` 0: to the end."""

    key: bytes
    value_bytes: int = ANY
    """An object of another size is a miss."""
    first_chunk: int = 0
    num_chunks: int = 0


class Got(msgspec.Struct, frozen=True, gc=False):
    """Answer to a `Want`. With `OK` the chunks' bytes are in the body, and `sums` are their packed checksums."""

    status: int
    value_bytes: int = 0
    version: int = 0
    first_chunk: int = 0
    num_chunks: int = 0
    sums: bytes = b""

    @property
    def body_bytes(self) -> int:
        """Bytes in the body."""
        return span_bytes(self.value_bytes, self.first_chunk, self.num_chunks) if self.status == Item.OK else 0


def span_bytes(value_bytes: int, first_chunk: int, count: int) -> int:
    """Bytes of `count` chunks of a value from `first_chunk` on."""
    return max(0, min(value_bytes, (first_chunk + count) * CHUNK_BYTES) - first_chunk * CHUNK_BYTES)


def pack_wants(wants: Sequence[Want]) -> bytes:
    """Per object: u64 size or ANY, u32 first chunk, u32 chunks, u16 length of the key, key."""
    parts = []
    for want in wants:
        parts.append(_Want.pack(want.value_bytes, want.first_chunk, want.num_chunks, len(want.key)))
        parts.append(want.key)
    return b"".join(parts)


def unpack_wants(meta: bytes, count: int) -> list[Want]:
    """What `pack_wants` made."""
    wants, at = [], 0
    for _ in range(count):
        value_bytes, first, chunks, length = _unpack(_Want, meta, at)
        at += _Want.size
        wants.append(Want(_key(meta, at, length), value_bytes, first, chunks))
        at += length
    _ends(meta, at)
    return wants


def pack_gots(gots: Sequence[Got]) -> bytes:
    """Per object: u8 status, u32 first chunk, u64 size, u64 version, u32 chunks, u64 checksum of each chunk."""
    parts = []
    for got in gots:
        parts.append(_Got.pack(got.status, got.first_chunk, got.value_bytes, got.version, got.num_chunks))
        parts.append(got.sums)
    return b"".join(parts)


def unpack_gots(meta: bytes, count: int) -> list[Got]:
    """What `pack_gots` made."""
    gots, at = [], 0
    for _ in range(count):
        status, first, value_bytes, version, chunks = _unpack(_Got, meta, at)
        at += _Got.size
        if value_bytes > MAX_VALUE_BYTES or first + chunks > num_chunks(value_bytes):
            raise ProtocolError(f"an answer with chunks {first} to {first + chunks} of {value_bytes} bytes")
        num_sums = chunks if status == Item.OK else 0
        sums = meta[at : at + 8 * num_sums]
        if len(sums) != 8 * num_sums:
            raise ProtocolError("a frame's meta part ends too early")
        at += len(sums)
        gots.append(Got(status, value_bytes, version, first, chunks, sums))
    _ends(meta, at)
    return gots


# --- PUT

_Put = Struct("<QQQIIH")


class Put(msgspec.Struct, frozen=True, gc=False):
    """Chunks of an object to store, whose bytes are in the body. Checksums are made by whoever puts."""

    key: bytes
    value_bytes: int
    sums: bytes
    """Packed, one for each chunk that is sent."""
    first_chunk: int = 0
    num_chunks: int = 0
    ttl_ms: int = 0
    """0: for ever."""
    upload: int = 0
    """Names the slices of one value, at random; 0: all of it is here."""
    root: int = 0
    """Place of its root (`placement.root_place`), of all objects of a frame; 0: it has none."""
    keep: bool = False
    """What is there already stays, and this is given up; of all objects of a frame."""
    ticket: int = 0
    """With `keep`: from before the objects were sent; of all objects of a frame."""

    @property
    def body_bytes(self) -> int:
        """Bytes in the body."""
        return span_bytes(self.value_bytes, self.first_chunk, self.num_chunks)


def pack_puts(puts: Sequence[Put]) -> bytes:
    """Per object: u64 size, u64 upload, u64 ttl in ms, u32 first chunk, u32 chunks, u16 length of the key, key, sums.

    The sums are u64, one for each chunk sent.
    """
    parts: list[bytes] = []
    for put in puts:
        head = _Put.pack(put.value_bytes, put.upload, put.ttl_ms, put.first_chunk, put.num_chunks, len(put.key))
        parts += (head, put.key, put.sums)
    return b"".join(parts)


def unpack_puts(meta: bytes, count: int, flags: int = 0) -> list[Put]:
    """What `pack_puts` made, as the frame's flags say: without sums, or behind a ticket and the place of the root."""
    ticket, meta = unpack_number(meta) if flags & KEEP else (0, meta)
    root, meta = unpack_number(meta) if flags & ROUTED else (0, meta)
    puts, at = [], 0
    for _ in range(count):
        value_bytes, upload, ttl_ms, first, chunks, length = _unpack(_Put, meta, at)
        at += _Put.size
        key = _key(meta, at, length)
        at += length
        if value_bytes > MAX_VALUE_BYTES or first + chunks > num_chunks(value_bytes):
            raise ProtocolError(f"a put of chunks {first} to {first + chunks} of {value_bytes} bytes")
        if not upload and (first or chunks != num_chunks(value_bytes)):
            raise ProtocolError("a put of part of a value without an upload's name")
        num_sums = 0 if flags & SUMS_FOLLOW else chunks
        sums = meta[at : at + 8 * num_sums]
        if len(sums) != 8 * num_sums:
            raise ProtocolError("a frame's meta part ends too early")
        at += len(sums)
        puts.append(Put(key, value_bytes, sums, first, chunks, ttl_ms, upload, root, bool(flags & KEEP), ticket))
    _ends(meta, at)
    return puts


_Number = Struct("<Q")


def pack_number(number: int) -> bytes:
    """u64: what the meta part of a KEEP or ROUTED put begins with, the epoch that MEMBERS asks with, a ticket."""
    return _Number.pack(number)


def unpack_number(meta: bytes) -> tuple[int, bytes]:
    """That number, and the rest."""
    (number,) = _unpack(_Number, meta, 0)
    return number, meta[_Number.size :]


# --- EXISTS (asks with wants), DELETE


def pack_flags(flags: "Sequence[bool | None]") -> bytes:
    """Per key: u8 0 or 1; for `None` NOT_DONE."""
    return bytes([NOT_DONE if flag is None else flag for flag in flags])


def unpack_flags(meta: bytes, count: int) -> "list[bool | None]":
    """What `pack_flags` made."""
    _ends(meta, count)
    return [None if flag == NOT_DONE else flag != 0 for flag in meta[:count]]


# --- VIEW

_ViewHead = Struct("<I")
_Lease = Struct("<Q")
_Viewed = Struct("<BxxxIQQQQ")


class Viewed(msgspec.Struct, frozen=True, gc=False):
    """Where an object lies in the arena's file, for as long as the lease lasts and word 0 of its slot is `stamp`."""

    status: int
    slot: int = 0
    offset: int = 0
    value_bytes: int = 0
    stamp: int = 0
    lease: int = 0


def pack_view(released: Sequence[int], wants: Sequence[Want]) -> bytes:
    """u32 number of leases given back, u64 each; then as for GET."""
    return _ViewHead.pack(len(released)) + Struct(f"<{len(released)}Q").pack(*released) + pack_wants(wants)


def unpack_view(meta: bytes, count: int) -> tuple[tuple[int, ...], list[Want]]:
    """What `pack_view` made."""
    (num_released,) = _unpack(_ViewHead, meta, 0)
    at = _ViewHead.size + num_released * _Lease.size
    if num_released > MAX_BATCH:
        raise ProtocolError(f"{num_released} leases given back at once, at most {MAX_BATCH}")
    released = _unpack(Struct(f"<{num_released}Q"), meta, _ViewHead.size)
    return released, unpack_wants(meta[at:], count)


def pack_viewed(viewed: Sequence[Viewed]) -> bytes:
    """Per object: u8 status, u32 slot, u64 offset, u64 size, u64 stamp, u64 lease."""
    return b"".join([_Viewed.pack(v.status, v.slot, v.offset, v.value_bytes, v.stamp, v.lease) for v in viewed])


def unpack_viewed(meta: bytes, count: int) -> list[Viewed]:
    """What `pack_viewed` made."""
    _ends(meta, _Viewed.size * count)
    return [Viewed(*_Viewed.unpack_from(meta, i * _Viewed.size)) for i in range(count)]
