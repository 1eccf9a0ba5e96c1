"""Disks that stop, fill up or fail in the middle of things, for tests of the disk store."""

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cygnet.kv.runtime.disk_store.disk import DIRECT, Disk
from cygnet.kv.runtime.memory import pool_memory

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Crash(BaseException):
    """Where a process would have been killed."""


class FaultyDisk(Disk):
    """Counts changes. From change `crash_at` on (0 is the first) nothing happens any more, and `Crash` is raised.

    Of a write that is crashed into, `torn` (0 to 1) is still done. After each change `watch` is called. With `room`,
    writes beyond that many more bytes are cut short and then fail as on a full disk. `fail` names methods, also of
    those that change nothing, that raise the given error instead.
    """

    def __init__(
        self, *, crash_at: int | None = None, torn: float = 0.5, watch: Callable[[], None] | None = None
    ) -> None:
        self.changes = 0
        self.room: int | None = None
        self.fail: dict[str, int] = {}
        self.free: int | None = None
        self._crash_at = crash_at
        self._torn = torn
        self._watch = watch
        self._open: set[int] = set()

    def abandon(self) -> None:
        """Close all files, as the system does for a process that dies; with them go its locks."""
        for fd in self._open:
            os.close(fd)
        self._open.clear()

    def crash_after(self, changes: int | None) -> None:
        """Crash after so many more changes; `None`: not."""
        self._crash_at = None if changes is None else self.changes + changes

    def _change(self, name: str) -> None:
        self._maybe_fail(name)
        self.changes += 1
        if self._crashed:
            raise Crash

    def _changed(self) -> None:
        if self._watch is not None:
            self._watch()

    def _maybe_fail(self, name: str) -> None:
        if name in self.fail:
            raise OSError(self.fail[name], os.strerror(self.fail[name]))

    @property
    def _crashed(self) -> bool:
        return self._crash_at is not None and self.changes > self._crash_at

    def create(self, path: str, flags: int = 0) -> int:
        self._change("create")
        fd = super().create(path, flags)
        self._open.add(fd)
        self._changed()
        return fd

    def pwritev(self, fd: int, buffers: "Sequence[Buffer]", offset: int) -> int:
        first = not self._crashed
        try:
            self._change("pwritev")
        except Crash:
            if first:
                self._write_part(fd, buffers, offset, int(sum(map(len, buffers)) * self._torn))
            raise
        if self.room is not None:
            written = self._write_part(fd, buffers, offset, self.room)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= written
        else:
            written = super().pwritev(fd, buffers, offset)
        self._changed()
        return written

    def _write_part(self, fd: int, buffers: "Sequence[Buffer]", offset: int, num_bytes: int) -> int:
        """Write no more than `num_bytes`; a direct write ends with a sector."""
        data = b"".join(buffers)[:num_bytes]
        if fcntl.fcntl(fd, fcntl.F_GETFL) & DIRECT:
            data = data[: len(data) // 512 * 512]
        memory = pool_memory(max(1, len(data)))
        memory[: len(data)] = data
        return os.pwrite(fd, memory[: len(data)], offset)

    def truncate(self, fd: int, num_bytes: int) -> None:
        self._change("truncate")
        super().truncate(fd, num_bytes)
        self._changed()

    def replace(self, source: str, target: str) -> None:
        self._change("replace")
        super().replace(source, target)
        self._changed()

    def unlink(self, path: str) -> None:
        self._change("unlink")
        super().unlink(path)
        self._changed()

    def mark_changed(self, path: str) -> None:
        self._change("mark_changed")
        super().mark_changed(path)

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        self._maybe_fail("open")
        fd = super().open(path, flags)
        self._open.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._open.discard(fd)
        super().close(fd)

    def preadv(self, fd: int, buffers: "Sequence[Buffer]", offset: int) -> int:
        self._maybe_fail("preadv")
        return super().preadv(fd, buffers, offset)

    def free_bytes(self, path: str) -> int:
        return super().free_bytes(path) if self.free is None else self.free
