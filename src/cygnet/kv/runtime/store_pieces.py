"""Batches of objects on their way between the store and the host pool."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cygnet.base.ids import BlockId
from cygnet.kv.runtime.host_pool import HostPool, is_sealed
from cygnet.kv.runtime.memory import pool_memory
from cygnet.kv.runtime.pieces import copy_pieces
from cygnet.kv.store import Group, ObjectKey, Outcome
from cygnet.kv.transfers import Fetch, Put

PIECE_OBJECTS = 256
PIECE_BYTES = 16 << 20
"""A piece is what is asked of the store at a time, one object at least. Nothing can be called off within it."""
_ALIGNMENT = 4096
"""Of objects in a landing: what disks read in place."""


@dataclass(frozen=True)
class Piece:
    """Objects `first : end` of a command."""

    first: int
    end: int
    keys: tuple[ObjectKey, ...]
    groups: tuple[Group, ...]
    blocks: tuple[BlockId, ...]

    def __len__(self) -> int:
        return self.end - self.first


def pieces(command: Fetch | Put, pool: HostPool) -> Iterator[Piece]:
    """The command's objects, a piece at a time."""
    first = num_bytes = 0
    for end, group in enumerate(command.groups):
        if end > first and (end - first >= PIECE_OBJECTS or num_bytes + pool.object_bytes[group] > PIECE_BYTES):
            yield _piece(command, first, end)
            first, num_bytes = end, 0
        num_bytes += pool.object_bytes[group]
    if first < len(command.groups):
        yield _piece(command, first, len(command.groups))


def _piece(command: Fetch | Put, first: int, end: int) -> Piece:
    part = slice(first, end)
    return Piece(first, end, command.keys[part], command.groups[part], command.blocks[part])


class Landing:
    """Memory into which the store reads one piece, apart from the host pool."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._stride = {group: -(-size // _ALIGNMENT) * _ALIGNMENT for group, size in pool.object_bytes.items()}
        # Padding to whole pages is at most as long as an object of a page, and as a page for each of many.
        self._memory = pool_memory(max(PIECE_BYTES, *self._stride.values()) + PIECE_OBJECTS * _ALIGNMENT)
        self._views: list[memoryview] = []

    def views(self, piece: Piece) -> list[memoryview]:
        """Room for the piece's objects, until the next call."""
        self._views, start = [], 0
        for group in piece.groups:
            self._views.append(self._memory[start : start + self._pool.object_bytes[group]])
            start += self._stride[group]
        return self._views

    def settle(self, piece: Piece, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Copy what was read, and is what it should be, to the piece's blocks. Of an object that is not, the outcome is
        `TORN`."""
        settled = list(outcomes)
        good = []
        for index, (key, view) in enumerate(zip(piece.keys, self._views, strict=True)):
            if settled[index] is Outcome.OK:
                if is_sealed(key, view):
                    good.append(index)
                else:
                    settled[index] = Outcome.TORN
        addresses = [self._pool.address(piece.groups[i], piece.blocks[i]) for i in good]
        copy_pieces(
            np.array(addresses, dtype=np.int64),
            np.array([np.frombuffer(self._views[i], np.uint8).ctypes.data for i in good], dtype=np.int64),
            np.array([len(self._views[i]) for i in good], dtype=np.int64),
        )
        return settled
