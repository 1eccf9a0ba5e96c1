"""Crashes at every change of the disk, damage to every kind of file, random histories of two stores on one folder."""

import os
from pathlib import Path
from shutil import copytree, rmtree
from tempfile import mkdtemp

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contracts.store import NAMESPACES, key, payload
from cygnet.kv.runtime.disk_store import DiskStore
from cygnet.kv.store import Outcome
from support.faulty_disk import Crash, FaultyDisk
from support.store_folder import AMPLE, TIGHT, bytes_on_disk, open_files, small_store

OK, MISS, TORN = Outcome.OK, Outcome.MISS, Outcome.TORN
LENGTHS = (1, 100, 4096, 5000, 14_000)


def length_of(name: int) -> int:
    return LENGTHS[name % len(LENGTHS)]


def put_some(store: DiskStore, names: list[int], acknowledged: set[int] | None = None) -> None:
    """Put objects called `names` as one batch; adds to `acknowledged` what is then there."""
    keys = [key(name) for name in names]
    outcomes = store.batch_put(keys, [payload(k, length_of(n)) for k, n in zip(keys, names, strict=True)])
    if acknowledged is not None:
        acknowledged |= {name for name, outcome in zip(names, outcomes, strict=True) if outcome is OK}


def get_some(store: DiskStore, names: list[int]) -> list[Outcome]:
    """Get them as one batch; what is `OK` must be right."""
    buffers = [np.full(length_of(name), 0xAA, np.uint8) for name in names]
    outcomes = store.batch_get_into([key(name) for name in names], buffers)
    for name, buffer, outcome in zip(names, buffers, outcomes, strict=True):
        if outcome is OK:
            assert np.array_equal(buffer, payload(key(name), length_of(name))), f"wrong bytes for {name}"
    return outcomes


# --- a crash at every change


def history(store: DiskStore, acknowledged: set[int]) -> None:
    """A bit of everything: batches, rolls, eviction with moves and second rounds, removal, sealing."""
    for first in range(0, 40, 5):
        put_some(store, list(range(first, first + 5)), acknowledged)
        store.touch([key(name) for name in range(0, first, 3)])
        if first == 20:
            acknowledged -= {7, 8}
            store.remove([key(7), key(8)])
    store.close()


def number_of_changes(folder: Path, capacity: int) -> int:
    disk = FaultyDisk()
    history(small_store(folder, capacity, disk), set())
    return disk.changes


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "torn"), [(AMPLE, 0.6), (TIGHT, 0.0), (TIGHT, 0.6), (TIGHT, 1.0)])
def test_a_crash_at_any_change(tmp_path: Path, capacity: int, torn: float) -> None:
    """What was acknowledged is found (if there is room for all), and right; the store goes on, within its capacity."""
    changes = number_of_changes(tmp_path / "count", capacity)
    assert changes > 80
    for crash_at in range(changes):
        folder = tmp_path / str(crash_at)
        disk = FaultyDisk(crash_at=crash_at, torn=torn)
        acknowledged: set[int] = set()
        with pytest.raises(Crash):
            history(small_store(folder, capacity, disk), acknowledged)
        disk.abandon()
        assert open_files(folder) == []
        assert bytes_on_disk(folder) <= capacity
        store = small_store(folder, capacity)
        assert store.audit() == []
        names = sorted(acknowledged)
        found = store.batch_exists([key(name) for name in names])
        if capacity == AMPLE:
            assert all(found), f"lost after a crash at change {crash_at}"
        assert get_some(store, names) == [OK if there else MISS for there in found]
        assert set(get_some(store, list(range(40)))) <= {OK, MISS}
        put_some(store, list(range(100, 105)))
        assert get_some(store, list(range(100, 105))) == [OK] * 5
        assert store.audit() == []
        assert bytes_on_disk(folder) <= capacity
        store.close()


def test_a_crash_while_another_lives(tmp_path: Path) -> None:
    """The survivor seals what the dead one left, keeps all of it, and nothing is left lying about."""
    survivor = small_store(tmp_path)
    put_some(survivor, [1])
    disk = FaultyDisk()
    dead = small_store(tmp_path, disk=disk)
    put_some(dead, [2, 3])
    assert get_some(survivor, [2, 3]) == [OK, OK]
    disk.abandon()
    put_some(survivor, list(range(10, 60)))
    assert get_some(survivor, [1, 2, 3]) == [OK] * 3
    assert len(list(tmp_path.glob("*.idx"))) >= len(list(tmp_path.glob("*.seg"))) - 1
    assert survivor.audit() == []
    survivor.close()


def test_a_torn_tail_is_cut(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = small_store(tmp_path, disk=disk)
    put_some(store, [1])
    put_some(store, [2, 3])
    disk.abandon()
    (file,) = tmp_path.glob("*.seg")
    whole = file.stat().st_size
    for cut in (1, 4096, 5000, 3 * 4096):
        folder = tmp_path.parent / f"{tmp_path.name}-cut{cut}"
        copytree(tmp_path, folder)
        with open(folder / file.name, "r+b") as data:
            data.truncate(whole - cut)
        store = small_store(folder)
        assert get_some(store, [1, 2, 3]) == [OK, MISS, MISS]
        assert store.audit() == []
        assert (folder / file.name).stat().st_size == 4096 * 3
        store.close()


def test_a_tail_of_zeros_is_cut(tmp_path: Path) -> None:
    """After a loss of power a file may be as long as it was, and its end never written."""
    disk = FaultyDisk()
    store = small_store(tmp_path, disk=disk)
    put_some(store, [0])
    put_some(store, [1, 3])
    disk.abandon()
    (file,) = tmp_path.glob("*.seg")
    size = file.stat().st_size
    with open(file, "r+b") as data:
        data.truncate(size - 4096)
        data.truncate(size)
    store = small_store(tmp_path)
    assert get_some(store, [0, 1, 3]) == [OK, MISS, MISS]
    assert store.audit() == []
    store.close()


# --- damage


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sealed segments, marks, removed objects, and a segment whose writer was killed."""
    folder = tmp_path_factory.mktemp("sample") / "store"
    disk = FaultyDisk()
    store = small_store(folder, disk=disk)
    for first in range(0, 30, 3):
        put_some(store, list(range(first, first + 3)))
    store.touch([key(name) for name in range(0, 30, 2)])
    store.remove([key(29)])
    disk.abandon()
    return folder


def check_damaged(folder: Path) -> int:
    """Open, get everything twice, go on; returns how many objects were right."""
    store = small_store(folder)
    outcomes = get_some(store, list(range(30)))
    assert set(outcomes) <= {OK, MISS, TORN}
    again = get_some(store, list(range(30)))
    assert [o is OK for o in again] == [o is OK for o in outcomes]
    assert TORN not in again
    assert store.batch_exists([key(n) for n in range(30)]) == [o is OK for o in again]
    put_some(store, list(range(30)))
    assert get_some(store, list(range(30))) == [OK] * 30
    store.close()
    assert open_files(folder) == []
    return outcomes.count(OK)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.integers(0, 99), place=st.floats(0, 1, exclude_max=True), how=st.sampled_from(("flip", "cut", "zero")))
def test_any_damage_is_a_miss(sample: Path, choice: int, place: float, how: str) -> None:
    folder = Path(mkdtemp(dir=sample.parent)) / "store"
    copytree(sample, folder)
    file = damage(folder, choice, place, how)
    right = check_damaged(folder)
    if how == "flip" and not file.endswith(".marks"):
        assert right >= 26, "one byte costs no more than the objects of one extent"


def damage(folder: Path, choice: int, place: float, how: str) -> str:
    """Damage one file at one place; returns its name."""
    files = sorted(name for name in os.listdir(folder) if (folder / name).stat().st_size)
    name = files[choice % len(files)]
    data = bytearray((folder / name).read_bytes())
    at = int(place * len(data))
    if how == "flip":
        data[at] ^= 0x55
    elif how == "cut":
        del data[at:]
    else:
        end = min(len(data), (at | 4095) + 1)
        data[at:end] = bytes(end - at)
    (folder / name).write_bytes(data)
    return name


def test_every_byte_of_an_index_and_of_a_head(tmp_path: Path) -> None:
    """Exhaustively for a small store: no byte of what describes objects can be wrong unnoticed."""
    store = small_store(tmp_path / "good")
    put_some(store, [1, 6])
    store.close()
    (index,) = (tmp_path / "good").glob("*.idx")
    (data,) = (tmp_path / "good").glob("*.seg")
    folder = tmp_path / "bad"
    copytree(tmp_path / "good", folder)
    places = [(index.name, at) for at in range(index.stat().st_size)]
    places += [(data.name, at) for at in [*range(24), *range(4096, 4096 + 40 + 2 * 52), *range(8184, 8192)]]
    for name, at in places:
        content = bytearray((tmp_path / "good" / name).read_bytes())
        content[at] ^= 0xFF
        (folder / name).write_bytes(content)
        store = small_store(folder)
        assert get_some(store, [1, 6]) == [OK, OK], "the other of the two descriptions is whole"
        store.close()
        (folder / name).write_bytes((tmp_path / "good" / name).read_bytes())


def test_files_of_segments_that_are_gone_are_removed(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    put_some(store, [1])
    store.close()
    (data,) = tmp_path.glob("*.seg")
    data.unlink()
    store = small_store(tmp_path)
    assert get_some(store, [1]) == [MISS]
    assert os.listdir(tmp_path) == ["LOCK"]
    assert store.audit() == []
    store.close()


# --- random histories


class StoreMachine(RuleBasedStateMachine):
    """Two stores on one folder, as two processes have them, against a dict of what must be there."""

    @initialize(ample=st.booleans(), direct=st.booleans())
    def start(self, ample: bool, direct: bool) -> None:
        self.folder, self.direct = Path(mkdtemp()), direct
        self.capacity = AMPLE if ample else TIGHT
        self.disks = [FaultyDisk(watch=self.watch), FaultyDisk(watch=self.watch)]
        self.stores = [self.open(disk) for disk in self.disks]
        self.there: set[int] = set()
        self.damaged = False

    def open(self, disk: FaultyDisk) -> DiskStore:
        return small_store(self.folder, self.capacity, disk, direct=self.direct)

    def watch(self) -> None:
        assert bytes_on_disk(self.folder) <= self.capacity

    @property
    def exact(self) -> bool:
        """Whether everything put must still be there."""
        return self.capacity == AMPLE and not self.damaged

    @rule(who=st.integers(0, 1), names=st.lists(st.integers(0, 40), min_size=1, max_size=6))
    def put(self, who: int, names: list[int]) -> None:
        acknowledged: set[int] = set()
        put_some(self.stores[who], names, acknowledged)
        assert acknowledged == set(names), "there is always room, or room to be made"
        self.there |= acknowledged

    @rule(who=st.integers(0, 1), names=st.lists(st.integers(0, 40), min_size=1, max_size=9))
    def get(self, who: int, names: list[int]) -> None:
        outcomes = get_some(self.stores[who], names)
        assert set(outcomes) <= ({OK, MISS, TORN} if self.damaged else {OK, MISS})
        found = {name for name, outcome in zip(names, outcomes, strict=True) if outcome is OK}
        if self.exact:
            assert found == set(names) & self.there
        else:
            assert self.damaged or found <= self.there

    @rule(who=st.integers(0, 1), names=st.lists(st.integers(0, 40), max_size=9))
    def touch(self, who: int, names: list[int]) -> None:
        self.stores[who].touch([key(name) for name in names])

    @rule(who=st.integers(0, 1), names=st.lists(st.integers(0, 40), max_size=4))
    def remove(self, who: int, names: list[int]) -> None:
        count = self.stores[who].remove([key(name) for name in names])
        assert not self.exact or count == len(set(names) & self.there)
        self.there -= set(names)

    @rule(who=st.integers(0, 1))
    def clear(self, who: int) -> None:
        assert self.stores[who].clear(NAMESPACES[1]) == 0
        count = self.stores[who].clear(NAMESPACES[0])
        assert not self.exact or count == len(self.there)
        self.there.clear()

    @rule(who=st.integers(0, 1), kill=st.booleans())
    def reopen(self, who: int, kill: bool) -> None:
        if kill:
            self.disks[who].abandon()
        else:
            self.stores[who].close()
        self.stores[who] = self.open(self.disks[who])

    @rule(who=st.integers(0, 1), names=st.lists(st.integers(0, 40), min_size=1, max_size=6), after=st.integers(0, 12))
    def crash_in_put(self, who: int, names: list[int], after: int) -> None:
        disk = self.disks[who]
        disk.crash_after(after)
        acknowledged: set[int] = set()
        try:
            put_some(self.stores[who], names, acknowledged)
        except Crash:
            self.unsure(names)
        self.there |= acknowledged
        disk.abandon()
        disk.crash_after(None)
        self.stores[who] = self.open(disk)

    def unsure(self, names: list[int]) -> None:
        """These may or may not be there: find out, so that the model is exact again."""
        other = small_store(self.folder, self.capacity, direct=self.direct)
        self.there |= {name for name in names if get_some(other, [name]) == [OK]}
        other.close()

    @rule(choice=st.integers(0, 99), place=st.floats(0, 1, exclude_max=True), how=st.sampled_from(("flip", "zero")))
    @precondition(lambda self: self.stores[0].stats().num_objects > 3)
    def damage(self, choice: int, place: float, how: str) -> None:
        damage_at = [name for name in os.listdir(self.folder) if (self.folder / name).stat().st_size]
        if damage_at:
            self.damaged = True
            damage(self.folder, choice, place, how)

    @invariant()
    def audited(self) -> None:
        if not self.damaged:
            for store in self.stores:
                assert store.audit() == []
        assert bytes_on_disk(self.folder) <= self.capacity

    def teardown(self) -> None:
        for store in getattr(self, "stores", ()):
            store.close()
        if hasattr(self, "folder"):
            assert open_files(self.folder) == []
            rmtree(self.folder)


StoreMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreMachine = StoreMachine.TestCase
