"""The outermost layer of every HTTP request: its id, the key, other sites' pages, the log line, and the last net."""

import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cygnet.api.errors import ForbiddenError, to_http
from cygnet.api.record import Record, attach
from cygnet.api.record import log as access_log
from cygnet.api.sse import send_error
from cygnet.base.errors import AuthenticationError, RequestError

log = logging.getLogger("cygnet.api")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/docs", "/openapi.json", "/favicon.ico"})
"""Served without a key: they say nothing of anybody's text."""
OPEN_PREFIX = "/static/"
MAX_LOGGED_PATH = 200


class Gateway:
    """ASGI middleware.

    - `x-request-id` is passed through when it is 1 to 128 letters, digits or `._:-`, else made; every response has it.
    - With an API key, everything but `OPEN_PATHS` and the page's files needs `Authorization: Bearer <key>`.
    - What a browser sends from another site's page is refused unless CORS allows that origin: a page must not be able
      to use a server that merely listens on the visitor's own machine.
    - An exception that nobody handled is logged with its traceback and answered with a plain 500.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str,
        cors_origins: tuple[str, ...],
        log_requests: bool,
        finished: Callable[[Record], None],
    ) -> None:
        self._app = app
        self._key = api_key.encode()
        self._origins = frozenset(cors_origins)
        self._log = log_requests
        self._finished = finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        raw_path = scope.get("raw_path") or b""
        path = raw_path[:MAX_LOGGED_PATH].decode("ascii", "backslashreplace")  # percent-encoded: no line breaks
        record = Record(request_id, scope["method"], path, time.monotonic_ns())
        attach(scope, record)

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._guarded(scope, headers, record, receive, labelled)
        finally:
            self._close(scope, record)

    async def _guarded(self, scope: Scope, headers: Headers, record: Record, receive: Receive, send: Send) -> None:
        try:
            self._admit(scope, headers)
            await self._app(scope, receive, send)
        except RequestError as error:
            await send_error(send, to_http(error))
        except Exception as error:
            log.exception("request %s failed", record.request_id)
            record.failure = type(error).__name__
            if record.status:
                raise  # too late for a response: the server closes the connection
            await send_error(send, to_http(error))

    def _admit(self, scope: Scope, headers: Headers) -> None:
        site = headers.get("sec-fetch-site", "")
        if (
            site in ("cross-site", "same-site")
            and scope["method"] not in ("GET", "HEAD", "OPTIONS")
            and not {headers.get("origin", ""), "*"} & self._origins
        ):
            raise ForbiddenError("this server does not take requests from other sites' pages (see api.cors_origins)")
        path = scope["path"]
        if not self._key or path in OPEN_PATHS or path.startswith(OPEN_PREFIX) or scope["method"] == "OPTIONS":
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._key):
            what = "wrong" if token else "missing"
            raise AuthenticationError(f"the API key is {what}; send it as 'Authorization: Bearer <key>'")

    def _close(self, scope: Scope, record: Record) -> None:
        route = scope.get("route")
        if route is not None:
            record.route = getattr(route, "path", record.route)
        self._finished(record)
        if self._log:
            access_log.info("%s", record.line(time.monotonic_ns()))
