"""The system calls of the disk store, in one place: everything it changes on a disk goes through here.

Tests put another `Disk` in its place that is full, fails or stops in the middle of any of these calls.
"""

import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from cygnet.kv.runtime.disk_store.format import PAGE
from cygnet.kv.runtime.memory import pool_memory

if TYPE_CHECKING:
    from typing_extensions import Buffer

NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""What a full disk, a quota and a file size limit answer."""

DIRECT = getattr(os, "O_DIRECT", 0)
"""Flag of files that are read and written past the page cache; 0 where there is none."""


class Disk:
    """Thin and stateless. Methods raise `OSError` as the system does."""

    # --- changes

    def create(self, path: str, flags: int = 0) -> int:
        """A new file, open for reading and writing; nobody but this user may read what users wrote."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)

    def pwritev(self, fd: int, buffers: "Sequence[Buffer]", offset: int) -> int:
        """Write; may write less than asked for."""
        return os.pwritev(fd, buffers, offset)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Cut an open file."""
        os.ftruncate(fd, num_bytes)

    def replace(self, source: str, target: str) -> None:
        """Rename, over `target` if that is there."""
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        """Delete; a file that is gone already is fine."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def mark_changed(self, path: str) -> None:
        """Set the modification time of a file or folder to now."""
        os.utime(path)

    # --- no changes

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: "Sequence[Buffer]", offset: int) -> int:
        """Read; less than asked for at the file's end."""
        return os.preadv(fd, buffers, offset)

    def free_bytes(self, path: str) -> int:
        """Bytes of the file system that this user may still take."""
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize

    def now_ns(self) -> int:
        """Wall clock; for the names of segments, which sort by age."""
        return time.time_ns()


def write_all(disk: Disk, fd: int, buffers: "Sequence[Buffer]", offset: int) -> None:
    """Write all of `buffers`; raises `OSError` with a part written."""
    left = [memoryview(buffer).cast("B") for buffer in buffers]
    while left:
        written = disk.pwritev(fd, left, offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left and written:
            left[0] = left[0][written:]


def is_aligned(buffer: memoryview, alignment: int) -> bool:
    """Whether address and length suit direct reads and writes."""
    if len(buffer) % alignment:
        return False
    if buffer.readonly:  # ctypes, ten times as fast, gives no addresses of these
        return np.frombuffer(buffer, np.uint8).ctypes.data % alignment == 0
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % alignment == 0


def copy(target: memoryview, source: memoryview) -> None:
    """Copy equally long memory without the interpreter's lock, which slice assignment would hold."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def probe_direct(disk: Disk, fd: int) -> int:
    """Alignment (of memory, length and place) of direct reads and writes of an open file, a page long; 0: none work."""
    memory = pool_memory(2 * PAGE)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | DIRECT)
    except OSError:
        return 0
    for alignment in (512, PAGE) if DIRECT else ():
        part = [memory[alignment : 2 * alignment]]
        try:
            if disk.preadv(fd, part, 0) == disk.pwritev(fd, part, 0) == alignment:
                return alignment
        except OSError:
            continue
    return 0
