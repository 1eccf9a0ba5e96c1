"""Frames over a blocking socket: heads and meta through a small buffer, values straight into and out of memory.

`Wire` holds all waiting to one absolute deadline, however the peer trickles. Once it has passed the socket is shut
down and nothing more is read, so nothing is written to anyone's memory afterwards.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from xxhash import xxh3_64, xxh3_64_intdigest

from cygnet.gcache.limits import MAX_META_BYTES
from cygnet.gcache.protocol import HEAD_BYTES, FrameHead, unpack_head
from cygnet.gcache.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from cygnet.gcache.runtime._core import Table

T = TypeVar("T")

BUFFER_BYTES = 4096
SERVER_BUFFER_BYTES = 32 << 10
"""Longer requests for values are left to the general way."""
"""Most that is read ahead of a head. What of it belongs to a value is copied, so it is small."""
MAX_PARTS = 512
"""Pieces of memory per system call; systems take 1024."""
STREAM_BYTES = 128 << 10
"""Longer values are hashed while the rest of them arrives."""


class DeadlineError(TimeoutError):
    """The deadline has passed in the middle of a frame: the connection can't be used any more."""


class PeerClosedError(ConnectionError):
    """The peer has closed the connection."""


class Piece:
    """Memory of at least one byte for one chunk, or for something without a checksum, that is to arrive."""

    __slots__ = ("_hasher", "checked", "digest", "done", "seed", "view")

    def __init__(self, view: memoryview, seed: int = 0, *, checked: bool = True) -> None:
        self.view = view
        self.seed = seed
        self.checked = checked
        """Whether it is hashed."""
        self.digest = 0
        """Its hash, once it is full."""
        self.done = 0
        self._hasher: xxh3_64 | None = None

    @property
    def is_full(self) -> bool:
        """Whether all has arrived."""
        return self.done == len(self.view)

    def take(self, count: int) -> int:
        """Up to `count` more bytes have arrived in the view; returns how many of them it takes."""
        fresh = min(count, len(self.view) - self.done)
        if self._hasher is None and self.checked and fresh < len(self.view) and len(self.view) > STREAM_BYTES:
            self._hasher = xxh3_64(seed=self.seed)
        if self._hasher is not None:
            self._hasher.update(self.view[self.done : self.done + fresh])
        self.done += fresh
        if self.checked and self.is_full:
            hashed = self._hasher.intdigest() if self._hasher else xxh3_64_intdigest(self.view, seed=self.seed)
            self.digest = hashed
        return fresh


class Wire:
    """One end of a connection. One thread reads, and one writes.

    Raises `DeadlineError`, `PeerClosedError`, other `OSError`s and `ProtocolError`; after any of them it is to
    be closed.
    """

    def __init__(self, sock: socket.socket, magic: bytes, watchdog: Watchdog, core: ModuleType | None = None) -> None:
        self.sock = sock
        self.core = core
        """Compiled loops, if they are to be used."""
        sock.settimeout(None)
        self.deadline = float("inf")
        """Monotonic seconds, for all that follows; set it with `arm`."""
        self.expired = False
        self._magic = magic
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0
        self._watchdog = watchdog
        self._lock = threading.Lock()
        watchdog.add(self)

    def close(self) -> None:
        """Close the socket."""
        self._watchdog.discard(self)
        self.sock.close()

    def arm(self, deadline: float) -> None:
        """Have everything end by `deadline`."""
        self.deadline = deadline
        if deadline < self._watchdog.wakes_at:
            if deadline <= time.monotonic():
                raise DeadlineError("the deadline has passed")
            self._watchdog.nudge()

    def disarm(self) -> bool:
        """Nothing is waited for any more; `False` when the deadline had passed, and the socket is shut down."""
        with self._lock:
            self.deadline = float("inf")
            return not self.expired

    def expire(self) -> None:
        """The deadline has passed: whoever waits returns at once."""
        with self._lock:
            if self.deadline > time.monotonic():
                return  # it was taken back, or moved for the next call
            self.expired = True
            self.deadline = float("inf")
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already

    def _ended(self) -> Exception:
        return (
            DeadlineError("the deadline has passed")
            if self.expired
            else PeerClosedError("the peer closed the connection")
        )

    # --- reading

    def receive(self, buffer: memoryview) -> int:
        """Whatever has arrived, at least a byte; how many bytes."""
        got = self.sock.recv_into(buffer)
        if not got:
            raise self._ended()
        return got

    def peek(self, expected: int = BUFFER_BYTES) -> memoryview:
        """What is in the buffer, at least a head. Up to `expected` bytes are read with one call, if there."""
        if self._end - self._begin < HEAD_BYTES:
            self._fill(HEAD_BYTES, max(HEAD_BYTES, min(expected, BUFFER_BYTES)))
        return self._buffer[self._begin : self._end]

    def await_head(self, timeout_s: float) -> memoryview:
        """Like `peek`, for however long nothing comes; but a head that has begun must be whole within `timeout_s`."""
        self.arm(float("inf"))
        self._fill(1, BUFFER_BYTES)
        if self._end - self._begin < HEAD_BYTES:
            self.arm(time.monotonic() + timeout_s)
            self._fill(HEAD_BYTES, BUFFER_BYTES)
            self.arm(float("inf"))
        return self._buffer[self._begin : self._end]

    def serve_gets(self, table: "Table", block: int, timeout_ms: int) -> None:
        """Answer GETs of what the table finds, until something else has come, which `peek` then shows."""
        if self._buffer.nbytes < SERVER_BUFFER_BYTES:
            wider = memoryview(bytearray(SERVER_BUFFER_BYTES))
            wider[self._begin : self._end] = self._buffer[self._begin : self._end]
            self._buffer = wider
        span = self.run(table.serve, block, self._buffer, self._begin, self._end, timeout_ms)
        if span is None:
            raise self._ended()
        self._begin, self._end = span

    def get_one(
        self, core: ModuleType, request: bytes, request_id: int, value: memoryview, seed: int, *, verify: bool
    ) -> int | None:
        """Ask for all of an object of one chunk, and take it in; its outcome, an `Item`.

        `None`: the answer is another, and comes next. Nothing is in the buffer before.
        """
        return self._item(*self.run(core.get_one, request, request_id, value, seed, verify))

    def put_one(
        self, core: ModuleType, head: bytes, request_id: int, value: memoryview, seed: int | None
    ) -> int | None:
        """Store an object of one chunk, with a seed its checksum behind it; the rest is as for `get_one`."""
        return self._item(*self.run(core.put_one, head, value, seed, request_id))

    def _item(self, item: int | bool | None, read: bytes) -> int | None:
        if item is None:
            self.unread(read)
        elif item is False:
            raise self._ended()
        return item

    def send_hashed(self, head: bytes, values: Sequence[tuple[memoryview, int]], core: ModuleType) -> None:
        """Send a head, chunks, and then the checksum of each chunk, made while it is on its way."""
        views, seeds = [view for view, _ in values], [seed for _, seed in values]
        self.sent(self.run(core.send_values, head, views, seeds))

    def run(self, loop: Callable[..., T], *arguments: object) -> T:
        """A compiled loop on the socket."""
        try:
            return loop(self.sock.fileno(), *arguments)
        except OSError as error:
            raise self._ended() if self.expired else error from None

    def sent(self, all_: bool) -> None:
        """What a compiled loop has said: not all was sent (or received) when the peer had closed."""
        if not all_:
            raise self._ended()

    def take_read(self) -> bytes:
        """What has been read ahead, to be dealt with elsewhere."""
        data = bytes(self._buffer[self._begin : self._end])
        self.drop()
        return data

    def unread(self, data: "bytes | memoryview") -> None:
        """Put back what has been read, before what else is in the buffer."""
        data = bytes(data) + self.take_read()
        if len(data) > len(self._buffer):
            self._buffer = memoryview(bytearray(len(data)))
        self._buffer[: len(data)] = data
        self._begin, self._end = 0, len(data)

    def drop(self) -> None:
        """All that `peek` showed has been dealt with."""
        self._begin = self._end = 0

    def skip(self, count: int) -> None:
        """So many bytes of what `peek` showed have been dealt with."""
        self._begin += count

    def read_head(self, expected: int = BUFFER_BYTES) -> FrameHead:
        """The next frame's head. `expected` bytes of head and meta are read with one call, if they are there."""
        head = unpack_head(self.peek(expected), self._magic)
        self._begin += HEAD_BYTES
        return head

    def read_bytes(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count <= self._end - self._begin:
            data = bytes(self._buffer[self._begin : self._begin + count])
            self._begin += count
            return data
        if count > MAX_META_BYTES:
            raise ValueError(f"{count} bytes are no meta part")
        data_ = bytearray(count)
        self.read_pieces([Piece(memoryview(data_), checked=False)])
        return bytes(data_)

    def read_pieces(self, pieces: Sequence[Piece]) -> None:
        """Fill all, in order, and hash those to be checked."""
        if self.core is not None:
            self._read_compiled(self.core, [piece for piece in pieces if not piece.is_full])
            return
        at = 0
        while at < len(pieces):
            if pieces[at].is_full:
                at += 1
                continue
            got = self._read_into(pieces, at)
            while got:
                got -= pieces[at].take(got)
                at += pieces[at].is_full

    def _read_compiled(self, core: ModuleType, pieces: Sequence[Piece]) -> None:
        at = done = 0
        while at < len(pieces) and self._begin < self._end:  # what was read ahead
            view = pieces[at].view
            size = min(self._end - self._begin, len(view) - done)
            view[done : done + size] = self._buffer[self._begin : self._begin + size]
            self._begin += size
            done += size
            if done == len(view):
                pieces[at].take(done)
                at, done = at + 1, 0
        if at == len(pieces):
            return
        left = pieces[at:] if at else pieces
        views = [piece.view for piece in left]
        seeds = [piece.seed if piece.checked else None for piece in left]
        digests: list[int] | None = self.run(core.read_pieces, views, seeds, done)
        if digests is None:
            raise self._ended()
        for piece, digest in zip(left, digests, strict=True):
            piece.done, piece.digest = len(piece.view), digest

    def _read_into(self, pieces: Sequence[Piece], at: int) -> int:
        target = pieces[at].view[pieces[at].done :]
        buffered = self._end - self._begin
        if buffered:
            size = min(buffered, len(target))
            target[:size] = self._buffer[self._begin : self._begin + size]
            self._begin += size
            return size
        if len(target) >= STREAM_BYTES or at + 1 == len(pieces):
            got = self.sock.recv_into(target)
        else:
            got = self.sock.recvmsg_into(_views(target, pieces, at + 1))[0]
        if not got:
            raise self._ended()
        return got

    def _fill(self, needed: int, wanted: int) -> None:
        """Have `needed` bytes in the buffer, reading up to `wanted`."""
        have = self._end - self._begin
        if have >= needed:
            return
        if self._begin:
            if have:
                self._buffer[:have] = bytes(self._buffer[self._begin : self._end])
            self._begin, self._end = 0, have
        while self._end < needed:
            got = self.sock.recv_into(self._buffer[self._end : max(wanted, needed)])
            if not got:
                raise self._ended()
            self._end += got

    # --- writing

    def send_bytes(self, data: "bytes | memoryview") -> None:
        """Send a frame that is in one piece."""
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise self._ended() if self.expired else error from None

    def send(self, parts: "Sequence[bytes | memoryview]") -> None:
        """Send all parts, in order, without copying them together."""
        if len(parts) == 1:
            self.send_bytes(parts[0])
            return
        try:
            left = [part for part in parts if len(part)]
            at = 0
            while at < len(left):
                sent = self.sock.sendmsg(left[at : at + MAX_PARTS])
                while at < len(left) and sent >= len(left[at]):
                    sent -= len(left[at])
                    at += 1
                if sent:
                    left[at] = memoryview(left[at])[sent:]
        except OSError as error:
            raise self._ended() if self.expired else error from None


def _views(first: memoryview, pieces: Sequence[Piece], at: int) -> list[memoryview]:
    """What one call may fill: not more pieces than it is likely to."""
    views, size = [first], len(first)
    for piece in pieces[at : at + MAX_PARTS - 1]:
        if size >= 2 * STREAM_BYTES:
            break
        views.append(piece.view)
        size += len(piece.view)
    return views
