"""Registered workers, each on a slot of its own per incarnation."""

from collections.abc import Iterable

from msgspec.structs import replace

from cygnet.router.view import Roster, WorkerRecord

MAX_SLOTS = 1024


class SlotTable:
    """Assigns slots. A worker that restarts or leaves gives its slot up; what the index says of that slot is then
    void, and the slot is given away again only after `quarantine` (same unit as `now`), when no index entry can have
    its bit.

    Invariants (`audit`): a slot has at most one worker and a worker one slot; a slot is in use, in quarantine, or never
    was used; `version` counts the changes, of which a registration's new end is none.
    """

    def __init__(self, quarantine: int) -> None:
        self._quarantine = quarantine
        self._workers: dict[int, WorkerRecord] = {}
        self._freed: dict[int, int] = {}
        self._next = 0
        self._live = 0
        self._version = 0

    @property
    def roster(self) -> Roster:
        """All workers now."""
        return Roster(0, self._version, dict(self._workers))

    @property
    def live(self) -> int:
        """Bitmap of the slots in use."""
        return self._live

    def slot_of(self, url: str) -> int | None:
        """Slot of a worker."""
        return next((slot for slot, record in self._workers.items() if record.url == url), None)

    def join(self, record: WorkerRecord, now: int) -> int | None:
        """Register, or change what is registered. Returns the slot; `None` when all are taken."""
        slot = self.slot_of(record.url)
        if slot is not None:
            known = self._workers[slot]
            self._workers[slot] = record
            if replace(known, expires_at=record.expires_at) != record:
                self._version += 1
            return slot
        free = min((slot for slot, at in self._freed.items() if now - at >= self._quarantine), default=None)
        if free is not None:
            del self._freed[free]
        elif self._next < MAX_SLOTS:
            free = self._next
            self._next += 1
        else:
            return None
        self._workers[free] = record
        self._live |= 1 << free
        self._version += 1
        return free

    def leave(self, url: str, now: int) -> int | None:
        """Deregister; returns the slot it had."""
        slot = self.slot_of(url)
        if slot is not None:
            del self._workers[slot]
            self._live &= ~(1 << slot)
            self._freed[slot] = now
            self._version += 1
        return slot

    def restart(self, url: str, slot: int, now: int) -> int | None:
        """The worker on `slot` has lost its memory: move it to a new slot, which is returned.

        When it is on another slot already (another router noticed first) that one is returned and nothing changes.
        """
        current = self.slot_of(url)
        if current is None or current != slot:
            return current
        record = self._workers[slot]
        self.leave(url, now)
        return self.join(record, now)

    def expired(self, now_ms: int) -> Iterable[str]:
        """Workers whose registration has run out."""
        return [record.url for record in self._workers.values() if 0 < record.expires_at <= now_ms]

    def audit(self) -> list[str]:
        """Discrepancies."""
        urls = [record.url for record in self._workers.values()]
        found = [f"{url} has several slots" for url in {url for url in urls if urls.count(url) > 1}]
        found += [f"slot {slot} is in use and in quarantine" for slot in self._workers.keys() & self._freed.keys()]
        if self._live != sum(1 << slot for slot in self._workers):
            found.append(f"bitmap {self._live:b} differs from the slots in use")
        if sorted({*self._workers, *self._freed}) != list(range(self._next)):
            found.append(f"of slots 0 to {self._next - 1} some are neither in use nor in quarantine")
        return found
