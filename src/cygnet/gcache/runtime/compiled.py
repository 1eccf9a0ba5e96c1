"""The compiled core: loops that move or find every byte, without the interpreter. All works without it, slower.

It is `_core`, built from `csrc/` when Cygnet is installed where there is a compiler. It hashes with the library that
the `xxhash` package brings, so that there is one implementation; where that does not offer its functions, or `_core` is
of another version than this file, Python does the work. `CYGNET_GCACHE_COMPILED=0` has it left alone.
"""

import ctypes
import os
from types import ModuleType

import xxhash

VERSION = 2
SWITCH = "CYGNET_GCACHE_COMPILED"


def _load() -> tuple[ModuleType | None, str]:
    """The core, or why there is none."""
    if os.environ.get(SWITCH) == "0":
        return None, f"{SWITCH}=0 in the environment"
    try:
        from cygnet.gcache.runtime import _core
    except ImportError as error:
        return None, f"it was not built ({error})"
    if _core.VERSION != VERSION:
        return None, f"it is of version {_core.VERSION}, this is for {VERSION}"
    try:
        library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]
        _core.use_xxh3(*_addresses(library))
    except (AttributeError, OSError, ValueError) as error:
        return None, f"the xxhash package does not offer its library ({error})"
    sample = bytes(range(256)) * 9
    if any(_core.xxh3(sample[:n], n) != xxhash.xxh3_64_intdigest(sample[:n], seed=n) for n in (0, 7, 200, 2304)):
        return None, "the xxhash package's library hashes otherwise than the package"
    return _core, ""


def _addresses(library: ctypes.CDLL) -> list[int]:
    """Of whole, create, free, reset, update, digest; those that choose by the CPU's vector units, where there are."""
    names = (
        ("XXH3_64bits_withSeed_dispatch", "XXH3_64bits_withSeed"),
        ("XXH3_createState",),
        ("XXH3_freeState",),
        ("XXH3_64bits_reset_withSeed",),
        ("XXH3_64bits_update_dispatch", "XXH3_64bits_update"),
        ("XXH3_64bits_digest",),
    )
    addresses = []
    for some in names:
        found = next((name for name in some if hasattr(library, name)), some[-1])
        addresses.append(ctypes.cast(getattr(library, found), ctypes.c_void_p).value or 0)
    return addresses


_found, WHY_NOT = _load()
"""Why there is no core; empty if there is one."""


def compiled_core(wanted: bool = True) -> ModuleType | None:
    """The core, if there is one and it is `wanted`."""
    return _found if wanted else None
