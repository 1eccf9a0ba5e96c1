"""The store on a local disk: the contract, restart, eviction, and what can be wrong with a folder or a disk."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from contracts.store import CHECKS, NAMESPACES, get, key, payload, put
from cygnet.base.errors import ConfigError
from cygnet.kv.runtime.disk_store import DiskOptions, DiskStore, open_disk_store
from cygnet.kv.runtime.disk_store.format import MAX_ENTRIES, Entry, ExtentHead
from cygnet.kv.runtime.disk_store.handles import MAX_OPEN
from cygnet.kv.runtime.disk_store.team import Team
from cygnet.kv.runtime.stores import open_store
from cygnet.kv.store import Outcome
from support.faulty_disk import FaultyDisk
from support.store_folder import SEGMENT, TIGHT, bytes_on_disk, open_files, small_store

MIB = 1 << 20
OK, MISS, TORN, FULL, TIMED_OUT, FAILED = (Outcome(o) for o in ("ok", "miss", "torn", "full", "timed_out", "failed"))


@contextmanager
def make_with(options: DiskOptions, capacity: int) -> Iterator[DiskStore]:
    with TemporaryDirectory() as folder:
        store = DiskStore(Path(folder), capacity, options)
        try:
            yield store
        finally:
            store.close()
            assert open_files(Path(folder)) == []


@pytest.mark.parametrize(
    "options",
    [
        DiskOptions(min_free_bytes=0, refresh_interval_s=0.0),
        DiskOptions(min_free_bytes=0, direct=False, io_threads=0),
    ],
    ids=["direct", "cached"],
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Any, options: DiskOptions) -> None:
    check(lambda capacity=64 * MIB: make_with(options, capacity))


# --- restart


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    keys = [key(i) for i in range(200)]
    store = small_store(tmp_path)
    for first in range(0, 200, 10):
        put(store, *keys[first : first + 10])
    store.remove(keys[50:60])
    used = store.stats().bytes_used
    store.close()
    assert open_files(tmp_path) == []
    store = small_store(tmp_path)
    assert store.batch_exists(keys) == [not 50 <= i < 60 for i in range(200)]
    assert get(store, *keys).count(OK) == 190
    assert store.stats().bytes_used <= used
    assert store.audit() == []
    store.close()


def test_lengths_are_told_without_reading(tmp_path: Path) -> None:
    """Of objects that are there, also after a restart; of a closed store, none."""
    store = small_store(tmp_path)
    put(store, key(1), num_bytes=5000)
    put(store, key(2), num_bytes=9001)
    assert store.lengths([key(1), key(3), key(2)]) == [5000, None, 9001]
    store.remove([key(1)])
    assert store.lengths([key(1)]) == [None]
    with pytest.raises(ValueError):
        store.lengths([b"short"])  # type: ignore[list-item]
    store.close()
    assert store.lengths([key(2)]) == [None]
    again = small_store(tmp_path)
    assert again.lengths([key(2)]) == [9001]
    again.close()


def test_cold_objects_are_read_from_the_disk(tmp_path: Path) -> None:
    """Past the page cache, into aligned and unaligned memory."""
    store = small_store(tmp_path, 64 * MIB, segment_bytes=8 * MIB, io_threads=3)
    lengths = [4096, 49_152, 49_000, 512, 3 * MIB, MIB + 512, 1] * 3
    keys = [key(i) for i in range(len(lengths))]
    store.batch_put(keys, [payload(k, n) for k, n in zip(keys, lengths, strict=True)])
    for shift in (0, 7):
        for file in tmp_path.glob("*.seg"):
            fd = os.open(file, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        arrays = [np.zeros(n + 8192, np.uint8) for n in lengths]
        buffers = [array[-array.ctypes.data % 4096 + shift :][:n] for array, n in zip(arrays, lengths, strict=True)]
        assert store.batch_get_into(keys, buffers) == [OK] * len(keys)
        for k, buffer in zip(keys, buffers, strict=True):
            assert np.array_equal(buffer, payload(k, len(buffer)))
    store.close()


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    fill(store, 400)
    assert len(list(tmp_path.glob("*.seg"))) > MAX_OPEN + 20
    assert get(store, *(key(("fill", i)) for i in range(400))) == [OK] * 400
    assert len(open_files(tmp_path)) <= MAX_OPEN + 3
    assert store.audit() == []
    store.close()
    assert open_files(tmp_path) == []


def test_a_smaller_capacity_is_kept_to_from_the_start(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    for i in range(100):
        put(store, key(i))
    store.close()
    assert bytes_on_disk(tmp_path) > TIGHT
    store = small_store(tmp_path, TIGHT)
    assert bytes_on_disk(tmp_path) <= TIGHT
    assert store.audit() == []
    assert get(store, key(99)) == [OK]
    store.close()


def test_heads_have_room_for_many_objects(tmp_path: Path) -> None:
    """A batch of tiny objects takes one extent's head for as many as it can hold."""
    assert ExtentHead.size + MAX_ENTRIES * Entry.size <= 4088
    store = small_store(tmp_path, 64 * MIB, segment_bytes=8 * MIB)
    keys = [key(i) for i in range(2 * MAX_ENTRIES + 1)]
    assert put(store, *keys, num_bytes=8) == [OK] * len(keys)
    assert get(store, *keys, num_bytes=8) == [OK] * len(keys)
    store.close()
    assert sum(f.stat().st_size for f in tmp_path.glob("*.seg")) == 4096 * (1 + 3 + len(keys))


# --- eviction


def fill(store: DiskStore, count: int, first: int = 0) -> None:
    """Put `count` new objects of a page and a bit."""
    for i in range(first, first + count):
        assert put(store, key(("fill", i))) == [OK]


def test_the_capacity_holds_at_every_moment(tmp_path: Path) -> None:
    """After each single change of the disk, everything on it counted."""
    largest = 0

    def watch() -> None:
        nonlocal largest
        largest = max(largest, bytes_on_disk(tmp_path))

    disk = FaultyDisk(watch=watch)
    store = small_store(tmp_path, TIGHT, disk)
    for i in range(120):
        put(store, key(i), key((i, 2)), num_bytes=6000)
        get(store, *(key(j) for j in range(max(0, i - 5), i)), num_bytes=6000)
    stats = store.stats()
    assert stats.evicted_objects > 100
    assert stats.moved_objects > 0
    store.close()
    assert TIGHT // 2 < largest <= TIGHT


def test_heat_survives_a_restart(tmp_path: Path) -> None:
    """What was used before is known to have been used afterwards."""
    store = small_store(tmp_path, TIGHT)
    put(store, *(key(i) for i in range(4)))
    fill(store, 12)
    store.touch([key(1), key(3)])
    store.close()
    store = small_store(tmp_path, TIGHT)
    fill(store, 12, first=12)
    assert store.batch_exists([key(i) for i in range(4)]) == [False, True, False, True]
    store.close()


def test_used_once_is_not_kept_for_ever(tmp_path: Path) -> None:
    store = small_store(tmp_path, TIGHT)
    put(store, key(1))
    get(store, key(1))
    fill(store, 200)
    assert store.batch_exists([key(1)]) == [False]
    assert store.stats().moved_objects >= 1
    store.close()


def test_when_everything_is_used_the_oldest_goes(tmp_path: Path) -> None:
    """A store full of objects in use still takes new ones."""
    store = small_store(tmp_path, TIGHT)
    names = []
    for i in range(200):
        names.append(key(i))
        assert put(store, key(i)) == [OK]
        store.touch(names)
    assert store.batch_exists(names[-3:]) == [True] * 3
    assert sum(store.batch_exists(names)) > 12
    assert store.audit() == []
    store.close()


def test_removed_objects_give_their_space_back(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    for i in range(60):
        put(store, key(i), key(i, namespace=1))
    before = store.stats().bytes_used
    assert store.clear(NAMESPACES[0]) == 60
    assert store.clear(NAMESPACES[1]) == 60
    assert store.stats().bytes_used <= before // 4
    store.close()
    assert list(tmp_path.glob("*.seg")) == [] or bytes_on_disk(tmp_path) < 2 * SEGMENT


# --- folders that can't be used


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"can't use .*file.*choose a folder"):
            small_store(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"can't use .*Permission denied.*choose a folder"):
        small_store(tmp_path)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.fail = {"create": errno.EROFS}
    with pytest.raises(ConfigError, match=r"can't use .*Read-only file system.*choose a folder"):
        small_store(tmp_path, disk=disk)
    assert open_files(tmp_path) == []


def test_a_folder_that_cannot_be_tidied(tmp_path: Path) -> None:
    small_store(tmp_path).close()
    (tmp_path / f"{0:016x}-{0:08x}.v1.idx.tmp").write_text("half an index")
    disk = FaultyDisk()
    small_store(tmp_path, disk=disk).close()
    (tmp_path / f"{0:016x}-{0:08x}.v1.idx.tmp").write_text("half an index")
    # The probe's own file is deleted first.
    disk.unlink = lambda path: (
        (_ for _ in ()).throw(PermissionError(errno.EPERM, "no")) if "idx" in path else os.unlink(path)
    )  # type: ignore
    with pytest.raises(ConfigError, match="can't use"):
        small_store(tmp_path, disk=disk)
    assert open_files(tmp_path) == []


def test_a_folder_with_other_things_in_it(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis.tex\)"):
        small_store(tmp_path)


def test_a_folder_of_another_version(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    put(store, key(1))
    store.close()
    for file in tmp_path.glob("*.v1.*"):
        file.rename(str(file).replace(".v1.", ".v2."))
    with pytest.raises(ConfigError, match="written in format 2, this release reads format 1; choose another"):
        small_store(tmp_path)


def test_capacities_that_are_too_small(tmp_path: Path) -> None:
    for capacity, options in (
        (100_000, DiskOptions()),
        (4 * SEGMENT, DiskOptions(segment_bytes=SEGMENT)),
        (9 * MIB, DiskOptions(segment_bytes=100)),
    ):
        with pytest.raises(ConfigError, match=r"is too small.*give it .* or more"):
            DiskStore(tmp_path / "new", capacity, options)
    with pytest.raises(ConfigError, match="can't read '20Gibb'"):
        open_store(f"{tmp_path}:20Gibb")
    DiskStore(tmp_path / "least", MIB, DiskOptions(min_free_bytes=0)).close()


def test_specs_with_and_without_a_size(tmp_path: Path) -> None:
    for spec, capacity in ((f"{tmp_path}/a:1:64MiB", 64 * MIB), (f"{tmp_path}/b", 20 << 30)):
        store = open_disk_store(spec)
        assert store.stats().capacity_bytes == capacity
        store.close()
    assert (tmp_path / "a:1").is_dir()
    assert (tmp_path / "a:1").stat().st_mode & 0o077 == 0, "what users wrote is nobody else's to read"


# --- disks that fill up or fail


def test_a_full_disk_is_an_outcome(tmp_path: Path) -> None:
    """Nothing wrong is found afterwards, and when there is room again, the store takes objects again."""
    disk = FaultyDisk()
    store = small_store(tmp_path, disk=disk)
    put(store, key(1))
    for room in (0, 4096, 6000, 10_000, 12_000):
        disk.room = room
        assert put(store, key(("no", room)), num_bytes=9000) == [FULL]
        assert store.batch_exists([key(("no", room))]) == [False]
        disk.room = None
        assert put(store, key(("yes", room)), num_bytes=9000) == [OK]
    assert get(store, *(key(("yes", room)) for room in (0, 4096, 6000)), num_bytes=9000) == [OK] * 3
    assert get(store, key(1)) == [OK]
    assert store.audit() == []
    store.close()
    store = small_store(tmp_path)
    assert get(store, *(key(("yes", room)) for room in (0, 4096, 6000)), num_bytes=9000) == [OK] * 3
    assert store.audit() == []
    store.close()


def test_a_disk_that_is_full_for_good(tmp_path: Path) -> None:
    """Then the oldest objects make room, as if the capacity were what there is."""
    disk = FaultyDisk()
    store = small_store(tmp_path, disk=disk)
    fill(store, 40)
    disk.free = 0
    fill(store, 100, first=40)
    assert store.stats().evicted_objects > 50
    assert len(list(tmp_path.glob("*.seg"))) < 12
    store.close()


def test_a_full_disk_with_nothing_to_give_up(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = small_store(tmp_path, disk=disk)
    disk.free = SEGMENT - 1
    assert put(store, key(1)) == [FULL]
    disk.free = SEGMENT
    assert put(store, key(1)) == [OK]
    store.close()


def test_a_disk_that_is_full_when_a_segment_is_sealed(tmp_path: Path) -> None:
    """The segment stays as it is, and is sealed later."""
    disk = FaultyDisk()
    store = small_store(tmp_path, disk=disk)
    fill(store, 6)
    disk.room = 8192 * 2
    while put(store, key(("more", disk.room))) == [OK]:
        pass
    disk.room = None
    fill(store, 20, first=6)
    assert get(store, *(key(("fill", i)) for i in range(26))) == [OK] * 26
    assert store.audit() == []
    store.close()
    store = small_store(tmp_path)
    assert get(store, *(key(("fill", i)) for i in range(26))) == [OK] * 26
    store.close()


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from support.store_folder import small_store;"
        "from contracts.store import key, put;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (32768, 32768));"
        "store = small_store(Path(sys.argv[1]));"
        "print([put(store, key(i))[0].value for i in range(6)], store.audit()); store.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    # Three extents of 12 KiB reach the limit; each time one fails, a new segment is begun.
    assert done.stdout == "['ok', 'ok', 'full', 'ok', 'ok', 'full'] []\n"


def test_a_failing_disk(tmp_path: Path) -> None:
    """Reads and writes that fail are outcomes; an object that could not be read is not tried for ever."""
    disk = FaultyDisk()
    store = small_store(tmp_path, disk=disk, direct=False)
    put(store, key(1), key(2))
    disk.fail = {"preadv": errno.EIO}
    assert get(store, key(1)) == [FAILED]
    disk.fail = {"pwritev": errno.EIO}
    assert put(store, key(3)) == [FAILED]
    disk.fail = {}
    assert store.batch_exists([key(1), key(2), key(3)]) == [False, True, False]
    assert put(store, key(1), key(3)) == [OK, OK]
    assert get(store, key(1), key(2), key(3)) == [OK] * 3
    assert store.audit() == []
    store.close()


def test_no_more_files_can_be_opened(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = small_store(tmp_path, disk=disk)
    put(store, key(1))
    disk.fail = {"open": errno.EMFILE, "create": errno.EMFILE}
    assert get(store, key(1)) == [FAILED]
    assert put(store, *(key(i) for i in range(2, 15)))[-1] is FAILED
    disk.fail = {}
    assert put(store, key(1)) == [OK]
    assert get(store, key(1)) == [OK]
    store.close()


def test_the_folder_is_deleted_under_a_store(tmp_path: Path) -> None:
    store = small_store(tmp_path / "store")
    put(store, key(1))
    shutil.rmtree(tmp_path / "store")
    assert get(store, key(1)) == [MISS]
    assert put(store, key(2)) == [FAILED]
    assert store.batch_exists([key(1), key(2)]) == [False, False]
    store.touch([key(1)])
    store.remove([key(1)])
    store.clear()
    assert store.stats().bytes_used == 0
    assert store.audit() != []
    store.close()


def test_wrong_bytes_are_never_served(tmp_path: Path) -> None:
    """Not even whole objects in one another's place."""
    store = small_store(tmp_path)
    put(store, *(key(i) for i in range(4)))
    store.close()
    (file,) = tmp_path.glob("*.seg")
    data = bytearray(file.read_bytes())
    first, second = data.index(payload(key(0)).tobytes()), data.index(payload(key(1)).tobytes())
    data[first : first + 5000], data[second : second + 5000] = data[second : second + 5000], data[first : first + 5000]
    data[data.index(payload(key(2)).tobytes()) + 4999] ^= 1
    file.write_bytes(data)
    store = small_store(tmp_path)
    assert get(store, *(key(i) for i in range(4))) == [TORN, TORN, TORN, OK]
    assert store.batch_exists([key(i) for i in range(4)]) == [False, False, False, True]
    store.close()
    store = small_store(tmp_path)
    assert store.batch_exists([key(i) for i in range(4)]) == [False, False, False, True], "torn for good"
    assert put(store, key(0)) == get(store, key(0)) == [OK]
    store.close()


# --- waiting


def test_a_held_lock_costs_a_put_its_time_and_a_get_nothing(tmp_path: Path) -> None:
    """Whoever hangs while it holds the folder's lock hinders nobody who reads, nor who has room in its own segment."""
    store = small_store(tmp_path)
    put(store, key(1))
    fd = os.open(tmp_path / "LOCK", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert get(store, key(1)) == put(store, key(2)) == [OK]
    names = [key(i) for i in range(10, 40)]
    outcomes = store.batch_put(names, [payload(k) for k in names], timeout_s=0.05)
    assert set(outcomes) == {OK, TIMED_OUT}
    assert get(store, *names) == [OK if o is OK else MISS for o in outcomes]
    store.close(timeout_s=0.05)
    os.close(fd)
    assert open_files(tmp_path) == []
    store = small_store(tmp_path)
    assert get(store, key(1), key(2)) == [OK, OK], "the segment that could not be sealed was adopted"
    store.close()


def test_close_waits_for_calls_under_way(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow(FaultyDisk):
        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
            if offset > 4096:  # the second extent
                begun.set()
                assert go.wait(30)
            return super().pwritev(fd, buffers, offset)

    store = small_store(tmp_path, disk=Slow(), direct=False)
    put(store, key(1))
    outcomes: list[Outcome] = []
    putter = threading.Thread(target=lambda: outcomes.extend(put(store, key(2))))
    putter.start()
    assert begun.wait(30)
    closer = threading.Thread(target=store.close)
    closer.start()
    while store.batch_exists([key(1)]) == [True]:
        time.sleep(0)  # until the store takes no more calls
    assert get(store, key(1)) == [FAILED]
    go.set()
    putter.join()
    closer.join()
    assert outcomes == [OK]
    assert open_files(tmp_path) == []
    store = small_store(tmp_path)
    assert get(store, key(1), key(2)) == [OK, OK]
    store.close()


def test_close_gives_up_on_calls_that_hang(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    class Hanging(FaultyDisk):
        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
            begun.set()
            assert go.wait(30)
            return super().pwritev(fd, buffers, offset)

    class Patient(Hanging):
        """Lets the probe and the first segment's head pass."""

        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
            return super().pwritev(fd, buffers, offset) if offset else FaultyDisk.pwritev(self, fd, buffers, offset)

    disk = Patient()
    store = small_store(tmp_path, disk=disk)
    outcomes: list[Outcome] = []
    putter = threading.Thread(target=lambda: outcomes.extend(put(store, key(1))))
    putter.start()
    assert begun.wait(30)
    store.close(timeout_s=0.05)
    go.set()
    putter.join()
    assert outcomes == [OK]
    assert [Path(name).name for name in open_files(tmp_path)] == ["LOCK"]
    disk.abandon()
    store = small_store(tmp_path)
    assert get(store, key(1)) == [OK]
    store.close()


# --- the helpers


def run_all(team: Team, tasks: list[int], work: Callable[[int], None]) -> None:
    team.run(tasks, work, time.monotonic() + 30)


def test_a_team_does_every_task_once_and_several_at_a_time() -> None:
    team = Team(3, "test")
    done: list[int] = []
    together = threading.Barrier(4, timeout=30)

    def work(task: int) -> None:
        if task < 4:
            together.wait()  # four at once, or never
        done.append(task)

    run_all(team, list(range(40)), work)
    assert sorted(done) == list(range(40))
    team.close(time.monotonic() + 30)
    run_all(team, [1, 2], done.append)
    assert sorted(done)[-1] == 39
    assert len(done) == 42, "callers of a closed team work alone"


def test_a_team_hands_on_errors_and_goes_on() -> None:
    team = Team(2, "test")

    def work(task: int) -> None:
        if task == 5:
            raise KeyError(task)

    for _ in range(20):
        with pytest.raises(KeyError):
            run_all(team, list(range(10)), work)
    run_all(team, [1, 2, 3], work)
    team.close(time.monotonic() + 30)


def test_a_busy_team_leaves_callers_to_themselves() -> None:
    """Requests for help are bounded: none waits for a helper."""
    team = Team(1, "test")
    go, begun = threading.Event(), threading.Event()
    main = threading.current_thread()

    def hang(task: int) -> None:
        if threading.current_thread() is not main:
            begun.set()
            assert go.wait(30)
        else:
            assert begun.wait(30)

    first = threading.Thread(target=lambda: run_all(team, [0, 1], lambda _: go.wait(30)))
    first.start()
    done: list[int] = []
    for _ in range(10):
        run_all(team, [1, 2, 3], done.append)
    assert len(done) == 30
    go.set()
    first.join()
    team.close(time.monotonic() + 30)


def test_what_is_late_is_left_undone() -> None:
    team = Team(0, "test")
    done: list[int] = []
    for tasks in ([], [1], [1, 2, 3]):
        team.run(tasks, done.append, time.monotonic() - 1)
    assert done == []
