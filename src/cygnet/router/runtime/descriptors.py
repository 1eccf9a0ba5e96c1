"""File descriptors: as many as the router needs, and whose fault it is when there are none left."""

import errno
import logging

try:
    import resource
except ImportError:  # there is no such limit on Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

SPARE = 256
"""For listeners, Redis, probes, followers and logs."""

OWN_FAULTS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""Why a connection can't be made that says nothing about whom it was to reach."""


def is_own_fault(error: BaseException) -> bool:
    """Whether it is this machine that lacks something, not the other side that failed."""
    return isinstance(error, OSError) and error.errno in OWN_FAULTS


def room_for_callers(wanted: int) -> int:
    """Raise the process's limit to what `wanted` connections of callers need, each with one to a worker, and return how
    many of them it allows: where it can't be raised so far, two thirds are callers', most of which wait at any time.
    """
    if resource is None:
        return wanted
    needed = 2 * wanted + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == unlimited or soft >= needed:
        return wanted
    fit = min(wanted, max(1, (soft - SPARE) * 2 // 3))
    if fit < wanted:
        log.warning(
            "server.max_connections = %d needs %d file descriptors and the limit is %d (ulimit -n): %d are let in",
            wanted,
            needed,
            soft,
            fit,
        )
    return fit
