"""The outline of long bodies: the same fields as a full reading gives, or none."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.router.body import EDGE, LONG_BODY, Body, outline, read_body
from cygnet.router.prompt import KeySettings, read_prompt

NASTY = st.text(alphabet='"\\[]{},:am \n\u00e9', max_size=12)
VALUES = st.recursive(
    NASTY | st.integers(0, 9) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NASTY, inner, max_size=3),
    max_leaves=8,
)
PROMPT = st.lists(VALUES, max_size=4) | NASTY
FIELDS = st.dictionaries(
    st.sampled_from(["model", "tools", "system", "user", "priority", "stream", "x", "instructions"]), VALUES, max_size=5
)


def fields_of(body: Body) -> dict[str, bytes]:
    return {name: bytes(getattr(body, name)) for name in Body.__struct_fields__}


def dump(value: Any, *, spaced: bool = False, ascii_only: bool = True) -> bytes:
    return json.dumps(value, separators=None if spaced else (",", ":"), ensure_ascii=ascii_only).encode()


@settings(deadline=None)
@given(FIELDS, PROMPT, FIELDS, st.sampled_from(["messages", "prompt", "input"]), st.booleans(), st.booleans())
def test_an_outline_says_what_a_full_reading_says(
    before: dict[str, Any], prompt: Any, after: dict[str, Any], name: str, spaced: bool, ascii_only: bool
) -> None:
    fields = {**before, name: prompt, **{key: value for key, value in after.items() if key not in before}}
    body = dump(fields, spaced=spaced, ascii_only=ascii_only)
    found = outline(body)
    if found is not None:
        assert fields_of(found) == fields_of(msgspec.json.decode(body, type=Body))


@pytest.mark.parametrize("name", ["messages", "prompt", "input"])
@pytest.mark.parametrize("tail", [{}, {"model": "m", "tools": [{"type": "function"}], "stop": ["]", '"']}])
def test_usual_bodies_are_outlined(name: str, tail: dict[str, Any]) -> None:
    code = 'x = {"a": [1, 2]}\nprint("]")\n' * 20_000
    prompt = code if name == "prompt" else [{"role": "user", "content": [{"type": "text", "text": code}]}]
    body = dump({"user": "u", name: prompt, **tail})
    found = outline(body)
    assert found is not None
    assert fields_of(found) == fields_of(msgspec.json.decode(body, type=Body))


def test_a_long_body_has_the_keys_of_a_short_one() -> None:
    """A session's keys stay the same when its body becomes long."""
    keys = KeySettings()
    text = "words of a session " * (LONG_BODY // 19)
    short = {"messages": [{"role": "user", "content": text[: LONG_BODY // 2]}], "model": "m"}
    long = {"messages": [{"role": "user", "content": text}, {"role": "user", "content": "more"}], "model": "m"}
    first, second = (read_prompt(dump(body), keys) for body in (short, long))
    assert len(dump(short)) < LONG_BODY <= len(dump(long))
    whole = len(first.chain) // 8 - 1
    assert first.chain[: whole * 8] == second.chain[: whole * 8]
    assert second.model == "m"


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[' + b"1," * EDGE,  # no end
        b'{"x":"' + b"y" * 2 * EDGE + b'","messages":[]}',  # begins too late
        b'{"messages":[' + b"[]," * 2 * EDGE + b'[]],"prompt":"p"}',  # two prompts
        b'{"a":{"messages":[' + b"1," * EDGE + b"1]}}",  # not at the top
        b'{"messages":[' + b'],"a":' * EDGE,  # too many places to try
    ],
)
def test_what_can_not_be_outlined_is_not(body: bytes) -> None:
    assert outline(body) is None


def test_broken_bodies_are_refused_where_it_can_be_seen() -> None:
    with pytest.raises(msgspec.DecodeError):
        read_body(b'{"messages":[' + b"1," * LONG_BODY)
