"""Quotas, times to live and sizes by namespace: the rules alone, and in a server."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.base.errors import ConfigError
from cygnet.gcache.arena import Entry
from cygnet.gcache.limits import Limits, NamespaceLimits
from cygnet.gcache.namespaces import NO_LIMITS, Namespaces, parse_limits
from cygnet.gcache.record import full_key, layout
from cygnet.kv.store import Outcome
from support.gcache import MIB, client, key, server

LIMITED = {
    b"a": NamespaceLimits(max_bytes=4 * 1024),
    b"ab*": NamespaceLimits(max_bytes=10_000_000),
    b"abc*": NamespaceLimits(ttl_ms=5),
}


def test_which_limits_count() -> None:
    namespaces = Namespaces(LIMITED)
    for name, expected in (
        (b"a", LIMITED[b"a"]),
        (b"ab", LIMITED[b"ab*"]),
        (b"abb", LIMITED[b"ab*"]),
        (b"abcd", LIMITED[b"abc*"]),
        (b"b", NO_LIMITS),
        (b"", NO_LIMITS),
    ):
        assert namespaces.limits_of(full_key(name, b"x")) is expected
    assert Namespaces({b"*": LIMITED[b"a"]}).limits_of(full_key(b"", b"x")) is LIMITED[b"a"]
    assert not Namespaces({}).any


@pytest.mark.parametrize(("own", "asked", "given_"), [(0, 0, 0), (0, 7, 7), (5, 0, 5), (5, 7, 5), (5, 3, 3)])
def test_times_to_live(own: int, asked: int, given_: int) -> None:
    assert NamespaceLimits(ttl_ms=own).ttl_of(asked) == given_


def test_limits_are_read() -> None:
    assert parse_limits("a:b:quota=1GiB,value=2K,ttl=1.5") == (b"a:b", NamespaceLimits(1 << 30, 2048, 1500))
    assert parse_limits("x*:ttl=3") == (b"x*", NamespaceLimits(ttl_ms=3000))
    for wrong in ("a", "a:", "a:quota", "a:quota=x", "a:ttl=0", "a:size=1", "a*b:ttl=1", "n" * 256 + ":ttl=1"):
        with pytest.raises(ConfigError):
            parse_limits(wrong)


def entries(sizes: list[int]) -> Iterator[Entry]:
    for number, size in enumerate(sizes):
        name = full_key(b"a", b"%d" % number)
        yield Entry(name, layout(len(name), size), size, 0, number, 0, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 900), st.booleans(), st.integers(0, 1)), max_size=12), st.integers(1, 12))
def test_what_goes_makes_room_and_is_no_more_than_needed(found: list[tuple[int, bool, int]], granules: int) -> None:
    namespaces = Namespaces(LIMITED)
    all_ = list(entries([size for size, _, _ in found]))
    for entry, (_, pinned, uses) in zip(all_, found, strict=True):
        entry.pins, entry.uses = int(pinned), uses
        namespaces.add(entry)
    free = [entry for entry in all_ if not entry.pins]
    used, quota, needed = sum(entry.num_bytes for entry in all_), 4 * 1024, granules * 512
    excess = namespaces.excess(full_key(b"a", b"new"), needed)
    possible = used - sum(entry.num_bytes for entry in free) + needed <= quota
    assert (excess is not None) == (possible or used + needed <= quota)
    assert namespaces.audit(all_) == []
    if not excess:
        return
    assert set(excess) <= set(free)
    left = used - sum(entry.num_bytes for entry in excess) + needed
    assert left <= quota
    assert left + excess[-1].num_bytes > quota, "the last one was needed"
    if any(entry.uses for entry in excess):
        assert all(entry in excess for entry in free if not entry.uses), "what was never read goes first"
    for entry in excess:
        namespaces.remove(entry)
    assert namespaces.audit([entry for entry in all_ if entry not in excess]) == []
    assert namespaces.excess(full_key(b"a", b"new"), needed) == []


def test_what_is_read_outlives_what_is_not() -> None:
    namespaces = Namespaces(LIMITED)
    all_ = list(entries([300] * 8))
    for entry in all_:
        namespaces.add(entry)
    all_[0].uses = 1
    assert namespaces.excess(full_key(b"a", b"x"), 512) == [all_[1]]
    assert namespaces.excess(full_key(b"b", b"x"), 1 << 40) == [], "another namespace"


@pytest.mark.parametrize("count", [1, 40])
def test_a_quota_costs_its_own_namespace_only(count: int) -> None:
    """Whether objects are put one by one or in batches."""
    limits = Limits(namespaces={b"small": NamespaceLimits(max_bytes=MIB, max_value_bytes=MIB // 2)})
    with server(16 * MIB, limits=limits) as running, client(running.port) as sdk:
        others = [key(number, b"other") for number in range(40)]
        assert set(sdk.batch_put(others, [b"x" * 100_000] * 40)) == {Outcome.OK}
        mine = [key(number, b"small") for number in range(40)]
        for first in range(0, 40, count):
            some = mine[first : first + count]
            assert set(sdk.batch_put(some, [b"y" * 100_000] * len(some))) == {Outcome.OK}
            assert running.cache.memory.namespaces.stats()["namespace_bytes"]["small"] <= MIB
        assert all(sdk.batch_exists(others))
        there = sdk.batch_exists(mine)
        if count == 1:
            assert there == [False] * 30 + [True] * 10
        assert sum(there) == 10  # of a batch, which come over several connections, the last to come
        assert sdk.put(key("large", b"small"), bytes(MIB // 2 + 1)) is Outcome.FULL
        assert sdk.put(key("large", b"other"), bytes(MIB // 2 + 1)) is Outcome.OK
        stats = sdk.stats()[running.service.info.server_id]
        assert (stats["over_quota_objects"], stats["namespace_objects"]) == (30, {"small": 10})
        assert sdk.clear(b"small") == 10
        assert running.cache.memory.namespaces.stats() == {"namespace_bytes": {}, "namespace_objects": {}}
        assert sdk.audit() == []


def test_a_quota_counts_what_an_earlier_process_has_left() -> None:
    limits = Limits(namespaces={b"*": NamespaceLimits(max_bytes=MIB)})
    with server(16 * MIB) as running, client(running.port) as sdk:
        keys = [key(number) for number in range(30)]
        assert set(sdk.batch_put(keys, [b"x" * 100_000] * 30)) == {Outcome.OK}
        running.close()
        options = {**vars(running.options), "limits": limits, "port": 0}
        again = type(running)(type(running.options)(**options))
        try:
            with client(again.port) as other:
                assert other.put(key(100), b"y") is Outcome.OK
                assert sum(other.batch_exists(keys)) == 10
                assert other.audit() == []
        finally:
            again.close()


def test_a_namespaces_time_to_live() -> None:
    now = 10**18
    limits = Limits(namespaces={b"short": NamespaceLimits(ttl_ms=1000)})
    with server(limits=limits) as running, client(running.port) as sdk:
        running.cache.memory.wall_ns = lambda: now
        keys = [key(number, b"short") for number in range(3)]
        sdk.put(keys[0], b"1")
        sdk.batch_put(keys[1:], [b"2", b"3"], ttl_ms=5000)
        sdk.put(key(4), b"4")
        now += 999 * 10**6
        assert all(sdk.batch_exists(keys))
        now += 10**6
        assert not any(sdk.batch_exists(keys))
        assert sdk.exists(key(4))
