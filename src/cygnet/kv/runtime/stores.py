"""Opening a store tier by its spec."""

import cygnet.kv.runtime.disk_store  # noqa: F401  registers "disk"
from cygnet.kv.store import STORES, Store, split_spec


def open_store(spec: str) -> Store:
    """The store that `spec` names: `/data/kv:20GiB`, `disk:/data/kv`, or what else has registered itself.

    Raises `ConfigError` for an unknown kind and for a store that can't be opened.
    """
    name, rest = split_spec(spec)
    return STORES.get(name)(rest)
