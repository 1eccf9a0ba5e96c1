"""The simulated store: what it holds against a dumb model, when it answers by hand."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.kv.store import Group, Namespace, ObjectKey, Outcome, object_key
from cygnet.kv.transfers import Cancel, Fetch, Fetched, Found, Lookup, Put, Stored
from cygnet.sim.events import EventLoop, Priority
from cygnet.sim.store import SimServer, SimStore, StoreLink, StoreWorker

SPACE = Namespace(b"n" * 16)
SIZES = (100, 30)
US, MS = 1000, 1_000_000


def key(name: int, group: Group = Group.FULL) -> ObjectKey:
    return object_key(SPACE, group, name.to_bytes(16, "little"))


@settings(deadline=None)
@given(
    capacity=st.integers(0, 500),
    ttl_ns=st.sampled_from([0, 20]),
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.sampled_from(Group), st.integers(0, 9)), max_size=60),
)
def test_a_server_is_a_cache_by_last_use(capacity: int, ttl_ns: int, calls: list[tuple[bool, int, Group, int]]) -> None:
    server, model, now_ns = SimServer(capacity, ttl_ns, SIZES), [], 0
    for puts, name, group, later in calls:
        now_ns += later
        alive = [entry for entry in model if not ttl_ns or now_ns - entry[1] < ttl_ns]
        there = any(k == key(name, group) for k, _ in alive)
        if puts:
            fits = SIZES[group] <= capacity
            assert server.put(key(name, group), now_ns) == fits
        else:
            fits = there
            assert server.use(key(name, group), now_ns) == there
        if fits:
            model = [entry for entry in model if entry[0] != key(name, group)] + [(key(name, group), now_ns)]
        while sum(SIZES[k[16]] for k, _ in model) > capacity:
            del model[0]
        assert server.audit() == []
        for k, used_ns in model:
            assert server.holds(k, now_ns) == (not ttl_ns or now_ns - used_ns < ttl_ns)
        assert len(server) == len(model)


class Line:
    """A store of 10,000 bytes behind 1 us and 1 GB/s, and its answers with their times."""

    def __init__(self, servers: int = 1) -> None:
        self.loop, self.answers = EventLoop(), list[tuple[int, Any]]()
        self.store = SimStore(servers, 10_000, 0, SIZES)
        link = StoreLink(US, 1e9)
        self.worker = StoreWorker(
            self.store, link, self.loop, lambda result, now_ns: self.answers.append((now_ns, result))
        )

    def at(self, time_ns: int, *commands: Any) -> None:
        self.loop.at(time_ns, Priority.TURN, lambda now_ns: self.worker.submit(commands, now_ns))

    def run(self) -> list[tuple[int, Any]]:
        self.loop.run()
        assert self.worker.audit() == self.store.audit() == []
        return self.answers


FULL3, SWA1 = tuple(key(n) for n in range(3)), (key(2, Group.SWA),)
GROUPS = (Group.FULL,) * 3


def test_what_was_put_is_found_and_fetched_in_its_time() -> None:
    line = Line()
    line.at(0, Put(1, FULL3, GROUPS, (0, 1, 2)), Put(2, SWA1, (Group.SWA,), (0,)))
    line.at(5 * US, Lookup(3, 0, (*FULL3, key(3)), 0, tuple(key(n, Group.SWA) for n in range(4)), 2))
    line.at(5 * US, Fetch(4, (*FULL3, key(3)), (Group.FULL,) * 4, (0, 1, 2, 3)), Fetch(5, FULL3[:1], GROUPS[:1], (4,)))
    ok = Outcome.OK
    assert line.run() == [
        (US + 300, Stored(1, (ok,) * 3)),  # 1 us and 300 bytes
        (2 * US + 330, Stored(2, (ok,))),  # after the first one
        (6 * US, Found(3, 3, 1, (False, True))),
        (6 * US + 300, Fetched(4, (ok, ok, ok, Outcome.MISS))),
        (7 * US + 400, Fetched(5, (ok,))),
    ]
    assert (line.worker.bytes_read, line.worker.bytes_written) == (400, 330)


def test_what_has_not_begun_in_time_or_was_called_off_is_not_begun() -> None:
    line = Line()
    line.at(0, Put(1, FULL3, GROUPS, (0, 1, 2)))
    line.at(
        2 * US, *(Fetch(n, FULL3, GROUPS, (0, 1, 2), deadline) for n, deadline in ((2, None), (3, 3 * US), (4, None)))
    )
    line.at(2 * US + 1, Cancel(4), Cancel(2), Fetch(5, FULL3[:1], GROUPS[:1], (3,)))
    late = (Outcome.TIMED_OUT,) * 3
    assert line.run()[1:] == [
        (3 * US + 300, Fetched(3, late)),
        (3 * US + 300, Fetched(4, late)),
        (3 * US + 300, Fetched(2, (Outcome.OK,) * 3)),  # had begun
        (4 * US + 400, Fetched(5, (Outcome.OK,))),
    ]


def test_objects_lie_with_their_owners() -> None:
    line = Line(servers=4)
    keys = tuple(key(n) for n in range(60))
    line.at(0, Put(1, keys, (Group.FULL,) * 60, tuple(range(60))))
    line.run()
    held = [len(server) for server in line.store.servers.values()]
    assert sum(held) == 60
    assert max(held) <= 25  # each has room for 25
    assert min(held) > 0
