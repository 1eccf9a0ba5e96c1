"""The system calls of the disk store, in one place: everything it changes on a disk goes through here.

Tests put another `Disk` in its place that is full, fails or stops in the middle of any of these calls.
"""

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from cygnet.kv.runtime.disk_store.format import PAGE

if TYPE_CHECKING:
    from typing_extensions import Buffer

NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""What a full disk, a quota and a file size limit answer."""

READ_CACHED = getattr(os, "RWF_NOWAIT", 0)
"""Flag of a read that gives what the page cache has, and does not go to the disk. 0 where there is none."""

DIRECT = getattr(os, "O_DIRECT", 0)


class Disk:
    """Thin and stateless. Methods raise `OSError` as the system does."""

    # --- changes

    def create(self, path: str) -> int:
        """A new file, open for reading and writing; nobody but this user may read what users wrote."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

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

    def preadv(self, fd: int, buffers: "Sequence[Buffer]", offset: int, flags: int = 0) -> int:
        """Read; less than asked for at the file's end, and with `READ_CACHED`."""
        return os.preadv(fd, buffers, offset, flags)

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


def aligned(num_bytes: int) -> memoryview:
    """New memory that begins at a page."""
    return memoryview(mmap.mmap(-1, num_bytes))


def probe_direct(disk: Disk, fd: int) -> int:
    """Alignment (of memory, length and place) of direct reads from an open file of one page; 0: there are none."""
    memory = aligned(2 * PAGE)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | DIRECT)
    except OSError:
        return 0
    for alignment in (512, PAGE) if DIRECT else ():
        try:
            if disk.preadv(fd, [memory[alignment : 2 * alignment]], 0) == alignment:
                return alignment
        except OSError:
            continue
    return 0
