"""A cluster of processes with a three-node etcd, under load: nodes of etcd and servers are killed and frozen.

Every byte is checked against a journal of acknowledged writes.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from cygnet.gcache.membership import View
from cygnet.gcache.runtime.client import ClientOptions
from cygnet.gcache.runtime.cluster_client import ClusterClient
from cygnet.gcache.runtime.connect import connect, etcd_registry, from_registry
from cygnet.kv.store import Outcome
from support.etcd import EtcdCluster, etcd_cluster, needs_etcd
from support.gcache import ServerProcess, key, server_process

pytestmark = [pytest.mark.slow, needs_etcd]
WAIT_S = 90.0
SIZES = (900, 30_000, 200_000)
names_of_clusters = iter(range(1000))


def value_of(number: int, turn: int = 0) -> bytes:
    return np.random.default_rng([number, turn]).bytes(SIZES[number % len(SIZES)])


def wait_until(true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster() as nodes:
        yield nodes


class Cluster:
    """Servers in processes of their own, by id."""

    def __init__(self, etcd: EtcdCluster, held: ExitStack) -> None:
        self.name = f"test{next(names_of_clusters)}"
        self.spec = etcd.spec
        self.processes: dict[str, ServerProcess] = {}
        self._held = held
        self._read = from_registry(etcd_registry(etcd.spec, self.name))

    def add(self, id_: str, *more: str) -> ServerProcess:
        arguments = ("--etcd", self.spec, "--cluster", self.name, "--server-id", id_, *more)
        self.processes[id_] = self._held.enter_context(server_process(*arguments))
        return self.processes[id_]

    def client(self, **options: object) -> ClusterClient:
        plain = {"timeout_s": 20.0} | options
        made = connect(ClientOptions(etcd=self.spec, cluster=self.name, **plain))  # type: ignore[arg-type]
        assert isinstance(made, ClusterClient)
        self._held.callback(made.close)
        return made

    def view(self) -> View | None:
        return self._read(1.0)

    def settle(self, *ids: str) -> None:
        """Until these are the servers that own something, and nothing moves."""

        def settled() -> bool:
            view = self.view()
            return (
                view is not None
                and view.is_settled
                and {member.id for member in view.placements[0]} == set(ids)
                and all(member.weight == 100 for member in view.placements[0])
            )

        wait_until(settled, f"it does not settle: {self.view()}")


@contextmanager
def cluster(etcd: EtcdCluster, *ids: str, more: tuple[str, ...] = ()) -> Iterator[Cluster]:
    with ExitStack() as held:
        made = Cluster(etcd, held)
        for id_ in ids:
            made.add(id_, *more)
        made.settle(*ids)
        yield made


class Load:
    """One thread that puts and one that gets, each with a client of its own, and what came of it."""

    def __init__(self, made: Cluster, numbers: range, written: range, **options: object) -> None:
        self.numbers, self.written = numbers, written
        self.acknowledged: dict[int, int] = {}
        self.begun: dict[int, int] = {}
        self.failures = self.misses = self.reads = 0
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        with_copy, over_network = made.client(**options), made.client(same_host=False, **options)
        works = (lambda: self._write(over_network), lambda: self._read(with_copy))
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in works]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        assert not self.errors, self.errors

    def go_on(self, count: int = 40) -> None:
        """Wait for so many reads, and one round of writes, from now on."""
        reads, writes = self.reads, sum(self.begun.values())
        wait_until(
            lambda: bool(self.errors) or (self.reads > reads + count and sum(self.begun.values()) > writes + 8),
            "no progress",
        )

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def _write(self, sdk: ClusterClient) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            for number in self.written:
                self.begun[number] = turn
                if sdk.put(key(number), value_of(number, turn)) is Outcome.OK:
                    self.acknowledged[number] = turn
                else:
                    self.acknowledged.pop(number, None)
                    self.failures += 1
                if self._stop.is_set():
                    return

    def _read(self, sdk: ClusterClient) -> None:
        while not self._stop.is_set():
            for number in self.numbers:
                got = sdk.get(key(number))
                self.reads += 1
                if isinstance(got, Outcome):
                    self.misses += 1
                else:
                    assert got == value_of(number), f"wrong bytes for {number}"
                if self._stop.is_set():
                    return

    def check(self, sdk: ClusterClient) -> None:
        """Nothing that was acknowledged is lost, or older."""
        for number, turn in self.acknowledged.items():
            if self.begun[number] == turn:
                assert sdk.get(key(number)) == value_of(number, turn), f"lost or wrong: {number}"


def fill(made: Cluster, numbers: range) -> ClusterClient:
    sdk = made.client()
    values = [value_of(number) for number in numbers]
    assert set(sdk.batch_put([key(number) for number in numbers], values)) == {Outcome.OK}
    return sdk


def test_nothing_fails_while_one_two_and_all_of_etcd_are_dead_or_frozen(etcd: EtcdCluster) -> None:
    numbers, written = range(48), range(100, 108)
    try:
        with cluster(etcd, "a", "b", "c") as made:
            sdk = fill(made, numbers)
            with Load(made, numbers, written) as load:
                for number in range(3):
                    etcd.kill(number)
                    load.go_on()
                # Without any etcd a server that restarts goes on with the view it had.
                made.processes["b"].signal(signal.SIGKILL)
                made.processes["b"].start()
                failed, missed = load.failures, load.misses
                load.go_on()
                etcd.heal()
                load.go_on()
                for number in range(3):
                    etcd.signal(number, signal.SIGSTOP)
                    load.go_on()
                etcd.heal()
                load.go_on()
                assert (load.failures, load.misses) == (failed, missed), "operations failed after the restart"
            load.check(sdk)
            assert all(sdk.get(key(number)) == value_of(number) for number in numbers)
            wait_until(
                lambda: (
                    "registry" not in str(sdk.stats())
                    or all(one["registry_problem"] == "" for one in sdk.stats().values())
                ),
                "the registry is not used again",
            )
            assert {one.id for one in sdk.cluster_view.servers} == {"a", "b", "c"}
            assert sdk.audit() == []
    finally:
        etcd.heal()


def test_scale_out_and_drain_by_command_under_load_while_etcd_loses_a_node(etcd: EtcdCluster) -> None:
    numbers, written = range(60), range(100, 112)
    try:
        with cluster(etcd, "a", "b", "c") as made:
            sdk = fill(made, numbers)
            with Load(made, numbers, written) as load:
                load.go_on()
                made.add("d")
                etcd.kill(0)
                made.settle("a", "b", "c", "d")
                load.go_on()
                etcd.heal()
                run = subprocess.run(
                    [
                        *(sys.executable, "-m", "cygnet.cli.main", "gcache", "drain", "b"),
                        *("--servers", f"127.0.0.1:{made.processes['c'].port}"),
                    ],
                    env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
                    capture_output=True,
                    text=True,
                    timeout=WAIT_S,
                )
                assert run.returncode == 0, run.stderr
                assert "b may be stopped" in run.stdout
                assert "b has moved" in run.stderr
                assert made.processes["b"].stop() == 0
                made.settle("a", "c", "d")
                load.go_on()
            assert (load.failures, load.misses) == (0, 0)
            load.check(sdk)
            assert all(sdk.get(key(number)) == value_of(number) for number in numbers)
            stats = sdk.stats()
            assert set(stats) == {"a", "c", "d"}
            assert sdk.audit() == []
    finally:
        etcd.heal()


def test_a_draining_server_that_is_killed_goes_on_when_it_is_back(etcd: EtcdCluster) -> None:
    numbers = range(90)
    with cluster(etcd, "a", "b", more=("--move-rate", "128KiB")) as made:
        sdk = fill(made, numbers)
        sdk.drain("a")
        wait_until(lambda: int(str(sdk.stats()["a"]["moved_objects"])) > 3, "nothing moves")
        made.processes["a"].signal(signal.SIGKILL)
        view = made.view()
        assert view is not None
        assert not view.has_left("a")
        made.processes["a"].start()
        made.settle("b")
        assert all(sdk.get(key(number)) == value_of(number) for number in numbers)
        view = made.view()
        assert view is not None
        assert view.has_left("a")
        assert sdk.stats()["a"]["objects"] == 0
        assert sdk.audit() == []


def test_a_new_server_that_is_killed_while_it_gets_its_share_loses_nothing_when_it_is_back(etcd: EtcdCluster) -> None:
    numbers = range(90)
    with cluster(etcd, "a", "b", more=("--move-rate", "128KiB")) as made:
        sdk = fill(made, numbers)
        new = made.add("c")
        new.signal(signal.SIGKILL)
        view = made.view()
        assert view is not None
        assert view.server("c") is not None
        assert view.server("c").percent < 100, "too fast to show anything"
        new.start()
        made.settle("a", "b", "c")
        assert all(sdk.get(key(number)) == value_of(number) for number in numbers)
        assert sdk.audit() == []


def test_a_draining_server_that_does_not_come_back_costs_what_it_still_had(etcd: EtcdCluster) -> None:
    numbers, written = range(60), range(100, 112)
    with cluster(etcd, "a", "b", "c", more=("--move-rate", "128KiB", "--grace", "6")) as made:
        sdk = fill(made, numbers)
        mine = {number for number in numbers if sdk.placement.owner(key(number)) == "a"}
        with Load(made, numbers, written, timeout_s=2.0) as load:
            sdk.drain("a")
            wait_until(lambda: int(str(sdk.stats()["a"]["moved_objects"])) > 2, "nothing moves")
            made.processes["a"].signal(signal.SIGKILL)
            made.settle("b", "c")
            load.go_on()
        sdk.refresh()
        there = {number for number in numbers if sdk.get(key(number)) == value_of(number)}
        assert set(numbers) - there <= mine, "others lost something"
        load.check(sdk)
        assert sdk.put(key(min(mine)), b"again") is Outcome.OK
        assert sdk.get(key(min(mine))) == b"again"
        assert sdk.audit() == []


def test_a_frozen_server_costs_its_share_and_comes_back_empty_when_others_have_it(etcd: EtcdCluster) -> None:
    numbers, written = range(60), range(100, 112)
    with cluster(etcd, "a", "b", "c", more=("--grace", "6")) as made:
        sdk = fill(made, numbers)
        mine = {number for number in numbers if sdk.placement.owner(key(number)) == "a"}
        with Load(made, numbers, written, timeout_s=1.0) as load:
            made.processes["a"].signal(signal.SIGSTOP)
            made.settle("b", "c")
            load.go_on()
            for number in written:  # what the frozen one may still have of these is old
                assert sdk.put(key(number + 1000), value_of(number)) is Outcome.OK
            made.processes["a"].signal(signal.SIGCONT)
            made.settle("a", "b", "c")
            load.go_on()
        sdk.refresh()
        load.check(sdk)
        for number in numbers:
            got = sdk.get(key(number))
            assert got == value_of(number) or (number in mine and got is Outcome.MISS)
        for number in written:
            assert sdk.get(key(number + 1000)) == value_of(number)
        assert sdk.audit() == []


def test_the_commands_show_the_cluster(etcd: EtcdCluster) -> None:
    with cluster(etcd, "a", more=("--group", "rack-1")) as made:
        for servers in (f"127.0.0.1:{made.processes['a'].port}", f"etcd={made.spec}"):
            run = subprocess.run(
                [
                    *(sys.executable, "-m", "cygnet.cli.main", "gcache", "members"),
                    *("--servers", servers, "--cluster", made.name),
                ],
                env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
                capture_output=True,
                text=True,
                timeout=WAIT_S,
            )
            shown = json.loads(run.stdout)
            assert shown["cluster"] == made.name, run.stderr
            assert not shown["moving"]
            assert shown["servers"]["a"]["state"] == "active"
            assert shown["servers"]["a"]["group"] == "rack-1"
