"""Reading objects into the callers' buffers: neighbours with one call, and directly from the disk if that can be.

Through the page cache everything would be copied once more, at several times the CPU time, and push other things out.
Direct reads need aligned memory; into other buffers they go by way of our own.
"""

import os
import queue
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from cygnet.kv.runtime.disk_store.catalogue import Catalogue
from cygnet.kv.runtime.disk_store.disk import Disk, copy, is_aligned
from cygnet.kv.runtime.disk_store.format import PAGE, object_checksum, round_up
from cygnet.kv.runtime.disk_store.handles import Handle, Handles
from cygnet.kv.runtime.disk_store.segment import Segment
from cygnet.kv.runtime.disk_store.team import Team
from cygnet.kv.runtime.memory import pool_memory
from cygnet.kv.store import Outcome

RUN_BYTES = 2 << 20
"""Most that is read with one call, single larger objects aside."""
MIN_RUN_BYTES = 256 << 10
"""Smaller ones are not split up to busy more threads."""
GAP_BYTES = 4 * PAGE
"""Neighbours may be this far apart: an extent's head between them costs less than another call."""
MAX_WANTS = 256
"""Objects per call; each may need three buffers, and systems take 1024."""


@dataclass(slots=True)
class Want:
    """One object to read."""

    segment: Segment
    ordinal: int
    buffer: memoryview
    outcome: Outcome | None = Outcome.TIMED_OUT
    """`None`: its segment is gone."""
    start: int = 0
    """Its first byte in the segment."""
    end: int = 0
    """The byte after its padding."""

    def __post_init__(self) -> None:
        self.start = self.segment.pages[self.ordinal] * PAGE
        self.end = self.start + round_up(len(self.buffer))


@dataclass(slots=True)
class Run:
    """Neighbours in one segment, read with one call."""

    segment: Segment
    start: int
    end: int
    wants: list[Want] = field(default_factory=list)


def plan_runs(wants: Sequence[Want], num_threads: int) -> list[Run]:
    """Cut what is wanted into runs: as long as pays, but enough of them for all threads."""
    total = sum(len(want.buffer) for want in wants)
    longest = min(RUN_BYTES, max(MIN_RUN_BYTES, total // (num_threads + 1)))
    runs: list[Run] = []
    for want in sorted(wants, key=lambda want: (want.segment.slot, want.start)):
        run = runs[-1] if runs else None
        if (
            run is not None
            and run.segment is want.segment
            and run.end <= want.start <= run.end + GAP_BYTES  # the same object twice begins before the end
            and want.end - run.start <= longest
            and len(run.wants) < MAX_WANTS
        ):
            run.wants.append(want)
            run.end = want.end
        else:
            runs.append(Run(want.segment, want.start, want.end, [want]))
    return runs


class Reader:
    """Gets objects; thread-safe. Its own memory is bounded by the number of threads that read at once."""

    def __init__(
        self, disk: Disk, catalogue: Catalogue, handles: Handles, team: Team, *, num_threads: int, alignment: int
    ) -> None:
        self._disk = disk
        self._catalogue = catalogue
        self._handles = handles
        self._team = team
        self._num_threads = num_threads
        self._alignment = alignment
        """Of direct reads; 0: reads go through the page cache."""
        self._spare: queue.LifoQueue[memoryview] = queue.LifoQueue(num_threads + 1)
        self._sink = pool_memory(GAP_BYTES + PAGE)
        """Where gaps and padding go, from all threads at once; nobody looks at it."""

    def get(self, wants: Sequence[Want], deadline: float) -> None:
        """Read all; sets each outcome. What was torn or failed is found no more."""
        self._team.run(plan_runs(wants, self._num_threads), self._read_run, deadline)

    def _read_run(self, run: Run) -> None:
        try:
            with self._handles.use(run.segment) as handle:
                got = self._read(handle, run)
                vanished = got < run.end - run.start and self._is_gone(handle)
        except FileNotFoundError:
            got, vanished = 0, True
        except OSError:
            self._give_up(run.wants, Outcome.FAILED, on_disk=False)
            return
        whole: list[Want] = []
        torn: list[Want] = []
        for want in run.wants:
            key, checksum = want.segment.keys[want.ordinal], want.segment.checksums[want.ordinal]
            there = want.start - run.start + len(want.buffer) <= got
            good = there and object_checksum(key, want.buffer) == checksum
            (whole if good else torn).append(want)
        for want in whole:
            want.outcome = Outcome.OK
        if vanished:
            self._catalogue.drop(run.segment.name)
            for want in torn:
                want.outcome = None
        elif torn:
            # What another process is writing right now is its to judge.
            self._give_up(torn, Outcome.TORN, on_disk=run.segment.sealed or run.segment.mine)

    def _give_up(self, wants: Sequence[Want], outcome: Outcome, *, on_disk: bool) -> None:
        for want in wants:
            want.outcome = outcome
        self._catalogue.kill([(want.segment, want.ordinal) for want in wants], on_disk=on_disk)

    def _is_gone(self, handle: Handle) -> bool:
        """Whether a short read is due to eviction by another process, which empties the file and deletes it."""
        stat = os.fstat(handle.fd)
        return stat.st_nlink == 0 or stat.st_size == 0

    def _read(self, handle: Handle, run: Run) -> int:
        """Fill the buffers of a run; returns how many bytes of it there were."""
        if not self._alignment or all(is_aligned(want.buffer, self._alignment) for want in run.wants):
            return self._read_fully(handle.fd, self._parts(run), run.start)
        return self._read_by_way(handle, run)

    def _parts(self, run: Run) -> list[memoryview]:
        """The buffers with gaps and padding in between, as they lie on the disk."""
        parts: list[memoryview] = []
        at = run.start
        for want in run.wants:
            if want.start > at:
                parts.append(self._sink[: want.start - at])
            parts.append(want.buffer)
            at = want.start + len(want.buffer)
            if want.end > at:
                parts.append(self._sink[: want.end - at])
                at = want.end
        return parts

    def _read_fully(self, fd: int, parts: list[memoryview], offset: int) -> int:
        """Read until all is there or the file ends. Reads are cut short only there, or at 2 GiB."""
        done = 0
        while parts:
            got = self._disk.preadv(fd, parts, offset + done)
            if got == 0:
                break
            done += got
            while parts and got >= len(parts[0]):
                got -= len(parts.pop(0))
            if parts and got:
                parts[0] = parts[0][got:]
                if self._alignment and got % self._alignment:
                    break  # the file ends within a page
        return done

    def _read_by_way(self, handle: Handle, run: Run) -> int:
        """Read directly into memory of our own, and copy."""
        try:
            memory = self._spare.get_nowait()
        except queue.Empty:
            memory = pool_memory(RUN_BYTES)
        try:
            for offset in range(run.start, run.end, len(memory)):
                size = min(len(memory), run.end - offset)
                got = self._read_fully(handle.fd, [memory[:size]], offset)
                _scatter(memory[:got], offset, run.wants)
                if got < size:
                    return offset - run.start + got
            return run.end - run.start
        finally:
            with suppress(queue.Full):  # more callers at once than usual: theirs is let go
                self._spare.put_nowait(memory)


def _scatter(data: memoryview, offset: int, wants: Sequence[Want]) -> None:
    """Copy what was read at `offset` to where it belongs."""
    for want in wants:
        begin, end = max(offset, want.start), min(offset + len(data), want.start + len(want.buffer))
        if begin < end:
            copy(want.buffer[begin - want.start : end - want.start], data[begin - offset : end - offset])
