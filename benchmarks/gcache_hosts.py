"""Machines for `gcache_faults.py`: network namespaces on one bridge, with servers of GCache and an etcd in them.

The script runs in a network and mount namespace of its own (`inside`): the bridge, the clients and etcd are there, each
server is in another one, behind a pair of virtual interfaces. So cables can be pulled, slowed down and cut one way, and
file systems be full, without anything being noticed outside.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CLIENTS, ETCD = "10.77.0.1", "10.77.0.2"
PORT = 7400
INSIDE = "CYGNET_FAULTS_INSIDE"
START_TIMEOUT_S = 60.0


def run(command: str) -> None:
    """A command of a few words. Raises `CalledProcessError`."""
    subprocess.run(command.split(), check=True, capture_output=True)


def why_not() -> str:
    """Why no network namespaces can be made here; empty if they can."""
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"no {program} here (Debian: iproute2, util-linux)"
    if shutil.which("etcd") is None:
        return "no etcd here (Debian: etcd-server)"
    name = f"cygnet-{os.getpid()}-try"
    script = f"""set -e; ip netns add {name}; trap 'ip netns del {name}' EXIT; ip link add br0 type bridge
        ip link add v0 type veth peer name eth0 netns {name}; mount -t tmpfs none /mnt
        tc qdisc add dev v0 root tbf rate 1mbit burst 10kb latency 50ms"""
    tried = subprocess.run(["unshare", "-n", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"can't make network namespaces: {tried.stderr.strip()}"


def go_inside() -> None:
    """Begin this script anew in namespaces of its own, unless it is there already."""
    if os.environ.get(INSIDE):
        return
    os.environ[INSIDE] = "1"
    os.execvp("unshare", ["unshare", "-n", "-m", sys.executable, *sys.argv])


class Host:
    """A machine with one server of the cluster on it. Its folder is a file system in memory, of `size`."""

    def __init__(self, number: int, name: str, folder: Path, *, size: str, arguments: list[str]) -> None:
        self.name = name
        self.address = f"10.77.0.{10 + number}"
        self.folder = folder / name
        self._namespace = f"cygnet-{os.getpid()}-{name}"
        self._cable = f"v-{name}"
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self.folder.mkdir()
        run(f"mount -t tmpfs -o size={size} none {self.folder}")
        run(f"ip netns add {self._namespace}")
        run(f"ip link add {self._cable} type veth peer name eth0 netns {self._namespace}")
        run(f"ip link set {self._cable} master br0 up")
        for command in (f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            run(f"ip -n {self._namespace} {command}")

    def start(self) -> None:
        """Start the server. Returns when it serves; raises `RuntimeError` with what it says when it does not."""
        command = ["ip", "netns", "exec", self._namespace, sys.executable, "-m", "cygnet.cli.main", "gcache", "serve"]
        command += ["--json", "--no-token", "--host", self.address, "--port", str(PORT), "--server-id", self.name]
        command += ["--arena", str(self.folder / "arena"), *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(self._process.communicate()[1].strip())

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number is signal.SIGKILL:
            self._process.communicate()

    def pull_cable(self) -> None:
        """Nothing comes in, nothing goes out."""
        run(f"ip link set {self._cable} down")

    def plug_in(self) -> None:
        run(f"ip link set {self._cable} up")

    def cut_from(self, address: str) -> None:
        """Nothing that this machine sends gets there."""
        run(f"ip -n {self._namespace} route add blackhole {address}/32")

    def join_with(self, address: str) -> None:
        run(f"ip -n {self._namespace} route del blackhole {address}/32")

    def trickle(self, rate: str) -> None:
        """What it sends leaves it at that rate."""
        run(f"ip netns exec {self._namespace} tc qdisc add dev eth0 root tbf rate {rate} burst 4kb latency 400ms")

    def flow(self) -> None:
        run(f"ip netns exec {self._namespace} tc qdisc del dev eth0 root")

    def fill_up(self) -> None:
        """Take all room of its file system."""
        with (self.folder / "filler").open("wb", buffering=0) as filler:
            for size in (1 << 20, 1 << 12):
                try:
                    while filler.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def make_room(self) -> None:
        (self.folder / "filler").unlink()

    def end(self) -> None:
        if self.is_running:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", self._namespace], capture_output=True, check=False)


class Etcd:
    """Three nodes, where the clients are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._nodes: list[subprocess.Popen[bytes] | None] = [None] * 3
        for number in range(3):
            self.start(number)

    @property
    def spec(self) -> str:
        return ",".join(f"{ETCD}:{2379 + 10 * number}" for number in range(3))

    def start(self, number: int) -> None:
        client, peer = f"http://{ETCD}:{2379 + 10 * number}", f"http://{ETCD}:{2380 + 10 * number}"
        everyone = ",".join(f"n{n}=http://{ETCD}:{2380 + 10 * n}" for n in range(3))
        command = ["etcd", "--name", f"n{number}", "--data-dir", str(self.folder / f"etcd-{number}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", everyone, "--log-level", "error"]
        command += ["--heartbeat-interval", "200", "--election-timeout", "2000"]
        with (self.folder / f"etcd-{number}.log").open("ab") as log:
            self._nodes[number] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, number: int) -> None:
        node = self._nodes[number]
        if node is not None:
            node.send_signal(signal.SIGCONT)
            node.kill()
            node.wait()
            self._nodes[number] = None

    def freeze(self, number: int) -> None:
        node = self._nodes[number]
        assert node is not None
        node.send_signal(signal.SIGSTOP)

    def heal(self) -> None:
        for number, node in enumerate(self._nodes):
            if node is None:
                self.start(number)
            else:
                node.send_signal(signal.SIGCONT)


class Rack:
    """The bridge, an etcd, and hosts by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run(f"mount -t tmpfs none {folder}")
        for command in (
            "link set lo up",
            "link add br0 type bridge",
            "link set br0 up",
            f"addr add {CLIENTS}/24 dev br0",
            f"addr add {ETCD}/24 dev br0",
        ):
            run(f"ip {command}")
        self.hosts: dict[str, Host] = {}
        self.etcd = Etcd(folder)

    def add(self, name: str, *more: str, size: str = "320m") -> Host:
        """A machine whose server joins the cluster."""
        arguments = ["--etcd", self.etcd.spec, *more]
        self.hosts[name] = Host(len(self.hosts), name, self.folder, size=size, arguments=arguments)
        return self.hosts[name]

    def end(self) -> None:
        for host in self.hosts.values():
            host.end()
        for number in range(3):
            self.etcd.kill(number)
        for folder in (*(host.folder for host in self.hosts.values()), self.folder):
            run(f"umount -l {folder}")


def wait_until(true: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Until `true()`; raises `TimeoutError`."""
    until = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(0.05)
