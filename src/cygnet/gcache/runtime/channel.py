"""A client's connections to one server: made when needed, kept, bounded in number, given up when the server fails."""

import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import msgspec

from cygnet.base.errors import CygnetError
from cygnet.gcache.breaker import Breaker
from cygnet.gcache.limits import MAX_BATCH
from cygnet.gcache.protocol import (
    ANSWER_MAGIC,
    HEAD_BYTES,
    PROTOCOL_VERSION,
    FrameHead,
    Item,
    Op,
    ProtocolError,
    Status,
    Viewed,
    pack_request,
    unpack_gots,
    unpack_viewed,
)
from cygnet.gcache.quick import (
    GOT_BYTES,
    VIEWED_BYTES,
    pack_get_of_one,
    pack_view_of_one,
    unpack_got_one,
    unpack_viewed_one,
)
from cygnet.gcache.record import chunk_seed
from cygnet.gcache.runtime.attached import Attached, attach
from cygnet.gcache.runtime.greeting import Hello, ServerInfo
from cygnet.gcache.runtime.lent import Lent
from cygnet.gcache.runtime.shared_memory import attach as map_arena
from cygnet.gcache.runtime.views import MappedArena
from cygnet.gcache.runtime.watchdog import Watchdog
from cygnet.gcache.runtime.wire import DeadlineError, PeerClosedError, Piece, Wire

CONNECT_TIMEOUT_S = 1.0
LEAST_BUDGET_S = 0.01
"""A call that was given less time than this, and did not end in it, says nothing about the server."""
IDLE_CHECK_S = 0.01
"""A connection unused for longer is looked at before it is used: the server may have been restarted."""
MAX_UNIX_CONNECTIONS = 5
"""One of them for what is read without asking."""
ATTACH_AGAIN_S = 1.0
"""Where attaching has failed, it is tried again so much later."""
ATTACH_TIMEOUT_S = 1.0
"""Most that attaching may take; of a call's own time, half: the other half is for asking."""


class GCacheError(CygnetError):
    """A server refuses this client: a wrong token, another protocol, too many connections."""


class WrongEpochError(GCacheError):
    """The server is in another epoch of its cluster, or not up in it. `view` is its view, as it was sent."""

    def __init__(self, epoch: int, view: bytes) -> None:
        super().__init__(f"gcache server is in epoch {epoch} of its cluster; this client does not follow it")
        self.epoch = epoch
        self.view = view


class UnavailableError(ConnectionError):
    """The server has failed lately, and is left alone for a while."""


@dataclass(frozen=True)
class Address:
    """Where a server is, and what it is called in placement."""

    host: str
    port: int
    id: str = ""
    group: str = ""
    weight: int = 100

    @property
    def name(self) -> str:
        """Its id; HOST:PORT if it was given none."""
        return self.id or f"{self.host}:{self.port}"


class Channel:
    """One connection, used by one thread at a time. Answers come in the order of requests."""

    _ids = itertools.count(1)

    def __init__(self, wire: Wire, info: ServerInfo, arena: MappedArena | None, epoch: int) -> None:
        self.wire = wire
        self.info = info
        self.arena = arena
        """The server's arena, if this connection may ask for views of it."""
        self.used_at = time.monotonic()
        self.epoch = epoch
        """Of the requests to come."""
        self._scratch = memoryview(b"")
        self._released: deque[int] = deque(maxlen=MAX_BATCH)
        """Leases to give back; of more than that the oldest end by themselves."""

    def send(
        self,
        op: Op,
        meta: bytes = b"",
        *,
        count: int = 0,
        flags: int = 0,
        body: "Sequence[memoryview]" = (),
        more_body_bytes: int = 0,
    ) -> int:
        """Send a request; returns its id. `more_body_bytes` are to be sent by the caller."""
        request_id, request = self._request(op, meta, count, flags, sum(map(len, body)) + more_body_bytes)
        self.wire.send([request, *body])
        return request_id

    def _request(self, op: Op, meta: bytes, count: int, flags: int, body_bytes: int) -> tuple[int, bytes]:
        """Id and head of a new request."""
        request_id, budget_ms = self.next_id(), self.budget_ms()
        head = pack_request(
            op,
            request_id,
            meta,
            count=count,
            flags=flags,
            epoch=self.epoch,
            budget_ms=budget_ms,
            body_bytes=body_bytes,
        )
        return request_id, head

    def send_hashed(
        self, core: ModuleType, op: Op, meta: bytes, *, count: int, flags: int, values: list[tuple[memoryview, int]]
    ) -> int:
        """Send a request whose body is chunks, and behind them their checksums with these seeds; returns its id."""
        request_id, head = self._request(op, meta, count, flags, sum(len(view) + 8 for view, _ in values))
        self.wire.send_hashed(head, values, core)
        return request_id

    def receive(self, request_id: int, op: Op, expected_meta: int = 0) -> tuple[FrameHead, bytes]:
        """Head and meta of the answer to that request; the body, if any, comes next."""
        head = self.wire.read_head(HEAD_BYTES + expected_meta)
        if head.code == Status.BUSY:
            raise GCacheError(f"gcache server refuses: {self._text(head)}")
        if head.request_id != request_id or head.op != op:
            raise ProtocolError(f"an answer to request {head.request_id} where {request_id} was expected")
        if head.code in (Status.BAD_REQUEST, Status.DENIED):
            raise GCacheError(f"gcache server refuses: {self._text(head)}")
        if head.code != Status.OK:
            raise WrongEpochError(head.epoch, self.wire.read_bytes(head.meta_bytes))
        return head, self.wire.read_bytes(head.meta_bytes)

    def call(self, op: Op, meta: bytes = b"", *, count: int = 0, flags: int = 0, expected: int = 1024) -> bytes:
        """A request and its answer, neither with a body. So many `expected` bytes are read with the head."""
        head, answer = self.receive(self.send(op, meta, count=count, flags=flags), op, expected)
        if head.body_bytes:
            raise ProtocolError(f"an answer to {op.name} with a body")
        return answer

    def give_back(self, lease: int) -> None:
        """A view is not used any more; the server hears of it with the next request for views."""
        self._released.append(lease)

    def take_released(self) -> list[int]:
        """Leases to give back now."""
        return [self._released.popleft() for _ in range(len(self._released))]

    def view_one(self, key: bytes, value_bytes: int) -> Viewed:
        """Where one object lies. Gives back one lease, if there is one to give back."""
        request_id = self.next_id()
        released = self._released.popleft() if self._released else 0
        wire = self.wire
        wire.send_bytes(pack_view_of_one(request_id, self.epoch, self.budget_ms(), released, key, value_bytes))
        viewed = unpack_viewed_one(wire.peek(VIEWED_BYTES), request_id)
        if viewed is not None:
            wire.drop()
            return viewed
        return unpack_viewed(self.receive(request_id, Op.VIEW, VIEWED_BYTES)[1], 1)[0]

    def get_one(self, key: bytes, value: memoryview, *, verify: bool) -> int:
        """Fill `value`, of one chunk, with all of an object of its size; its outcome, an `Item`."""
        request_id = self.next_id()
        wire = self.wire
        request = pack_get_of_one(request_id, self.epoch, self.budget_ms(), key, len(value))
        if wire.core is not None:
            item = wire.get_one(wire.core, request, request_id, value, chunk_seed(key), verify=verify)
            if item is not None:
                return item
            checksum = None
        else:
            wire.send_bytes(request)
            checksum = unpack_got_one(wire.peek(GOT_BYTES), request_id, len(value))
        if checksum is None:
            head, meta = self.receive(request_id, Op.GET, GOT_BYTES)
            if head.body_bytes:
                raise ProtocolError("an answer with another value than was asked for")
            return unpack_gots(meta, 1)[0].status
        wire.skip(GOT_BYTES)
        piece = Piece(value, chunk_seed(key) if verify else 0, checked=verify)
        wire.read_pieces([piece])
        return Item.TORN if verify and piece.digest != checksum else Item.OK

    def scratch(self, num_bytes: int) -> memoryview:
        """Memory for that many bytes, the same at each call."""
        if len(self._scratch) < num_bytes:
            self._scratch = memoryview(bytearray(num_bytes))
        return self._scratch[:num_bytes]

    def next_id(self) -> int:
        """Of a request."""
        return next(self._ids)

    def budget_ms(self) -> int:
        """Of the deadline that the connection has been given."""
        return min(max(1, int((self.wire.deadline - time.monotonic()) * 1000)), (1 << 32) - 1)

    def looks_open(self) -> bool:
        """Whether the peer has not closed it meanwhile, and has sent nothing unasked."""
        if time.monotonic() - self.used_at < IDLE_CHECK_S:
            return True
        try:
            self.wire.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _text(self, head: FrameHead) -> str:
        return self.wire.read_bytes(head.meta_bytes).decode(errors="replace")


class Peer:
    """One server, as a client sees it. Thread-safe."""

    def __init__(
        self,
        address: Address,
        *,
        token: str,
        max_connections: int,
        same_host: bool,
        epoch: int,
        watchdog: Watchdog,
        core: ModuleType | None = None,
    ) -> None:
        self.address = address
        self.max_connections = max_connections
        self.epoch = epoch
        self._core = core
        self._watchdog = watchdog
        self._token = token
        self._lock = threading.Lock()
        self._breaker = Breaker()
        self._closed = False
        self._idle: dict[bool, list[Channel]] = {False: [], True: []}
        self._in_use = {False: 0, True: 0}
        """Connections by kind: TCP, unix."""
        self._returned = threading.Condition(self._lock)
        self._num_waiting = 0
        self._may_map = same_host
        self._info: ServerInfo | None = None
        self._arena: MappedArena | None = None
        self._attaching = threading.Lock()
        self._attached: Attached | None = None
        self._attach_at = 0.0
        """Monotonic seconds; not before."""

    @property
    def is_failing(self) -> bool:
        """Whether it has failed lately."""
        return self._breaker.is_open

    @property
    def may_be_local(self) -> bool:
        """Whether its arena can be mapped here, as far as is known without asking it."""
        return self._may_map and (self._info is None or self._arena is not None)

    def is_local(self, deadline: float) -> bool:
        """Whether its arena can be mapped here. Connects to find out, the first time."""
        if not self._may_map:
            return False
        if self._info is None:
            with self.channel(deadline):
                pass
        return self._arena is not None

    def attached(self, deadline: float) -> Attached | None:
        """A way to its objects without asking it, where there is one; attaches the first time.

        Whoever comes while another attaches asks meanwhile: the other may have more time.
        """
        attached = self._attached
        if attached is not None or self._core is None or not self._may_map or time.monotonic() < self._attach_at:
            return attached
        if not self._attaching.acquire(blocking=False):
            return self._attached
        try:
            if self._attached is None and time.monotonic() >= self._attach_at:
                self._attach_at = time.monotonic() + ATTACH_AGAIN_S
                self._attach(self._core, deadline)
            return self._attached
        finally:
            self._attaching.release()

    def detach(self, attached: Attached) -> None:
        """That way has ended: the server has."""
        with self._lock:
            if self._attached is not attached:
                return
            self._attached = None
            self._in_use[True] -= 1
            self._returned.notify()
        attached.close()

    def _attach(self, core: ModuleType, deadline: float) -> None:
        try:
            if not self.is_local(deadline):
                return
            now = time.monotonic()
            lent = self.channel(now + min(ATTACH_TIMEOUT_S, (deadline - now) / 2), unix=True, background=True)
            channel = lent.__enter__()
        except (OSError, ProtocolError, GCacheError):
            return
        try:
            attached = attach(channel, core)
            if attached is not None and not channel.wire.disarm():
                raise DeadlineError("the deadline has passed")
        except BaseException as error:
            lent.__exit__(type(error), error, None)
            if isinstance(error, OSError | ProtocolError | GCacheError):
                return
            raise
        with self._lock:
            if attached is not None and not self._closed:
                self._attached = attached  # and its connection stays lent
                self._breaker.succeeded()  # what `check_in` says for others: this may have been the probe
                return
        lent.__exit__(None, None, None)

    def channel(self, deadline: float, *, unix: bool = False, background: bool = False) -> Lent:
        """A connection to use in a `with` block, with its deadline set.

        A call in the `background` that is late does not have the server left alone: others may be more patient.

        It is closed if the block fails: it may be in mid-frame. Entering raises `UnavailableError` while the server is
        left alone, `DeadlineError`, other `OSError`s, and `GCacheError`.
        """
        return Lent(self, deadline, unix, background)

    def close(self) -> None:
        """Close the connections that are idle; others are closed when they are given back."""
        with self._lock:
            self._closed = True
            idle = [*self._idle[False], *self._idle[True]]
            self._idle = {False: [], True: []}
            attached = self._attached
        for channel in idle:
            channel.wire.close()
        if attached is not None:
            self.detach(attached)

    def check_out(self, deadline: float, *, unix: bool) -> Channel | None:
        """An idle connection, or leave to make one."""
        limit = MAX_UNIX_CONNECTIONS if unix else self.max_connections
        with self._lock:
            while self._in_use[unix] >= limit:
                self._num_waiting += 1
                returned = self._returned.wait(max(0.0, deadline - time.monotonic()))
                self._num_waiting -= 1
                if not returned:
                    raise DeadlineError("all connections to the server are in use")
            if self._closed or not self._breaker.allows(time.monotonic_ns()):
                raise UnavailableError(f"gcache server {self.address.name} is left alone for a while")
            self._in_use[unix] += 1
            idle = self._idle[unix]
            return idle.pop() if idle else None

    def check_in(self, channel: Channel, *, unix: bool) -> None:
        """A connection is not used any more."""
        channel.used_at = time.monotonic()
        usable = channel.wire.disarm()
        with self._lock:
            self._breaker.succeeded()
            self._in_use[unix] -= 1
            if self._num_waiting:
                self._returned.notify()
            if usable and not self._closed:
                self._idle[unix].append(channel)
                return
        channel.wire.close()

    def failed(self, error: BaseException, budget_s: float, *, unix: bool) -> None:
        """A connection has ended with `error`, in a call that had `budget_s`."""
        hasty = isinstance(error, DeadlineError) and budget_s < LEAST_BUDGET_S
        idle: list[Channel] = []
        with self._lock:
            self._in_use[unix] -= 1
            self._returned.notify()
            if isinstance(error, OSError | ProtocolError) and not hasty:
                self._breaker.failed(time.monotonic_ns())
                # What was connected to the same process has most likely ended with it.
                idle = [*self._idle[False], *self._idle[True]]
                self._idle = {False: [], True: []}
            else:  # the server is not to blame
                self._breaker.probing = False
        for channel in idle:
            channel.wire.close()

    def connect(self, deadline: float, *, unix: bool) -> Channel:
        """A new connection, greeted."""
        left = min(CONNECT_TIMEOUT_S, deadline - time.monotonic())
        if left <= 0:
            raise DeadlineError("the deadline has passed")
        try:
            sock = self._connect_unix(left) if unix else self._connect_tcp(left)
        except TimeoutError:
            raise DeadlineError("the deadline has passed") from None
        wire = Wire(sock, ANSWER_MAGIC, self._watchdog, self._core)
        try:
            wire.arm(deadline)
            return self._greet(wire, unix=unix)
        except BaseException:
            wire.close()
            raise

    def _connect_tcp(self, timeout_s: float) -> socket.socket:
        sock = socket.create_connection((self.address.host, self.address.port), timeout=timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _connect_unix(self, timeout_s: float) -> socket.socket:
        assert self._info is not None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(self._info.socket)
        except OSError:
            sock.close()
            raise
        return sock

    def _greet(self, wire: Wire, *, unix: bool) -> Channel:
        channel = Channel(wire, ServerInfo(0, "", "", "", "", ""), None, self.epoch)
        hello = msgspec.json.encode(Hello(PROTOCOL_VERSION, self._token))
        try:
            info = msgspec.json.decode(channel.call(Op.HELLO, hello), type=ServerInfo)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a greeting that can't be read: {error}") from None
        if info.version != PROTOCOL_VERSION:
            raise GCacheError(
                f"gcache server {self.address.name} speaks protocol {info.version}, this client {PROTOCOL_VERSION}"
            )
        with self._lock:
            known = self._info
        if self._may_map and (known is None or known.incarnation != info.incarnation):
            memory = map_arena(Path(info.arena), bytes.fromhex(info.incarnation))
            with self._lock:
                self._arena = None if memory is None else MappedArena(memory)
        with self._lock:
            self._info = info
            channel.info, channel.arena = info, self._arena if unix else None
        if unix and channel.arena is None:
            raise PeerClosedError("the server's arena is another one now")
        return channel
