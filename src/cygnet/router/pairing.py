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
    spilled: bool = False
    """The prefill worker is not of the prompt's length bucket."""


def choose_pair(
    prefill: Pool, decode: Pool, tokens: int, chance: float, waited: int = 0, late: bool = False
) -> Pair | None:
    """Both sides or neither: half a pair would leave the other half waiting for KV that nobody computes.

    The two pools have indexes of their own: what a prefill worker holds says nothing about a decode worker. `waited`
    and `late` are as in `choose`; only the prefill side has prefixes worth waiting for.
    """
    if prefill.plan is None or decode.plan is None or not prefill.plan.candidates or not decode.plan.candidates:
        return None
    first = choose(prefill.plan, tokens, prefill.matched, prefill.loads, chance, waited, late)
    second = choose(decode.plan, tokens, decode.matched, decode.loads, chance)
    if first is None or second is None:
        return None
    return Pair(
        prefill.plan.candidates[first.place].slot,
        decode.plan.candidates[second.place].slot,
        prefill.matched[first.place],
        first.spilled,
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
