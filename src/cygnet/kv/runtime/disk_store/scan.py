"""Reading segments back: from the sealed index, or from the heads of their extents."""

import os
from collections.abc import Iterator

from cygnet.kv.runtime.disk_store.disk import Disk
from cygnet.kv.runtime.disk_store.folder import Folder
from cygnet.kv.runtime.disk_store.format import (
    PAGE,
    Entries,
    find_extent_heads,
    object_checksum,
    unpack_extent_head,
    unpack_index,
    unpack_segment_head,
)
from cygnet.kv.runtime.disk_store.segment import Segment

SEARCH_BYTES = 1 << 20


def read(disk: Disk, fd: int, num_bytes: int, offset: int) -> memoryview:
    """Up to `num_bytes` at `offset`; less at the file's end."""
    buffer = memoryview(bytearray(num_bytes))
    done = 0
    while done < num_bytes:
        got = disk.preadv(fd, [buffer[done:]], offset + done)
        if got == 0:
            break
        done += got
    return buffer[:done]


def read_reserve(disk: Disk, fd: int) -> int | None:
    """What the segment's head reserves; `None` when that page is damaged."""
    return unpack_segment_head(read(disk, fd, PAGE, 0))


def extents(disk: Disk, fd: int, tag: bytes, start: int, size: int) -> Iterator[tuple[Entries, int]]:
    """Whole extents from byte `start` on, each with the byte after it, up to the first that is not whole."""
    page, last = start // PAGE, size // PAGE
    while page < last:
        extent = unpack_extent_head(read(disk, fd, PAGE, page * PAGE), tag, page)
        if extent is None or extent[1] > last:
            return
        yield extent[0], extent[1] * PAGE
        page = extent[1]


def extents_after_damage(disk: Disk, fd: int, tag: bytes, start: int, size: int) -> Iterator[tuple[Entries, int]]:
    """Like `extents`, but where there is no whole extent, the next one is searched for."""
    while start < size:
        for entries, end in extents(disk, fd, tag, start, size):
            yield entries, end
            start = end
        start = _next_head(disk, fd, tag, start + PAGE, size)


def _next_head(disk: Disk, fd: int, tag: bytes, start: int, size: int) -> int:
    for offset in range(start, size, SEARCH_BYTES):
        data = read(disk, fd, min(SEARCH_BYTES, size - offset), offset)
        data = data[: len(data) // PAGE * PAGE]
        for page in find_extent_heads(data, offset // PAGE) if data else ():
            place = page * PAGE - offset
            if unpack_extent_head(data[place : place + PAGE], tag, page) is not None:
                return page * PAGE
    return size


def load_sealed(disk: Disk, folder: Folder, segment: Segment, fd: int) -> None:
    """Fill in a sealed segment: from its index or, when that is damaged, from the segment itself."""
    size = os.fstat(fd).st_size
    index = load_index(disk, folder, segment)
    if index is not None and index[1] <= size:
        segment.append(*index)
    else:
        for entries, end in extents_after_damage(disk, fd, segment.tag, PAGE, size):
            segment.append(entries, end)
    segment.sealed = True


def load_index(disk: Disk, folder: Folder, segment: Segment) -> tuple[Entries, int] | None:
    """What the sealed index says, `None` when it is not there or damaged."""
    try:
        fd = disk.open(folder.index(segment.name))
    except OSError:
        return None
    try:
        return unpack_index(read(disk, fd, os.fstat(fd).st_size, 0), segment.tag)
    except OSError:
        return None
    finally:
        disk.close(fd)


def read_marks(disk: Disk, folder: Folder, name: str) -> bytes:
    """The marks file; empty when there is none."""
    try:
        fd = disk.open(folder.marks(name))
    except OSError:
        return b""
    try:
        return bytes(read(disk, fd, os.fstat(fd).st_size, 0))
    except OSError:
        return b""
    finally:
        disk.close(fd)


def load_orphan(disk: Disk, segment: Segment, fd: int) -> None:
    """Fill in a segment whose writer is gone, up to the last extent that is whole: heads and, in the last, bytes."""
    found = list(extents_after_damage(disk, fd, segment.tag, PAGE, os.fstat(fd).st_size))
    while found and not _whole(disk, fd, found[-1][0]):
        found.pop()
    for entries, end in found:
        segment.append(entries, end)


def _whole(disk: Disk, fd: int, entries: Entries) -> bool:
    for key, _, length, page, checksum in entries.tolist():
        if object_checksum(key, read(disk, fd, length, page * PAGE)) != checksum:
            return False
    return True
