"""The OpenAPI description, made from the schemas that the endpoints parse with."""

from dataclasses import dataclass
from typing import Any

import msgspec

from cygnet.api.errors import ErrorBody
from cygnet.api.responses import (
    ChatCompletion,
    Completion,
    DetokenizeResponse,
    FlushResponse,
    ModelList,
    ModelObject,
    TokenizeResponse,
)
from cygnet.api.schemas import (
    CacheQuery,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FlushQuery,
    TokenizeRequest,
)
from cygnet.base.cache_report import CacheReport
from cygnet.version import __version__

_REF = "#/components/schemas/{name}"


@dataclass(frozen=True)
class Operation:
    """One method of one path. `request` and `response` are schema types; `media` is the response's type."""

    method: str
    path: str
    summary: str
    request: type | None = None
    response: type | None = None
    media: str = "application/json"
    example: Any = None
    query: type | None = None
    """Schema type whose fields are the query parameters."""


OPERATIONS = (
    Operation(
        "post",
        "/v1/completions",
        "Continue a text. With stream = true: server-sent events.",
        CompletionRequest,
        Completion,
        example={"prompt": "The swan glided over the", "max_tokens": 32, "temperature": 0},
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation. With stream = true: server-sent events.",
        ChatRequest,
        ChatCompletion,
        example={"messages": [{"role": "user", "content": "Why do swans fly in a V?"}], "max_tokens": 64},
    ),
    Operation("get", "/v1/models", "The served model, as a list.", response=ModelList),
    Operation("get", "/v1/models/{model}", "One model.", response=ModelObject),
    Operation(
        "post",
        "/tokenize",
        "Text or messages to token ids.",
        TokenizeRequest,
        TokenizeResponse,
        example={"prompt": "The swan"},
    ),
    Operation(
        "post",
        "/detokenize",
        "Token ids to text.",
        DetokenizeRequest,
        DetokenizeResponse,
        example={"tokens": [1, 2, 3]},
    ),
    Operation("get", "/health", "200 while requests are served; 503 when the engine is dead or the server drains."),
    Operation("get", "/metrics", "Prometheus metrics.", media="text/plain"),
    Operation("get", "/version", "The server's version."),
    Operation(
        "get",
        "/cache",
        "What is cached where: pools and sequences, by the beginnings of their keys.",
        response=CacheReport,
        query=CacheQuery,
    ),
    Operation(
        "post",
        "/reset_prefix_cache",
        "Drop every cached block of device and host memory that no running request holds.",
        response=FlushResponse,
        query=FlushQuery,
    ),
    Operation("get", "/api/state", "Model, pools and counters, as the page shows them."),
    Operation("get", "/api/state/stream", "The same twice a second.", media="text/event-stream"),
    Operation(
        "get", "/kv/events", "What is cached, and every change of it (for routers).", media="application/octet-stream"
    ),
)

_ERRORS = {
    "400": "A field is wrong; `error.param` names it.",
    "401": "The API key is missing or wrong.",
    "404": "Unknown model.",
    "413": "The body is too large.",
    "429": "Too many waiting requests; see Retry-After.",
    "503": "The engine is not running, or the server is shutting down.",
}


def build(*, needs_key: bool) -> dict[str, Any]:
    """The document (OpenAPI 3.1)."""
    types = [t for op in OPERATIONS for t in (op.request, op.response) if t is not None]
    _, components = msgspec.json.schema_components([*dict.fromkeys(types), ErrorBody], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method] = _operation(op)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Cygnet",
            "version": __version__,
            "description": "OpenAI-compatible API. Unknown fields are accepted and named in the response header "
            "x-ignored-fields; unsupported ones that would change the answer are refused.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(op: Operation) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=op.response.__name__)} if op.response else {}
    content = {op.media: {"schema": schema}} if schema else {op.media: {}}
    described: dict[str, Any] = {
        "summary": op.summary,
        "responses": {"200": {"description": "Success.", "content": content}},
    }
    if "{model}" in op.path:
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if op.query is not None:
        _, components = msgspec.json.schema_components([op.query])
        fields = components[op.query.__name__]["properties"]
        described["parameters"] = [{"name": name, "in": "query", "schema": field} for name, field in fields.items()]
    if op.request is not None:
        body: dict[str, Any] = {"schema": {"$ref": _REF.format(name=op.request.__name__)}}
        if op.example is not None:
            body["example"] = op.example
        described["requestBody"] = {"required": True, "content": {"application/json": body}}
        error = {"application/json": {"schema": {"$ref": _REF.format(name="ErrorBody")}}}
        described["responses"] |= {code: {"description": text, "content": error} for code, text in _ERRORS.items()}
    return described
