"""GCache as an L2 adapter of LMCache, which loads it by name:

    {"type": "plugin", "module_path": "cygnet.integrations.lmcache", "class_name": "GCacheL2Adapter",
     "adapter_params": {"servers": "127.0.0.1:7400", "namespace": "lmcache", "timeout_s": 5.0}}

`servers` is what the engine's store takes behind `gcache://`. Objects are keyed by LMCache's model, rank, group, salt
and chunk hash. A lookup marks what it finds as used, which keeps it in the cache for a while; there is no lock beyond
that, and a load whose object has left meanwhile says so. GCache evicts by itself, so LMCache's own eviction has nothing
to do here; limits are those of the servers.
"""

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from cygnet.base.errors import ConfigError
from cygnet.gcache.record import full_key
from cygnet.gcache.runtime.connect import connect
from cygnet.gcache.runtime.polled import Polled
from cygnet.gcache.runtime.store import CHECK_TIMEOUT_S, parse_spec
from cygnet.kv.store import Outcome

THREADS = 8
MAX_CALLS = 4096
PARAMETERS = {"servers": "127.0.0.1", "namespace": "lmcache", "timeout_s": 5.0}


class GCacheL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Stores, looks up and loads by a GCache client. All servers must answer once, at the beginning."""

    def __init__(self, parameters: dict[str, Any], **_: object) -> None:
        super().__init__()
        unknown = sorted(parameters.keys() - PARAMETERS.keys())
        if unknown:
            raise ConfigError(f"the gcache adapter has no {unknown[0]!r}; it has {', '.join(PARAMETERS)}")
        settings = {**PARAMETERS, **parameters}
        self._namespace = str(settings["namespace"]).encode()
        self._timeout_s = float(settings["timeout_s"])
        self._client = connect(parse_spec(str(settings["servers"])))
        try:
            self._client.check(timeout_s=CHECK_TIMEOUT_S)
        except ConfigError:
            self._client.close()
            raise
        numbers = itertools.count(1).__next__
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="gcache-lmcache")
        self._stores: Polled[L2StoreResult] = Polled(self._threads, MAX_CALLS, numbers)
        self._lookups: Polled[Bitmap] = Polled(self._threads, MAX_CALLS, numbers)
        self._loads: Polled[Bitmap] = Polled(self._threads, MAX_CALLS, numbers)

    def get_store_event_fd(self) -> int:
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        return self._loads.fd

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        return self._stores.submit(partial(self._store, keys, objects), lambda: L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: object) -> int:
        return self._lookups.submit(partial(self._look_up, keys), lambda: Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing: a lookup takes no lock."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        return self._loads.submit(partial(self._load, keys, objects), lambda: Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        self._client.remove(self._full(keys), timeout_s=self._timeout_s)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for polled in (self._stores, self._lookups, self._loads):
            polled.close()
        self._client.close()

    def report_status(self) -> dict[str, Any]:
        servers = self._client.stats(timeout_s=self._timeout_s)
        return {"is_healthy": len(servers) == len(self._client.options.servers), "servers": servers}

    def _store(self, keys: list[ObjectKey], objects: list[Any]) -> L2StoreResult:
        deadline = time.monotonic() + self._timeout_s
        full = self._full(keys)
        views = [obj.byte_array for obj in objects]
        sizes = [memoryview(view).nbytes for view in views]
        there = self._client.batch_exists(full, sizes, touch=True, timeout_s=self._timeout_s)
        new = [place for place, found in enumerate(there) if not found]
        outcomes = self._client.batch_put(
            [full[place] for place in new],
            [views[place] for place in new],
            timeout_s=max(0.0, deadline - time.monotonic()),
        )
        stored = all(outcome is Outcome.OK for outcome in outcomes)
        return L2StoreResult(stored, sum(sizes[place] for place in new) if stored else 0)

    def _look_up(self, keys: list[ObjectKey]) -> Bitmap:
        return _bitmap(self._client.batch_exists(self._full(keys), touch=True, timeout_s=self._timeout_s))

    def _load(self, keys: list[ObjectKey], objects: list[Any]) -> Bitmap:
        views = [obj.byte_array for obj in objects]
        outcomes = self._client.batch_get_into(self._full(keys), views, timeout_s=self._timeout_s)
        return _bitmap([outcome is Outcome.OK for outcome in outcomes])

    def _full(self, keys: Sequence[ObjectKey]) -> list[bytes]:
        return [full_key(self._namespace, key_name(key)) for key in keys]


def key_name(key: ObjectKey) -> bytes:
    """What an object is called in its namespace. Neither model nor salt may have an @ in it, says LMCache."""
    words = f"{key.model_name}@{key.kv_rank:x}@{key.object_group_id:x}@{key.cache_salt}@"
    return words.encode() + key.chunk_hash


def _bitmap(found: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(found))
    for place, there in enumerate(found):
        if there:
            bitmap.set(place)
    return bitmap
