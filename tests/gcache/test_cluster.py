"""Servers that join, drain and are lost, in this process and under load; every byte is checked against a journal."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from contracts import store as contract
from cygnet.base.errors import ConfigError
from cygnet.gcache import membership
from cygnet.gcache.limits import Limits
from cygnet.gcache.membership import State, View
from cygnet.gcache.runtime import mover
from cygnet.gcache.runtime.agent import VIEW
from cygnet.gcache.runtime.channel import Address
from cygnet.gcache.runtime.client import ClientOptions, GCacheClient, Route
from cygnet.gcache.runtime.cluster import decode_view
from cygnet.gcache.runtime.cluster_client import ClusterClient
from cygnet.gcache.runtime.connect import connect, from_registry
from cygnet.gcache.runtime.node import ClusterOptions
from cygnet.gcache.runtime.registry import LocalRegistry
from cygnet.gcache.runtime.server import Server
from cygnet.gcache.runtime.store import open_gcache_store
from cygnet.kv.store import Outcome
from support.gcache import MIB, key, server

WAIT_S = 60.0
SIZES = (1000, 20_000, 150_000, MIB + 5)


def value_of(name: object, turn: int = 0) -> bytes:
    number = int(str(name).rpartition("-")[2])
    return np.random.default_rng([number, turn]).bytes(SIZES[number % len(SIZES)])


def wait_until(true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.01)


class LocalCluster:
    """Servers of one process, by name, over one registry."""

    def __init__(self, held: ExitStack, **options: object) -> None:
        self.registry = LocalRegistry()
        self.servers: dict[str, Server] = {}
        self._held = held
        self._ends: dict[str, ExitStack] = {}
        self._options = {"ttl_s": 2, "move_bytes_per_s": 0, "grace_s": 1000.0} | options

    def add(self, name: str, *, cluster: dict[str, object] | None = None, **options: object) -> Server:
        own = ClusterOptions(self.registry, "test", **(self._options | (cluster or {})))  # type: ignore[arg-type]
        end = self._held.enter_context(ExitStack())
        self.servers[name] = end.enter_context(server(server_id=name, cluster=own, **options))  # type: ignore[arg-type]
        self._ends[name] = end
        return self.servers[name]

    def stop(self, name: str) -> None:
        self._ends.pop(name).close()
        del self.servers[name]

    def client(self, **options: object) -> ClusterClient:
        plain: dict[str, object] = {"timeout_s": 20.0} | options
        made = ClusterClient(ClientOptions(**plain), from_registry(self.registry))  # type: ignore[arg-type]
        self._held.callback(made.close)
        return made

    @property
    def view(self) -> View:
        view = from_registry(self.registry)(1.0)
        assert view is not None
        return view

    def give_up(self, name: str) -> None:
        """As if a server's grace were over."""
        done = False
        while not done:
            document = self.registry.read().documents[VIEW]
            view = membership.lost(decode_view(document.value), name)
            done = self.registry.write(VIEW, msgspec.json.encode(view), expected=document.revision)

    def settle(self) -> View:
        """Wait until nothing moves, and everyone knows."""

        def settled() -> bool:
            view = self.view
            ramps = any(one.state is State.JOINING for one in view.servers)
            known = all(one.stats()["epoch"] == view.epoch for one in self.servers.values())
            return view.is_settled and not ramps and known

        wait_until(settled, "it does not settle")
        return self.view


@contextmanager
def local_cluster(*names: str, **options: object) -> Iterator[LocalCluster]:
    with ExitStack() as held:
        cluster = LocalCluster(held, **options)
        for name in names:
            cluster.add(name)
        cluster.settle()
        yield cluster
        for one in cluster.servers.values():
            assert one.cache.audit() == []
            assert one.service.cluster.audit() == []


class Journal:
    """What was acknowledged, of keys that have one writer each."""

    def __init__(self) -> None:
        self.turns: dict[str, int] = {}
        """Acknowledged last; negative: being written, or failed."""
        self.failures = 0
        self.reads = 0
        self.misses: list[tuple[str, Outcome]] = []
        self.stop = threading.Event()
        self.errors: list[BaseException] = []

    def write(self, sdk: GCacheClient, names: list[str]) -> None:
        turn = 0
        while not self.stop.is_set():
            turn += 1
            for name in names:
                self.turns[name] = -turn
                if sdk.put(key(name), value_of(name, turn)) is Outcome.OK:
                    self.turns[name] = turn
                else:
                    self.failures += 1
                if self.stop.is_set():
                    return

    def read(self, sdk: GCacheClient, names: list[str]) -> None:
        """Of keys that are not written meanwhile."""
        at = 0
        while not self.stop.is_set():
            some = [names[(at + i) % len(names)] for i in range(4)]
            at += 4
            wanted = [value_of(name) for name in some]
            buffers = [bytearray(len(value)) for value in wanted]
            outcomes = sdk.batch_get_into([key(name) for name in some], buffers)
            for name, value, buffer, outcome in zip(some, wanted, buffers, outcomes, strict=True):
                self.reads += 1
                if outcome is Outcome.OK:
                    assert buffer == value, f"wrong bytes for {name}"
                else:
                    self.misses.append((name, outcome))

    def check(self, sdk: GCacheClient) -> None:
        """Nothing that was acknowledged is lost or older."""
        for name, turn in self.turns.items():
            got = sdk.get(key(name))
            if turn > 0:
                assert got == value_of(name, turn), f"{name}: {got if isinstance(got, Outcome) else 'wrong bytes'}"

    @contextmanager
    def load(self, *work: Callable[[], None]) -> Iterator[None]:
        def run(one: Callable[[], None]) -> None:
            try:
                one()
            except BaseException as error:
                self.errors.append(error)

        threads = [threading.Thread(target=run, args=(one,)) for one in work]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stop.set()
            for thread in threads:
                thread.join(WAIT_S)
        assert not self.errors, self.errors


def objects(cluster: LocalCluster) -> dict[str, int]:
    return {name: int(str(one.stats()["objects"])) for name, one in cluster.servers.items()}


def test_three_to_four_to_three_servers_under_load_lose_nothing() -> None:
    names = [f"still-{number}" for number in range(160)]
    written = [f"written-{number}" for number in range(24)]
    with local_cluster("a", "b", "c") as cluster:
        sdk, other = cluster.client(), cluster.client(same_host=False)
        outcomes = sdk.batch_put([key(name) for name in names], [value_of(name) for name in names])
        assert set(outcomes) == {Outcome.OK}
        num_bytes = sum(len(value_of(name)) for name in names)
        journal = Journal()
        with journal.load(
            lambda: journal.write(cluster.client(), written[:12]),
            lambda: journal.write(cluster.client(same_host=False), written[12:]),
            lambda: journal.read(sdk, names),
            lambda: journal.read(other, names),
        ):
            cluster.add("d")
            cluster.settle()
            moved = sum(one.stats()["moved_bytes"] for one in cluster.servers.values())  # type: ignore[misc]
            on_d = {name for name in names if sdk.placement.owner(key(name)) == "d"}
            ideal = sum(len(value_of(name)) for name in on_d) + sum(
                len(value_of(name)) for name in written if sdk.placement.owner(key(name)) == "d"
            )
            assert 0.1 * num_bytes < ideal < 0.4 * num_bytes
            assert moved <= 1.15 * ideal + sum(len(value_of(name)) for name in written)
            assert objects(cluster)["d"] > 0
            sdk.drain("d")
            cluster.settle()
            assert cluster.view.has_left("d")
            assert objects(cluster)["d"] == 0
            cluster.stop("d")
        assert journal.failures == 0
        assert journal.misses == []
        assert journal.reads > 0
        assert all(one.stats()["evicted_objects"] == 0 for one in cluster.servers.values())
        journal.check(sdk)
        for name in names:
            assert sdk.get(key(name)) == value_of(name)
        assert sdk.audit() == []


def test_moved_bytes_are_those_that_must_move() -> None:
    names = [f"n-{number}" for number in range(400)]
    with local_cluster("a", "b", "c", "d") as cluster:
        sdk = cluster.client()
        assert set(sdk.batch_put([key(n) for n in names], [value_of(n) for n in names])) == {Outcome.OK}
        ideal = sum(len(value_of(name)) for name in names if sdk.placement.owner(key(name)) == "b")
        sdk.drain("b")
        cluster.settle()
        moved = sum(one.stats()["moved_bytes"] for one in cluster.servers.values())  # type: ignore[misc]
        assert ideal <= moved <= 1.15 * ideal


def test_what_is_on_the_disk_moves_too_and_a_stopped_mover_goes_on(tmp_path: Path) -> None:
    names = [f"n-{number}" for number in range(160)]
    with local_cluster("a", move_bytes_per_s=40 * MIB) as cluster:
        small = {"memory_bytes": 6 * MIB, "disk_bytes": 256 * MIB}
        cluster.add("b", disk=tmp_path / "b", **small)
        cluster.settle()
        cluster.client().drain("a")
        cluster.settle()
        cluster.stop("a")
        wait_until(lambda: cluster.view.server("a") is None, "it has left, and is still listed")
        sdk = cluster.client()
        for name in names:
            assert sdk.put(key(name), value_of(name)) is Outcome.OK
        assert sum(len(value_of(name)) for name in names) > 6 * 6 * MIB
        cluster.add("c", disk=tmp_path / "c", **small)
        cluster.settle()
        sdk.drain("b")
        b = cluster.servers["b"]
        wait_until(lambda: int(str(b.stats()["moved_objects"])) > 10, "nothing moves")
        assert not cluster.view.has_left("b")
        cluster.stop("b")  # in the middle of it; its arena is gone with it, so everything must have been on the disk
        cluster.add("b", disk=tmp_path / "b", **small)
        cluster.settle()
        assert cluster.view.has_left("b")
        stats = cluster.servers["b"].stats()
        assert (stats["objects"], stats["disk_objects"]) == (0, 0)
        there = [name for name in names if not isinstance(sdk.get(key(name)), Outcome)]
        assert all(sdk.get(key(name)) == value_of(name) for name in there)
        assert len(there) >= 0.75 * len(names)


def test_sessions_move_whole_by_their_roots() -> None:
    """A mover knows only what is stored: the place of the root is stored with it."""
    route = Route(b"session-7", 3)
    names = [f"s-{number}" for number in range(40)]
    with ExitStack() as held:
        cluster = LocalCluster(held)
        for name, group in (("a", "rack-1"), ("b", "rack-1"), ("c", "rack-2")):
            cluster.add(name, cluster={"group": group})
        cluster.settle()
        sdk = cluster.client()
        assert set(sdk.batch_put([key(n) for n in names], [value_of(n) for n in names], route=route)) == {Outcome.OK}
        for name, group in (("d", "rack-3"), ("e", "rack-4"), ("f", "rack-5")):
            cluster.add(name, cluster={"group": group})
            cluster.settle()
            assert all(sdk.get(key(n), route=route) == value_of(n) for n in names)
        for name in ("a", "b", "c"):
            sdk.drain(name)
            cluster.settle()
        assert all(sdk.get(key(n), route=route) == value_of(n) for n in names)
        assert sum(count > 0 for count in objects(cluster).values()) == 1, "one root, one group"


def test_a_client_that_knows_any_server_follows_the_cluster() -> None:
    with local_cluster("a", "b") as cluster:
        ports = [one.port for one in cluster.servers.values()]
        options = ClientOptions(servers=(Address("127.0.0.1", ports[1]),), timeout_s=20.0)
        sdk = connect(options)
        try:
            assert isinstance(sdk, ClusterClient)
            assert {one.id for one in sdk.cluster_view.servers} == {"a", "b"}
            names = [f"n-{number}" for number in range(30)]
            assert set(sdk.batch_put([key(n) for n in names], [value_of(n) for n in names])) == {Outcome.OK}
            assert all(count > 0 for count in objects(cluster).values())
            cluster.add("c")
            cluster.settle()
            wait_until(lambda: sdk.cluster_view.epoch == cluster.view.epoch, "an idle client does not notice")
        finally:
            sdk.close()
        plain = GCacheClient(options)
        try:
            assert plain.get(key(names[0])) is Outcome.FAILED, "without an epoch nothing is answered"
        finally:
            plain.close()


def test_a_server_that_was_lost_is_replaced_and_comes_back_empty(tmp_path: Path) -> None:
    with local_cluster("a", "b", "c") as cluster, ExitStack() as held:
        own = ClusterOptions(cluster.registry, "test", ttl_s=2, move_bytes_per_s=0, grace_s=1000.0)
        arena = tmp_path / "arena"
        lost = held.enter_context(server(server_id="d", cluster=own, arena=arena))
        cluster.settle()
        sdk = cluster.client(timeout_s=5.0)
        names = [f"n-{number}" for number in range(60)]
        assert set(sdk.batch_put([key(n) for n in names], [value_of(n) for n in names])) == {Outcome.OK}
        gone = [name for name in names if sdk.placement.owner(key(name)) == "d"]
        assert gone
        lost.close()
        cluster.give_up("d")
        wait_until(lambda: cluster.view.server("d") is None, "it is not given up")
        cluster.settle()
        sdk.refresh()
        for name in names:
            got = sdk.get(key(name))
            assert got is Outcome.MISS if name in gone else got == value_of(name)
        assert sdk.put(key(gone[0]), b"newer") is Outcome.OK
        back = held.enter_context(server(server_id="d", cluster=own, arena=arena))
        assert back.stats()["arena_reused"]
        cluster.settle()
        assert sdk.get(key(gone[0])) == b"newer"
        assert all(sdk.get(key(name)) is Outcome.MISS for name in gone[1:])
        back.close()


def test_a_server_that_restarts_within_its_grace_keeps_what_it_has(tmp_path: Path) -> None:
    with local_cluster("a", "b") as cluster, ExitStack() as held:
        own = ClusterOptions(cluster.registry, "test", ttl_s=2, grace_s=1000.0)
        first = held.enter_context(server(server_id="c", cluster=own, arena=tmp_path / "arena"))
        cluster.settle()
        sdk = cluster.client()
        names = [f"n-{number}" for number in range(60)]
        assert set(sdk.batch_put([key(n) for n in names], [value_of(n) for n in names])) == {Outcome.OK}
        first.close()
        again = held.enter_context(server(server_id="c", cluster=own, arena=tmp_path / "arena"))
        wait_until(lambda: sdk.cluster_view.server("c").port == again.port, "its address is not known")  # type: ignore[union-attr]
        assert all(sdk.get(key(name)) == value_of(name) for name in names)
        again.close()


def test_the_engines_store_follows_a_cluster_of_which_a_server_is_gone() -> None:
    with local_cluster("a", "b") as cluster:
        port = cluster.servers["b"].port
        cluster.stop("a")
        store = open_gcache_store(f"//127.0.0.1:{port}?timeout_s=5")
        try:
            keys = [contract.key(number) for number in range(20)]
            outcomes = store.batch_put(keys, [b"v" * 1000] * 20)
            assert set(outcomes) == {Outcome.OK, Outcome.FAILED}
            there = [outcome is Outcome.OK for outcome in outcomes]
            assert store.batch_exists(keys) == there
            buffers = [bytearray(1000) for _ in keys]
            got = store.batch_get_into(keys, buffers)
            assert [outcome is Outcome.OK for outcome in got] == there
        finally:
            store.close()


def test_orders_that_can_not_be_carried_out_are_refused() -> None:
    with local_cluster("a", "b") as cluster:
        sdk = cluster.client()
        with pytest.raises(ConfigError, match="has a, b"):
            sdk.drain("nobody")
        sdk.drain("a")
        with pytest.raises(ConfigError, match="add one first"):
            sdk.drain("b")
        cluster.settle()
        sdk.drain("a", undo=True)
        assert cluster.settle().server("a").state is State.ACTIVE  # type: ignore[union-attr]
        with pytest.raises(ConfigError, match="already"):
            cluster.add("a")


def test_what_the_new_owner_does_not_take_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "PAUSE_S", 0.01)
    with local_cluster("a") as cluster:
        cluster.add("b", limits=Limits(max_value_bytes=10_000))
        cluster.settle()
        sdk = cluster.client()
        names = [name for name in (f"n-{4 * number}" for number in range(40)) if sdk.placement.owner(key(name)) == "a"]
        large = next(name for name in (f"n-{4 * n + 1}" for n in range(40)) if sdk.placement.owner(key(name)) == "a")
        for name in (*names, large):
            assert sdk.put(key(name), value_of(name)) is Outcome.OK
        sdk.drain("a")
        cluster.settle()
        assert all(sdk.get(key(name)) == value_of(name) for name in names)
        assert sdk.get(key(large)) is Outcome.MISS
        stats = cluster.servers["a"].stats()
        assert (stats["objects"], stats["move_given_up_objects"]) == (0, 1)


def test_a_damaged_object_is_given_up_and_not_passed_on() -> None:
    with local_cluster("a", "b") as cluster:
        sdk = cluster.client()
        names = [f"n-{number}" for number in range(40)]
        assert set(sdk.batch_put([key(n) for n in names], [value_of(n) for n in names])) == {Outcome.OK}
        damaged = next(name for name in names if sdk.placement.owner(key(name)) == "a")
        cache = cluster.servers["a"].cache
        entry = cache.arena.find(key(damaged))
        assert entry is not None
        cache.arena.value(entry)[500] ^= 1
        sdk.drain("a")
        cluster.settle()
        for name in names:
            assert sdk.get(key(name)) == (Outcome.MISS if name == damaged else value_of(name))
        assert cluster.servers["a"].stats()["torn_objects"] == 1


def test_what_has_a_time_to_live_keeps_it() -> None:
    with local_cluster("a", "b") as cluster:
        sdk = cluster.client()
        names = [f"n-{4 * number}" for number in range(30)]
        for name in names:
            assert sdk.put(key(name), value_of(name), ttl_ms=3_600_000) is Outcome.OK
        sdk.drain("a")
        cluster.settle()
        arena = cluster.servers["b"].cache.arena
        left = [entry.expiry_ns - time.time_ns() for entry in arena.entries()]
        assert len(left) == len(names)
        assert all(3_000 * 10**9 < one <= 3_600 * 10**9 for one in left)


def test_deleting_and_clearing_while_objects_move() -> None:
    """What was deleted does not come back from where it was."""
    names = [f"n-{number}" for number in range(120)]
    with local_cluster("a", "b", move_bytes_per_s=8 * MIB) as cluster:
        sdk = cluster.client()
        assert set(sdk.batch_put([key(n) for n in names], [value_of(n) for n in names])) == {Outcome.OK}
        sdk.drain("a")
        wait_until(lambda: not sdk.cluster_view.is_settled, "it does not begin")
        gone = sdk.remove([key(name) for name in names[:60]])
        assert all(gone)
        assert not any(sdk.batch_exists([key(name) for name in names[:60]]))
        assert all(sdk.batch_exists([key(name) for name in names[60:]]))
        assert not cluster.view.has_left("a"), "too fast to show anything"
        assert sdk.clear(b"test") > 0
        cluster.settle()
        assert sum(objects(cluster).values()) == 0
