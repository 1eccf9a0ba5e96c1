"""Wakes the engine's loop from other threads."""

import os
import select


class Waker:
    """A pipe that is readable from `wake` until `clear`.

    It belongs to the thread that waits; any thread may wake it.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """To be polled for reading."""
        return self._read

    def wake(self) -> None:
        """Make it readable. Never waits."""
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            pass  # full, and so readable
        except OSError:
            pass  # closed: nobody waits any more

    def wait(self, timeout_s: float) -> None:
        """Until somebody wakes it, or the time is over."""
        select.select([self._read], [], [], timeout_s)
        self.clear()

    def clear(self) -> None:
        """Forget past calls of `wake`."""
        try:
            while os.read(self._read, 4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Give the pipe back."""
        os.close(self._read)
        os.close(self._write)
