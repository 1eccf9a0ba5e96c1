"""How soon something cached is used again, learnt from what became of others like it.

Ages fall into octaves. For each kind and octave the model counts what was used again at that age and what was given up
at that age unused; of those that got that far, the share used again is the chance of it.

    age        1 s     2 s     4 s     8 s     16 s            64 s
    used        |  40   |  25   |  10   |   4   |      ...
    given up    |   0   |   1   |   1   |   3   |

`rate` is then the best uses per second that keeping it for some time brings: the maximum, over how long to keep it, of
(chance of use until then) / (time it takes up room until then). Where use gets less likely with age, that ranks by age
as LRU does. Under a cyclic load, where all come again after the same time, what has just been used is the least worth:
it comes again last.
"""

OCTAVES = 32
"""The first ends at 1 ms, the last begins after 12 days."""
SHIFT = 20
"""2**20 ns is the unit of age, about a millisecond."""
UNIT_S = 2**SHIFT / 1e9
WIDTHS = tuple(((1 << octave) - ((1 << octave) >> 1)) * UNIT_S for octave in range(OCTAVES))
"""Of the octaves, in seconds."""
REFRESH = 64
"""Observations of a kind between two computations of its rates."""
MEMORY = 4096
"""Observations of a kind after which the old ones count half."""


class ReuseModel:
    """Counts of uses and losses by kind and age, and the rates that follow from them.

    Invariants (`audit`): counts are not negative; all rates are positive and finite.
    """

    def __init__(self, num_kinds: int) -> None:
        self._used = [[0.0] * OCTAVES for _ in range(num_kinds)]
        self._lost = [[0.0] * OCTAVES for _ in range(num_kinds)]
        self._since_refresh = [0] * num_kinds
        self._rates = [rates(used, lost) for used, lost in zip(self._used, self._lost, strict=True)]

    def used(self, kind: int, age_ns: int) -> None:
        """Something of `kind` was used again, `age_ns` after its use before."""
        self._count(self._used, kind, age_ns)

    def lost(self, kind: int, age_ns: int) -> None:
        """Something of `kind` was evicted, `age_ns` after its last use."""
        self._count(self._lost, kind, age_ns)

    def rate(self, kind: int, age_ns: int) -> float:
        """Expected uses per second of something of `kind` and of this age. O(1)."""
        age = age_ns >> SHIFT
        octave = min(age.bit_length(), OCTAVES - 1)
        here = self._rates[kind][octave]
        if octave == OCTAVES - 1:
            return here
        start = (1 << octave) >> 1
        part = (age - start) / max(1, start)
        return here + part * (self._rates[kind][octave + 1] - here)

    def _count(self, counts: list[list[float]], kind: int, age_ns: int) -> None:
        counts[kind][min((age_ns >> SHIFT).bit_length(), OCTAVES - 1)] += 1
        self._since_refresh[kind] += 1
        if self._since_refresh[kind] < REFRESH:
            return
        self._since_refresh[kind] = 0
        used, lost = self._used[kind], self._lost[kind]
        if sum(used) + sum(lost) > MEMORY:
            used[:], lost[:] = [n / 2 for n in used], [n / 2 for n in lost]
        self._rates[kind] = rates(used, lost)

    def audit(self) -> list[str]:
        """All counts and rates that cannot be."""
        faults = [
            f"kind {kind} counts less than nothing"
            for kind, (used, lost) in enumerate(zip(self._used, self._lost, strict=True))
            if min(used) < 0 or min(lost) < 0
        ]
        return faults + [
            f"kind {kind} has rates {row}" for kind, row in enumerate(self._rates) if not all(0 < r < 1e12 for r in row)
        ]


def rates(used: list[float], lost: list[float]) -> list[float]:
    """Uses per second at the start of each octave.

    What was lost says nothing about later ages. There, and wherever nothing is known, half of what is left is taken to
    be used per octave: hopeful, so that some of it is kept long enough to find out.
    """
    chances, left = [0.0] * OCTAVES, 0.0
    for octave in range(OCTAVES - 1, -1, -1):
        left += used[octave] + lost[octave]
        chances[octave] = (used[octave] + 0.5) / (left - lost[octave] / 2 + 1.0)
    octaves = [(width, chance, 1 - chance / 2, 1 - chance) for width, chance in zip(WIDTHS, chances, strict=True)]
    found = []
    for first in range(OCTAVES):
        best = use = time = 0.0
        unused = 1.0
        for width, chance, taken, kept in octaves[first:]:
            time += unused * width * taken
            use += unused * chance
            unused *= kept
            if use / time > best:
                best = use / time
        found.append(best)
    return found
