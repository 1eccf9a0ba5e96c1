"""A checkpoint in a GGUF file: dequantised tensors under Hugging Face names, layout and value conventions."""

import re
from collections.abc import Iterator
from importlib.metadata import version
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from cygnet.base.errors import ModelLoadError
from cygnet.model.checkpoint import StoredTensor
from cygnet.model.gguf_arch import Undo, gguf_arch
from cygnet.model.gguf_file import GgufFile, GgufTensor
from cygnet.model.weight_cache import file_identity

CHUNK_BYTES = 4 << 20
"""Stored bytes dequantised at a time: keeps fp32 temporaries at a few tens of MB, whatever the tensor's size."""
_JOINED_BYTES = 16 << 10
"""Stored bytes of the long rows that short ones are joined to (see `_values`)."""
_ROWS = 256
"""Chunks are whole multiples of so many rows, so that rows can be joined by powers of two."""

_EXPERT = "{e}"
_LAYER = re.compile(r"^blk\.(\d+)\.")
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GgufCheckpoint:
    """A `Checkpoint` over the GGUF file at `path`; tensors come out as `dtype` (bf16 or fp32).

    Raises `ModelLoadError` for an unreadable, truncated or unsupported file; the message names it.
    """

    def __init__(self, path: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float32, not {dtype}")
        self._file = GgufFile(path)
        self._arch = gguf_arch(self._file)
        self._dtype = dtype
        self._config = self._arch.config(self._file) | {"dtype": str(dtype).removeprefix("torch.")}
        self._names = {tensor.name: self._translate(tensor.name) for tensor in self._stored()}

    @property
    def config(self) -> dict[str, Any]:
        """The architecture's config.json, from the metadata."""
        return self._config

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored (quantised)."""
        return sum(tensor.num_bytes for tensor in self._stored())

    @property
    def identity(self) -> str:
        """The file, the dtype, and the version of the library that dequantises."""
        return f"{file_identity(self._file.path, header_bytes=self._file.header_bytes)} {self._dtype} {version('gguf')}"

    @property
    def is_quantised(self) -> bool:
        """Whether any tensor is stored in blocks."""
        return any(tensor.type not in _PLAIN for tensor in self._stored())

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield (Hugging Face name, tensor of the chosen dtype, bytes as stored), in the file's order."""
        for stored in self._stored():
            name, undo = self._names[stored.name]
            for index, tensor in enumerate(stored.split() if _EXPERT in name else [stored]):
                target = name.replace(_EXPERT, str(index))
                if undo is None:
                    yield target, load_tensor(self._file, tensor, self._dtype), tensor.num_bytes
                else:  # undo in fp32: bf16 can't hold a small norm weight plus one
                    weight = undo(load_tensor(self._file, tensor, torch.float32), self._config)
                    yield target, weight.to(self._dtype).contiguous(), tensor.num_bytes

    def _stored(self) -> Iterator[GgufTensor]:
        return (tensor for tensor in self._file.tensors.values() if tensor.name not in self._arch.ignored)

    def _translate(self, name: str) -> tuple[str, Undo | None]:
        layer = _LAYER.match(name)
        pattern = _LAYER.sub("blk.{i}.", name)
        if pattern not in self._arch.tensors:
            raise ModelLoadError(
                f"GGUF file {self._file.path}: tensor {name!r} has no place in a "
                f"{self._file.require('general.architecture')} model as Cygnet knows it; use the Hugging Face folder"
            )
        target, undo = self._arch.tensors[pattern]
        return (target.replace("{i}", layer[1]) if layer else target), undo


def load_tensor(file: GgufFile, tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """Dequantise `tensor` into new memory, chunk by chunk. Raises `ModelLoadError` for a type that can't be read."""
    out = torch.empty(tensor.shape, dtype=dtype)
    raw, rows = file.raw(tensor), out.view(-1, tensor.shape[-1])
    step = max(_ROWS, CHUNK_BYTES // raw.shape[1] // _ROWS * _ROWS)
    for start in range(0, len(rows), step):
        chunk = raw[start : start + step]
        try:
            values = _values(chunk, tensor.type)
        except NotImplementedError:
            raise ModelLoadError(
                f"GGUF file {file.path}: tensor {tensor.name!r} is quantised as {tensor.type.name}, "
                "which the gguf library can't read; use another quantisation, such as Q4_K_M or Q8_0"
            ) from None
        rows[start : start + step].copy_(values.view(-1, rows.shape[1]))
    return out


def _values(chunk: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    """Values of some stored rows [n, bytes]."""
    if kind in _PLAIN:
        return torch.frombuffer(bytearray(chunk.data), dtype=_PLAIN[kind])
    # A row is a whole number of blocks, so rows may be joined. The library works on 16 rows at a time, and on long
    # rows it is three to ten times as fast as on the short ones of a small model's embedding.
    joined = gcd(len(chunk), 1 << max(0, (_JOINED_BYTES // chunk.shape[1]).bit_length() - 1))
    with np.errstate(all="ignore"):  # an inf or NaN scale is the file's business: it arrives as inf or NaN
        return torch.from_numpy(dequantize(chunk.reshape(len(chunk) // joined, -1), kind))
