"""Header of a GGUF file: metadata and tensor table, memory-mapped. Imports no torch.

`gguf.GGUFReader` builds several NumPy views per array element: opening Gemma 3 270M, whose vocabulary has 262,144
entries, takes it eleven seconds (`tests/model/test_gguf.py` compares the two readers). This one walks the header once
with `struct` and takes about a tenth of a second. The constants (types, block sizes) are the gguf library's.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from cygnet.base.errors import ModelLoadError

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}
_U64 = struct.Struct("<Q")
_MAX_DIMS = 4


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table. `shape` is row-major (slowest dimension first), as in PyTorch."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int

    def split(self) -> Iterator["GgufTensor"]:
        """The tensors that this one, of two dimensions or more, holds one after the other; they keep its name."""
        count, shape = self.shape[0], self.shape[1:]
        size = self.num_bytes // count
        return (GgufTensor(self.name, shape, self.type, self.offset + i * size, size) for i in range(count))


class GgufFile:
    """Metadata and tensors of one GGUF file, checked to lie within the file.

    `metadata` maps keys to str, int, float, bool, a NumPy array (numeric arrays) or a list of bytes (string arrays; not
    decoded, since vocabularies are large and may hold invalid UTF-8). `header_bytes` is where the tensors' data begins.
    Raises `ModelLoadError` naming `path` if the file can't be read, is not GGUF v2/v3, or is truncated.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            raise ModelLoadError(f"can't read GGUF file {self.path}: {error}") from None
        self._pos = 0
        self.header_bytes = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read_header()
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise ModelLoadError(
                f"GGUF file {self.path} is truncated or corrupt (near byte {self._pos} of {len(self._map)}): {error}; "
                "fetch the file again"
            ) from None

    def __contains__(self, key: object) -> bool:
        return key in self.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata value, or `default`."""
        return self.metadata.get(key, default)

    def require(self, key: str) -> Any:
        """Metadata value; `ModelLoadError` naming file and key if absent."""
        if key not in self.metadata:
            raise ModelLoadError(f"GGUF file {self.path} lacks the metadata key {key!r}; convert the model again")
        return self.metadata[key]

    def strings(self, key: str) -> list[str]:
        """A string array, decoded; bytes that are not UTF-8 become U+FFFD."""
        return [item.decode("utf-8", "replace") for item in self.require(key)]

    def raw(self, tensor: GgufTensor) -> np.ndarray:
        """The stored bytes of `tensor` as a read-only uint8 view, one row per row of the tensor."""
        flat = np.frombuffer(self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return flat.reshape(prod(tensor.shape[:-1]), -1)

    # -- header ------------------------------------------------------------------------------------------------------

    def _read_header(self) -> None:
        magic = self._take(4)
        if magic != b"GGUF":
            raise ValueError(f"it starts with {magic!r}, not with b'GGUF'")
        version = self._scalar("<u4")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} (or big-endian); versions 2 and 3, little-endian, are supported")
        num_tensors, num_keys = self._scalar("<u8"), self._scalar("<u8")
        for _ in range(num_keys):
            key = self._string().decode("utf-8")
            self.metadata[key] = self._value(self._scalar("<u4"))
        if self.metadata.get("split.count", 1) > 1:
            raise ModelLoadError(
                f"GGUF file {self.path} is one part of a split model; join the parts with `llama-gguf-split --merge`"
            )
        infos = list(self._tensor_infos(num_tensors))
        alignment = int(self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        start = -(-self._pos // alignment) * alignment
        self.header_bytes = start
        for name, shape, kind, offset in infos:
            self._add_tensor(name, shape, kind, start + offset)

    def _tensor_infos(self, count: int) -> Iterator[tuple[str, tuple[int, ...], GGMLQuantizationType, int]]:
        for _ in range(count):
            name = self._string().decode("utf-8")
            num_dims = self._scalar("<u4")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
            dims = [self._scalar("<u8") for _ in range(num_dims)]
            kind = GGMLQuantizationType(self._scalar("<u4"))
            yield name, tuple(reversed(dims)), kind, self._scalar("<u8")

    def _add_tensor(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int) -> None:
        block_size, type_size = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_size:
            raise ValueError(f"rows of tensor {name!r} ({shape[-1]} values) are no multiple of {kind.name}'s block")
        if not prod(shape):
            raise ValueError(f"tensor {name!r} of shape {shape} has no values")
        num_bytes = prod(shape) // block_size * type_size
        if offset + num_bytes > len(self._map):
            raise ValueError(f"tensor {name!r} would end at byte {offset + num_bytes}, beyond the end of the file")
        if name in self.tensors:
            raise ValueError(f"tensor {name!r} is listed twice")
        self.tensors[name] = GgufTensor(name, shape, kind, offset, num_bytes)

    def _value(self, kind: int) -> Any:
        value_type = GGUFValueType(kind)
        if value_type == GGUFValueType.STRING:
            return self._string().decode("utf-8", "replace")
        if value_type != GGUFValueType.ARRAY:
            return self._scalar(_SCALARS[value_type])
        item_type, count = GGUFValueType(self._scalar("<u4")), self._scalar("<u8")
        if item_type == GGUFValueType.STRING:
            return self._string_array(count)
        if item_type == GGUFValueType.ARRAY:
            return [self._value(GGUFValueType.ARRAY) for _ in range(count)]
        dtype = np.dtype(_SCALARS[item_type])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)

    def _string_array(self, count: int) -> list[bytes]:
        if count * _U64.size > len(self._map) - self._pos:
            raise ValueError(f"an array of {count} strings does not fit")
        data, pos, items = self._map, self._pos, []
        for _ in range(count):  # the hot loop: once per token of the vocabulary
            start = pos + 8
            pos = start + _U64.unpack_from(data, pos)[0]
            items.append(data[start:pos])
        self._pos = pos
        if pos > len(data):
            raise ValueError("a string runs beyond the end of the file")
        return items

    def _string(self) -> bytes:
        return self._take(self._scalar("<u8"))

    def _scalar(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        return np.frombuffer(self._take(kind.itemsize), dtype=kind)[0].item()

    def _take(self, count: int) -> bytes:
        end = self._pos + count
        if end > len(self._map):
            raise ValueError(f"{count} bytes expected, {len(self._map) - self._pos} left")
        chunk = self._map[self._pos : end]
        self._pos = end
        return chunk
