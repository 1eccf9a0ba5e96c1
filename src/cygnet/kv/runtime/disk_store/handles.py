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
"""Segments kept open; two files each."""


class Handle:
    """A segment's file, opened through the page cache and (-1: not) past it."""

    def __init__(self, cached: int, direct: int) -> None:
        self.cached = cached
        self.direct = direct
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
                handle = self._open_files(segment)
                self._open[segment.slot] = handle
                idle = [slot for slot, other in self._open.items() if not other.users and other is not handle]
                for slot in idle[: max(0, len(idle) - MAX_OPEN + 1)]:
                    self._retire(self._open.pop(slot))
            else:
                self._open.move_to_end(segment.slot)
            handle.users += 1
            return handle

    def _open_files(self, segment: Segment) -> Handle:
        path = self._folder.data(segment.name)
        cached = self._disk.open(path)
        if not self._direct:
            return Handle(cached, -1)
        try:
            return Handle(cached, self._disk.open(path, os.O_RDONLY | DIRECT))
        except OSError:
            self._disk.close(cached)
            raise

    def _retire(self, handle: Handle) -> None:
        handle.dropped = True
        if not handle.users:
            self._close(handle)

    def _close(self, handle: Handle) -> None:
        self._disk.close(handle.cached)
        if handle.direct >= 0:
            self._disk.close(handle.direct)
