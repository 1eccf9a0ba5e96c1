"""Connections to one worker: raw HTTP/1.1, kept alive, one request at a time on each."""

import asyncio
from contextlib import suppress
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from cygnet.router.runtime.descriptors import is_own_fault
from cygnet.router.runtime.wire import Headers, ResponseHead

MAX_HEAD_BYTES = 256 << 10
MAX_IDLE = 256
OWN_FAULT = "own"


class Receiver(Protocol):
    """Who gets an answer. After `complete` or `lost` nothing more comes."""

    def connected(self, connection: "UpstreamConnection") -> None:
        """The request has been sent on `connection`, which had to be made."""
        ...

    def head(self, head: ResponseHead) -> None: ...

    def body(self, pieces: list[bytes]) -> None: ...

    def complete(self) -> None: ...

    def lost(self, kind: str, stale: bool) -> None:
        """The answer will not come, or not go on. `kind`: refused (nobody listens), connect, reset, garbage; or
        `OWN_FAULT`, for which the worker is not to blame.

        `stale`: the connection had served before and was closed without a byte, as workers do with idle ones.
        """
        ...


class UpstreamConnection(asyncio.Protocol):
    """One connection. Belongs to a receiver from `send` until the answer is complete or lost, else to its pool."""

    def __init__(self, pool: "WorkerPool") -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._served = False
        self.idle_since = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._begin()

    def _begin(self) -> None:
        self._reason = b""
        self._headers: Headers = []
        self._head: ResponseHead | None = None
        self._head_bytes = 0
        self._in_head = True
        self._beside_body = 0  # received since a byte of the body was: an unfinished trailer, a chunk's extensions
        self._is_complete = False
        self._keep_alive = False
        self._until_close = False
        self._pieces: list[bytes] = []

    # --- towards the worker

    def send(self, receiver: Receiver, head: bytes, body: bytes | bytearray) -> None:
        """Send a request whose answer goes to `receiver`."""
        assert self._transport is not None
        self._receiver = receiver
        if len(body) < 65536:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    def pause(self) -> None:
        """The receiver can't take more now."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """It can again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once, which tells the worker to stop; the receiver hears nothing more."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.closed(self)
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if self._until_close and error is None:
            receiver.complete()
        else:
            receiver.lost("reset", self._served and self._in_head and not self._head_bytes)

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:  # nothing was asked: whatever it is, it is not trusted
            self.abort()
            return
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._beside_body += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError):
            if not self._is_complete:
                self.abort()
                receiver.lost("garbage", False)
                return
            self._keep_alive = False  # the answer was whole and what followed it was not
        if (self._head_bytes if self._in_head else self._beside_body) > MAX_HEAD_BYTES:
            self.abort()
            receiver.lost("garbage", False)
            return
        head, self._head = self._head, None
        if head is not None:
            receiver.head(head)  # which may abort this connection
        if self._pieces and self._receiver is not None:
            pieces, self._pieces = self._pieces, []
            receiver.body(pieces)
        if self._is_complete and self._receiver is not None:
            self._receiver = None
            self._recycle()
            receiver.complete()

    def _recycle(self) -> None:
        """Back to the pool, if the connection is fit for another request."""
        assert self._transport is not None
        if self._keep_alive and not self._transport.is_closing() and self._transport.get_write_buffer_size() == 0:
            self._served = True
            self._begin()
            self._transport.resume_reading()
            self._pool.put_back(self)
        else:
            self._transport.abort()

    # --- httptools

    def on_status(self, status: bytes) -> None:
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), name, value))
        else:  # a trailer, which is left out
            self._beside_body = 0

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue, 103 Early Hints: another head follows
            self._reason, self._headers = b"", []
            return
        if not self._in_head:
            return
        self._in_head = False
        length: int | None = None
        chunked = False
        for lower, _, value in self._headers:
            if lower == b"content-length":
                length = int(value)
            elif lower == b"transfer-encoding":
                chunked = True
        if chunked:
            length = None
        elif status in (204, 304):
            length = 0
        elif length is None:
            self._until_close = True
        self._head = ResponseHead(status, self._reason, self._headers, length)

    def on_body(self, data: bytes) -> None:
        self._beside_body = 0
        if not self._is_complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if not self._in_head and not self._is_complete:
            self._is_complete = True
            self._keep_alive = self._parser.should_keep_alive()  # the parser forgets it after this


class WorkerPool:
    """The connections to one worker. Connecting is done by tasks that the pool owns."""

    def __init__(self, url: str, connect_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self.host_header = parts.netloc.encode()
        self._connect_s = connect_s
        self._loop = asyncio.get_running_loop()
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()
        self._connecting: dict[Receiver, asyncio.Task[None]] = {}
        self._retired = False

    def send(
        self, receiver: Receiver, head: bytes, body: bytes | bytearray, *, fresh: bool = False
    ) -> UpstreamConnection | None:
        """Send a request, on an idle connection if there is one and `fresh` is not asked for.

        Returns the connection, or `None` when one is being made; then `receiver.connected` is told it.
        """
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.is_open:
                connection.send(receiver, head, body)
                return connection
        self._connecting[receiver] = self._loop.create_task(self._connect(receiver, head, body))
        return None

    async def _connect(self, receiver: Receiver, head: bytes, body: bytes | bytearray) -> None:
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(self), self._host, self._port
                )
        except (OSError, TimeoutError) as error:
            del self._connecting[receiver]
            if is_own_fault(error):
                receiver.lost(OWN_FAULT, False)
            else:
                receiver.lost("refused" if isinstance(error, ConnectionRefusedError) else "connect", False)
            return
        except asyncio.CancelledError:
            self._connecting.pop(receiver, None)
            raise
        del self._connecting[receiver]
        connection.send(receiver, head, body)
        receiver.connected(connection)

    def cancel(self, receiver: Receiver) -> None:
        """The receiver no longer waits for a connection."""
        task = self._connecting.pop(receiver, None)
        if task is not None:
            task.cancel()

    def opened(self, connection: UpstreamConnection) -> None:
        self._open.add(connection)

    def closed(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def put_back(self, connection: UpstreamConnection) -> None:
        if self._retired or len(self._idle) >= MAX_IDLE:
            connection.abort()
        else:
            connection.idle_since = self._loop.time()
            self._idle.append(connection)

    def close_idle(self, before: float) -> None:
        """Close connections that have been idle since `before`. The least recently used ones are at the front."""
        while self._idle and self._idle[0].idle_since < before:
            self._idle.pop(0).abort()

    def retire(self) -> None:
        """The worker has left: close what is idle, and the rest when it becomes so."""
        self._retired = True
        self.close_idle(float("inf"))

    async def aclose(self) -> None:
        """Close all connections, also those in use."""
        tasks = list(self._connecting.values())
        for task in tasks:
            task.cancel()
        for connection in list(self._open):
            connection.abort()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
