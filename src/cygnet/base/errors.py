"""Every exception Cygnet raises on purpose.

    CygnetError
    ├── RequestError               the caller's fault; carries request_id, the field at fault and an HTTP status
    │   ├── InvalidRequestError    400  a value is wrong
    │   ├── AuthenticationError    401  no API key, or a wrong one
    │   ├── ModelNotFoundError     404  the request names a model this server does not have
    │   ├── ContextLengthError     400  prompt + max_tokens does not fit
    │   ├── BodyTooLargeError      413  request body over the limit
    │   └── QueueFullError         429  too many waiting requests; carries retry_after_s
    ├── EngineDeadError            503  the engine process is gone or stopping
    ├── StateUnavailableError      503  the routers' shared state can't be reached; requests go on without it
    ├── ConfigError                     a setting is unknown, ill-typed or impossible; names it and the remedy
    ├── ModelLoadError                  weights, config or tokenizer are missing or unusable; names file and remedy
    └── InvariantError                  our own bookkeeping is broken. A bug: never caught to go on.

"No room" is not an exception: functions that may lack room return `None` or `False` and change nothing.
"""


class CygnetError(Exception):
    """Root of the tree."""


class RequestError(CygnetError):
    """A request can't be served because of what the caller sent.

    `param` names the field at fault as the API spells it; `code` is a short machine-readable word.
    """

    status = 400
    type = "invalid_request_error"
    default_code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, request_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.request_id = request_id


class InvalidRequestError(RequestError):
    """A field is missing, ill-typed or out of range."""


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class ModelNotFoundError(RequestError):
    """The request names a model this server does not have."""

    status = 404
    default_code = "model_not_found"


class ContextLengthError(RequestError):
    """Prompt and answer together exceed the model's (or the KV pool's) length."""

    default_code = "context_length_exceeded"


class BodyTooLargeError(RequestError):
    """The request body exceeds the server's limit."""

    status = 413
    default_code = "request_too_large"


class QueueFullError(RequestError):
    """The waiting queue is at its bound; try again after `retry_after_s` seconds."""

    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 1, request_id: str | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after_s = retry_after_s


class EngineDeadError(CygnetError):
    """The engine process has died or is shutting down; requests in flight are lost."""


class StateUnavailableError(CygnetError):
    """The state that routers share can't be reached now. Try changes to it again; requests go on without it."""


class ConfigError(CygnetError):
    """A setting is unknown, ill-typed or impossible on this machine."""


class ModelLoadError(CygnetError):
    """A model can't be found, read or supported."""


class InvariantError(CygnetError):
    """Bookkeeping contradicts itself. Always a bug in Cygnet."""
