"""The fields of a request's JSON body that routing needs, undecoded; of a long body without reading what is long."""

import re
from itertools import islice
from typing import Any

import msgspec

LONG_BODY = 128 << 10
"""From this many bytes on a body is outlined, if it can be."""

EDGE = 32 << 10
"""Bytes at either end of a long body in which its outline is looked for."""

MAX_TRIES = 64
"""Places that are tried as the end of the prompt; beyond that the body is read whole."""

_PROMPTS = ("messages", "prompt", "input")
_PROMPT_BEGINS = re.compile(rb'"(messages|prompt|input)"\s*:\s*([\["])')
_FOLLOWS = rb'(?=\s*(?:,\s*"[^"\\]*"\s*:|\}\s*\Z))'
_MAY_END = {b"[": re.compile(rb"\]" + _FOLLOWS), b'"': re.compile(b'"' + _FOLLOWS)}
"""By what the prompt begins with: its end, and after it another field or the end of the body."""


class Body(msgspec.Struct):
    """The fields that matter, undecoded: what is odd in them is for the worker to say."""

    model: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    user: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    priority: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(Body).decode


def read_body(body: bytes | bytearray) -> Body:
    """The fields of a body. Raises `msgspec.DecodeError` when it is seen not to be a JSON object."""
    if len(body) >= LONG_BODY:
        fields = outline(body)
        if fields is not None:
            return fields
    return _decode(body)


def outline(body: bytes | bytearray) -> Body | None:
    """The fields of a body whose prompt begins near its beginning and ends near its end; else `None`.

    Inside the prompt nothing is looked at, so it may be malformed. The prompt is an array or a string at the top level.
    It ends at the first place from which on the rest of the body is what can follow such an end: inside strings quotes
    are escaped, and inside what is nested brackets do not come out even. Fields that follow the prompt and take
    more than `EDGE` bytes can pass for a part of it.

        {"model": "m", "messages": [ ... ], "tools": [ ... ], "stream": true}
        |------ head -------|      |        |---------- tail -----------|
                                 start  stop, the place found
    """
    found = _PROMPT_BEGINS.search(body, 0, EDGE)
    if found is None:
        return None
    name, start = found[1].decode(), found.start(2)
    head = _part(body[: found.start()] + b'"":0}')
    if head is None or any(getattr(head, other) for other in _PROMPTS):
        return None
    stop, tail = _find_end(body, bytes(found[2]), max(found.end(), len(body) - EDGE))
    if tail is None or any(getattr(tail, other) for other in _PROMPTS):
        return None
    given: dict[str, Any] = {field: getattr(tail, field) or getattr(head, field) for field in Body.__struct_fields__}
    given[name] = msgspec.Raw(memoryview(body)[start : stop + 1])
    return Body(**given)


def _find_end(body: bytes | bytearray, opening: bytes, after: int) -> tuple[int, Body | None]:
    """Where the prompt ends (its closing bracket or quote), and the fields that follow it; the first such place."""
    for found in islice(_MAY_END[opening].finditer(body, after), MAX_TRIES):
        fields = _part(b'{"":' + opening + body[found.start() :])
        if fields is not None:
            return found.start(), fields
    return 0, None


def _part(text: bytes | bytearray) -> Body | None:
    try:
        return _decode(text)
    except msgspec.DecodeError:
        return None
