"""The compiled kernels: found by name and dtype, compiled or read from the cache when first asked for."""

import hashlib
import importlib
import logging
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cygnet.model.cache_dir import default_cache_dir
from cygnet.model.cpu.team import caller_of, find_launch

log = logging.getLogger("cygnet.model")

SUFFIX = {torch.bfloat16: "bf16", torch.float32: "f32"}
"""Dtypes that kernels exist for."""

# Module and layout of p[2:] (q an integer or address, d a float) of each kernel.
_KERNELS = {
    "join": ("glue_kernels", "8q2d"),
    "heads": ("glue_kernels", "12qd"),
    "gated": ("glue_kernels", "6q"),
    "decode": ("attention_kernels", "18qdq"),
    "decode_narrow": ("attention_kernels", "18qdq"),
    "multiply_packed": ("linear_kernels", "9q"),
    "multiply_widened": ("linear_kernels", "9q"),
    "multiply_i8": ("linear_kernels", "12q"),
    "round_panels": ("linear_kernels", "7q"),
    "best": ("argmax_kernels", "6q"),
    "best_of_panels": ("argmax_kernels", "8q"),
    "round_head": ("screen_kernels", "7q"),
    "screen": ("screen_kernels", "12q"),
    "settle": ("screen_kernels", "13q"),
    "settle_widened": ("screen_kernels", "13q"),
    "program": ("program_kernel", "6q"),
    "chunks": ("chunk_kernels", "15qd"),
    "chunks_narrow": ("chunk_kernels", "15qd"),
    "write": ("chunk_kernels", "10q"),
    "write_narrow": ("chunk_kernels", "10q"),
}


@lru_cache
def numba_works() -> bool:
    """Whether kernels can be compiled (or read from the cache) and give the right result here."""
    try:
        _import_numba()
        x = torch.tensor([[3.0, 4.0, 1.0, 2.0]])
        out = torch.empty(1, 2)
        Kernel("gated", torch.float32)(1, x.data_ptr(), out.data_ptr(), 1, 2, 1, 0)
        want = torch.nn.functional.silu(x[:, :2]) * x[:, 2:]
        return bool(torch.allclose(out, want, atol=1e-5))
    except ImportError:
        return False
    except Exception as error:
        # Whatever a compiler that does not fit this machine or Python raises: torch does the work then.
        log.warning("numba is installed but does not work here, so plain torch is used: %s", error)
        return False


def _import_numba() -> None:
    """Import numba with its cache among Cygnet's own, apart for every state of the kernels' source.

    numba looks only at the file of a kernel itself to see whether the cache is stale, not at what that file imports.
    """
    import numba

    if not numba.config.CACHE_DIR:
        sources = sorted(Path(__file__).parent.glob("*.py"))
        state = hashlib.blake2b(b"".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()
        numba.config.CACHE_DIR = str(default_cache_dir() / "kernels" / state)


@lru_cache
def _compiled(name: str, dtype: torch.dtype) -> Any:
    module = importlib.import_module(f"cygnet.model.cpu.{_KERNELS[name][0]}")
    from cygnet.model.cpu.jit import compile_kernel

    return compile_kernel(getattr(module, f"{name}_{SUFFIX[dtype]}"))


def prepare(
    dtype: torch.dtype,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Compile the kernels for a dtype, or read them from the cache: some 15 s the first time, 0.1 s later.

    `progress` is called with (kernels done, in total). KV is in `dtype`, or in `kv_dtype`.
    """
    narrow = kv_dtype not in (None, dtype)
    for index, (name, (module, _)) in enumerate(_KERNELS.items()):
        progress(index, len(_KERNELS))
        if (f"{name}_narrow" in _KERNELS and narrow) or (name.endswith("_narrow") and not narrow):
            continue
        if hasattr(importlib.import_module(f"cygnet.model.cpu.{module}"), f"{name}_{SUFFIX[dtype]}"):
            _compiled(name, dtype)
    _compiled("program", torch.float32)
    progress(len(_KERNELS), len(_KERNELS))


Call = tuple[int, np.ndarray, int]
"""Address of a kernel, its `p`, and how many threads run it."""
_CALLS: list[list[Call]] = []


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Calls of kernels while it lasts, as they are made."""
    _CALLS.append([])
    try:
        yield _CALLS[-1]
    finally:
        _CALLS.pop()


@lru_cache
def kernel(name: str, dtype: torch.dtype) -> "Kernel":
    """The kernel of that name, made once: as everywhere here, one call at a time."""
    return Kernel(name, dtype)


class Kernel:
    """One kernel with room for the arguments of one call at a time."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._code = _compiled(name, dtype)
        self._call = caller_of(self._code.address)
        self._launch = find_launch()
        self._layout = struct.Struct("2q" + _KERNELS[name][1])
        self._block = np.zeros(self._layout.size // 8, dtype=np.int64)
        self._address = self._block.ctypes.data

    def __call__(self, threads: int, *values: int | float) -> None:
        """Run with these values of p[2:] on up to `threads` threads."""
        self._layout.pack_into(self._block.data, 0, 0, 0, *values)
        if _CALLS:
            _CALLS[-1].append((self._code.address, self._block.copy(), threads))
        if threads == 1 or self._launch is None:
            self._call(self._address)
        else:
            self._launch(self._code.address, self._address, threads)
