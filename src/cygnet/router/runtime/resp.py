"""One pipelined connection to Redis: the hot path's. Commands are answered in order, soon, or not at all."""

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import hiredis

from cygnet.base.errors import StateUnavailableError

log = logging.getLogger(__name__)

Reply = Callable[[Any], None]
"""Gets the reply, a `hiredis.ReplyError`, or a `StateUnavailableError`; exactly once."""

MAX_PENDING = 65536
FIRST_DELAY_S, LAST_DELAY_S = 0.05, 1.0
HANDSHAKE_S = 1.0


class RedisPipe:
    """Keeps a connection to one Redis open, and gives up on it when a reply is late.

    A Redis that accepts connections and never answers (frozen, or swapping) is as good as gone: once one reply is
    `timeout_s` late all pending commands fail and the connection is dropped; until a new one has answered a PING,
    commands fail at once. So a caller waits at most `timeout_s`, and only the first ones do. Every connection begins
    with the commands of `setup`.
    """

    def __init__(self, url: str, timeout_s: float, setup: Sequence[tuple[bytes, ...]] = ()) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 6379
        self._socket = unquote(parts.path) if parts.scheme == "unix" else ""
        self._hello: list[tuple[bytes, ...]] = [(b"PING",), *setup]
        database = "" if self._socket else parts.path.strip("/")
        if database:
            self._hello.insert(0, (b"SELECT", database.encode()))
        if parts.password:
            user = (unquote(parts.username).encode(),) if parts.username else ()
            self._hello.insert(0, (b"AUTH", *user, unquote(parts.password).encode()))
        self.address = self._socket or f"{self._host}:{self._port}"
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self._ready = asyncio.Event()
        self._lost = asyncio.Event()
        self._keeper = self._loop.create_task(self._keep_connected(), name="redis connection")

    @property
    def ready(self) -> bool:
        """Whether commands are sent now."""
        return self._connection is not None

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait for a connection; `False` when there is none after `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ready.wait(), timeout_s)
        return self.ready

    def call(self, command: tuple[bytes | int | str, ...], then: Reply) -> None:
        """Send a command; `then` gets what comes back."""
        connection = self._connection
        if connection is None or len(connection.pending) >= MAX_PENDING:
            then(StateUnavailableError(f"Redis at {self.address} can't be reached"))
        else:
            connection.send(command, then)

    async def ask(self, command: tuple[bytes | int | str, ...]) -> Any:
        """Send a command and wait. Raises `StateUnavailableError`, for an error reply too: a Redis that refuses, as
        while it loads, can't be used now.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        self.call(command, lambda reply: None if future.done() else future.set_result(reply))
        return self.checked(await future)

    def checked(self, reply: Any) -> Any:
        """A reply that is none of the errors."""
        if isinstance(reply, hiredis.ReplyError):
            raise StateUnavailableError(f"Redis at {self.address} refused: {reply}")
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _keep_connected(self) -> None:
        delay, told = FIRST_DELAY_S, False
        while True:
            self._lost.clear()
            try:
                connection = await self._connect()
            except (OSError, TimeoutError, hiredis.HiredisError, ssl.SSLError) as error:
                if not told:
                    log.warning("Redis at %s: %s; placing requests without it", self.address, error or "no answer")
                    told = True
                await asyncio.sleep(delay)
                delay = min(delay * 2, LAST_DELAY_S)
                continue
            if told:
                log.warning("Redis at %s is back", self.address)
            self._connection, delay, told = connection, FIRST_DELAY_S, False
            self._ready.set()
            await self._lost.wait()
            log.warning("Redis at %s: connection lost (%s)", self.address, connection.reason)
            told = True
            self._ready.clear()

    async def _connect(self) -> "_Connection":
        async with asyncio.timeout(HANDSHAKE_S):
            make = partial(_Connection, self._loop, self._timeout_s, self._on_lost)
            if self._socket:
                _, connection = await self._loop.create_unix_connection(make, self._socket)
            else:
                _, connection = await self._loop.create_connection(make, self._host, self._port)
            try:
                for command in self._hello:
                    answer: asyncio.Future[Any] = self._loop.create_future()
                    connection.send(command, answer.set_result)
                    reply = await answer
                    if isinstance(reply, hiredis.ReplyError):
                        raise reply
                    if isinstance(reply, StateUnavailableError):
                        raise OSError(connection.reason)
            except BaseException:
                connection.close("handshake failed")
                raise
        return connection

    def _on_lost(self, connection: "_Connection") -> None:
        if connection is self._connection:
            self._connection = None
            self._lost.set()

    async def aclose(self) -> None:
        """Close; what is pending fails."""
        self._keeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._keeper
        if self._connection is not None:
            self._connection.close("closed")


class _Connection(asyncio.Protocol):
    """Replies in order to commands in order."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timeout_s: float, on_lost: Callable[["_Connection"], None]
    ) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._reader = hiredis.Reader()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self.pending: deque[tuple[float, Reply]] = deque()
        self.reason = "closed by Redis"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def send(self, command: tuple[bytes | int | str, ...], then: Reply) -> None:
        assert self._transport is not None
        self.pending.append((self._loop.time() + self._timeout_s, then))
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._check)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                _, then = self.pending.popleft()
                then(reply)
        except (hiredis.ProtocolError, IndexError):
            self.close("it does not speak the Redis protocol")

    def _check(self) -> None:
        """One timer for all: looks again when the oldest pending command is due."""
        self._timer = None
        if self.pending:
            left = self.pending[0][0] - self._loop.time()
            if left <= 0:
                self.close(f"no answer within {self._timeout_s * 1000:.0f} ms")
            else:
                self._timer = self._loop.call_later(left, self._check)

    def close(self, reason: str) -> None:
        """Drop the connection at once and fail what is pending."""
        if self._transport is not None and not self._transport.is_closing():
            self.reason = reason
            self._transport.abort()
        self._fail()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self.reason = str(error)
        self._fail()

    def _fail(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_lost(self)
        pending, self.pending = self.pending, deque()
        for _, then in pending:
            then(StateUnavailableError(f"Redis: {self.reason}"))
