"""Views change by the rules, in whatever order things happen; and in no order is an old value served or one lost."""

from collections import Counter
from functools import lru_cache

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cygnet.base.errors import ConfigError
from cygnet.gcache.changes import Changes
from cygnet.gcache.membership import (
    MAX_PLACEMENTS,
    RAMP,
    Absences,
    Owners,
    Server,
    State,
    View,
    advanced,
    draining,
    finished,
    joined,
    kept,
    lost,
    must_be_empty,
)

KEYS = [b"\x02ns" + i.to_bytes(8, "little") for i in range(4000)]


def entry(id_: str, host: str = "127.0.0.1", **more: object) -> Server:
    return Server(id_, host, 7400, **more)  # type: ignore[arg-type]


def done(view: View) -> View:
    """Everyone has moved everything."""
    for server in view.servers:
        view = finished(view, server.id, view.epoch)
    return view


def settled(view: View) -> View:
    """As far as it goes by itself, with everyone moving at once."""
    for _ in range(100):
        assert view.audit() == []
        after = advanced(done(view))
        if after == view:
            return view
        view = after
    raise AssertionError("it never ends")


def cluster(*ids: str) -> View:
    view = View("test")
    for id_ in ids:
        view = joined(view, entry(id_))
    return settled(view)


def owners(view: View) -> list[str]:
    asked = Owners(view)
    return [asked.newest(key) for key in KEYS]


def test_the_first_servers_are_active_at_once_and_later_ones_ramp_up() -> None:
    view = advanced(joined(joined(View("test"), entry("a")), entry("b")))
    assert [server.state for server in view.servers] == [State.ACTIVE] * 2
    assert view.is_settled
    view = joined(view, entry("c"))
    shares = []
    before = owners(view)
    while not (view.is_settled and view.server("c").state is State.ACTIVE):  # type: ignore[union-attr]
        after = advanced(done(view))
        now = owners(after)
        assert all(new in (old, "c") for old, new in zip(before, now, strict=True)), "moved between old servers"
        view, before = after, now
        shares.append(Counter(now)["c"] / len(KEYS))
    assert len(set(shares)) == len(RAMP)
    assert shares == sorted(shares)
    assert 0.28 < shares[-1] < 0.39
    assert settled(view) == view


def test_the_smallest_weight_ramps_up_too() -> None:
    view = settled(joined(cluster("a"), entry("b", weight=1)))
    assert view.server("b").state is State.ACTIVE  # type: ignore[union-attr]


def test_draining_moves_only_what_the_server_has_and_ends_with_leave_to_stop() -> None:
    view = cluster("a", "b", "c")
    before = owners(view)
    view = draining(view, "b")
    assert not view.has_left("b")
    view = advanced(view)
    assert not view.has_left("b")
    assert all(new == old for old, new in zip(before, owners(view), strict=True) if old != "b")
    view = settled(view)
    assert view.has_left("b")
    assert view.server("b") is not None
    assert lost(view, "b").server("b") is None, "it went as planned"
    back = settled(kept(view, "b"))
    assert owners(back) == before


def test_what_can_not_be_drained_is_said() -> None:
    view = cluster("a", "b")
    with pytest.raises(ConfigError, match="has a, b"):
        draining(view, "x")
    view = draining(view, "a")
    assert draining(view, "a") == view
    with pytest.raises(ConfigError, match="add one first"):
        draining(view, "b")
    with pytest.raises(ConfigError, match="down"):
        draining(lost(cluster("a", "b"), "a"), "a")


def test_planned_changes_wait_for_each_other_and_lost_servers_do_not() -> None:
    view = advanced(draining(cluster("a", "b", "c", "d"), "a"))
    assert len(view.placements) == 2
    waiting = advanced(joined(view, entry("e")))
    assert waiting.placements == view.placements
    hurried = advanced(lost(waiting, "b"))
    assert len(hurried.placements) == 3
    assert set(owners(hurried)) == {"c", "d"}
    assert all("b" not in Owners(hurried).older(key) for key in KEYS)
    assert set(owners(settled(hurried))) == {"c", "d", "e"}


def test_when_the_only_taker_of_a_drain_is_lost_the_drained_server_is_kept() -> None:
    view = advanced(draining(cluster("a", "b"), "a"))
    assert set(owners(view)) == {"b"}
    view = advanced(lost(view, "b"))
    assert set(owners(view)) == {"a"}, "nobody could put anything for ever"
    assert settled(view).server("a").state is State.ACTIVE  # type: ignore[union-attr]


def test_when_all_takers_are_lost_a_server_that_has_just_come_takes_all() -> None:
    view = advanced(joined(advanced(draining(cluster("a", "b"), "a")), entry("c")))
    assert set(owners(view)) == {"b"}
    view = advanced(lost(view, "b"))
    assert set(owners(view)) == {"c"}
    assert ["a"] in [Owners(view).older(key) for key in KEYS[:20]]
    assert settled(view).has_left("a"), "it goes on being drained"


def test_servers_lost_one_after_another_while_things_move_do_not_stop_the_rest() -> None:
    """However many are lost before anything settles, no key waits for one of them."""
    view = advanced(draining(cluster("a", "b", "c", "d", "e", "f", "g"), "a"))
    for id_ in "bcdef":
        before = owners(view)
        view = advanced(lost(view, id_))
        assert view.audit() == []
        assert id_ not in owners(view)
        assert all(new == old for old, new in zip(before, owners(view), strict=True) if old != id_)
    assert set(owners(view)) == {"g"}
    assert settled(view).has_left("a")


def test_a_server_that_restarts_keeps_its_place_and_one_that_was_lost_comes_back_empty() -> None:
    view = cluster("a", "b")
    again = joined(view, entry("a", incarnation="new", host="127.0.0.2"))
    assert again.server("a").state is State.ACTIVE  # type: ignore[union-attr]
    assert again.epoch == view.epoch + 1
    assert owners(again) == owners(view)
    assert not must_be_empty(again, "a")
    assert joined(view, entry("a")) == view
    gone = advanced(lost(view, "a"))
    assert must_be_empty(gone, "a")
    assert must_be_empty(gone, "new")
    assert not must_be_empty(View("test"), "a"), "nobody has changed anything yet"
    assert settled(gone).server("a") is None
    assert owners(settled(joined(gone, entry("a")))) == owners(view)


def test_views_survive_their_encoding() -> None:
    view = advanced(draining(joined(cluster("a", "b"), entry("c", group="rack", weight=7)), "a"))
    assert msgspec.json.decode(msgspec.json.encode(view), type=View) == view


@pytest.mark.parametrize("wrong", [{"weight": 0}, {"weight": 10**6}, {"group": "g" * 300}])
def test_what_can_be_no_server_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="'a'"):
        joined(View("test"), entry("a", **wrong))


def test_short_outages_do_not_count() -> None:
    absences = Absences(grace_ns=10)
    assert absences.look(["a", "b"], {"a"}, 100) == []
    assert absences.look(["a", "b"], {"a"}, 109) == []
    assert absences.look(["a", "b"], {"a", "b"}, 110) == [], "it came back"
    assert absences.look(["a", "b"], {"a"}, 120) == []
    absences.blind()
    assert absences.look(["a", "b"], {"a"}, 131) == [], "nobody knows what was in between"
    assert absences.audit() == []
    assert absences.look(["a", "b"], {"a"}, 141) == ["b"]
    assert absences.look(["a"], {"a"}, 141) == []
    assert absences.audit() == []


# --- the whole protocol, with servers and clients as they are meant to behave

IDS = ("a", "b", "c", "d", "e")
ids = st.sampled_from(IDS)
names = st.sampled_from(KEYS[:12])


def small(id_: str) -> Server:
    """With few points, which are quickly made."""
    return entry(id_, weight=3)


@lru_cache(maxsize=64)
def owners_of(view: View) -> Owners:
    return Owners(view)


class Moving(RuleBasedStateMachine):
    """Servers that go over to new views late, clients that hold old ones, movers that stop half way, pushes that land
    when they have been given up; one dumb dict.

    A client's answer is right when it is the value that was last stored, or a miss: a miss only when the value was
    somewhere that was lost, or had no room. Of a server that was given up but runs on, and clients that have not heard
    of it either, nothing is expected: they are a partition, and what they do is undone when it comes back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.view = advanced(joined(joined(View("test"), small("a")), small("b")))
        self.held: dict[str, dict[bytes, int]] = {"a": {}, "b": {}}
        self.epoch = {"a": self.view, "b": self.view}
        """What each server that runs has gone over to."""
        self.views = {self.view.epoch: self.view}
        self.stored: dict[bytes, int] = {}
        self.may_be_lost: set[bytes] = set()
        self.changes = {id_: Changes(most=3) for id_ in IDS}
        self.on_the_way: list[tuple[str, bytes, int, int]] = []
        """Pushes that their servers have given up: for whom, what, and under which ticket."""
        self.turn = 0

    def change(self, view: View) -> None:
        self.view = view
        self.views[view.epoch] = view

    def ask(self, view: View, id_: str) -> bool:
        """A request with this view's epoch: the server goes over to it, or refuses it."""
        if id_ not in self.epoch:
            return False
        if self.epoch[id_].epoch < view.epoch:
            self.epoch[id_] = view
        server = self.epoch[id_].server(id_)
        return self.epoch[id_].epoch == view.epoch and server is not None and server.state is not State.DOWN

    def is_cut_off(self, id_: str) -> bool:
        """Whether the others go on without it."""
        server = self.view.server(id_)
        return server is None or server.state is State.DOWN

    @rule(id_=ids)
    def join(self, id_: str) -> None:
        known = self.view.server(id_)
        if id_ in self.epoch:
            if known is None or known.state is not State.DOWN:
                return  # it runs, and has not noticed anything
            self.forget(id_)
        contents = {} if must_be_empty(self.view, id_) else self.held.get(id_, {})
        for name in set(self.held.get(id_, {})) - set(contents):
            if self.stored.get(name) == self.held[id_][name]:
                self.may_be_lost.add(name)
        self.held[id_] = contents
        self.end_pushes(id_)
        self.change(joined(self.view, small(id_)))
        self.epoch[id_] = self.view

    def forget(self, id_: str) -> None:
        for name, value in self.held[id_].items():
            if self.stored.get(name) == value:
                self.may_be_lost.add(name)
        self.held[id_] = {}

    @rule(id_=ids, crashes=st.booleans())
    def lose(self, id_: str, crashes: bool) -> None:
        """Cut off for long enough; sometimes it runs on and knows nothing of it."""
        if self.view.server(id_) is None or self.view.server(id_).state is State.DOWN:  # type: ignore[union-attr]
            return
        if sum(server.state is not State.DOWN for server in self.view.servers) == 1:
            return
        self.change(lost(self.view, id_))
        self.may_be_lost |= set(self.held.get(id_, {}))
        if crashes:
            self.epoch.pop(id_, None)
            self.end_pushes(id_)

    def end_pushes(self, id_: str) -> None:
        """A process ends with its connections; one that empties itself waits for what is being stored."""
        self.on_the_way = [push for push in self.on_the_way if push[0] != id_]
        self.changes[id_] = Changes(most=3)

    @rule(id_=ids)
    def restart(self, id_: str) -> None:
        """Killed and back at once, with an older view: what it holds is still there."""
        if id_ in self.epoch:
            self.epoch[id_] = self.views[min(self.views)] if self.epoch[id_].epoch == 0 else self.epoch[id_]

    @rule(id_=ids)
    def drain(self, id_: str) -> None:
        try:
            self.change(draining(self.view, id_))
        except ConfigError:
            return

    @rule(id_=ids)
    def keep(self, id_: str) -> None:
        if self.view.server(id_) is not None:
            self.change(kept(self.view, id_))

    @rule()
    def advance(self) -> None:
        self.change(advanced(self.view))

    @rule(id_=ids)
    def follow(self, id_: str) -> None:
        """A server hears of the newest view."""
        if id_ in self.epoch:
            self.epoch[id_] = self.view

    @rule(id_=ids, count=st.integers(0, 12))
    def move(self, id_: str, count: int) -> None:
        """Some of what is another's goes there; with all of it gone that is reported."""
        if id_ not in self.epoch or self.epoch[id_].server(id_) is None:
            return
        view = self.epoch[id_]
        if view.is_settled or view.server(id_).state is State.DOWN:  # type: ignore[union-attr]
            return
        asked = owners_of(view)
        for name in [name for name in self.held[id_] if asked.newest(name) != id_][:count]:
            target = asked.newest(name)
            if not self.ask(view, target):
                return
            self.held[target].setdefault(name, self.held[id_][name])
            del self.held[id_][name]
        if all(asked.newest(name) == id_ for name in self.held[id_]):
            self.change(finished(self.view, id_, view.epoch))

    @rule(id_=ids, name=names)
    def push_slowly(self, id_: str, name: bytes) -> None:
        """An object's new owner has been sent it, and does not come to store it before the old one gives up."""
        view = self.epoch.get(id_)
        if view is None or view.is_settled or name not in self.held[id_] or self.is_cut_off(id_):
            return
        target = owners_of(view).newest(name)
        if target != id_ and self.ask(view, target):
            self.on_the_way.append((target, name, self.held[id_][name], self.changes[target].ticket()))

    @rule(at=st.integers(0, 5))
    def land(self, at: int) -> None:
        if at < len(self.on_the_way):
            target, name, value, ticket = self.on_the_way.pop(at)
            if name not in self.held[target] and self.changes[target].allows(name, ticket):
                self.held[target][name] = value

    @rule(id_=ids)
    def calm(self, id_: str) -> None:
        """Nothing moves by this server's view."""
        if id_ in self.epoch and self.epoch[id_].is_settled:
            self.changes[id_].disarm()

    @rule(id_=ids, name=names)
    def evict(self, id_: str, name: bytes) -> None:
        """For want of room."""
        if self.held.get(id_, {}).pop(name, None) == self.stored.get(name):
            self.may_be_lost.add(name)

    @rule(name=names, back=st.integers(0, 3))
    def put(self, name: bytes, back: int) -> None:
        view = self.views[max(min(self.views), self.view.epoch - back)]
        asked = owners_of(view)
        self.turn += 1
        for older in asked.older(name):
            if not self.ask(view, older):
                return  # refused before anything was stored
            self.drop(older, name)
        newest = asked.newest(name)
        if self.ask(view, newest) and not self.is_cut_off(newest):
            self.held[newest][name] = self.stored[name] = self.turn
            self.changes[newest].note(name)
            self.may_be_lost.discard(name)

    def drop(self, id_: str, name: bytes) -> None:
        if self.held[id_].pop(name, None) == self.stored.get(name):
            self.may_be_lost.add(name)
        self.changes[id_].note(name)

    @rule(name=names, back=st.integers(0, 3))
    def delete(self, name: bytes, back: int) -> None:
        view = self.views[max(min(self.views), self.view.epoch - back)]
        asked = owners_of(view)
        for owner in (*asked.older(name), asked.newest(name)):
            if not self.ask(view, owner) or self.is_cut_off(owner):
                return
            self.drop(owner, name)
        self.stored.pop(name, None)
        self.may_be_lost.discard(name)

    @rule(name=names, back=st.integers(0, 3))
    def get(self, name: bytes, back: int) -> None:
        view = self.views[max(min(self.views), self.view.epoch - back)]
        asked = owners_of(view)
        unreachable = False
        for owner in (asked.newest(name), *asked.older(name)):
            if not self.ask(view, owner):
                unreachable = True
                if owner not in self.epoch or self.epoch[owner].epoch != view.epoch:
                    return  # it would come back with a newer view
                continue
            if self.is_cut_off(owner):
                return
            if name in self.held[owner]:
                assert self.held[owner][name] == self.stored.get(name), "an old value, or one that was deleted"
                return
        assert unreachable or name not in self.stored or name in self.may_be_lost, "lost"

    @invariant()
    def sound(self) -> None:
        assert self.view.audit() == []
        assert len(self.view.placements) <= MAX_PLACEMENTS

    def teardown(self) -> None:
        """It settles once nothing more happens, and then everything is with its owner."""
        for _ in range(60):
            for server in self.view.servers:
                if server.state is not State.DOWN and server.id not in self.epoch:
                    self.change(lost(self.view, server.id))
            self.change(advanced(self.view))
            for id_ in list(self.epoch):
                if self.view.server(id_) is not None:
                    self.epoch[id_] = self.view
            for id_ in list(self.epoch):
                self.move(id_, 100)
        assert self.view.is_settled
        asked = owners_of(self.view)
        for id_ in self.epoch:
            server = self.view.server(id_)
            if server is not None and server.state is not State.DOWN:
                assert all(asked.newest(name) == id_ for name in self.held[id_])


TestMoving = Moving.TestCase
TestMoving.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
