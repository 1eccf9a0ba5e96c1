"""A three-node etcd on this machine, whose nodes tests kill, freeze and start anew."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cygnet.gcache.runtime.etcd import Endpoint, Etcd
from cygnet.gcache.runtime.registry import RegistryError

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here (Debian: etcd-server)")
WAIT_S = 60.0


class EtcdCluster:
    """Nodes by number."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        with ExitStack() as held:  # all at once, so that they differ
            sockets = [held.enter_context(socket.socket()) for _ in range(2 * count)]
            for sock in sockets:
                sock.bind(("127.0.0.1", 0))
            ports = [sock.getsockname()[1] for sock in sockets]
        self.endpoints = tuple(Endpoint("127.0.0.1", port) for port in ports[:count])
        self._folder = folder
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[count:]]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count
        for number in range(count):
            self.start(number)

    @property
    def spec(self) -> str:
        """As options take it."""
        return ",".join(map(str, self.endpoints))

    def registry(self, prefix: str = "/test/", try_timeout_s: float = 1.0) -> Etcd:
        return Etcd(self.endpoints, prefix, try_timeout_s=try_timeout_s)

    def start(self, number: int) -> None:
        """Start a node, with the data it had."""
        name, url, peer = f"n{number}", str(self.endpoints[number]), self._peers[number]
        arguments = {
            "name": name,
            "data-dir": str(self._folder / name),
            "listen-client-urls": url,
            "advertise-client-urls": url,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(f"n{at}={peer}" for at, peer in enumerate(self._peers)),
            # Patient: tests run beside others, on few cores.
            "heartbeat-interval": "200",
            "election-timeout": "2000",
            "log-level": "error",
        }
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                ["etcd", *(f"--{option}={value}" for option, value in arguments.items())], stdout=log, stderr=log
            )

    def wait(self, *numbers: int) -> None:
        """Until these nodes (default: all) answer, with a majority behind them."""
        for number in numbers or range(len(self.endpoints)):
            registry = Etcd((self.endpoints[number],), "/test/", try_timeout_s=5.0)
            until = time.monotonic() + WAIT_S
            while True:
                try:
                    registry.read()
                    break
                except RegistryError:
                    assert time.monotonic() < until, f"etcd node {number} does not answer"
                    time.sleep(0.1)

    def kill(self, number: int) -> None:
        """kill -9."""
        process = self._processes[number]
        if process is not None:
            process.kill()
            process.wait(20)
            self._processes[number] = None

    def signal(self, number: int, which: signal.Signals) -> None:
        """SIGSTOP and SIGCONT."""
        process = self._processes[number]
        assert process is not None
        process.send_signal(which)

    def heal(self) -> None:
        """All nodes run and answer."""
        for number, process in enumerate(self._processes):
            if process is None:
                self.start(number)
            else:
                process.send_signal(signal.SIGCONT)
        self.wait()

    def close(self) -> None:
        for number in range(len(self._processes)):
            self.kill(number)


@contextmanager
def etcd_cluster() -> Iterator[EtcdCluster]:
    """Three nodes that answer."""
    with TemporaryDirectory(prefix="cygnet-test-", dir="/dev/shm") as folder:
        cluster = EtcdCluster(Path(folder))
        try:
            cluster.wait()
            yield cluster
        finally:
            cluster.close()
