"""A folder of files that can be made again: bounded, whole files only. Imports no torch."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cygnet.base.units import format_bytes

MARGIN_BYTES = 1 << 30
"""Free space that is always left to others."""
_MAX_BYTES = 20 << 30
_DISK_SHARE = 10
_TEMPORARY = ".part"
_ABANDONED_S = 3600.0


class BoundedFolder:
    """The files `*<suffix>` directly in `path`, all together within `limit` bytes; the least recently used go first.

    Any number of processes may use it at once: a file appears when it is complete, and may vanish at any time (what is
    open or mapped stays readable). When a file was last used is its modification time.
    """

    def __init__(self, path: Path, *, suffix: str, limit: int | None = None) -> None:
        self.path = path
        self._suffix = suffix
        self._limit = limit

    def place(self, name: str) -> Path:
        """Where the file called `name` is, or would be."""
        return self.path / f"{name}{self._suffix}"

    def files(self) -> list[tuple[Path, int]]:
        """Files and their bytes, least recently used first; none if the folder can't be read."""
        found = []
        with suppress(OSError):
            for entry in os.scandir(self.path):
                if entry.name.endswith(self._suffix):
                    with suppress(OSError):
                        info = entry.stat()
                        found.append((info.st_mtime_ns, Path(entry.path), info.st_size))
        return [(path, size) for _, path, size in sorted(found)]

    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self.files())

    def limit_bytes(self) -> int:
        """What the files may take up together."""
        if self._limit is not None:
            return self._limit
        return default_limit(self.free_bytes(), self.num_bytes())

    def free_bytes(self) -> int:
        """What the disk has left; 0 if it does not tell."""
        for folder in (self.path, *self.path.parents):
            with suppress(OSError):
                return shutil.disk_usage(folder).free
        return 0

    def make_room(self, num_bytes: int) -> str:
        """Remove files until `num_bytes` more fit. If they can't, nothing is removed, and the result says why."""
        self._remove_abandoned()
        files, limit, free = self.files(), self.limit_bytes(), self.free_bytes()
        used = sum(size for _, size in files)
        if num_bytes > limit:
            return f"{format_bytes(num_bytes)} are more than the {format_bytes(limit)} allowed in {self.path}"
        if free + used < num_bytes + MARGIN_BYTES:
            return f"{format_bytes(num_bytes)} would leave too little of the {format_bytes(free)} free at {self.path}"
        excess = max(used + num_bytes - limit, num_bytes + MARGIN_BYTES - free)
        for path, size in files:
            if excess <= 0:
                break
            remove(path)
            excess -= size
        return ""

    @contextmanager
    def writing(self, path: Path) -> Iterator[IO[bytes]]:
        """A file to write, which becomes `path` once all of it is on disk; with an exception there is no trace of it.

        Raises `OSError` where the folder can't be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path, suffix=_TEMPORARY)
        try:
            with os.fdopen(handle, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            remove(Path(temporary))
            raise

    def _remove_abandoned(self) -> None:
        """What a process that was killed has left half-written."""
        for path in self.path.glob(f"*{_TEMPORARY}"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    remove(path)


def default_limit(free_bytes: int, used_bytes: int) -> int:
    """Bytes for a folder that has none set: 20 GiB, or a tenth of what the disk would have free without it."""
    return min(_MAX_BYTES, (free_bytes + used_bytes) // _DISK_SHARE)


def touch(path: Path) -> None:
    """Note that the file is in use now, where that can be noted."""
    with suppress(OSError):
        os.utime(path)


def remove(path: Path) -> None:
    """Remove the file if it is there and may be removed."""
    with suppress(OSError):
        path.unlink()
