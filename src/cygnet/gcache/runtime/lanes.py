"""A batch for one server: cut into frames, which run over several connections at once.

An object larger than a slice is cut at chunks, small ones share a frame. Each connection that takes part is a *lane*:
a thread that takes frames from the common queue, `window` of them on the way at a time.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cygnet.gcache.protocol import (
    ANY,
    OUTCOMES,
    ROUTED,
    SUMS_FOLLOW,
    Got,
    Item,
    Op,
    ProtocolError,
    Put,
    Viewed,
    Want,
    pack_number,
    pack_puts,
    pack_view,
    pack_wants,
    unpack_gots,
    unpack_viewed,
)
from cygnet.gcache.record import CHUNK_BYTES, U64, checksums, chunk_seed, num_chunks, pack_sums
from cygnet.gcache.runtime.attached import EndedError
from cygnet.gcache.runtime.channel import Channel, GCacheError, Peer
from cygnet.gcache.runtime.views import MappedArena, View
from cygnet.gcache.runtime.wire import DeadlineError, Piece
from cygnet.kv.store import Outcome

MAX_KEYS = 256
"""Per frame."""
GOT_BYTES, SUM_BYTES = 28, 8
SMALL_BYTES = 1 << 20
"""Answers with several objects and no more than this are taken in with one piece of memory."""
LATE_BYTES = 128 << 10
"""Values longer than this are hashed when they have been sent, while the server takes them in."""
COPY_BYTES = 8 << 20
"""Objects viewed with one request, when they are to be copied."""
FAILURES = (OSError, ProtocolError, GCacheError)
"""What may come of asking a server."""


class Result:
    """What becomes of one key of a batch; put together from its slices, which end on any thread."""

    __slots__ = ("_ends", "num_slices", "torn_here")

    def __init__(self) -> None:
        self.num_slices = 1
        self.torn_here = False
        """The bytes that came were not the object's: the server still has it."""
        self._ends: list[tuple[Item, int | None]] = []

    def add(self, item: Item, version: int | None = None) -> None:
        """A slice has ended."""
        self._ends.append((item, version))

    @property
    def outcome(self) -> Outcome:
        """Of the whole, once nobody adds to it any more. The first failure counts."""
        if len(self._ends) == self.num_slices == 1:
            return OUTCOMES[self._ends[0][0]]
        items = [item for item, _ in self._ends]
        for item in items:
            if item not in (Item.OK, Item.PART):
                return OUTCOMES[item]
        if len(items) < self.num_slices:
            return Outcome.TIMED_OUT
        if len({version for _, version in self._ends if version is not None}) > 1:
            return Outcome.MISS  # it was put anew between two slices
        # Of a put in slices, one says that now all of it is there.
        return Outcome.OK if Item.OK in items else Outcome.FAILED


class Frame(Protocol):
    """One request of a batch."""

    def send(self, channel: Channel) -> None:
        """Send the request."""

    def receive(self, channel: Channel) -> None:
        """Read the answer into buffers and results."""

    def fail(self, item: Item) -> None:
        """It was not answered."""


@dataclass(slots=True)
class Part:
    """An object, or a slice of one."""

    key: bytes
    view: memoryview
    """Of the part."""
    value_bytes: int
    """Of the object."""
    first_chunk: int
    result: Result
    upload: int = 0

    @property
    def num_chunks(self) -> int:
        """Chunks of the part."""
        return num_chunks(len(self.view))

    def pieces(self, *, checked: bool) -> list[Piece]:
        """Memory of each chunk."""
        seed = chunk_seed(self.key) + self.first_chunk if checked else 0
        return [
            Piece(self.view[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES], (seed + i) & U64, checked=checked)
            for i in range(self.num_chunks)
        ]


def cut(
    keys: Sequence[bytes], views: Sequence[memoryview], results: Sequence[Result], slice_bytes: int
) -> Iterator[list[Part]]:
    """Parts by frames of about `slice_bytes`, a multiple of a chunk. Sets how many slices each result waits for."""
    frame: list[Part] = []
    size = 0
    for key, view, result in zip(keys, views, results, strict=True):
        total = len(view)
        if total <= slice_bytes:
            if frame and (size + total > slice_bytes or len(frame) == MAX_KEYS):
                yield frame
                frame, size = [], 0
            frame.append(Part(key, view, total, 0, result))
            size += total
            continue
        result.num_slices = -(-total // slice_bytes)
        upload = int.from_bytes(os.urandom(8), "little") | 1
        for at in range(0, total, slice_bytes):
            part = Part(key, view[at : at + slice_bytes], total, at // CHUNK_BYTES, result, upload)
            if frame and (size + len(part.view) > slice_bytes or len(frame) == MAX_KEYS):
                yield frame
                frame, size = [], 0
            frame.append(part)
            size += len(part.view)
    if frame:
        yield frame


@dataclass(slots=True)
class GetFrame:
    """Fills buffers of known sizes."""

    parts: list[Part]
    verify: bool
    request_id: int = 0

    def send(self, channel: Channel) -> None:
        wants = [Want(part.key, part.value_bytes, part.first_chunk, part.num_chunks) for part in self.parts]
        self.request_id = channel.send(Op.GET, pack_wants(wants), count=len(wants))

    def receive(self, channel: Channel) -> None:
        expected = sum(GOT_BYTES + SUM_BYTES * part.num_chunks for part in self.parts)
        head, meta = channel.receive(self.request_id, Op.GET, expected)
        gots = unpack_gots(meta, len(self.parts))
        if sum([got.body_bytes for got in gots]) != head.body_bytes:
            raise ProtocolError("an answer whose body is not as long as its objects")
        if len(gots) > 1 and head.body_bytes <= SMALL_BYTES:
            self._take_small(channel, gots, head.body_bytes)
            return
        arriving = []
        for part, got in zip(self.parts, gots, strict=True):
            if got.status == Item.OK:
                _check_asked(part, got)
                arriving.append((part, got, part.pieces(checked=self.verify)))
        channel.wire.read_pieces([piece for _, _, pieces in arriving for piece in pieces])
        for part, got in zip(self.parts, gots, strict=True):
            if got.status != Item.OK:
                part.result.add(_item(got.status))
        for part, got, pieces in arriving:
            self._judge(part, got, pieces)

    def _take_small(self, channel: Channel, gots: Sequence[Got], body_bytes: int) -> None:
        """Take in many small parts together, then put them where they belong."""
        data = channel.scratch(body_bytes)
        channel.wire.read_pieces([Piece(data, checked=False)])
        begin = 0
        for part, got in zip(self.parts, gots, strict=True):
            if got.status != Item.OK:
                part.result.add(_item(got.status))
                continue
            _check_asked(part, got)
            value = data[begin : begin + len(part.view)]
            begin += len(value)
            if self.verify and pack_sums(checksums(part.key, value, part.first_chunk)) != got.sums:
                part.result.torn_here = True
                part.result.add(Item.TORN)
            else:
                part.view[:] = value
                part.result.add(Item.OK, got.version)

    def _judge(self, part: Part, got: Got, pieces: list[Piece]) -> None:
        if self.verify and pack_sums([piece.digest for piece in pieces]) != got.sums:
            part.result.torn_here = True
            part.result.add(Item.TORN)
        else:
            part.result.add(Item.OK, got.version)

    def fail(self, item: Item) -> None:
        for part in self.parts:
            part.result.add(item)


@dataclass(slots=True)
class PutFrame:
    """Stores buffers."""

    parts: list[Part]
    ttl_ms: int = 0
    root: int = 0
    """Place of their root (`placement.root_place`); 0: they have none."""
    request_id: int = 0

    def send(self, channel: Channel) -> None:
        body = [part.view for part in self.parts if len(part.view)]
        late = sum(map(len, body)) > LATE_BYTES * len(self.parts)
        sums = [b"" if late else self._sums(part) for part in self.parts]
        puts = [
            Put(part.key, part.value_bytes, own, part.first_chunk, part.num_chunks, self.ttl_ms, part.upload)
            for part, own in zip(self.parts, sums, strict=True)
        ]
        meta = (pack_number(self.root) if self.root else b"") + pack_puts(puts)
        flags = (ROUTED if self.root else 0) | (SUMS_FOLLOW if late else 0)
        core = channel.wire.core
        if late and core is not None:
            values = [(piece.view, piece.seed) for part in self.parts for piece in part.pieces(checked=True)]
            self.request_id = channel.send_hashed(core, Op.PUT, meta, count=len(puts), flags=flags, values=values)
            return
        more = 8 * sum(put.num_chunks for put in puts) if late else 0
        self.request_id = channel.send(Op.PUT, meta, count=len(puts), flags=flags, body=body, more_body_bytes=more)
        if not late:
            return
        # The server has not yet taken in all of it.
        channel.wire.send_bytes(b"".join(map(self._sums, self.parts)))

    def _sums(self, part: Part) -> bytes:
        return pack_sums(checksums(part.key, part.view, part.first_chunk))

    def receive(self, channel: Channel) -> None:
        _, items = channel.receive(self.request_id, Op.PUT, len(self.parts))
        if len(items) != len(self.parts):
            raise ProtocolError("an answer to PUT of another length")
        for part, item in zip(self.parts, items, strict=True):
            part.result.add(_item(item))

    def fail(self, item: Item) -> None:
        for part in self.parts:
            part.result.add(item)


def outcome_of(status: int) -> Outcome:
    """What a caller is told of an object's status in an answer."""
    return OUTCOMES[_item(status)]


def _check_asked(part: Part, got: Got) -> None:
    if got.value_bytes != part.value_bytes or (got.first_chunk, got.num_chunks) != (part.first_chunk, part.num_chunks):
        raise ProtocolError("an answer with other chunks than were asked for")


def _item(status: int) -> Item:
    try:
        return Item(status)
    except ValueError:
        raise ProtocolError(f"an object's status {status}, which is none") from None


@dataclass
class Lane:
    """One connection's part in a batch."""

    peer: Peer
    frames: "deque[Frame]"
    """Shared with the other lanes to the same server."""
    window: int
    deadline: float

    def run(self) -> None:
        """Take frames until there are none. Failures are results."""
        on_the_way: deque[Frame] = deque()
        if not self.frames:
            return
        try:
            with self.peer.channel(self.deadline) as channel:
                while True:
                    while len(on_the_way) < self.window and self.frames:
                        try:
                            frame = self.frames.popleft()
                        except IndexError:
                            break  # another lane took the last one
                        on_the_way.append(frame)
                        frame.send(channel)
                    if not on_the_way:
                        return
                    on_the_way[0].receive(channel)
                    on_the_way.popleft()
        except FAILURES as error:
            item = Item.TIMED_OUT if isinstance(error, DeadlineError) else Item.FAILED
            for frame in on_the_way:
                frame.fail(item)
            while self.frames:  # the other lanes to this server fare no better
                try:
                    self.frames.popleft().fail(item)
                except IndexError:
                    break


def lanes_of(peer: Peer, frames: "deque[Frame]", window: int, deadline: float, most: int = MAX_KEYS) -> list[Lane]:
    """As many lanes as there are frames for, and connections, and no more than `most`."""
    return [Lane(peer, frames, window, deadline) for _ in range(min(peer.max_connections, len(frames), max(1, most)))]


# --- on the same machine


def view_all(peer: Peer, wants: Sequence[Want], deadline: float) -> list[View | Outcome]:
    """Views of objects of a local server, in batches of frames. Raises what `Peer.channel` raises."""
    views: list[View | Outcome] = []
    with peer.channel(deadline, unix=True) as channel:
        arena = channel.arena
        assert arena is not None
        for at in range(0, len(wants), MAX_KEYS):
            some = wants[at : at + MAX_KEYS]
            meta = channel.call(Op.VIEW, pack_view(channel.take_released(), some), count=len(some))
            for viewed in unpack_viewed(meta, len(some)):
                if viewed.status != Item.OK:
                    views.append(outcome_of(viewed.status))
                    continue
                views.append(_view(channel, arena, viewed))
    return views


def view_one(peer: Peer, key: bytes, deadline: float, value_bytes: int = ANY) -> View | Outcome:
    """A view of one object of a local server. Raises what `Peer.channel` raises."""
    attached = peer.attached(deadline)
    if attached is not None:
        try:
            view = attached.view(key, peer.epoch, value_bytes)
            if view is not None:
                return view
        except EndedError:
            peer.detach(attached)
    with peer.channel(deadline, unix=True) as channel:
        arena = channel.arena
        assert arena is not None
        viewed = channel.view_one(key, value_bytes)
        return _view(channel, arena, viewed) if viewed.status == Item.OK else outcome_of(viewed.status)


def _view(channel: Channel, arena: MappedArena, viewed: Viewed) -> View:
    if viewed.offset + viewed.value_bytes > len(arena.memory):
        raise ProtocolError("a view beyond the end of the arena")
    return View(arena, viewed.slot, viewed.stamp, viewed.offset, viewed.value_bytes, channel.give_back, viewed.lease)


def copy_all(peer: Peer, keys: Sequence[bytes], buffers: Sequence[memoryview], deadline: float) -> list[Outcome]:
    """Fill buffers from a local server's arena. `FAILED` where another way is to be tried.

    Few objects are viewed at a time: what is viewed can't make room for what is still on the disk.
    """
    copied = copy_unasked(peer, [*keys], [*buffers], deadline)
    if all(copied):
        return [Outcome.OK] * len(keys)
    if any(copied):
        left = [at for at, done in enumerate(copied) if not done]
        asked = iter(_copy_asking(peer, [keys[at] for at in left], [buffers[at] for at in left], deadline))
        return [Outcome.OK if done else next(asked) for done in copied]
    return _copy_asking(peer, keys, buffers, deadline)


def copy_unasked(peer: Peer, keys: list[bytes], buffers: list[memoryview], deadline: float) -> bytes:
    """Fill what can be filled without asking the server; 1 for each that is."""
    attached = peer.attached(deadline)
    if attached is None:
        return bytes(len(keys))
    try:
        return attached.copy_all(keys, buffers, peer.epoch)
    except EndedError:
        peer.detach(attached)
        return bytes(len(keys))


def _copy_asking(peer: Peer, keys: Sequence[bytes], buffers: Sequence[memoryview], deadline: float) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while len(outcomes) < len(keys):
        first = last = len(outcomes)
        size = 0
        while (
            last < len(keys) and last - first < MAX_KEYS and (last == first or size + len(buffers[last]) <= COPY_BYTES)
        ):
            size += len(buffers[last])
            last += 1
        if last - first == 1:
            view = view_one(peer, keys[first], deadline, len(buffers[first]))
            outcomes.append(_copy(view, buffers[first], deadline) if isinstance(view, View) else view)
            continue
        views = view_all(peer, [Want(keys[at], len(buffers[at])) for at in range(first, last)], deadline)
        for view, buffer in zip(views, buffers[first:last], strict=True):
            outcomes.append(_copy(view, buffer, deadline) if isinstance(view, View) else view)
    return outcomes


def copy_one(peer: Peer, key: bytes, buffer: memoryview, deadline: float) -> Outcome:
    """Fill a buffer from a local server's arena. `FAILED`: another way is to be tried."""
    if copy_unasked(peer, [key], [buffer], deadline) == b"\1":
        return Outcome.OK
    view = view_one(peer, key, deadline, len(buffer))
    return _copy(view, buffer, deadline) if isinstance(view, View) else view


def _copy(view: View, buffer: memoryview, deadline: float) -> Outcome:
    try:
        if time.monotonic() >= deadline:
            return Outcome.TIMED_OUT
        if len(buffer):
            # Slice assignment would hold the interpreter's lock for as long as it takes.
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(view.data, np.uint8))
        return Outcome.OK if view.is_valid() else Outcome.FAILED
    finally:
        view.release()
