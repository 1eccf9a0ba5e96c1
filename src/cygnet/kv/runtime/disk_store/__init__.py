"""The store tier on a local disk: `disk:PATH[:SIZE]`.

    store       the `Store` itself                        folder      files, sizes, the folder's lock
    catalogue   which object lies where                   segment     one file's entries
    reader      runs of objects into callers' buffers     scan        segments read back
    writer      appending, sealing, adopting              handles     open files
    reclaim     eviction                                  team        helping threads
    format      bytes on disk                             disk        system calls

`docs/store.md` describes format, sharing and what a crash may cost.
"""

import re
from pathlib import Path

from cygnet.base.units import parse_bytes
from cygnet.kv.runtime.disk_store.store import DiskOptions, DiskStore
from cygnet.kv.store import STORES

__all__ = ["DEFAULT_CAPACITY_BYTES", "DiskOptions", "DiskStore", "open_disk_store"]

DEFAULT_CAPACITY_BYTES = 20 << 30


@STORES.register("disk")
def open_disk_store(text: str) -> DiskStore:
    """Open `PATH[:SIZE]`, such as `~/.cache/cygnet/kv:20GiB`; without a size it is 20 GiB.

    What follows the last colon is a size when it begins with a digit.
    """
    match = re.fullmatch(r"(.+):(\d[^/]*)", text, re.DOTALL)
    path, size = (match[1], parse_bytes(match[2])) if match else (text, DEFAULT_CAPACITY_BYTES)
    return DiskStore(Path(path).expanduser(), size)
