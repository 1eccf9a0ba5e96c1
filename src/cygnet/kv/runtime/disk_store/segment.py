"""One segment file as this process knows it: the columns of its entries."""

from array import array
from collections.abc import Iterator

import numpy as np

from cygnet.kv.runtime.disk_store.format import ENTRY, PAGE, Entries
from cygnet.kv.store import ObjectKey

USED, DEAD = 1, 2


class Segment:
    """Entries in the order they were written; the place of an entry in that order is its *ordinal*.

    Invariants: the columns are equally long; entries lie one after another, and end at or before `end`.
    Who may be found is the catalogue's business (`Catalogue.audit`).
    """

    def __init__(self, slot: int, name: str, tag: bytes, reserve: int) -> None:
        self.slot = slot
        """Names the segment within this process."""
        self.name = name
        self.tag = tag
        self.reserve = reserve
        """Bytes of disk that it and its sidecars may take while it grows."""
        self.sealed = False
        self.mine = False
        """Whether this process appends to it."""
        self.end = PAGE
        """Bytes accounted for: where the next extent begins."""
        self.marks_mtime_ns = 0
        self.keys: list[ObjectKey] = []
        self.pages = array("I")
        self.lengths = array("I")
        self.checksums = array("Q")
        self.flags = bytearray()
        """Per entry: `USED`, as far as this process knows, and `DEAD`."""

    @property
    def num_entries(self) -> int:
        """Entries, dead ones too."""
        return len(self.keys)

    def append(self, entries: Entries, end: int) -> None:
        """Take in entries that lie between the former `end` and this one."""
        self.keys += map(ObjectKey, entries["key"].tolist())
        self.pages.frombytes(entries["page"].astype("u4").tobytes())
        self.lengths.frombytes(entries["length"].astype("u4").tobytes())
        self.checksums.frombytes(entries["checksum"].astype("u8").tobytes())
        self.flags += bytes(len(entries))
        self.end = end

    def live(self) -> Iterator[int]:
        """Ordinals that are not dead."""
        return (ordinal for ordinal, flag in enumerate(self.flags) if not flag & DEAD)

    def packed(self) -> bytes:
        """All entries as the index file has them."""
        entries = np.zeros(len(self.keys), ENTRY)
        entries["key"] = np.frombuffer(b"".join(self.keys), ENTRY["key"])
        entries["page"], entries["length"] = self.pages, self.lengths
        entries["checksum"] = self.checksums
        return entries.tobytes()

    def take_marks(self, data: bytes) -> list[int]:
        """Take in which entries the marks file says were used. Returns ordinals that it says are dead and live here."""
        if not self.keys:
            return []
        marks = np.zeros(2 * (self.pages[-1] + 1), np.uint8)
        part = np.frombuffer(data, np.uint8)[: len(marks)]
        marks[: len(part)] = part
        pages, flags = np.array(self.pages), np.array(self.flags)
        used, dead = marks[2 * pages] != 0, marks[2 * pages + 1] != 0
        self.flags[:] = (flags & DEAD | used * USED).astype(np.uint8).tobytes()
        return [int(ordinal) for ordinal in np.flatnonzero(dead & (flags & DEAD == 0))]
