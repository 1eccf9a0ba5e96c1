"""A few threads that help whoever has several reads to do."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Job(Generic[T]):
    """Tasks that the caller and its helpers take from one after another."""

    def __init__(self, tasks: Iterable[T], work: Callable[[T], None], deadline: float) -> None:
        self._tasks: Iterator[T] = iter(tasks)
        self._work = work
        self._deadline = deadline
        self._condition = threading.Condition()
        self._running = 0
        self._over = False
        self._error: BaseException | None = None

    def help(self) -> None:
        """Do tasks until there are no more, or it is too late to begin one."""
        with self._condition:
            if self._over:
                return
            self._running += 1
        try:
            while True:
                with self._condition:
                    late = self._error is not None or time.monotonic() >= self._deadline
                    task = None if late else next(self._tasks, None)
                if task is None:
                    return
                self._work(task)
        except BaseException as error:
            self._error = error
        finally:
            with self._condition:
                self._running -= 1
                self._condition.notify_all()

    def finish(self) -> None:
        """Wait for those who are still at it; nobody begins any more. Raises what `work` raised."""
        with self._condition:
            self._over = True
            # A task ends when its read does: the caller's memory is not free before.
            while self._running:
                self._condition.wait()
        if self._error is not None:
            raise self._error


class Team:
    """`num_threads` helpers, started when they are first needed. Whoever calls `run` works too, so 0 helpers are fine.

    Requests for help are bounded in number: when all helpers are busy, callers do their work alone.
    """

    def __init__(self, num_threads: int, name: str, begin: Callable[[], object] = bool) -> None:
        """Each helper calls `begin` first, which must not raise."""
        self._begin = begin
        self._num_threads = num_threads
        self._name = name
        self._requests: queue.Queue[Callable[[], None] | None] = queue.Queue(2 * num_threads)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def run(self, tasks: list[T], work: Callable[[T], None], deadline: float) -> None:
        """`work(task)` for each task, several at once; what is not begun by `deadline` (monotonic seconds) is left."""
        if len(tasks) == 1:
            if time.monotonic() < deadline:
                work(tasks[0])
            return
        job = _Job(tasks, work, deadline)
        for _ in range(min(self._num_threads, len(tasks) - 1)):
            if not self._ask(job.help):
                break
        job.help()
        job.finish()

    def close(self, deadline: float) -> None:
        """End the threads; those that have not ended by `deadline` are left to end by themselves."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            try:
                self._requests.put(None, timeout=max(0.0, deadline - time.monotonic()))
            except queue.Full:
                break
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _ask(self, help_: Callable[[], None]) -> bool:
        with self._lock:
            if self._closed:
                return False
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._serve, name=f"{self._name}-{i}", daemon=True)
                    for i in range(self._num_threads)
                ]
                for thread in self._threads:
                    thread.start()
        try:
            self._requests.put_nowait(help_)
        except queue.Full:
            return False
        return True

    def _serve(self) -> None:
        self._begin()
        while (help_ := self._requests.get()) is not None:
            help_()
