"""The choice among candidates, the policies that set it up, pairs, encoders, buckets."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cygnet.base.errors import ConfigError
from cygnet.router.buckets import parse_buckets, parse_tokens
from cygnet.router.pairing import Pair, Pool, choose_encoder, choose_pair
from cygnet.router.policies import POLICIES, Ask, Weights
from cygnet.router.rendezvous import ranked
from cygnet.router.scoring import Candidate, Choice, Plan, choose
from cygnet.router.view import Member

MEMBERS = tuple(Member(slot, f"http://worker-{slot}:8000") for slot in range(8))
WEIGHTS = Weights()
CHANCES = [place / 64 for place in range(64)]


def ask(prefix: bytes = b"prefix", session: bytes = b"", turn: int = 0, chance: float = 0.0) -> Ask:
    return Ask(prefix, session, turn, chance)


def plan_of(policy: str, asked: Ask | None = None, members: tuple[Member, ...] = MEMBERS) -> Plan:
    return POLICIES.get(policy)(asked or ask(), members, {}, WEIGHTS)


def slot_for(plan: Plan, tokens: int, matched: dict[int, int], loads: dict[int, int], chance: float = 0.0) -> int:
    slots = [candidate.slot for candidate in plan.candidates]
    choice = choose(plan, tokens, [matched.get(s, 0) for s in slots], [loads.get(s, 0) for s in slots], chance)
    assert choice is not None
    return slots[choice.place]


def test_affinity_wins_on_an_idle_fleet() -> None:
    assert slot_for(plan_of("cache_aware"), 10_000, {3: 9_000}, {}) == 3
    assert slot_for(plan_of("cache_aware"), 10_000, {3: 9_000, 4: 9_500}, {}) == 4


def test_affinity_yields_to_load() -> None:
    """prime-rl PR 3255: sessions stayed on a thrashing engine while three were idle."""
    plan = plan_of("cache_aware")
    assert slot_for(plan, 10_000, {3: 9_000}, {3: 5_000}) == 3
    assert slot_for(plan, 10_000, {3: 9_000}, {3: 500_000}) != 3
    long = 400_000
    assert slot_for(plan, long, {3: 390_000}, {3: 100_000}) == 3, "waiting for 100K costs less than computing 390K"


def test_misses_go_by_load() -> None:
    """sglang PR 14305: a miss went to one worker whatever its load."""
    loads = dict.fromkeys(range(8), 50_000) | {6: 10_000}
    assert {slot_for(plan_of("cache_aware"), 4_000, {}, loads, chance) for chance in CHANCES} == {6}


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded", "power_of_two"])
def test_ties_are_broken_at_random(policy: str) -> None:
    """Without that all cold prompts of an idle fleet go to one worker."""
    counts = Counter(slot_for(plan_of(policy, ask(chance=c)), 100, {}, {}, c * 7 % 1) for c in CHANCES)
    assert set(counts) == set(range(8))


def test_load_is_normalised_over_the_eligible_only() -> None:
    """vllm router 254: an unhealthy worker without load counted, and affinity was lost. It is no candidate here."""
    plan = plan_of("cache_aware", members=MEMBERS[1:3])
    assert slot_for(plan, 20_000, {1: 19_000}, {1: 30_000, 2: 28_000}) == 1


def test_power_of_two_draws_every_pair_evenly() -> None:
    n = len(MEMBERS)
    draws = n * (n - 1)
    pairs = Counter(
        frozenset(c.slot for c in plan_of("power_of_two", ask(chance=(i + 0.5) / draws)).candidates)
        for i in range(draws)
    )
    assert len(pairs) == draws // 2
    assert set(pairs.values()) == {2}
    assert all(len(pair) == 2 for pair in pairs)


def test_round_robin_takes_turns_whatever_the_load() -> None:
    turns = [slot_for(plan_of("round_robin", ask(turn=turn)), 100, {0: 100}, {1: 10**6}) for turn in range(16)]
    assert turns == [*range(8), *range(8)]


@pytest.mark.parametrize("policy", ["consistent_hash", "session"])
def test_hash_policies_stick_move_little_and_yield(policy: str) -> None:
    asks = [ask(prefix=b"%d" % i) for i in range(200)]
    before = [slot_for(plan_of(policy, a), 1000, {}, {}) for a in asks]
    without = tuple(member for member in MEMBERS if member.slot != 5)
    after = [slot_for(plan_of(policy, a, without), 1000, {}, {}) for a in asks]
    assert set(before) == set(range(8))
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 5), "a key moved without need"
    busy = {before[0]: 10**6}
    assert slot_for(plan_of(policy, asks[0]), 1000, {}, busy) != before[0]


def test_session_goes_before_prefix() -> None:
    slots = {slot_for(plan_of("session", ask(prefix=b"%d" % i, session=b"me")), 10, {}, {}) for i in range(50)}
    assert len(slots) == 1


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cache_aware'"):
        POLICIES.get("cache_awre")


def test_budget_leaves_no_room_but_an_idle_worker_takes_anything() -> None:
    plan = replace(plan_of("cache_aware"), budget=1000)
    assert choose(plan, 500, [0] * 8, [600] * 8, 0.0) is None
    assert slot_for(plan, 5_000, {}, dict.fromkeys(range(7), 600)) == 7
    assert slot_for(plan, 5_000, {}, {**dict.fromkeys(range(8), 600), 3: 125}) == 3, "so does one that does very little"
    assert choose(plan, 5_000, [0] * 8, [126] * 8, 0.0) is None
    assert slot_for(plan, 500, {2: 450}, dict.fromkeys(range(8), 600)) == 2, "only the uncached part needs room"


BUCKETS = parse_buckets(["short=0-64K", "middle=64K-256K", "long=256K-1M"])


def bucket_plan(**changes: object) -> Plan:
    groups = ["short", "short", "middle", "long"]
    members = [Member(slot, f"http://w{slot}:1", group) for slot, group in enumerate(groups)]
    return replace(POLICIES.get("cache_aware")(ask(), members, BUCKETS, WEIGHTS), **changes)  # type: ignore[arg-type]


def test_buckets_bind_lengths_to_groups() -> None:
    plan = bucket_plan()
    assert slot_for(plan, 10_000, {}, {}) in (0, 1)
    assert slot_for(plan, 100_000, {}, {0: 0}) == 2
    assert slot_for(plan, 600_000, {}, {}) == 3


def test_a_cached_follow_up_is_short_by_uncached_length() -> None:
    """llm-d-router 2540: 100K cached + 1K new queued behind cold long prefills when buckets went by total length."""
    assert slot_for(bucket_plan(), 101_000, {1: 100_000}, {}) == 1
    assert slot_for(bucket_plan(by_total=True), 101_000, {1: 100_000}, {}) == 2
    assert slot_for(bucket_plan(), 301_000, {3: 300_000}, {}) == 3, "the long worker keeps what it holds"


def test_spill_over() -> None:
    full = {0: 10**6, 1: 10**6}
    plan = bucket_plan(budget=200_000)
    matched, loads = [0] * 4, [full.get(slot, 0) for slot in range(4)]
    assert choose(plan, 1000, matched, loads, 0.0) == Choice(2, True)
    assert choose(replace(plan, spill=False), 1000, matched, loads, 0.0) is None
    loads[1] = 0
    assert choose(plan, 1000, matched, loads, 0.9) == Choice(1, False)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 10**6)), min_size=1, max_size=8),
    st.floats(0, 0.999),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.booleans(),
)
def test_choice_is_the_best_by_the_formula(
    workers: list[tuple[int, int]], chance: float, budget: int, waited: int, late: bool
) -> None:
    tokens = 1000
    plan = Plan(tuple(Candidate(slot) for slot in range(len(workers))), match_weight=1.5, load_floor=100, budget=budget)
    matched, loads = [m for m, _ in workers], [load for _, load in workers]
    choice = choose(plan, tokens, matched, loads, chance, waited, late)
    room = [
        p
        for p, load in enumerate(loads)
        if load * (1 if late else 8) <= budget or load + tokens - matched[p] <= budget or not budget
    ]
    norm = max(sum(loads) / len(loads), tokens, 100)
    scores = {p: 1.5 * matched[p] / tokens - loads[p] / norm for p in room}
    full = [1.5 * matched[p] / tokens - (loads[p] + waited) / norm for p in range(len(loads)) if p not in room]
    best = max(scores.values(), default=-1e9)
    aged = max(full, default=-1e9)
    holder = max(
        (1.5 * matched[p] / tokens - loads[p] / norm for p in range(len(loads)) if p not in room), default=-1e9
    )
    if choice is None:
        assert not room or (holder > best - 1e-9 and (aged > best - 1e-9 or max(loads[p] for p in room) > budget // 8))
    else:
        assert choice.place in room
        assert scores[choice.place] == pytest.approx(best)
        assert holder <= best + 1e-9 or (aged <= best + 1e-9 and loads[choice.place] <= budget // 8)


def test_a_prompt_waits_for_its_holder_but_not_for_ever() -> None:
    """To compute 100K tokens again elsewhere takes longer than the holder's budget of 64K; what it waits counts."""
    plan = Plan(tuple(Candidate(slot) for slot in range(2)), match_weight=1.5, budget=65_536)
    held, loads = [100_000, 0], [70_000, 0]
    assert choose(plan, 101_000, held, loads, 0.0) is None
    assert choose(plan, 101_000, held, loads, 0.0, waited=70_000) is None
    assert choose(plan, 101_000, held, loads, 0.0, waited=90_000) == Choice(1, False)
    assert choose(plan, 101_000, held, [70_000, 9_000], 0.0, waited=10**6) is None, "the other has work of its own"
    assert choose(plan, 101_000, [0, 0], loads, 0.0) == Choice(1, False), "there is nothing to wait for"
    assert choose(plan, 101_000, [20_000, 0], loads, 0.0) == Choice(1, False)
    assert choose(replace(plan, load_weight=0.0), 101_000, held, loads, 0.0) == Choice(1, False), "load is all the same"


def test_what_is_late_goes_to_any_worker_below_its_budget() -> None:
    plan = Plan(tuple(Candidate(slot) for slot in range(2)), match_weight=1.5, budget=10_000)
    assert choose(plan, 500_000, [0, 0], [9_000, 9_500], 0.0) is None
    assert choose(plan, 500_000, [0, 0], [9_000, 9_500], 0.0, late=True) == Choice(0, False)
    assert choose(plan, 500_000, [400_000, 0], [9_999, 0], 0.0, late=True) == Choice(0, False)
    assert choose(plan, 500_000, [400_000, 0], [10_001, 9_500], 0.0, waited=10**6, late=True) is None
    assert choose(plan, 500_000, [0, 0], [10_001, 20_000], 0.0, late=True) is None


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["short"], "needs the form"),
        (["a=0-x"], "write tokens such as 64K"),
        (["a=5-5"], "is empty"),
        (["a=0-1K", "a=1K-2K"], "given twice"),
        (["a=0-2K", "b=1K-3K"], "overlap at 1024"),
    ],
)
def test_bad_buckets_are_refused(items: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_buckets(items)


def test_token_units() -> None:
    assert [parse_tokens(text) for text in ("5", "64K", "1m")] == [5, 65536, 1 << 20]


def test_a_pair_is_whole_or_not_at_all() -> None:
    """sglang 31206: decode was dispatched while no prefill worker could be, and waited for ever."""
    prefill = Pool(plan_of("cache_aware", members=MEMBERS[:2]), [0, 900], [0, 0])
    decode = Pool(plan_of("least_loaded", members=MEMBERS[4:6]), [0, 0], [500, 100])
    assert choose_pair(prefill, decode, 1000, 0.0) == Pair(prefill=1, decode=5, matched_tokens=900)
    assert choose_pair(Pool(None), decode, 1000, 0.0) is None
    assert choose_pair(prefill, Pool(None), 1000, 0.0) is None
    assert prefill.plan is not None
    full = Pool(replace(prefill.plan, budget=10), [0, 0], [100, 100])
    assert choose_pair(full, decode, 1000, 0.0) is None


def test_a_pair_does_not_wait_for_a_prefix_for_ever() -> None:
    plan = plan_of("cache_aware", members=MEMBERS[:2])
    assert plan is not None
    holder_is_full = Pool(replace(plan, budget=1000), [900, 0], [5000, 0])
    decode = Pool(plan_of("least_loaded", members=MEMBERS[4:6]), [0, 0], [500, 100])
    assert choose_pair(holder_is_full, decode, 1000, 0.0) is None
    waited = choose_pair(holder_is_full, decode, 1000, 0.0, waited=100_000, late=True)
    assert waited == Pair(prefill=1, decode=5, matched_tokens=0)


def test_equal_media_meet_at_one_encoder_within_bounds() -> None:
    loads = dict.fromkeys((f"http://e{i}:1" for i in range(4)), 0)
    first = choose_encoder(b"cat.png", loads, 10)
    assert first is not None
    assert choose_encoder(b"cat.png", dict(reversed(loads.items())), 10) == first
    assert choose_encoder(b"cat.png", loads | {first: 1000}, 10) not in (None, first)
    assert choose_encoder(b"cat.png", {}, 10) is None
    counts = Counter(choose_encoder(b"%d" % i, loads, 10) for i in range(400))
    assert len(counts) == 4
    assert max(counts.values()) < 2 * min(counts.values())


def test_encoders_stay_near_their_fair_share() -> None:
    loads = dict.fromkeys((f"http://e{i}:1" for i in range(5)), 0)
    for i in range(1000):
        chosen = choose_encoder(b"%d" % (i % 7), loads, 1)  # only seven different images
        assert chosen is not None
        loads[chosen] += 1
    assert max(loads.values()) <= 1.25 * 200 + 1


def test_rendezvous_is_a_permutation_that_all_agree_on() -> None:
    names = [member.url for member in MEMBERS]
    order = ranked(b"key", names)
    assert sorted(order) == sorted(names)
    assert ranked(b"key", reversed(names)) == order
    assert [name for name in order if name != names[2]] == ranked(b"key", [n for n in names if n != names[2]])
