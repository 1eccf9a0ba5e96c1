"""The catalogue compared with the folder, from scratch."""

from cygnet.kv.runtime.disk_store.catalogue import Catalogue
from cygnet.kv.runtime.disk_store.disk import Disk
from cygnet.kv.runtime.disk_store.folder import Folder
from cygnet.kv.runtime.disk_store.format import PAGE, tag_of
from cygnet.kv.runtime.disk_store.reclaim import Reclaimer
from cygnet.kv.runtime.disk_store.scan import extents_after_damage, load_index, read_marks
from cygnet.kv.runtime.disk_store.segment import DEAD, Segment


def audit_files(
    disk: Disk, folder: Folder, catalogue: Catalogue, reclaimer: Reclaimer, capacity_bytes: int
) -> list[str]:
    """All discrepancies between segments as known and as heads, indexes and marks on disk have them; and of size."""
    faults: list[str] = []
    for name, files in folder.list().items():
        if files.data >= 0 and catalogue.segment(name) is None:
            faults.append(f"segment {name} is in the folder, but not known")
    for segment in catalogue.segments():
        faults += [f"segment {segment.name}: {fault}" for fault in _audit_segment(disk, folder, segment)]
    used = reclaimer.used_bytes()
    if used > capacity_bytes:
        faults.append(f"the folder takes {used} bytes, the capacity is {capacity_bytes}")
    return faults


def _audit_segment(disk: Disk, folder: Folder, segment: Segment) -> list[str]:
    try:
        fd = disk.open(folder.data(segment.name))
    except OSError as error:
        return [f"can't be opened: {error.strerror}"]
    found = Segment(0, segment.name, tag_of(segment.name), segment.reserve)
    try:
        for entries, end in extents_after_damage(disk, fd, found.tag, PAGE, segment.end):
            found.append(entries, end)
    finally:
        disk.close(fd)
    faults = []
    if (found.keys, found.pages, found.lengths, found.checksums) != (
        segment.keys,
        segment.pages,
        segment.lengths,
        segment.checksums,
    ):
        faults.append(f"{found.num_entries} entries by their heads, {segment.num_entries} known, or not the same")
    if segment.sealed:
        index = load_index(disk, folder, segment)
        if index is not None and (index[0].tobytes() != segment.packed() or index[1] != segment.end):
            faults.append("the sealed index is another")
    dead = found.take_marks(read_marks(disk, folder, segment.name))
    faults += [f"entry {ordinal} is dead on disk" for ordinal in dead if not segment.flags[ordinal] & DEAD]
    return faults
