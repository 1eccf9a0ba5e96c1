"""HTTP/1.1 heads as bytes: what is passed on, what is not, and the router's own answers."""

from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

Headers = list[tuple[bytes, bytes, bytes]]
"""Name in lower case, name as it came, value."""

HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
"""Headers that concern one connection, not the message."""

NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
"""Request headers that the router writes itself or leaves out."""

TRACE_CONTEXT = frozenset((b"traceparent", b"tracestate"))

NOT_RETURNED = HOP_BY_HOP | {b"content-length", b"x-request-id"}
"""Response headers that the router writes itself or leaves out."""


@dataclass(slots=True)
class HttpRequest:
    """One whole request."""

    method: bytes
    target: bytes
    headers: Headers
    fields: dict[bytes, bytes]
    """The first value of each header, by its name in lower case."""
    body: bytes | bytearray
    keep_alive: bool
    chunks: bool
    """The caller speaks HTTP/1.1, so an answer of unknown length can be sent in chunks."""

    def header(self, name: bytes) -> bytes:
        """Value of the first header `name` (in lower case), or empty."""
        return self.fields.get(name, b"")


@dataclass(slots=True)
class ResponseHead:
    """Head of a worker's answer. `length` is that of its body, `None` when only its end will tell."""

    status: int
    reason: bytes
    headers: Headers
    length: int | None


def connection_options(headers: Headers) -> frozenset[bytes]:
    """Names that `Connection` headers declare to be of this connection only."""
    options: set[bytes] = set()
    for lower, _, value in headers:
        if lower == b"connection":
            options.update(part.strip().lower() for part in value.split(b","))
    return frozenset(options)


def request_head(
    request: HttpRequest, host: bytes, request_id: bytes, authorization: bytes | None, trace: bytes | None = None
) -> bytes:
    """The request's head for a worker. `authorization` replaces the caller's keys when given; empty removes them.

    `trace` are whole header lines that replace the caller's trace context.
    """
    skip = NOT_FORWARDED
    if b"connection" in request.fields:
        skip = skip | connection_options(request.headers)
    if authorization is not None:
        skip = skip | {b"authorization", b"x-api-key"}
    if trace is not None:
        skip = skip | TRACE_CONTEXT
    parts = [b"%s %s HTTP/1.1\r\nHost: %s\r\n" % (request.method, request.target, host)]
    parts += [b"%s: %s\r\n" % (name, value) for lower, name, value in request.headers if lower not in skip]
    if trace is not None:
        parts.append(trace)
    if authorization:
        parts.append(b"Authorization: %s\r\n" % authorization)
    parts.append(b"Content-Length: %d\r\nX-Request-Id: %s\r\n\r\n" % (len(request.body), request_id))
    return b"".join(parts)


def response_head(head: ResponseHead, request: HttpRequest, request_id: bytes) -> tuple[bytes, bool]:
    """The answer's head for the caller, and whether its body goes in chunks."""
    options = connection_options(head.headers)
    skip = NOT_RETURNED | options if options else NOT_RETURNED
    parts = [b"HTTP/1.1 %d %s\r\n" % (head.status, head.reason)]
    parts += [b"%s: %s\r\n" % (name, value) for lower, name, value in head.headers if lower not in skip]
    parts.append(b"X-Request-Id: %s\r\n" % request_id)
    chunked = False
    if head.length is not None:
        if head.status not in (204, 304):
            parts.append(b"Content-Length: %d\r\n" % head.length)
    elif request.chunks:
        parts.append(b"Transfer-Encoding: chunked\r\n")
        chunked = True
    else:
        request.keep_alive = False
    parts.append(b"\r\n" if request.keep_alive and request.chunks else _connection(request))
    return b"".join(parts), chunked


def _connection(request: HttpRequest) -> bytes:
    """HTTP/1.0 callers want to be told that a connection stays, others that it does not."""
    return b"Connection: keep-alive\r\n\r\n" if request.keep_alive else b"Connection: close\r\n\r\n"


def own_response(
    status: int,
    body: bytes,
    *,
    keep_alive: bool,
    content_type: str = "application/json",
    headers: Iterable[tuple[str, str]] = (),
) -> bytes:
    """An answer of the router's own."""
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers),
        f"Connection: {'keep-alive' if keep_alive else 'close'}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def error_body(message: str, kind: str, code: str | None, param: str | None = None) -> bytes:
    """An error as OpenAI's API spells it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def chunk(pieces: list[bytes]) -> bytes:
    """`pieces` as one chunk of a chunked body."""
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
