"""One connected Redis client: its commands, one after another, on one thread."""

import hmac
import socket
import time
from collections.abc import Sequence

from cygnet.gcache import resp
from cygnet.gcache.arena import Entry
from cygnet.gcache.protocol import Item
from cygnet.gcache.record import checksums
from cygnet.gcache.runtime.cache import Allowed, Cache
from cygnet.gcache.runtime.connection import Service
from cygnet.gcache.runtime.resp_commands import BUDGET_S, COMMANDS, CommandError
from cygnet.gcache.runtime.wire import DeadlineError, PeerClosedError, Wire
from cygnet.kv.runtime.disk_store.disk import copy

RECEIVE_BYTES = 256 << 10
FLUSH_ANSWERS, FLUSH_BYTES = 256, 8 << 20
"""Answers, or bytes of objects kept in place for them, are sent when there are more."""
STRANGERS_BYTES = 4096
"""Longest command, and longest line, of a client that has not said the token."""


class RespConnection:
    """Reads commands, carries them out, answers; commands that came together are answered together.

    Answers are sent when no further command has arrived, or when they are more than a few, and before anything is
    written: objects in answers keep their place, which a put may be waiting for. Who does not read is cut off.
    """

    def __init__(self, sock: socket.socket, service: Service) -> None:
        self._wire = Wire(sock, b"", service.watchdog)
        self.service = service
        self.cache: Cache = service.cache
        self.is_known = not service.token
        """Whether it has said the token, or need not."""
        self.version = 2
        """Of the protocol: 2 or 3."""
        self._parser = resp.RespParser(self._most_bytes())
        self._answers: list[bytes | memoryview] = []
        self._pinned: list[Entry] = []
        self._pinned_bytes = 0
        self._leaving = False

    def run(self) -> None:
        """Serve until the client leaves, breaks the rules or is too slow."""
        buffer = memoryview(bytearray(RECEIVE_BYTES))
        wire, frame_timeout_s = self._wire, self.cache.limits.frame_timeout_s
        wire.arm(float("inf"))
        try:
            while not self._leaving:
                got = wire.receive(buffer)
                self._take(buffer[:got])
                if self._parser.is_idle:
                    wire.arm(float("inf"))
                elif wire.deadline == float("inf"):
                    wire.arm(time.monotonic() + frame_timeout_s)
        except (PeerClosedError, DeadlineError, OSError):
            pass
        finally:
            self._let_go()
            wire.close()

    def _take(self, data: memoryview) -> None:
        """Carry out what has arrived."""
        try:
            self._parser.feed(data)
            while not self._leaving and (command := self._parser.next_command()) is not None:
                # It is complete: what follows has its own time.
                self._wire.arm(float("inf"))
                self._carry_out(command)
                if len(self._answers) > FLUSH_ANSWERS:
                    self.flush()
        except resp.RespError as error:
            self._answers.append(resp.error(f"ERR Protocol error: {error}"))
            self._leaving = True
        self.flush()

    def _carry_out(self, words: list[bytes]) -> None:
        name, arguments = words[0].upper(), words[1:]
        command = COMMANDS.get(name)
        try:
            if not self.is_known and name not in (b"AUTH", b"HELLO", b"QUIT"):
                raise CommandError("NOAUTH Authentication required.")
            if command is None:
                raise CommandError(f"ERR unknown command '{name[:64].decode('latin-1')}'")
            if not command.at_least <= len(arguments) <= command.at_most:
                raise CommandError(f"ERR wrong number of arguments for '{name.decode().lower()}' command")
            command.run(self, arguments)
        except CommandError as error:
            self._answers.append(resp.error(str(error)))

    def flush(self) -> None:
        """Send all answers, and let go of the memory they are in."""
        answers, self._answers = self._answers, []
        if answers:
            deadline = self._wire.deadline
            self._wire.arm(time.monotonic() + self.cache.limits.frame_timeout_s)
            self._wire.send(answers)
            self._wire.arm(deadline)
        self._let_go()

    def _let_go(self) -> None:
        if self._pinned:
            self.cache.memory.release(self._pinned)
            self._pinned, self._pinned_bytes = [], 0

    def _most_bytes(self) -> int:
        return self.cache.limits.max_resp_bytes if self.is_known else STRANGERS_BYTES

    # --- for commands

    def answer(self, data: bytes) -> None:
        """An answer, or a part of one."""
        self._answers.append(data)

    def null(self) -> None:
        """The answer that there is nothing."""
        self._answers.append(resp.null(self.version))

    def get(self, key: bytes) -> bool:
        """Answer with the object, from where it lies; whether it was there."""
        if self._pinned_bytes > FLUSH_BYTES:
            self.flush()
        entry = self.cache.acquire(key, time.monotonic() + BUDGET_S)
        if isinstance(entry, Item):
            self.cache.counts.got(entry, 0)
            return False
        self.cache.counts.got(Item.OK, entry.value_bytes)
        self._pinned.append(entry)
        self._pinned_bytes += entry.num_bytes
        self._answers += (resp.bulk_head(entry.value_bytes), self.cache.arena.value(entry), resp.CRLF)
        return True

    def expiry_ns(self, key: bytes) -> int | None:
        """When the object expires, 0 for never; `None` if it is not there."""
        entry = self.cache.acquire(key, time.monotonic() + BUDGET_S)
        if isinstance(entry, Item):
            return None
        self.cache.memory.release([entry])
        return entry.expiry_ns

    def put(self, key: bytes, value: bytes, ttl_ms: int = 0, allowed: Allowed | None = None) -> bool:
        """Store an object; `False` when what is there now is not `allowed` to be replaced."""
        self.flush()
        deadline = time.monotonic() + BUDGET_S
        entry = self.cache.reserve(key, len(value), ttl_ms, deadline)
        if isinstance(entry, Item):
            self.cache.counts.put(entry)
            raise CommandError(
                "OOM the value does not fit this server, or its limits" if entry is Item.FULL else "ERR too slow"
            )
        if value:
            copy(self.cache.arena.value(entry), memoryview(value))
        item = self.cache.commit(entry, checksums(key, value), deadline, allowed)
        self.cache.counts.put(item)
        if item is Item.TIMED_OUT:
            raise CommandError("ERR too slow")
        return item is Item.OK

    def log_in(self, words: Sequence[bytes]) -> None:
        """Check `[USER] TOKEN`; there is one user, called default."""
        token = words[-1]
        user = words[0] if len(words) > 1 else b"default"
        right = hmac.compare_digest(token, self.service.token.encode())
        if not self.service.token:
            raise CommandError("ERR AUTH called without a token configured; start the server with one, or leave it out")
        if user != b"default" or not right:
            raise CommandError("WRONGPASS the user is not default, or the token is not this server's")
        self.is_known = True
        self._parser.max_command_bytes = self._most_bytes()

    def quit(self) -> None:
        """Answer, and leave."""
        self.answer(resp.OK)
        self._leaving = True
