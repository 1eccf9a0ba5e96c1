"""Failures as HTTP: status, OpenAI's error object, headers."""

import msgspec

from cygnet.base.errors import CygnetError, EngineDeadError, QueueFullError, RequestError


class RequestTimeoutError(RequestError):
    """The client was too slow to send its body."""

    status = 408
    default_code = "request_timeout"


class ForbiddenError(RequestError):
    """A browser sent this from another site's page that CORS does not allow."""

    status = 403
    type = "permission_error"
    default_code = "cross_site"


class SequenceFailedError(CygnetError):
    """The engine gave up on one sequence; the server lives on."""


class ClientDisconnectedError(CygnetError):
    """Nobody is left to answer. Ends the work; never becomes a response."""


class ErrorDetail(msgspec.Struct):
    """What went wrong; `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The one shape of every error, also inside an event stream."""

    error: ErrorDetail


class HttpError(msgspec.Struct, frozen=True):
    """A failure, ready to be sent."""

    status: int
    body: ErrorBody
    headers: tuple[tuple[str, str], ...] = ()


def http_error(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
) -> HttpError:
    """Assemble an `HttpError`."""
    return HttpError(status, ErrorBody(ErrorDetail(message, kind, param, code)), headers)


def to_http(error: Exception) -> HttpError:
    """The response for `error`. What is not ours or not the caller's business becomes a plain 500 without details."""
    if isinstance(error, RequestError):
        headers: tuple[tuple[str, str], ...] = ()
        if isinstance(error, QueueFullError):
            headers = (("retry-after", str(error.retry_after_s)),)
        elif error.status == 401:
            headers = (("www-authenticate", "Bearer"),)
        elif error.status in (408, 413):
            headers = (("connection", "close"),)
        return http_error(
            error.status, error.message, kind=error.type, param=error.param, code=error.code, headers=headers
        )
    if isinstance(error, EngineDeadError):
        message = str(error) or "the engine is not running"
        return http_error(503, message, kind="service_unavailable_error", code="engine_unavailable")
    if isinstance(error, SequenceFailedError):
        return http_error(500, str(error), kind="server_error", code="generation_failed")
    return http_error(500, "internal error; the server's log has the details", kind="server_error", code="internal")


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that a task group's exception is about: the first leaf (the others follow from its cancellation)."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
