"""The Redis protocol, RESP2 and RESP3: commands out of bytes, answers into bytes, and what keys are called. Pure.

Commands are arrays of bulk strings, or lines of words as people type them. The parser is fed whatever arrives and
keeps what is not yet a command, which never is more than its limits allow.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate

from cygnet.gcache.limits import MAX_NAMESPACE_BYTES
from cygnet.gcache.record import full_key, split_key

MAX_LINE_BYTES = 64 << 10
"""Of a command in one line, and of what stands before an array or a string."""
MAX_ARGUMENTS = 1 + 2 * 4096
CRLF = b"\r\n"


class RespError(ValueError):
    """What was sent is no command; the connection can't be used any more."""


class RespParser:
    """Cuts what arrives into commands.

    At most `max_command_bytes` and a line are kept at any time. Each byte is looked at a bounded number of times, in
    however small parts it arrives.
    """

    def __init__(self, max_command_bytes: int, max_arguments: int = MAX_ARGUMENTS) -> None:
        self.max_command_bytes = max_command_bytes
        self.max_arguments = max_arguments
        self._buffer = bytearray()
        self._at = 0
        """What is before it has been dealt with."""
        self._scanned = 0
        """There is no end of a line before it."""
        self._left = 0
        """Arguments that are still to come."""
        self._arguments: list[bytes] = []
        self._num_bytes = 0
        """Of the arguments so far."""
        self._string_bytes = -1
        """Of the argument that is arriving; -1: its length is not known yet."""

    @property
    def is_idle(self) -> bool:
        """Whether no command has begun to arrive."""
        return self._at == len(self._buffer) and not self._left

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept until the rest arrives."""
        return len(self._buffer) - self._at + self._num_bytes

    def feed(self, data: "bytes | memoryview") -> None:
        """More has arrived. All commands must have been taken before."""
        if self._at:
            del self._buffer[: self._at]
            self._scanned -= self._at
            self._at = 0
        self._buffer += data

    def next_command(self) -> list[bytes] | None:
        """The next command, never empty; `None` until more arrives. Raises `RespError`."""
        while True:
            if not self._left:
                line = self._line()
                if line is None:
                    return None
                if not line.startswith(b"*"):
                    words = line.split()
                    if len(words) > self.max_arguments:
                        raise RespError("too many arguments")
                    if words:
                        return words
                    continue
                self._left = self._number(line, self.max_arguments, "invalid multibulk length")
                continue
            if not self._argument():
                return None
            self._left -= 1
            if not self._left:
                command, self._arguments, self._num_bytes = self._arguments, [], 0
                return command

    def _argument(self) -> bool:
        """Take the next argument, if all of it is there."""
        if self._string_bytes < 0:
            line = self._line()
            if line is None:
                return False
            if not line.startswith(b"$"):
                raise RespError(f"expected '$', got {line[:1].decode('latin-1')!r}")
            room = self.max_command_bytes - self._num_bytes
            self._string_bytes = self._number(line, room, "invalid bulk length")
        end = self._at + self._string_bytes
        if len(self._buffer) < end + 2:
            return False
        if self._buffer[end : end + 2] != CRLF:
            raise RespError("a string does not end where its length says")
        with memoryview(self._buffer) as view:
            self._arguments.append(bytes(view[self._at : end]))
        self._num_bytes += self._string_bytes
        self._at = self._scanned = end + 2
        self._string_bytes = -1
        return True

    def _line(self) -> bytes | None:
        """The next line, without its end."""
        end = self._buffer.find(b"\n", max(self._at, self._scanned))
        if (len(self._buffer) if end < 0 else end) - self._at > MAX_LINE_BYTES:
            raise RespError("too big inline request")
        if end < 0:
            self._scanned = len(self._buffer)
            return None
        line = bytes(self._buffer[self._at : end])
        self._at = self._scanned = end + 1
        return line.removesuffix(b"\r")

    @staticmethod
    def _number(line: bytes, most: int, otherwise: str) -> int:
        digits = line[1:]
        if not digits.isdigit() or len(digits) > 12 or int(digits) > most:
            raise RespError(f"{otherwise} {digits[:20].decode('latin-1')!r}")
        return int(digits)


# --- answers

OK = b"+OK\r\n"


def simple(text: str) -> bytes:
    """A status."""
    return b"+%s\r\n" % text.encode()


def error(text: str) -> bytes:
    """An error; its first word is its kind."""
    return b"-%s\r\n" % re.sub(r"[\r\n]", " ", text).encode(errors="replace")


def integer(value: int) -> bytes:
    """A number."""
    return b":%d\r\n" % value


def bulk_head(num_bytes: int) -> bytes:
    """What stands before a string; the string and `CRLF` follow."""
    return b"$%d\r\n" % num_bytes


def bulk(value: bytes) -> bytes:
    """A string."""
    return b"$%d\r\n%s\r\n" % (len(value), value)


def null(version: int) -> bytes:
    """Nothing."""
    return b"_\r\n" if version == 3 else b"$-1\r\n"


def array(items: Iterable[bytes]) -> bytes:
    """Answers, one after another."""
    parts = list(items)
    return b"*%d\r\n" % len(parts) + b"".join(parts)


def mapping(items: Mapping[bytes, bytes], version: int) -> bytes:
    """Names and answers."""
    body = b"".join([bulk(name) + value for name, value in items.items()])
    return (b"%%%d\r\n" % len(items) if version == 3 else b"*%d\r\n" % (2 * len(items))) + body


# --- keys


def key_of(name: bytes) -> bytes:
    """The full key of what a Redis client calls `name`. Raises `ValueError` for a name that is too long or empty.

    What is before the first `:` is the namespace, the rest the name in it. Without a colon, with nothing on either side
    of it, and where it comes too late for a namespace, all is the name, and the namespace is empty.
    """
    namespace, colon, rest = name.partition(b":")
    if colon and namespace and rest and len(namespace) <= MAX_NAMESPACE_BYTES:
        return full_key(namespace, rest)
    return full_key(b"", name)


def name_of(key: bytes) -> bytes | None:
    """What a Redis client calls a full key; `None` for one that it can't name."""
    namespace, name = split_key(key)
    named = namespace + b":" + name if namespace else name
    return named if key_of(named) == key else None


def glob(pattern: bytes) -> "re.Pattern[str]":
    """A pattern with `*`, `?`, `[...]`, `[^...]` and `\\`, to be matched with names as Latin-1 text."""
    text = re.sub(
        r"\\(.)",
        lambda escaped: f"[{escaped[1]}]" if escaped[1] in "*?[" else escaped[1],
        pattern.decode("latin-1"),
        flags=re.DOTALL,
    )
    return re.compile(translate(text.replace("[^", "[!")), re.DOTALL)
