"""Weights that took long to compute, kept on disk: dequantised or rounded at one start, mapped at the next.

A file holds one model's tensors as they stand before they are packed for the CPU: packing takes less time than reading
what it makes would, and its layout fits one kind of CPU only. It is a safetensors file, so other tools can open it.

    8 bytes   length of the header
    header    JSON: per tensor dtype, shape and place; who wrote it; the checksum of header and data
    data      wide dtypes first, so that every tensor is aligned to its elements; starts on a page
"""

import json
import logging
import mmap
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from cygnet.base.units import format_bytes
from cygnet.model.bounded_folder import BoundedFolder, remove, touch
from cygnet.model.checkpoint import Progress
from cygnet.version import __version__

log = logging.getLogger("cygnet.model")

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "I8": torch.int8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_NO_CHECKSUM = "0" * 32
_PAGE = 4096
_CHUNK_BYTES = 64 << 20
_SAMPLE_BYTES = 64 << 10
_SAMPLES = 4


class _OtherVersionError(ValueError):
    """A file that was all right once."""


class WeightCache:
    """Files of assembled weights in `folder`.

    Nothing here fails a start: a file that is damaged, or of another version, is removed and counts as missing; what
    can't be kept is not kept. Either way the log says so.
    """

    def __init__(self, folder: BoundedFolder, *, progress: Progress | None = None) -> None:
        """`progress` is told while weights are written."""
        self._folder = folder
        self._progress = progress

    def load(self, identity: str, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """What was kept under `identity`, or `None`: tensors of the names, dtypes and shapes in `like`.

        They are views of the mapped file, whose pages processes share until they write to them.
        """
        path = self._path(identity)
        try:
            kept = _read(path, like)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("can't read the weights kept in %s: %s", path, error.strerror or error)
            return None
        except ValueError as error:
            level = logging.INFO if isinstance(error, _OtherVersionError) else logging.WARNING
            log.log(level, "removing the weights kept in %s, to be made anew: %s", path, error)
            remove(path)
            return None
        touch(path)
        log.info("weights mapped from %s (model.weight_cache)", path)
        return kept

    def store(self, identity: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep `tensors` under `identity`."""
        path = self._path(identity)
        header, ordered = _header(tensors)
        size = len(header) + sum(tensor.nbytes for tensor in ordered)
        reason = self._folder.make_room(size)
        if not reason:
            try:
                with self._folder.writing(path) as file:
                    digest = xxhash.xxh3_128()
                    done = 0
                    for chunk in _chunks(header, ordered):
                        digest.update(chunk)
                        done += file.write(chunk)
                        if self._progress is not None:
                            self._progress(done, size)
                    file.seek(0)
                    file.write(header.replace(_NO_CHECKSUM.encode(), digest.hexdigest().encode(), 1))
            except OSError as error:
                reason = f"{error.strerror or error} ({self._folder.path})"
        if reason:
            log.warning("weights are not kept, so the next start takes as long: %s", reason)
        else:
            log.info("weights kept in %s for the next start (%s)", path, format_bytes(size))

    def _path(self, identity: str) -> Path:
        return self._folder.place(xxhash.xxh3_128_hexdigest(identity.encode()))


def file_identity(path: Path, *, header_bytes: int = 0) -> str:
    """What changes whenever the file does: place, size, modification time, `header_bytes` of it and a few samples.

    Not all of the content: a start must not read a large checkpoint twice.
    """
    info = path.stat()
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        digest.update(file.read(header_bytes))
        for index in range(_SAMPLES):
            file.seek(max(0, info.st_size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{path.resolve()} {info.st_size} {info.st_mtime_ns} {digest.hexdigest()}"


@lru_cache
def _maker() -> str:
    """Names the version of the code that fills tensors and writes files: this package, as it stands."""
    digest = xxhash.xxh3_64()
    folder = Path(__file__).parent
    for source in sorted([*folder.glob("*.py"), *folder.glob("families/*.py")]):
        digest.update(source.read_bytes())
    return f"cygnet {__version__} {digest.hexdigest()}"


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[Tensor]]:
    """The file's first bytes, still without checksum, and the tensors in the order in which they follow."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    table: dict[str, Any] = {"__metadata__": {"maker": _maker(), "checksum": _NO_CHECKSUM}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        table[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in ordered]


def _chunks(header: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]


def _read(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the file at `path`. Raises `ValueError` if they are not what `_header` and `_chunks` wrote."""
    with path.open("rb") as file:
        # Private: who writes to a tensor, as a norm does to its weights, gets pages of his own.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    length = int.from_bytes(mapped[:8], "little")
    if length + 8 > len(mapped):
        raise ValueError("it is cut off")
    header = mapped[: length + 8]
    table = json.loads(header[8:])
    try:
        meta = table.pop("__metadata__")
        if meta["maker"] != _maker():
            raise _OtherVersionError(f"they are of another version ({meta['maker']})")
        digest = xxhash.xxh3_128(header.replace(meta["checksum"].encode(), _NO_CHECKSUM.encode(), 1))
        digest.update(memoryview(mapped)[len(header) :])
        if digest.hexdigest() != meta["checksum"]:
            raise ValueError("the checksum differs")
        kept = {name: _view(mapped, len(header), entry) for name, entry in table.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the header makes no sense ({error!r})") from None
    if {name: (t.dtype, t.shape) for name, t in kept.items()} != {name: (t.dtype, t.shape) for name, t in like.items()}:
        raise ValueError("they are not this model's")
    return kept


def _view(mapped: mmap.mmap, start: int, entry: Mapping[str, Any]) -> Tensor:
    dtype, (begin, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
    count = (end - begin) // dtype.itemsize
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + begin).view(entry["shape"])
