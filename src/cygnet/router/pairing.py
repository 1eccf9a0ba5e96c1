"""Choices of more than one worker: prefill/decode pairs, and an encoder per media item.

The workers that take such pairs come later; what is decided here is decided for good.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cygnet.router.rendezvous import ranked
from cygnet.router.scoring import Plan, choose


@dataclass(frozen=True, slots=True)
class Pool:
    """One side of a pair: a plan, and per candidate the matched tokens and the pending tokens."""

    plan: Plan | None
    matched: Sequence[int] = ()
    loads: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """Slots of the prefill and of the decode worker, and what the prefill worker need not compute."""

    prefill: int
    decode: int
    matched_tokens: int


def choose_pair(prefill: Pool, decode: Pool, tokens: int, chance: float) -> Pair | None:
    """Both sides or neither: half a pair would leave the other half waiting for KV that nobody computes.

    The two pools have indexes of their own: what a prefill worker holds says nothing about a decode worker.
    """
    chosen = []
    for pool in (prefill, decode):
        if pool.plan is None or not pool.plan.candidates:
            return None
        choice = choose(pool.plan, tokens, pool.matched, pool.loads, chance)
        if choice is None:
            return None
        chosen.append(choice.place)
    assert prefill.plan is not None
    assert decode.plan is not None
    return Pair(
        prefill.plan.candidates[chosen[0]].slot, decode.plan.candidates[chosen[1]].slot, prefill.matched[chosen[0]]
    )


def choose_encoder(media_hash: bytes, loads: dict[str, int], cost: int, slack: float = 1.25) -> str | None:
    """Encoder (a url of `loads`, pending cost per encoder) for one media item, or `None` if there is none.

    The same media goes to the same encoder, which has its embedding cached, unless that would carry it beyond `slack`
    times the mean load (consistent hashing with bounded loads); then to the next by rendezvous hash.
    """
    if not loads:
        return None
    bound = slack * (sum(loads.values()) + cost) / len(loads)
    order = ranked(media_hash, loads)
    return next((url for url in order if loads[url] == 0 or loads[url] + cost <= bound), order[0])
