"""Routing policies. One is a function from what is known of a request to a `Plan`; it registers itself under a name.

Policies neither see matches nor loads: the state applies the plan to them in one atomic step, so that two routers can't
both send work to a worker that was idle a moment ago.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cygnet.base.registry import Registry
from cygnet.router.rendezvous import ranked
from cygnet.router.scoring import Candidate, Plan
from cygnet.router.view import Member


@dataclass(frozen=True, slots=True)
class Ask:
    """What a policy may go by."""

    prefix: bytes
    """Key of the prompt's first block; of all its text when it is shorter than a block."""
    session: bytes
    """The caller's session (header or `user` field); empty: none."""
    turn: int
    """How many requests this router placed before."""
    chance: float
    """Uniform in [0, 1)."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Settings of all policies."""

    match_weight: float = 1.5
    load_floor: int = 8192
    budget: int = 0
    request_tokens: int = 64
    by_total: bool = False
    spill: bool = True


class Policy(Protocol):
    """Plan for a request, given at least one member. Pure; `limits` are the length limits per member's group."""

    def __call__(self, ask: Ask, members: Sequence[Member], limits: "Limits", weights: Weights) -> Plan: ...


Limits = dict[str, tuple[int, int]]
"""Group -> (shortest, longest + 1) tokens of the work it is meant for. A group without limits takes all."""

POLICIES: Registry[Policy] = Registry("routing policy")

STEADY = frozenset({"cache_aware", "least_loaded"})
"""Policies whose plan depends on members, limits and weights only, so that it may be kept."""


def _plan(
    members: Sequence[Member],
    limits: Limits,
    weights: Weights,
    *,
    bonuses: Sequence[float] | None = None,
    match_weight: float = 0.0,
    load_weight: float = 1.0,
) -> Plan:
    candidates = []
    for place, member in enumerate(members):
        low, high = limits.get(member.group, (0, 1 << 53))
        candidates.append(Candidate(member.slot, bonuses[place] if bonuses else 0.0, low, high))
    return Plan(
        candidates=tuple(candidates),
        match_weight=match_weight,
        load_weight=load_weight,
        load_floor=weights.load_floor,
        budget=weights.budget,
        request_tokens=weights.request_tokens,
        by_total=weights.by_total,
        spill=weights.spill,
    )


@POLICIES.register("cache_aware")
def cache_aware(ask: Ask, members: Sequence[Member], limits: Limits, weights: Weights) -> Plan:
    """Where the prefix is, unless that worker is too busy; without a match, where the load is least."""
    return _plan(members, limits, weights, match_weight=weights.match_weight)


@POLICIES.register("least_loaded")
def least_loaded(ask: Ask, members: Sequence[Member], limits: Limits, weights: Weights) -> Plan:
    """Fewest pending tokens."""
    return _plan(members, limits, weights)


@POLICIES.register("power_of_two")
def power_of_two(ask: Ask, members: Sequence[Member], limits: Limits, weights: Weights) -> Plan:
    """The less loaded of two drawn at random."""
    n = len(members)
    if n > 2:
        pair = int(ask.chance * n * (n - 1))
        first, second = divmod(pair, n - 1)
        members = (members[first], members[second + (second >= first)])
    return _plan(members, limits, weights)


@POLICIES.register("round_robin")
def round_robin(ask: Ask, members: Sequence[Member], limits: Limits, weights: Weights) -> Plan:
    """Each in turn. Every router instance counts for itself."""
    first = ask.turn % len(members)
    bonuses = [float(len(members) - (place - first) % len(members)) for place in range(len(members))]
    return _plan(members, limits, weights, bonuses=bonuses, load_weight=0.0)


def sticky(key: bytes, members: Sequence[Member], limits: Limits, weights: Weights) -> Plan:
    """The first by rendezvous hash of `key`, yielding to load as `cache_aware` does; then the second, and so on."""
    order = {url: rank for rank, url in enumerate(ranked(key, (member.url for member in members)))}
    bonuses = [weights.match_weight / (1 << min(order[member.url], 30)) for member in members]
    return _plan(members, limits, weights, bonuses=bonuses)


@POLICIES.register("consistent_hash")
def consistent_hash(ask: Ask, members: Sequence[Member], limits: Limits, weights: Weights) -> Plan:
    """Equal beginnings of prompts to the same worker, without any state."""
    return sticky(ask.prefix, members, limits, weights)


@POLICIES.register("session")
def session(ask: Ask, members: Sequence[Member], limits: Limits, weights: Weights) -> Plan:
    """Equal sessions to the same worker; requests without one go by their beginning."""
    return sticky(ask.session or ask.prefix, members, limits, weights)
