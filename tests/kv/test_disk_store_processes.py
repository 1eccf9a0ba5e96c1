"""Several processes on one folder, and processes that are killed while they write."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from contracts.store import key
from cygnet.kv.runtime.disk_store import DiskStore
from cygnet.kv.store import Outcome
from support.store_folder import AMPLE, TIGHT, bytes_held, bytes_on_disk, open_files, small_store
from support.store_worker import LENGTHS, body


@contextmanager
def worker(folder: Path, capacity: int, role: str, seed: int = 0) -> Iterator["subprocess.Popen[str]"]:
    """A running process; killed at the end if it hasn't ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.store_worker", str(folder), str(capacity), role, str(seed)],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: "subprocess.Popen[str]") -> bool:
    """Whether it has ended, or does so in the next moment."""
    try:
        process.wait(timeout=0.01)
    except subprocess.TimeoutExpired:
        return False
    return True


def ask(process: "subprocess.Popen[str]", name: int) -> None:
    """Have a `serve` worker put an object."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"{name} ok\n"


def right(store: DiskStore, names: list[int]) -> int:
    """Get objects one by one; how many were there. Those must be right."""
    count = 0
    for name in names:
        buffer = np.zeros(LENGTHS[name % len(LENGTHS)], np.uint8)
        outcome = store.batch_get_into([key(name)], [buffer])[0]
        assert outcome in (Outcome.OK, Outcome.MISS), outcome
        if outcome is Outcome.OK:
            assert np.array_equal(buffer, body(name)), f"wrong bytes for {name}"
            count += 1
    return count


def kill_after(folder: Path, capacity: int, batches: int, first: int) -> list[int]:
    """Kill a writer once it has acknowledged so many batches; all names it has acknowledged until it died."""
    with worker(folder, capacity, "write", first) as process:
        assert process.stdout is not None
        acknowledged: list[int] = []
        lines = iter(process.stdout.readline, "")
        for number, line in enumerate(lines):
            begin, count = map(int, line.split())
            acknowledged += range(begin, begin + count)
            if number + 1 == batches:
                process.kill()
    return acknowledged


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """A writer is killed again and again at moments of its own; nobody has sealed or flushed anything."""
    acknowledged: list[int] = []
    for batches in (1, 3, 10, 24, 41):
        acknowledged += kill_after(tmp_path, 8 * AMPLE, batches, len(acknowledged))
        store = small_store(tmp_path, 8 * AMPLE)
        assert right(store, acknowledged) == len(acknowledged)
        unacknowledged = range(len(acknowledged), len(acknowledged) + 20)
        right(store, list(unacknowledged))
        assert store.audit() == []
        store.remove([key(name) for name in unacknowledged])
        store.close()


def test_kill_9_while_evicting(tmp_path: Path) -> None:
    """The same with a folder that is full: whatever is found is right, and the capacity holds."""
    first = 0
    for batches in (20, 45, 70, 33):
        names = kill_after(tmp_path, TIGHT, batches, first)
        assert bytes_on_disk(tmp_path) <= TIGHT
        store = small_store(tmp_path, TIGHT)
        assert right(store, names[-5:]) >= 3
        right(store, names)
        assert store.audit() == []
        assert bytes_on_disk(tmp_path) <= TIGHT
        store.close()
        first = names[-1] + 1


def test_what_one_puts_the_other_finds_at_once(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    with worker(tmp_path, AMPLE, "serve") as process:
        for name in range(30):
            assert right(store, [name]) == 0
            ask(process, name)
            assert right(store, [name]) == 1
        store.remove([key(4)])
        ask(process, 4)  # it has heard of that, and puts it anew
        assert right(store, [4]) == 1
        assert store.batch_put([key(100)], [body(100)]) == [Outcome.OK]
        before = store.stats()
        process.communicate()
    assert process.returncode == 0
    assert right(store, list(range(30))) == 30
    assert store.audit() == []
    assert before.num_objects == 31
    store.close()


def test_one_evicts_what_the_other_reads(tmp_path: Path) -> None:
    """What is gone is a miss, though this process has its file open; and its space is free."""
    store = small_store(tmp_path, TIGHT)
    with worker(tmp_path, TIGHT, "serve") as process:
        ask(process, 0)
        assert right(store, [0]) == 1
        assert [name for name in open_files(tmp_path) if name.endswith(".seg")]
        for name in range(1, 200):
            ask(process, name)
            assert bytes_on_disk(tmp_path) <= TIGHT
        held = [name for name in open_files(tmp_path) if name.endswith("(deleted)")]
        assert len(held) == 1, "this process has not looked yet"
        assert bytes_held(tmp_path) == 0
        assert right(store, [0]) == 0
        assert right(store, [199]) == 1
        assert not [name for name in open_files(tmp_path) if name.endswith("(deleted)")]
        assert store.audit() == []
        process.communicate()
    assert process.returncode == 0
    store.close()


def test_the_other_ones_use_keeps_objects(tmp_path: Path) -> None:
    """Eviction by one process knows what another has used."""
    store = small_store(tmp_path, TIGHT)
    with worker(tmp_path, TIGHT, "serve") as process:
        for name in (1000, 1002, 1005):
            ask(process, name)
        for name in range(150):
            ask(process, name)
            assert right(store, [1000, 1005]) == 2
        assert right(store, [1002]) == 0
        process.communicate()
    assert process.returncode == 0
    store.close()


@pytest.mark.parametrize("capacity", [AMPLE, 2 * TIGHT], ids=["ample", "tight"])
def test_processes_side_by_side(tmp_path: Path, capacity: int) -> None:
    """Three write, read and evict as they like; all is right, and the capacity holds whenever one looks."""
    with (
        worker(tmp_path, capacity, "mixed", 1) as a,
        worker(tmp_path, capacity, "mixed", 2) as b,
        worker(tmp_path, capacity, "mixed", 3) as c,
    ):
        for process in (a, b, c):
            while not ended(process):
                assert bytes_on_disk(tmp_path) <= capacity
        assert [process.communicate()[0] for process in (a, b, c)] == ["done\n"] * 3
    store = small_store(tmp_path, capacity)
    assert right(store, list(range(120))) > 20
    assert store.audit() == []
    store.close()


def test_a_stopped_process_hinders_nobody_but_for_its_segment(tmp_path: Path) -> None:
    """SIGSTOP, not death: its locks stay. Others read what it wrote, and write."""
    store = small_store(tmp_path)
    with worker(tmp_path, AMPLE, "serve") as process:
        ask(process, 1)
        process.send_signal(signal.SIGSTOP)
        for name in range(10, 40):
            assert store.batch_put([key(name)], [body(name)]) == [Outcome.OK]
        assert right(store, [1, *range(10, 40)]) == 31
        process.send_signal(signal.SIGCONT)
        ask(process, 2)
        process.communicate()
    assert right(store, [1, 2]) == 2
    assert store.audit() == []
    store.close()
