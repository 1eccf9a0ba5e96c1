"""The arena's file: memory that outlives the process, and that others can map."""

import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from cygnet.base.errors import ConfigError
from cygnet.base.units import format_bytes
from cygnet.gcache.arena import ArenaMemory
from cygnet.gcache.record import PAGE, ArenaShape, arena_shape, pack_arena_head, unpack_arena_head

ARENA, LOCK, SOCKET = "arena", "LOCK", "socket"
POPULATE_READ, POPULATE_WRITE = 22, 23
"""Of madvise: have all pages ready, so that nobody waits for them later. Linux 5.14."""


@dataclass
class SharedMemory:
    """The arena of a server, which holds its folder's lock."""

    folder: Path
    memory: ArenaMemory
    incarnation: bytes
    reused: bool
    """Whether it was there already, with whatever is in it."""
    _map: mmap.mmap
    _lock_fd: int

    def close(self) -> None:
        """Let go of the lock. The mapping goes with the last view of it."""
        os.close(self._lock_fd)


def open_shared_memory(folder: Path, memory_bytes: int, mean_object_bytes: int) -> SharedMemory:
    """Open the arena in `folder`, or make it; one of another size is replaced. All its pages are taken at once.

    Raises `ConfigError` when another server has it, and when there is not so much memory.
    """
    shape = arena_shape(memory_bytes, mean_object_bytes)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():  # anyone may make folders in /dev/shm
            raise ConfigError(f"{folder} belongs to another user; choose another --arena")
        lock_fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"can't use {folder} for the gcache arena: {error.strerror}; choose another --arena"
        ) from None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock_fd)
        raise ConfigError(
            f"another gcache server uses the arena in {folder}; stop it or choose another --arena"
        ) from None
    try:
        path = folder / ARENA
        known = _head_of(path)
        if known is None or known[0] != shape:
            known = shape, _create(path, shape)
            reused = False
        else:
            reused = True
        mapped = _map(path, shape)
    except OSError as error:
        os.close(lock_fd)
        raise ConfigError(
            f"can't have {format_bytes(shape.file_bytes)} in {folder} for the gcache arena: {error.strerror}; "
            "give less --memory, or another --arena"
        ) from None
    view = memoryview(mapped)[: shape.file_bytes]
    return SharedMemory(folder, ArenaMemory(view), known[1], reused, mapped, lock_fd)


def _head_of(path: Path) -> tuple[ArenaShape, bytes] | None:
    try:
        with path.open("rb") as file:
            head = unpack_arena_head(file.read(PAGE))
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    return head if head is not None and head[0].file_bytes == size else None


def _create(path: Path, shape: ArenaShape) -> bytes:
    """Make the file under another name first: one that is there is whole."""
    path.unlink(missing_ok=True)  # memory is short: the old one goes first
    incarnation = os.urandom(16)
    making = path.with_suffix(".new")
    making.unlink(missing_ok=True)
    fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Sparse memory would kill this process with SIGBUS once there is none left.
        os.posix_fallocate(fd, 0, shape.file_bytes)
        os.pwrite(fd, pack_arena_head(shape, incarnation), 0)
    except OSError:
        making.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    making.rename(path)
    return incarnation


def _map(path: Path, shape: ArenaShape) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(fd, shape.file_bytes)
    finally:
        os.close(fd)
    _populate(mapped, POPULATE_WRITE)
    return mapped


def _populate(mapped: mmap.mmap, how: int) -> None:
    try:
        mapped.madvise(how)
    except (OSError, ValueError):
        return  # an older system: pages come when they are touched


def attach(path: Path, incarnation: bytes) -> memoryview | None:
    """The arena of a running server, to be read; `None` when it is not this one, or can't be read by this user."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    view = memoryview(mapped)
    head = unpack_arena_head(view[:PAGE])
    if head is None or head[1] != incarnation or head[0].file_bytes != len(view):
        return None
    _populate(mapped, POPULATE_READ)
    return view
