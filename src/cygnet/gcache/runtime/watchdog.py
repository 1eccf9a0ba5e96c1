"""Deadlines of blocking sockets, kept by one thread for all of them.

A timeout on the socket costs two more system calls each time it is used, about as much as a small request itself. So
sockets block without one, and when a deadline passes this thread shuts the socket down: whoever waits on it returns at
once.
"""

import threading
import time
from typing import Protocol

TICK_S = 0.05
"""While anything has a deadline the thread looks at least this often, so that it need rarely be woken for a new one."""


class Watched(Protocol):
    """What has a deadline."""

    deadline: float
    """Monotonic seconds; infinite: none."""

    def expire(self) -> None:
        """End whatever waits, if the deadline has still passed."""


class Watchdog:
    """Calls `expire` of what is watched, within a fraction of a millisecond of its deadline."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._watched: set[Watched] = set()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.wakes_at = float("inf")
        """When it looks next; infinite while it is looking."""

    def add(self, watched: Watched) -> None:
        """Watch it from now on."""
        with self._condition:
            self._watched.add(watched)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def discard(self, watched: Watched) -> None:
        """Watch it no longer."""
        with self._condition:
            self._watched.discard(watched)

    def nudge(self) -> None:
        """A deadline before `wakes_at` has been set."""
        with self._condition:
            self._condition.notify()

    def close(self) -> None:
        """End the thread."""
        with self._condition:
            self._closed = True
            thread = self._thread
            self._condition.notify()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        with self._condition:
            while not self._closed:
                # Whoever sets a deadline from here on, too late to be seen below, will nudge.
                self.wakes_at = float("inf")
                now = time.monotonic()
                earliest = float("inf")
                for watched in self._watched:
                    if watched.deadline <= now:
                        watched.expire()
                    else:
                        earliest = min(earliest, watched.deadline)
                if earliest == float("inf"):
                    self._condition.wait()
                else:
                    self.wakes_at = min(earliest, now + TICK_S)
                    self._condition.wait(max(0.0, self.wakes_at - time.monotonic()))
