"""What `gcache.py` compares with: raw sockets and memcpy, Redis or Valkey, Mooncake Store."""

import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from gcache_turns import Way

WORKING_SET = 128 << 20
HEADER = 64
BATCH = 256
REDIS_LIKE = ("redis-server", "valkey-server")
MOONCAKE = Path(__file__).parent.parent / ".peers" / "mooncake" / "bin"


def shared_memory(num_bytes: int) -> memoryview:
    """Memory of the kind that the arena is made of: pages of /dev/shm, all of them there."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        mapped = mmap.mmap(file.fileno(), num_bytes)
    view = memoryview(mapped)
    np.frombuffer(view, np.uint8)[:: mmap.PAGESIZE] = 1
    return view


def receive(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`."""
    done = 0
    while done < len(view):
        got = sock.recv_into(view[done:])
        if not got:
            raise ConnectionError("the peer has ended")
        done += got


def receive_checked(sock: socket.socket, view: memoryview) -> int:
    """Fill `view`; the checksum of it, made as it comes."""
    hasher, done = xxh3_64(), 0
    while done < len(view):
        got = sock.recv_into(view[done:])
        if not got:
            raise ConnectionError("the peer has ended")
        hasher.update(view[done : done + got])
        done += got
    return hasher.intdigest()


def connect(port: int) -> socket.socket:
    """A connection to a server that may still be starting."""
    until = time.monotonic() + 20
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def free_port() -> int:
    """A port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def process(*command: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """A process for as long as the block lasts, its output and input as pipes."""
    started = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield started
    finally:
        started.terminate()
        started.communicate()


# --- raw sockets, memcpy


def _raw_server(pipe: Connection, size: int) -> None:
    """Echoes descriptors on a unix socket; sends and takes bytes on a TCP one: one header in, as it says."""
    unix, tcp = socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))
    unix.bind("")
    unix.listen()
    data = shared_memory(WORKING_SET)
    pipe.send((unix.getsockname(), tcp.getsockname()[1]))
    near, _ = unix.accept()
    far, _ = tcp.accept()
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if os.fork() == 0:
        while message := near.recv(HEADER):
            near.sendall(message)
        os._exit(0)
    header, one, number = bytearray(HEADER), memoryview(bytearray(size)), 0
    while far.recv_into(header):
        number += 1
        at = number * size % WORKING_SET
        if header[0] == ord("g"):
            far.sendall(data[at : at + size])
        elif header[0] == ord("c"):
            own = receive_checked(far, data[at : at + size])
            receive(far, (sent := memoryview(bytearray(8))))
            assert own.to_bytes(8, "little") == sent
            far.sendall(header)
        else:
            receive(far, one if header[0] == ord("o") else data[at : at + size])
            far.sendall(header)
    os._exit(0)


@contextmanager
def raw(size: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A unix and a TCP socket to a process that does nothing but answer."""
    ours, theirs = get_context("fork").Pipe()
    child = get_context("fork").Process(target=_raw_server, args=(theirs, size))
    child.start()
    name, port = ours.recv()
    with socket.socket(socket.AF_UNIX) as near, socket.create_connection(("127.0.0.1", port)) as far:
        near.connect(name)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield near, far
    child.join()


def raw_ways(near: socket.socket, far: socket.socket, source: memoryview, size: int) -> list[Way]:
    """The bounds. `source` is shared memory."""
    into = np.zeros(size, np.uint8)
    view, pages = into.data, np.frombuffer(source, np.uint8)

    def descriptor(_: int) -> None:
        near.sendall(bytes(HEADER))
        near.recv(HEADER)

    def copy(number: int) -> None:
        at = number * size % WORKING_SET
        descriptor(number)
        np.copyto(into, pages[at : at + size])

    def get(_: int) -> None:
        far.sendall(b"g" * HEADER)
        receive(far, view)

    def put(kind: bytes, number: int) -> None:
        at = number * size % WORKING_SET
        far.sendall(kind * HEADER)
        far.sendall(source[at : at + size])
        receive(far, memoryview(bytearray(HEADER)))

    def checked_get(_: int) -> None:
        far.sendall(b"g" * HEADER)
        receive_checked(far, view)

    def checked_put(number: int) -> None:
        at = number * size % WORKING_SET
        value = source[at : at + size]
        far.sendall(b"c" * HEADER)
        far.sendall(value)
        far.sendall(xxh3_64_intdigest(value).to_bytes(8, "little"))  # the other end has not yet taken in all of it
        receive(far, memoryview(bytearray(HEADER)))

    return [
        Way("descriptor RPC", descriptor),
        Way("descriptor RPC + memcpy", copy),
        Way("raw TCP get", get),
        Way("raw TCP put", partial(put, b"p")),
        Way("raw TCP put, to one buffer", partial(put, b"o")),
        Way("raw TCP get, checked", checked_get, "raw TCP get"),
        Way("raw TCP put, checked", checked_put, "raw TCP put"),
    ]


# --- Redis, Valkey


@contextmanager
def redis_like() -> Iterator[tuple[str, int] | None]:
    """Name and port of a fresh Redis or Valkey server, if one of them is installed."""
    binary = next(filter(None, map(shutil.which, REDIS_LIKE)), None)
    if binary is None:
        yield None
        return
    port = free_port()
    with process(binary, "--port", str(port), "--save", "", "--appendonly", "no", "--loglevel", "warning"):
        connect(port).close()
        yield Path(binary).name.removesuffix("-server").capitalize(), port


def redis_ways(name: str, port: int, source: memoryview, size: int, stack: ExitStack) -> list[Way]:
    """SET and GET as RESP over a raw socket, and through redis-py where that is installed."""
    sock = stack.enter_context(connect(port))
    into = memoryview(bytearray(size))
    head = b"$%d\r\n" % size
    value = source[:size]
    count = min(256, WORKING_SET // size)

    def put(number: int) -> None:
        key = b"%d" % (number % count)
        sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, size))
        sock.sendall(value)
        sock.sendall(b"\r\n")
        receive(sock, memoryview(bytearray(5)))

    def get(number: int) -> None:
        key = b"%d" % (number % count)
        sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key))
        receive(sock, memoryview(bytearray(len(head))))
        receive(sock, into)
        receive(sock, memoryview(bytearray(2)))

    for number in range(count):
        put(number)
    ways = [Way(f"raw {name} get", get), Way(f"raw {name} put", put)]
    client = redis_py(port, stack)
    if client is not None:
        ways += [
            Way(f"redis-py get from {name}", lambda number: client.get(b"%d" % (number % count))),
            Way(f"redis-py put to {name}", lambda number: client.set(b"%d" % (number % count), value)),
        ]
    return ways


def redis_py(port: int, stack: ExitStack) -> Any:
    """A redis-py client; `None` where that is not installed."""
    try:
        from redis import Redis
    except ImportError:
        return None
    client = Redis(port=port)
    stack.callback(client.close)
    return client


def pipeline_ways(name: str, port: int, values: list[memoryview], into: list[bytearray], stack: ExitStack) -> list[Way]:
    """`BATCH` objects per call: a pipeline of GETs over a raw socket, and pipelines of redis-py."""
    sock = stack.enter_context(connect(port))
    size, total = len(values[0]), len(values) * len(values[0])
    for number, value in enumerate(values):
        sock.sendall(b"*3\r\n$3\r\nSET\r\n$5\r\nb%04d\r\n$%d\r\n" % (number, size) + bytes(value) + b"\r\n")
        receive(sock, memoryview(bytearray(5)))
    asks = b"".join(b"*2\r\n$3\r\nGET\r\n$5\r\nb%04d\r\n" % number for number in range(len(values)))
    head = len(b"$%d\r\n" % size)
    answer = memoryview(bytearray(len(values) * (head + size + 2)))

    def raw_gets(_: int) -> None:
        sock.sendall(asks)
        receive(sock, answer)
        for number, target in enumerate(into):  # into memory of its own, as the others do
            at = number * (head + size + 2) + head
            target[:] = answer[at : at + size]

    ways = [Way(f"raw {name} pipeline of GETs", raw_gets, "", total)]
    client = redis_py(port, stack)
    if client is None:
        return ways
    keys = [b"b%04d" % number for number in range(len(values))]

    def gets(_: int) -> None:
        line = client.pipeline(transaction=False)
        for key in keys:
            line.get(key)
        for target, value in zip(into, line.execute(), strict=True):
            target[:] = value

    def puts(_: int) -> None:
        line = client.pipeline(transaction=False)
        for key, value in zip(keys, values, strict=True):
            line.set(key, value)
        assert all(line.execute())

    return [
        *ways,
        Way("redis-py pipeline of GETs", gets, "", total),
        Way("redis-py pipeline of SETs", puts, "", total),
    ]


# --- Mooncake Store

# A process in Mooncake's own environment. As "segment" it lends memory; as "client" it is told "get COUNT" or
# "put COUNT" and answers with the seconds of each call. Values are checked once.
_MOONCAKE = """
import ctypes, json, mmap, os, sys, time
from mooncake.store import MooncakeDistributedStore
role, master, metadata, size, count = sys.argv[1:4] + list(map(int, sys.argv[4:]))
store = MooncakeDistributedStore()
segment = 512 << 20 if role == "segment" else 0
assert store.setup("127.0.0.1", metadata, segment, 64 << 20, "tcp", "", master) == 0
print("ready", flush=True)
if role == "segment":
    sys.stdin.read()
    sys.exit()
memory = mmap.mmap(-1, 2 * size)
begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
memory[:size] = os.urandom(size)
assert store.register_buffer(begin, 2 * size) == 0
for number in range(count):
    assert store.put_from(f"key-{number}", begin, size) == 0
assert store.get_into("key-0", begin + size, size) == size and memory[:size] == memory[size:]
at = 0
for line in sys.stdin:
    what, calls = line.split()
    times = []
    for _ in range(int(calls)):
        at += 1
        if what == "put":
            store.remove(f"new-{at % 32}")
        began = time.perf_counter()
        if what == "get":
            done = store.get_into(f"key-{at % count}", begin + size, size) == size
        else:
            done = store.put_from(f"new-{at % 32}-{at}", begin, size) == 0
        times.append(time.perf_counter() - began)
        assert done
    print(json.dumps(times), flush=True)
"""


def mooncake_ways(size: int, stack: ExitStack) -> list[Way]:
    """Gets and puts into registered memory over TCP; none where Mooncake is not installed."""
    if not (MOONCAKE / "mooncake_master").exists():
        return []
    master, web, metrics = free_port(), free_port(), free_port()
    quiet = {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "3"}
    stack.enter_context(
        process(
            str(MOONCAKE / "mooncake_master"),
            f"--rpc_port={master}",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_port={web}",
            f"--metrics_port={metrics}",
            **quiet,
        )
    )
    connect(master).close()
    connect(web).close()
    ends = []
    for role in ("segment", "client"):
        count = max(1, min(128, (64 << 20) // size))
        where = (f"127.0.0.1:{master}", f"http://127.0.0.1:{web}/metadata", str(size), str(count))
        end = stack.enter_context(process(str(MOONCAKE / "python"), "-c", _MOONCAKE, role, *where, **quiet))
        assert end.stdout is not None
        if not any(line.startswith("ready") for line in iter(end.stdout.readline, "")):
            print("Mooncake Store does not start here; its rows are left out", file=sys.stderr)
            return []
        ends.append(end)

    def asked(what: str, count: int) -> list[float]:
        end = ends[1]
        assert end.stdin is not None
        assert end.stdout is not None
        end.stdin.write(f"{what} {count}\n")
        end.stdin.flush()
        for line in iter(end.stdout.readline, ""):
            if line.startswith("["):
                return [float(value) for value in json.loads(line)]
        raise ConnectionError("Mooncake's client has ended")

    def way(what: str) -> Callable[[int], list[float]]:
        return partial(asked, what)

    return [
        Way("Mooncake TCP get", lambda _: None, elsewhere=way("get")),
        Way("Mooncake TCP put", lambda _: None, elsewhere=way("put")),
    ]
