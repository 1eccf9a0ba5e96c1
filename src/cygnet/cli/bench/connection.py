"""HTTP/1.1 for a load generator: kept-alive connections, bodies handed over as they arrive, little work per chunk.

A general HTTP client spends more time per streamed token than a small model takes to make it, and would measure
itself. This one parses with httptools and calls the request's sink straight from the socket's read callback.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

Sink = Callable[[int, bytes], None]
"""Called with the status and each piece of the body, as it arrives."""


class ConnectionFailed(Exception):
    """No connection, or it broke before the answer was complete. `kind` is a short word for the failure table."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class _Connection(asyncio.Protocol):
    """One TCP connection; at most one exchange at a time."""

    def __init__(self) -> None:
        self.usable = True
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._done: asyncio.Future[int] | None = None
        self._status = 0
        self._until_close = True

    async def exchange(self, request: bytes, sink: Sink) -> int:
        """Send `request`; return the status when the whole answer has gone to `sink`."""
        assert self._transport is not None
        assert self._done is None
        self._parser = httptools.HttpResponseParser(self)
        self._sink, self._status, self._until_close = sink, 0, True
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._done = self._sink = None

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionFailed("bad HTTP", str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._status and self._until_close:
            self._finish()  # a body without a length ends with the connection
        else:
            kind = "stream cut" if self._status else "disconnected"
            self._fail(ConnectionFailed(kind, str(error or "the server closed the connection")))

    # --- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink(self._status, body)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.usable = False
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._status)

    def _fail(self, error: Exception) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class Connections:
    """Connections to one server. There are as many as there are requests at once; the caller bounds those."""

    def __init__(self, url: str, api_key: str = "", connect_timeout_s: float = 10.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// address")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._head = f"Host: {host}:{self._port}\r\nAccept: */*\r\nContent-Type: application/json\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    async def request(self, method: str, path: str, body: bytes, sink: Sink, timeout_s: float) -> int:
        """One exchange; returns the HTTP status. Raises `ConnectionFailed`, also after `timeout_s`.

        A kept connection that the server has dropped meanwhile is replaced by a new one, once.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        message = head.encode("latin-1") + body
        try:
            async with asyncio.timeout(timeout_s):
                while self._idle:
                    connection = self._idle.pop()
                    if connection.usable:
                        try:
                            return await self._exchange(connection, message, sink)
                        except ConnectionFailed as error:
                            if error.kind != "disconnected":
                                raise
                return await self._exchange(await self._connect(), message, sink)
        except TimeoutError:
            raise ConnectionFailed("timeout", f"no complete answer within {timeout_s:g} s") from None

    async def fetch(self, method: str, path: str, body: bytes = b"", timeout_s: float = 10.0) -> tuple[int, bytes]:
        """One exchange whose whole body is wanted at once."""
        parts: list[bytes] = []
        status = await self.request(method, path, body, lambda _status, data: parts.append(data), timeout_s)
        return status, b"".join(parts)

    def close(self) -> None:
        """Drop all kept connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, connection: _Connection, message: bytes, sink: Sink) -> int:
        status = await connection.exchange(message, sink)
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return status

    async def _connect(self) -> _Connection:
        context = ssl.create_default_context() if self._tls else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, self._host, self._port, ssl=context
                )
        except TimeoutError:
            raise ConnectionFailed("connect", f"no connection to {self._host}:{self._port} in time") from None
        except OSError as error:
            raise ConnectionFailed("connect", error.strerror or str(error)) from None
        return connection
