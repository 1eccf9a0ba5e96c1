"""Owners are the same for ever, loads follow weights, and changes move no more than they must."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from cygnet.base.errors import ConfigError
from cygnet.gcache.placement import BLOCKS_PER_RANGE, Member, Placement, Ring, key_place, range_of, root_place

KEYS = [b"\x02ns" + i.to_bytes(8, "little") for i in range(20_000)]


def owners(members: list[Member], keys: list[bytes] = KEYS) -> list[str]:
    placement = Placement(members)
    return [placement.owner(key) for key in keys]


def moved(before: list[str], after: list[str]) -> float:
    return sum(a != b for a, b in zip(before, after, strict=True)) / len(before)


GOLDEN_MEMBERS = [
    Member("alpha", "rack-1", 100),
    Member("beta", "rack-1", 50),
    Member("gamma", "rack-2", 100),
    Member("delta", "rack-2", 300),
    Member("epsilon", "rack-2", 0),
]
GOLDEN = {
    (b"\x00a", b"", 0): "gamma",
    (b"\x02nskey", b"", 0): "delta",
    (b"\x02nskey", b"session-1", 0): "delta",
    (b"\x02nskey", b"session-1", 1): "alpha",
    (b"\x02nskey", b"session-2", 0): "alpha",
    (b"\x02nsother", b"session-3", 7): "delta",
}


def test_the_layout_is_frozen() -> None:
    """These values are the format: clients of any release and language must agree with servers filled by any other."""
    assert key_place(b"\x02nskey") == 15190165381885568350
    assert root_place(b"session-1", 0) == 6876429670177468465
    assert root_place(b"session-1", 1) == 3508274221048354920
    placement = Placement(GOLDEN_MEMBERS)
    assert {case: placement.owner(*case) for case in GOLDEN} == GOLDEN


def test_another_process_finds_the_same_owners() -> None:
    """Nothing depends on the interpreter's own hashing."""
    code = (
        "from cygnet.gcache.placement import Member, Placement\n"
        "p = Placement([Member(f's{i}', f'g{i % 3}', 50 + i) for i in range(9)])\n"
        "print([p.owner(bytes((1, 65, i)), b'root%d' % (i % 7), i % 2) for i in range(200)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_the_order_of_members_does_not_matter() -> None:
    members = [Member(f"s{i}", f"g{i % 2}") for i in range(6)]
    assert owners(members) == owners(members[::-1])


def test_load_follows_weight() -> None:
    members = [Member("a", weight=100), Member("b", weight=100), Member("c", weight=200), Member("d", weight=0)]
    count = Counter(owners(members))
    assert count["d"] == 0
    assert count["a"] + count["b"] == pytest.approx(len(KEYS) / 2, rel=0.15)
    eight = Counter(owners([Member(f"s{i}") for i in range(8)]))
    assert max(eight.values()) < 1.15 * len(KEYS) / 8


@pytest.mark.parametrize("count", [1, 3, 8, 31])
def test_one_more_server_takes_its_share_and_nothing_else_moves(count: int) -> None:
    before = owners([Member(f"s{i}") for i in range(count)])
    after = owners([Member(f"s{i}") for i in range(count + 1)])
    assert all(b == f"s{count}" for a, b in zip(before, after, strict=True) if a != b)
    assert moved(before, after) < 1.2 / (count + 1)


def test_a_growing_weight_only_attracts() -> None:
    """A new server ramps up: what it has got at a lower weight stays with it."""
    light = owners([Member("a"), Member("b"), Member("new", weight=20)])
    heavy = owners([Member("a"), Member("b"), Member("new", weight=100)])
    assert all(b == "new" for a, b in zip(light, heavy, strict=True) if a != b)
    assert "new" in light


def test_a_server_touches_the_sessions_of_its_group_only() -> None:
    members = [Member(f"s{i}", f"g{i // 4}") for i in range(16)]
    placement = Placement(members)
    touched = set()
    for session in range(400):
        root = session.to_bytes(4, "little")
        names = {placement.owner(key, root) for key in KEYS[:64]}
        assert {int(name[1:]) // 4 for name in names} == {int(placement.group(root)[1:])}
        assert len(names) == 4, "a session's blocks spread over its whole group"
        if "s5" in names:
            touched.add(session)
    assert 0.15 < len(touched) / 400 < 0.35


def test_one_giant_session_is_no_lump() -> None:
    """A million tokens in blocks of 16 span several groups, and neighbours stay together."""
    placement = Placement([Member(f"s{i}", f"g{i}") for i in range(8)])
    groups = [placement.group(b"giant", range_of(block)) for block in range(0, 1 << 16, 64)]
    assert len(set(groups)) > 4
    assert range_of(BLOCKS_PER_RANGE - 1) == 0
    assert len(set(groups[: BLOCKS_PER_RANGE // 64])) == 1


def test_equal_points_fall_to_the_lesser_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cygnet.gcache.placement.xxh3_64_intdigest", lambda data: data[-4])
    assert {Ring({"b": 1, "a": 1}).owner(place) for place in range(6)} == {"a"}


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([], "at least one"),
        ([Member("a", weight=0)], "at least one"),
        ([Member("a"), Member("a", "g")], "'a' is listed twice"),
        ([Member("a", weight=-1)], "weight -1"),
        ([Member("a", weight=10_001)], "weight 10001"),
    ],
)
def test_impossible_members_are_refused(members: list[Member], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Placement(members)
