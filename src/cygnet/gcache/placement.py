"""Which server owns a key: weighted consistent hashing, computed by every client for itself. Pure.

Servers form *fault groups*. A key has a *root*, the session or the beginning of the prefix that it belongs to: the root
chooses the group, and the key a server in it. A dead server therefore touches only the sessions of its group, and of
these a share. A root is cut into coarse ranges, so that one giant session is not one lump: each range chooses anew.

The layout is frozen: any release, in any language, must find the same owner (`tests/gcache/test_placement.py`).

    point of a server, in its group's ring     xxh3_64(u32 length | id | u32 ordinal)      ordinal < POINTS * weight
    point of a group, in the ring of groups    the same with the group's name and the sum of its servers' weights
    place of a root                            xxh3_64("root" | u32 length | root | u32 range)
    place of a key                             xxh3_64("key." | key)

Integers are little-endian, hashes have seed 0. The owner of a place is the first point at or after it, cyclically; of
equal points that of the lesser name counts. A key without a root is its own root, with range 0.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from struct import Struct

from xxhash import xxh3_64_intdigest

from cygnet.base.errors import ConfigError

POINTS = 4
"""Points of a ring per unit of weight."""
DEFAULT_WEIGHT = 100
MAX_WEIGHT = 10_000
BLOCKS_PER_RANGE = 4096
"""Blocks of one sequence that stay in one fault group: 64K tokens, with blocks of 16."""

_U32 = Struct("<I")


@dataclass(frozen=True, order=True)
class Member:
    """A server as placement sees it. `id` names it for ever, whatever address it has."""

    id: str
    group: str = ""
    weight: int = DEFAULT_WEIGHT
    """0: owns nothing."""


def range_of(block: int) -> int:
    """The range that the `block`-th block of a sequence belongs to."""
    return block // BLOCKS_PER_RANGE


def root_place(root: bytes, range_: int) -> int:
    """Where a root's range falls in the ring of groups."""
    return xxh3_64_intdigest(b"root" + _U32.pack(len(root)) + root + _U32.pack(range_))


def key_place(key: bytes) -> int:
    """Where a key falls in its group's ring."""
    return xxh3_64_intdigest(b"key." + key)


class Ring:
    """Names on a circle, each at as many points as it weighs. O(points) to build, O(log points) to ask."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        points: dict[int, str] = {}
        for name in sorted(weights, reverse=True):  # where two points are equal, the lesser name remains
            head = _U32.pack(len(name.encode())) + name.encode()
            for ordinal in range(POINTS * weights[name]):
                points[xxh3_64_intdigest(head + _U32.pack(ordinal))] = name
        self._places = sorted(points)
        self._owners = [points[place] for place in self._places]

    def __bool__(self) -> bool:
        return bool(self._places)

    def owner(self, place: int) -> str:
        """Who owns `place`."""
        at = bisect_left(self._places, place)
        return self._owners[at if at < len(self._owners) else 0]


class Placement:
    """Owners of keys among `members`, for one epoch. Immutable.

    Raises `ConfigError` for a name used twice, a weight out of range, and when nobody has any weight.
    """

    def __init__(self, members: Iterable[Member], epoch: int = 0) -> None:
        self.members = tuple(sorted(members))
        self.epoch = epoch
        groups: dict[str, dict[str, int]] = {}
        seen: set[str] = set()
        for member in self.members:
            if member.id in seen:
                raise ConfigError(f"gcache server {member.id!r} is listed twice; each needs a name of its own")
            if not 0 <= member.weight <= MAX_WEIGHT:
                raise ConfigError(f"gcache server {member.id!r}: weight {member.weight} is not in 0..{MAX_WEIGHT}")
            seen.add(member.id)
            if member.weight:
                groups.setdefault(member.group, {})[member.id] = member.weight
        if not groups:
            raise ConfigError("no gcache server with a weight above 0; list at least one")
        self._rings = {group: Ring(weights) for group, weights in groups.items()}
        self._groups = Ring({group: sum(weights.values()) for group, weights in groups.items()})
        self._only = next(iter(seen)) if len(seen) == 1 else None
        self._only_ring = next(iter(self._rings.values())) if len(self._rings) == 1 else None

    def group(self, root: bytes, range_: int = 0) -> str:
        """The fault group of a root's range."""
        return self._groups.owner(root_place(root, range_))

    def owner(self, key: bytes, root: bytes = b"", range_: int = 0) -> str:
        """Id of the server that owns `key`."""
        return self.owner_at(key, root_place(root, range_) if root else 0)

    def owner_at(self, key: bytes, place: int) -> str:
        """The same, for the place of a root's range (`root_place`); 0: it has no root."""
        if self._only is not None:
            return self._only
        ring = self._only_ring
        if ring is None:
            ring = self._rings[self._groups.owner(place or root_place(key, 0))]
        return ring.owner(key_place(key))
