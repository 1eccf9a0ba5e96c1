"""What leaves memory first, and what is written down before it must leave. Pure.

S3-FIFO: new objects pass through a small queue; those used meanwhile, and those that come back soon after leaving it,
go to the main queue, where a use buys another round. So what is read once in passing does not push out what is used
again and again, and no use costs more than a counter.

With a lower tier, objects are *dirty* until it has them too. The oldest dirty ones are written down whenever free and
clean bytes together fall below a share of the memory; then what is cold can leave at once.
"""

from collections.abc import Iterator

from cygnet.gcache.arena import Entry
from cygnet.gcache.namespaces import Namespaces

SMALL_SHARE = 10
"""One part in so many of the bytes may be in the small queue before it gives up objects first."""
MAX_USES = 3
CLEAN_SHARE = 4
"""Free and clean bytes are one part in so many of the memory, or objects are written down."""
TRIES = 64
"""Cold objects looked at for a clean one."""


class Tiering:
    """Order of objects in memory.

    Invariants (`audit`): each object is in exactly one queue, with the bytes counted; dirty ones, and only they, wait
    to be written down; no more keys are remembered than `max_ghosts`, and none of an object that is in memory.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        has_lower_tier: bool,
        max_ghosts: int = 1 << 16,
        namespaces: Namespaces | None = None,
    ) -> None:
        self._capacity = capacity_bytes
        self._has_lower_tier = has_lower_tier
        self._max_ghosts = max_ghosts
        self.namespaces = namespaces or Namespaces({})
        """Told of each object that comes and leaves."""
        self._small: dict[Entry, None] = {}
        self._main: dict[Entry, None] = {}
        self._ghosts: dict[bytes, None] = {}
        self._dirty: dict[Entry, None] = {}
        self._small_bytes = self._main_bytes = self._clean_bytes = 0

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def add(self, entry: Entry) -> None:
        """An object has come to memory, clean or not."""
        entry.uses = 0
        if self.namespaces.any:
            self.namespaces.add(entry)
        if entry.key in self._ghosts:
            del self._ghosts[entry.key]
            self._main[entry] = None
            self._main_bytes += entry.num_bytes
        else:
            self._small[entry] = None
            self._small_bytes += entry.num_bytes
        if entry.clean:
            self._clean_bytes += entry.num_bytes
        elif self._has_lower_tier:
            self._dirty[entry] = None

    def use(self, entry: Entry) -> None:
        """It was read, put again or touched."""
        if entry.uses < MAX_USES:
            entry.uses += 1

    def remove(self, entry: Entry) -> None:
        """It has left memory."""
        if self.namespaces.any:
            self.namespaces.remove(entry)
        if entry in self._small:
            del self._small[entry]
            self._small_bytes -= entry.num_bytes
        else:
            del self._main[entry]
            self._main_bytes -= entry.num_bytes
        if entry.clean:
            self._clean_bytes -= entry.num_bytes
        self._dirty.pop(entry, None)

    def evicted(self, entry: Entry) -> None:
        """It has left memory for want of room: if it comes back soon, it was worth keeping."""
        self.remove(entry)
        self._ghosts[entry.key] = None
        if len(self._ghosts) > self._max_ghosts:
            del self._ghosts[next(iter(self._ghosts))]

    def victims(self) -> Iterator[Entry]:
        """What to give up, coldest first, pinned ones left out. Each is yielded once, and may be given up at once."""
        seen: set[Entry] = set()
        rounds = MAX_USES + 1
        small_looks, main_looks = len(self._small), rounds * len(self._main)
        while True:
            in_small, in_main = bool(self._small) and small_looks > 0, bool(self._main) and main_looks > 0
            if not in_small and not in_main:
                return
            if in_small and (not in_main or SMALL_SHARE * self._small_bytes > self._total):
                small_looks -= 1
                entry = next(iter(self._small))
                main_looks += rounds  # it may be promoted
            else:
                main_looks -= 1
                entry = next(iter(self._main))
            if entry in seen or entry.pins:
                self._again(entry)
            elif entry.uses:
                entry.uses = 0 if entry in self._small else entry.uses - 1
                self._again(entry, promoted=True)
            else:
                seen.add(entry)
                yield entry
                if entry in self._small or entry in self._main:
                    self._again(entry)

    def victim(self) -> Entry | None:
        """What to give up first: one of the coldest, and of these one that a lower tier has, if any."""
        first = None
        for tries, entry in enumerate(self.victims(), 1):
            if entry.clean or not self._has_lower_tier:
                return entry
            first = first or entry
            if tries == TRIES:
                break
        return first

    def to_write_down(self, free_bytes: int, limit_bytes: int) -> list[Entry]:
        """Dirty objects to write to the lower tier now, oldest first, of up to `limit_bytes` (or one)."""
        return self._oldest_dirty(self._capacity // CLEAN_SHARE - free_bytes - self._clean_bytes, limit_bytes)

    def all_dirty(self, limit_bytes: int) -> list[Entry]:
        """The oldest dirty objects of up to `limit_bytes` (or one), whether there is need or not: for a shutdown."""
        return self._oldest_dirty(limit_bytes, limit_bytes)

    def _oldest_dirty(self, wanted_bytes: int, limit_bytes: int) -> list[Entry]:
        chosen: list[Entry] = []
        num_bytes = 0
        for entry in self._dirty:
            if num_bytes >= wanted_bytes or (chosen and num_bytes + entry.num_bytes > limit_bytes):
                break
            chosen.append(entry)
            num_bytes += entry.num_bytes
        return chosen

    def written_down(self, entry: Entry) -> None:
        """The lower tier has it now."""
        if entry in self._dirty:
            del self._dirty[entry]
            entry.clean = True
            self._clean_bytes += entry.num_bytes

    def lost_copy(self, entry: Entry) -> None:
        """The lower tier has given up its copy of a clean object."""
        entry.clean = False
        self._clean_bytes -= entry.num_bytes
        self._dirty[entry] = None

    def postpone(self, entry: Entry) -> None:
        """The lower tier did not take it: it is tried again after the others."""
        if entry in self._dirty:
            del self._dirty[entry]
            self._dirty[entry] = None

    @property
    def _total(self) -> int:
        return self._small_bytes + self._main_bytes

    def _again(self, entry: Entry, *, promoted: bool = False) -> None:
        """To the end of its queue, or of the main one."""
        if entry in self._small:
            del self._small[entry]
            if not promoted:
                self._small[entry] = None
                return
            self._small_bytes -= entry.num_bytes
            self._main_bytes += entry.num_bytes
        else:
            del self._main[entry]
        self._main[entry] = None

    def audit(self, entries: list[Entry]) -> list[str]:
        """All discrepancies with `entries`, which are in memory."""
        faults = []
        queued = [*self._small, *self._main]
        if len(queued) != len(set(queued)) or set(queued) != set(entries):
            faults.append(f"{len(queued)} objects are in the queues, {len(entries)} in memory, or not the same")
        if self._small_bytes != sum(entry.num_bytes for entry in self._small):
            faults.append("bytes of the small queue are wrong")
        if self._main_bytes != sum(entry.num_bytes for entry in self._main):
            faults.append("bytes of the main queue are wrong")
        if self._clean_bytes != sum(entry.num_bytes for entry in queued if entry.clean):
            faults.append("clean bytes are wrong")
        dirty = {entry for entry in queued if not entry.clean} if self._has_lower_tier else set()
        if set(self._dirty) != dirty:
            faults.append("what waits to be written down is not what is dirty")
        if len(self._ghosts) > self._max_ghosts:
            faults.append(f"{len(self._ghosts)} keys are remembered, at most {self._max_ghosts} should be")
        if any(entry.key in self._ghosts for entry in queued):
            faults.append("an object in memory is remembered as gone")
        return faults + self.namespaces.audit(entries)
