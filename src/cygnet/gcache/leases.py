"""Who reads the arena in place, and until when it is promised to stay. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from cygnet.gcache.arena import Entry


class Lease(NamedTuple):
    """A promise that `entry`, pinned for it, stays in place."""

    entry: Entry
    owner: int
    """The connection that may give it back."""
    until_ns: int


class Leases:
    """Leases of one length. Time is monotonic.

    Invariants (`audit`): they lie in the order of their ends; `leased_bytes` is the sum over leases, and never more
    than `max_bytes`.
    """

    def __init__(self, length_ns: int, max_bytes: int) -> None:
        self._length_ns = length_ns
        self._max_bytes = max_bytes
        self._leases: dict[int, Lease] = {}
        self._next = 0
        self.leased_bytes = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def free_bytes(self) -> int:
        """How much more may be leased."""
        return self._max_bytes - self.leased_bytes

    def grant(self, entry: Entry, owner: int, now_ns: int, elsewhere_bytes: int = 0) -> int | None:
        """Id of a new lease, for an entry that the caller has pinned.

        `None` when too much is leased already, `elsewhere_bytes` among it.
        """
        leased_bytes = self.leased_bytes + entry.num_bytes
        if leased_bytes + elsewhere_bytes > self._max_bytes:
            return None
        self._next = lease = self._next + 1
        self._leases[lease] = Lease(entry, owner, now_ns + self._length_ns)
        self.leased_bytes = leased_bytes
        return lease

    def release(self, lease: int, owner: int) -> Entry | None:
        """End a lease; returns the entry to unpin, `None` when it had ended, or is another's."""
        found = self._leases.get(lease)
        if found is None or found.owner != owner:
            return None
        return self._end(lease)

    def release_all(self, owner: int) -> list[Entry]:
        """End all leases of a connection; returns the entries to unpin."""
        mine = [lease for lease, found in self._leases.items() if found.owner == owner]
        return [self._end(lease) for lease in mine]

    def expired(self, now_ns: int) -> Iterator[Entry]:
        """End the leases that are over; yields the entries to unpin."""
        while self._leases:
            lease, found = next(iter(self._leases.items()))
            if found.until_ns > now_ns:
                return
            yield self._end(lease)

    def _end(self, lease: int) -> Entry:
        entry = self._leases.pop(lease).entry
        self.leased_bytes -= entry.num_bytes
        return entry

    def audit(self) -> list[str]:
        """All discrepancies."""
        ends = [found.until_ns for found in self._leases.values()]
        faults = [] if ends == sorted(ends) else ["leases are out of order"]
        if self.leased_bytes != sum(found.entry.num_bytes for found in self._leases.values()):
            faults.append("leased bytes are wrong")
        if self.leased_bytes > self._max_bytes:
            faults.append(f"{self.leased_bytes} bytes are leased, at most {self._max_bytes} should be")
        return faults
