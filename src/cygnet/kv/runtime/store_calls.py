"""Calls into a store that may fail, answer nonsense, or never return."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cygnet.base.errors import InvariantError

T = TypeVar("T")
log = logging.getLogger("cygnet.kv")

LOG_INTERVAL_S = 60.0
LOOK_S = 0.1
"""How often a wait looks whether it has been cut short."""
MOST_LOST = 2


class StoreHungError(Exception):
    """A call did not return in time. It may still be running, and using the memory that it was given."""


class Complaints:
    """Says that the store fails: once in a while, not for every object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said_at: float | None = None
        self._unsaid = 0

    def say(self, what: str, reason: object) -> None:
        """Log it, unless something was logged a short while ago."""
        with self._lock:
            now = time.monotonic()
            if self._said_at is not None and now - self._said_at < LOG_INTERVAL_S:
                self._unsaid += 1
                return
            unsaid, self._unsaid, self._said_at = self._unsaid, 0, now
        more = f"; {unsaid} more such failures since the last message" if unsaid else ""
        log.warning("the store can't %s, so its KV is computed again: %s%s", what, reason, more)


class _Call(Generic[T]):
    """One call, on a thread that may be lost in it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.returned = threading.Event()
        self.value: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:
            self.error = error
        self.returned.set()


@dataclass(frozen=True)
class Pending(Generic[T]):
    """A call under way, and the time (of `time.monotonic`) when it is given up."""

    call: _Call[T]
    until: float


class StoreCalls:
    """Makes one call after another on a thread of its own. A call that hangs is left behind with its thread; while
    `MOST_LOST` threads are lost that way, calls fail at once.

    One thread holds it, and finishes each call before it begins the next.
    """

    def __init__(self, name: str, *, patience_s: float, end: Callable[[], float], complaints: Complaints) -> None:
        """A call is given up after `patience_s`, and at the time `end()`, which may come nearer during a call."""
        self._name = name
        self._patience_s = patience_s
        self._end = end
        self._complaints = complaints
        self._lost: list[_Call[Any]] = []
        self._queue: queue.SimpleQueue[_Call[Any] | None] | None = None

    def begin(self, function: Callable[[], T]) -> Pending[T]:
        """Start a call. Raises `StoreHungError` when too many threads are lost."""
        self._lost = [call for call in self._lost if not call.returned.is_set()]
        if len(self._lost) >= MOST_LOST:
            raise StoreHungError(f"{len(self._lost)} earlier calls have not returned")
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._queue,), name=self._name, daemon=True).start()
        call = _Call(function)
        self._queue.put(call)
        return Pending(call, time.monotonic() + self._patience_s)

    def finish(self, pending: Pending[T], what: str, valid: Callable[[T], bool], otherwise: T) -> T:
        """What the call returned; `otherwise` if it raised something, or returned what is not `valid`. Raises
        `StoreHungError` when it is given up."""
        call = pending.call
        while not call.returned.wait(min(LOOK_S, max(0.0, self._deadline(pending) - time.monotonic()))):
            if time.monotonic() >= self._deadline(pending):
                self._lost.append(call)
                self.close()
                raise StoreHungError(f"a call has not returned for {self._patience_s:g} s, or until the end")
        if isinstance(call.error, InvariantError):
            raise call.error
        if call.error is not None:
            self._complaints.say(what, f"{type(call.error).__name__}: {call.error}")
            return otherwise
        if not valid(call.value):  # type: ignore[arg-type]
            self._complaints.say(what, "it answered what is no answer")
            return otherwise
        return call.value  # type: ignore[return-value]

    def ask(self, function: Callable[[], T], what: str, valid: Callable[[T], bool], otherwise: T) -> T:
        """A whole call; `otherwise` also when it is given up."""
        try:
            return self.finish(self.begin(function), what, valid, otherwise)
        except StoreHungError as error:
            self.complain(what, error)
            return otherwise

    def complain(self, what: str, reason: object) -> None:
        """Log it once in a while."""
        self._complaints.say(what, reason)

    @property
    def num_lost(self) -> int:
        """Threads that are lost in calls."""
        return sum(not call.returned.is_set() for call in self._lost)

    def close(self) -> None:
        """Let the thread end once it is free. The next call gets a new one."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None

    def _deadline(self, pending: Pending[T]) -> float:
        return min(pending.until, self._end())


def _serve(calls: "queue.SimpleQueue[_Call[Any] | None]") -> None:
    while (call := calls.get()) is not None:
        call.run()
