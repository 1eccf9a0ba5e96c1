"""A client's way to objects of a server on the same machine without asking it: the arena, its index, and a block to
hold objects in place with, which lasts as long as one connection."""

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakSet

from cygnet.gcache.protocol import ANY, NO_BLOCK, Op, unpack_number
from cygnet.gcache.runtime.shared_index import attach_index
from cygnet.gcache.runtime.views import MappedArena, View

if TYPE_CHECKING:
    from cygnet.gcache.runtime._core import Table
    from cygnet.gcache.runtime.channel import Channel
    from cygnet.gcache.runtime.wire import Wire


class EndedError(ConnectionError):
    """The server that this was attached to has ended."""


class Attached:
    """Thread-safe. `None` and 0 mean that the server must be asked. Raises `EndedError`.

    Once it is closed, and in a process forked from the one that attached, it finds and lets go of nothing: the block
    may be another's, or is the parent's. That is the table's to see to, as it alone is not interrupted between looking
    whether it may and writing.
    """

    def __init__(self, wire: "Wire", table: "Table", block: int, arena: MappedArena) -> None:
        self._wire = wire
        self._fd = wire.sock.fileno()
        self._table = table
        self._block = block
        self._arena = arena
        _attached.add(self)

    def view(self, key: bytes, epoch: int, value_bytes: int = ANY) -> View | None:
        """The object in place."""
        found = self._table.view(self._fd, self._block, epoch, key, value_bytes)
        if found is None:
            return None
        if isinstance(found, bool):
            raise EndedError("the gcache server has ended")
        slot, stamp, offset, size, hold = found
        return View(self._arena, slot, stamp, offset, size, self._release, hold)

    def copy_all(self, keys: list[bytes], buffers: list[memoryview], epoch: int) -> bytes:
        """Fill buffers with objects of their size; 1 for each that is filled."""
        copied = self._table.copy_all(self._fd, self._block, epoch, keys, buffers)
        if isinstance(copied, bool):
            raise EndedError("the gcache server has ended")
        return copied

    def close(self) -> None:
        """What is held is let go. The block is the server's again, and perhaps another's."""
        self.end()
        self._wire.close()

    def end(self) -> None:
        """Find and let go of nothing any more. The connection stays: in a child process it is the parent's."""
        self._table.end()

    def _release(self, hold: int) -> None:
        self._table.release(self._block, hold)


_attached: "WeakSet[Attached]" = WeakSet()


def _after_fork() -> None:
    for attached in list(_attached):
        attached.end()


os.register_at_fork(after_in_child=_after_fork)


def attach(channel: "Channel", core: ModuleType) -> Attached | None:
    """A way by a new unix connection, which is used for nothing else from now on; `None`: the server has none."""
    if not channel.info.index or channel.arena is None:
        return None
    table = attach_index(Path(channel.info.index), core, channel.arena.memory)
    if table is None:
        return None
    block, _ = unpack_number(channel.call(Op.ATTACH))
    if block == NO_BLOCK:
        return None
    return Attached(channel.wire, table, block, MappedArena(channel.arena.memory, table.generation))
