"""Which worker holds which prefix: block key -> bitmap of worker slots."""

from collections.abc import Callable, Iterable, Sequence

from cygnet.router.ladder import chain_length, key_at, rungs, step_at, stored_depths

MIN_ENTRIES = 4096
SHORT = 4
"""Up to this many blocks one probe after the other is quicker than bisection."""


class PrefixIndex:
    """Prefixes that were routed to workers, aged, in bounded memory. A worker is a *slot*, a bit of the bitmaps.

    Entries live in two generations. New ones go into the young one; when that holds half of `max_entries` it becomes
    the old one, and what was old is dropped. An insert that continues a prefix found old or with less than 7/8 of its
    time left renews the whole chain.

    Invariants (`audit`):
    - at most `max_entries` entries, each with a bitmap that is not empty;
    - along a chain that was inserted, an entry is never older than one below it: neither does it expire earlier, nor is
      it in an older generation. Hence presence falls monotonously with depth, and bisection is right.
    Bits of a slot that has left may stay until their entry is renewed or expires, at most `ttl_ns`; matches are asked
    for slots that live. So a slot may be given away again after `ttl_ns`.
    """

    def __init__(self, ttl_ns: int, max_entries: int) -> None:
        if ttl_ns < 1 or max_entries < MIN_ENTRIES:
            raise ValueError(f"an index needs a ttl_ns of 1 or more and max_entries of {MIN_ENTRIES} or more")
        self.ttl_ns = ttl_ns
        self.max_entries = max_entries
        self._young: dict[bytes, tuple[int, int]] = {}  # key -> (bitmap, expiry)
        self._old: dict[bytes, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def _get(self, key: bytes, now: int) -> int:
        """Bitmap of `key`; 0 if unknown or expired."""
        entry = self._young.get(key) or self._old.get(key)
        return entry[0] if entry is not None and entry[1] > now else 0

    def match(self, chain: bytes, slots: Sequence[int], now: int) -> list[int]:
        """Per slot, the deepest prefix of `chain` (in blocks) that it holds. O(log blocks) per group of slots that
        part.
        """
        return match_depths(chain, slots, lambda key: self._get(key, now))

    def insert(self, chain: bytes, slot: int, matched: int, live: int, now: int) -> None:
        """Note that `slot` will hold `chain`, of which it was found to hold `matched` blocks.

        `live` is the bitmap of the slots in use; bits of others are cleared where entries are renewed.
        """
        num_blocks = chain_length(chain)
        if not num_blocks:
            return
        entry = self._young.get(key_at(chain, matched)) if matched else None
        renew = entry is None or entry[1] - now < self.ttl_ns * 7 // 8
        if matched == num_blocks and not renew:
            return
        depths = stored_depths(num_blocks)[: self.max_entries // 2]
        expiry = now + self.ttl_ns
        if entry is not None and not renew:
            depths = [depth for depth in depths if depth > matched]
            expiry = entry[1]
        if len(self._young) + len(depths) > self.max_entries // 2:
            self._old, self._young = self._young, {}
            if not renew:  # what the new entries continue has just become old
                depths, expiry = stored_depths(num_blocks)[: self.max_entries // 2], now + self.ttl_ns
        bit = 1 << slot
        for depth in depths:
            key = key_at(chain, depth)
            self._young[key] = ((self._get(key, now) & live) | bit, expiry)
            self._old.pop(key, None)

    def audit(self, chains: Iterable[bytes] = (), now: int = 0) -> list[str]:
        """Discrepancies, recomputed from scratch; `chains` are inserted ones whose order of ages is checked."""
        found = [f"{len(self)} entries, at most {self.max_entries}"] if len(self) > self.max_entries else []
        found += [f"{key.hex()} is in both generations" for key in self._young.keys() & self._old.keys()]
        for generation in (self._young, self._old):
            found += [f"{key.hex()} has an empty bitmap" for key, (bitmap, _) in generation.items() if not bitmap]
        for chain in chains:
            above: tuple[int, int] | None = None
            for depth in rungs(chain_length(chain)):
                key = key_at(chain, depth)
                entry = self._young.get(key) or self._old.get(key)
                age = (0, 0) if entry is None else (2 if key in self._young else 1, entry[1])
                if above is not None and (age[0] > above[0] or age[1] > above[1]) and age[1] > now:
                    found.append(f"depth {depth} of a chain outlives the one above: {age} after {above}")
                above = age
        return found


def match_depths(chain: bytes, slots: Sequence[int], get: Callable[[bytes], int]) -> list[int]:
    """Deepest prefix of `chain` per slot, given bitmaps by key; presence falls with depth on the ladder.

    Bisects between rungs where bitmaps differ, then looks for an exact end between the deepest rung hit and the next.
    The Lua script of the shared state does the same, step by step.
    """
    num_blocks = chain_length(chain)
    depths = [0] * len(slots)
    if not num_blocks:
        return depths
    bits = [1 << slot for slot in slots]
    wanted = sum(bits)
    if num_blocks <= SHORT:
        for depth in range(1, num_blocks + 1):
            bitmap = get(key_at(chain, depth)) & wanted
            if not bitmap:
                break
            for place, bit in enumerate(bits):
                if bitmap & bit:
                    depths[place] = depth
        return depths
    ladder = rungs(num_blocks)

    def note(bitmap: int, depth: int) -> None:
        for place, bit in enumerate(bits):
            if bitmap & bit and depths[place] < depth:
                depths[place] = depth

    def probe(rung: int) -> int:
        bitmap = get(key_at(chain, ladder[rung])) & wanted
        if bitmap:
            note(bitmap, ladder[rung])
        return bitmap

    first = probe(0)
    if not first:
        return depths
    spans = [(0, first, len(ladder) - 1, probe(len(ladder) - 1))]
    while spans:
        low, at_low, high, at_high = spans.pop()
        if high - low > 1 and at_low != at_high:
            middle = (low + high) // 2
            at_middle = probe(middle)
            spans.append((low, at_low, middle, at_middle))
            spans.append((middle, at_middle, high, at_high))
    deepest = max(depths)
    if deepest < num_blocks:
        for depth in range(min(num_blocks, deepest + step_at(deepest) - 1), deepest, -1):
            bitmap = get(key_at(chain, depth)) & wanted
            if bitmap:
                note(bitmap, depth)
                break
    return depths
