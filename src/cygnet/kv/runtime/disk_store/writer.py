"""Appending: this process's own segment, extent by extent, and what happens when it is full."""

import errno
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from cygnet.kv.runtime.disk_store.catalogue import Catalogue
from cygnet.kv.runtime.disk_store.disk import DIRECT, NO_ROOM, Disk, copy, is_aligned, write_all
from cygnet.kv.runtime.disk_store.folder import Folder, lock_file
from cygnet.kv.runtime.disk_store.format import (
    ENTRY,
    MAX_ENTRIES,
    MAX_OBJECT_BYTES,
    PAGE,
    ExtentHead,
    extent_bytes,
    index_bytes,
    marks_bytes,
    object_checksum,
    pack_extent_head,
    pack_index,
    pack_segment_head,
    round_up,
    tag_of,
)
from cygnet.kv.runtime.disk_store.reader import Reader, Want
from cygnet.kv.runtime.disk_store.reclaim import Reclaimer
from cygnet.kv.runtime.disk_store.scan import load_orphan
from cygnet.kv.runtime.disk_store.segment import Segment
from cygnet.kv.runtime.memory import pool_memory
from cygnet.kv.store import ObjectKey, Outcome

EXTENT_BYTES = 4 << 20
"""Most that is written with one call, single larger objects aside."""
_PADDING = pool_memory(PAGE)


@dataclass(slots=True)
class Item:
    """One object to put."""

    key: ObjectKey
    payload: memoryview
    checksum: int = 0
    outcome: Outcome = Outcome.TIMED_OUT


def cut(items: Sequence[Item], longest: int) -> Iterator[list[Item]]:
    """Items by extents of at most `longest` bytes, if one alone is not larger."""
    extent: list[Item] = []
    size = PAGE
    for item in items:
        needed = round_up(len(item.payload))
        if extent and (size + needed > longest or len(extent) == MAX_ENTRIES):
            yield extent
            extent, size = [], PAGE
        extent.append(item)
        size += needed
    if extent:
        yield extent


class Writer:
    """Appends, one call at a time.

    The order in which things are written is what makes a crash harmless: an object is found only once all its bytes and
    its extent's head are with the system; a segment is sealed under a temporary name; a segment's file is deleted
    before what describes it. The process holds a lock on the segment it appends to: when it dies, others see that, cut
    what is torn, and seal.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Folder,
        catalogue: Catalogue,
        reader: Reader,
        reclaimer: Reclaimer,
        *,
        segment_bytes: int,
        alignment: int,
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._catalogue = catalogue
        self._reader = reader
        self._reclaimer = reclaimer
        self._segment_bytes = segment_bytes
        self._alignment = alignment
        """Of direct writes; 0: writes go through the page cache."""
        self._head = pool_memory(PAGE)
        self._stage: memoryview | None = None
        self._extent_bytes = min(EXTENT_BYTES, segment_bytes // 4 // PAGE * PAGE)
        self._lock = threading.Lock()
        self._active: Segment | None = None
        self._fd = -1
        self._spoilt = False
        """Whether a write into the active segment failed: it gets no more."""
        self._closed = False
        self.bytes_written = 0

    @property
    def max_object_bytes(self) -> int:
        """Largest object that fits a segment."""
        spare = round_up(index_bytes(1)) + round_up(marks_bytes(self._segment_bytes)) + 2 * PAGE
        return min(self._segment_bytes - spare, MAX_OBJECT_BYTES)

    def put(self, items: Sequence[Item], deadline: float) -> None:
        """Append what isn't there; sets each outcome."""
        for item in items:
            item.checksum = object_checksum(item.key, item.payload)
        with self._held(deadline) as held:
            if not held:
                return
            failed: Outcome | None = None
            for extent in cut(items, self._extent_bytes):
                fresh = [item for item in extent if not self._is_there(item)]
                fits = [item for item in fresh if len(item.payload) <= self.max_object_bytes]
                for item in fresh:
                    item.outcome = Outcome.FULL
                if fits and failed is None and (outcome := self._append(fits, deadline)) is not Outcome.OK:
                    failed = outcome
                for item in fits:
                    item.outcome = failed or Outcome.OK

    def tidy(self, deadline: float) -> None:
        """Put the folder in order after others: seal what killed processes left, go below the capacity."""
        with self._held(deadline) as held, self._folder.lock(deadline) as locked:
            if held and locked:
                self._tidy()
                self._reclaimer.make_room(0)

    def delete_dead(self, deadline: float) -> None:
        """Delete sealed segments in which nothing is alive."""
        with self._held(deadline) as held, self._folder.lock(deadline) as locked, suppress(OSError):
            if held and locked:
                for segment in self._catalogue.segments():
                    if segment.sealed and next(segment.live(), None) is None:
                        self._folder.delete(segment.name)
                        self._catalogue.drop(segment.name)

    def close(self, deadline: float) -> bool:
        """Seal the active segment. What can't be done by `deadline` whoever opens the folder next does."""
        self._closed = True
        with self._held(deadline) as held:
            if not held:
                return False
            with self._folder.lock(deadline) as locked, suppress(OSError):
                if locked:
                    self._seal()
            self._let_go()
            return True

    # --- with the lock held

    @contextmanager
    def _held(self, deadline: float) -> Iterator[bool]:
        held = self._lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
        try:
            yield held
        finally:
            if held:
                if self._closed:
                    self._let_go()  # `close` did not get the lock in time
                self._lock.release()

    def _is_there(self, item: Item) -> bool:
        """Whether another thread or process was faster. An object of another length gives way."""
        found = self._catalogue.find([item.key])[0]
        if found is None:
            return False
        segment, ordinal = found
        if segment.lengths[ordinal] != len(item.payload):
            self._catalogue.kill(self._catalogue.places([item.key]))
            return False
        self._catalogue.use([found])
        item.outcome = Outcome.OK
        return True

    def _append(self, items: Sequence[Item], deadline: float) -> Outcome:
        """Write one extent, into a new segment if the active one has no room."""
        if self._closed:
            return Outcome.FAILED
        if time.monotonic() >= deadline:
            return Outcome.TIMED_OUT
        lengths = [len(item.payload) for item in items]
        if self._active is None or not self._fits(self._active, lengths):
            outcome = self._roll(deadline)
            if outcome is not Outcome.OK:
                return outcome
        return self._write(items, lengths)

    def _fits(self, segment: Segment, lengths: Sequence[int]) -> bool:
        if self._spoilt or self._catalogue.segment(segment.name) is not segment:  # its file has been deleted
            return False
        end = segment.end + extent_bytes(lengths)
        sidecars = round_up(index_bytes(segment.num_entries + len(lengths))) + round_up(marks_bytes(end))
        return end + sidecars <= segment.reserve

    def _write(self, items: Sequence[Item], lengths: Sequence[int]) -> Outcome:
        segment = self._active
        assert segment is not None
        head = pack_extent_head(
            segment.tag, segment.end // PAGE, [item.key for item in items], lengths, [item.checksum for item in items]
        )
        self._head[:] = head
        parts = [self._head]
        for item in items:
            parts.append(item.payload)
            if padding := -len(item.payload) % PAGE:
                parts.append(_PADDING[:padding])
        try:
            if not self._alignment or all(is_aligned(part, self._alignment) for part in parts):
                write_all(self._disk, self._fd, parts, segment.end)
            else:
                self._write_by_way(parts, segment.end)
        except OSError as error:
            self._undo(segment)
            return Outcome.FULL if error.errno in NO_ROOM else Outcome.FAILED
        end = segment.end + extent_bytes(lengths)
        self._catalogue.extend(segment, np.frombuffer(head, ENTRY, len(items), ExtentHead.size), end)
        self.bytes_written += sum(lengths)
        return Outcome.OK

    def _write_by_way(self, parts: Sequence[memoryview], offset: int) -> None:
        """Copy to aligned memory, and write from there."""
        stage = self._stage = self._stage or pool_memory(self._extent_bytes)
        filled = 0
        for part in parts:
            while part:
                size = min(len(part), len(stage) - filled)
                copy(stage[filled : filled + size], part[:size])
                part, filled = part[size:], filled + size
                if filled == len(stage):
                    write_all(self._disk, self._fd, [stage], offset)
                    offset, filled = offset + filled, 0
        if filled:
            write_all(self._disk, self._fd, [stage[:filled]], offset)

    def _undo(self, segment: Segment) -> None:
        self._spoilt = True
        with suppress(OSError):  # what lies after the end is no whole extent, and sealing leaves it out
            self._disk.truncate(self._fd, segment.end)

    def _roll(self, deadline: float) -> Outcome:
        """Seal the active segment, make room and begin another; then give up old ones, so that the next has room."""
        with self._folder.lock(deadline) as locked:
            if not locked:
                return Outcome.TIMED_OUT
            try:
                self._seal()
                self._tidy()
                if not self._reclaimer.make_room(self._segment_bytes):
                    return Outcome.FULL
                self._create()
            except OSError as error:
                self._let_go()
                return Outcome.FULL if error.errno in NO_ROOM else Outcome.FAILED
            with suppress(OSError):  # the next roll makes room, or says that it can't
                self._reclaimer.keep_room(self._segment_bytes, self._segment_bytes // 2, self._move)
            return Outcome.OK

    # --- with the folder's lock held too

    def _create(self) -> None:
        name = self._folder.new_name()
        self._fd = self._disk.create(self._folder.data(name), DIRECT if self._alignment else 0)
        self._spoilt = False
        if not lock_file(self._fd):
            raise OSError(errno.EBUSY, "someone has locked a new file")
        self._head[:] = pack_segment_head(self._segment_bytes)
        write_all(self._disk, self._fd, [self._head], 0)
        self._disk.close(self._disk.create(self._folder.marks(name)))
        self._active = self._catalogue.create(name, self._segment_bytes)

    def _seal(self) -> None:
        segment, self._active = self._active, None
        if segment is None:
            return
        try:
            if segment.num_entries:
                self._write_index(segment)
                segment.sealed = True
            else:
                self._folder.delete(segment.name)
                self._catalogue.drop(segment.name)
        finally:
            segment.mine = False
            self._let_go()

    def _let_go(self) -> None:
        """Close the active segment's file, and with it give back its lock."""
        if self._active is not None:
            self._active.mine = False
            self._active = None
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _write_index(self, segment: Segment) -> None:
        path = self._folder.index(segment.name)
        fd = self._disk.create(path + ".tmp")
        try:
            write_all(self._disk, fd, [pack_index(segment.tag, segment.end, segment.packed())], 0)
        finally:
            self._disk.close(fd)
        self._disk.replace(path + ".tmp", path)

    def _tidy(self) -> None:
        self._folder.remove_strays()
        for name, files in self._folder.list().items():
            mine = self._active is not None and self._active.name == name
            if files.data >= 0 and files.index < 0 and not mine:
                try:
                    self._adopt(name)
                except OSError:
                    continue  # it stays as it is, and is evicted in its turn
        self._catalogue.refresh(force=True)

    def _adopt(self, name: str) -> None:
        """Seal a segment whose writer is gone: cut to what is whole, or delete it when that is nothing."""
        fd = self._disk.open(self._folder.data(name), os.O_RDWR)
        try:
            if not lock_file(fd):
                return
            segment = Segment(0, name, tag_of(name), 0)
            load_orphan(self._disk, segment, fd)
            self._catalogue.drop(name)
            if not segment.num_entries:
                self._folder.delete(name)
                return
            self._disk.truncate(fd, segment.end)
            self._write_index(segment)
        finally:
            self._disk.close(fd)

    def _move(self, source: Segment, ordinals: Sequence[int]) -> int:
        """Copy used objects to the active segment, as far as that has room."""
        left = list(ordinals)
        moved = 0
        while left:
            wants, left = self._take(source, left)
            self._reader.get(wants, math.inf)
            items = [
                Item(source.keys[want.ordinal], want.buffer, source.checksums[want.ordinal])
                for want in wants
                if want.outcome is Outcome.OK
            ]
            for extent in cut(items, self._extent_bytes):
                lengths = [len(item.payload) for item in extent]
                if self._active is None or not self._fits(self._active, lengths):
                    return moved
                if self._write(extent, lengths) is not Outcome.OK:
                    return moved
                moved += len(extent)
        return moved

    def _take(self, source: Segment, ordinals: Sequence[int]) -> tuple[list[Want], list[int]]:
        """What to copy next, so that no more than an extent is in memory; and what is left."""
        size, count = 0, 0
        while count < len(ordinals) and (not count or size + source.lengths[ordinals[count]] <= self._extent_bytes):
            size += source.lengths[ordinals[count]]
            count += 1
        wants = [Want(source, ordinal, memoryview(bytearray(source.lengths[ordinal]))) for ordinal in ordinals[:count]]
        return wants, list(ordinals[count:])
