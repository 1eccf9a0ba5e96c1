"""Calls that end on threads of their own, for callers that poll file descriptors."""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Polled(Generic[T]):
    """Calls of one kind: submitted, told by an event fd when they have ended, and their results taken once.

    Thread-safe. At most `max_calls` wait or run, or have results that nobody took; one more ends at once with
    `otherwise()`, and so does one that raises. Results that nobody takes are dropped for newer ones.
    """

    def __init__(self, threads: ThreadPoolExecutor, max_calls: int, numbers: Callable[[], int]) -> None:
        self._threads = threads
        self._max_calls = max_calls
        self._numbers = numbers
        self._lock = threading.Lock()
        self._running = 0
        self._results: dict[int, T] = {}
        self._order: deque[int] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable once something has ended."""
        self._closed = False

    def submit(self, call: Callable[[], T], otherwise: Callable[[], T]) -> int:
        """Begin a call; returns its number."""
        number = self._numbers()
        with self._lock:
            begun = not self._closed and self._running < self._max_calls
            self._running += begun
        if begun:
            self._threads.submit(self._run, number, call, otherwise)
        else:
            self._end(number, otherwise())
        return number

    def take(self, number: int) -> T | None:
        """What came of a call, once; `None` before it has ended, and afterwards."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """What came of all calls that have ended, once."""
        with self._lock:
            results, self._results = self._results, {}
            self._order.clear()
        return results

    def close(self) -> None:
        """Close the fd. The calls must have ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)

    def _run(self, number: int, call: Callable[[], T], otherwise: Callable[[], T]) -> None:
        try:
            result = call()
        except Exception:
            result = otherwise()
        with self._lock:
            self._running -= 1
        self._end(number, result)

    def _end(self, number: int, result: T) -> None:
        with self._lock:
            if self._closed:
                return
            self._results[number] = result
            self._order.append(number)
            while len(self._results) > self._max_calls:
                self._results.pop(self._order.popleft(), None)
            while self._order and self._order[0] not in self._results:
                self._order.popleft()
            os.eventfd_write(self.fd, 1)
