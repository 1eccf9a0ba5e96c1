"""A redis-server of the tests' own: on a free port, without persistence, that can be killed, frozen and restarted."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

START_S = 10


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisProcess:
    """Context manager around the process."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start, and return when it answers."""
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self._folder]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + START_S
        while True:
            try:
                assert self.command("PING") == b"+PONG\r\n"
                return
            except OSError:
                assert time.monotonic() < end, "redis-server does not answer"
                time.sleep(0.02)  # between attempts, not for the outcome

    def command(self, text: str) -> bytes:
        """Run an inline command; the raw reply, if short."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            connection.sendall(text.encode() + b"\r\n")
            return connection.recv(1 << 16)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def freeze(self) -> None:
        """Connections are accepted (by the kernel) and nothing is answered."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
