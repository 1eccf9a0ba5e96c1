"""The engine's store tier on GCache servers: `gcache://HOST:PORT,HOST:PORT`."""

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from cygnet.base.errors import ConfigError
from cygnet.gcache.record import full_key
from cygnet.gcache.runtime.channel import Address
from cygnet.gcache.runtime.client import ClientOptions, GCacheClient
from cygnet.gcache.runtime.connect import connect
from cygnet.gcache.runtime.server import DEFAULT_PORT
from cygnet.kv.store import (
    DEFAULT_TIMEOUT_S,
    NAMESPACE_BYTES,
    STORES,
    Namespace,
    ObjectKey,
    Outcome,
    StoreStats,
    check_batch,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

TOKEN_VARIABLE = "CYGNET_GCACHE_TOKEN"
ETCD = "etcd="
"""What a list of servers begins with that is one of etcd endpoints."""
CHECK_TIMEOUT_S = 5.0
SERVER = re.compile(r"(?:(?P<id>[^@,\[\]]+)@)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:,\[\]]+))(?::(?P<port>\d{1,5}))?")


def parse_servers(text: str) -> tuple[Address, ...]:
    """Servers of `[ID@]HOST[:PORT],...`; an IPv6 address is written in brackets. Raises `ConfigError`."""
    servers = []
    for part in text.split(","):
        match = SERVER.fullmatch(part.strip())
        port = int(match["port"] or DEFAULT_PORT) if match else 0
        if match is None or not 0 < port < 1 << 16:
            raise ConfigError(f"gcache server {part!r} is not [ID@]HOST[:PORT]; write for example 127.0.0.1:7400")
        servers.append(Address(match["v6"] or match["host"], port, match["id"] or ""))
    return tuple(servers)


def options_of(servers: str, **more: object) -> ClientOptions:
    """Options for `[ID@]HOST[:PORT],...` or `etcd=ENDPOINT,...`; the token comes from the environment."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if servers.startswith(ETCD):
        return ClientOptions(etcd=servers.removeprefix(ETCD), token=token, **more)  # type: ignore[arg-type]
    return ClientOptions(servers=parse_servers(servers), token=token, **more)  # type: ignore[arg-type]


def parse_spec(text: str) -> ClientOptions:
    """What `//SERVERS[?OPTION=VALUE&...]` means, SERVERS as in `options_of`. Raises `ConfigError`."""
    servers, _, query = text.removeprefix("//").partition("?")
    types = {f.name: f.type for f in fields(ClientOptions) if f.name not in ("servers", "etcd", "token")}
    options: dict[str, object] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in types:
            raise ConfigError(f"gcache has no option {name!r}; there are {', '.join(sorted(types))}")
        try:
            if types[name] is bool:
                options[name] = {"true": True, "1": True, "false": False, "0": False}[value.lower()]
            else:
                options[name] = types[name](value)  # type: ignore[operator]
        except (KeyError, ValueError):
            raise ConfigError(f"gcache option {name}={value!r} can't be read") from None
    return options_of(servers, **options)


@STORES.register("gcache")
def open_gcache_store(text: str) -> "GCacheStore":
    """Open `//HOST:PORT,...[?timeout_s=0.5]` or `//etcd=HOST:PORT,...`. All servers must answer at the beginning."""
    client = connect(parse_spec(text))
    try:
        client.check(timeout_s=CHECK_TIMEOUT_S)
    except ConfigError:
        client.close()
        raise
    return GCacheStore(client)


def store_key(key: ObjectKey) -> bytes:
    """The full key of an object of the store tier: its namespace is the cache's."""
    return full_key(key[:NAMESPACE_BYTES], key[NAMESPACE_BYTES:])


class GCacheStore:
    """A `Store` over a client, which it closes. Objects are placed by their keys alone: there is no session to know.

    A call's time is bounded also by the client's own timeout, unless that is 0. Statistics of gets and puts are this
    client's; sizes are the servers'.
    """

    def __init__(self, client: GCacheClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._closed = False
        self._gets: Counter[Outcome] = Counter()
        self._puts: Counter[Outcome] = Counter()
        self._present = self._bytes_read = self._bytes_written = 0

    @property
    def buffer_alignment(self) -> int:
        return 1

    def batch_exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        check_batch(keys)
        return [False] * len(keys) if self._closed else self._client.batch_exists([store_key(key) for key in keys])

    def batch_get_into(
        self, keys: Sequence[ObjectKey], buffers: "Sequence[Buffer]", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Outcome]:
        views = check_batch(keys, buffers, writable=True)
        if self._closed:
            return [Outcome.FAILED] * len(keys)
        full = [store_key(key) for key in keys]
        outcomes = self._client.batch_get_into(full, views, timeout_s=self._time(timeout_s))
        with self._lock:
            self._gets.update(outcomes)
            self._bytes_read += sum(
                len(view) for view, outcome in zip(views, outcomes, strict=True) if outcome is Outcome.OK
            )
        return outcomes

    def batch_put(
        self, keys: Sequence[ObjectKey], buffers: "Sequence[Buffer]", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Outcome]:
        items = dict(zip(keys, check_batch(keys, buffers), strict=True))
        if self._closed:
            return [Outcome.FAILED] * len(keys)
        deadline = time.monotonic() + self._time(timeout_s)
        full = {key: store_key(key) for key in items}
        sizes = [len(view) for view in items.values()]
        there = self._client.batch_exists(list(full.values()), sizes, touch=True, timeout_s=deadline - time.monotonic())
        present = {key for key, found in zip(items, there, strict=True) if found}
        fresh = [key for key in items if key not in present]
        stored = self._client.batch_put(
            [full[key] for key in fresh], [items[key] for key in fresh], timeout_s=deadline - time.monotonic()
        )
        outcome_of = dict.fromkeys(present, Outcome.OK) | dict(zip(fresh, stored, strict=True))
        outcomes = [outcome_of[key] for key in keys]
        with self._lock:
            self._puts.update(outcomes)
            self._present += len(present) + len(keys) - len(items)
            self._bytes_written += sum(len(items[key]) for key in fresh if outcome_of[key] is Outcome.OK)
        return outcomes

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        check_batch(keys)
        if not self._closed:
            self._client.batch_exists([store_key(key) for key in keys], touch=True)

    def remove(self, keys: Sequence[ObjectKey]) -> int:
        check_batch(keys)
        return 0 if self._closed else sum(self._client.remove([store_key(key) for key in dict.fromkeys(keys)]))

    def clear(self, namespace: Namespace | None = None) -> int:
        return 0 if self._closed else self._client.clear(namespace, timeout_s=DEFAULT_TIMEOUT_S)

    def stats(self) -> StoreStats:
        servers = [] if self._closed else list(self._client.stats().values())

        def total(*names: str) -> int:
            return sum(value for server in servers for name in names if isinstance(value := server.get(name), int))

        with self._lock:
            return StoreStats(
                num_objects=total("objects"),
                bytes_used=total("memory_bytes", "disk_bytes"),
                capacity_bytes=total("memory_capacity_bytes", "disk_capacity_bytes"),
                gets=dict(self._gets),
                puts=dict(self._puts),
                puts_present=self._present,
                bytes_read=self._bytes_read,
                bytes_written=self._bytes_written,
                evicted_objects=total("evicted_objects"),
                moved_objects=0,
            )

    def audit(self) -> list[str]:
        return [] if self._closed else self._client.audit(timeout_s=DEFAULT_TIMEOUT_S)

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._client.close()

    def _time(self, timeout_s: float) -> float:
        return min(timeout_s, self._client.options.timeout_s)
