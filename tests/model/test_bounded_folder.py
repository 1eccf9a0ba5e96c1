"""A bounded folder: least recently used first, the disk is never filled, and half a file is never seen."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cygnet.model import bounded_folder
from cygnet.model.bounded_folder import MARGIN_BYTES, BoundedFolder, default_limit, remove, touch

GIB = 1 << 30


def folder(path: Path, limit: int | None = 100) -> BoundedFolder:
    return BoundedFolder(path / "deep" / "down", suffix=".bin", limit=limit)


def put(into: BoundedFolder, name: str, size: int, age_s: float = 0.0) -> Path:
    path = into.place(name)
    with into.writing(path) as file:
        file.write(b"x" * size)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def names(of: BoundedFolder) -> list[str]:
    return [path.stem for path, _ in of.files()]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Free bytes of a disk that a test sets; it does not follow what is written."""
    disk = SimpleNamespace(free=1000 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    return disk


def test_the_least_recently_used_go_first(tmp_path: Path, free: SimpleNamespace) -> None:
    it = folder(tmp_path)
    old, _, _ = (put(it, name, 30, age) for name, age in (("old", 30), ("older", 40), ("new", 20)))
    assert names(it) == ["older", "old", "new"]
    touch(old)
    assert it.make_room(10) == ""
    assert names(it) == ["older", "new", "old"]
    assert it.make_room(11) == ""
    assert names(it) == ["new", "old"]
    assert it.make_room(100) == ""
    assert names(it) == []


def test_what_does_not_fit_removes_nothing(tmp_path: Path, free: SimpleNamespace) -> None:
    it = folder(tmp_path)
    put(it, "a", 60)
    assert "allowed" in it.make_room(101)
    free.free = MARGIN_BYTES - 10
    assert "too little" in it.make_room(60)
    assert names(it) == ["a"]
    assert it.make_room(50) == ""
    assert names(it) == []


def test_the_disk_keeps_a_margin(tmp_path: Path, free: SimpleNamespace) -> None:
    it = folder(tmp_path, 10 * GIB)
    put(it, "a", 10, 10)
    put(it, "b", 50)
    free.free = MARGIN_BYTES + 80
    assert it.make_room(80) == ""
    assert names(it) == ["a", "b"]
    assert it.make_room(85) == ""
    assert names(it) == ["b"]


def test_without_a_limit_it_is_a_tenth_of_the_disk(tmp_path: Path, free: SimpleNamespace) -> None:
    assert folder(tmp_path, None).limit_bytes() == 20 * GIB
    free.free = 50 * GIB
    assert folder(tmp_path, None).limit_bytes() == 5 * GIB
    assert default_limit(40 * GIB, 10 * GIB) == 5 * GIB, "what it has grown to does not shrink it"


def test_other_files_are_left_alone(tmp_path: Path, free: SimpleNamespace) -> None:
    it = folder(tmp_path)
    put(it, "a", 60)
    (it.path / "note.txt").write_text("mine")
    assert it.num_bytes() == 60
    assert it.make_room(100) == ""
    assert (it.path / "note.txt").exists()


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    it = folder(tmp_path)
    assert (it.files(), it.num_bytes()) == ([], 0)
    assert it.free_bytes() > 0
    remove(it.place("nothing"))
    touch(it.place("nothing"))


def test_a_failed_write_leaves_no_trace(tmp_path: Path) -> None:
    it = folder(tmp_path)
    put(it, "a", 5)

    def fail() -> None:
        with it.writing(it.place("a")) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in it.path.iterdir()] == ["a.bin"]
    assert it.place("a").read_bytes() == b"xxxxx"


def test_killed_in_the_middle(tmp_path: Path, free: SimpleNamespace) -> None:
    """No half file is ever seen, and what is left of it goes once nobody can be writing any more."""
    it = folder(tmp_path)
    program = (
        "import sys; from pathlib import Path; from cygnet.model.bounded_folder import BoundedFolder\n"
        f"it = BoundedFolder(Path({str(it.path)!r}), suffix='.bin')\n"
        "with it.writing(it.place('a')) as file:\n"
        "    file.write(b'half'); file.flush(); print('half', flush=True); sys.stdin.read()\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        writer.send_signal(signal.SIGKILL)
    assert it.files() == []
    (left,) = it.path.iterdir()
    assert it.make_room(1) == ""
    assert left.exists(), "it might be another's who is writing"
    os.utime(left, (time.time() - 2 * bounded_folder._ABANDONED_S,) * 2)
    assert it.make_room(1) == ""
    assert not left.exists()
