"""Servers and clients that come and go leave nothing behind: file descriptors, threads, memory."""

import gc
import os
import socket
import threading
from contextlib import ExitStack

from cygnet.gcache.membership import State
from cygnet.gcache.runtime.client import ClientOptions
from cygnet.gcache.runtime.cluster_client import ClusterClient
from cygnet.gcache.runtime.connect import from_registry
from cygnet.gcache.runtime.node import ClusterOptions
from cygnet.gcache.runtime.registry import LocalRegistry
from cygnet.gcache.runtime.server import Server
from cygnet.kv.store import Outcome
from support.gcache import MIB, key, server, wait_until

ROUNDS = 3


def held() -> tuple[int, int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(gc.get_objects())


def come_and_go(registry: LocalRegistry, first: Server) -> None:
    """A server joins and is drained, under a client that reads, and one that is cut off in mid-frame."""
    source = from_registry(registry)
    with ExitStack() as stack:
        sdk = ClusterClient(ClientOptions(timeout_s=20.0), source)
        stack.callback(sdk.close)
        assert set(sdk.batch_put([key(n) for n in range(40)], [b"v" * 5000] * 40)) == {Outcome.OK}
        own = ClusterOptions(registry, "flat", ttl_s=2, grace_s=1000.0, move_bytes_per_s=0)
        second = stack.enter_context(server(8 * MIB, server_id="b", cluster=own))

        def joined() -> bool:
            view = source(1.0)
            mine = view.server("b") if view is not None else None
            return view is not None and view.is_settled and mine is not None and mine.state is State.ACTIVE

        wait_until(joined, "it does not join")
        for port in (first.port, second.port):
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(b"GCQ1 and no more")
        assert all(sdk.get(key(n)) == b"v" * 5000 for n in range(40))
        view = sdk.view(key(1))
        if not isinstance(view, Outcome):
            view.release()
        sdk.drain("b")
        wait_until(lambda: (found := source(1.0)) is not None and found.has_left("b"), "it is not emptied")
        second.close()
        wait_until(lambda: (found := source(1.0)) is not None and found.server("b") is None, "it is still listed")


def test_servers_and_clients_that_come_and_go_leave_nothing_behind() -> None:
    registry = LocalRegistry()
    own = ClusterOptions(registry, "flat", ttl_s=2, grace_s=1000.0, move_bytes_per_s=0)
    with server(8 * MIB, server_id="a", cluster=own) as first:
        for _ in range(2):
            come_and_go(registry, first)
        wait_until(lambda: first.stats()["connections"] == 0, "connections are left")
        before = held()
        for _ in range(ROUNDS):
            come_and_go(registry, first)
        wait_until(lambda: first.stats()["connections"] == 0, "connections are left")
        wait_until(lambda: held()[:2] <= before[:2], f"more is held: {before}, {held()}")
        objects = held()[2]
        assert objects <= before[2] + 200 * ROUNDS, f"{objects - before[2]} more objects after {ROUNDS} rounds"
        assert first.cache.audit() == []
