"""How unevenly experts are asked: what the most loaded accelerator of a replica has to do beside the mean.

Two things make loads differ. Some experts are chosen more often than others, which evens out where an accelerator has
many of them; and a step's tokens are few, which evens out where they are many. With `E` experts on `G` accelerators and
`n` choices in a step, an accelerator's load has about the relative variance

    (1 - 1/G) (c^2 G/E + G/n)          c: relative deviation of the experts' popularity

and the largest of `G` such loads lies about as many deviations above the mean as the largest of `G` normal draws.
"""

from dataclasses import dataclass
from functools import cache
from math import sqrt
from statistics import NormalDist

from cygnet.sim.model_facts import MoeFacts

BALANCE = 0.85
"""Mean over largest load that the article measures in prefill, without balancing (§4.3)."""


@cache
def largest_of(count: int) -> float:
    """Mean of the largest of `count` standard normal draws (Blom's approximation, within 0.03); 0 of one."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


@dataclass(frozen=True)
class ExpertBalance:
    """Where the popularity's deviation is taken from: a balance that was measured."""

    balance: float = BALANCE
    """Mean load of the accelerators over the largest, in steps of many tokens."""
    ep: int = 0
    """Accelerators it was measured on, 2 or more; 0: as many as there are."""

    def spread(self, moe: MoeFacts, ep: int) -> float:
        """Relative deviation of the experts' popularity."""
        measured = self.ep or ep
        if measured < 2:
            return 0.0
        deviation = (1 / self.balance - 1) / largest_of(measured)
        return deviation / sqrt((1 - 1 / measured) * measured / moe.num_experts)

    def imbalance(self, moe: MoeFacts, ep: int, tokens: int) -> float:
        """The largest load over the mean, in a step of `tokens` tokens on `ep` accelerators; from 1 to `ep`."""
        if ep < 2 or tokens < 1:
            return 1.0
        variance = (1 - 1 / ep) * (self.spread(moe, ep) ** 2 * ep / moe.num_experts + ep / (tokens * moe.top_k))
        return min(float(ep), 1.0 + largest_of(ep) * sqrt(variance))
