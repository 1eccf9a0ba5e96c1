"""`cygnet gcache members` and `drain`: clusters of cache servers; and how `serve` joins one."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cygnet.gcache.membership import View
    from cygnet.gcache.runtime.cluster_client import ClusterClient
    from cygnet.gcache.runtime.server import ServerOptions

TIMEOUT_S = 10.0
POLL_S = 0.5
Servers = Annotated[
    str,
    typer.Option(metavar="LIST", help="any of its servers, or etcd=HOST[:PORT] [127.0.0.1:7400]", show_default=False),
]
Cluster = Annotated[str, typer.Option(metavar="NAME", help="with etcd=: the cluster [default]", show_default=False)]


def members(servers: Servers = "127.0.0.1:7400", cluster: Cluster = "default") -> None:
    """Print a cluster's servers and what becomes of them, as JSON."""
    from cygnet.cli.console import print_json

    client = _client(servers, cluster)
    try:
        client.refresh()
        print_json(_described(client.cluster_view))
    finally:
        client.close()


def drain(
    server: Annotated[str, typer.Argument(help="the server's id, or its host")],
    servers: Servers = "127.0.0.1:7400",
    cluster: Cluster = "default",
    undo: Annotated[bool, typer.Option("--undo", help="let it stay after all")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="return when it may be stopped [yes]")] = True,
) -> None:
    """Move all that a server holds to the others. When this returns, the server may be stopped: nothing is lost."""
    from cygnet.base.errors import ConfigError

    client = _client(servers, cluster)
    try:
        client.refresh()
        listed = client.cluster_view.servers
        chosen = [one.id for one in listed if one.id == server] or [one.id for one in listed if one.host == server]
        if not chosen:
            raise ConfigError(f"the cluster has no server {server!r}; it has {', '.join(one.id for one in listed)}")
        for id_ in chosen:
            client.drain(id_, undo=undo, timeout_s=TIMEOUT_S)
        if undo or not wait:
            return
        _wait(client, chosen)
    finally:
        client.close()


def joining(
    options: "ServerOptions",
    etcd: str,
    cluster: str,
    advertise: str,
    group: str,
    weight: int,
    grace: float,
    move_rate: str,
    fenced: bool,
) -> "ServerOptions":
    """Options for a server that joins a cluster. Raises `ConfigError`."""
    from dataclasses import replace

    from cygnet.base.errors import ConfigError
    from cygnet.base.units import parse_bytes
    from cygnet.gcache.runtime.connect import etcd_registry
    from cygnet.gcache.runtime.node import ClusterOptions
    from cygnet.gcache.runtime.store import parse_servers

    # A port that is not given is the one that it listens on.
    where = parse_servers(advertise)[0] if advertise else None
    says_port = where is not None and not advertise.endswith(("]", where.host))
    if where is None and options.host in ("0.0.0.0", "::", ""):
        raise ConfigError(f"others can't reach a gcache server at {options.host}; give --advertise HOST")
    if grace < 0:
        raise ConfigError("--grace must be at least 0")
    own = ClusterOptions(
        registry=etcd_registry(etcd, cluster),
        name=cluster,
        host=where.host if where else "",
        port=where.port if where and says_port else 0,
        group=group,
        weight=weight,
        grace_s=grace,
        move_bytes_per_s=parse_bytes(move_rate),
        fenced=fenced,
    )
    return replace(options, cluster=own)


def _client(servers: str, cluster: str) -> "ClusterClient":
    from cygnet.base.errors import ConfigError
    from cygnet.gcache.runtime.cluster_client import ClusterClient
    from cygnet.gcache.runtime.connect import connect
    from cygnet.gcache.runtime.store import options_of

    client = connect(options_of(servers.removeprefix("gcache://"), timeout_s=TIMEOUT_S, cluster=cluster))
    if isinstance(client, ClusterClient):
        return client
    client.close()
    raise ConfigError(f"none of {servers} answers and is in a cluster; `cygnet gcache serve --etcd` starts one that is")


def _described(view: "View") -> dict[str, object]:
    return {
        "cluster": view.cluster,
        "epoch": view.epoch,
        "moving": not view.is_settled,
        "servers": {
            one.id: {
                "address": f"{one.host}:{one.port}",
                "state": one.state.value,
                "group": one.group,
                "weight": one.weight,
                "percent": one.percent if one.state == "joining" else 100 if one.state == "active" else 0,
                "moved_all": one.id in view.done or view.is_settled,
                "may_be_stopped": view.has_left(one.id),
            }
            for one in view.servers
        },
    }


def _wait(client: "ClusterClient", chosen: list[str]) -> None:
    """Say how far it is, until they may be stopped."""
    from cygnet.base.errors import ConfigError
    from cygnet.base.units import format_bytes
    from cygnet.gcache.membership import State

    said = ""
    while True:
        view = client.cluster_view
        if all(view.has_left(id_) for id_ in chosen):
            print(f"{', '.join(chosen)} may be stopped", flush=True)
            return
        for id_ in chosen:
            server = view.server(id_)
            if server is not None and server.state not in (State.DRAINING,):
                raise ConfigError(f"{id_} is {server.state.value} now: what it had not moved yet is not moved any more")
        stats = client.stats(timeout_s=TIMEOUT_S)
        now = ", ".join(f"{id_} has moved {format_bytes(_number(stats, id_, 'moved_bytes'))}" for id_ in chosen)
        if now != said:
            print(now, file=sys.stderr, flush=True)
            said = now
        time.sleep(POLL_S)
        client.refresh()


def _number(stats: dict[str, dict[str, object]], id_: str, name: str) -> int:
    value = stats.get(id_, {}).get(name, 0)
    return value if isinstance(value, int) else 0
