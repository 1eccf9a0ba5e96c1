"""One server's part in its cluster: the view it goes by, its sign of life, and the moves it makes."""

import time
from dataclasses import dataclass
from functools import partial

from cygnet.base.errors import ConfigError
from cygnet.gcache.membership import Server, View, draining, finished, kept
from cygnet.gcache.placement import DEFAULT_WEIGHT
from cygnet.gcache.runtime.agent import Agent
from cygnet.gcache.runtime.cache import Cache
from cygnet.gcache.runtime.cluster import Cluster
from cygnet.gcache.runtime.disk_tier import DiskTier
from cygnet.gcache.runtime.inquiry import Inquiry
from cygnet.gcache.runtime.mover import Mover
from cygnet.gcache.runtime.registry import Registry, RegistryError
from cygnet.gcache.runtime.uploads import Uploads

DEFAULT_CLUSTER = "default"
DEFAULT_GRACE_S = 60.0
DEFAULT_MOVE_BYTES_PER_S = 256 << 20
EMPTY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ClusterOptions:
    """How a server takes part in a cluster."""

    registry: Registry
    name: str = DEFAULT_CLUSTER
    host: str = ""
    """Where others reach it; default: where it listens."""
    port: int = 0
    """0: the one it listens on."""
    group: str = ""
    """Fault group: what fails together, such as a rack."""
    weight: int = DEFAULT_WEIGHT
    grace_s: float = DEFAULT_GRACE_S
    """How long a server may be gone before others get its keys."""
    ttl_s: int = 5
    """How long after its last sign of life a server counts as gone."""
    move_bytes_per_s: int = DEFAULT_MOVE_BYTES_PER_S
    """0: as fast as it goes."""
    fenced: bool = False
    """Answer nothing while others may have given this server up: for keys whose values change."""


ALONE: dict[str, object] = {
    "cluster": "",
    "epoch": 0,
    "state": "alone",
    "may_be_stopped": False,
    "cluster_servers": {},
    "registry_failures": 0,
    "registry_problem": "",
    "registry_looked_s": 0.0,
    "fenced": False,
    "moving": False,
    "moved_objects": 0,
    "moved_bytes": 0,
    "move_failures": 0,
    "move_given_up_objects": 0,
    "move_left_objects": 0,
    "move_disk_records": 0,
    "move_disk_records_seen": 0,
}
"""What `Node.stats` would be for a server in no cluster."""


class Node:
    """Call `start` once requests can be answered, and `close` before that ends."""

    def __init__(
        self,
        options: ClusterOptions,
        cluster: Cluster,
        cache: Cache,
        disk: DiskTier | None,
        uploads: Uploads,
        *,
        server: Server,
        token: str,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._uploads = uploads
        self._agent = Agent(
            options.registry, cluster, server, empty=self._empty, grace_s=options.grace_s, ttl_s=options.ttl_s
        )
        self._inquiry = Inquiry(cluster, self._agent, token=token, fenced=options.fenced)
        self._mover = Mover(cluster, cache, disk, self._report, token=token, bytes_per_s=options.move_bytes_per_s)

    def start(self) -> None:
        """Join the cluster. Raises `ConfigError`."""
        self._inquiry.start()
        self._agent.start()
        self._mover.start()

    def drain(self, id_: str, undo: bool) -> View:
        """Have a server drained, or kept after all. Raises `CygnetError`."""
        return self._agent.change(partial(kept if undo else draining, id_=id_))

    def stats(self) -> dict[str, object]:
        """What it knows, and how far its moves are."""
        view = self._cluster.view
        me = view.server(self._cluster.server_id)
        states: dict[str, int] = {}
        for server in view.servers:
            states[server.state.value] = states.get(server.state.value, 0) + 1
        return {
            "cluster": self._cluster.name,
            "epoch": view.epoch,
            "state": me.state.value if me is not None else "unknown",
            "may_be_stopped": view.has_left(self._cluster.server_id),
            "cluster_servers": states,
            "registry_failures": self._agent.failures,
            "registry_problem": self._agent.problem,
            "registry_looked_s": round((time.monotonic_ns() - self._agent.looked_ns) / 1e9, 3),
            "fenced": not self._cluster.is_confirmed,
            **self._mover.stats(),
        }

    def close(self) -> None:
        """Move nothing more, and take the sign of life back."""
        self._cluster.close()
        self._inquiry.close()
        self._mover.close()
        self._agent.close()

    def _report(self, epoch: int) -> None:
        self._agent.change(partial(finished, id_=self._cluster.server_id, epoch=epoch))

    def _empty(self) -> None:
        self._uploads.expire(everything=True)
        self._cache.clear(None, time.monotonic() + EMPTY_TIMEOUT_S)
        stats = self._cache.stats()
        if stats["objects"] or stats["disk_objects"]:
            raise RegistryError("what this server holds is still being used; it can't be emptied yet")


def no_cluster(id_: str, undo: bool) -> View:
    """What a server alone says to an order to drain."""
    raise ConfigError("this gcache server is in no cluster; start it with --etcd")
