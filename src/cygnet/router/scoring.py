"""The one choice that every policy and every kind of state makes: the best of some candidates.

    score = bonus + match_weight * matched_fraction - load_weight * normalised_load

`matched_fraction` is the part of the prompt's tokens that the worker holds. `normalised_load` is its pending tokens
over the largest of: the mean of the candidates' loads, the prompt's own tokens, and `load_floor`. So a load is judged
against what is usual, small loads do not count, and affinity yields when waiting costs more than the match saves.

A policy says what is eligible and the weights (`Plan`); the state, which alone knows matches and loads, applies them in
one step. `runtime/lua/route.lua` computes the same in the same order of operations; a test compares the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may serve the request."""

    slot: int
    bonus: float = 0.0
    min_tokens: int = 0
    """Shortest work it is meant for."""
    max_tokens: int = 1 << 53
    """Work of this many tokens or more is not for it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy wants of the state. `candidates` is not empty."""

    candidates: tuple[Candidate, ...]
    match_weight: float = 0.0
    load_weight: float = 1.0
    load_floor: int = 8192
    """Tokens."""
    budget: int = 0
    """Most pending tokens per worker; 0: no limit. A worker with at most `1 / NEARLY_IDLE` of it takes anything, and
    one below it takes what is late."""
    request_tokens: int = 64
    """Load that a request adds besides its uncached tokens."""
    by_total: bool = False
    """Length limits apply to all of the prompt, not to the part that the worker lacks."""
    spill: bool = True
    """When no candidate of the right length has room, take another."""


class Choice(Struct, frozen=True, gc=False):
    """Place in `Plan.candidates`, and whether it is one of another length bucket."""

    place: int
    spilled: bool


NEARLY_IDLE = 8
"""Running requests count for a little each; without this a prompt longer than the budget would wait until none runs."""

HOLDS_MOST = 0.5
"""From this matched fraction on a worker meant for longer work keeps a prompt although little is left to compute."""


def choose(
    plan: Plan,
    tokens: int,
    matched: Sequence[int],
    loads: Sequence[int],
    chance: float,
    waited: int = 0,
    late: bool = False,
) -> Choice | None:
    """Best candidate for a prompt of `tokens` tokens, or `None` when none has room, or when it should wait for one.

    `matched` (tokens, at most `tokens`) and `loads` (pending tokens) are per candidate. Equal scores are told apart by
    `chance`, drawn uniformly from [0, 1): without that all cold prompts of an idle fleet would meet on one worker.

    A candidate without room is worth waiting for while its score is above that of all that have room: computing a long
    prefix again elsewhere takes longer than the budget of the worker that holds it. `waited`, the tokens that the
    prompt's wait makes up for, ends that: it counts as load of those without room, once the best that has room is
    nearly idle. A worker that is not has work of its own waiting, and under overload, where all have waited long,
    prompts that were computed anew at each other's workers would make the overload worse.
    """
    total = max(tokens, 1)
    norm = max(sum(loads) / len(loads), total, plan.load_floor)
    best: list[int] = []
    best_rank = (2, 0.0)
    idle = plan.budget // NEARLY_IDLE
    enough = plan.budget if late else idle
    holder, aged_holder = float("-inf"), float("-inf")
    for place, candidate in enumerate(plan.candidates):
        uncached = tokens - matched[place]
        load = loads[place]
        fraction = matched[place] / total
        size = tokens if plan.by_total else uncached
        fits = size < candidate.max_tokens and (
            size >= candidate.min_tokens or (not plan.by_total and fraction >= HOLDS_MOST)
        )
        if not fits and not plan.spill:
            continue
        score = candidate.bonus + plan.match_weight * fraction - plan.load_weight * (load / norm)
        if plan.budget > 0 and load > enough and load + uncached > plan.budget:
            if fits and plan.load_weight and score > holder:
                holder, aged_holder = score, score - plan.load_weight * (waited / norm)
            continue
        rank = (0 if fits else 1, -score)
        if rank < best_rank:
            best, best_rank = [place], rank
        elif rank == best_rank:
            best.append(place)
    if not best:
        return None
    place = best[int(chance * len(best))]
    if holder > -best_rank[1] and (aged_holder > -best_rank[1] or loads[place] > idle):
        return None
    return Choice(place, best_rank[0] == 1)
