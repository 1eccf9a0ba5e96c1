"""A bounded queue of jobs with the thread that does them, one after another."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

J = TypeVar("J")


class Line(Generic[J]):
    """Jobs are done in the order in which they came, on a thread that is started with the first of them.

    Whatever is taken in is given to `work`, also after `close`. `work` must not raise.
    """

    def __init__(self, name: str, work: Callable[[J], None], *, most: int) -> None:
        """`most` jobs may wait."""
        self._name = name
        self._work = work
        self._most = most
        self._condition = threading.Condition()
        self._jobs: deque[J] = deque()
        self._working: J | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, job: J) -> bool:
        """Take a job in; `False` if there is no room, or the line is closed."""
        with self._condition:
            if self._closed or len(self._jobs) >= self._most:
                return False
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify()
            return True

    def jobs(self) -> list[J]:
        """All that are waiting or being done."""
        with self._condition:
            return [*([] if self._working is None else [self._working]), *self._jobs]

    def waiting(self) -> list[J]:
        """All that are waiting."""
        with self._condition:
            return list(self._jobs)

    def close(self) -> None:
        """Take nothing more in. What is there is still done."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def join(self, deadline: float) -> bool:
        """Wait until all is done after `close`, up to `deadline` (of `time.monotonic`); whether it is."""
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._thread is None or not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._working = None
                self._condition.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                self._working = job = self._jobs.popleft()
            self._work(job)
