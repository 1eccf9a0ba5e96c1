"""The store's folder: which files are in it, how much they take, and the lock under which that is changed."""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cygnet.base.errors import ConfigError
from cygnet.kv.runtime.disk_store.disk import Disk, probe_direct, write_all
from cygnet.kv.runtime.disk_store.format import PAGE, VERSION, marks_bytes, round_up

LOCK = "LOCK"
LOCK_RETRY_S = 0.002
NAME = re.compile(r"([0-9a-f]{16}-[0-9a-f]{8})\.v(\d+)\.(seg|idx|marks)(\.tmp)?")
NOT_OURS = frozenset((LOCK, "lost+found"))


@dataclass
class Files:
    """What there is of one segment. Sizes in bytes, -1 for a file that is not there."""

    data: int = -1
    mtime_ns: int = 0
    """When it was last appended to or given another round: eviction's order."""
    index: int = -1
    """A segment with an index is sealed: nobody appends to it."""
    marks: int = -1
    marks_mtime_ns: int = 0

    @property
    def num_bytes(self) -> int:
        """What a sealed segment takes of the disk, its marks at their largest."""
        data = max(self.data, 0)
        return round_up(data) + round_up(max(self.index, 0)) + round_up(max(self.marks, marks_bytes(data)))


def lock_file(fd: int) -> bool:
    """Lock an open file for as long as it is open; `False` when another open file has it locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


class Folder:
    """Opens and creates the folder; `ConfigError` says what is wrong with it.

    The lock (`LOCK`, by flock) is held while segments are created, sealed, adopted or evicted, so that the folder's
    size is one process's business at a time. It is never needed to read, nor to append to one's own segment. Locks
    belong to open files: a killed process lets go of its own.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = str(path)
        self._disk = disk
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_content()
            self._lock_fd = disk.open(self.file(LOCK), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(unusable(path, error)) from None
        try:
            self.alignment = self._probe()
        except OSError as error:
            disk.close(self._lock_fd)
            raise ConfigError(unusable(path, error)) from None

    def file(self, name: str) -> str:
        """Full path of a file."""
        return f"{self.path}/{name}"

    def data(self, name: str) -> str:
        """Path of segment `name`'s objects."""
        return self.file(f"{name}.v{VERSION}.seg")

    def index(self, name: str) -> str:
        """Path of segment `name`'s sealed index."""
        return self.file(f"{name}.v{VERSION}.idx")

    def marks(self, name: str) -> str:
        """Path of segment `name`'s marks."""
        return self.file(f"{name}.v{VERSION}.marks")

    def new_name(self) -> str:
        """Name of a new segment; later ones sort after earlier ones."""
        return f"{self._disk.now_ns():016x}-{os.urandom(4).hex()}"

    def mtime_ns(self) -> int:
        """When a file was last created, deleted or renamed, or `announce` was called."""
        return os.stat(self.path).st_mtime_ns

    def announce(self) -> None:
        """Make other processes look at the folder again."""
        with suppress(OSError):  # they look again at the next change
            self._disk.mark_changed(self.path)

    def list(self) -> dict[str, Files]:
        """All segments, and what is left of segments."""
        found: dict[str, Files] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                match = NAME.fullmatch(entry.name)
                if match is None or match[4]:
                    continue
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue  # evicted meanwhile
                files = found.setdefault(match[1], Files())
                if match[3] == "seg":
                    files.data, files.mtime_ns = stat.st_size, stat.st_mtime_ns
                elif match[3] == "idx":
                    files.index = stat.st_size
                else:
                    files.marks, files.marks_mtime_ns = stat.st_size, stat.st_mtime_ns
        return found

    def has(self, name: str) -> bool:
        """Whether segment `name` is there."""
        return os.path.exists(self.data(name))

    def overhead_bytes(self) -> int:
        """What the folder itself and its lock take; some pages more, as it grows with the number of files."""
        return round_up(os.stat(self.path).st_size) + 4 * PAGE

    def delete(self, name: str) -> None:
        """Delete a segment. Its space is free at once even where others have it open: their reads come up short."""
        try:
            fd = self._disk.open(self.data(name), os.O_RDWR)
        except FileNotFoundError:
            pass
        else:
            try:
                self._disk.truncate(fd, 0)
            finally:
                self._disk.close(fd)
        for path in (self.data(name), self.index(name), self.marks(name)):
            self._disk.unlink(path)

    def remove_strays(self) -> None:
        """Delete what a killed process left half done. To be called with the lock: then nobody is at work on them."""
        for entry in os.listdir(self.path):
            match = NAME.fullmatch(entry)
            if match is not None and match[4]:
                self._disk.unlink(self.file(entry))
        for name, files in self.list().items():
            if files.data < PAGE and (files.index >= 0 or files.data < 0):
                self.delete(name)

    def is_live(self, name: str) -> bool:
        """Whether a process is appending to segment `name`: then it holds the lock of its file.

        To be called with the folder's lock: it takes the file's for a moment.
        """
        try:
            fd = self._disk.open(self.data(name))
        except OSError:
            return False
        try:
            return not lock_file(fd)
        finally:
            self._disk.close(fd)

    @contextmanager
    def lock(self, deadline: float) -> Iterator[bool]:
        """Hold the lock; gives `False`, and does not hold it, when others do until `deadline` (monotonic seconds)."""
        held = self._acquire(deadline)
        try:
            yield held
        finally:
            if held:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _acquire(self, deadline: float) -> bool:
        while not lock_file(self._lock_fd):
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_RETRY_S)
        return True

    def close(self) -> None:
        """Give back the lock's file."""
        self._disk.close(self._lock_fd)

    def _check_content(self) -> None:
        """Refuse a folder with other things in it: eviction shall never be a surprise to anyone."""
        for entry in sorted(os.listdir(self.path)):
            match = NAME.fullmatch(entry)
            if match is None and entry not in NOT_OURS:
                raise ConfigError(
                    f"store folder {self.path} holds other files ({entry}); choose an empty or a new folder"
                )
            if match is not None and int(match[2]) != VERSION:
                raise ConfigError(
                    f"store folder {self.path} was written in format {match[2]}, this release reads format {VERSION}; "
                    "choose another folder, or delete its content: it is a cache"
                )

    def _probe(self) -> int:
        """Check that files can be written here; returns the alignment of direct reads, 0 without."""
        path = self.data(self.new_name()) + ".tmp"
        fd = self._disk.create(path)
        try:
            self._disk.unlink(path)
            write_all(self._disk, fd, [bytes(PAGE)], 0)
            return probe_direct(self._disk, fd)
        finally:
            self._disk.close(fd)


def unusable(path: Path, error: OSError) -> str:
    """What to tell a user whose folder does not work."""
    return (
        f"can't use {path} as a store: {error.strerror or error}; choose a folder that this user may create files in "
        "(--store PATH:SIZE)"
    )
