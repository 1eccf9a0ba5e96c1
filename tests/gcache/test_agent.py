"""Hours of a cluster's life in virtual time: signs of life, outages short and long, a registry that goes away."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cygnet.base.errors import ConfigError
from cygnet.gcache.membership import Server as ClusterServer
from cygnet.gcache.membership import State, View, advanced, draining, finished, joined
from cygnet.gcache.runtime.agent import VIEW, Agent
from cygnet.gcache.runtime.cluster import FOR_EVER, Cluster, decode_view
from cygnet.gcache.runtime.inquiry import confirmed_at
from cygnet.gcache.runtime.node import ClusterOptions
from cygnet.gcache.runtime.registry import LocalRegistry, RegistryError, Snapshot
from cygnet.gcache.runtime.server import Server, ServerOptions

GRACE_S, TTL_S, STEP_S = 60, 5, 2


class World:
    """Agents that look every other second, by a clock that tests move."""

    def __init__(self, *names: str, fenced: bool = False) -> None:
        self.now = 1000.0
        self.registry = Flaky(self)
        self.nodes: dict[str, Node] = {}
        self.away: set[str] = set()
        """Frozen: they do nothing."""
        self.blind: set[str] = set()
        """Cut off from the registry."""
        self.alone: set[str] = set()
        """Cut off from the other servers."""
        self.fenced = fenced
        self.answered_while_given_up = 0
        for name in names:
            self.add(name)

    def add(self, name: str, incarnation: str = "first") -> None:
        node = self.nodes[name] = Node(name, self)
        node.agent = Agent(
            Seen(self, name),
            node.cluster,
            ClusterServer(name, "127.0.0.1", 1000 + ord(name), incarnation, weight=3),
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
                while changed := node.agent.try_step():
                    pass
                if changed is None:
                    self.ask(node)
                elif not node.cluster.view.is_settled:
                    epoch = node.cluster.epoch
                    node.agent.change(lambda view, name=name, epoch=epoch: finished(view, name, epoch))
            self.look()

    def ask(self, node: "Node") -> None:
        """As `Inquiry` does."""
        unseen_s: list[float | None] = []
        for other in node.cluster.view.servers:
            if other.id == node.name or other.state is State.DOWN:
                continue
            known = self.nodes.get(other.id)
            if known is None or {node.name, other.id} & (self.alone | self.away):
                unseen_s.append(None)
            elif known.cluster.epoch > node.cluster.epoch:
                node.cluster.adopt(known.cluster.view)
                return
            else:
                unseen_s.append(self.now - known.agent.looked_ns / 1e9 if known.agent.problem else None)
        confirmed = confirmed_at(unseen_s, self.now)
        if confirmed is not None:
            node.cluster.confirm(confirmed)

    def look(self) -> None:
        """Who answers by a view, though others own its keys by now?"""
        document = LocalRegistry.read(self.registry).documents.get(VIEW)
        view = View("test") if document is None else decode_view(document.value)
        for node in self.nodes.values():
            mine = view.server(node.name)
            if view.placements and (mine is None or mine.state is State.DOWN):
                self.answered_while_given_up += node.cluster.answers(node.cluster.epoch)

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


class Seen:
    """The registry as one server sees it."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def __getattr__(self, what: str) -> object:
        if self._name in self._world.blind:
            raise RegistryError("cut off")
        return getattr(self._world.registry, what)


@dataclass
class Node:
    name: str
    world: World
    cluster: Cluster = field(init=False)
    agent: Agent = field(init=False)
    emptied: int = 0

    def __post_init__(self) -> None:
        term_s = GRACE_S if self.world.fenced else FOR_EVER
        self.cluster = Cluster("test", self.name, term_s=term_s, clock=lambda: self.world.now)

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


def test_hours_of_partitions_and_no_fenced_server_answers_what_others_own() -> None:
    """Frozen, cut off from the registry, from the others, from both; the registry lost to everyone."""
    choose = random.Random(7)
    fenced, plain = World("a", "b", "c", "d", fenced=True), World("a", "b", "c", "d")
    for _ in range(150):
        cut = [{name for name in "abcd" if choose.random() < 0.3} for _ in range(3)]
        fails, seconds, calm = choose.random() < 0.2, choose.randint(2, 200), choose.random() < 0.4
        for world in (fenced, plain):
            world.away, world.blind, world.alone = (set(), set(), set()) if calm else cut
            world.registry.fails = fails
            world.run(seconds)
    for world in (fenced, plain):
        world.away, world.blind, world.alone = set(), set(), set()
        world.registry.fails = False
        world.run(600)
        assert [one.state for one in world.view.servers] == [State.ACTIVE] * 4
        assert all(node.cluster.answers(world.view.epoch) for node in world.nodes.values())
    assert fenced.answered_while_given_up == 0
    assert plain.answered_while_given_up > 0, "nothing happened that a fence is for"


def test_a_server_that_only_the_registry_is_lost_to_hears_from_the_others() -> None:
    world = World("a", "b", "c")
    world.run(60)
    world.blind = {"c"}
    world.run(GRACE_S + 3 * TTL_S)
    assert world.view.server("c") is None or world.view.server("c").state is State.DOWN  # type: ignore[union-attr]
    assert not world.nodes["c"].cluster.is_up


def test_fenced_servers_that_reach_each_other_go_on_without_the_registry_as_long_as_none_is_missing() -> None:
    world = World("a", "b", "c", fenced=True)
    world.run(60)
    world.registry.fails = True
    world.run(2 * 3600)
    assert all(node.cluster.answers(node.cluster.epoch) for node in world.nodes.values())
    world.away = {"a"}  # it may be dead, or with the registry on the other side
    world.run(GRACE_S - 4 * STEP_S)
    assert all(node.cluster.answers(node.cluster.epoch) for node in world.nodes.values())
    world.run(5 * STEP_S)
    assert not any(node.cluster.answers(node.cluster.epoch) for node in world.nodes.values())
    world.away = set()
    world.run(2 * STEP_S)
    assert all(node.cluster.answers(node.cluster.epoch) for node in world.nodes.values())


def test_a_server_that_restarts_without_the_registry_is_fenced_until_it_knows(tmp_path: Path) -> None:
    first = Cluster("test", "a", tmp_path)
    first.adopt(advanced(joined(joined(View("test"), ClusterServer("a", "h", 1)), ClusterServer("b", "h", 2))))
    plain = Cluster("test", "a", tmp_path)
    assert plain.resume()
    assert plain.answers(first.epoch)
    now = 1000.0
    again = Cluster("test", "a", tmp_path, term_s=GRACE_S, clock=lambda: now)
    assert again.resume()
    assert not again.answers(first.epoch)
    with again.changing(first.epoch) as welcome:
        assert not welcome
    again.confirm(now)
    assert again.answers(first.epoch)
    now += GRACE_S
    assert not again.answers(first.epoch)


def test_a_fence_shorter_than_a_sign_of_life_is_refused() -> None:
    own = ClusterOptions(LocalRegistry(), grace_s=5.0, ttl_s=5, fenced=True)
    with pytest.raises(ConfigError, match="raise --grace"):
        Server(ServerOptions(port=0, cluster=own))


def test_what_the_others_say_confirms_a_view_only_if_nobody_sees_the_registry() -> None:
    assert confirmed_at([], 100.0) == 100.0
    assert confirmed_at([0.5, 3.0], 100.0) == 97.0
    assert confirmed_at([0.5, None], 100.0) is None
