"""What a server counts."""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from cygnet.gcache.protocol import Item


@dataclass
class Counts:
    """Since the server was started. Answers are counted by methods, everything else under the cache's lock."""

    gets: Counter[Item] = field(default_factory=Counter)
    puts: Counter[Item] = field(default_factory=Counter)
    disk_hits: int = 0
    evicted_objects: int = 0
    """Left the memory for room, with a copy on the disk or for good."""
    dropped_objects: int = 0
    """Of these: left for good though there is a disk, because it was too slow."""
    over_quota_objects: int = 0
    """Of the evicted ones: for their own namespace's quota."""
    written_down_objects: int = 0
    bytes_got: int = 0
    bytes_put: int = 0
    torn_objects: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def got(self, item: Item, num_bytes: int) -> None:
        """An object, or a slice, was answered with this."""
        with self._lock:
            self.gets[item] += 1
            self.bytes_got += num_bytes

    def got_all(self, items: Iterable[int], num_bytes: int) -> None:
        """Objects, or slices, were answered with these, and so many bytes in all."""
        with self._lock:
            self.gets.update(map(Item, items))
            self.bytes_got += num_bytes

    def put_all(self, items: Iterable[Item]) -> None:
        """Objects that were put were answered with these."""
        with self._lock:
            self.puts.update(items)

    def put(self, item: Item) -> None:
        """An object, or a slice, that was put was answered with this."""
        with self._lock:
            self.puts[item] += 1

    def as_dict(self, more_gets: int = 0, more_bytes_got: int = 0) -> dict[str, object]:
        """By name; outcomes by theirs. `more_gets` were answered with objects, and not counted here."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        gets = self.gets + Counter({Item.OK: more_gets})
        return {
            **plain,
            "bytes_got": self.bytes_got + more_bytes_got,
            "gets": {item.name.lower(): number for item, number in gets.items()},
            "puts": {item.name.lower(): number for item, number in self.puts.items()},
        }
