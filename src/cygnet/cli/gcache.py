"""`cygnet gcache ...`: run a cache server, look at it, put something in and get it out, measure it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cygnet.cli.gcache_cluster import drain, joining, members
from cygnet.cli.gcache_top import Count, Interval

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

    from cygnet.gcache.runtime.client import GCacheClient
    from cygnet.gcache.runtime.server import ServerOptions

gcache_app = typer.Typer(
    help="Run and use a cache for KV blocks and files.", no_args_is_help=True, rich_markup_mode=None
)

TOKEN = "CYGNET_GCACHE_TOKEN"
DEFAULT_SERVERS = "127.0.0.1:7400"
CLI_TIMEOUT_S = 60.0


def _option(metavar: str, text: str) -> Any:
    """An option whose default, when it matters, stands in its text."""
    return typer.Option(metavar=metavar, help=text, show_default=False)


Servers = Annotated[str, _option("LIST", "[ID@]HOST[:PORT], several by commas, or etcd=HOST[:PORT] [127.0.0.1:7400]")]
Namespace = Annotated[str, _option("NAME", "namespace of the key [files]")]


@gcache_app.callback()
def gcache() -> None:
    """Run and use a cache for KV blocks and files.

    A server's token, if it has one, is taken from CYGNET_GCACHE_TOKEN.
    """


@gcache_app.command("serve")
def serve(
    host: Annotated[str, _option("HOST", "address to listen on [127.0.0.1]")] = "127.0.0.1",
    port: Annotated[int, _option("PORT", "port, 0 for any [7400]")] = 7400,
    resp_port: Annotated[int | None, _option("PORT", "serve Redis clients there, 0 for any")] = None,
    memory: Annotated[str, _option("SIZE", "shared memory to take at once [1GiB]")] = "1GiB",
    disk: Annotated[str, _option("PATH:SIZE", "folder for what is cold")] = "",
    arena: Annotated[Path | None, _option("PATH", "folder of the memory [one in /dev/shm]")] = None,
    object_size: Annotated[str, _option("SIZE", "mean size, which bounds their number [16KiB]")] = "16KiB",
    max_value: Annotated[str, _option("SIZE", "largest value taken [1GiB]")] = "1GiB",
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME:LIMITS",
            help="quota=SIZE,value=SIZE,ttl=S of NAME or NAME*",
            show_default=False,
        ),
    ] = None,
    max_connections: Annotated[int, _option("N", "connections at once [256]")] = 256,
    cpus: Annotated[str, _option("LIST", "run there: 0-3,8 or node:1 or nic:eth0 [anywhere]")] = "",
    metrics_port: Annotated[int | None, _option("PORT", "publish Prometheus metrics there")] = None,
    server_id: Annotated[str, _option("NAME", "name in placement [HOST:PORT]")] = "",
    etcd: Annotated[str, _option("LIST", "join a cluster: its etcd, HOST[:PORT],HOST[:PORT]")] = "",
    cluster: Annotated[str, _option("NAME", "name of the cluster [default]")] = "default",
    advertise: Annotated[str, _option("HOST[:PORT]", "where others reach it [--host:--port]")] = "",
    group: Annotated[str, _option("NAME", "what fails together, such as its rack [none]")] = "",
    weight: Annotated[int, _option("N", "its share of the keys [100]")] = 100,
    grace: Annotated[float, _option("S", "seconds gone before others get its keys [60]")] = 60.0,
    move_rate: Annotated[str, _option("SIZE", "bytes/s to move to others, 0 for any [256MiB]")] = "256MiB",
    fenced: Annotated[bool, typer.Option("--fenced", help="refuse when others may have given it up")] = False,
    write_down: Annotated[bool, typer.Option("--write-down", help="at the end, copy memory to disk")] = False,
    open_: Annotated[bool, typer.Option("--no-token", help="allow a public address without a token")] = False,
    json: Annotated[bool, typer.Option("--json", help="say that it serves as a line of JSON")] = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C. What is in memory is found again by the next start."""
    import signal

    ends = _hold_signals()  # first: libraries start threads when they are loaded
    if cpus:
        from cygnet.gcache.runtime.affinity import keep_to

        keep_to(cpus)
    from cygnet.gcache.runtime.exposition import Exposition
    from cygnet.gcache.runtime.server import Server

    options = _server_options(
        host,
        port,
        resp_port,
        memory,
        disk,
        arena,
        object_size,
        max_value,
        max_connections,
        server_id,
        limits or (),
        public=open_,
    )
    if etcd:
        options = joining(options, etcd, cluster, advertise, group, weight, grace, move_rate, fenced)
    server = Server(options)
    try:
        metrics = None if metrics_port is None else Exposition(server.stats, host, metrics_port)
    except BaseException:
        server.close()
        raise
    try:
        ports = {"port": server.port, "resp_port": server.resp_port, "metrics_port": metrics.port if metrics else None}
        _announce(server.stats(), host, ports, as_json=json)
        signal.sigwait(ends)
    finally:
        if metrics is not None:
            metrics.close()
        server.close(write_down=write_down)


@gcache_app.command("stat")
def stat(servers: Servers = DEFAULT_SERVERS) -> None:
    """Print what servers say of themselves, as JSON."""
    from cygnet.cli.console import print_json

    client = _client(servers)
    try:
        print_json(client.stats())
    finally:
        client.close()


@gcache_app.command("top")
def top(servers: Servers = DEFAULT_SERVERS, interval: Interval = 2.0, count: Count = 0) -> None:
    """Show what servers are doing, until Ctrl-C.

    Gets and puts per second, hits, what leaves, how full they are.
    """
    from cygnet.cli.gcache_top import top as show

    client = _client(servers)
    try:
        show(client, interval, count)
    except KeyboardInterrupt:
        pass
    finally:
        client.close()


@gcache_app.command("put")
def put(
    key: Annotated[str, typer.Argument(help="name of the object")],
    file: Annotated[Path, typer.Argument(help="file to put, - for standard input")],
    servers: Servers = DEFAULT_SERVERS,
    namespace: Namespace = "files",
    ttl: Annotated[float, _option("S", "seconds until it expires [never]")] = 0.0,
) -> None:
    """Put a file into the cache."""
    from cygnet.base.errors import ConfigError
    from cygnet.kv.store import Outcome

    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from None
    client = _client(servers)
    try:
        outcome = client.put(_key(namespace, key), data, ttl_ms=int(ttl * 1000))
    finally:
        client.close()
    if outcome is not Outcome.OK:
        raise ConfigError(f"{key!r} was not stored: {outcome.value}; `cygnet gcache stat` shows the server's sizes")


@gcache_app.command("get")
def get(
    key: Annotated[str, typer.Argument(help="name of the object")],
    file: Annotated[Path, typer.Argument(help="file to write, - for standard output")],
    servers: Servers = DEFAULT_SERVERS,
    namespace: Namespace = "files",
) -> None:
    """Write an object to a file. Exit code 1 when it is not there."""
    from cygnet.base.errors import ConfigError
    from cygnet.kv.store import Outcome

    client = _client(servers)
    try:
        value = client.get(_key(namespace, key))
    finally:
        client.close()
    if isinstance(value, Outcome):
        raise ConfigError(f"no {key!r} in namespace {namespace!r}: {value.value}")
    if str(file) == "-":
        sys.stdout.buffer.write(value)
    else:
        file.write_bytes(value)


@gcache_app.command("bench")
def bench(
    servers: Servers = DEFAULT_SERVERS,
    size: Annotated[str, _option("SIZE", "bytes per object [1MiB]")] = "1MiB",
    count: Annotated[int, _option("N", "objects [64]")] = 64,
    batch: Annotated[int, _option("N", "objects per call [1]")] = 1,
    same_host: Annotated[bool, typer.Option("--same-host/--network", help="read shared memory [yes]")] = True,
) -> None:
    """Put, get and check random bytes; print the speed as JSON."""
    from cygnet.base.errors import ConfigError
    from cygnet.base.units import parse_bytes
    from cygnet.cli.console import print_json
    from cygnet.gcache.runtime.measure import measure

    if count < 1 or batch < 1 or parse_bytes(size) < 1:
        raise ConfigError("a benchmark needs --count, --batch and --size of at least 1")
    client = _client(servers, same_host=same_host)
    try:
        print_json(measure(client, parse_bytes(size), count, batch))
    finally:
        client.close()


def _server_options(
    host: str,
    port: int,
    resp_port: int | None,
    memory: str,
    disk: str,
    arena: Path | None,
    object_size: str,
    max_value: str,
    max_connections: int,
    server_id: str,
    limits: "Sequence[str]",
    *,
    public: bool,
) -> "ServerOptions":
    import os

    from cygnet.base.errors import ConfigError
    from cygnet.base.units import parse_bytes
    from cygnet.gcache.limits import Limits
    from cygnet.gcache.namespaces import parse_limits
    from cygnet.gcache.runtime.server import ServerOptions

    token = os.environ.get(TOKEN, "")
    if host not in ("127.0.0.1", "::1", "localhost") and not token and not public:
        raise ConfigError(f"{host} can be reached from outside: set {TOKEN} to a secret, or give --no-token")
    path, _, size = disk.rpartition(":")
    if disk and not path:
        raise ConfigError(f"--disk {disk!r} names no size; write for example {disk}:200GiB")
    if max_connections < 1:
        raise ConfigError("--max-connections must be at least 1")
    return ServerOptions(
        host=host,
        port=port,
        resp_port=resp_port,
        memory_bytes=parse_bytes(memory),
        mean_object_bytes=parse_bytes(object_size),
        arena=arena,
        disk=Path(path).expanduser() if disk else None,
        disk_bytes=parse_bytes(size) if disk else 0,
        token=token,
        server_id=server_id,
        limits=Limits(
            max_value_bytes=parse_bytes(max_value),
            max_connections=max_connections,
            namespaces=dict(parse_limits(text) for text in limits),
        ),
    )


def _announce(stats: dict[str, object], host: str, ports: dict[str, int | None], *, as_json: bool) -> None:
    import json

    from cygnet.base.units import format_bytes

    if as_json:
        print(json.dumps({"host": host, **ports, **stats}), flush=True)
        return
    memory, disk = stats["memory_capacity_bytes"], stats["disk_capacity_bytes"]
    assert isinstance(memory, int)
    assert isinstance(disk, int)
    tiers = f"{format_bytes(memory)} of memory" + (f", {format_bytes(disk)} of disk" if disk else "")
    doors = f"gcache://{host}:{ports['port']}"
    if ports["resp_port"] is not None:
        doors += f" and redis://{host}:{ports['resp_port']}"
    print(f"gcache serves {doors}: {tiers}, {stats['objects']} objects found", flush=True)


def _hold_signals() -> "set[signal.Signals]":
    """Keep the signals that end the server for `sigwait`. Threads started afterwards don't get them either."""
    import signal

    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    return ends


def _client(servers: str, *, same_host: bool = True) -> "GCacheClient":
    from cygnet.gcache.runtime.connect import connect
    from cygnet.gcache.runtime.store import options_of

    client = connect(options_of(servers.removeprefix("gcache://"), timeout_s=CLI_TIMEOUT_S, same_host=same_host))
    try:
        client.check(timeout_s=5.0)
    except BaseException:
        client.close()
        raise
    return client


def _key(namespace: str, name: str) -> bytes:
    from cygnet.base.errors import ConfigError
    from cygnet.gcache.record import full_key

    try:
        return full_key(namespace.encode(), name.encode())
    except ValueError as error:
        raise ConfigError(f"key {name[:40]!r}: {error}") from None


gcache_app.command("members")(members)
gcache_app.command("drain")(drain)
