"""Moves what is another server's: from both tiers of this one, over the native protocol, with the checksums it has.

An object is in one transition while it moves: it can be read here, but not removed or overwritten, until the new owner
has it and it is gone here. The new owner keeps what it has got meanwhile. A mover that is stopped, with its server or
without, begins anew with what is left.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from cygnet.base.errors import ConfigError, CygnetError
from cygnet.gcache.arena import Entry
from cygnet.gcache.membership import State, View
from cygnet.gcache.migration import Throttle, goes_to, portions
from cygnet.gcache.protocol import KEEP, ROUTED, Item, Op, ProtocolError, Put, pack_number, pack_puts, unpack_number
from cygnet.gcache.record import CHUNK_BYTES, num_chunks, unpack_record, value_is_whole
from cygnet.gcache.runtime.cache import Cache
from cygnet.gcache.runtime.channel import Address, Channel, Peer, UnavailableError, WrongEpochError
from cygnet.gcache.runtime.client import ClientOptions, Means
from cygnet.gcache.runtime.cluster import Cluster
from cygnet.gcache.runtime.disk_tier import DiskTier
from cygnet.gcache.runtime.lanes import FAILURES, Frame, Lane
from cygnet.gcache.runtime.peer_in_epoch import PeerInEpoch
from cygnet.kv.store import Outcome

PUSH_TIMEOUT_S = 10.0
SLOWEST_BYTES_PER_S = 10 << 20
"""A portion has `PUSH_TIMEOUT_S`, and the time that it takes at this rate."""
TRANSITION_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
PAUSE_S = 0.5
"""After something could not be moved, before it is tried again."""
MAX_REFUSALS = 20
"""So often the new owner may say that it has no room; then the object is given up, or the move would never end."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object that is another server's."""

    key: bytes
    root: int
    num_bytes: int
    target: str
    record: memoryview | None = None
    """What the disk has, if that has just been read."""


@dataclass(slots=True)
class Cargo:
    """An object on its way. `entry`: pinned, if it is in memory."""

    found: Found
    entry: Entry | None
    value: memoryview
    sums: bytes
    ttl_ms: int
    items: list[Item] = field(default_factory=list)

    @property
    def outcome(self) -> Item:
        """What became of it at the new owner's, from what became of its slices."""
        for item in (Item.OK, Item.TORN, Item.FULL, Item.TIMED_OUT):
            if item in self.items:
                return item
        return Item.FAILED


@dataclass(slots=True)
class MoveFrame:
    """Objects of one root, or a slice of one, for their new owner."""

    parts: list[tuple[Cargo, Put, memoryview]]
    root: int
    begun: Callable[[Channel], None]
    ticket: int
    request_id: int = 0

    def send(self, channel: Channel) -> None:
        self.begun(channel)
        meta = pack_puts([put for _, put, _ in self.parts])
        flags = KEEP | (ROUTED if self.root else 0)
        body = [data for _, _, data in self.parts if len(data)]
        numbers = pack_number(self.ticket) + (pack_number(self.root) if self.root else b"")
        self.request_id = channel.send(Op.PUT, numbers + meta, count=len(self.parts), flags=flags, body=body)

    def receive(self, channel: Channel) -> None:
        _, items = channel.receive(self.request_id, Op.PUT, len(self.parts))
        if len(items) != len(self.parts) or any(item > max(Item) for item in items):
            raise ProtocolError("an answer to PUT that can't be read")
        for (cargo, _, _), item in zip(self.parts, items, strict=True):
            cargo.items.append(Item(item))

    def fail(self, item: Item) -> None:
        for cargo, _, _ in self.parts:
            cargo.items.append(item)


def frames_of(cargo: Sequence[Cargo], root: int, begun: Callable[[Channel], None], ticket: int) -> Iterator[MoveFrame]:
    """Frames of about a chunk; a large object is cut into slices of one chunk. `begun` is told the connection."""
    parts: list[tuple[Cargo, Put, memoryview]] = []
    size = 0
    for one in cargo:
        chunks, total = num_chunks(len(one.value)), len(one.value)
        upload = int.from_bytes(os.urandom(8), "little") | 1 if chunks > 1 else 0
        for first in range(max(1, chunks)):
            data = one.value[first * CHUNK_BYTES : (first + 1) * CHUNK_BYTES]
            sums = one.sums[8 * first : 8 * first + 8]
            if parts and size + len(data) > CHUNK_BYTES:
                yield MoveFrame(parts, root, begun, ticket)
                parts, size = [], 0
            put = Put(one.found.key, total, sums, first, num_chunks(len(data)), one.ttl_ms, upload)
            parts.append((one, put, data))
            size += len(data)
    if parts:
        yield MoveFrame(parts, root, begun, ticket)


class Mover:
    """One thread, from `start` to `close`. `report` is called when a view's moves are all done."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        disk: DiskTier | None,
        report: Callable[[int], object],
        *,
        token: str = "",
        bytes_per_s: int = 0,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._disk = disk
        self._report = report
        self._throttle = Throttle(bytes_per_s)
        self._options = ClientOptions(token=token, connections=1, io_threads=0, same_host=False)
        self._means = Means.of(self._options)
        self._peers: dict[tuple[str, str, int], Peer] = {}
        self._channel: Channel | None = None
        """The connection that something is being sent over."""
        self._refusals: dict[bytes, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gcache-mover", daemon=True)
        self.moved_objects = self.moved_bytes = self.failures = self.given_up = 0
        self.left_objects = 0
        """Known to be another's and still here. On the disk they are found one after another."""
        self.looked_at = self.to_look_at = 0
        """Records on the disk, in the sweep under way."""
        self._unread = 0
        """Of these, such as could not be read in time."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stats(self) -> dict[str, object]:
        """Progress."""
        return {
            "moving": not self._cluster.view.is_settled,
            "moved_objects": self.moved_objects,
            "moved_bytes": self.moved_bytes,
            "move_failures": self.failures,
            "move_given_up_objects": self.given_up,
            "move_left_objects": self.left_objects,
            "move_disk_records": self.to_look_at,
            "move_disk_records_seen": self.looked_at,
        }

    def close(self) -> None:
        """Stop; what has not been moved stays where it is."""
        self._stop.set()
        channel = self._channel
        if channel is not None:  # whoever waits on it returns at once
            with suppress(OSError):
                channel.wire.sock.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()
        self._let_go()
        self._means.close(time.monotonic() + PUSH_TIMEOUT_S)

    def _run(self) -> None:
        done = 0
        while not self._stop.is_set():
            view = self._cluster.view
            if view.is_settled:
                self._cache.memory.end_tickets()
                self._let_go()
            if view.is_settled or done == view.epoch or not self._cluster.is_up:
                self._cluster.wait_for_change(view.epoch, PAUSE_S)
                continue
            if not self._cluster.wait_for_quiet(view.epoch, PAUSE_S) or not self._sweep(view):
                self._stop.wait(PAUSE_S)
                continue
            try:
                self._report(view.epoch)
                done = view.epoch
            except CygnetError:  # the registry can't be reached, or says no: it is told again
                self._stop.wait(PAUSE_S)

    def _let_go(self) -> None:
        """Close connections: servers come back at other addresses, or not at all."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _goes_on(self, view: View) -> bool:
        return not self._stop.is_set() and self._cluster.epoch == view.epoch

    def _sweep(self, view: View) -> bool:
        """Move what is another's by this view; whether nothing is left."""
        self._refusals = {key: count for key, count in self._refusals.items() if count < MAX_REFUSALS}
        self.looked_at = self.to_look_at = self._unread = 0
        clean = self._move_all(view, self._in_memory(view))
        clean &= self._move_all(view, self._on_disk(view))
        # What was on the disk may have been brought up meanwhile.
        clean &= self._move_all(view, self._in_memory(view))
        clean &= not self._unread
        self.left_objects = 0 if clean else self.left_objects
        return clean and self._goes_on(view)

    def _in_memory(self, view: View) -> Iterator[Found]:
        owners, me = self._cluster.owners, self._cluster.server_id
        if owners is None:
            return
        with self._cache.memory.lock:
            entries = self._cache.arena.entries()
        found = []
        for entry in entries:  # what is asked of them never changes
            target = goes_to(owners, me, entry.key, entry.root)
            if target is not None:
                found.append(Found(entry.key, entry.root, entry.num_bytes, target))
        self.left_objects = len(found)
        yield from found

    def _on_disk(self, view: View) -> Iterator[Found]:
        """Reads every record: only it tells its key."""
        owners, me = self._cluster.owners, self._cluster.server_id
        if self._disk is None or owners is None:
            return
        names = self._disk.names()
        self.to_look_at = len(names)
        for name in names:
            if not self._goes_on(view):
                return
            self.looked_at += 1
            memory = self._disk.read_named(name, READ_TIMEOUT_S)
            if isinstance(memory, Outcome):
                # What is damaged or gone meanwhile is not to be had here either.
                self._unread += memory not in (Outcome.MISS, Outcome.TORN)
                continue
            self._pause_for(len(memory))
            record = unpack_record(memory)
            if record is None:
                continue
            target = goes_to(owners, me, record.key, record.root)
            if target is not None:
                yield Found(record.key, record.root, len(memory), target, memory)

    def _pause_for(self, num_bytes: int) -> None:
        self._stop.wait(self._throttle.wait_ns(num_bytes, time.monotonic_ns()) / 1e9)

    def _move_all(self, view: View, found: Iterator[Found]) -> bool:
        clean = True
        for portion in portions(found, lambda one: (one.target, one.root), lambda one: one.num_bytes):
            if not self._goes_on(view):
                return False
            if portion[0].record is None:
                self._pause_for(sum(one.num_bytes for one in portion))
            clean &= self._move(view, portion)
        return clean

    def _move(self, view: View, portion: list[Found]) -> bool:
        """Move objects that are all of one root and for one server; whether all are gone from here."""
        cargo: list[Cargo] = []
        clean = True
        try:
            for found in portion:
                entry = self._cache.begin_move(found.key, time.monotonic() + TRANSITION_TIMEOUT_S)
                if entry is None:
                    clean = False
                    continue
                if entry is False:
                    continue
                held = None if entry is True else entry
                # From here on nobody changes the object; before, whoever is in a later epoch may have.
                one = self._load(found, held) if self._goes_on(view) else False
                if isinstance(one, Cargo):
                    cargo.append(one)
                else:
                    self._cache.end_move(found.key, held, gone=one)
                    clean &= one
            self._push(view, portion[0], cargo)
        finally:
            for one in cargo:
                clean &= self._end(one)
        return clean

    def _load(self, found: Found, entry: Entry | None) -> Cargo | bool:
        """What to send; `True` for what is expired or damaged, and to be given up, `False` if it can't be read now."""
        arena = self._cache.arena
        if entry is not None:
            value, sums, expiry_ns = arena.value(entry), arena.sums(entry), entry.expiry_ns
            if not entry.verified and not value_is_whole(found.key, value, sums):
                return self._is_torn()
        else:
            memory = found.record or self._read_again(found.key)
            if isinstance(memory, Outcome):
                return self._is_torn() if memory is Outcome.TORN else memory is Outcome.MISS
            record = unpack_record(memory)
            if record is None or record.key != found.key:
                return self._is_torn()
            at = record.places.value
            value, sums, expiry_ns = memory[at : at + record.value_bytes], record.sums, record.expiry_ns
        now_ns = time.time_ns()
        if 0 < expiry_ns <= now_ns:
            return True
        return Cargo(found, entry, value, sums, max(1, (expiry_ns - now_ns) // 1_000_000) if expiry_ns else 0)

    def _is_torn(self) -> bool:
        self._cache.counts.torn_objects += 1
        return True

    def _read_again(self, key: bytes) -> memoryview | Outcome:
        """It was in memory when it was found, and is only on the disk now."""
        assert self._disk is not None
        return self._disk.read_named(self._disk.name_of(key), READ_TIMEOUT_S)

    def _push(self, view: View, first: Found, cargo: list[Cargo]) -> None:
        if not cargo:
            return
        target = view.server(first.target)
        if target is None or target.state is State.DOWN:
            return
        where = (target.id, target.host, target.port)
        if where not in self._peers:
            self._peers[where] = self._means.peer(Address(target.host, target.port, target.id), self._options)
        peer = PeerInEpoch(self._peers[where], view.epoch, self._refused)
        num_bytes = sum(len(one.value) for one in cargo)
        deadline = time.monotonic() + PUSH_TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S
        # Asked for while all of the cargo is held here: who removes any of it does so after the ticket was given.
        try:
            with peer.channel(deadline) as channel:
                self._sends_over(channel)
                ticket, _ = unpack_number(channel.call(Op.TICKET))
        except FAILURES:
            self._channel = None
            return
        frames: deque[Frame] = deque(frames_of(cargo, first.root, self._sends_over, ticket))
        Lane(cast("Peer", peer), frames, self._options.window, deadline).run()
        self._channel = None

    def _sends_over(self, channel: Channel) -> None:
        self._channel = channel
        if self._stop.is_set():
            raise UnavailableError("the mover is being stopped")

    def _end(self, one: Cargo) -> bool:
        """Whether it is gone from here."""
        key, outcome = one.found.key, one.outcome
        gone = outcome is Item.OK
        if outcome is Item.TORN and not value_is_whole(key, one.value, one.sums):
            gone = self._is_torn()  # here, not on the way
        if outcome is Item.FULL:
            self._refusals[key] = self._refusals.get(key, 0) + 1
            if self._refusals[key] >= MAX_REFUSALS:
                self.given_up += 1
                gone = True
        self._cache.end_move(key, one.entry, gone=gone)
        if outcome is Item.OK:
            self.moved_objects += 1
            self.moved_bytes += len(one.value)
        elif not gone:
            self.failures += 1
        return gone

    def _refused(self, peer: Peer, error: WrongEpochError) -> None:
        """The new owner is in another epoch: whoever is behind is told."""
        if error.epoch >= self._cluster.epoch:
            try:
                self._cluster.adopt_encoded(error.view)
            except ConfigError:
                return  # nonsense: the move fails, and is tried again
            return
        try:
            with peer.channel(time.monotonic() + 1.0) as channel:
                channel.call(Op.ADOPT, self._cluster.encoded)
        except FAILURES:
            return  # it is tried again anyway
