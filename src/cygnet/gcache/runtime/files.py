"""Files in the cache, as a file system of fsspec: `gcache://path`, on its own or in front of another one.

A file is cut into blocks of 1 MiB, each an object of its own, so that any range can be read and large files come over
many connections. Their keys are made from the file's name, its *stamp* and the block's number: blocks of another
version of the file are never mixed with these, they are just not found.

In front of a *backing* file system (a folder, or any URL that fsspec knows) names, sizes and stamps are the backing's,
asked for whenever a file is opened; the stamp is its size with its ETag, checksum or time of change. Blocks that are
missing are read there and put into the cache. Alone, what a file is called and how long it is are objects of the cache
too, and may be lost as any.
"""

import os
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.spec import AbstractBufferedFile
from xxhash import xxh3_128_digest

from cygnet.base.errors import ConfigError
from cygnet.gcache.record import CHUNK_BYTES, full_key
from cygnet.gcache.runtime.client import GCacheClient
from cygnet.gcache.runtime.connect import connect
from cygnet.gcache.runtime.store import parse_spec
from cygnet.kv.store import Outcome

BLOCK_BYTES = CHUNK_BYTES
FETCH_BLOCKS = 64
"""Read from the cache, or from the backing, with one call."""
STAMPS = ("ETag", "etag", "md5", "checksum", "mtime", "last_modified", "LastModified", "modified", "updated")
"""What file systems say of a file's version, the best first."""
DEFAULT_NAMESPACE = "files"
DEFAULT_TIMEOUT_S = 10.0


class Known(msgspec.Struct, frozen=True):
    """A file, as it was when it was looked at."""

    size: int
    stamp: str
    """Of its version, the only one of that size."""


class Listing(msgspec.Struct, frozen=True):
    """What has been put into a folder: names, and whether each is a folder."""

    names: dict[str, bool]


class GCacheFileSystem(AbstractFileSystem):
    """`servers`: as in the engine's spec, `HOST:PORT,...[?option=value]`. `backing`: folder or URL; without it, what is
    put is all there is.

    In front of a backing it can't be written to: change the backing. Alone, names in `ls` are kept per folder: of two
    processes that put into one folder at the same time one's may be left out of it, but both are found by name.

    Raises `FileNotFoundError`; `OSError` when a block is neither in the cache nor in the backing any more, when the
    backing's file changes while it is read, and when the cache takes no more.
    """

    protocol = "gcache"
    root_marker = ""

    def __init__(
        self,
        servers: str = "127.0.0.1",
        backing: str = "",
        namespace: str = DEFAULT_NAMESPACE,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        backing_options: dict[str, Any] | None = None,
        client: GCacheClient | None = None,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        self._client = client or connect(parse_spec(servers.removeprefix("gcache:")))
        self._timeout_s = timeout_s
        self._namespace = namespace.encode()
        self._backing: AbstractFileSystem | None = None
        self._backing_root = ""
        if backing:
            self._backing, self._backing_root = url_to_fs(backing, **(backing_options or {}))
        try:
            full_key(self._namespace, b"x")
        except ValueError as error:
            raise ConfigError(f"namespace {namespace[:40]!r}: {error}") from None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:  # type: ignore[override]
        path = super()._strip_protocol(path)
        return path.strip("/")

    def close(self) -> None:
        """Close the connections. fsspec makes another instance when it is asked for one with these options again."""
        type(self)._cache.pop(self._fs_token, None)
        self._client.close()

    # --- what there is

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size, type, and the stamp of a file."""
        path = self._strip_protocol(path)
        if self._backing is not None:
            return self._as_ours(self._backing.info(self._behind(path)))
        known = self._known(path)
        if known is not None:
            return {"name": path, "size": known.size, "type": "file", "stamp": known.stamp}
        if not path or self._listing(path).names:
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What is in a folder, or the file itself."""
        path = self._strip_protocol(path)
        if self._backing is not None:
            found = [self._as_ours(info) for info in self._backing.ls(self._behind(path), detail=True)]
        else:
            found = list(self._listed(path))
            if not found:
                found = [self.info(path)] if path else []
                found = [info for info in found if info["type"] == "file"]
        found.sort(key=lambda info: str(info["name"]))
        return found if detail else [info["name"] for info in found]

    def created(self, path: str) -> Any:
        """When the backing's file was made."""
        return self._behind_only("created").created(self._behind(self._strip_protocol(path)))

    def modified(self, path: str) -> Any:
        """When the backing's file was last changed."""
        return self._behind_only("modified").modified(self._behind(self._strip_protocol(path)))

    # --- reading

    def _open(self, path: str, mode: str = "rb", **options: Any) -> "GCacheFile":  # type: ignore[override]
        options.pop("block_size", None)
        options.pop("autocommit", None)
        options.pop("cache_options", None)
        if mode == "rb":
            return GCacheFile(self, path, self.known(path))
        if mode != "wb":
            raise ValueError(f"gcache files are opened as rb or wb, not {mode}")
        self._must_be_alone()
        return GCacheFile(self, path, None)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Bytes `start` to `end` of a file; negative ones count from its end."""
        path = self._strip_protocol(path)
        known = self.known(path)
        first, last, _step = slice(start, end).indices(known.size)
        return bytes(self.read_range(path, known, first, max(first, last)))

    def known(self, path: str) -> Known:
        """Size and stamp of a file as it is now."""
        info = self.info(path)
        if info["type"] != "file":
            raise IsADirectoryError(path)
        return Known(info["size"], info["stamp"])

    def read_range(self, path: str, known: Known, start: int, end: int) -> bytearray:
        """Bytes of a file that is `known`."""
        result = bytearray(end - start)
        if not result:
            return result
        view = memoryview(result)
        first, last = start // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        for begin in range(first, last, FETCH_BLOCKS):
            blocks = range(begin, min(begin + FETCH_BLOCKS, last))
            at = max(start, begin * BLOCK_BYTES)
            upto = min(end, blocks.stop * BLOCK_BYTES)
            self._read_blocks(path, known, blocks, view[at - start : upto - start], at)
        return result

    def _read_blocks(self, path: str, known: Known, blocks: range, target: memoryview, at: int) -> None:
        """Fill `target`, which begins at byte `at` of the file and ends in the last of these blocks."""
        sizes = [min(BLOCK_BYTES, known.size - block * BLOCK_BYTES) for block in blocks]
        views, edges = [], {}
        for block, size in zip(blocks, sizes, strict=True):
            begin = block * BLOCK_BYTES - at
            if begin >= 0 and begin + size <= len(target):
                views.append(target[begin : begin + size])
            else:  # only part of it is wanted
                edges[block] = memoryview(bytearray(size))
                views.append(edges[block])
        keys = [self._block_key(path, known.stamp, block) for block in blocks]
        outcomes = self._client.batch_get_into(keys, views, timeout_s=self._timeout_s)
        missing = [place for place, outcome in enumerate(outcomes) if outcome is not Outcome.OK]
        if missing:
            self._fill(path, known, [(blocks[place], keys[place], views[place]) for place in missing])
        for block, whole in edges.items():
            begin = block * BLOCK_BYTES - at
            first, last = max(0, -begin), min(len(whole), len(target) - begin)
            target[begin + first : begin + last] = whole[first:last]

    def _fill(self, path: str, known: Known, missing: list[tuple[int, bytes, memoryview]]) -> None:
        """Read blocks from the backing and put them into the cache."""
        if self._backing is None:
            raise OSError(f"part of gcache file {path!r} has left the cache; put the file again")
        behind = self._behind(path)
        for run in _runs(missing):
            first, last = run[0][0] * BLOCK_BYTES, run[-1][0] * BLOCK_BYTES + len(run[-1][2])
            data = memoryview(self._backing.cat_file(behind, first, last))
            if len(data) != last - first:
                raise OSError(f"{path!r} has become shorter while it was read; open it again")
            for block, _, view in run:
                at = block * BLOCK_BYTES - first
                view[:] = data[at : at + len(view)]
        if self.known(path) != known:
            raise OSError(f"{path!r} has changed while it was read; open it again")
        keys, views = [key for _, key, _ in missing], [view for _, _, view in missing]
        self._client.batch_put(keys, views, timeout_s=self._timeout_s)  # whatever comes of it, they have been read

    # --- writing

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Store a file."""
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        with self.open(path, "wb") as file:
            file.write(value)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Give up files; a folder's with `recursive`."""
        self._must_be_alone()
        for found in self.expand_path(path, recursive=recursive, maxdepth=maxdepth):
            if self.info(found)["type"] == "file":
                self.rm_file(found)

    def rm_file(self, path: str) -> None:
        """Give up a file."""
        self._must_be_alone()
        path = self._strip_protocol(path)
        known = self.known(path)
        blocks = range(-(-known.size // BLOCK_BYTES))
        keys = [self._file_key(path), *(self._block_key(path, known.stamp, block) for block in blocks)]
        self._client.remove(keys, timeout_s=self._timeout_s)
        self._note(path, there=False)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Nothing: folders are there when something is in them."""
        self._must_be_alone()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing, as `mkdir`."""
        self._must_be_alone()

    def rmdir(self, path: str) -> None:
        """Nothing: a folder goes with what is in it."""
        self._must_be_alone()

    def put_blocks(self, path: str, stamp: str, first: int, blocks: list[memoryview]) -> None:
        """Store blocks of a file that is being written, from number `first` on."""
        keys = [self._block_key(path, stamp, first + at) for at in range(len(blocks))]
        outcomes = self._client.batch_put(keys, blocks, timeout_s=self._timeout_s)
        self._expect_stored(outcomes, path)

    def finish(self, path: str, known: Known) -> None:
        """All blocks are stored: from now on the file is there."""
        self._store(self._file_key(path), memoryview(msgspec.json.encode(known)), path)
        self._note(path, there=True)

    def _store(self, key: bytes, data: memoryview, path: str) -> None:
        self._expect_stored([self._client.put(key, data, timeout_s=self._timeout_s)], path)

    def _expect_stored(self, outcomes: list[Outcome], path: str) -> None:
        wrong = next((outcome for outcome in outcomes if outcome is not Outcome.OK), None)
        if wrong is not None:
            raise OSError(f"gcache did not take {path!r}: {wrong.value}; is it full, or gone?")

    # --- names

    def _known(self, path: str) -> Known | None:
        found = self._client.get(self._file_key(path), timeout_s=self._timeout_s)
        return None if isinstance(found, Outcome) else msgspec.json.decode(found, type=Known)

    def _listing(self, folder: str) -> Listing:
        found = self._client.get(self._folder_key(folder), timeout_s=self._timeout_s)
        return Listing({}) if isinstance(found, Outcome) else msgspec.json.decode(found, type=Listing)

    def _listed(self, folder: str) -> Iterator[dict[str, Any]]:
        """What is in a folder and has not left the cache."""
        for name, is_folder in self._listing(folder).names.items():
            path = f"{folder}/{name}".lstrip("/")
            try:
                info = {"name": path, "size": 0, "type": "directory"} if is_folder else self.info(path)
            except FileNotFoundError:
                continue
            yield info

    def _note(self, path: str, *, there: bool) -> None:
        """Write down in each folder above a file that it is there, or not."""
        is_folder = False
        while path:
            folder, _, name = path.rpartition("/")
            names = dict(self._listing(folder).names)
            if there == (names.get(name) == is_folder):
                return
            if there:
                names[name] = is_folder
            else:
                names.pop(name, None)
            if names:
                self._store(self._folder_key(folder), memoryview(msgspec.json.encode(Listing(names))), folder)
            else:
                self._client.remove([self._folder_key(folder)], timeout_s=self._timeout_s)
            if names and not there:
                return
            path, is_folder = folder, True

    def _file_key(self, path: str) -> bytes:
        return self._key(b"f" + xxh3_128_digest(path.encode()))

    def _folder_key(self, path: str) -> bytes:
        return self._key(b"d" + xxh3_128_digest(path.encode()))

    def _block_key(self, path: str, stamp: str, block: int) -> bytes:
        where = f"{self._backing_root}\0{path}\0{stamp}".encode()
        return self._key(b"b" + xxh3_128_digest(where) + block.to_bytes(8, "little"))

    def _key(self, name: bytes) -> bytes:
        return full_key(self._namespace, name)

    # --- the backing

    def _behind(self, path: str) -> str:
        return f"{self._backing_root.rstrip('/')}/{path}" if path else self._backing_root

    def _behind_only(self, what: str) -> AbstractFileSystem:
        if self._backing is None:
            raise NotImplementedError(f"gcache files without a backing have no {what}()")
        return self._backing

    def _must_be_alone(self) -> None:
        if self._backing is not None:
            raise PermissionError(f"gcache files are those of {self._backing_root}: change them there")

    def _as_ours(self, info: dict[str, Any]) -> dict[str, Any]:
        """The backing's description of a file, under our name."""
        assert self._backing is not None
        behind = str(info["name"])
        root = self._backing_root.rstrip("/")
        ours = {"name": behind.removeprefix(root).strip("/"), "size": info.get("size") or 0, "type": info["type"]}
        if info["type"] == "file":
            stamp = next((str(info[name]) for name in STAMPS if info.get(name) is not None), None)
            ours["stamp"] = f"{ours['size']} {stamp if stamp is not None else self._backing.ukey(behind)}"
        return ours


class GCacheFile(AbstractBufferedFile):
    """An open file: read as it was when it was opened, or written and there once it is closed."""

    def __init__(self, fs: GCacheFileSystem, path: str, known: Known | None) -> None:
        self.known = known or Known(0, f"{time.time_ns():x}-{os.urandom(8).hex()}")
        size = None if known is None else known.size
        super().__init__(
            fs,
            fs._strip_protocol(path),
            "wb" if known is None else "rb",
            block_size=BLOCK_BYTES,
            cache_type="none",
            size=size,
        )
        self._num_blocks = 0
        self._rest = bytearray()

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.read_range(self.path, self.known, start, min(end, self.known.size)))

    def readinto(self, b: Any) -> int:
        """Read into memory."""
        view = memoryview(b).cast("B")
        end = min(self.known.size, self.loc + len(view))
        data = self.fs.read_range(self.path, self.known, self.loc, max(self.loc, end))
        view[: len(data)] = data
        self.loc += len(data)
        return len(data)

    def _initiate_upload(self) -> None:
        """Nothing: what is stored can't be found before `finish`."""

    def _upload_chunk(self, final: bool = False) -> bool:
        """Store the blocks that are complete, at the end all."""
        self._rest += self.buffer.getvalue()
        used = len(self._rest) if final else len(self._rest) // BLOCK_BYTES * BLOCK_BYTES
        with memoryview(self._rest) as view:
            blocks = [view[at : min(at + BLOCK_BYTES, used)] for at in range(0, used, BLOCK_BYTES)]
            self.fs.put_blocks(self.path, self.known.stamp, self._num_blocks, blocks)
            for block in blocks:
                block.release()
        self._num_blocks += len(blocks)
        del self._rest[:used]
        if final:
            self.fs.finish(self.path, Known(self.offset + self.buffer.tell(), self.known.stamp))
        return True


def _runs(blocks: list[tuple[int, bytes, memoryview]]) -> Iterator[list[tuple[int, bytes, memoryview]]]:
    """Blocks that follow each other."""
    run: list[tuple[int, bytes, memoryview]] = []
    for block in blocks:
        if run and block[0] != run[-1][0] + 1:
            yield run
            run = []
        run.append(block)
    if run:
        yield run
