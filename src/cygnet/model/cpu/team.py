"""Runs kernels on torch's own OpenMP threads, so that no second pool of threads competes for the CPUs."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

Address = int
Launch = Callable[[Address, Address, int], None]
"""`launch(kernel, p, threads)` runs `kernel(p)` on that many threads at once, and returns when all are done."""

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _openmp_in_use() -> Any:
    """GOMP_parallel of the OpenMP library that this process has loaded (torch brings it), or `None`."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    names = dict.fromkeys(line.split()[-1] for line in lines if "omp" in line.rsplit("/", 1)[-1])
    found = [name for name in names if Path(name).name.startswith(("libgomp", "libiomp", "libomp"))]
    # With several in the process, torch's own is the one whose threads are warm.
    inside = str(Path(torch.__file__).parent)
    for name in sorted(found, key=lambda name: not name.startswith(inside)):
        try:
            return ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
    return None


@lru_cache
def find_launch() -> Launch | None:
    """How to start a kernel on several threads here; `None` if there is no way, and one thread must do."""
    parallel = _openmp_in_use()
    if parallel is None:
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return lambda kernel, p, threads: parallel(kernel, p, threads, 0)


@lru_cache
def openmp_start() -> Address:
    """Where GOMP_parallel is, for code that calls it without Python; 0 if there is none."""
    parallel = _openmp_in_use()
    return 0 if parallel is None else ctypes.cast(parallel, ctypes.c_void_p).value or 0


def caller_of(address: Address) -> Callable[[Address], None]:
    """`kernel(p)` on the calling thread."""
    return _FUNCTION(address)


def num_threads() -> int:
    """Threads that torch computes with, and so kernels too."""
    return torch.get_num_threads()
