"""What this process knows of the folder: all segments, and where each object lies."""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from cygnet.kv.runtime.disk_store.disk import Disk
from cygnet.kv.runtime.disk_store.folder import Files, Folder
from cygnet.kv.runtime.disk_store.format import PAGE, Entries, tag_of
from cygnet.kv.runtime.disk_store.handles import Handles
from cygnet.kv.runtime.disk_store.scan import extents, load_sealed, read_marks, read_reserve
from cygnet.kv.runtime.disk_store.segment import DEAD, USED, Segment
from cygnet.kv.store import ObjectKey

SLOT_SHIFT = 24
"""A place is `slot << SLOT_SHIFT | ordinal`: a plain int costs a third of a tuple."""
ORDINALS = (1 << SLOT_SHIFT) - 1
SETTLED_NS = 100_000_000
"""A folder that changed less than this ago may change again within the same tick of its clock."""

MANY_MARKS = 256
"""From so many on, a segment's marks are written with one call."""

Place = int


class Catalogue:
    """Finds objects, and follows what other processes do to the folder.

    Invariants (`audit`): each live entry of each segment is found under its key, in first place or as a spare (the same
    object written twice); nothing else is; dead entries are not.
    The lock is never held over I/O, but for marks of one byte.
    """

    def __init__(
        self, disk: Disk, folder: Folder, handles: Handles, *, segment_bytes: int, refresh_interval_s: float
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._handles = handles
        self._segment_bytes = segment_bytes
        self._interval_s = refresh_interval_s
        self._lock = threading.Lock()
        self._refresh_lock = threading.Lock()
        self._refreshed_at = float("-inf")
        self._seen_mtime_ns = 0
        self._slots = 0
        self._first: dict[ObjectKey, Place] = {}
        self._spares: dict[ObjectKey, list[Place]] = {}
        self._segments: dict[int, Segment] = {}
        self._names: dict[str, Segment] = {}

    def __len__(self) -> int:
        return len(self._first)

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._first

    def keys(self) -> list[ObjectKey]:
        """All keys."""
        with self._lock:
            return list(self._first)

    def segments(self) -> list[Segment]:
        """All known segments."""
        with self._lock:
            return list(self._segments.values())

    def segment(self, name: str) -> Segment | None:
        """The segment called `name`."""
        return self._names.get(name)

    def reserve_of(self, name: str) -> int:
        """What segment `name` may grow to; a guess for one that could not be read."""
        segment = self._names.get(name)
        return self._segment_bytes if segment is None else segment.reserve

    # --- objects

    def find(self, keys: Sequence[ObjectKey]) -> list[tuple[Segment, int] | None]:
        """Segment and ordinal of each object, `None` where there is none."""
        with self._lock:
            found: list[tuple[Segment, int] | None] = []
            for key in keys:
                place = self._first.get(key)
                found.append(None if place is None else (self._segments[place >> SLOT_SHIFT], place & ORDINALS))
            return found

    def is_first(self, segment: Segment, ordinal: int) -> bool:
        """Whether this entry is the one that is found."""
        return self._first.get(segment.keys[ordinal]) == segment.slot << SLOT_SHIFT | ordinal

    def use(self, places: Iterable[tuple[Segment, int]]) -> None:
        """Mark objects as used, here and (once per object and round of eviction) for all processes."""
        fresh: dict[str, list[int]] = {}
        with self._lock:
            for segment, ordinal in places:
                if segment.slot in self._segments and not segment.flags[ordinal] & USED:
                    segment.flags[ordinal] |= USED
                    fresh.setdefault(segment.name, []).append(2 * segment.pages[ordinal])
        for name, offsets in fresh.items():
            self._write_marks(name, offsets)

    def kill(self, places: Iterable[tuple[Segment, int]], *, on_disk: bool = True) -> int:
        """These entries are found no more, by any process if `on_disk`. Returns how many objects that costs."""
        dead: dict[str, list[int]] = {}
        with self._lock:
            before = len(self._first)
            for segment, ordinal in places:
                if segment.slot in self._segments and self._kill(segment, ordinal):
                    dead.setdefault(segment.name, []).append(2 * segment.pages[ordinal] + 1)
            count = before - len(self._first)
        if on_disk:
            for name, offsets in dead.items():
                self._write_marks(name, offsets)
        return count

    def places(self, keys: Iterable[ObjectKey]) -> list[tuple[Segment, int]]:
        """Every entry of these objects, spares too."""
        with self._lock:
            every = [place for key in keys for place in self._places(key)]
            return [(self._segments[place >> SLOT_SHIFT], place & ORDINALS) for place in every]

    # --- segments

    def create(self, name: str, reserve: int) -> Segment:
        """A new, empty segment that this process appends to."""
        segment = self._new(name, reserve)
        segment.mine = True
        self._insert(segment)
        return segment

    def extend(self, segment: Segment, entries: Entries, end: int) -> None:
        """Entries have been appended to `segment`."""
        with self._lock:
            first = segment.num_entries
            segment.append(entries, end)
            if segment.slot in self._segments:
                self._add(segment, first)

    def drop(self, name: str) -> int:
        """A segment is gone. Returns how many objects that costs."""
        with self._lock:
            segment = self._names.get(name)
            lost = 0 if segment is None else self._remove(segment)
        if segment is not None:
            self._handles.drop(segment.slot)
        return lost

    def take_marks(self, segment: Segment) -> None:
        """Read a segment's marks again."""
        data = read_marks(self._disk, self._folder, segment.name)
        with self._lock:
            for ordinal in segment.take_marks(data):
                if segment.slot in self._segments:
                    self._kill(segment, ordinal)

    # --- the folder

    def refresh(self, *, force: bool = False) -> bool:
        """Follow the folder, unless that was done within the interval. Returns whether it was done."""
        if not force and time.monotonic() - self._refreshed_at < self._interval_s:
            return False
        with self._refresh_lock:
            if not force and time.monotonic() - self._refreshed_at < self._interval_s:
                return True  # another thread has just done it
            with suppress(OSError):  # a folder that can't be listed now: what is known stays, reads will tell
                self._follow(force)
            self._refreshed_at = time.monotonic()
            return True

    def _follow(self, force: bool) -> None:
        mtime_ns = self._folder.mtime_ns()
        changed = force or mtime_ns != self._seen_mtime_ns
        if changed:
            now_ns = self._disk.now_ns()
            listing = self._folder.list()
            for segment in self.segments():
                # The list may be older than a segment that a thread of this process has just begun.
                if segment.name not in listing and not (segment.mine and self._folder.has(segment.name)):
                    self.drop(segment.name)
            for name, files in listing.items():
                if files.data >= 0:
                    self._take_in(name, files)
            self._seen_mtime_ns = mtime_ns if mtime_ns < now_ns - SETTLED_NS else 0
        else:
            for segment in self.segments():
                if not segment.sealed and not segment.mine:
                    self._grow(segment, sealed=False)

    def _take_in(self, name: str, files: Files) -> None:
        """A segment as it is listed: new, grown, sealed by its writer or only marked."""
        segment = self._names.get(name)
        if segment is None:
            segment = self._load(name, sealed=files.index >= 0)
            if segment is None:
                return
            self._insert(segment)
        elif not segment.sealed and not segment.mine:
            self._grow(segment, sealed=files.index >= 0)
        if files.marks_mtime_ns != segment.marks_mtime_ns:
            # Ticks of the clock are long: what has just changed may change again unseen.
            settled = files.marks_mtime_ns < self._disk.now_ns() - SETTLED_NS
            segment.marks_mtime_ns = files.marks_mtime_ns if settled else 0
            self.take_marks(segment)

    def _load(self, name: str, *, sealed: bool) -> Segment | None:
        """Read a segment that is not known yet; `None` when it can't be read (any more)."""
        try:
            fd = self._disk.open(self._folder.data(name))
        except OSError:
            return None
        try:
            segment = self._new(name, read_reserve(self._disk, fd) or self._segment_bytes)
            if sealed:
                load_sealed(self._disk, self._folder, segment, fd)
            else:
                for entries, end in extents(self._disk, fd, segment.tag, PAGE, os.fstat(fd).st_size):
                    segment.append(entries, end)
            return segment
        except OSError:
            return None
        finally:
            self._disk.close(fd)

    def _grow(self, segment: Segment, *, sealed: bool) -> None:
        """Read what another process has appended."""
        try:
            fd = self._disk.open(self._folder.data(segment.name))
        except OSError:
            return
        try:
            for entries, end in extents(self._disk, fd, segment.tag, segment.end, os.fstat(fd).st_size):
                self.extend(segment, entries, end)
            segment.sealed = sealed
        except OSError:
            return
        finally:
            self._disk.close(fd)

    def _new(self, name: str, reserve: int) -> Segment:
        with self._lock:
            self._slots += 1
            return Segment(self._slots, name, tag_of(name), reserve)

    def _insert(self, segment: Segment) -> None:
        with self._lock:
            known = self._names.get(segment.name)
            if known is not None:
                # This process has begun a segment, and another of its threads has seen the file.
                if not segment.mine:
                    return
                self._remove(known)
            self._segments[segment.slot] = segment
            self._names[segment.name] = segment
            self._add(segment, 0)
        if known is not None:
            self._handles.drop(known.slot)

    # --- with the lock held

    def _remove(self, segment: Segment) -> int:
        before = len(self._first)
        for ordinal in segment.live():
            self._unlist(segment, ordinal)
        del self._segments[segment.slot], self._names[segment.name]
        return before - len(self._first)

    def _add(self, segment: Segment, first: int) -> None:
        base = segment.slot << SLOT_SHIFT
        for ordinal in range(first, segment.num_entries):
            key = segment.keys[ordinal]
            if self._first.setdefault(key, base | ordinal) != base | ordinal:
                self._spares.setdefault(key, []).append(base | ordinal)

    def _kill(self, segment: Segment, ordinal: int) -> bool:
        if segment.flags[ordinal] & DEAD:
            return False
        segment.flags[ordinal] |= DEAD
        self._unlist(segment, ordinal)
        return True

    def _unlist(self, segment: Segment, ordinal: int) -> None:
        """Take an entry out of the tables; a spare of the same object takes its place."""
        key, place = segment.keys[ordinal], segment.slot << SLOT_SHIFT | ordinal
        spares = self._spares.get(key)
        if self._first.get(key) == place:
            if spares:
                self._first[key] = spares.pop(0)
            else:
                del self._first[key]
        elif spares is not None and place in spares:
            spares.remove(place)
        if spares is not None and not spares:
            del self._spares[key]

    def _places(self, key: ObjectKey) -> list[Place]:
        first = self._first.get(key)
        return [] if first is None else [first, *self._spares.get(key, ())]

    def _write_marks(self, name: str, offsets: list[int]) -> None:
        """Set bytes of a marks file. Marks are hints: where they can't be written, this process's own have to do."""
        try:
            fd = self._disk.open(self._folder.marks(name), os.O_WRONLY)
        except OSError:
            return
        try:
            if len(offsets) <= MANY_MARKS:
                for offset in offsets:
                    self._disk.pwritev(fd, [b"\x01"], offset)
            else:  # what another process marks meanwhile may be lost: an object's second chance, or its removal
                known = read_marks(self._disk, self._folder, name)
                marks = bytearray(max(len(known), max(offsets) + 1))
                marks[: len(known)] = known
                for offset in offsets:
                    marks[offset] = 1
                self._disk.pwritev(fd, [marks], 0)
        except OSError:
            pass
        finally:
            self._disk.close(fd)

    def audit(self) -> list[str]:
        """All discrepancies between the tables and the segments' entries."""
        with self._lock:
            faults, expected = [], 0
            for segment in self._segments.values():
                columns = {len(segment.keys), len(segment.pages), len(segment.lengths), len(segment.flags)}
                if len(columns) != 1:
                    faults.append(f"segment {segment.name}: columns of {sorted(columns)} entries")
                for ordinal in segment.live():
                    expected += 1
                    if segment.slot << SLOT_SHIFT | ordinal not in self._places(segment.keys[ordinal]):
                        faults.append(f"segment {segment.name}: entry {ordinal} is not found under its key")
            listed = len(self._first) + sum(map(len, self._spares.values()))
            if listed != expected:
                faults.append(f"{listed} entries are found, {expected} are there")
            if any(not spares or key not in self._first for key, spares in self._spares.items()):
                faults.append("a spare without a first")
            return faults
