"""The embedded store tier: objects in a folder on a local disk, shared by any number of processes."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cygnet.base.errors import ConfigError
from cygnet.base.units import format_bytes
from cygnet.kv.runtime.disk_store.audit import audit_files
from cygnet.kv.runtime.disk_store.catalogue import Catalogue
from cygnet.kv.runtime.disk_store.disk import Disk
from cygnet.kv.runtime.disk_store.folder import Folder, unusable
from cygnet.kv.runtime.disk_store.format import PAGE
from cygnet.kv.runtime.disk_store.handles import Handles
from cygnet.kv.runtime.disk_store.reader import Reader, Want
from cygnet.kv.runtime.disk_store.reclaim import Reclaimer
from cygnet.kv.runtime.disk_store.team import Team
from cygnet.kv.runtime.disk_store.writer import Item, Writer
from cygnet.kv.store import DEFAULT_TIMEOUT_S, NAMESPACE_BYTES, Namespace, ObjectKey, Outcome, StoreStats, check_batch

if TYPE_CHECKING:
    from typing_extensions import Buffer

MIN_CAPACITY_BYTES = 1 << 20
MIN_SEGMENT_BYTES = 8 * PAGE
MIN_SEGMENTS = 4


@dataclass(frozen=True)
class DiskOptions:
    """What rarely needs changing."""

    segment_bytes: int = 0
    """Disk space per segment, the unit of eviction; 0: a 64th of the capacity, between 8 and 128 MiB."""
    io_threads: int = 4
    """Threads that read beside the caller's own; 0: none."""
    refresh_interval_s: float = 1.0
    """How often at most a miss makes this process look for what others have written."""
    min_free_bytes: int = 512 << 20
    """The store does not grow into this much of the disk's free space."""
    direct: bool = True
    """Read and write past the page cache, where the file system can do that."""


class DiskStore:
    """A `Store` in the folder `path`, which may take `capacity_bytes` of disk. `docs/store.md` describes it.

    Raises `ConfigError` when the folder can't be used or the capacity is too small. Invariants (`audit`): the catalogue
    agrees with the heads on disk; the files take no more than the capacity, at any moment; no more files are open than
    the handles say.
    """

    def __init__(
        self, path: Path, capacity_bytes: int, options: DiskOptions = DiskOptions(), *, disk: Disk | None = None
    ) -> None:
        self._disk = disk or Disk()
        segment_bytes = _segment_bytes(path, capacity_bytes, options)
        self._folder = Folder(path, self._disk)
        self._capacity_bytes = capacity_bytes
        self._alignment = self._folder.alignment if options.direct else 0
        self._team = Team(options.io_threads, "disk-store")
        self._handles = Handles(self._disk, self._folder, direct=self._alignment > 0)
        self._catalogue = Catalogue(
            self._disk,
            self._folder,
            self._handles,
            segment_bytes=segment_bytes,
            refresh_interval_s=options.refresh_interval_s,
        )
        self._reader = Reader(
            self._disk,
            self._catalogue,
            self._handles,
            self._team,
            num_threads=options.io_threads,
            alignment=self._alignment,
        )
        self._reclaimer = Reclaimer(
            self._disk,
            self._folder,
            self._catalogue,
            capacity_bytes=capacity_bytes,
            min_free_bytes=options.min_free_bytes,
        )
        self._writer = Writer(
            self._disk,
            self._folder,
            self._catalogue,
            self._reader,
            self._reclaimer,
            segment_bytes=segment_bytes,
            alignment=self._alignment,
        )
        self._calls = 0
        self._closed = False
        self._condition = threading.Condition()
        self._gets: Counter[Outcome] = Counter()
        self._puts: Counter[Outcome] = Counter()
        self._present = 0
        self._bytes_read = 0
        try:
            self._catalogue.refresh(force=True)
            self._writer.tidy(time.monotonic() + DEFAULT_TIMEOUT_S)
        except OSError as error:
            self.close()
            raise ConfigError(unusable(path, error)) from None

    @property
    def buffer_alignment(self) -> int:
        return self._alignment or 1

    def batch_exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        check_batch(keys)
        with self._call() as open_:
            if not open_:
                return [False] * len(keys)
            self._catalogue.refresh()
            return [key in self._catalogue for key in keys]

    def lengths(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Bytes of each object, `None` for one that is not there. From memory alone; not a use."""
        check_batch(keys)
        with self._call() as open_:
            if not open_:
                return [None] * len(keys)
            found = self._catalogue.find(keys)
            return [None if place is None else place[0].lengths[place[1]] for place in found]

    def keys(self) -> list[ObjectKey]:
        """All objects there are, in no particular order. From memory."""
        with self._call() as open_:
            return self._catalogue.keys() if open_ else []

    def batch_get_into(
        self, keys: Sequence[ObjectKey], buffers: "Sequence[Buffer]", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Outcome]:
        deadline = time.monotonic() + timeout_s
        views = check_batch(keys, buffers, writable=True)
        with self._call() as open_:
            if not open_:
                return [Outcome.FAILED] * len(keys)
            self._catalogue.refresh()
            outcomes = self._get(keys, views, deadline)
            lost = [at for at, outcome in enumerate(outcomes) if outcome is None]
            if lost:
                # Another process has given up the segment. What it kept of it lies elsewhere now.
                self._catalogue.refresh(force=True)
                again = self._get([keys[at] for at in lost], [views[at] for at in lost], deadline)
                for at, outcome in zip(lost, again, strict=True):
                    outcomes[at] = outcome
            final = [outcome or Outcome.MISS for outcome in outcomes]
            with self._condition:
                self._gets.update(final)
                self._bytes_read += sum(
                    len(view) for view, outcome in zip(views, final, strict=True) if outcome is Outcome.OK
                )
            return final

    def batch_put(
        self, keys: Sequence[ObjectKey], buffers: "Sequence[Buffer]", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Outcome]:
        deadline = time.monotonic() + timeout_s
        items: dict[ObjectKey, Item] = {}
        for key, view in zip(keys, check_batch(keys, buffers), strict=True):
            items.setdefault(key, Item(key, view))
        with self._call() as open_:
            if not open_:
                return [Outcome.FAILED] * len(keys)
            self._catalogue.refresh()
            present = []
            for item, place in zip(items.values(), self._catalogue.find(list(items)), strict=True):
                if place is not None and place[0].lengths[place[1]] == len(item.payload):
                    present.append(place)
                    item.outcome = Outcome.OK
            self._catalogue.use(present)
            self._writer.put([item for item in items.values() if item.outcome is not Outcome.OK], deadline)
            outcomes = [items[key].outcome for key in keys]
            with self._condition:
                self._puts.update(outcomes)
                self._present += len(present) + len(keys) - len(items)
            return outcomes

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        check_batch(keys)
        with self._call() as open_:
            if open_:
                self._catalogue.use([place for place in self._catalogue.find(keys) if place is not None])

    def remove(self, keys: Sequence[ObjectKey]) -> int:
        check_batch(keys)
        with self._call() as open_:
            if not open_:
                return 0
            self._catalogue.refresh(force=True)
            count = self._catalogue.kill(self._catalogue.places(set(keys)))
            if count:
                self._removed()
            return count

    def clear(self, namespace: Namespace | None = None) -> int:
        with self._call() as open_:
            if not open_:
                return 0
            self._catalogue.refresh(force=True)
            count = 0
            for segment in self._catalogue.segments():
                keys = segment.keys
                count += self._catalogue.kill(
                    (segment, ordinal)
                    for ordinal in list(segment.live())
                    if namespace is None or keys[ordinal][:NAMESPACE_BYTES] == namespace
                )
            if count:
                self._removed()
            return count

    def stats(self) -> StoreStats:
        with self._call() as open_:
            used = 0
            with suppress(OSError):  # the folder has been deleted
                used = self._reclaimer.used_bytes() if open_ else 0
            return StoreStats(
                num_objects=len(self._catalogue) if open_ else 0,
                bytes_used=used,
                capacity_bytes=self._capacity_bytes,
                gets=dict(self._gets),
                puts=dict(self._puts),
                puts_present=self._present,
                bytes_read=self._bytes_read,
                bytes_written=self._writer.bytes_written,
                evicted_objects=self._reclaimer.evicted_objects,
                moved_objects=self._reclaimer.moved_objects,
            )

    def audit(self) -> list[str]:
        """All discrepancies; exact when nobody else is writing."""
        with self._call() as open_:
            if not open_:
                return []
            self._catalogue.refresh(force=True)
            faults = [*self._catalogue.audit(), *self._handles.audit()]
            try:
                faults += audit_files(self._disk, self._folder, self._catalogue, self._reclaimer, self._capacity_bytes)
            except OSError as error:
                faults.append(f"the folder can't be read: {error.strerror}")
            return faults

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        with self._condition:
            if self._closed:
                return
            self._closed = True
            idle = self._condition.wait_for(lambda: not self._calls, timeout_s)
        sealed = self._writer.close(deadline)
        self._team.close(deadline)
        self._handles.close()
        if idle and sealed:
            self._folder.close()  # else a call that hangs still has it

    def _get(self, keys: Sequence[ObjectKey], views: Sequence[memoryview], deadline: float) -> list[Outcome | None]:
        """One attempt; `None` where the object's segment turned out to be gone."""
        wants = [
            None if place is None or place[0].lengths[place[1]] != len(view) else Want(*place, view)
            for place, view in zip(self._catalogue.find(keys), views, strict=True)
        ]
        there = [want for want in wants if want is not None]
        self._reader.get(there, deadline)
        self._catalogue.use([(want.segment, want.ordinal) for want in there if want.outcome is Outcome.OK])
        return [Outcome.MISS if want is None else want.outcome for want in wants]

    def _removed(self) -> None:
        """Free what has no live object left, and let other processes know."""
        self._writer.delete_dead(time.monotonic() + DEFAULT_TIMEOUT_S)
        self._folder.announce()

    @contextmanager
    def _call(self) -> Iterator[bool]:
        """A call is under way; `False` when the store is closed."""
        with self._condition:
            open_ = not self._closed
            self._calls += open_
        try:
            yield open_
        finally:
            if open_:
                with self._condition:
                    self._calls -= 1
                    if self._closed:
                        self._condition.notify_all()


def _segment_bytes(path: Path, capacity_bytes: int, options: DiskOptions) -> int:
    """Size of new segments, in whole pages."""
    chosen = options.segment_bytes or min(max(capacity_bytes // 64, 8 << 20), 128 << 20, capacity_bytes // 6)
    chosen = chosen // PAGE * PAGE
    needed = max(MIN_CAPACITY_BYTES if not options.segment_bytes else 0, MIN_SEGMENTS * chosen + 8 * PAGE)
    if chosen < MIN_SEGMENT_BYTES or capacity_bytes < needed:
        raise ConfigError(
            f"store {path}: {format_bytes(capacity_bytes)} is too small"
            + (f" for segments of {format_bytes(options.segment_bytes)}" if options.segment_bytes else "")
            + f"; give it {format_bytes(max(needed, MIN_CAPACITY_BYTES))} or more, for example {path}:20GiB"
        )
    return chosen
