"""Hours of a cluster's life in virtual time: signs of life, outages short and long, a registry that goes away."""

import random
from dataclasses import dataclass, field

from cygnet.gcache.membership import Server, State, View, draining, finished
from cygnet.gcache.runtime.agent import VIEW, Agent
from cygnet.gcache.runtime.cluster import Cluster, decode_view
from cygnet.gcache.runtime.registry import LocalRegistry, RegistryError, Snapshot

GRACE_S, TTL_S, STEP_S = 60, 5, 2


class World:
    """Agents that look every other second, by a clock that tests move."""

    def __init__(self, *names: str) -> None:
        self.now = 1000.0
        self.registry = Flaky(self)
        self.nodes: dict[str, Node] = {}
        self.away: set[str] = set()
        """Cut off: they do not look."""
        for name in names:
            self.add(name)

    def add(self, name: str, incarnation: str = "first") -> None:
        node = self.nodes[name] = Node(name)
        node.agent = Agent(
            self.registry,
            node.cluster,
            Server(name, "127.0.0.1", 1000 + ord(name), incarnation, weight=3),
            empty=node.empty,
            grace_s=GRACE_S,
            ttl_s=TTL_S,
            clock_ns=lambda: int(self.now * 1e9),
        )
        self.run(STEP_S)

    def run(self, seconds: float) -> None:
        """Everyone looks, and moves at once what there is to move."""
        until = self.now + seconds
        while self.now < until:
            self.now += STEP_S
            for name, node in self.nodes.items():
                if name in self.away:
                    continue
                try:
                    while node.agent.step():
                        pass
                    if not node.cluster.view.is_settled:
                        epoch = node.cluster.epoch
                        node.agent.change(lambda view, name=name, epoch=epoch: finished(view, name, epoch))
                except RegistryError:
                    node.agent.blind()

    @property
    def view(self) -> View:
        return decode_view(self.registry.read().documents[VIEW].value)


class Flaky(LocalRegistry):
    """Can be made to fail."""

    def __init__(self, world: World) -> None:
        super().__init__(lambda: world.now)
        self.fails = False

    def read(self) -> Snapshot:
        if self.fails:
            raise RegistryError("not now")
        return super().read()


@dataclass
class Node:
    name: str
    cluster: Cluster = field(init=False)
    agent: Agent = field(init=False)
    emptied: int = 0

    def __post_init__(self) -> None:
        self.cluster = Cluster("test", self.name)

    def empty(self) -> None:
        assert not self.cluster.is_up, "it is asked while it gives up what it has"
        self.emptied += 1


def test_hours_of_quiet_change_nothing() -> None:
    world = World("a", "b", "c")
    world.run(60)
    epoch = world.view.epoch
    world.run(2 * 3600)
    assert world.view.epoch == epoch
    assert all(node.cluster.epoch == epoch and node.emptied == (node.name != "a") for node in world.nodes.values())


def test_short_outages_move_nothing_and_long_ones_do() -> None:
    world = World("a", "b", "c")
    world.run(60)
    view = world.view
    choose = random.Random(3)
    for _ in range(40):
        world.away = {choose.choice("abc")}
        world.run(choose.randint(1, GRACE_S - TTL_S))
        world.away = set()
        world.run(choose.randint(STEP_S, 100))
    assert world.view == view
    for turn in range(8):
        lost = choose.choice("abc")
        world.away = {lost}
        emptied = world.nodes[lost].emptied
        world.run(GRACE_S + 2 * TTL_S)
        assert all(member.id != lost for member in world.view.placements[0])
        assert world.nodes[lost].cluster.is_up, "it knows nothing of it"
        world.away = set()
        world.run(60)
        assert world.nodes[lost].emptied == emptied + 1
        now = world.view
        assert [server.state for server in now.servers] == [State.ACTIVE] * 3
        assert now.placements[0] == view.placements[0], turn
        assert now.is_settled


def test_an_outage_of_the_registry_is_nobodys_absence() -> None:
    world = World("a", "b", "c")
    world.run(60)
    view = world.view
    for _ in range(4):
        world.registry.fails = True
        world.run(1800)  # all leases end meanwhile
        assert all(node.cluster.is_up for node in world.nodes.values())
        world.registry.fails = False
        world.run(GRACE_S / 2)
        assert world.view == view


def test_a_registry_that_has_lost_everything_is_told_what_was() -> None:
    world = World("a", "b", "c")
    world.run(60)
    view = world.view
    for key, document in world.registry.read().documents.items():
        assert world.registry.remove(key, expected=document.revision)
    world.run(60)
    assert world.view == view


def test_a_drained_server_stays_out_whatever_happens_to_its_sign() -> None:
    world = World("a", "b", "c")
    world.run(60)
    world.nodes["a"].agent.change(lambda view: draining(view, "c"))
    world.run(60)
    assert world.view.has_left("c")
    world.away = {"c"}
    world.run(3 * TTL_S)
    assert world.view.server("c") is None, "it went as planned, no grace is needed"
    world.away = set()
    world.run(600)
    assert world.view.server("c") is None, "it was drained to be stopped"
    del world.nodes["c"]
    world.run(TTL_S * 2)
    world.add("c", "second")
    world.run(60)
    assert world.view.server("c").state is State.ACTIVE  # type: ignore[union-attr]
    assert world.nodes["c"].emptied == 1
