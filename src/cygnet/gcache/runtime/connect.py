"""From what a user writes to a client: of a fixed list of servers, or of a cluster, found through them or etcd."""

from dataclasses import replace

from cygnet.base.errors import ConfigError
from cygnet.gcache.membership import View
from cygnet.gcache.runtime.agent import VIEW
from cygnet.gcache.runtime.client import ClientOptions, GCacheClient, Means
from cygnet.gcache.runtime.cluster import decode_view
from cygnet.gcache.runtime.cluster_client import ClusterClient, Source
from cygnet.gcache.runtime.etcd import Etcd, parse_endpoints
from cygnet.gcache.runtime.lanes import FAILURES
from cygnet.gcache.runtime.peer_in_epoch import newer_view
from cygnet.gcache.runtime.registry import Registry, RegistryError


def etcd_registry(endpoints: str, cluster: str) -> Etcd:
    """The registry of a cluster in etcd. Raises `ConfigError`."""
    if not cluster or "/" in cluster:
        raise ConfigError(f"gcache cluster {cluster!r}: a name has at least one character, and no slash")
    return Etcd(parse_endpoints(endpoints), f"/cygnet/gcache/{cluster}/")


def connect(options: ClientOptions) -> GCacheClient:
    """A client of the cluster in `options.etcd`, or of `options.servers`: of their cluster, if they are in one.

    Raises `ConfigError` when the cluster has no server, or can't be found. Servers of a fixed list need not answer.
    """
    if options.etcd:
        return ClusterClient(options, from_registry(etcd_registry(options.etcd, options.cluster)))
    if not options.servers:
        return GCacheClient(options)  # which says so
    source = from_servers(options)
    found = source(options.timeout_s)
    return GCacheClient(options) if found is None else ClusterClient(options, source)


def from_registry(registry: Registry) -> Source:
    """Reads the view from a registry."""

    def read(timeout_s: float) -> View | None:
        try:
            document = registry.read().documents.get(VIEW)
            return None if document is None else decode_view(document.value)
        except (RegistryError, ConfigError):
            return None

    return read


def from_servers(options: ClientOptions) -> Source:
    """Asks these servers, one after another; the first that is in a cluster says."""

    def ask(timeout_s: float) -> View | None:
        means = Means.of(replace(options, io_threads=0))
        peers = [means.peer(server, options) for server in options.servers]
        try:
            for peer in peers:
                try:
                    view = newer_view(peer, 0, timeout_s / len(peers))
                except (*FAILURES, ConfigError):
                    continue
                if view is not None:
                    return view
            return None
        finally:
            for peer in peers:
                peer.close()
            means.close(timeout_s)

    return ask
