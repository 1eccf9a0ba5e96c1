"""The index over an arena, in a file that clients of the same machine map too: they find objects without asking.

The file lies beside the arena and is made anew by each server; `csrc/table.h` says who writes what, and in which order.

    page 0     magic, version, slots, buckets, blocks, length of a lease (ns), most bytes that holds may keep in place,
               epoch whose requests are answered, blocks used so far, incarnation of the arena (16 bytes), when the
               server last was alive (monotonic ns)
    blocks     a page for each connection: what its client holds in place, and how often it got something
    marks      a byte per slot: used since the server last looked
    buckets    u64: upper half of xxh3_64(key), slot + 1; open addressing from the upper half on

Only objects that are committed, whole and checked are in it. A miss in it means nothing, the server is asked then.
"""

import mmap
import os
import threading
from pathlib import Path
from struct import Struct
from types import ModuleType
from typing import TYPE_CHECKING

from cygnet.gcache.arena import ArenaMemory, Entry
from cygnet.gcache.limits import Limits
from cygnet.gcache.record import PAGE, State, unpack_arena_head
from cygnet.gcache.runtime.shared_memory import SharedMemory

if TYPE_CHECKING:
    from cygnet.gcache.runtime._core import Table

INDEX = "index"
MAGIC, VERSION = int.from_bytes(b"CYGNETix", "little"), 1
IndexHead = Struct("<9Q16sQ")
NO_EPOCH, ANY_EPOCH = (1 << 64) - 1, (1 << 64) - 2
HELD_SHARE = 2
"""One part in so many of what leases may keep in place is for those that are taken without asking."""
BEAT_S = 0.25
"""How often the server says that it is alive; csrc/table.c has how old that may be."""


def index_bytes(num_slots: int, num_buckets: int, num_blocks: int) -> int:
    """Size of the file."""
    return PAGE + num_blocks * PAGE + -(-num_slots // PAGE) * PAGE + 8 * num_buckets


class SharedArenaMemory(ArenaMemory):
    """An arena's memory whose objects others find through a table, and may hold in place."""

    def __init__(self, view: memoryview, table: "Table", max_held: int) -> None:
        super().__init__(view)
        self._table = table
        self._max_held = max_held

    def set_word(self, slot: int, word: int, value: int) -> None:
        if word == 0:
            self._table.set_stamp(slot, value)
        else:
            super().set_word(slot, word, value)

    def fill(self, spans: list[tuple[int, int, int]], data: memoryview) -> None:
        self._table.fill(spans, data)

    def publish(self, entry: Entry, sums: bytes, at: int) -> None:
        self._table.publish(
            entry.slot,
            entry.stamp,
            entry.start,
            entry.units,
            entry.value_bytes,
            entry.version,
            entry.expiry_ns,
            entry.root,
            entry.key,
            sums,
        )

    def retire(self, entry: Entry) -> bool:
        return self._table.retire(entry.slot, entry.generation << 2 | State.DEAD, entry.key if entry.verified else b"")

    def show(self, slot: int, key: bytes) -> None:
        self._table.show(slot, key)

    def hide(self, slot: int, key: bytes) -> None:
        self._table.hide(slot, key)

    def shown(self) -> list[int]:
        return self._table.shown()

    def is_read(self, slot: int) -> bool:
        return self._table.is_held(slot)

    def read(self) -> list[int]:
        return self._table.held()

    def take_used(self) -> list[int]:
        return self._table.take_marks()

    def read_bytes(self) -> int:
        return self._table.totals()[2]

    def leave_to_readers(self, num_bytes: int) -> None:
        self._table.set_max_held(min(num_bytes, self._max_held))


class SharedIndex:
    """A server's index of its arena, and the blocks of its connections. Thread-safe."""

    def __init__(self, core: ModuleType, shared: SharedMemory, limits: Limits) -> None:
        self.path = shared.folder / INDEX
        head = unpack_arena_head(shared.memory.view[:PAGE])
        assert head is not None
        shape, incarnation = head
        num_buckets = 1 << (2 * shape.num_slots).bit_length()
        num_blocks = limits.max_connections
        max_held = int(limits.max_leased_fraction * (shape.file_bytes - shape.data_at)) // HELD_SHARE
        lease_ns = int(limits.lease_s * 1e9)
        packed = IndexHead.pack(
            MAGIC, VERSION, shape.num_slots, num_buckets, num_blocks, lease_ns, max_held, NO_EPOCH, 0, incarnation, 0
        )
        mapped = _make(self.path, packed, index_bytes(shape.num_slots, num_buckets, num_blocks))
        self.table = core.Table(shared.memory.view, mapped, True)
        self.table.beat()
        self.memory = SharedArenaMemory(shared.memory.view, self.table, max_held)
        self._lock = threading.Lock()
        self._free = list(range(num_blocks - 1, -1, -1))
        self.gets = self.got_bytes = 0
        """Of connections that have ended."""
        self._closing = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="gcache-alive", daemon=True)
        self._beating.start()

    def answer_epoch(self, epoch: int) -> None:
        """Reads of this epoch are answered from now on; -1: none are."""
        self.table.set_answered(NO_EPOCH if epoch < 0 else epoch)

    def answer_all(self) -> None:
        """Reads of any epoch are answered: there is no cluster."""
        self.table.set_answered(ANY_EPOCH)

    def take_block(self) -> int | None:
        """A block for a connection, to be given back; `None`: there is none left."""
        with self._lock:
            if not self._free:
                return None
            block = self._free.pop()
            self.table.clear_block(block)
            return block

    def give_back(self, block: int) -> None:
        """The connection has ended: what it held is held no more."""
        with self._lock:
            gets, got_bytes = self.table.clear_block(block)
            self.gets += gets
            self.got_bytes += got_bytes
            self._free.append(block)

    def totals(self) -> tuple[int, int]:
        """Gets that were answered through it, and their bytes."""
        with self._lock:
            gets, got_bytes, _ = self.table.totals()
            return self.gets + gets, self.got_bytes + got_bytes

    def close(self) -> None:
        """Nobody reads through it any more."""
        self.table.set_answered(NO_EPOCH)
        self._closing.set()
        self._beating.join()

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            self.table.beat()


def open_index(core: ModuleType | None, shared: SharedMemory, limits: Limits) -> SharedIndex | None:
    """A new index for that arena, which is to be used through its memory from now on; `None` where that can't be."""
    path = shared.folder / INDEX
    if core is None:
        path.unlink(missing_ok=True)
        return None
    try:
        index = SharedIndex(core, shared, limits)
    except (OSError, ValueError):  # no room for it: everything works without it
        path.unlink(missing_ok=True)
        return None
    shared.memory = index.memory
    return index


def attach_index(path: Path, core: ModuleType, arena: memoryview) -> "Table | None":
    """The index of a running server, for an arena that is mapped; `None` when it can't be used."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        mapped = mmap.mmap(fd, 0)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    head = unpack_arena_head(arena[:PAGE])
    if head is None or len(mapped) < PAGE:
        return None
    found = IndexHead.unpack_from(mapped)
    if found[:2] != (MAGIC, VERSION) or found[9] != head[1]:
        return None
    try:
        return core.Table(arena, mapped, False)
    except ValueError:
        return None


def _make(path: Path, head: bytes, num_bytes: int) -> mmap.mmap:
    """A fresh file, never one that someone else has mapped."""
    path.unlink(missing_ok=True)
    making = path.with_suffix(".new")
    making.unlink(missing_ok=True)
    fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        os.pwrite(fd, head, 0)
        mapped = mmap.mmap(fd, num_bytes)
    except OSError:
        making.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    making.rename(path)
    return mapped
