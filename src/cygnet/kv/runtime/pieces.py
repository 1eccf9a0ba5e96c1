"""Copies of many pieces of memory by their addresses, without Python's lock."""

import ctypes
import logging
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
log = logging.getLogger("cygnet.kv")


def copy_pieces(targets: Ints, sources: Ints, sizes: Ints) -> None:
    """Copy `sizes[i]` bytes from address `sources[i]` to `targets[i]`; arrays of one shape. Pieces must not overlap.

    Other threads run meanwhile. The addresses are the caller's responsibility: whoever calls this has checked them.
    """
    targets, sources, sizes = (np.ascontiguousarray(array, dtype=np.int64) for array in (targets, sources, sizes))
    _copier()(targets, sources, sizes)


def prepare_copies() -> None:
    """Compile what `copy_pieces` needs, or read it from numba's cache: else the first copy takes most of a second."""
    _copier()


@lru_cache
def _copier() -> Callable[[Ints, Ints, Ints], None]:
    """One call for all pieces where numba works, else one per piece: as fast, but it takes Python's lock each time."""
    try:
        from cygnet.kv.runtime.copy_kernel import copy
    except Exception as error:
        # Whatever a compiler that is not there, or does not fit this machine or Python, raises.
        log.info("copies between tiers take one call per piece, as numba does not work here: %s", error)
        return _copy_each
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_int64)(copy.address)

    def copy_all(targets: Ints, sources: Ints, sizes: Ints) -> None:
        function(targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, targets.size)

    return copy_all


def _copy_each(targets: Ints, sources: Ints, sizes: Ints) -> None:
    for target, source, size in zip(targets.ravel(), sources.ravel(), sizes.ravel(), strict=True):
        ctypes.memmove(int(target), int(source), int(size))
