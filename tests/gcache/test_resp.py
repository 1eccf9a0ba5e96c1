"""RESP without a socket: commands however they are cut, what is no command, names of keys, patterns."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.gcache import resp
from cygnet.gcache.record import full_key
from cygnet.gcache.resp import MAX_LINE_BYTES, RespError, RespParser

COMMANDS = st.lists(st.lists(st.binary(max_size=30), min_size=1, max_size=5), max_size=6)


def packed(command: list[bytes]) -> bytes:
    return resp.array([resp.bulk(word) for word in command])


def parse(data: bytes, cuts: list[int], parser: RespParser | None = None) -> list[list[bytes]]:
    """All commands of `data`, which arrives in parts."""
    parser = parser or RespParser(1000)
    commands, begin = [], 0
    for end in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        parser.feed(memoryview(data)[begin:end])
        begin = end
        while (command := parser.next_command()) is not None:
            commands.append(command)
    return commands


@settings(deadline=None)
@given(COMMANDS, st.lists(st.integers(0, 1000), max_size=8))
def test_commands_are_found_however_they_arrive(commands: list[list[bytes]], cuts: list[int]) -> None:
    parser = RespParser(1000)
    assert parse(b"".join(map(packed, commands)), cuts, parser) == commands
    assert parser.is_idle
    assert parser.kept_bytes == 0


def test_lines_are_commands_too() -> None:
    assert parse(b"PING\r\n\r\n  \r\nget  a\n*1\r\n$4\r\nPING\r\n*0\r\nQUIT\r\n", []) == [
        [b"PING"],
        [b"get", b"a"],
        [b"PING"],
        [b"QUIT"],
    ]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"*-1\r\n", "multibulk length"),
        (b"*99999999999999999999\r\n", "multibulk length"),
        (b"*8194\r\n", "multibulk length"),
        (b"*1\r\nPING\r\n", "expected '\\$'"),
        (b"*1\r\n$-1\r\n", "bulk length"),
        (b"*1\r\n$1001\r\n", "bulk length"),
        (b"*2\r\n$600\r\n" + bytes(600) + b"\r\n$401\r\n", "bulk length"),
        (b"*1\r\n$+4\r\nPING\r\n", "bulk length"),
        (b"*1\r\n$4\r\nPINGxx", "does not end"),
        (b"x" * (MAX_LINE_BYTES + 1), "too big"),
        (b"*" + b"1" * (MAX_LINE_BYTES + 1), "too big"),
        (b"x " * 8194 + b"\r\n", "too many"),
    ],
)
def test_what_is_no_command_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(RespError, match=words):
        parse(data, [])


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([b"*2\r\n", b"$5\r\n", b"\r\n", b"*", b"$1", b"hello"])))
)
def test_any_bytes_are_commands_or_refused(parts: list[bytes]) -> None:
    """And what is kept stays within the limits."""
    parser = RespParser(50, max_arguments=4)
    try:
        for part in parts:
            parser.feed(part)
            while (command := parser.next_command()) is not None:
                assert command
            assert parser.kept_bytes <= 50 + MAX_LINE_BYTES + 2
    except RespError:
        return


def test_a_long_string_in_small_parts_is_looked_at_once() -> None:
    """Feeding a byte at a time takes time in proportion, not in its square: this would take minutes."""
    parser = RespParser(1 << 20)
    parser.feed(b"*1\r\n$300000\r\n")
    for _ in range(300_000):
        parser.feed(b"x")
        assert parser.next_command() is None
    parser.feed(b"\r\n")
    assert parser.next_command() == [b"x" * 300_000]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (b"plain", full_key(b"", b"plain")),
        (b"files:model", full_key(b"files", b"model")),
        (b"a:b:c", full_key(b"a", b"b:c")),
        (b":x", full_key(b"", b":x")),
        (b"x:", full_key(b"", b"x:")),
        (b"n" * 256 + b":x", full_key(b"", b"n" * 256 + b":x")),
    ],
)
def test_names_and_keys(name: bytes, key: bytes) -> None:
    assert resp.key_of(name) == key
    assert resp.name_of(key) == name


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300))
def test_every_name_is_a_key_and_back(name: bytes) -> None:
    assert resp.name_of(resp.key_of(name)) == name


def test_names_that_are_none() -> None:
    for name in (b"", b"x" * 5000):
        with pytest.raises(ValueError):
            resp.key_of(name)
    assert resp.name_of(full_key(b"", b"a:b")) is None, "that is namespace a, name b"


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (b"*", ["", "a:b"], []),
        (b"h?llo", ["hello", "h\nllo"], ["hllo", "heello"]),
        (b"h[ae]llo", ["hello", "hallo"], ["hillo"]),
        (b"h[^e]llo", ["hallo"], ["hello"]),
        (b"h[a-c]llo", ["hbllo"], ["hdllo"]),
        (rb"a\*b", ["a*b"], ["axb"]),
        (rb"a\[b", ["a[b"], ["ab"]),
        (rb"\a", ["a"], ["\\a"]),
        (b"a.b+", ["a.b+"], ["axbb"]),
        (b"\xff*", ["\xffz"], ["z"]),
        (b"[", ["["], ["x"]),
    ],
)
def test_patterns(pattern: bytes, yes: list[str], no: list[str]) -> None:
    matcher = resp.glob(pattern)
    assert all(matcher.match(text) for text in yes)
    assert not any(matcher.match(text) for text in no)


@settings(deadline=None)
@given(st.binary(max_size=20), st.text(st.characters(max_codepoint=255), max_size=20))
def test_any_pattern_can_be_asked(pattern: bytes, text: str) -> None:
    assert isinstance(resp.glob(pattern), re.Pattern)
    resp.glob(pattern).match(text)


def test_answers_are_frozen() -> None:
    assert resp.error("ERR a\r\nb") == b"-ERR a  b\r\n"
    assert (resp.null(2), resp.null(3)) == (b"$-1\r\n", b"_\r\n")
    assert resp.mapping({b"a": resp.integer(1)}, 2) == b"*2\r\n$1\r\na\r\n:1\r\n"
    assert resp.mapping({b"a": resp.integer(1)}, 3) == b"%1\r\n$1\r\na\r\n:1\r\n"
    assert resp.array([resp.OK, resp.bulk(b"")]) == b"*2\r\n+OK\r\n$0\r\n\r\n"
