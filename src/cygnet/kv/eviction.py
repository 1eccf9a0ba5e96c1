"""What to evict first.

The prefix tree asks a policy for the worth of what it could give up; the least worth goes first. Candidates are drawn
at random, a fixed number per decision, so a decision costs O(1) however much is cached.

Chance has a second part to play. Whatever ranks strictly by age has a cliff: under a cyclic load slightly larger than
the pool it always evicts what is needed next, and hits nothing. Nor does drawing 16 candidates help: the oldest of 16
is nearly always among the oldest tenth (with a tenth too little room, 86% of the hits are lost; the sampled set only
pretends to be random). So the policy `value` evicts with *odds* inverse to worth: something ten times as old as the
rest is ten times as likely to go, while among peers every one may go, and about what does not fit is lost.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from random import Random
from typing import Generic, Protocol, TypeVar

from cygnet.base.registry import Registry


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something evictable, as a policy sees it."""

    saved_tokens: int
    """Tokens that would have to be computed again if it were gone and asked for."""
    num_blocks: int
    """Blocks that evicting it frees."""
    hits: int
    """How often it was reused."""
    age_ns: int
    """Time since it was last used."""


class EvictionPolicy(Protocol):
    """Worth of keeping a candidate; lower is evicted earlier. Pure.

    `chance` is drawn anew for each candidate from the exponential distribution with mean 1. Of candidates with worths
    `w`, the one with the least `w * chance` is each with probability proportional to `1 / w`.
    """

    def __call__(self, candidate: Candidate, chance: float) -> float: ...


EVICTION_POLICIES: Registry[EvictionPolicy] = Registry("eviction policy")


@EVICTION_POLICIES.register("value")
def value(candidate: Candidate, chance: float) -> float:
    """(expected saving x likelihood of reuse) / size. Likelihood falls with age and rises with past reuse."""
    age_s = candidate.age_ns / 1e9
    worth = candidate.saved_tokens * (1.0 + min(candidate.hits, 8)) / (candidate.num_blocks * (1.0 + age_s))
    return worth * chance


@EVICTION_POLICIES.register("lru")
def lru(candidate: Candidate, chance: float) -> float:
    """Least recently used first. Has a cliff; to compare with."""
    return -float(candidate.age_ns)


T = TypeVar("T")


class SampledSet(Generic[T]):
    """A set with O(1) add, remove and random sampling (seeded, so that runs repeat).

    Invariant (`audit`): `_index[x]` is the place of `x` in `_items`.
    """

    def __init__(self, seed: int = 0) -> None:
        self._items: list[T] = []
        self._index: dict[T, int] = {}
        self._random = Random(seed)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._index

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T) -> None:
        """Add; no change if present."""
        if item not in self._index:
            self._index[item] = len(self._items)
            self._items.append(item)

    def discard(self, item: T) -> None:
        """Remove; no change if absent."""
        place = self._index.pop(item, None)
        if place is None:
            return
        last = self._items.pop()
        if place < len(self._items):
            self._items[place] = last
            self._index[last] = place

    def chance(self) -> float:
        """A draw from the exponential distribution with mean 1."""
        return -log(1.0 - self._random.random())

    def sample(self, count: int) -> list[T]:
        """Up to `count` distinct items; all of them when there are no more than that."""
        if len(self._items) <= count:
            return list(self._items)
        places = {int(self._random.random() * len(self._items)) for _ in range(count)}
        return [self._items[place] for place in sorted(places)]

    def audit(self) -> list[str]:
        """All discrepancies between the items and their index."""
        faults = [
            f"item {place} is not indexed there" for place, x in enumerate(self._items) if self._index.get(x) != place
        ]
        if len(self._index) != len(self._items):
            faults.append(f"{len(self._items)} items, {len(self._index)} indexed")
        return faults
