"""Rates follow from what was used and what was lost at which age."""

from itertools import pairwise
from random import Random

import pytest

from cygnet.kv.reuse_model import MEMORY, OCTAVES, REFRESH, SHIFT, ReuseModel, rates

SECOND = 10**9


def learnt(uses: list[tuple[int, int]], losses: list[tuple[int, int]] = [], kinds: int = 1) -> ReuseModel:  # noqa: B006
    """A model that saw (kind, age) uses and losses, many times over."""
    model = ReuseModel(kinds)
    for _ in range(REFRESH):
        for kind, age_ns in uses:
            model.used(kind, age_ns)
        for kind, age_ns in losses:
            model.lost(kind, age_ns)
    assert model.audit() == []
    return model


def test_knowing_nothing_the_rate_falls_with_age_all_the_way() -> None:
    model = ReuseModel(2)
    ages = [SECOND * step // 7 for step in range(1, 2000, 13)]
    for kind in (0, 1):
        assert all(model.rate(kind, old) < model.rate(kind, young) for young, old in pairwise(ages))


def test_what_is_used_soon_or_never_loses_worth_with_age() -> None:
    random = Random(0)
    uses = [(0, int(SECOND * random.paretovariate(0.7))) for _ in range(200)]
    model = learnt(uses, [(0, 3000 * SECOND)] * 30)
    ages = [SECOND << step for step in range(2, 11)]
    assert all(model.rate(0, old) < model.rate(0, young) for young, old in pairwise(ages))


def test_what_comes_again_after_a_fixed_time_gains_worth_until_then() -> None:
    """A cyclic load: what was just used comes again last, so it is worth least; past its time it is worth little."""
    model = learnt([(0, 100 * SECOND)], [(0, SECOND)])
    ages = [SECOND * age for age in (1, 4, 16, 60)]
    assert all(model.rate(0, old) > model.rate(0, young) for young, old in pairwise(ages))
    assert model.rate(0, 400 * SECOND) < model.rate(0, 60 * SECOND) / 4


def test_kinds_are_learnt_apart() -> None:
    model = learnt([(1, 10 * SECOND)] * 9 + [(0, 10 * SECOND)], [(0, 60 * SECOND)] * 9 + [(1, 60 * SECOND)], kinds=2)
    assert model.rate(1, 5 * SECOND) > 3 * model.rate(0, 5 * SECOND)


def test_rates_are_uses_per_second() -> None:
    """Nine of ten are used within the octave, a tenth is lost just then: 0.9 uses in about half an octave each."""
    used, lost = [0.0] * OCTAVES, [0.0] * OCTAVES
    used[11], lost[11] = 9e6, 1e6
    width_s = (1 << 10 << SHIFT) / 1e9
    chance = 9e6 / (10e6 - 0.5e6)
    assert rates(used, lost)[11] == pytest.approx(chance / (width_s * (1 - chance / 2)), rel=1e-3)


def test_old_observations_fade() -> None:
    model = ReuseModel(1)
    for _ in range(2 * MEMORY):
        model.lost(0, SECOND)
    before = model.rate(0, SECOND // 2)
    for _ in range(4 * MEMORY):
        model.used(0, SECOND)
    assert model.rate(0, SECOND // 2) > 2 * before
    assert sum(model._used[0] + model._lost[0]) <= MEMORY + REFRESH


def test_a_wrong_count_is_found() -> None:
    model = ReuseModel(2)
    model._used[1][3] = -1.0
    model._rates[0][2] = 0.0
    assert [fault[:17] for fault in model.audit()] == ["kind 1 counts les", "kind 0 has rates "]


@pytest.mark.parametrize("seed", range(20))
def test_rates_are_positive_and_finite_whatever_was_seen(seed: int) -> None:
    random, model = Random(seed), ReuseModel(3)
    for _ in range(random.randrange(1000)):
        note = random.choice((model.used, model.lost))
        note(random.randrange(3), 1 << random.randrange(63))
    assert model.audit() == []
    ages = [0, *(1 << power for power in range(63))]
    assert all(0 < model.rate(kind, age_ns) < 1e12 for kind in range(3) for age_ns in ages)
