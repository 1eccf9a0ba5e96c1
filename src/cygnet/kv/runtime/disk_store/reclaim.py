"""Making room: which segments are given up, and what of them is kept.

Segments go in the order in which they were written, whole. An object that was used since then is worth keeping:

    at most half of a segment's bytes were used     the used ones are moved to the newest segment, the rest goes
    more were used                                  the segment gets another round, as if just written

What was just written has had no time to be used: when all of the older half of the segments were used, the one that
was used least goes all the same. What is moved is at most half of a segment for each that is freed. A prefix that is
used is used from its beginning: what goes first is the ends of sequences nobody came back to.
"""

import os
from collections.abc import Callable, Sequence

from cygnet.kv.runtime.disk_store.catalogue import Catalogue
from cygnet.kv.runtime.disk_store.disk import Disk, write_all
from cygnet.kv.runtime.disk_store.folder import Files, Folder
from cygnet.kv.runtime.disk_store.format import round_up
from cygnet.kv.runtime.disk_store.scan import read_marks
from cygnet.kv.runtime.disk_store.segment import DEAD, USED, Segment

Move = Callable[[Segment, Sequence[int]], int]
"""Copies these entries of a segment to the newest one; returns how many it kept."""


class Reclaimer:
    """Keeps the folder within its capacity. Changes need the folder's lock, and one thread at a time."""

    def __init__(self, disk: Disk, folder: Folder, catalogue: Catalogue, *, capacity_bytes: int, min_free_bytes: int):
        self._disk = disk
        self._folder = folder
        self._catalogue = catalogue
        self._capacity_bytes = capacity_bytes
        self._min_free_bytes = min_free_bytes
        self.evicted_objects = 0
        self.moved_objects = 0

    def used_bytes(self) -> int:
        """What counts against the capacity: all files, and for segments that still grow what they may grow to.

        Needs no lock, and therefore takes an orphan for one that grows.
        """
        used = self._folder.overhead_bytes()
        for name, files in self._folder.list().items():
            used += files.num_bytes if files.index >= 0 else max(files.num_bytes, self._catalogue.reserve_of(name))
        return used

    def make_room(self, num_bytes: int) -> bool:
        """Give up segments until `num_bytes` more fit; `False` when there are not enough.

        On a disk with less than `min_free_bytes` left the store does not grow: a segment is given up for the new one.
        """
        used, victims = self._survey()
        crowded = num_bytes > 0 and self._disk.free_bytes(self._folder.path) < num_bytes + self._min_free_bytes
        freed = 0
        while used - freed + num_bytes > self._capacity_bytes or (crowded and 2 * freed < num_bytes):
            if not victims:
                return False
            name = next(iter(victims))
            freed += victims.pop(name).num_bytes
            self._evict(name)
        return True

    def keep_room(self, num_bytes: int, budget: int, move: Move) -> None:
        """Give up segments until `num_bytes` more fit, and have up to `budget` bytes of what was used in them moved."""
        used, victims = self._survey()
        while used + num_bytes > self._capacity_bytes and victims:
            name, passed = self._choose(list(victims)[: -(-len(victims) // 2)])
            used -= victims.pop(name).num_bytes
            for other in passed:
                self._give_another_round(other)
                victims[other] = victims.pop(other)
            segment = self._catalogue.segment(name)
            if segment is not None:
                budget -= self._move_within(segment, self._judge(segment)[0], budget, move)
            self._evict(name)

    def _choose(self, names: Sequence[str]) -> tuple[str, list[str]]:
        """The first segment of which at most half was used, else the one used least; and those passed over."""
        shares: dict[str, float] = {}
        for name in names:
            segment = self._catalogue.segment(name)
            if segment is None:
                return name, list(shares)
            self._catalogue.take_marks(segment)
            _, hot_bytes, live_bytes = self._judge(segment)
            if 2 * hot_bytes <= live_bytes:
                return name, list(shares)
            shares[name] = hot_bytes / live_bytes
        coldest = min(shares, key=shares.__getitem__)
        del shares[coldest]
        return coldest, list(shares)

    def _survey(self) -> tuple[int, dict[str, Files]]:
        """Bytes that count, and what may be evicted, in that order."""
        used, victims = self._folder.overhead_bytes(), []
        for name, files in self._folder.list().items():
            if files.index >= 0 or not self._folder.is_live(name):
                used += files.num_bytes
                victims.append((name, files))
            else:
                used += max(files.num_bytes, self._catalogue.reserve_of(name))
        victims.sort(key=lambda victim: (victim[1].mtime_ns, victim[0]))
        return used, dict(victims)

    def _judge(self, segment: Segment) -> tuple[list[int], int, int]:
        """Ordinals that were used, their bytes, and the bytes of all that would be lost."""
        hot, hot_bytes, live_bytes = [], 0, 0
        for ordinal, flags in enumerate(segment.flags):
            if not flags & DEAD and self._catalogue.is_first(segment, ordinal):
                num_bytes = round_up(segment.lengths[ordinal])
                live_bytes += num_bytes
                if flags & USED:
                    hot.append(ordinal)
                    hot_bytes += num_bytes
        return hot, hot_bytes, live_bytes

    def _move_within(self, segment: Segment, hot: Sequence[int], budget: int, move: Move) -> int:
        """Move the first of `hot` that fit `budget`, which are the beginnings of sequences; returns their bytes."""
        chosen, num_bytes = [], 0
        for ordinal in hot:
            size = round_up(segment.lengths[ordinal])
            if num_bytes + size > budget:
                break
            chosen.append(ordinal)
            num_bytes += size
        if chosen:
            self.moved_objects += move(segment, chosen)
        return num_bytes

    def _give_another_round(self, name: str) -> None:
        marks = bytearray(read_marks(self._disk, self._folder, name))
        marks[0::2] = bytes(len(marks[0::2]))
        try:
            fd = self._disk.open(self._folder.marks(name), os.O_WRONLY)
            try:
                write_all(self._disk, fd, [marks], 0)
            finally:
                self._disk.close(fd)
            self._disk.mark_changed(self._folder.data(name))
        except OSError:
            return  # its turn comes again at the end of this round
        segment = self._catalogue.segment(name)
        if segment is not None:
            self._catalogue.take_marks(segment)
        self._folder.announce()

    def _evict(self, name: str) -> None:
        self._folder.delete(name)
        self.evicted_objects += self._catalogue.drop(name)
