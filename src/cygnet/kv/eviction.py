"""What to evict first.

The prefix tree asks a policy for the worth of what it could give up; the least worth goes first. Candidates are drawn
at random, a fixed number per decision, so a decision costs O(1) however much is cached.

Worth is (tokens saved x expected uses per second) / blocks. How soon something of its kind and age is used again is
learnt from what became of others (`reuse_model.py`). Whatever ranks strictly by age has a cliff instead: under a cyclic
load slightly larger than the pool it always evicts what is needed next, and hits nothing, hence learns nothing. So the
policy `value` also leaves something to chance: among near peers every one may go.
"""

from collections.abc import Iterator
from math import log
from random import Random
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from cygnet.base.registry import Registry


class Candidate(Struct, frozen=True, gc=False):
    """Something evictable, as a policy sees it. A struct, as many are made per decision."""

    saved_tokens: float
    """Tokens that would have to be computed again if it were gone and asked for; what a lower tier has counts less."""
    num_blocks: int
    """Blocks that evicting it frees."""
    rate: float
    """Expected uses per second from now on, as others of its kind and age were used."""
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
    """(expected saving x likelihood of reuse) / size, with odds inverse to the fourth power of that."""
    return candidate.saved_tokens * candidate.rate / candidate.num_blocks * chance**0.25


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
