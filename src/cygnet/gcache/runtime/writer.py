"""The thread that writes cold objects down to the disk, before room is short."""

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cygnet.gcache.arena import Entry

DISK_TIMEOUT_S = 10.0
RETRY_S = 1.0
"""Pause after the disk took nothing."""


class Source(Protocol):
    """Whose objects are written down."""

    def to_write_down(self, *, everything: bool) -> "list[Entry]":
        """With the lock: what is to be written now."""

    def write_down(self, *, everything: bool) -> int:
        """Write some of it; how many objects the disk took."""


class Writer:
    """Writes whatever its source wants written, until `close`. Shares the source's lock."""

    def __init__(self, source: Source, lock: threading.Lock) -> None:
        self._source = source
        self._lock = lock
        self._wanted = threading.Condition(lock)
        self._closing = False
        self._starved = False
        """Someone waits for room that only writing down can make, whatever share is clean."""
        self._thread = threading.Thread(target=self._run, name="gcache-write-down", daemon=True)
        self._thread.start()

    def nudge(self, *, starved: bool = False) -> None:
        """With the lock: there may be something to write."""
        self._starved = self._starved or starved
        self._wanted.notify()

    def close(self, timeout_s: float) -> None:
        """End, after what is being written."""
        with self._lock:
            self._closing = True
            self._wanted.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closing and not self._source.to_write_down(everything=self._starved):
                    self._wanted.wait(RETRY_S)
                if self._closing:
                    return
                starved, self._starved = self._starved, False
            if not self._source.write_down(everything=starved):
                with self._lock:
                    if not self._closing:
                        self._wanted.wait(RETRY_S)
