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
    """Most pending tokens per worker; 0: no limit. A worker with at most `1 / NEARLY_IDLE` of it takes anything."""
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


def choose(plan: Plan, tokens: int, matched: Sequence[int], loads: Sequence[int], chance: float) -> Choice | None:
    """Best candidate for a prompt of `tokens` tokens, or `None` when none has room.

    `matched` (tokens, at most `tokens`) and `loads` (pending tokens) are per candidate. Equal scores are told apart by
    `chance`, drawn uniformly from [0, 1): without that all cold prompts of an idle fleet would meet on one worker.
    """
    total = max(tokens, 1)
    norm = max(sum(loads) / len(loads), total, plan.load_floor)
    best: list[int] = []
    best_rank = (2, 0.0)
    for place, candidate in enumerate(plan.candidates):
        uncached = tokens - matched[place]
        load = loads[place]
        if load * NEARLY_IDLE > plan.budget > 0 and load + uncached > plan.budget:
            continue
        fraction = matched[place] / total
        size = tokens if plan.by_total else uncached
        fits = size < candidate.max_tokens and (
            size >= candidate.min_tokens or (not plan.by_total and fraction >= HOLDS_MOST)
        )
        if not fits and not plan.spill:
            continue
        score = candidate.bonus + plan.match_weight * fraction - plan.load_weight * (load / norm)
        rank = (0 if fits else 1, -score)
        if rank < best_rank:
            best, best_rank = [place], rank
        elif rank == best_rank:
            best.append(place)
    if not best:
        return None
    return Choice(best[int(chance * len(best))], best_rank[0] == 1)
