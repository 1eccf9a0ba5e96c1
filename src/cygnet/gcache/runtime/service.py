"""What all connections of a server share."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from cygnet.gcache.membership import View
from cygnet.gcache.runtime.cache import Cache
from cygnet.gcache.runtime.cluster import Cluster
from cygnet.gcache.runtime.greeting import ServerInfo
from cygnet.gcache.runtime.shared_index import SharedIndex
from cygnet.gcache.runtime.uploads import Uploads
from cygnet.gcache.runtime.watchdog import Watchdog

DEFAULT_BUDGET_S = 10.0
"""Of a request that does not say how much time it has."""


@dataclass(frozen=True)
class Service:
    """See above."""

    cache: Cache
    uploads: Uploads
    watchdog: Watchdog
    info: ServerInfo
    token: str
    """Empty: everyone may."""
    cluster: Cluster
    drain: Callable[[str, bool], View]
    """Have a server of the cluster drained, or kept. Raises `CygnetError`."""
    stats: Callable[[], dict[str, object]]
    index: SharedIndex | None = None
    core: ModuleType | None = None
    """Compiled loops, if they are to be used."""
