"""Files through the cache: alone, in front of a folder or another file system, as fsspec's users see them."""

import importlib
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save_file

from cygnet.gcache.runtime.files import BLOCK_BYTES, GCacheFileSystem
from cygnet.gcache.runtime.server import Server
from support.gcache import MIB, client, server

BIG = bytes(range(251)) * (5 * MIB // 251 + 1)


@contextmanager
def files(running: Server, **options: object) -> Iterator[GCacheFileSystem]:
    servers = f"127.0.0.1:{running.port}?timeout_s=60"
    opened = GCacheFileSystem(servers, timeout_s=60.0, skip_instance_cache=True, **options)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def alone() -> Iterator[GCacheFileSystem]:
    with server(64 * MIB) as running, files(running) as opened:
        yield opened


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 4 * BLOCK_BYTES + 77])
@pytest.mark.parametrize("step", [1000, 3 * MIB, 1 << 30])
def test_what_is_written_is_read(alone: GCacheFileSystem, size: int, step: int) -> None:
    data = BIG[:size]
    with alone.open("a/file", "wb") as file:
        for at in range(0, size, step):
            file.write(data[at : at + step])
    assert alone.info("a/file")["size"] == size
    assert alone.cat_file("a/file") == data
    with alone.open("a/file") as file:
        assert file.read(10) == data[:10]
        assert file.seek(0, 2) == size
        file.seek(size // 2)
        assert file.read() == data[size // 2 :]
        into = bytearray(100)
        file.seek(size // 3)
        assert into[: file.readinto(into)] == data[size // 3 : size // 3 + 100]


@pytest.fixture(scope="module")
def one_file() -> Iterator[GCacheFileSystem]:
    with server(64 * MIB) as running, files(running) as opened:
        opened.pipe_file("file", BIG)
        yield opened


@settings(deadline=None, max_examples=60)
@given(start=st.none() | st.integers(-6 * MIB, 6 * MIB), end=st.none() | st.integers(-6 * MIB, 6 * MIB))
def test_any_range(one_file: GCacheFileSystem, start: int | None, end: int | None) -> None:
    assert one_file.cat_file("file", start, end) == BIG[start:end]


def test_names(alone: GCacheFileSystem) -> None:
    for name in ("top", "a/one", "a/two", "a/b/three"):
        alone.pipe_file(name, name.encode())
    assert alone.ls("", detail=False) == ["a", "top"]
    assert alone.ls("a", detail=False) == ["a/b", "a/one", "a/two"]
    assert [info["type"] for info in alone.ls("gcache://a/")] == ["directory", "file", "file"]
    assert alone.ls("a/one", detail=False) == ["a/one"]
    assert alone.find("") == ["a/b/three", "a/one", "a/two", "top"]
    assert alone.glob("a/t*") == ["a/two"]
    assert alone.isdir("a/b")
    assert not alone.exists("a/none")
    alone.pipe_file("a/one", b"anew")
    assert alone.cat_file("a/one") == b"anew"
    alone.rm("a/one")
    assert alone.ls("a", detail=False) == ["a/b", "a/two"]
    with pytest.raises(FileNotFoundError):
        alone.cat_file("a/one")
    with pytest.raises(FileNotFoundError):
        alone.rm("a/one")
    with pytest.raises(IsADirectoryError):
        alone.cat_file("a")
    alone.rm("a", recursive=True)
    assert alone.ls("", detail=False) == ["top"]
    assert not alone.exists("a")


def test_copies_to_and_from_disk(alone: GCacheFileSystem, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(BIG)
    alone.put(str(tmp_path / "in"), "x/in")
    alone.get("x/in", str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == BIG


def test_a_file_that_has_left_the_cache_is_an_error_and_never_other_bytes(alone: GCacheFileSystem) -> None:
    alone.pipe_file("file", BIG)
    alone._client.remove([alone._block_key("file", alone.known("file").stamp, 2)])
    assert alone.cat_file("file", 0, 10) == BIG[:10]
    with pytest.raises(OSError, match="has left the cache"):
        alone.cat_file("file")


def test_a_file_that_is_put_anew_while_it_is_read(alone: GCacheFileSystem) -> None:
    alone.pipe_file("file", BIG)
    with alone.open("file") as file:
        assert file.read(10) == BIG[:10]
        alone.pipe_file("file", b"x" * len(BIG))
        assert file.read(10) == BIG[10:20], "it is still the one that was opened"


def test_nothing_is_there_before_it_is_closed(alone: GCacheFileSystem) -> None:
    file = alone.open("file", "wb")
    file.write(BIG)
    assert not alone.exists("file")
    file.close()
    assert alone.exists("file")


def test_a_cache_that_takes_nothing_says_so() -> None:
    with server(2 * MIB) as running, files(running) as opened:
        running.close()
        with pytest.raises(OSError, match="did not take"):
            opened.pipe_file("file", b"x")


# --- in front of others


def test_the_first_read_fills_the_cache(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(BIG)
    with server(64 * MIB) as running, files(running, backing=str(tmp_path)) as opened, client(running.port) as sdk:
        assert opened.ls("", detail=False) == ["sub"]
        assert opened.find("") == ["sub/file"]
        assert opened.info("sub/file")["size"] == len(BIG)

        def puts() -> int:
            outcomes = sdk.stats()[running.service.info.server_id]["puts"]
            assert isinstance(outcomes, dict)
            return sum(outcomes.values())

        assert opened.cat_file("sub/file", 10, 20) == BIG[10:20]
        assert puts() == 1, "one block"
        assert opened.cat_file("sub/file") == BIG
        blocks = -(-len(BIG) // BLOCK_BYTES)
        assert puts() == blocks
        assert opened.cat_file("sub/file") == BIG
        assert puts() == blocks, "from now on it comes from the cache"
        with pytest.raises(PermissionError, match="change them there"):
            opened.pipe_file("sub/file", b"x")
        with pytest.raises(PermissionError):
            opened.rm("sub/file")
        with pytest.raises(FileNotFoundError):
            opened.cat_file("none")


@pytest.mark.parametrize("same_size", [True, False])
def test_a_backing_that_has_changed(tmp_path: Path, same_size: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(BIG)
    with server(64 * MIB) as running, files(running, backing=str(tmp_path)) as opened:
        assert opened.cat_file("file") == BIG
        with opened.open("file") as file:
            assert file.read(5) == BIG[:5]
            other = b"y" * (len(BIG) if same_size else 100)
            path.write_bytes(other)
            os.utime(path, (1, 1))
            assert opened.cat_file("file") == other
            assert file.read(5) == BIG[5:10], "the blocks of the version that was opened"
            opened._client.clear()
            with pytest.raises(OSError, match=r"has (changed|become shorter) while it was read"):
                file.read()


def test_any_file_system_can_be_behind(tmp_path: Path) -> None:
    memory = MemoryFileSystem()
    memory.pipe_file("/models/a/file", BIG)
    try:
        with server(64 * MIB) as running, files(running, backing="memory://models") as opened:
            assert opened.find("") == ["a/file"]
            assert opened.cat_file("a/file", -100) == BIG[-100:]
            memory.pipe_file("/models/a/file", b"new")
            assert opened.cat_file("a/file") == b"new"
    finally:
        memory.rm("/models", recursive=True)


def test_a_dead_cache_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BIG)
    with server(64 * MIB) as running, files(running, backing=str(tmp_path)) as opened:
        assert opened.cat_file("file", 0, 5) == BIG[:5]
        running.close()
        assert opened.cat_file("file") == BIG


def test_a_model_loads_through_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 900), torch.nn.ReLU(), torch.nn.Linear(900, 10))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with server(64 * MIB) as running:
        url = "gcache://model.safetensors"
        options = {"servers": f"127.0.0.1:{running.port}?timeout_s=20", "backing": str(tmp_path)}
        fsspec.register_implementation("gcache", GCacheFileSystem, clobber=True)
        for _ in range(2):  # the second time from the cache alone
            with fsspec.open(url, **options) as file:
                tensors = load(file.read())
                filesystem = file.fs
            loaded = torch.nn.Sequential(torch.nn.Linear(300, 900), torch.nn.ReLU(), torch.nn.Linear(900, 10))
            loaded.load_state_dict(tensors)
            x = torch.randn(3, 300)
            assert torch.equal(loaded(x), model(x))
        filesystem.close()


def test_fsspec_finds_it_by_name() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["fsspec.specs"]["gcache"].partition(":")
    assert getattr(importlib.import_module(module), name) is GCacheFileSystem
