"""What of a server's objects goes to whom, in which portions and how fast. Pure; times are nanoseconds."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from cygnet.gcache.membership import Owners

T = TypeVar("T")

PORTION_BYTES = 2 << 20
PORTION_KEYS = 256
"""Of objects that are sent together, and pinned for it. One object may be larger."""
OPEN_BYTES = 32 << 20
"""Of portions that are being put together."""


def portions(
    items: Iterable[T], kind_of: Callable[[T], Hashable], num_bytes_of: Callable[[T], int]
) -> Iterator[list[T]]:
    """`items` by kind, in portions. Keeps back `OPEN_BYTES` at most, and one item."""
    open_: dict[Hashable, tuple[list[T], int]] = {}
    total = 0
    for item in items:
        kind, size = kind_of(item), num_bytes_of(item)
        portion, so_far = open_.pop(kind, ([], 0))
        if portion and so_far + size > PORTION_BYTES:
            yield portion
            total -= so_far
            portion, so_far = [], 0
        portion.append(item)
        total += size
        if so_far + size >= PORTION_BYTES or len(portion) == PORTION_KEYS:
            yield portion
            total -= so_far + size
        else:
            open_[kind] = portion, so_far + size
        while total > OPEN_BYTES:
            longest_untouched = next(iter(open_))
            portion, so_far = open_.pop(longest_untouched)
            yield portion
            total -= so_far
    for portion, _ in open_.values():
        yield portion


def goes_to(owners: Owners, me: str, key: bytes, root: int) -> str | None:
    """Who is to have an object that `me` has; `None`: `me`."""
    owner = owners.newest(key, root)
    return None if owner == me else owner


class Throttle:
    """How long to wait, so that on the whole no more than `bytes_per_s` are moved. 0: no limit.

    After a pause it catches up by no more than a second's worth.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0

    def wait_ns(self, num_bytes: int, now_ns: int) -> int:
        """So many bytes are to be moved: how long to wait before that."""
        if not self._bytes_per_s:
            return 0
        begin = max(self._free_at, now_ns - 1_000_000_000)
        self._free_at = begin + num_bytes * 1_000_000_000 // self._bytes_per_s
        return max(0, begin - now_ns)
