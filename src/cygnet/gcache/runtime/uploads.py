"""Values that arrive in slices, over several connections."""

import threading
import time
from dataclasses import dataclass, field

from cygnet.gcache.arena import Entry
from cygnet.gcache.protocol import Item, Put
from cygnet.gcache.record import num_chunks
from cygnet.gcache.runtime.cache import Cache

Name = tuple[int, bytes]


def commit(cache: Cache, put: Put, entry: Entry, sums: list[int], deadline: float) -> Item:
    """Have what was put found. If it is to keep what is there, and there is something, it is given up: `OK` too.

    One that comes later than its ticket allows is given up as `FAILED`, as what was there may be gone on purpose.
    """
    if not put.keep:
        return cache.commit(entry, sums, deadline)
    is_late = False

    def may_land(there: Entry | None, on_disk: bool) -> bool:
        nonlocal is_late
        is_late = there is None and not on_disk and not cache.memory.changes.allows(put.key, put.ticket)
        return there is None and not on_disk and not is_late

    item = cache.commit(entry, sums, deadline, may_land)
    if item is not Item.MISS:
        return item
    return Item.FAILED if is_late else Item.OK


@dataclass
class Upload:
    """One value on its way. Pinned for its writer, and once more for each slice that is arriving."""

    entry: Entry
    sums: list[int | None]
    until: float
    """Monotonic seconds; abandoned afterwards."""
    over: bool = False
    arriving: set[int] = field(default_factory=set)
    """First chunks of slices that are arriving."""


class Uploads:
    """Uploads by id and key. Thread-safe. A value is found only when all its chunks are there and have been checked.

    One that is not complete in time is abandoned, and so is one of which a slice is damaged; the next put of its key
    is another upload, so nothing stands in its way.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._uploads: dict[Name, Upload] = {}

    def __len__(self) -> int:
        return len(self._uploads)

    def begin_slice(self, put: Put, deadline: float) -> Upload | Item:
        """The upload that a slice belongs to, its memory held in place until `end_slice`."""
        name = (put.upload, put.key)
        self.expire()
        with self._lock:
            known = self._uploads.get(name)
            if known is None and len(self._uploads) >= self._cache.limits.max_uploads:
                return Item.FULL
        upload = known or self._begin(name, put, deadline)
        if isinstance(upload, Item):
            return upload
        with self._lock:
            # An object of another size, or the same slice twice at once: no upload of ours does that.
            clash = len(upload.sums) != num_chunks(put.value_bytes) or put.first_chunk in upload.arriving
            if upload.over or clash or upload.entry.value_bytes != put.value_bytes:
                return Item.FAILED
            upload.arriving.add(put.first_chunk)
            self._cache.hold(upload.entry)
        return upload

    def end_slice(self, upload: Upload, put: Put, sums: list[int] | None, deadline: float) -> Item:
        """A slice has arrived; `sums` are its chunks' checksums, `None` when they are wrong or it was cut short."""
        with self._lock:
            upload.arriving.discard(put.first_chunk)
            was_over = upload.over
            if sums is None:
                upload.over = True
            elif not upload.over:
                upload.sums[put.first_chunk : put.first_chunk + len(sums)] = sums
            complete = [value for value in upload.sums if value is not None]
            done = not upload.over and len(complete) == len(upload.sums)
            upload.over = upload.over or done
            if upload.over:
                self._uploads.pop((put.upload, put.key), None)
        self._cache.memory.release([upload.entry])
        if done:
            return commit(self._cache, put, upload.entry, complete, deadline)
        if upload.over:
            if not was_over:
                self._cache.abandon(upload.entry)
            return Item.TORN if sums is None else Item.FAILED
        return Item.PART

    def expire(self, *, everything: bool = False) -> None:
        """Abandon what is not complete in time."""
        now = time.monotonic()
        with self._lock:
            late = [name for name, upload in self._uploads.items() if everything or upload.until <= now]
            gone = [self._uploads.pop(name) for name in late]
            for upload in gone:
                upload.over = True
        for upload in gone:
            self._cache.abandon(upload.entry)

    def _begin(self, name: Name, put: Put, deadline: float) -> Upload | Item:
        entry = self._cache.reserve(put.key, put.value_bytes, put.ttl_ms, deadline, put.root)
        if isinstance(entry, Item):
            return entry
        until = time.monotonic() + self._cache.limits.upload_timeout_s
        fresh = Upload(entry, [None] * num_chunks(put.value_bytes), until)
        with self._lock:
            upload = self._uploads.setdefault(name, fresh)
        if upload is not fresh:  # another slice came at the same time
            self._cache.abandon(entry)
        return upload
