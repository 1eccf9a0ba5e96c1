"""GCache servers for tests, in this process and in others."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from cygnet.gcache.protocol import ANSWER_MAGIC, HEAD_BYTES, FrameHead, unpack_head
from cygnet.gcache.record import full_key
from cygnet.gcache.runtime.channel import Address
from cygnet.gcache.runtime.client import ClientOptions, GCacheClient
from cygnet.gcache.runtime.server import Server, ServerOptions

MIB = 1 << 20


def wait_until(true: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Until `true()`."""
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.01)


def key(name: object, namespace: bytes = b"test") -> bytes:
    return full_key(namespace, repr(name).encode())


@contextmanager
def server(memory_bytes: int = 32 * MIB, **options: object) -> Iterator[Server]:
    """A server in this process, with its arena in a folder that goes with it (if none is named)."""
    with TemporaryDirectory(prefix="cygnet-test-", dir="/dev/shm") as folder:
        plain = ServerOptions(port=0, memory_bytes=memory_bytes, arena=Path(folder) / "arena")
        running = Server(replace(plain, **options))  # type: ignore[arg-type]
        try:
            yield running
        finally:
            running.close()


@contextmanager
def client(*ports: int, **options: object) -> Iterator[GCacheClient]:
    """A client of servers on this machine, with plenty of time."""
    plain = ClientOptions(servers=tuple(Address("127.0.0.1", port) for port in ports), timeout_s=20.0)
    connected = GCacheClient(replace(plain, **options))  # type: ignore[arg-type]
    try:
        yield connected
    finally:
        connected.close()


class ServerProcess:
    """`cygnet gcache serve`, to be killed, frozen and started anew."""

    def __init__(self, arena: Path, *more: str) -> None:
        self.arguments = ["--arena", str(arena), "--memory", "32MiB", *more]
        self.port = 0
        self.announced: dict[str, int] = {}
        """What it said of itself when it began to serve."""
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """Start, on the port it had; returns when it serves."""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "cygnet.cli.main",
                *("gcache", "serve", "--json", "--port", str(self.port)),
                *self.arguments,
            ],
            env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.announced = json.loads(self._process.stdout.readline())
        self.port = self.announced["port"]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; waits for the end of what kills."""
        assert self._process is not None
        self._process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._process.communicate(timeout=20)

    def stop(self) -> int:
        """End it, whatever state it is in; its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.communicate(timeout=20)
        finally:
            self._process.kill()
            self._process.communicate()
        return self._process.returncode


@contextmanager
def server_process(*more: str) -> Iterator[ServerProcess]:
    """A server in a process of its own."""
    with TemporaryDirectory(prefix="cygnet-test-", dir="/dev/shm") as folder:
        process = ServerProcess(Path(folder) / "arena", *more)
        try:
            yield process
        finally:
            process.stop()


# --- frames over a socket, for what no client of ours would send


@contextmanager
def raw(running: Server, *, unix: bool = False) -> Iterator[socket.socket]:
    if unix:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(running.service.info.socket)
    else:
        sock = socket.create_connection(("127.0.0.1", running.port))
    sock.settimeout(20)
    with sock:
        yield sock


def read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = sock.recv(count - len(data))
        assert got, "closed"
        data += got
    return data


def answer(sock: socket.socket) -> tuple[FrameHead, bytes, bytes]:
    head = unpack_head(read(sock, HEAD_BYTES), ANSWER_MAGIC)
    return head, read(sock, head.meta_bytes), read(sock, head.body_bytes)
