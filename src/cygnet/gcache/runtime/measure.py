"""A quick measurement of running servers, for `cygnet gcache bench`."""

import os
import time
from collections.abc import Callable, Sequence

from cygnet.base.errors import CygnetError
from cygnet.gcache.record import full_key
from cygnet.gcache.runtime.client import GCacheClient
from cygnet.kv.store import Outcome


def measure(client: GCacheClient, object_bytes: int, count: int, batch: int) -> dict[str, object]:
    """Put `count` objects, then get them, `batch` at a time; all bytes are checked. They are removed at the end.

    Raises `CygnetError` when an object is refused, missing or wrong.
    """
    source = memoryview(os.urandom(object_bytes + count))
    namespace = b"bench-" + os.urandom(4).hex().encode()
    keys = [full_key(namespace, b"%d" % number) for number in range(count)]
    values = [source[number : number + object_bytes] for number in range(count)]
    into = [bytearray(object_bytes) for _ in range(min(batch, count))]
    try:
        puts = _time(keys, batch, lambda first, some: client.batch_put(some, values[first : first + len(some)]))
        gets = _time(keys, batch, lambda first, some: client.batch_get_into(some, into[: len(some)]))
        for first in range(0, count, batch):
            some = keys[first : first + batch]
            client.batch_get_into(some, into[: len(some)])
            for value, got in zip(values[first : first + batch], into, strict=False):
                if value != got:
                    raise CygnetError("an object came back with other bytes than were put")
    finally:
        client.clear(namespace)
    return {
        "object_bytes": object_bytes,
        "objects": count,
        "batch": batch,
        "put": _summary(puts, object_bytes * count),
        "get": _summary(gets, object_bytes * count),
    }


def _time(keys: Sequence[bytes], batch: int, call: Callable[[int, Sequence[bytes]], list[Outcome]]) -> list[float]:
    times = []
    for first in range(0, len(keys), batch):
        began = time.perf_counter()
        outcomes = call(first, keys[first : first + batch])
        times.append(time.perf_counter() - began)
        wrong = next((outcome for outcome in outcomes if outcome is not Outcome.OK), None)
        if wrong is not None:
            raise CygnetError(f"an object's outcome is {wrong.value}; do {len(keys)} objects fit the servers?")
    return times


def _summary(times: list[float], num_bytes: int) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "gb_per_s": num_bytes / sum(times) / 1e9,
        "p50_us": ordered[len(ordered) // 2] * 1e6,
        "p99_us": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e6,
    }
