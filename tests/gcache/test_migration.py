"""Portions have everything once, and are bounded; what is let through keeps to the rate."""

from collections import Counter
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from cygnet.gcache.membership import Owners, Server, View, advanced, joined
from cygnet.gcache.migration import OPEN_BYTES, PORTION_BYTES, PORTION_KEYS, Throttle, goes_to, portions

SECOND = 1_000_000_000


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from((0, 1, 1000, PORTION_BYTES // 3, 2 * PORTION_BYTES))))
)
def test_portions_have_everything_once_and_are_of_one_kind(items: list[tuple[str, int]]) -> None:
    numbered = list(enumerate(items))
    made = list(portions(numbered, lambda one: one[1][0], lambda one: one[1][1]))
    assert Counter(one for portion in made for one in portion) == Counter(numbered)
    for portion in made:
        assert len({kind for _, (kind, _) in portion}) == 1
        assert len(portion) == 1 or sum(size for _, (_, size) in portion) <= PORTION_BYTES
        assert portion == sorted(portion)


def test_many_small_ones_are_cut_by_their_number() -> None:
    lengths = [len(portion) for portion in portions(range(3 * PORTION_KEYS + 1), lambda _: 0, lambda _: 1)]
    assert lengths == [PORTION_KEYS] * 3 + [1]


@given(st.integers(1, 1 << 30), st.lists(st.tuples(st.integers(0, 1 << 26), st.integers(0, 5 * SECOND)), max_size=50))
def test_whoever_waits_as_told_keeps_to_the_rate(rate: int, steps: list[tuple[int, int]]) -> None:
    """Over any stretch of time: no more than a second's worth, and what was let through last, over the rate."""
    throttle, now = Throttle(rate), 10**15
    let: list[tuple[int, int]] = []
    for num_bytes, pause in steps:
        now += pause
        now += throttle.wait_ns(num_bytes, now)
        let.append((now, num_bytes))
    for first in range(len(let)):
        for last in range(first, len(let)):
            between = sum(num_bytes for _, num_bytes in let[first:last])
            assert between <= rate * ((let[last][0] - let[first][0]) / SECOND + 1) * 1.0001 + 1 + last


def test_what_is_kept_back_is_bounded_however_many_kinds_there_are() -> None:
    taken, given = 0, 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(500):
            taken += 1
            yield number

    for portion in portions(items(), lambda number: number, lambda _: 1 << 20):
        given += len(portion)
        assert (taken - given) << 20 <= OPEN_BYTES + (1 << 20)
    assert given == 500


def test_without_a_rate_nobody_waits() -> None:
    assert Throttle(0).wait_ns(1 << 40, 5) == 0


def test_objects_go_where_the_newest_placement_says() -> None:
    view = View("test")
    for id_ in "ab":
        view = joined(view, Server(id_, "127.0.0.1", 1))
    owners = Owners(advanced(view))
    for number in range(100):
        key = b"\x01n%d" % number
        owner = owners.newest(key)
        assert goes_to(owners, owner, key, 0) is None
        assert goes_to(owners, "a" if owner == "b" else "b", key, 0) == owner
