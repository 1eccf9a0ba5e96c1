"""Open files of segments, for reading. A bounded number of them, each closed once nobody uses it."""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from cygnet.kv.runtime.disk_store.disk import DIRECT, Disk
from cygnet.kv.runtime.disk_store.folder import Folder
from cygnet.kv.runtime.disk_store.segment import Segment

MAX_OPEN = 64
"""Segments kept open, beside those being read."""


class Handle:
    """A segment's open file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.dropped = False


class Handles:
    """Invariants: a handle is open while it is in the table or has users; at most `MAX_OPEN` without users are."""

    def __init__(self, disk: Disk, folder: Folder, *, direct: bool) -> None:
        self._disk = disk
        self._folder = folder
        self._direct = direct
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Handle] = OrderedDict()

    @contextmanager
    def use(self, segment: Segment) -> Iterator[Handle]:
        """The segment's handle. Raises `OSError` when it can't be opened: `FileNotFoundError` when it is gone."""
        handle = self._acquire(segment)
        try:
            yield handle
        finally:
            with self._lock:
                handle.users -= 1
                if handle.dropped and not handle.users:
                    self._close(handle)

    def drop(self, slot: int) -> None:
        """Close a segment's handle, now or when its last user is done."""
        with self._lock:
            handle = self._open.pop(slot, None)
            if handle is not None:
                self._retire(handle)

    def close(self) -> None:
        """Close all."""
        with self._lock:
            while self._open:
                self._retire(self._open.popitem()[1])

    def audit(self) -> list[str]:
        """Whether the table is within its bound."""
        with self._lock:
            idle = sum(not handle.users for handle in self._open.values())
        return [f"{idle} idle files are open, at most {MAX_OPEN} should be"] if idle > MAX_OPEN else []

    def _acquire(self, segment: Segment) -> Handle:
        with self._lock:
            handle = self._open.get(segment.slot)
            if handle is None:
                handle = self._open_file(segment)
                self._open[segment.slot] = handle
                idle = [slot for slot, other in self._open.items() if not other.users and other is not handle]
                for slot in idle[: max(0, len(idle) - MAX_OPEN + 1)]:
                    self._retire(self._open.pop(slot))
            else:
                self._open.move_to_end(segment.slot)
            handle.users += 1
            return handle

    def _open_file(self, segment: Segment) -> Handle:
        flags = os.O_RDONLY | (DIRECT if self._direct else 0)
        return Handle(self._disk.open(self._folder.data(segment.name), flags))

    def _retire(self, handle: Handle) -> None:
        handle.dropped = True
        if not handle.users:
            self._close(handle)

    def _close(self, handle: Handle) -> None:
        self._disk.close(handle.fd)
