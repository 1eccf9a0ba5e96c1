"""Reading a request body within a bound, and turning JSON into typed requests with errors that name the field."""

import asyncio
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope

from cygnet.api.errors import ClientDisconnectedError, RequestTimeoutError
from cygnet.api.fields import check_extra
from cygnet.base.errors import BodyTooLargeError, InvalidRequestError

R = TypeVar("R", bound=msgspec.Struct)

READ_TIMEOUT_S = 60.0
"""Longest pause within a body."""

_WHERE = re.compile(r" - at (?:`(?P<what>key)` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]+)`")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`$")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body, at most `limit` bytes, whether or not its length was announced.

    Raises `BodyTooLargeError` as soon as the limit is passed (without reading on), `RequestTimeoutError` when the
    client stops sending, `ClientDisconnectedError` when it goes away.
    """
    too_large = BodyTooLargeError(f"the request body is larger than {limit} bytes")
    length = dict(scope["headers"]).get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    while True:
        try:
            message = await asyncio.wait_for(receive(), READ_TIMEOUT_S)
        except TimeoutError:
            raise RequestTimeoutError(f"no more of the request body came within {READ_TIMEOUT_S:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


def parse(body: bytes, schema: type[R]) -> tuple[R, list[str]]:
    """The request in `body`, and the names of its ignored fields. Raises `InvalidRequestError`."""
    if not body:
        raise InvalidRequestError("the request body is empty; a JSON object is expected", code="invalid_json")
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        request = msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    return request, check_extra(fields, schema.__struct_fields__)


def parse_query(params: Mapping[str, str], schema: type[R]) -> R:
    """The fields of `schema` in a query string. Raises `InvalidRequestError`."""
    try:
        return msgspec.convert(dict(params), schema, strict=False)
    except msgspec.ValidationError as error:
        if unknown := _UNKNOWN.search(str(error)):
            known = ", ".join(schema.__struct_fields__)
            name = unknown["name"]
            raise InvalidRequestError(f"no query parameter {name!r} here, only {known}", param=name) from None
        raise _explain(str(error)) from None


def _explain(message: str) -> InvalidRequestError:
    """An error that names the field, from msgspec's message."""
    path = ""
    if where := _WHERE.search(message):
        path = where["path"].removesuffix("[...]")
        message = message[: where.start()]
    if missing := _MISSING.match(message):
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequestError(f"{path} is missing", param=path, code="missing_field")
    if not path:
        return InvalidRequestError("the request body must be a JSON object", code="invalid_json")
    message = message[0].lower() + message[1:]
    return InvalidRequestError(f"{path}: {message}", param=path, code="invalid_type")
