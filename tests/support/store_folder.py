"""Small disk stores for tests, and what their folders take."""

import os
from pathlib import Path

from cygnet.kv.runtime.disk_store import DiskOptions, DiskStore
from cygnet.kv.runtime.disk_store.disk import Disk

SEGMENT = 64 << 10
AMPLE, TIGHT = 128 * SEGMENT, 6 * SEGMENT
PAGE = 4096


def small_store(folder: Path, capacity: int = AMPLE, disk: Disk | None = None, **options: int | bool) -> DiskStore:
    """A store with small segments that looks at its folder at every miss, and does all work in the caller's thread."""
    chosen = {"segment_bytes": SEGMENT, "io_threads": 0, "refresh_interval_s": 0.0, "min_free_bytes": 0, **options}
    return DiskStore(folder, capacity, DiskOptions(**chosen), disk=disk)  # type: ignore[arg-type]


def bytes_on_disk(folder: Path) -> int:
    """What the folder and all files in it take, in whole pages."""
    total = folder.stat().st_size
    for name in os.listdir(folder):
        try:
            total += -(-(folder / name).stat().st_size // PAGE) * PAGE
        except FileNotFoundError:
            continue  # deleted meanwhile, by another process
    return total


def open_files(folder: Path) -> list[str]:
    """This process's open files in the folder; deleted ones end with `(deleted)`."""
    return [target for target, _ in _open(folder)]


def bytes_held(folder: Path) -> int:
    """What deleted files of the folder still take because this process has them open."""
    return sum(size for target, size in _open(folder) if target.endswith("(deleted)"))


def _open(folder: Path) -> list[tuple[str, int]]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target, size = os.readlink(f"/proc/self/fd/{fd}"), os.stat(f"/proc/self/fd/{fd}").st_size
        except FileNotFoundError:
            continue  # the listing's own
        if target.startswith(str(folder)):
            found.append((target, size))
    return found
