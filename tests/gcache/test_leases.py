"""Leases end when they are given back, when their connection ends, and when their time is over."""

from cygnet.gcache.arena import Entry
from cygnet.gcache.leases import Leases
from cygnet.gcache.record import full_key, layout


def entry(number: int) -> Entry:
    key = full_key(b"", bytes((number,)))
    return Entry(key, layout(len(key), 400), 400, 0, number, 0, 0)


def test_the_three_ends_of_a_lease() -> None:
    leases = Leases(100, 1 << 20)
    entries = [entry(i) for i in range(5)]
    ids = [leases.grant(one, owner=i % 2, now_ns=10 * i) for i, one in enumerate(entries)]
    assert None not in ids
    assert leases.release(ids[1] or 0, owner=0) is None, "another's"
    assert leases.release(ids[1] or 0, owner=1) is entries[1]
    assert leases.release(ids[1] or 0, owner=1) is None, "twice"
    assert leases.release_all(owner=1) == [entries[3]]
    assert list(leases.expired(99)) == []
    assert list(leases.expired(100)) == [entries[0]]
    assert list(leases.expired(1000)) == [entries[2], entries[4]]
    assert leases.leased_bytes == len(leases) == 0
    assert leases.audit() == []


def test_no_more_is_leased_than_allowed() -> None:
    size = entry(0).num_bytes
    leases = Leases(100, 2 * size)
    first = leases.grant(entry(0), 0, 0)
    assert first is not None
    assert leases.grant(entry(1), 0, 0) is not None
    assert leases.grant(entry(2), 0, 0) is None
    leases.release(first, 0)
    assert leases.grant(entry(2), 0, 0) is not None
    assert leases.audit() == []


def test_the_audit_finds_faults() -> None:
    leases = Leases(100, 1 << 20)
    leases.grant(entry(0), 0, 50)
    leases.grant(entry(0), 0, 0)
    leases.leased_bytes = 1
    assert len(leases.audit()) == 2
