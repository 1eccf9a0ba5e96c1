"""One connected client: its frames, one after another, on one thread."""

import hmac
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from cygnet.base.errors import ConfigError, CygnetError
from cygnet.gcache.arena import Entry
from cygnet.gcache.limits import MAX_FRAME_BYTES
from cygnet.gcache.protocol import (
    ANY,
    CHANGES,
    EVERYTHING,
    NO_BLOCK,
    PLACED,
    REQUEST_MAGIC,
    ROUTED,
    SUMS_FOLLOW,
    TOUCH,
    UNDO,
    FrameHead,
    Got,
    Item,
    Op,
    ProtocolError,
    Put,
    Status,
    Viewed,
    Want,
    pack_answer,
    pack_flags,
    pack_gots,
    pack_number,
    pack_viewed,
    unpack_keys,
    unpack_number,
    unpack_puts,
    unpack_view,
    unpack_wants,
)
from cygnet.gcache.record import CHUNK_BYTES, chunk_seed, num_chunks, pack_sums
from cygnet.gcache.runtime.greeting import Hello
from cygnet.gcache.runtime.service import DEFAULT_BUDGET_S, Service
from cygnet.gcache.runtime.shortcuts import answer_one
from cygnet.gcache.runtime.small_puts import put_compiled, put_small
from cygnet.gcache.runtime.uploads import Upload, commit
from cygnet.gcache.runtime.wire import DeadlineError, PeerClosedError, Piece, Wire

U64_MASK = (1 << 64) - 1
FOREVER = float("inf")
SINK_BYTES = 1 << 20
MAX_HELLO_BYTES = 4096


class DeniedError(Exception):
    """No token, or a wrong one."""


class Connection:
    """Reads frames, carries them out, answers. All it has pinned is let go when it ends, however it ends."""

    def __init__(self, sock: socket.socket, owner: int, service: Service) -> None:
        self._wire = Wire(sock, REQUEST_MAGIC, service.watchdog, service.core)
        self._block = None if service.index is None else service.index.take_block()
        """Of the shared index: holds what is being sent without having been pinned, or what the client looks at."""
        self._is_attached = False
        self._owner = owner
        self._service = service
        self._cache = service.cache
        self._known = not service.token
        self._sink = memoryview(b"")
        self._handlers: dict[int, Callable[[FrameHead, bytes, float], None]] = {
            Op.HELLO: self._hello,
            Op.PING: self._ping,
            Op.GET: self._get,
            Op.PUT: self._put,
            Op.EXISTS: self._exists,
            Op.DELETE: self._delete,
            Op.CLEAR: self._clear,
            Op.VIEW: self._view,
            Op.STAT: self._stat,
            Op.AUDIT: self._audit,
            Op.MEMBERS: self._members,
            Op.ADOPT: self._adopt,
            Op.DRAIN: self._drain_server,
            Op.ATTACH: self._attach,
            Op.TICKET: self._ticket,
        }

    def run(self) -> None:
        """Serve until the client leaves, breaks the rules or is too slow."""
        try:
            while True:
                self._serve_one()
        except (PeerClosedError, DeadlineError, OSError):
            pass
        finally:
            self._wire.close()  # first: its client takes that for the end of what it holds
            if self._block is not None and self._service.index is not None:
                self._service.index.give_back(self._block)
            self._cache.memory.end_leases(self._owner)

    def _serve_one(self) -> None:
        wire = self._wire
        wire.arm(FOREVER)  # an idle connection is fine
        if self._block is not None and self._known and not self._is_attached and self._service.index is not None:
            timeout_ms = int(self._cache.limits.frame_timeout_s * 1000)
            wire.serve_gets(self._service.index.table, self._block, timeout_ms)
        frame = wire.await_head(self._cache.limits.frame_timeout_s)
        if self._known and answer_one(wire, self._service, self._owner, frame):
            return
        try:
            head = wire.read_head()
        except ProtocolError as error:
            self._refuse(0, 0, Status.BAD_REQUEST, str(error))
        wire.arm(time.monotonic() + self._cache.limits.frame_timeout_s)
        if not self._known and (head.op != Op.HELLO or head.meta_bytes > MAX_HELLO_BYTES):
            # Strangers get no memory.
            self._refuse(head.op, head.request_id, Status.DENIED, "the first frame is HELLO with the server's token")
        meta = wire.read_bytes(head.meta_bytes)
        deadline = time.monotonic() + (head.budget_ms / 1000 if head.budget_ms else DEFAULT_BUDGET_S)
        handler = self._handlers.get(head.op)
        try:
            if handler is None:
                raise ProtocolError(f"unknown operation {head.op}")
            if head.body_bytes and head.op != Op.PUT:
                raise ProtocolError(f"operation {head.op} has no body")
            if not self._service.cluster.name or head.op not in PLACED:
                handler(head, meta, deadline)
            else:
                self._in_epoch(handler, head, meta, deadline)
        except ProtocolError as error:
            self._refuse(head.op, head.request_id, Status.BAD_REQUEST, str(error))
        except DeniedError as error:
            self._refuse(head.op, head.request_id, Status.DENIED, str(error))

    def _refuse(self, op: int, request_id: int, status: Status, why: str) -> None:
        self._wire.arm(time.monotonic() + 1.0)
        self._wire.send([pack_answer(op, request_id, why.encode(), status=status, epoch=self._service.cluster.epoch)])
        raise PeerClosedError(why)

    def _answer(
        self, head: FrameHead, meta: bytes = b"", body: Sequence[memoryview] = (), status: Status = Status.OK
    ) -> None:
        wire = self._wire
        wire.arm(time.monotonic() + self._cache.limits.frame_timeout_s)
        packed = pack_answer(
            head.op,
            head.request_id,
            meta,
            status=status,
            count=head.count,
            epoch=self._service.cluster.epoch,
            body_bytes=sum(map(len, body)),
        )
        wire.send([packed, *body])

    # --- frames without values

    def _in_epoch(
        self, handler: Callable[[FrameHead, bytes, float], None], head: FrameHead, meta: bytes, deadline: float
    ) -> None:
        """In a cluster: do it if the request is of this server's epoch."""
        cluster = self._service.cluster
        if head.op not in CHANGES and cluster.answers(head.epoch):
            handler(head, meta, deadline)
            return
        with cluster.changing(head.epoch) as welcome:
            if welcome:
                handler(head, meta, deadline)
                return
        self._drain(head.body_bytes)
        self._answer(head, cluster.encoded, status=Status.WRONG_EPOCH)

    def _members(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        known, _ = unpack_number(meta)
        cluster = self._service.cluster
        self._answer(head, cluster.encoded if cluster.epoch > known else b"")

    def _adopt(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        try:
            self._service.cluster.adopt_encoded(meta)
        except ConfigError as error:
            raise ProtocolError(str(error)) from None
        self._answer(head)

    def _drain_server(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        try:
            answer = msgspec.json.encode(self._service.drain(meta.decode(errors="replace"), bool(head.code & UNDO)))
        except CygnetError as error:
            answer = str(error).encode()
        self._answer(head, answer)

    def _hello(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        try:
            hello = msgspec.json.decode(meta, type=Hello)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a HELLO that can't be read: {error}") from None
        if not hmac.compare_digest(hello.token.encode(), self._service.token.encode()):
            raise DeniedError("the token is not this server's")
        self._known = True
        self._answer(head, msgspec.json.encode(self._service.info))

    def _attach(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        self._is_attached = self._block is not None
        self._answer(head, pack_number(NO_BLOCK if self._block is None else self._block))

    def _ping(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        self._answer(head)

    def _exists(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        touch = bool(head.code & TOUCH)
        flags = [
            self._cache.exists(want.key, None if want.value_bytes == ANY else want.value_bytes, touch=touch)
            for want in unpack_wants(meta, head.count)
        ]
        self._answer(head, pack_flags(flags))

    def _delete(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        flags = [self._cache.remove(key, deadline) for key in unpack_keys(meta, head.count)]
        self._answer(head, pack_flags(flags))

    def _clear(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        count = self._cache.clear(None if head.code & EVERYTHING else meta, deadline)
        self._answer(head, count.to_bytes(8, "little"))

    def _stat(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        self._answer(head, msgspec.json.encode(self._service.stats()))

    def _audit(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        self._answer(head, msgspec.json.encode(self._cache.audit()[:1000]))

    def _ticket(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        self._answer(head, pack_number(self._cache.memory.ticket()))

    # --- values out

    def _get(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        cache = self._cache
        wants = unpack_wants(meta, head.count)
        gots: list[Got] = []
        body: list[memoryview] = []
        room = MAX_FRAME_BYTES
        found = cache.acquire_all([want.key for want in wants], deadline)
        try:
            for want, entry in zip(wants, found, strict=True):
                got, part = self._chunks(entry, want.value_bytes, want.first_chunk, want.num_chunks, room)
                gots.append(got)
                if part:
                    body.append(part)
                    room -= len(part)
            cache.counts.got_all([got.status for got in gots], MAX_FRAME_BYTES - room)
            self._answer(head, pack_gots(gots), body)
        finally:
            cache.memory.release([entry for entry in found if isinstance(entry, Entry)])

    def _chunks(
        self, entry: Entry | Item, value_bytes: int, first: int, count: int, room: int
    ) -> tuple[Got, memoryview]:
        """What of an object was asked for. A size that is not its own is a miss, and told."""
        if isinstance(entry, Item):
            return Got(entry), memoryview(b"")
        if value_bytes not in (ANY, entry.value_bytes):
            return Got(Item.MISS, entry.value_bytes), memoryview(b"")
        arena = self._cache.arena
        if 0 < entry.value_bytes <= CHUNK_BYTES and not first and entry.value_bytes <= room:
            return Got(Item.OK, entry.value_bytes, entry.version, 0, 1, arena.sums(entry, 0, 1)), arena.value(entry)
        chunks = num_chunks(entry.value_bytes)
        first = min(first, chunks)
        count = min(count or chunks, chunks - first)
        part = arena.value(entry)[first * CHUNK_BYTES : (first + count) * CHUNK_BYTES]
        if len(part) > room:
            return Got(Item.FULL, entry.value_bytes), memoryview(b"")
        sums = arena.sums(entry, first, count)
        return Got(Item.OK, entry.value_bytes, entry.version, first, count, sums), part

    def _view(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        released, wants = unpack_view(meta, head.count)
        leased = self._cache.memory.lease([want.key for want in wants], self._owner, released)
        viewed = [
            self._view_slowly(want, deadline) if found is None else self._viewed(want, *found)
            for want, found in zip(wants, leased, strict=True)
        ]
        self._answer(head, pack_viewed(viewed))

    def _view_slowly(self, want: Want, deadline: float) -> Viewed:
        """An object that is not in memory, or not checked yet."""
        entry = self._cache.acquire(want.key, deadline)
        if isinstance(entry, Item):
            self._cache.counts.got(entry, 0)
            return Viewed(entry)
        leased = self._cache.memory.lease([want.key], self._owner, ())[0]
        self._cache.memory.release([entry])
        if leased is None:
            self._cache.counts.got(Item.FAILED, 0)
            return Viewed(Item.FAILED)
        return self._viewed(want, *leased)

    def _viewed(self, want: Want, entry: Entry, lease: int) -> Viewed:
        if want.value_bytes not in (ANY, entry.value_bytes):
            self._cache.memory.lease((), self._owner, (lease,))
            return Viewed(Item.MISS)
        return Viewed(Item.OK, entry.slot, self._cache.arena.value_offset(entry), entry.value_bytes, entry.stamp, lease)

    # --- values in

    def _put(self, head: FrameHead, meta: bytes, deadline: float) -> None:
        is_small = head.count > 1 and not head.code & ~ROUTED and head.body_bytes <= SINK_BYTES
        if is_small and self._service.core is not None:
            data = self._sink_of(head.body_bytes)
            self._wire.read_pieces([Piece(data, checked=False)] if len(data) else [])
            stored = put_compiled(self._cache, self._service.core, head, meta, data, deadline)
            if stored is not None:
                self._answer(head, bytes(stored))
                return
            self._wire.unread(data)
        puts = unpack_puts(meta, head.count, head.code)
        late = head.code & SUMS_FOLLOW
        sums_bytes = 8 * sum(put.num_chunks for put in puts) if late else 0
        if sum(put.body_bytes for put in puts) + sums_bytes != head.body_bytes:
            raise ProtocolError("a PUT whose body is not as long as its objects")
        special = late or any(put.upload or put.keep for put in puts)
        if len(puts) > 1 and not special and head.body_bytes <= SINK_BYTES:
            data = self._sink_of(head.body_bytes)
            self._wire.read_pieces([Piece(data, checked=False)])
            self._answer(head, bytes(put_small(self._cache, puts, data, deadline)))
            return
        arriving: list[_Arriving] = []
        try:
            for put in puts:
                arriving.append(_Arriving(put, self._place(put, deadline)))
            pieces = [piece for one in arriving for piece in self._pieces(one)]
            self._wire.read_pieces(pieces)
            if late:
                for one in arriving:
                    one.sums = self._wire.read_bytes(8 * one.put.num_chunks)
            items = [self._end(one, deadline) for one in arriving]
        finally:
            for one in arriving:
                if not one.ended:
                    self._cut_short(one, deadline)
        self._answer(head, bytes(items))

    def _place(self, put: Put, deadline: float) -> "Entry | Upload | Item":
        if put.keep and self._cache.exists(put.key, None, touch=False):
            return Item.OK
        if not put.upload:
            return self._cache.reserve(put.key, put.value_bytes, put.ttl_ms, deadline, put.root)
        return self._service.uploads.begin_slice(put, deadline)

    def _pieces(self, one: "_Arriving") -> list[Piece]:
        put, place = one.put, one.place
        if isinstance(place, Item):
            return [Piece(part, checked=False) for part in self._sinks(put.body_bytes)]
        entry = place.entry if isinstance(place, Upload) else place
        at = put.first_chunk * CHUNK_BYTES
        target = self._cache.arena.value(entry)[at : at + put.body_bytes]
        seed = chunk_seed(put.key)
        one.pieces = [
            Piece(target[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES], (seed + put.first_chunk + i) & U64_MASK)
            for i in range(put.num_chunks)
        ]
        return one.pieces

    def _end(self, one: "_Arriving", deadline: float) -> Item:
        """All bytes have arrived: what becomes of them."""
        one.ended = True
        place, put = one.place, one.put
        if isinstance(place, Item):
            item = place
        else:
            sums = [piece.digest for piece in one.pieces]
            whole = pack_sums(sums) == one.sums
            if isinstance(place, Upload):
                item = self._service.uploads.end_slice(place, put, sums if whole else None, deadline)
            elif whole:
                item = commit(self._cache, put, place, sums, deadline)
            else:
                self._cache.abandon(place)
                item = Item.TORN
        self._cache.counts.put(item)
        return item

    def _cut_short(self, one: "_Arriving", deadline: float) -> None:
        one.ended = True
        if isinstance(one.place, Upload):
            self._service.uploads.end_slice(one.place, one.put, None, deadline)
        elif isinstance(one.place, Entry):
            self._cache.abandon(one.place)

    def _sinks(self, num_bytes: int) -> list[memoryview]:
        """Memory to read away so many bytes."""
        whole, rest = divmod(num_bytes, SINK_BYTES)
        return [self._sink_of(SINK_BYTES)] * whole + ([self._sink_of(rest)] if rest else [])

    def _sink_of(self, num_bytes: int) -> memoryview:
        """Memory of this connection's own, at most `SINK_BYTES`, until it is asked for again."""
        self._sink = self._sink or memoryview(bytearray(SINK_BYTES))
        return self._sink[:num_bytes]

    def _drain(self, num_bytes: int) -> None:
        self._wire.read_pieces([Piece(part, checked=False) for part in self._sinks(num_bytes)])


class _Arriving:
    """An object, or a slice of one, whose bytes come next."""

    def __init__(self, put: Put, place: "Entry | Upload | Item") -> None:
        self.put = put
        self.sums = put.sums
        self.place = place
        self.pieces: list[Piece] = []
        self.ended = False
