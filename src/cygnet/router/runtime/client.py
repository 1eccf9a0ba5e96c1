"""Connections of callers: raw HTTP/1.1 in, answers out, one request at a time on each."""

import asyncio
import ctypes
from collections import deque
from typing import Protocol, cast

import httptools

from cygnet.router.config import ServerSettings
from cygnet.router.runtime.wire import Headers, HttpRequest, error_body, own_response

MAX_PIPELINED = 16
LONG_REST = 64 << 10
"""From this many bytes on, what is still to come of a body is received straight into its place."""
LINGER_S = 2.0
OFFER = frozenset((b"connection", b"upgrade", b"http2-settings", b"expect"))
"""Headers of an offer to go on in another protocol, and what need not be answered twice."""


class Handler(Protocol):
    """Who serves one request. Told when its caller is gone or slow."""

    def client_lost(self) -> None: ...

    def client_paused(self) -> None: ...

    def client_resumed(self) -> None: ...


class Gate(Protocol):
    """What a connection needs of the proxy."""

    settings: ServerSettings

    def admit(self, connection: "ClientConnection") -> bool:
        """A new connection; `False` when there are too many."""
        ...

    def gone(self, connection: "ClientConnection") -> None: ...

    def handle(self, connection: "ClientConnection", request: HttpRequest) -> None:
        """Serve a request; ends with `connection.finish()`, maybe before this returns."""
        ...

    def buffer(self, num_bytes: int) -> bool:
        """Account for bytes of bodies; `False` (and nothing is counted) when that is too much. Negative ones are
        freed.
        """
        ...

    def refused(self, status: int) -> None:
        """A request was refused before it was whole."""
        ...

    @property
    def stopping(self) -> bool: ...


class _Refuse(Exception):
    """Inside a parser's callback: this request can't be taken."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientConnection(asyncio.Protocol):
    """One caller's connection.

    While a request is served the socket is still read, so that a caller who leaves is noticed at once; what it sends
    ahead is kept up to `MAX_PIPELINED` requests, then reading pauses.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._handler: Handler | None = None
        self._busy = False
        self._waiting: deque[HttpRequest] = deque()
        self._refusal: _Refuse | None = None
        self._discarding = False
        self._buffered = 0  # bytes of the body being received
        self._parser = httptools.HttpRequestParser(self)
        self._in_head = True
        self._started = False
        self._head_bytes = 0
        self._reset()
        self.deadline = 0.0
        """When the connection is closed unless something happens; loop time. 0: not while a request is served."""

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.deadline = self._loop.time() + self._gate.settings.idle_s
        if not self._gate.admit(self):
            self._transport.write(
                own_response(503, error_body("too many connections", "overloaded", "connections"), keep_alive=False)
            )
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._gate.gone(self)
        self._gate.buffer(-self._buffered)
        self._buffered = 0
        for request in self._waiting:
            self._gate.buffer(-len(request.body))
        self._waiting.clear()
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.client_lost()

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.client_paused()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.client_resumed()

    def data_received(self, data: bytes) -> None:
        if self._discarding or self._refusal is not None:
            return
        if not self._in_head:
            self._beside_body += len(data)
        else:
            self._head_bytes += len(data)
            if not self._started:
                self._started = True
                if not self._busy:
                    self.deadline = self._loop.time() + self._gate.settings.receive_s
        while data:
            data = self._feed(data)
        if self._length >= LONG_REST:
            self._place_rest()
        self._next()

    def _feed(self, data: bytes) -> bytes:
        """Parse. Returns what is to be parsed next: nothing, or the rest of a request that offered another protocol."""
        try:
            self._parser.feed_data(data)
            if self._in_head and self._head_bytes > self._gate.settings.max_head_bytes:
                raise _Refuse(431, "request line and headers are too large")
            if not self._in_head and self._beside_body > self._gate.settings.max_head_bytes:
                raise _Refuse(431, "trailers are too large")
        except _Refuse as refusal:
            self._refuse(refusal)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, _Refuse):
                raise
            self._refuse(cause)
        except httptools.HttpParserUpgrade as offer:
            return self._decline(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(_Refuse(400, f"malformed HTTP request: {error}"))
        return b""

    def _decline(self, rest: bytes) -> bytes:
        """A caller offers another protocol (Java's client does, for HTTP/2, with every first request).

        The parser takes the request to end with its head. It is parsed again, without the offer, with what follows.
        """
        request = self._waiting[-1]
        if request.method == b"CONNECT":
            request.keep_alive = False
            self._discarding = True
            return b""
        self._waiting.pop()
        self._parser = httptools.HttpRequestParser(self)
        kept = [b"%s: %s\r\n" % (name, value) for lower, name, value in request.headers if lower not in OFFER]
        return b"%s %s HTTP/1.1\r\n%s\r\n%s" % (request.method, request.target, b"".join(kept), rest)

    def _place_rest(self) -> None:
        """Receive the rest of a long body without the parser, which would copy it."""
        rest = self._length - sum(len(piece) for piece in self._body)
        if self._in_head or rest < LONG_REST or self._refusal is not None or self._discarding:
            return
        assert self._transport is not None
        body, filled = _make_room(None, self._length), 0
        for piece in self._body:
            body[filled : filled + len(piece)] = piece
            filled += len(piece)
        self._body.clear()
        self._follow(_BodyReader(self, body, filled))

    def _follow(self, protocol: asyncio.BaseProtocol) -> None:
        """Give what arrives to `protocol`."""
        assert self._transport is not None
        was_reading = self._transport.is_reading()
        if was_reading:
            self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        if was_reading:
            self._transport.resume_reading()

    def part_placed(self, num_bytes: int) -> bool:
        """Account for bytes received in place; `False` when that is too much."""
        if self._gate.buffer(num_bytes):
            self._buffered += num_bytes
            return True
        self._follow(self)
        self._refuse(_Refuse(503, "the router holds too many request bodies now"))
        self._next()
        return False

    def body_placed(self, body: bytearray) -> None:
        """A body is whole that was received in place."""
        self._parser = httptools.HttpRequestParser(self)
        self._follow(self)
        self._arrived(body)
        self._next()

    def eof_received(self) -> bool:
        return False  # closes: a caller that will not read on is treated as one that shut down its side

    # --- httptools

    def _reset(self) -> None:
        self._in_head = True
        self._started = False
        self._head_bytes = 0
        self._trailer_bytes = 0
        self._beside_body = 0  # received since a byte of the body was: an unfinished trailer, a chunk's extensions
        self._target = b""
        self._headers: Headers = []
        self._length = 0
        self._body: list[bytes] = []
        self._fields: dict[bytes, bytes] = {}

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), name, value))
            return
        self._trailer_bytes += len(name) + len(value) + 4  # a trailer is no header, and none is passed on
        if self._trailer_bytes > self._gate.settings.max_head_bytes:
            raise _Refuse(431, "trailers are too large")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._fields = {lower: value for lower, _, value in reversed(self._headers)}
        size = len(self._target) + sum([len(name) + len(value) + 4 for _, name, value in self._headers])
        if size > self._gate.settings.max_head_bytes:
            raise _Refuse(431, "request line and headers are too large")
        if len(self._headers) > self._gate.settings.max_headers:
            raise _Refuse(431, f"more than {self._gate.settings.max_headers} headers")
        self._length = int(self._fields.get(b"content-length", b"0"))
        if self._length > self._gate.settings.max_body_bytes:
            raise _Refuse(413, f"the body is larger than {self._gate.settings.max_body_bytes} bytes")
        self._method = self._parser.get_method()
        self._keep_alive = self._parser.should_keep_alive()
        self._chunks = self._parser.get_http_version() == "1.1"
        expected = self._fields.get(b"expect")
        if expected is not None:
            if expected.lower() != b"100-continue":
                raise _Refuse(417, "unknown expectation")
            if not self._busy:
                assert self._transport is not None
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        self._beside_body = 0
        if self._buffered + len(data) > self._gate.settings.max_body_bytes:
            raise _Refuse(413, f"the body is larger than {self._gate.settings.max_body_bytes} bytes")
        if not self._gate.buffer(len(data)):
            raise _Refuse(503, "the router holds too many request bodies now")
        self._buffered += len(data)

    def on_message_complete(self) -> None:
        self._arrived(self._body[0] if len(self._body) == 1 else b"".join(self._body))

    def _arrived(self, body: bytes | bytearray) -> None:
        """A request is whole."""
        request = HttpRequest(
            self._method, self._target, self._headers, self._fields, body, self._keep_alive, self._chunks
        )
        self._buffered = 0  # from here on the request's server accounts for its body
        self._waiting.append(request)
        self._reset()

    # --- one request after the other

    def _next(self) -> None:
        """Serve what has arrived, unless something is being served."""
        assert self._transport is not None
        while self._waiting and not self._busy and not self._transport.is_closing():
            self._busy = True
            self.deadline = 0.0
            request = self._waiting.popleft()
            self._gate.handle(self, request)
        if self._busy or self._transport.is_closing():
            if len(self._waiting) >= MAX_PIPELINED and self._transport.is_reading():
                self._transport.pause_reading()
            return
        if self._refusal is not None:
            refusal = self._refusal
            self._gate.refused(refusal.status)
            body = error_body(str(refusal), "invalid_request_error", None)
            self._transport.write(own_response(refusal.status, body, keep_alive=False))
            self._close_gently()

    def _refuse(self, refusal: _Refuse) -> None:
        """Answer with an error once what came before is answered, and close."""
        self._refusal = refusal
        self._gate.buffer(-self._buffered)
        self._buffered = 0
        self._body = []

    def serve(self, handler: Handler) -> None:
        """`handler` serves the present request from now on."""
        self._handler = handler

    def write(self, data: bytes) -> None:
        """Send a part of an answer."""
        assert self._transport is not None
        self._transport.write(data)

    def finish(self, *, keep_alive: bool) -> None:
        """The answer is complete. The next request, if one waits, is served in the next turn of the loop."""
        assert self._transport is not None
        self._handler = None
        self._busy = False
        if self._transport.is_closing():
            return
        if not keep_alive or self._gate.stopping:
            self.deadline = self._loop.time() + self._gate.settings.stall_s  # for what is still to be taken
            self._transport.close()
            return
        self.deadline = self._loop.time() + self._gate.settings.idle_s
        if self._waiting or self._refusal is not None:
            self._loop.call_soon(self._next)
        if not self._transport.is_reading():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Break off: the caller sees that the answer is not whole."""
        self._handler = None
        if self._transport is not None:
            self._transport.abort()

    def _close_gently(self) -> None:
        """Close without losing what was sent: unread input would turn the close into a reset."""
        assert self._transport is not None
        self._discarding = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.deadline = self._loop.time() + LINGER_S

    @property
    def is_idle(self) -> bool:
        """No request is being served or received."""
        return not self._busy and not self._waiting and not self._started

    def close_if_idle(self) -> None:
        """Close when nothing is being served; else `finish` does it."""
        if self.is_idle and self._transport is not None:
            self._transport.close()


_make_room = ctypes.pythonapi.PyByteArray_FromStringAndSize
"""A `bytearray` of the length that is the second argument, not zeroed, when the first is `None`. All of it is written
before any of it is read, and zeros would cost as much as one more copy of a long body."""
_make_room.argtypes, _make_room.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object


class _BodyReader(asyncio.BufferedProtocol):
    """Receives the rest of a connection's long body into its place, and hands the connection back."""

    def __init__(self, connection: ClientConnection, body: bytearray, filled: int) -> None:
        self._connection = connection
        self._body = body
        self._view = memoryview(body)
        self._filled = filled

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, num_bytes: int) -> None:
        self._filled += num_bytes
        if self._connection.part_placed(num_bytes) and self._filled == len(self._body):
            self._connection.body_placed(self._body)

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.connection_lost(error)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
