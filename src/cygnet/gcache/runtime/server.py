"""`cygnet gcache serve`: sockets, a thread per connection, and an end that loses nothing."""

import itertools
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from cygnet.base.errors import ConfigError
from cygnet.gcache import resp
from cygnet.gcache.limits import Limits
from cygnet.gcache.membership import Server as ClusterServer
from cygnet.gcache.protocol import PROTOCOL_VERSION, Op, Status, pack_answer
from cygnet.gcache.runtime.cache import Cache
from cygnet.gcache.runtime.cluster import FOR_EVER, Cluster
from cygnet.gcache.runtime.compiled import compiled_core
from cygnet.gcache.runtime.connection import Connection
from cygnet.gcache.runtime.disk_tier import DiskTier
from cygnet.gcache.runtime.greeting import ServerInfo
from cygnet.gcache.runtime.node import ALONE, ClusterOptions, Node, no_cluster
from cygnet.gcache.runtime.resp_connection import RespConnection
from cygnet.gcache.runtime.service import Service
from cygnet.gcache.runtime.shared_index import open_index
from cygnet.gcache.runtime.shared_memory import ARENA, SOCKET, SharedMemory, open_shared_memory
from cygnet.gcache.runtime.uploads import Uploads
from cygnet.gcache.runtime.watchdog import Watchdog
from cygnet.version import __version__

DEFAULT_PORT = 7400
BACKLOG = 128


@dataclass(frozen=True)
class ServerOptions:
    """How a server is run."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: any that is free."""
    resp_port: int | None = None
    """Where Redis clients are served; 0: any that is free, `None`: nowhere."""
    memory_bytes: int = 1 << 30
    """Of the arena, with its index."""
    mean_object_bytes: int = 16 << 10
    """The arena has a slot for each so many bytes: no more objects are held, however small."""
    arena: Path | None = None
    """Folder of the arena; default: `/dev/shm/cygnet-gcache-UID-PORT`."""
    disk: Path | None = None
    """Folder of the disk tier; none without."""
    disk_bytes: int = 0
    token: str = ""
    """What clients must know; empty: nothing."""
    server_id: str = ""
    """Name in placement; default: HOST:PORT."""
    cluster: ClusterOptions | None = None
    """None: it is alone."""
    limits: Limits = field(default_factory=Limits)
    compiled: bool = True
    """Use the compiled core, where there is one (`compiled`)."""


class Server:
    """Listens once it is made; serves until `close`. Raises `ConfigError` for what can't be opened.

    Every connection has a thread of its own, which ends before `close` does.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        if options.token and not options.token.isascii():
            raise ConfigError("the gcache token must be ASCII")
        if options.cluster is not None:
            _check_cluster(options.cluster, options)
        self._tcp = _listen(options.host, options.port)
        self.port: int = self._tcp.getsockname()[1]
        try:
            self._resp = None if options.resp_port is None else _listen(options.host, options.resp_port)
        except ConfigError:
            self._tcp.close()
            raise
        self.resp_port: int | None = None if self._resp is None else self._resp.getsockname()[1]
        folder = options.arena or Path(f"/dev/shm/cygnet-gcache-{os.getuid()}-{self.port}")
        self._disk: DiskTier | None = None
        try:
            shared = open_shared_memory(folder, options.memory_bytes, options.mean_object_bytes)
            try:
                if options.disk is not None:
                    self._disk = DiskTier(options.disk, options.disk_bytes)
            except ConfigError:
                shared.close()
                raise
        except ConfigError:
            self._tcp.close()
            if self._resp is not None:
                self._resp.close()
            raise
        core = compiled_core(options.compiled)
        # Who reads the index asks nobody whether this server may still answer.
        fenced = options.cluster is not None and options.cluster.fenced
        self._index = open_index(None if fenced else core, shared, options.limits)
        self.cache = Cache(shared, self._disk, options.limits)
        self._unix = _listen_unix(folder / SOCKET)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._connections: dict[int, tuple[socket.socket, threading.Thread]] = {}
        self._closing = False
        self._started = time.monotonic()
        self.refused = 0
        name = options.server_id or f"{options.host}:{self.port}"
        cluster = Cluster() if options.cluster is None else _cluster(options.cluster, name, folder)
        uploads = Uploads(self.cache)
        self._share_index(cluster)
        self._node = None if options.cluster is None else self._join(options.cluster, cluster, uploads, shared)
        self.service = Service(
            cache=self.cache,
            uploads=uploads,
            watchdog=Watchdog("gcache-watchdog"),
            info=ServerInfo(
                version=PROTOCOL_VERSION,
                server_id=name,
                incarnation=shared.incarnation.hex(),
                arena=str(folder / ARENA),
                socket=str(folder / SOCKET),
                release=__version__,
                index="" if self._index is None else str(self._index.path),
            ),
            index=self._index,
            core=core,
            token=options.token,
            cluster=cluster,
            drain=no_cluster if self._node is None else self._node.drain,
            stats=self.stats,
        )
        self._listeners = [
            threading.Thread(target=self._accept, args=(sock,), name=f"gcache-accept-{name}", daemon=True)
            for name, sock in (("tcp", self._tcp), ("unix", self._unix), ("resp", self._resp))
            if sock is not None
        ]
        for listener in self._listeners:
            listener.start()
        if self._node is not None:
            try:
                self._node.start()
            except BaseException:
                self.close()
                raise

    def _share_index(self, cluster: Cluster) -> None:
        if self._index is not None:
            self.cache.memory.got_elsewhere = self._index.totals
            cluster.answers_now = self._index.answer_epoch
            if self.options.cluster is None:
                self._index.answer_all()

    def _join(self, options: ClusterOptions, cluster: Cluster, uploads: Uploads, shared: SharedMemory) -> Node:
        me = ClusterServer(
            id=cluster.server_id,
            host=options.host or self.options.host,
            port=options.port or self.port,
            incarnation=shared.incarnation.hex(),
            group=options.group,
            weight=options.weight,
        )
        return Node(options, cluster, self.cache, self._disk, uploads, server=me, token=self.options.token)

    def stats(self) -> dict[str, object]:
        """The cache's, and the server's own."""
        return {
            "server_id": self.service.info.server_id,
            "release": __version__,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "connections": len(self._connections),
            "refused_connections": self.refused,
            "uploads": len(self.service.uploads),
            "arena_reused": self.cache.shared.reused,
            **(ALONE if self._node is None else self._node.stats()),
            **self.cache.stats(),
        }

    def close(self, *, write_down: bool = False, timeout_s: float = 10.0) -> None:
        """Take no more connections, end those there are, close both tiers. What is in the arena stays there."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if self._closing:
                return
            self._closing = True
            open_ = list(self._connections.values())
        if self._node is not None:
            self._node.close()
        for listener in filter(None, (self._tcp, self._unix, self._resp)):
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for sock, _ in open_:
            # A frame that has arrived is still answered; one that has not is the client's loss.
            _shut(sock, socket.SHUT_RD)
        for _, thread in open_:
            thread.join(max(0.0, deadline - time.monotonic()) / 2)
        for sock, thread in open_:
            _shut(sock, socket.SHUT_RDWR)
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._index is not None:
            self._index.close()
        self.service.watchdog.close()
        self.service.uploads.expire(everything=True)
        self.cache.close(write_down=write_down, timeout_s=max(0.0, deadline - time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.05)  # out of file descriptors: others end meanwhile
                continue
            self._take(sock, is_resp=listener is self._resp)

    def _take(self, sock: socket.socket, *, is_resp: bool) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with self._lock:
            if self._closing:
                sock.close()
                return
            if len(self._connections) < self.options.limits.max_connections:
                owner = next(self._ids)
                connection = RespConnection(sock, self.service) if is_resp else Connection(sock, owner, self.service)
                thread = threading.Thread(
                    target=self._run, args=(owner, connection), name=f"gcache-{owner}", daemon=True
                )
                self._connections[owner] = sock, thread
                thread.start()
                return
            self.refused += 1
        sock.settimeout(0.1)
        try:
            why = f"{self.options.limits.max_connections} connections are open; raise --max-connections"
            busy = pack_answer(Op.HELLO, 0, why.encode(), status=Status.BUSY)
            sock.sendall(resp.error(f"ERR {why}") if is_resp else busy)
        except OSError:
            pass
        finally:
            sock.close()

    def _run(self, owner: int, connection: Connection | RespConnection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                del self._connections[owner]


def _check_cluster(cluster: ClusterOptions, options: ServerOptions) -> None:
    """Raises `ConfigError` for what can't work in a cluster."""
    if options.resp_port is not None:
        raise ConfigError("a gcache server in a cluster serves no Redis clients: they know no owners of keys")
    if cluster.fenced and cluster.grace_s <= cluster.ttl_s:
        raise ConfigError(
            f"a fenced gcache server needs a grace of more than {cluster.ttl_s} s, not {cluster.grace_s:g} s: it would "
            "refuse between two signs of life; raise --grace"
        )


def _cluster(options: ClusterOptions, name: str, folder: Path) -> Cluster:
    return Cluster(options.name, name, folder, term_s=options.grace_s if options.fenced else FOR_EVER)


def _listen(host: str, port: int) -> socket.socket:
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(info[0], socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(info[4])
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return sock


def _listen_unix(path: Path) -> socket.socket:
    """Called with the arena's lock: a socket that is there is a dead server's."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"can't listen on {path}: {error}; choose a shorter --arena") from None
    return sock


def _shut(sock: socket.socket, how: int) -> None:
    try:
        sock.shutdown(how)
    except OSError:
        return  # it has ended meanwhile
